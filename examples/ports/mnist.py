"""PyTorch's MNIST example on the 8x8 digits of scikit-learn: ready parts, an epoch at a time.

python examples/ports/mnist.py --epochs 5
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import treadle


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="runs/mnist")
    args = parser.parse_args()
    treadle.set_seed(args.seed)
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(x, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16, torch.tensor(y)[order]
    train = DataLoader(TensorDataset(images[:1437], labels[:1437]), args.batch_size, shuffle=True)
    test = DataLoader(TensorDataset(images[1437:], labels[1437:]), 1000)
    model = net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    trainer = treadle.Trainer(model, optimizer, nn.NLLLoss(), scheduler=scheduler, metrics="accuracy", device="cpu")
    history = trainer.train(train, args.epochs, test, save_dir=args.out, resume_from="auto")
    print(f"accuracy {history['eval_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
