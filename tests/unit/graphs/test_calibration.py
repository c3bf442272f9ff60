"""The factors of an ensemble's deviations against closed forms."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from treadle.errors import CheckpointError
from treadle.graphs.calibration import COVERAGE, HeldOut, calibrate


def members(count, *, scale, seed=0):
    """Two models whose mean is 0 and deviation sqrt(2); the targets are normal with the given deviation."""
    rng = np.random.default_rng(seed)
    target = [scale * rng.normal(size=(count, 1)) for _ in range(2)]
    return [HeldOut(one := np.full((count, 1), sign), target[0], one, target[1]) for sign in (-1.0, 1.0)]


def test_the_factor_makes_one_deviation_hold_its_share_of_both_parts():
    (found,) = calibrate(members(2000, scale=3.0))
    assert found.factor == pytest.approx(3 / math.sqrt(2), rel=0.05)
    assert found.before == pytest.approx(math.erf(1 / 3), abs=0.03)
    assert found.after == pytest.approx(COVERAGE, abs=0.03)
    assert (found.num_val, found.num_test) == (2000, 2000)


def test_unknown_targets_count_nowhere_and_few_of_them_give_no_factor():
    pair = members(40, scale=3.0)
    whole = calibrate([cut(each, 0, 20) for each in pair])
    gaps = pair[0].val_target.copy()
    gaps[20:] = np.nan
    some = calibrate([dataclasses.replace(each, val_target=gaps) for each in pair])
    assert some[0].factor == whole[0].factor
    gaps = np.where(np.arange(40)[:, None] < 9, pair[0].val_target, np.nan)
    assert calibrate([dataclasses.replace(each, val_target=gaps) for each in pair]) == [None]


def cut(each, start, stop):
    return HeldOut(*(value[start:stop] for value in dataclasses.astuple(each)))


def test_models_with_other_molecules_are_not_calibrated():
    pair = members(20, scale=1.0)
    assert calibrate([pair[0], cut(pair[1], 0, 19)]) is None
    assert calibrate([pair[0], dataclasses.replace(pair[1], test_target=pair[1].test_target + 1)]) is None


def test_models_that_agree_give_no_factor():
    one = members(20, scale=1.0)[0]
    assert calibrate([one, one]) == [None]


def test_a_file_is_that_of_its_epoch(tmp_path):
    one = members(20, scale=1.0)[0]
    one.write(tmp_path / "held_out.npz", 3)
    assert np.array_equal(HeldOut.read(tmp_path / "held_out.npz", 3).val_target, one.val_target)
    assert HeldOut.read(tmp_path / "held_out.npz", 4) is None
    assert HeldOut.read(tmp_path / "absent.npz", 3) is None


@pytest.mark.parametrize("content", [b"", b"damaged", None], ids=["empty", "other bytes", "cut"])
def test_a_damaged_file_is_named(tmp_path, content):
    file = tmp_path / "held_out.npz"
    members(20, scale=1.0)[0].write(file, 3)
    file.write_bytes(file.read_bytes()[:-30] if content is None else content)
    with pytest.raises(CheckpointError, match=r"held_out\.npz is damaged .*; delete it"):
        HeldOut.read(file, 3)
