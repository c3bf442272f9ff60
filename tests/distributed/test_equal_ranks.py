"""Replicas that drift apart are noticed: a hook that changes gradients on one rank, or weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers import MeanSquare
from ranks import run_on_ranks
from treadle import Engine, parallelize
from treadle.errors import ConfigError, RanksDifferError
from treadle.hooks import BaseHook, EqualRanksHook


class OnOneRank(BaseHook):
    """Changes what it is told to, on rank 1 alone, at one step."""

    def __init__(self, what):
        self.what = what

    def on_before_optimizer_step(self, trainer):
        if torch.distributed.get_rank() != 1 or trainer.step != 4:
            return
        weight = next(iter(trainer.model.parameters()))
        if self.what == "gradient":
            weight.grad.neg_()  # of the same norm
        if self.what == "weight":
            weight.data[0, 0] += 1e-3


def trained(what, steps):
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), "ddp")
    hooks = [EqualRanksHook(3), OnOneRank(what)]
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.01), MeanSquare(), device="cpu", hooks=hooks)
    x = torch.randn(8, 4)
    try:
        engine.run([(x, x.sum(1, keepdim=True))] * 20, max_steps=steps)
    except RanksDifferError as error:
        return engine.step, str(error)
    return engine.step, None


def all_cases():
    return {(what, steps): trained(what, steps) for what in ("nothing", "gradient", "weight") for steps in (5, 12)}


def test_what_one_rank_changes_is_noticed_on_all_and_named():
    for rank, found in enumerate(run_on_ranks(all_cases, 2)):
        assert found["nothing", 5] == (5, None)
        assert found["nothing", 12] == (12, None)
        for what in ("gradient", "weight"):
            step, told = found[what, 12]
            assert step == 7, (rank, told)
            assert "the weights of rank 1 differ from those of rank 0 after step 6, but not after step 3" in told
            step, told = found[what, 5]  # at the end at the latest
            assert step == 5
            assert "after step 5, but not after step 3" in told


def test_one_process_has_nothing_to_compare_and_a_bad_interval_is_refused():
    hook = EqualRanksHook()
    model = nn.Linear(4, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.01), MeanSquare(), device="cpu", hooks=[hook])
    engine.run([(torch.ones(2, 4), torch.ones(2, 1))], max_steps=1)
    assert hook.idle
    with pytest.raises(ConfigError, match="interval=0"):
        EqualRanksHook(0)
