"""Members that launch much or wait let the others work: the order of launches and waits, on made-up streams."""

from __future__ import annotations

import pytest
import torch

from treadle.handover import launch_times
from treadle.population import Population, turns


class Stream:
    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


@pytest.fixture(autouse=True)
def made_up_streams(monkeypatch):
    monkeypatch.setattr(turns._Streams, "__init__", lambda self: setattr(self, "_free", [Stream() for _ in range(8)]))
    monkeypatch.setattr(turns._Streams, "take", lambda self: self._free.pop(0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


class Event:
    """Is over after some looks at it."""

    def __init__(self, looks):
        self.looks, self.waited = looks, False

    def query(self):
        self.looks -= 1
        return self.looks < 0

    def synchronize(self):
        self.waited = True


def run(tmp_path, train, seeds=3, **options):
    return Population(
        lambda seed: lambda: train(seed), seeds=range(seeds), out=tmp_path, progress=False, **options
    ).run()


def test_launches_of_members_alternate(tmp_path):
    launched = []

    def train(seed):
        launch_times(lambda: launched.append(seed), 20)
        return {"loss": launched.count(seed)}

    results = run(tmp_path, train)
    most = turns.AT_ONCE
    assert launched == [0] * 8 + [0] * 8 + [1] * 8 + [0] * 4 + [1] * 8 + [2] * 8 + [1] * 4 + [2] * 8 + [2] * 4 or (
        max(len(run) for run in runs_of(launched)) <= 2 * most
    )
    assert [launched.count(seed) for seed in range(3)] == [20, 20, 20]
    assert [row.metrics["loss"] for row in results.rows] == [20, 20, 20]


def runs_of(values):
    found = [[values[0]]]
    for value in values[1:]:
        found[-1].append(value) if value == found[-1][0] else found.append([value])
    return found
