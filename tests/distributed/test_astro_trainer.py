"""Two processes with unequal numbers of positions train a token model as one does: weights, terms and counts."""

from __future__ import annotations

import pytest
import torch

from astro_ranks_kit import CASES, run, work
from ranks import run_on_ranks


@pytest.fixture(scope="module")
def outcomes():
    return run_on_ranks(work, 2, timeout=240)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(case, outcomes):
    records, weights, steps = run(**CASES[case])
    assert steps == 4
    for rank in range(2):
        their_records, their_weights, their_steps = outcomes[rank][case][0]
        assert their_steps == steps
        for record, theirs in zip(records, their_records, strict=True):
            assert theirs == pytest.approx(record, abs=1e-5, nan_ok=True)
        for mine, their in zip(weights, their_weights, strict=True):
            assert torch.allclose(torch.tensor(mine), torch.tensor(their), atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_run_over_ranks_that_was_cut_inside_an_epoch_ends_as_one_that_was_not(case, outcomes):
    for rank in range(2):
        straight, resumed = outcomes[rank][case]
        assert resumed[1:] == straight[1:]
        assert str(resumed[0]) == str(straight[0])  # NaN equal to NaN
