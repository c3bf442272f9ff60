"""PyTorch's DCGAN example on 8x8 digits: two models and two optimizers, each with one step per batch.

The generator's optimizer is the trainer's; the discriminator's is stepped in ``forward``. Both, and the discriminator
itself, are in every checkpoint, since they are attributes of the trainer with a ``state_dict``.

    python examples/ports/gan.py --max-steps 500
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle

bce = nn.functional.binary_cross_entropy_with_logits


def generator(noise: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(noise, 2 * width, 4, 1, 0, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.ConvTranspose2d(2 * width, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def discriminator(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
        nn.Conv2d(width, 1, 4, 1, 0, bias=False), nn.Flatten(0),
    )  # fmt: skip


class Gan(treadle.BaseTrainer):
    noise, width = 16, 32

    def build_data_loader(self):
        images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        return DataLoader(TensorDataset(images), batch_size=64, shuffle=True, drop_last=True)

    def build_model(self):
        self.judge = discriminator(self.width).to(self.device)
        self.judge_optimizer = torch.optim.Adam(self.judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
        return generator(self.noise, self.width).to(self.device)

    def build_optimizer(self):
        return torch.optim.Adam(self.model.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def build_hooks(self):
        return [treadle.ProgressHook(50, with_records=True), treadle.CheckpointingHook(100, exit_signals=[2, 15])]

    def forward(self, batch):
        real = batch[0].to(self.device)
        fake = self.model(torch.randn(len(real), self.noise, 1, 1, device=self.device))
        on_real, on_fake = self.judge(real), self.judge(fake.detach())
        judged = bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))
        self.judge_optimizer.zero_grad()
        judged.backward()
        self.judge_optimizer.step()
        verdict = self.judge(fake)
        records = {"loss_d": judged, "d_real": on_real.sigmoid().mean(), "d_fake": on_fake.sigmoid().mean()}
        return bce(verdict, torch.ones_like(verdict)), {name: value.detach() for name, value in records.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=500)
    parser.add_argument("--out", default="runs/gan")
    args = parser.parse_args()
    treadle.set_seed(0)
    Gan(args.max_steps, workspace=args.out, device="cpu").train()


if __name__ == "__main__":
    main()
