"""Block masks: counts, polarity, block edges, independence of rows, sources of randomness."""

from __future__ import annotations

import pytest
import torch

from treadle.spectra.masks import _first_by_draw, make_block_mask


@pytest.mark.parametrize(("n_blocks", "n_mask"), [(32, 16), (32, 0), (32, 32), (8, 3), (1, 1), (96, 95)])
def test_every_row_hides_exactly_its_share_in_whole_blocks(n_blocks: int, n_mask: int) -> None:
    mask = make_block_mask(50, 96, n_blocks, n_mask)
    assert mask.shape == (50, 96)
    assert mask.dtype == torch.bool
    assert mask.device.type == "cpu"
    assert mask.sum(dim=1).tolist() == [n_mask * 96 // n_blocks] * 50
    blocks = mask.view(50, n_blocks, 96 // n_blocks)
    assert torch.equal(blocks.all(dim=2), blocks.any(dim=2))


def test_blocks_are_drawn_uniformly_and_rows_independently() -> None:
    rows = 20_000
    hidden = make_block_mask(rows, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    # Binomial standard error of a frequency: sqrt(p (1 - p) / rows), about 0.0034.
    assert (hidden.double().mean(dim=0) - 3 / 8).abs().max() < 5 * 0.0035
    # Two different blocks hidden together: 3/8 * 2/7 in a draw without replacement.
    together = (hidden.double().T @ hidden.double()) / rows
    off_diagonal = together[~torch.eye(8, dtype=torch.bool)]
    assert (off_diagonal - 3 / 8 * 2 / 7).abs().max() < 5 * 0.0022
    # All 56 choices occur, and neighbouring rows agree no more often than by chance.
    assert hidden.unique(dim=0).shape[0] == 56
    agree = (hidden[1:] == hidden[:-1]).all(dim=1).double().mean()
    assert abs(agree.item() - 1 / 56) < 0.005


def test_one_seed_gives_one_mask_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first = make_block_mask(4, 64, 16, 8, generator=torch.Generator().manual_seed(3))
    again = make_block_mask(4, 64, 16, 8, generator=torch.Generator().manual_seed(3))
    other = make_block_mask(4, 64, 16, 8, generator=torch.Generator().manual_seed(4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_without_a_generator_the_global_cpu_generator_is_used() -> None:
    torch.manual_seed(11)
    first = make_block_mask(4, 64, 16, 8)
    second = make_block_mask(4, 64, 16, 8)
    torch.manual_seed(11)
    assert torch.equal(first, make_block_mask(4, 64, 16, 8))
    assert not torch.equal(first, second)


def test_empty_batch_is_legal() -> None:
    assert make_block_mask(0, 12, 4, 2).shape == (0, 12)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((2, 10, 4, 1), r"seq_len=10 must be a multiple of n_blocks=4.*divisors of 10"),
        ((2, 12, 4, 5), r"n_mask=5 must lie between 0 and n_blocks=4"),
        ((2, 12, 4, -1), r"n_mask=-1 must lie between 0 and n_blocks=4"),
        ((2, 12, 0, 0), r"n_blocks=0 must be 1 or more"),
        ((2, 0, 4, 0), r"seq_len=0 must be 1 or more"),
        ((-1, 12, 4, 0), r"batch_size=-1 must be 0 or more"),
    ],
)
def test_bad_sizes_are_named(args: tuple[int, int, int, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_block_mask(*args)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_seed_gives_the_same_mask_on_the_gpu() -> None:
    cpu = make_block_mask(9, 64, 16, 8, generator=torch.Generator().manual_seed(3))
    gpu = make_block_mask(9, 64, 16, 8, device="cuda", generator=torch.Generator().manual_seed(3))
    assert gpu.is_cuda
    assert torch.equal(cpu, gpu.cpu())
    with pytest.raises(ValueError, match=r"generator is on cuda"):
        make_block_mask(9, 64, 16, 8, generator=torch.Generator(device="cuda"))


@pytest.mark.parametrize(("blocks", "hidden"), [(16, 4), (4, 0), (4, 4), (32, 24), (1, 1)])
@pytest.mark.parametrize("rows", [0, 1, 64])
def test_the_smallest_draws_of_a_row_are_hidden(rows, blocks, hidden):
    mask = make_block_mask(rows, 64, blocks, hidden, generator=torch.Generator().manual_seed(3))
    draws = torch.rand(rows, blocks, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    chosen = torch.zeros(rows, blocks, dtype=torch.bool).scatter_(1, draws.argsort(dim=1)[:, :hidden], True)
    assert torch.equal(mask, chosen.repeat_interleave(64 // blocks, dim=1))


def test_equal_draws_hide_as_many_blocks_as_others():
    draws = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.1, 0.2, 0.2, 0.2], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    for count in range(5):
        assert _first_by_draw(draws, count).sum(axis=1).tolist() == [count] * 3
    assert _first_by_draw(draws, 2)[2].tolist() == [False, False, True, True]
