"""Work of two processes in the tests of astronomy training over ranks; a separate module, for their imports."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from astro_trainer_kit import LogitsOnly, loader, make, model, sequences
from helpers import Snapshots

CASES = {"hidden states": {}, "logits": {"logits": True}, "without cross-entropy": {"use_ce": False}}
# Micro-batches of unequal sizes on two ranks; the two of a step together are one batch of one process.
SHARES = [([3, 1], [1, 4]), ([2, 2], [5, 1])]
CUT = 3


def share(rank):
    """Return this rank's micro-batches of all steps; for None those of one process, one per step."""
    data, start, made = sequences(19), 0, []
    for step in SHARES:
        whole = []
        for number, sizes in enumerate(step):
            for size in sizes:
                part = data[start : start + size]
                start += size
                whole += part
                if rank == number:
                    made += list(loader(part, size))
        if rank is None:
            made += list(loader(whole, len(whole)))
    return made


def run(*, rank=None, logits=False, hooks=(), state=None, **settings):
    """Train two epochs of two steps; return records, weights and the number of steps."""
    net = LogitsOnly(model(0.0)) if logits else model(0.0)
    wrapped = net if rank is None else nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = make(
        net=wrapped, optimizer=optimizer, scheduler=schedule, train=share(rank), sample_k=4096,
        grad_accum_steps=1 if rank is None else 2, hooks=hooks, **settings,
    )  # fmt: skip
    if state is not None:
        trainer._engine.load_state_dict(state)
    records = trainer.train(2, share(rank))
    return records, [parameter.detach().tolist() for parameter in net.parameters()], trainer.global_step


def work():
    """Run every case uninterrupted and interrupted."""
    found, rank = {}, dist.get_rank()
    for case, settings in CASES.items():
        snapshots = Snapshots()
        straight = run(rank=rank, hooks=[snapshots], **settings)
        resumed = run(rank=rank, hooks=[Snapshots()], state=snapshots.states[CUT], **settings)
        found[case] = straight, resumed
    return found
