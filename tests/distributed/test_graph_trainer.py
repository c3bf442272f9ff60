"""Two processes train graphs as one does: weights, losses and metrics, also where a sampler repeats graphs."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.multiprocessing as mp

from graph_ranks_kit import CASES, run, work


@pytest.fixture(scope="module")
def outcomes():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=work, args=(rank, port, results), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        found = [results.get(timeout=240) for _ in range(2 * len(CASES))]
        for process in ranks:
            process.join(30)
    finally:
        for process in ranks:
            process.kill()
    return {(case, rank): (straight, resumed) for case, rank, straight, resumed in found}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process_metrics_included(case, outcomes):
    history, weights, _ = run(case, over_ranks=False)
    for rank in range(2):
        (other, their_weights, _), _ = outcomes[case, rank]
        for part in ("train", "val"):
            for record, theirs in zip(history[part], other[part], strict=True):
                assert theirs == pytest.approx(record, abs=1e-5), (part, rank)
        for mine, their in zip(weights, their_weights, strict=True):
            assert torch.allclose(torch.tensor(mine), torch.tensor(their), atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_run_over_ranks_that_was_cut_inside_an_epoch_ends_as_one_that_was_not(case, outcomes):
    for rank in range(2):
        straight, resumed = outcomes[case, rank]
        assert resumed[:2] == straight[:2]


@pytest.mark.parametrize("case", CASES)
def test_only_the_first_rank_tells_the_log_hooks(case, outcomes):
    told = [outcomes[case, rank][0][2] for rank in range(2)]
    assert ("val", 6) in told[0]
    assert told[1] == []
