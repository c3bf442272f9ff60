"""Stateful loaders that the user's own objects hold, or whose state was read before training."""

from __future__ import annotations

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from helpers import Augmented, MeanSquare, Snapshots, differences, small_model
from treadle import Engine, set_seed

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

WORKERS = {"none": {}, "two": {"num_workers": 2}, "persistent": {"num_workers": 2, "persistent_workers": True}}


class Holds(MeanSquare):
    """A task that keeps its loaders as attributes."""

    def __init__(self, workers):
        self.loader = StatefulDataLoader(Augmented(), batch_size=4, shuffle=True, **WORKERS[workers])
        self.val_loader = StatefulDataLoader(Augmented(8), batch_size=4, **WORKERS[workers])


class Run:
    def __init__(self, workers, *, asked=False):
        set_seed(0)
        model = small_model()
        self.task = Holds(workers)
        self.snapshots = Snapshots()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.engine = Engine(model, optimizer, self.task, hooks=[self.snapshots], device="cpu")
        if asked:
            self.task.loader.state_dict()
            self.task.val_loader.state_dict()

    def train(self):
        for epoch in (1, 2):
            self.engine.run(self.task.loader, epochs=epoch)
            self.engine.evaluate(self.task.val_loader)
        return self.engine.state_dict()


FAST = [("none", False), ("none", True), ("persistent", False)]
SLOW = [("two", False), ("two", True), ("persistent", True)]


@pytest.mark.parametrize(("workers", "asked"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_a_task_that_holds_its_loaders_resumes_exactly(workers, asked):
    straight = Run(workers, asked=asked)
    expected = straight.train()
    assert not any("loader" in path for path in expected.get("objects", {}))
    for step in (2, 5, 7) if workers == "none" else (7,):
        run = Run(workers, asked=asked)
        run.engine.load_state_dict(straight.snapshots.states[step])
        assert differences(run.train(), expected) == []
