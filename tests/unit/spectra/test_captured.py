"""Captured steps of ResidualMAE: the bits of eager ones, and the elimination that replaces the solvers on a GPU."""

from __future__ import annotations

import pytest
import torch

from treadle import load_weights
from treadle.spectra import ResidualMAE, SpectraTrainer, TrainerConfig, build_optimizer, residual

ROWS = (3 * torch.linspace(-1, 1, 256)[:, None] * torch.linspace(0.5, 2, 64)).sin()


def trained(folder, capture, *, tf32):
    torch.manual_seed(0)
    model = ResidualMAE(
        seq_len=64, d_model=32, num_layers=1, dim_feedforward=32, patch=8, rank=16, n_blocks=8, n_mask=6,
    )  # fmt: skip
    model.fit(ROWS)
    cfg = TrainerConfig(
        out_dir=folder, amp=False, device="cuda", selection="last", capture=capture, enable_tf32=tf32
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(ROWS, 64, shuffle=True)
    SpectraTrainer(model.cuda(), build_optimizer(model, lr=1e-3), loader, cfg=cfg, progress=False).fit(4)
    return load_weights(folder / "checkpoints" / "last.pt")


def test_elimination_solves_as_the_cholesky_factor_does():
    torch.manual_seed(0)
    half, right = torch.randn(5, 6, 6, dtype=torch.float64), torch.randn(5, 6, 9, dtype=torch.float64)
    matrix = half @ half.mT + torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(residual._eliminated(matrix, right), residual._half_solved(matrix, right))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tf32", [False, True])
def test_captured_steps_on_a_gpu_have_the_bits_of_eager_ones(tmp_path, tf32):
    eager, captured = (trained(tmp_path / str(capture), capture, tf32=tf32) for capture in (False, True))
    assert all(torch.equal(value, captured[name]) for name, value in eager.items())
