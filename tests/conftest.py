"""Fixtures and settings of the whole suite."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

from treadle.builder import REGISTRY

# Many tests fork a child that trains and is killed. OpenMP's threads do not survive a fork: a child of a process that
# has run a parallel region hangs in its first one. One thread also makes the suite faster on small tensors.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with Ctrl-C ignored, but the tests of signals send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The time of an example and of its generation depends on the load of the machine.
settings.register_profile("treadle", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("treadle")


def pytest_collection(session):
    """Disable garbage collection while collecting, which creates a million objects and drops few."""
    gc.disable()


def pytest_collection_finish(session):
    """Freeze collected and imported objects, which stay to the end, so that garbage collections skip them."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _terminal():
    """Hide the caller's terminal from tests; one that needs a terminal sets it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        patch.setenv("TREADLE_PROGRESS", "0")  # the default output of a run is tested in test_run_log.py
        yield


@pytest.fixture(autouse=True)
def _registry():
    """Remove names registered by a test or a documentation page afterwards."""
    before = dict(REGISTRY._objects)
    yield
    REGISTRY._objects.clear()
    REGISTRY._objects.update(before)


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_open():
    """Fail in the module whose tests leave files open, not in the test that a garbage collection hits."""
    yield
    gc.collect()
