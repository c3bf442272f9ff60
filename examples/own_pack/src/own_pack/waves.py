"""A pack in which a small network learns noisy waves. All commands of treadle work on its runs."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treadle import BaseTrainer, set_seed
from treadle.data import TensorLoader
from treadle.hooks import BaseHook, CheckpointingHook
from treadle.runs.pack import Pack, Results, Run
from treadle.runs.report import Report, Table

Data = dict[str, dict[str, Tensor]]


@dataclass
class ModelConfig:
    """Settings of the network."""

    width: int = 32
    """Hidden units."""


@dataclass
class Settings:
    """All settings of ``treadle train waves``; ``KEY=VALUE`` sets them on the command line."""

    seed: int = 0
    steps: int = 400
    """Optimizer steps of the whole run."""
    batch_size: int = 16
    lr: float = 0.01
    threads: int | None = 1
    """Threads of torch on the CPU."""
    model: ModelConfig = field(default_factory=ModelConfig)


class WaveTrainer(BaseTrainer):
    """Trainer that fits y = sin(x) by least squares."""

    def __init__(self, run: Run[Settings], data: Data):
        config = run.config
        super().__init__(max_steps=config.steps, workspace=run.folder, device=run.device)
        self.run_settings, self.rows, self.pack_hooks = config, data["train"], run.hooks()

    def build_data_loader(self) -> TensorLoader:
        return TensorLoader(
            self.rows, batch_size=self.run_settings.batch_size, shuffle=True, seed=self.run_settings.seed
        )

    def build_model(self) -> nn.Module:
        width = self.run_settings.model.width
        return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1)).to(self.device)

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=self.run_settings.lr)

    def build_hooks(self) -> list[BaseHook]:
        saving = CheckpointingHook(50, exit_signals=(signal.SIGINT, signal.SIGTERM))
        return [*self.pack_hooks, saving]

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        error = self.model(batch["x"].to(self.device)) - batch["y"].to(self.device)
        return error.square().mean(), {"mae": error.abs().mean()}

    def predict_step(self, batch: Any) -> dict[str, Tensor]:
        return {"x": batch["x"], "y": batch["y"], "prediction": self.model(batch["x"].to(self.device))}


class WavePack(Pack[Settings, Data, WaveTrainer]):
    """The pack of ``treadle train waves``."""

    name = "waves"
    summary = "A small network on noisy waves."
    config = Settings
    example = "steps=800 model.width=64"
    free = ("steps", "threads")

    def prepare(self, run: Run[Settings]) -> Data:
        """Draw the waves."""
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(300, 1, generator=generator) * 6
        rows = {"x": x, "y": x.sin() + 0.1 * torch.randn(300, 1, generator=generator)}
        parts = {"train": slice(0, 200), "val": slice(200, 250), "test": slice(250, 300)}
        return {name: {key: value[part] for key, value in rows.items()} for name, part in parts.items()}

    def build(self, run: Run[Settings], data: Data) -> WaveTrainer:
        """Seed, and return the trainer."""
        set_seed(run.config.seed)
        return WaveTrainer(run, data)

    def fit(self, run: Run[Settings], data: Data, trainer: WaveTrainer) -> None:
        """Train to the last step, from the newest checkpoint if there is one."""
        trainer.train()

    def describe(self, run: Run[Settings], data: Data, trainer: WaveTrainer) -> dict[str, str]:
        """Return the lines of the start block."""
        return {"data": f"{len(data['train']['x'])} points", "schedule": f"{run.config.steps} steps"}

    def loader(self, run: Run[Settings], data: Data, split: str, *, batch_size: int | None, num_workers: int) -> Any:
        """Return the points of a split for evaluate and predict."""
        return TensorLoader(data[split], batch_size=batch_size or 50)

    def finish(self, run: Run[Settings], data: Data, trainer: WaveTrainer) -> Results:
        """Test the trained network."""
        found = {name: trainer.evaluate(TensorLoader(data[name], batch_size=50)) for name in ("val", "test")}
        return Results({"steps": trainer.step, **found})

    def report(self, metrics: Mapping[str, Any], out: Path) -> Report:
        """Return a table for the terminal and for page.html."""
        rows = [[f"step {metrics['steps']}", *(f"{metrics[name]['loss']:.4f}" for name in ("val", "test"))]]
        table = Table(["", "validation", "test"], rows, title="Mean squared error", width=12)
        return Report("Waves", "A network of two layers.", [table], files=["  metrics.json  page.html  run.json"])


PACK = WavePack()
