"""An image classifier in the style of timm's train.py: EMA, mixup, label smoothing, warm-up + cosine, optional AMP.

python examples/ports/timm_classifier.py --epochs 10
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import treadle


class Mixup:
    """Collate function that mixes each image with another of its batch and smooths the labels."""

    def __init__(self, classes, *, alpha=0.2, smoothing=0.1):
        self.classes, self.alpha, self.smoothing = classes, alpha, smoothing

    def __call__(self, samples):
        images, labels = default_collate(samples)
        targets = nn.functional.one_hot(labels, self.classes) * (1 - self.smoothing) + self.smoothing / self.classes
        share = float(np.random.beta(self.alpha, self.alpha))
        return share * images + (1 - share) * images.flip(0), share * targets + (1 - share) * targets.flip(0)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.layers(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup-ratio", type=float, default=0.1)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--amp", choices=["bf16", "fp16"])
    parser.add_argument("--grad-checkpointing", action="store_true")
    parser.add_argument("--out", default="runs/timm_classifier")
    args = parser.parse_args()
    treadle.set_seed(42)
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(x, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16, torch.tensor(y)[order]
    train = DataLoader(
        TensorDataset(images[:1437], labels[:1437]), args.batch_size, shuffle=True, drop_last=True, collate_fn=Mixup(10)
    )
    test = DataLoader(TensorDataset(images[1437:], labels[1437:]), 128)
    blocks = nn.ModuleList(Residual(16) for _ in range(2))
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)
    )
    trainer = treadle.Trainer(
        model, torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05), nn.CrossEntropyLoss(),
        device="cpu", metrics=["accuracy"], ema_decay=0.99, lr_scheduler="cosine", warmup_ratio=args.warmup_ratio,
        max_grad_norm=args.clip_grad, mixed_precision=args.amp,
        gradient_checkpointing=["1", "2"] if args.grad_checkpointing else False,
    )  # fmt: skip
    history = trainer.train(
        train, args.epochs, test, save_dir=args.out, best_model_metric="accuracy", resume_from="auto"
    )
    print(f"accuracy of the average {max(history['eval_accuracy']):.3f}")


if __name__ == "__main__":
    main()
