"""Two processes in which some micro-batches have no loss: nobody waits for ever, and the weights stay equal."""

from __future__ import annotations

import socket

import pytest
import torch.multiprocessing as mp

from missing_losses_kit import CASES, work


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
        found = [results.get(timeout=90) for _ in range(2 * len(CASES) + 2)]
        for process in ranks:
            process.join(30)
    finally:
        for process in ranks:
            process.kill()
    return {(case, rank): (weight, applied) for case, rank, weight, applied in found}


@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_on_the_gradient_of_one_process(case, outcomes):
    expected = CASES[case][1]
    assert outcomes[case, 0] == outcomes[case, 1]
    weight, applied = outcomes[case, 0]
    assert weight == pytest.approx(expected - 1.0, abs=1e-6)
    assert applied == (2 if expected else 1)


def test_replicas_train_as_with_torchs_own_exchange_to_the_bit(outcomes):
    assert outcomes["plain", 0][0] is outcomes["plain", 1][0] is True
