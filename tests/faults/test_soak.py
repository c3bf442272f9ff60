"""Three minutes of random kills over all faces: no different end, no unreadable state, no litter, bounded folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import python

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
def test_three_minutes_of_random_kills_over_all_faces_lose_nothing():
    ended = python(str(SOAK), "--minutes", "3", timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_one_run_of_the_functional_face_is_killed_until_it_ends():
    ended = python(str(SOAK), "--kills", "1", "--minutes", "0.1", "--faces", "Trainer", timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
