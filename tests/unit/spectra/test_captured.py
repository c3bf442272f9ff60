"""Captured steps of ResidualMAE: the bits of eager ones."""

from __future__ import annotations

import pytest
import torch

from treadle import load_weights
from treadle.spectra import ResidualMAE, SpectraTrainer, TrainerConfig, build_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS = (3 * torch.linspace(-1, 1, 256)[:, None] * torch.linspace(0.5, 2, 64)).sin()


@pytest.mark.parametrize("tf32", [False, True])
def test_captured_steps_of_the_residual_model_have_the_bits_of_eager_ones(tmp_path, tf32):
    def weights_of(capture):
        torch.manual_seed(0)
        model = ResidualMAE(seq_len=64, d_model=32, num_layers=1, dim_feedforward=32, patch=8, rank=16, n_blocks=8,
                            n_mask=6)  # fmt: skip
        model.fit(ROWS)
        loader = torch.utils.data.DataLoader(ROWS, 64, shuffle=True)
        folder = tmp_path / str(capture)
        cfg = TrainerConfig(
            out_dir=folder, amp=False, device="cuda", selection="last", capture=capture, enable_tf32=tf32
        )
        SpectraTrainer(model, build_optimizer(model.cuda(), lr=1e-3), loader, cfg=cfg, progress=False).fit(4)
        return load_weights(folder / "checkpoints" / "last.pt")

    eager, captured = weights_of(False), weights_of(True)
    assert all(torch.equal(value, captured[name]) for name, value in eager.items())
