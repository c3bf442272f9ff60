"""Two processes in which some micro-batches have no loss: nobody waits for ever, and the weights stay equal."""

from __future__ import annotations

import pytest

from missing_losses_kit import CASES, work
from ranks import run_on_ranks


@pytest.fixture(scope="module")
def outcomes():
    return run_on_ranks(work, 2)


@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_on_the_gradient_of_one_process(case, outcomes):
    expected = CASES[case][1]
    (first, _), (second, _) = outcomes
    assert first[case] == second[case]
    weight, applied = first[case]
    assert weight == pytest.approx(expected - 1.0, abs=1e-6)
    assert applied == (2 if expected else 1)


def test_replicas_train_as_with_torchs_own_exchange_to_the_bit(outcomes):
    assert [same for _, same in outcomes] == [True, True]
