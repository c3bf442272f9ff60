"""Work of two processes in the tests of the functional face; a separate module, so that they can import it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import treadle

LABELS = [[0, 1, 2, 0, -100, -100, 1, 2], [1, -100, -100, -100, -100, -100, 0, 0]]


def rows(rank):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
    labels = torch.tensor(LABELS[rank])
    return [(x[i : i + 2], labels[i : i + 2]) for i in range(0, 8, 2)]


def joint():
    """Return the batches of both ranks as a single process would see them."""
    return [tuple(map(torch.cat, zip(*pair))) for pair in zip(rows(0), rows(1))]


def trainer(model, **rest):
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    training = {"gradient_accumulation_steps": 2, "log_interval": 0}
    metrics = {"accuracy": MulticlassAccuracy(3, average="micro", ignore_index=-100)}
    return treadle.Trainer(model, optimizer, loss_fn, {"training": training}, "cpu", metrics=metrics, **rest)


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


class OwnLoop(treadle.Trainer):
    """Trainer with a custom evaluation loop, which runs more often on one rank than on the other."""

    def evaluate(self, dataloader):
        for _ in range(1 + dist.get_rank()):
            for batch in dataloader:
                self.eval_step(batch)
        return {"loss": 1.0}


def work(folder):
    rank = dist.get_rank()
    net = nn.parallel.DistributedDataParallel(model())
    ours = trainer(net)
    history = ours.train(rows(rank), 2, rows(rank), save_dir=folder, early_stopping_patience=5)
    weights = [value.tolist() for value in net.module.state_dict().values()]
    resumed = trainer(nn.parallel.DistributedDataParallel(nn.Linear(4, 3)))
    again = resumed.train(rows(rank), 2, rows(rank), save_dir=folder, resume_from="auto")
    own = OwnLoop(nn.Linear(1, 1), None, nn.MSELoss(), device="cpu")
    pairs = [(torch.ones(2, 1), torch.ones(2, 1))] * 2
    own_history = own.train(pairs, 1, pairs)
    return {
        "history": history, "weights": weights, "again": again, "own": own_history["eval_loss"],
        "wrapper kept": ours.model is net,
    }  # fmt: skip
