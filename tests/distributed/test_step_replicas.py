"""Steps of replicas: gradients are exchanged while backward runs, never wrong, never a hang, to torch's own bits."""

from __future__ import annotations

import logging
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers import Scalar, Slopes
from ranks import outcomes_on_ranks, run_on_ranks
from step_kit import Counting, Rows, differing, engine_of, share, train, whole
from treadle import CheckpointingHook
from treadle.distributed import replicas as gradient_exchange
from treadle.distributed.replicas import ReplicaExchange
from treadle.engine import Engine
from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.task import StepOutput

SIZES = [(3, 3), (4, 2), (1, 5)]


class Odd(nn.Module):
    """Two dtypes, a frozen weight, tied weights, one in another memory format, and one that is not used."""

    def __init__(self):
        super().__init__()
        self.picture = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(20, 6).double()
        self.narrow = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.narrow.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        y = self.picture(x.reshape(-1, 1, 1, 5)).reshape(len(x), 20)
        return self.frozen(self.norm(self.again(self.narrow(self.wide(y.double()).float()).tanh())))


class SquareMean:
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput(model(batch).square().mean())


def odd_replica():
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Odd(), find_unused_parameters=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def same_bits_as_torch():
    """Three steps by torch's own exchange and by ours, in buckets of a few weights each."""
    gradient_exchange._FIRST_BUCKET, gradient_exchange._BUCKET = 50, 50
    rows = share(dist.get_rank(), 2, [(4, 4)] * 3)
    model, optimizer = odd_replica()
    for batch in rows:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    ours, optimizer = odd_replica()
    engine = Engine(ours, optimizer, SquareMean(), device="cpu")
    engine.run(rows, max_steps=3)
    for buffer in model.buffers():  # torch sends them before a forward pass, the engine after the last one
        dist.broadcast(buffer, src=0)
    gradient_exchange._FIRST_BUCKET, gradient_exchange._BUCKET = 1 << 20, 25 << 20
    same = [torch.equal(a, b) for a, b in zip(model.state_dict().values(), ours.state_dict().values(), strict=True)]
    hooks = [parameter._post_accumulate_grad_hooks for parameter in ours.parameters()]
    return {
        "same": all(same), "buckets": len(engine.exchange._buckets),
        "hooks left": sum(len(some or ()) for some in hooks),
        "unused": [parameter.grad for parameter in ours.module.unused.parameters()],
    }  # fmt: skip


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def warnings_of_unused_parameters():
    """Of a model with a part that no loss needs: as it is, frozen, and where that is said to be expected."""
    found = {}
    for case in ("as it is", "frozen", "expected"):
        model, optimizer = odd_replica()
        model.find_unused_parameters = case == "expected"
        model.module.unused.requires_grad_(case != "frozen")
        lines = Lines()
        logging.getLogger("treadle").addHandler(lines)
        Engine(model, optimizer, SquareMean(), device="cpu").run([torch.ones(4, 5)] * 2, max_steps=2)
        logging.getLogger("treadle").removeHandler(lines)
        found[case] = [line for line in lines.lines if "no gradient" in line]
    return found


def order_of_events():
    """Return the times at which buckets are sent and at which the first layer's gradient, the last one, is ready."""
    gradient_exchange._FIRST_BUCKET = gradient_exchange._BUCKET = 1
    engine = engine_of("ddp", accumulation_steps=2)
    engine.prepare()
    engine.model.train()
    events = []
    engine.model.module.inward.bias.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    send = ReplicaExchange._send
    ReplicaExchange._send = lambda self, bucket: (events.append("sent"), send(self, bucket))[1]
    engine.step_group(share(dist.get_rank(), 2, [(3, 3)] * 2))
    ReplicaExchange._send = send
    gradient_exchange._FIRST_BUCKET, gradient_exchange._BUCKET = 1 << 20, 25 << 20
    return events


def counted():
    """Return the calls of a step to torch.distributed, for one micro-batch and for four."""
    counts = {}
    for k in (1, 4):
        engine = engine_of("ddp", accumulation_steps=k, grad_clip=1.0, hooks=[])
        rows = share(dist.get_rank(), 2, [(2, 3)] * 2 * k)
        engine.prepare()
        engine.model.train()
        engine.step_group(rows[:k])
        with Counting() as counting:
            engine.step_group(rows[k:])
        counts[k] = dict(counting.calls)
    return counts


class Twice(nn.Module):
    """One layer in two reentrant checkpoints: its gradient is added to after it was there first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def added_to_late():
    torch.manual_seed(0)
    model = Twice()
    engine = engine_of("ddp", model=model, task=Rows())
    late = []
    finish = ReplicaExchange._finish
    ReplicaExchange._finish = lambda self: (late.append(len(self._late)), finish(self))[1]
    engine.run(share(dist.get_rank(), 2, SIZES), max_steps=3)
    ReplicaExchange._finish = finish
    return late, whole(engine.model)


def thawed_on_the_way():
    class Thaw(BaseHook):
        def on_after_step(self, trainer):
            trainer.model.module.inward.weight.requires_grad_(trainer.step >= 2)

    engine = engine_of("ddp", hooks=[Thaw()])
    engine.model.module.inward.weight.requires_grad_(False)
    engine.run(share(dist.get_rank(), 2, [(3, 3)] * 4), max_steps=4)
    return whole(engine.model)


def reported_loss():
    """Losses 8 and 0 that are means over 1 and 3 things."""
    model = nn.parallel.DistributedDataParallel(Scalar(1.0))
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), Slopes(), device="cpu")
    engine.run([((8.0, 1), (0.0, 3))[dist.get_rank()]], max_steps=1)
    return engine.step_info["grad_norm"].item(), engine.train_means()["loss"]


def stopped_by_one():
    last = []

    class Stop(BaseHook):
        def on_after_step(self, trainer):
            trainer.should_stop |= dist.get_rank() == 1 and trainer.step == 2
            last.append(trainer.is_last_step)  # hooks save and log by it, which all ranks must do alike

    engine = engine_of("ddp", hooks=[Stop()])
    engine.run(share(dist.get_rank(), 2, [(3, 3)] * 8), max_steps=8)
    in_epoch = engine.step
    short = engine_of("ddp", hooks=[Stop()])  # it stops on the last step of an epoch, which nobody else was told
    short.run(share(dist.get_rank(), 2, [(3, 3)] * 2), max_steps=8)
    return in_epoch, short.step, last


def mixed_reductions():
    class Mixed:
        def step(self, model, batch, totals=None, generator=None):
            return StepOutput(model(batch).mean(), reduction=("mean", "sum")[dist.get_rank()])

    engine = engine_of("ddp", task=Mixed())
    try:
        engine.run(share(dist.get_rank(), 2, SIZES), max_steps=1)
    except ConfigError as error:
        return str(error)
    return None


def everything():
    return {
        "torch": same_bits_as_torch(), "events": order_of_events(), "counted": counted(), "late": added_to_late(),
        "warned": warnings_of_unused_parameters(),
        "thawed": thawed_on_the_way(), "reported": reported_loss(), "stopped": stopped_by_one(),
        "mixed": mixed_reductions(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return run_on_ranks(everything, 2, timeout=100)


def test_weights_equal_torchs_own_exchange_to_the_bit_in_many_buckets_of_two_types(found):
    for rank in found:
        assert rank["torch"]["same"]
        assert rank["torch"]["buckets"] >= 4


def test_a_weight_without_a_gradient_on_every_rank_stays_without(found):
    assert [rank["torch"]["unused"] for rank in found] == [[None, None]] * 2


def test_a_weight_that_no_loss_needs_is_named_once_by_one_rank(found):
    (line,) = found[0]["warned"].pop("as it is")
    assert "unused.weight, unused.bias" in line
    assert "requires_grad_(False)" in line
    assert found[0]["warned"] == {"frozen": [], "expected": []}
    assert found[1]["warned"] == {"as it is": [], "frozen": [], "expected": []}


def test_no_hook_is_left_on_the_weights_after_a_run(found):
    assert [rank["torch"]["hooks left"] for rank in found] == [0, 0]


def test_messages_leave_while_the_last_backward_pass_runs(found):
    for events in (rank["events"] for rank in found):
        assert events.count("first layer") == 2
        first, last = (place for place, event in enumerate(events) if event == "first layer")
        assert "sent" not in events[:first]  # nothing leaves with the first micro-batch
        assert events[:last].count("sent") > 5


def test_a_step_costs_one_exchange_between_hosts_and_the_flags_of_gradients(found):
    for rank in found:
        # One bucket and what gradients there are; weights and decisions once, or after the first and last micro-batch.
        assert rank["counted"] == {1: {"all_reduce": 2, "all_gather": 1}, 4: {"all_reduce": 2, "all_gather": 2}}


def test_a_gradient_that_is_added_to_after_it_was_sent_is_sent_again(found):
    torch.manual_seed(0)
    expected = train(None, SIZES, model=Twice())["weights"]
    for late, weights in (rank["late"] for rank in found):
        assert sum(late) > 0
        assert differing(weights, expected) == []


def test_a_weight_that_is_thawed_during_the_run_is_exchanged_from_then_on(found):
    assert differing(found[0]["thawed"], found[1]["thawed"], 0.0) == []


def test_the_loss_and_gradient_of_unequal_ranks_are_those_of_the_joint_batch(found):
    assert [rank["reported"] for rank in found] == [(2.0, 2.0)] * 2


def test_a_rank_that_stops_stops_all_at_the_next_step(found):
    assert [rank["stopped"] for rank in found] == [(3, 2, [False, False, True, False, False])] * 2


def test_means_on_one_rank_and_sums_on_another_are_an_error_on_both(found):
    for rank in found:
        assert "a step either averages its losses or adds them up" in rank["mixed"]


def told_to_leave(folder):
    class Kill(BaseHook):
        def on_before_step(self, trainer):
            if dist.get_rank() == 1 and trainer.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    hooks = [Kill(), CheckpointingHook(100, path=folder, exit_signals=signal.SIGTERM)]
    engine = engine_of("ddp", hooks=hooks)
    try:
        engine.run(share(dist.get_rank(), 2, [(3, 3)] * 8), max_steps=8)
    except SystemExit as leaving:
        return leaving.code, engine.step
    return None


def test_a_signal_to_one_rank_saves_once_and_ends_all(tmp_path):
    outcomes = outcomes_on_ranks(told_to_leave, 2, str(tmp_path))
    assert [outcome.result for outcome in outcomes] == [(143, 2), (143, 2)], outcomes
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["checkpoint_step_2.pt"]


def three_ranks():
    found = {}
    for kind in ("ddp", "fsdp"):
        done = train(kind, [(3, 2, 1), (0, 4, 2), (2, 2, 2)], make=torch.optim.AdamW, lr=0.01, grad_clip=1.0)
        found[kind] = done["weights"], done["said"]
    return found


def test_three_ranks_train_as_one_process():
    expected = train(None, [(3, 2, 1), (0, 4, 2), (2, 2, 2)], make=torch.optim.AdamW, lr=0.01, grad_clip=1.0)
    for rank in run_on_ranks(three_ranks, 3):
        for weights, said in rank.values():
            assert differing(weights, expected["weights"]) == []
            assert torch.allclose(torch.tensor(said), torch.tensor(expected["said"]), rtol=1e-5)
