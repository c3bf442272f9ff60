"""Members with captured steps on streams of their own: the bits of the run alone, with dropout from the device."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from treadle import BaseTrainer, CheckpointingHook, EmaHook, TensorLoader, set_seed
from treadle.population import Population

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Fit(BaseTrainer):
    def __init__(self, seed, capture, width, **options):
        super().__init__(300, device="cuda", progress=False, capture=capture, grad_clip=1.0, **options)
        self.seed, self.width = seed, width

    def build_data_loader(self):
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(4096, 32, generator=generator), torch.randn(4096, 1, generator=generator)
        return TensorLoader(x, y, batch_size=32, shuffle=True, seed=self.seed, device="cuda", num_buffers=1)

    def build_model(self):
        layers = [nn.Linear(32, self.width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(self.width, 1)]
        return nn.Sequential(*layers).cuda()

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def build_hooks(self):
        return [EmaHook(0.9), CheckpointingHook(110)]

    def forward(self, batch):
        return (self.model(batch[0]) - batch[1]).square().mean(), {}


@pytest.mark.parametrize("capture", [True, False])
def test_members_on_streams_are_the_same_as_their_runs_alone(tmp_path, capture):
    made, usual, frozen = {}, gc.get_freeze_count(), []

    def make(seed, width, workspace):
        frozen.append(gc.get_freeze_count())
        made[seed] = Fit(seed, capture, width, workspace=workspace)
        return made[seed]

    settings = [{"seed": seed, "width": width} for seed, width in enumerate((64, 80, 96, 4096))]
    results = Population(make, settings, out=tmp_path / "all", progress=False).run()
    assert [row.status for row in results.rows] == ["finished"] * 4
    assert min(frozen) > 10_000  # garbage collections were short
    assert gc.get_freeze_count() <= usual
    first = made[0].data_loader.tensors
    assert all(one is two for one, two in zip(first, made[3].data_loader.tensors, strict=True))
    for row in results.rows:
        set_seed(row.settings["seed"])
        alone = Fit(capture=capture, workspace=tmp_path / row.name, **row.settings)
        alone.train()
        mine, theirs = made[row.settings["seed"]].model.state_dict(), alone.model.state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        logs = [(folder / "steps.jsonl").read_text() for folder in (tmp_path / "all" / row.name, tmp_path / row.name)]
        assert logs[0] == logs[1]
