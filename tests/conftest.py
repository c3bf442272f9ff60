"""What holds for the whole suite."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

from treadle.builder import REGISTRY

# Many tests fork a child that trains and is killed. OpenMP's threads do not survive a fork: a child of a process that
# has run a parallel region waits for ever in its first one. One thread also makes the suite faster on small tensors.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what it runs in the background with Ctrl-C ignored, and the tests of signals send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example may take, and how long its making, is a matter of what else the machine does.
settings.register_profile("treadle", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("treadle")


def pytest_collection(session):
    """Collecting makes a million objects and drops few: looking through them again and again takes seconds."""
    gc.disable()


def pytest_collection_finish(session):
    """What has been collected and imported stays to the end; no collection of garbage needs to look at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _terminal():
    """What the terminal of the caller can do is no matter of a test; one that needs another sets it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        patch.setenv("TREADLE_PROGRESS", "0")  # what a run shows by itself is a matter of test_voice.py
        yield


@pytest.fixture(autouse=True)
def _registry():
    """What a test or a page of the documentation registers is gone afterwards."""
    before = dict(REGISTRY._objects)
    yield
    REGISTRY._objects.clear()
    REGISTRY._objects.update(before)


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_open():
    """What a module's tests leave open is an error there, not in whichever test a collection happens to come."""
    yield
    gc.collect()
