"""Positions of the loss terms: how many, which, how evenly drawn, how they are laid out and sent."""

from __future__ import annotations

import pytest
import torch

from astro_kit import random_case, tiny_vocab
from treadle.astro import build_vocab_spec, choose_positions, sample_positions


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_up_to_k_positions_all_are_taken_and_nothing_is_drawn():
    mask = torch.tensor([[True, False, True], [False, True, True]])
    generator = seeded()
    before = generator.get_state()
    for k in (4, 5):
        assert sample_positions(mask, k, generator).tolist() == [0, 2, 4, 5]
    assert torch.equal(generator.get_state(), before)
    assert sample_positions(torch.zeros(2, 3, dtype=torch.bool), 1).tolist() == []


def test_k_different_true_positions_are_drawn_in_ascending_order():
    mask = torch.rand(20, 30, generator=seeded()) < 0.5
    drawn = sample_positions(mask, 50, seeded(1))
    assert drawn.dtype == torch.long
    assert len(drawn) == 50
    assert bool((drawn.diff() > 0).all())
    assert bool(mask.flatten()[drawn].all())
    assert torch.equal(drawn, sample_positions(mask, 50, seeded(1)))
    assert not torch.equal(drawn, sample_positions(mask, 50, seeded(2)))


def test_the_global_generator_is_used_when_none_is_given():
    mask = torch.ones(10, 10, dtype=torch.bool)
    torch.manual_seed(3)
    first = sample_positions(mask, 5)
    assert not torch.equal(first, sample_positions(mask, 5))
    torch.manual_seed(3)
    assert torch.equal(first, sample_positions(mask, 5))


def test_every_position_is_equally_likely():
    mask = torch.zeros(5, 8, dtype=torch.bool)
    mask[:, ::2] = True
    generator, draws, k = seeded(0), 2000, 6
    hits = torch.zeros(40)
    for _ in range(draws):
        hits[sample_positions(mask, k, generator)] += 1
    hits = hits[mask.flatten()]
    expected = draws * k / 20
    # Without replacement the variance of a count is expected·(1 - k/20): the statistic is scaled to chi² with 19
    # degrees of freedom, of which 43.8 is exceeded once in a thousand.
    statistic = float(((hits - expected) ** 2 / expected).sum()) / (1 - k / 20) * 19 / 20
    assert 5 < statistic < 43.8


@pytest.mark.parametrize(
    ("mask", "k", "message"),
    [(torch.ones(2, 2, dtype=torch.bool), 0, "sample_k=0"), (torch.ones(2, 2), 1, "mask has dtype torch.float32")],
)
def test_a_wrong_mask_or_number_is_refused(mask, k, message):
    with pytest.raises(ValueError, match=message):
        sample_positions(mask, k)


def laid_out(positions):
    """Every (term, row, code) of the blocks."""
    found = []
    for block in positions.blocks:
        groups = torch.arange(len(block.rows_GM))[:, None].expand_as(block.rows_GM).flatten()
        for slot in block.filled.tolist():
            group, code = int(groups[slot]), int(block.codes_GM.flatten()[slot])
            term = block.terms[group % len(block.terms)]
            id = block.first_id + group * block.num_ids + code
            found.append((term, int(block.rows_GM.flatten()[slot]), id))
    return found


@pytest.mark.parametrize("free_slots", [0, 256])
def test_each_position_is_laid_out_once_with_its_own_id(monkeypatch, free_slots):
    monkeypatch.setattr("treadle.astro.sampling._FREE_SLOTS", free_slots)
    vocab, targets, *_ = random_case(batch=(4, 80))
    targets[(targets >= 17) & (targets < 22)] = 13  # one scalar column is empty and another one crowded
    positions = choose_positions(targets, vocab)
    found = laid_out(positions)
    flat = targets.flatten()
    assert all(int(flat[row]) == id for _, row, id in found)
    assert sorted(row for _, row, _ in found) == (flat >= 5).nonzero().flatten().tolist()
    for term, count in positions.counts.items():
        assert count == (sum(one == term for one, _, _ in found) if term != "ce" else int((flat > 0).sum()))
    for block in positions.blocks:
        assert int((block.codes_GM >= 0).sum()) == len(block.filled)
        real = block.rows_GM.flatten()[block.filled]
        assert set(block.rows_GM.flatten().tolist()) == set(real.tolist()), "an empty slot repeats a drawn position"


def test_blocks_waste_at_most_half_of_their_slots_however_uneven_the_columns():
    vocab = build_vocab_spec(2, 50 * 8, 2, ["a"], scalar_bins=8)
    columns = torch.cat([torch.zeros(3000, dtype=torch.long), torch.randint(0, 50, (500,), generator=seeded())])
    positions = choose_positions(vocab.base_scalar + columns * 8, vocab, {"weight_image": 0, "weight_spectrum": 0})
    slots = sum(block.codes_GM.numel() for block in positions.blocks)
    assert positions.counts["sca"] == 3500
    assert slots <= 2 * 3500 + 256 * len(positions.blocks)
    assert len(positions.blocks) <= 4


def test_a_term_that_is_off_draws_nothing_and_counts_nothing():
    vocab, targets, *_ = random_case(batch=(4, 80))
    generator = seeded()
    positions = choose_positions(targets, vocab, {"enabled": False, "sample_k": 3}, use_ce=False, generator=generator)
    assert set(positions.counts.values()) == {0}
    assert positions.terms == []
    assert torch.equal(generator.get_state(), seeded().get_state())
    only_image = choose_positions(
        targets, vocab, {"sample_k": 3, "weight_scalar": 0, "weight_spectrum": 0}, generator=seeded()
    )
    everything = choose_positions(targets, vocab, {"sample_k": 3}, generator=seeded())
    assert torch.equal(only_image.blocks[0].rows_GM, everything.blocks[0].rows_GM)


def test_a_group_gets_at_least_one_position():
    vocab, targets, *_ = random_case(batch=(4, 80))
    counts = choose_positions(targets, vocab, {"sample_k": 1}).counts
    assert [counts[term] for term in ("img", "sca", "spec/a", "spec/b", "spec/c")] == [1, 1, 1, 1, 1]


def test_a_vocabulary_without_spectra_has_no_spectrum_term():
    vocab = build_vocab_spec(2, 4, 2, [], scalar_bins=2)
    assert choose_positions(torch.tensor([[5, 8]]), vocab).counts == {"ce": 2, "img": 1, "sca": 1}


def test_positions_move_to_a_device_whole():
    vocab, targets, *_ = random_case(batch=(4, 80))
    positions = choose_positions(targets, vocab)
    assert positions.to("cpu") is positions
    moved = positions.to("meta")
    assert moved.counts == positions.counts
    assert {t.device.type for b in moved.blocks for t in (b.rows_GM, b.codes_GM, b.filled)} == {"meta"}
    assert [b.rows_GM.shape for b in moved.blocks] == [b.rows_GM.shape for b in positions.blocks]
    assert moved.ce_rows.shape == positions.ce_rows.shape


def test_all_rows_count_in_the_cross_entropy_when_there_is_no_padding():
    assert choose_positions(torch.tensor([[1, 5]]), tiny_vocab()).ce_rows is None
    assert choose_positions(torch.tensor([[1, 0, 5]]), tiny_vocab()).ce_rows.tolist() == [0, 2]
