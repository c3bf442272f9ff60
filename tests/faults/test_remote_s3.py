"""Runs whose workspace is on a real S3 server that answers badly, killed at random moments."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "remote_kills.py"
MISSING = [name for name in ("moto", "s3fs", "flask") if importlib.util.find_spec(name) is None]


@pytest.mark.slow  # a minute: a server, and a run for each kill
@pytest.mark.skipif(bool(MISSING), reason=f"needs moto[server] and s3fs; missing: {', '.join(MISSING)}")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forked")
def test_killed_at_random_moments_every_state_is_whole_and_the_end_is_the_same():
    command = [sys.executable, str(SCRIPT), "--kills", "8", "--rate", "0.08"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["kills"] == 8
    kinds = ("differing ends", "unreadable states", "left over", "went back", "failed")
    assert [found[kind] for kind in kinds] == [0] * len(kinds)
