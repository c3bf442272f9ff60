"""Two processes train graphs as one does: weights, losses and metrics, also where a sampler repeats graphs."""

from __future__ import annotations

import pytest
import torch

from graph_ranks_kit import CASES, run, work
from ranks import run_on_ranks


@pytest.fixture(scope="module")
def outcomes():
    return run_on_ranks(work, 2, timeout=240)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process_metrics_included(case, outcomes):
    history, weights, _ = run(case, over_ranks=False)
    for rank in range(2):
        (other, their_weights, _), _ = outcomes[rank][case]
        for part in ("train", "val"):
            for record, theirs in zip(history[part], other[part], strict=True):
                assert theirs == pytest.approx(record, abs=1e-5), (part, rank)
        for mine, their in zip(weights, their_weights, strict=True):
            assert torch.allclose(torch.tensor(mine), torch.tensor(their), atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_run_over_ranks_that_was_cut_inside_an_epoch_ends_as_one_that_was_not(case, outcomes):
    for rank in range(2):
        straight, resumed = outcomes[rank][case]
        assert resumed[:2] == straight[:2]


@pytest.mark.parametrize("case", CASES)
def test_only_the_first_rank_tells_the_log_hooks(case, outcomes):
    told = [outcomes[rank][case][0][2] for rank in range(2)]
    assert ("val", 6) in told[0]
    assert told[1] == []
