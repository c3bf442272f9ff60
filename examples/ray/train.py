"""Training on a Ray cluster: each Ray Train worker is a rank, and a group that lost one resumes where it stopped.

    python examples/ray/train.py --workers 2 --workspace /shared/runs/7

The workspace is a folder shared by all workers, or a URL such as s3://bucket/runs/7. Needs
``pip install 'ray[train]'``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from treadle import BaseTrainer, CheckpointingHook, parallelize, set_seed
from treadle.data import RankBatchSampler


class Fit(BaseTrainer):
    """Trainer of a small regression with dropout."""

    def build_data_loader(self) -> Any:
        x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(x, x.sum(1, keepdim=True))
        return DataLoader(data, batch_sampler=RankBatchSampler(data, global_batch_size=8, shuffle=True))

    def build_model(self) -> nn.Module:
        return parallelize(nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1)), "ddp")

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def build_hooks(self) -> list[Any]:
        return [CheckpointingHook(10, background=True)]

    def forward(self, input: Any) -> Any:
        x, y = input
        loss = nn.functional.mse_loss(self.model(x), y)
        return loss, {}, len(x)


def work(config: dict[str, Any]) -> None:
    """Train on one rank; Ray has started the process group."""
    import ray.train

    set_seed(0)
    trainer = Fit(config["steps"], workspace=config["workspace"], device=config.get("device"))
    trainer.train()
    ray.train.report({"step": trainer.step})


def main() -> None:
    import ray.train
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workspace", required=True)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    arguments = parser.parse_args()
    config = {"steps": arguments.steps, "workspace": arguments.workspace, "device": None if arguments.gpu else "cpu"}
    TorchTrainer(
        work,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpu),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main()
