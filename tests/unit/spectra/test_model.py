"""ChemoMAE: size, contract, what may influence its output, precision, faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import treadle
from treadle.spectra.losses import masked_mse
from treadle.spectra.model import ChemoMAE
from treadle.spectra.optim import build_optimizer
from treadle.spectra.preprocessing import SNVScaler
from treadle.spectra.task import SpectraTask

SPECTRA = Path(treadle.__path__[0]) / "datasets" / "spex_spectra.npz"


def small_model(**options: Any) -> ChemoMAE:
    torch.manual_seed(0)
    sizes = {
        "seq_len": 24,
        "d_model": 16,
        "nhead": 4,
        "num_layers": 2,
        "dim_feedforward": 32,
        "latent_dim": 5,
    }
    return ChemoMAE(**{**sizes, "n_blocks": 8, "n_mask": 3, **options})


class FirstChannels(ChemoMAE):
    """Shows the first channels, another number in each row."""

    def make_visible(self, batch_size: int, **options: Any) -> Tensor:
        return torch.arange(self.seq_len) < torch.arange(1, batch_size + 1)[:, None]


def test_masks_that_a_subclass_draws_are_used_as_they_are() -> None:
    torch.manual_seed(0)
    model = FirstChannels(
        seq_len=24, d_model=16, nhead=4, num_layers=1, dim_feedforward=32, latent_dim=5, n_blocks=8, n_mask=3
    ).eval()
    x = torch.randn(20, 24)
    x_recon, z, visible_mask = model(x)
    assert visible_mask.sum(dim=1).tolist() == list(range(1, 21))
    assert torch.equal(z, model(x, visible_mask)[1])
    output = SpectraTask(torch.device("cpu")).step(model, x)
    assert output.weight == float((~visible_mask).sum())
    assert torch.equal(output.loss, masked_mse(x_recon, x, ~visible_mask))


class NoCount(ChemoMAE):
    """With the forward pass that the specification names."""

    def forward(self, x: Tensor, visible_mask: Tensor | None = None) -> Any:
        return super().forward(x, visible_mask)


def test_a_forward_pass_of_ones_own_needs_no_further_arguments() -> None:
    torch.manual_seed(0)
    model = NoCount(
        seq_len=24, d_model=16, nhead=4, num_layers=1, dim_feedforward=32, latent_dim=5, n_blocks=8, n_mask=3
    )
    assert SpectraTask(torch.device("cpu")).step(model, torch.randn(4, 24)).weight == 4 * 9


class Counted(ChemoMAE):
    """With a forward pass of its own that takes a mask which is counted."""

    takes_counted_mask = True
    given: list[Any]

    def forward(self, x: Tensor, visible_mask: Tensor | None = None, *, visible_count: int | None = None) -> Any:
        self.given.append((visible_mask, visible_count))
        return super().forward(x, visible_mask, visible_count=visible_count)


class Silent(Counted):
    """With another one, and it says nothing about masks."""

    def forward(self, x: Tensor) -> Any:
        return ChemoMAE.forward(self, x)


def test_a_forward_pass_of_ones_own_is_given_the_mask_if_its_class_says_so() -> None:
    sizes = {"seq_len": 24, "d_model": 16, "nhead": 4, "num_layers": 1, "dim_feedforward": 32, "n_blocks": 8}
    losses = []
    for kind in (ChemoMAE, Counted, Silent):
        torch.manual_seed(0)
        model = kind(**sizes, n_mask=3)
        model.given = given = []
        losses.append(SpectraTask(torch.device("cpu")).step(model, torch.randn(4, 24)).loss)
        if kind is Counted:
            ((visible_mask, count),) = given
            assert visible_mask.sum(1).tolist() == [count] * 4
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


def ragged_mask(rows: int) -> Tensor:
    visible = torch.rand(rows, 24, generator=torch.Generator().manual_seed(5)) < 0.5
    visible[0], visible[1] = True, False
    return visible


def test_parameter_count_at_the_defaults() -> None:
    model = ChemoMAE(seq_len=256)
    assert sum(param.numel() for param in model.parameters()) == 3_257_856
    assert (model.n_blocks, model.n_mask, model.latent_dim, model.seq_len) == (32, 16, 64, 256)
    fixed = ChemoMAE(seq_len=256, use_learnable_pos=False)
    assert sum(param.numel() for param in fixed.parameters()) == 3_257_856 - 256 * 256


def test_start_values_of_cls_and_positions() -> None:
    torch.manual_seed(0)
    model = ChemoMAE(seq_len=256)
    positions, cls = model.encoder.pos_embed.detach(), model.encoder.cls_token.detach()
    assert positions.std().item() == pytest.approx(0.02, rel=0.02)
    assert cls.std().item() == pytest.approx(0.02, rel=0.2)
    assert abs(positions.mean().item()) < 5e-4
    # A uniform draw of the same spread would have a fourth moment of 1.8, not 3.
    assert (positions / 0.02).pow(4).mean().item() == pytest.approx(3.0, rel=0.1)


def test_layers_start_different_and_bias_free_where_asked() -> None:
    model = small_model()
    first, second = model.encoder.layers
    assert not torch.equal(first.in_proj.weight, second.in_proj.weight)
    assert model.decoder.bias is None
    assert model.encoder.to_latent.bias is None
    assert model.encoder.token_proj.bias is None
    assert model.decoder.weight.shape == (24, 5)


def test_forward_returns_reconstruction_latent_and_the_mask_that_was_used() -> None:
    model = small_model().eval()
    x = torch.randn(6, 24)
    x_recon, z, visible = model(x)
    assert (x_recon.shape, z.shape, visible.shape) == ((6, 24), (6, 5), (6, 24))
    assert visible.dtype == torch.bool
    assert visible.sum(dim=1).tolist() == [24 - 3 * 3] * 6
    assert torch.allclose(z.norm(dim=1), torch.ones(6), atol=1e-6)
    assert torch.allclose(x_recon, z @ model.decoder.weight.T, atol=1e-6)
    again, z_again, same = model(x, visible)
    assert torch.equal(again, x_recon)
    assert torch.equal(z_again, z)
    assert torch.equal(same, visible)
    assert torch.equal(model.encoder(x, visible), z)
    assert torch.equal(model.reconstruct(x, visible), x_recon)


@pytest.mark.parametrize("n_mask", [0, 1, 8])
def test_n_mask_of_the_call_wins(n_mask: int) -> None:
    model = small_model().eval()
    x = torch.randn(4, 24)
    _, z, visible = model(x, n_mask=n_mask)
    assert (~visible).sum(dim=1).tolist() == [3 * n_mask] * 4
    assert torch.allclose(z, model.encoder(x, visible), atol=1e-6)
    assert model.make_visible(7, n_mask=n_mask).sum().item() == 7 * (24 - 3 * n_mask)
    assert model.reconstruct(x, n_mask=n_mask).shape == (4, 24)


def test_masks_follow_the_generator_or_the_global_one() -> None:
    model = small_model().eval()
    x = torch.randn(4, 24)

    def drawn(seed: int) -> Tensor:
        visible: Tensor = model(x, generator=torch.Generator().manual_seed(seed))[2]
        return visible

    before = torch.get_rng_state()
    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(drawn(1), model.make_visible(4, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(9)
    first = model(x)[2]
    torch.manual_seed(9)
    assert torch.equal(first, model.make_visible(4))


@pytest.mark.parametrize("poison", [1e6, float("nan"), float("inf")])
def test_hidden_values_influence_neither_output_nor_gradient(poison: float) -> None:
    model = small_model().eval()
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    visible = ragged_mask(6)
    visible[:, -1] = False  # the channel that padding points at
    poisoned = torch.where(visible, x, poison)
    results = []
    for batch in (x, poisoned):
        model.zero_grad()
        x_recon, z, _ = model(batch, visible)
        (x_recon.sum() + z[:, 0].sum()).backward()
        results.append((x_recon, z, [param.grad for param in model.parameters()]))
    (recon_a, z_a, grads_a), (recon_b, z_b, grads_b) = results
    assert torch.equal(recon_a, recon_b)
    assert torch.equal(z_a, z_b)
    for left, right in zip(grads_a, grads_b, strict=True):
        assert left is not None
        assert torch.equal(left, right)


def test_visible_values_do_influence_the_latent() -> None:
    model = small_model().eval()
    x = torch.randn(1, 24)
    visible = torch.ones(1, 24, dtype=torch.bool)
    z = model.encoder(x, visible)
    for channel in range(24):
        changed = x.clone()
        changed[0, channel] += 3.0
        assert (model.encoder(changed, visible) - z).norm() > 1e-5


def test_eval_output_is_deterministic_and_rows_are_independent() -> None:
    model = small_model().eval()
    x = torch.randn(9, 24)
    visible = ragged_mask(9)
    x_recon, z, _ = model(x, visible)
    assert torch.equal(model(x, visible)[0], x_recon)
    for row in range(9):
        alone_recon, alone_z, _ = model(x[row : row + 1], visible[row : row + 1])
        assert (alone_recon - x_recon[row]).abs().max() < 1e-5
        assert (alone_z - z[row]).abs().max() < 1e-5
    order = torch.randperm(9)
    assert (model(x[order], visible[order])[1] - z[order]).abs().max() < 1e-5


def test_training_and_eval_agree_without_dropout() -> None:
    model = small_model(dropout=0.0)
    x, visible = torch.randn(4, 24), ragged_mask(4)
    trained = model.train()(x, visible)[0]
    with torch.no_grad():
        evaluated = model.eval()(x, visible)[0]
    assert torch.equal(trained, evaluated)
    dropping = small_model(dropout=0.3).train()
    assert not torch.equal(dropping(x, visible)[0], dropping(x, visible)[0])


def test_no_visible_token_and_no_row_are_legal() -> None:
    model = small_model().eval()
    x = torch.randn(3, 24)
    for x_recon, z, visible in (model(x, n_mask=8), model(x, torch.zeros(3, 24, dtype=torch.bool))):
        assert not visible.any()
        assert torch.allclose(z.norm(dim=1), torch.ones(3), atol=1e-6)
        assert torch.allclose(z, z[:1].expand(3, -1), atol=1e-6)
        x_recon.sum().backward()
    assert model(x[:0])[1].shape == (0, 5)
    assert model(x[:0], torch.zeros(0, 24, dtype=torch.bool))[0].shape == (0, 24)


def test_every_parameter_gets_a_gradient() -> None:
    model = small_model()
    x = torch.randn(4, 24)
    x_recon, _, visible = model(x)
    masked_mse(x_recon, x, ~visible).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.abs().sum() > 0, name


def test_bfloat16_autocast_keeps_the_latent_on_the_sphere() -> None:
    model = small_model().eval()
    x, visible = torch.randn(4, 24), ragged_mask(4)
    expected = model(x, visible)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x_recon, z, _ = model(x, visible)
    assert x_recon.dtype == torch.bfloat16
    assert z.dtype == torch.float32
    assert torch.allclose(z.norm(dim=1), torch.ones(4), atol=1e-6)
    assert (z - expected).abs().max() < 0.05
    masked_mse(x_recon, x, ~visible).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_model_of_another_dtype(dtype: torch.dtype) -> None:
    model = small_model().to(dtype).eval()
    x_recon, z, _ = model(torch.randn(4, 24))
    assert x_recon.dtype == dtype
    assert z.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(z.norm(dim=1), torch.ones(4, dtype=z.dtype), atol=1e-6)


def test_odd_width_with_sine_positions() -> None:
    model = small_model(d_model=15, nhead=3, use_learnable_pos=False).eval()
    assert model(torch.randn(2, 24))[0].isfinite().all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"seq_len": 25}, r"seq_len=25 must be a multiple of n_blocks=8"),
        ({"n_mask": 9}, r"n_mask=9 must lie between 0 and n_blocks=8"),
        ({"n_mask": -1}, r"n_mask=-1 must lie between 0 and n_blocks=8"),
        ({"d_model": 18}, r"d_model=18 must be a multiple of nhead=4"),
        ({"num_layers": 0}, r"num_layers=0: must be at least 1"),
        ({"latent_dim": 0}, r"latent_dim=0: must be at least 1"),
        ({"dropout": 1.5}, r"dropout"),
    ],
)
def test_construction_faults_are_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        small_model(**options)


def test_call_faults_are_named() -> None:
    model = small_model()
    x = torch.randn(4, 24)
    with pytest.raises(ValueError, match=r"x has shape \(24,\) but must be \(B, 24\)"):
        model(x[0])
    with pytest.raises(ValueError, match=r"x has shape \(4, 23\) but must be \(B, 24\)"):
        model(x[:, 1:])
    with pytest.raises(ValueError, match=r"x has shape \(4, 1, 24\)"):
        model.reconstruct(x[:, None])
    with pytest.raises(ValueError, match=r"visible_mask has shape \(24,\).*\(4, 24\) of x"):
        model(x, torch.ones(24, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"dtype torch.float32 but must be bool"):
        model(x, torch.ones(4, 24))
    with pytest.raises(ValueError, match=r"dtype torch.int64 but must be bool"):
        model.encoder(x, torch.ones(4, 24, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"n_mask=9 must lie between 0 and n_blocks=8"):
        model(x, n_mask=9)
    with pytest.raises(ValueError, match=r"n_mask=-1 must lie"):
        model.make_visible(2, n_mask=-1)


def test_training_on_real_spectra_beats_the_row_mean() -> None:
    with np.load(SPECTRA) as data:
        raw = data["X"][::8]
    x = torch.from_numpy(SNVScaler().transform(raw.astype(np.float32)))
    row_mean = masked_mse(torch.zeros_like(x), x, torch.ones_like(x, dtype=torch.bool)).item()
    assert row_mean == pytest.approx(255 / 256, abs=1e-4)
    torch.manual_seed(0)
    model = ChemoMAE(seq_len=256, d_model=32, nhead=2, num_layers=1, dim_feedforward=64, dropout=0.0, latent_dim=16)
    visible = model.make_visible(len(x), generator=torch.Generator().manual_seed(0))

    def score() -> float:
        with torch.no_grad():
            return masked_mse(model(x, visible)[0], x, ~visible).item()

    start = score()
    optimizer = build_optimizer(model, lr=3e-3)
    for _ in range(60):
        batch = x[torch.randint(len(x), (64,))]
        x_recon, _, seen = model(batch)
        optimizer.zero_grad()
        masked_mse(x_recon, batch, ~seen).backward()
        optimizer.step()
    assert start > 0.9 * row_mean
    assert score() < 0.5 * row_mean


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_with_drawn_masks_never_makes_the_host_wait() -> None:
    model = small_model().cuda()
    optimizer = build_optimizer(model)
    x = torch.randn(8, 24, device="cuda")
    for waits_are_errors in (False, True):  # the first pass sets up libraries, which may wait
        torch.cuda.set_sync_debug_mode("error" if waits_are_errors else "default")
        try:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                x_recon, _, visible = model(x)
            masked_mse(x_recon, x, ~visible).backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_agrees_with_the_cpu_and_with_itself_while_captured() -> None:
    model = small_model().eval()
    x, visible = torch.randn(9, 24), ragged_mask(9)
    expected = model(x, visible)[1]
    model.cuda()
    x, visible = x.cuda(), visible.cuda()
    eager = model(x, visible)[1]
    assert (eager.cpu() - expected).abs().max() < 1e-4
    stream = torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(stream):
            model(x, visible)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x, visible)[1]
    graph.replay()
    torch.cuda.synchronize()
    assert (captured - eager).abs().max() < 1e-4
