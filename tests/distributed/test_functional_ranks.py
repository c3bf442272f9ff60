"""Two processes with unequal numbers of labels: gradients, means and metrics are those of the joint batches."""

from __future__ import annotations

import pytest
import torch

from functional_ranks_kit import joint, model, trainer, work
from ranks import run_on_ranks
from treadle.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, run_on_ranks(work, 2, str(folder), timeout=120)


@pytest.fixture(scope="module")
def alone():
    net = model()
    return net, trainer(net).train(joint(), 2, joint())


def test_history_and_metrics_are_those_of_one_process_on_every_rank(outcome, alone):
    _, found = outcome
    assert found[0]["history"] == found[1]["history"]
    for key, values in alone[1].items():
        assert found[0]["history"][key] == pytest.approx(values, abs=1e-6), key


def test_weights_are_those_of_one_process(outcome, alone):
    _, found = outcome
    assert found[0]["weights"] == found[1]["weights"]
    for ours, value in zip(found[0]["weights"], alone[0].state_dict().values(), strict=True):
        torch.testing.assert_close(torch.tensor(ours), value)


def test_rank_0_writes_one_set_of_files_that_every_rank_resumes_from(outcome):
    folder, found = outcome
    assert sorted(path.name for path in folder.glob("*.pt")) == [
        "best_model.pt", "checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt",
    ]  # fmt: skip
    assert found[0]["again"] == found[1]["again"] == found[0]["history"]
    assert len(load_checkpoint(folder / "checkpoint_epoch_2.pt")["rng"]) == 2
    assert found[0]["wrapper kept"] is True


def test_an_evaluation_loop_of_ones_own_may_differ_between_ranks(outcome):
    assert outcome[1][0]["own"] == outcome[1][1]["own"] == [1.0]
