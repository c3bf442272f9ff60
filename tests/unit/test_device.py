from __future__ import annotations

import gc
import os

import pytest
import torch

from treadle.device import get_device, keep_garbage_from_forks, moved, to_device
from treadle.errors import ConfigError

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


@no_cuda
def test_none_takes_the_best_device_that_is_there():
    expected = "mps" if torch.backends.mps.is_available() else "cpu"
    assert get_device().type == expected


@pytest.mark.parametrize("spelling", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_every_spelling_of_the_cpu_is_one_device(spelling):
    assert get_device(spelling) == torch.device("cpu")


@no_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, 3, torch.device("cuda", 1), "xpu", "hpu"])
def test_a_device_that_is_not_there_is_refused_and_the_available_ones_are_named(device):
    with pytest.raises(ConfigError, match="cpu"):
        get_device(device)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", -1, 1.5, ["cpu"]])
def test_a_name_that_is_none_is_refused_with_the_value(device):
    with pytest.raises(ConfigError, match="device="):
        get_device(device)


@pytest.mark.parametrize(("count", "wanted", "index"), [(2, "cuda", 1), (2, 0, 0), (2, "cuda:1", 1), (2, None, 1)])
def test_cuda_spellings_are_equal_where_there_is_cuda(monkeypatch, count, wanted, index):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert get_device(wanted) == torch.device("cuda", index)


def test_workers_that_are_forked_beside_cuda_collect_no_garbage_of_before(monkeypatch):
    registered = []
    monkeypatch.setattr(os, "register_at_fork", lambda **functions: registered.append(functions))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    keep_garbage_from_forks.cache_clear()
    get_device("cpu")
    assert registered == []
    get_device()
    get_device()
    keep_garbage_from_forks.cache_clear()
    assert registered == [{"after_in_child": gc.freeze}]


def test_a_cuda_index_beyond_the_last_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="cuda:0, cuda:1"):
        get_device("cuda:2")


def test_moving_a_batch_leaves_the_callers_batch_alone():
    batch = {"x": torch.zeros(2), "meta": ["a", 1]}
    there = to_device(batch, torch.device("meta"))
    assert there["x"].device.type == "meta"
    assert there["meta"] == ["a", 1]
    assert batch["x"].device.type == "cpu"


@pytest.mark.parametrize("takes", [True, False])
def test_a_batch_that_moves_itself_is_asked_not_to_wait_if_it_can(takes):
    asked = []

    class Willing:
        def to(self, device, non_blocking=False):
            asked.append(non_blocking)
            return self

    class Plain:
        def to(self, device):
            asked.append(None)
            return self

    to_device([Willing() if takes else Plain()], torch.device("meta"))
    assert asked == [True if takes else None]


def test_what_comes_to_the_cpu_is_waited_for():
    class There:
        def to(self, device, non_blocking=False):
            asked.append((device.type, non_blocking))
            return self

    class ThereTensor(torch.Tensor):
        to = There.to

    asked = []
    for batch in (There(), ThereTensor(torch.ones(2)), [ThereTensor(torch.ones(2))]):
        to_device(batch, torch.device("cpu"))
    moved(ThereTensor(torch.ones(2)), torch.device("cpu"))
    assert asked == [("cpu", False)] * 4
