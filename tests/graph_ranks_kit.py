"""Work of two processes in the tests of graph training over ranks; a separate module, so that they can import it."""

from __future__ import annotations

from torch import nn
from torch.utils.data import DistributedSampler

from graph_kit import graphs, loader, make, records
from helpers import Snapshots

# Settings of the targets, of the model and of the trainer. 13 graphs cannot be split evenly between two ranks.
CASES = {
    "regression": ({"width": 2, "unknown": 0.4}, {"num_classes": 2}, {}),
    "classification": ({"level": "node", "classes": 3}, {"num_classes": 3, "task": "node"}, {}),
    "edge_prediction": ({"level": "edge", "classes": 2}, {"task": "edge"}, {}),
    "masks": ({"level": "node", "unknown": 0.2, "masks": True}, {"task": "node"}, {"task_type": "regression"}),
}
EPOCHS, CUT = 2, 4


def run(case, *, over_ranks, hooks=(), state=None):
    """Train a case, four graphs a step over all ranks; return its history and weights."""
    data, model, settings = CASES[case]
    trainer = make(
        model={**model, "dropout": 0.0}, kind="sgd", lr=0.1, hooks=hooks, log_every=2,
        **{"task_type": case, **settings},
    )  # fmt: skip
    if over_ranks:
        # The trainer gets its parts wrapped as by a user; the optimizer holds the same parameters.
        wrapped = nn.parallel.DistributedDataParallel(trainer.model)
        trainer = make(
            model=wrapped, optimizer=trainer.optimizer, hooks=hooks, log_every=2,
            num_classes=model["num_classes"] if case == "classification" else None, **{"task_type": case, **settings},
        )  # fmt: skip
    told = []
    trainer.add_log_hook(lambda metrics, step, prefix: told.append((prefix, step)))
    train, val = graphs(12, seed=1, **data), graphs(13, seed=2, **data)
    parts = []
    for part in (train, val):
        sampler = DistributedSampler(part, shuffle=False) if over_ranks else None
        parts.append(loader(part, 2 if over_ranks else 4, sampler=sampler))
    if state is not None:
        trainer._engine.load_state_dict(state)
    history = records(trainer.fit(*parts, epochs=EPOCHS))
    return history, [parameter.detach().tolist() for parameter in trainer.model.parameters()], told


def work():
    """Run every case uninterrupted and interrupted inside an epoch."""
    found = {}
    for case in CASES:
        snapshots = Snapshots()
        straight = run(case, over_ranks=True, hooks=[snapshots])
        found[case] = straight, run(case, over_ranks=True, hooks=[Snapshots()], state=snapshots.states[CUT])
    return found
