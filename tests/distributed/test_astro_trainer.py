"""Two processes with unequal numbers of positions train a token model as one does: weights, terms and counts."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.multiprocessing as mp

from astro_ranks_kit import CASES, run, work


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
def test_two_ranks_equal_one_process(case, outcomes):
    records, weights, steps = run(**CASES[case])
    assert steps == 4
    for rank in range(2):
        their_records, their_weights, their_steps = outcomes[case, rank][0]
        assert their_steps == steps
        for record, theirs in zip(records, their_records, strict=True):
            assert theirs == pytest.approx(record, abs=1e-5, nan_ok=True)
        for mine, their in zip(weights, their_weights, strict=True):
            assert torch.allclose(torch.tensor(mine), torch.tensor(their), atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_run_over_ranks_that_was_cut_inside_an_epoch_ends_as_one_that_was_not(case, outcomes):
    for rank in range(2):
        straight, resumed = outcomes[case, rank]
        assert resumed[1:] == straight[1:]
        assert str(resumed[0]) == str(straight[0])  # NaN equal to NaN
