"""Search over learning rates with Ray Tune; each trial has a workspace and resumes there when restarted.

    python examples/ray/tune.py --workspace /shared/runs/lr

Needs ``pip install 'ray[tune]'``. Without Ray, ``treadle.Population`` trains many runs at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from treadle import Trainer, set_seed

RATES = (0.003, 0.01, 0.03)


def report(trainer: Trainer, epoch: int, metrics: Mapping[str, Any]) -> None:
    """Report the validation loss of an epoch to Ray Tune."""
    from ray import tune

    tune.report({"eval_loss": metrics["eval_loss"], "epoch": epoch + 1})


def batches(seed: int) -> list[Any]:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(seed))
    return list(zip(x.split(8), x.sum(1, keepdim=True).split(8), strict=True))


def trial(config: dict[str, Any]) -> None:
    """Train with one learning rate."""
    set_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    folder = Path(config["workspace"], f"lr_{config['lr']:g}")
    trainer = Trainer(model, optimizer, nn.MSELoss(), device="cpu")
    trainer.train(batches(1), config["epochs"], batches(2), folder, callbacks=[report], resume_from="auto")


def main() -> None:
    from ray import tune

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workspace", required=True)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    space = {"lr": tune.grid_search(list(RATES)), "epochs": arguments.epochs, "workspace": arguments.workspace}
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        param_space=space,
        tune_config=tune.TuneConfig(metric="eval_loss", mode="min"),
    )
    best = tuner.fit().get_best_result()
    print(f"best: lr={best.config['lr']:g}, eval_loss={best.metrics['eval_loss']:.4g}")


if __name__ == "__main__":
    main()
