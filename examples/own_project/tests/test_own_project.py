"""The project trains from its configuration, resumes after a stop to the bit, and predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_project import FatTrainer, QuantileTask
from torch import nn

from treadle import ConfigError, load_weights
from treadle.builder import build_trainer
from treadle.config import load_config

CONFIG = Path(__file__).parents[1] / "run.yaml"


def make(folder: Path, max_steps: int) -> FatTrainer:
    config: dict[str, Any] = load_config(CONFIG)
    config["trainer"] |= {"workspace": str(folder), "max_steps": max_steps, "device": "cpu"}
    config["hooks"][-1]["interval"] = 10
    trainer = build_trainer(config)
    assert isinstance(trainer, FatTrainer)
    return trainer


def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path) -> None:
    make(tmp_path / "straight", 30).train()
    make(tmp_path / "stopped", 20).train()
    resumed = make(tmp_path / "stopped", 30)
    resumed.train()
    assert resumed.resume_source is not None
    ends = [load_weights(tmp_path / name / "checkpoints/checkpoint_latest.pt") for name in ("straight", "stopped")]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    hardest = [(tmp_path / name / "hard.json").read_text() for name in ("straight", "stopped")]
    assert hardest[0] == hardest[1]
    assert hardest[0].count("step") == 5


def test_it_learns_and_predicts_bounds_in_their_order(tmp_path: Path) -> None:
    trainer = make(tmp_path, 100)
    trainer.train()
    assert trainer.evaluate(trainer.build_eval_data_loader())["loss"] < 0.2
    found = trainer.predict_step(next(iter(trainer.build_predict_data_loader())))
    assert (found["low"] <= found["high"]).float().mean() > 0.9


def test_the_median_is_the_absolute_error_halved() -> None:
    task = QuantileTask([0.5])
    losses = task.losses(torch.zeros(3, 1), torch.tensor([1.0, -2.0, 0.0]))
    assert torch.equal(losses, torch.tensor([0.5, 1.0, 0.0]))
    output = task.step(nn.Linear(1, 1), (torch.ones(3, 1), torch.ones(3)))
    assert output.loss is not None
    assert output.num_samples == 3


def test_quantiles_that_do_not_rise_are_refused() -> None:
    with pytest.raises(ConfigError, match="must rise"):
        QuantileTask([0.9, 0.1])
