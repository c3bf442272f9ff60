"""What a step costs in Python, by counts: calls of the library's functions, idle hooks, and what a long run keeps."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import treadle
from helpers import scalar_engine
from treadle import (
    BaseHook,
    CheckpointingHook,
    EmaHook,
    Engine,
    LoggingHook,
    ProgressHook,
    StepLogHook,
    StepOutput,
    ThroughputHook,
)

LIBRARY = str(Path(treadle.__file__).parent) + os.sep


@contextlib.contextmanager
def counting(counts):
    """Counts calls of Python functions inside the block, by whether they are the library's."""

    def note(frame, event, _):
        if event == "call":
            counts[frame.f_code.co_filename.startswith(LIBRARY)] += 1

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # what other libraries do after a collection, and finalizers, would be counted when one happens
    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


class Idle(BaseHook):
    """Does nothing, under a name of its own."""

    def __init__(self, number):
        self.number = number

    @property
    def state_key(self):
        return f"Idle{self.number}"


class Ten(BaseHook):
    """Counts the calls from the end of step 10 to the end of step 20."""

    def __init__(self):
        self.counts = Counter()
        self.stack = contextlib.ExitStack()

    def on_after_step(self, trainer):
        if trainer.step == 10:
            self.stack.enter_context(counting(self.counts))
        elif trainer.step == 20:
            self.stack.close()

    def on_close(self, trainer, error=None):
        self.stack.close()


class Fit:
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput(model(batch).square().mean())


def layers(count=2):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def calls_of_ten_steps(hooks=(), model=None):
    """Return the calls of ten steps: of the library's functions, and of all others."""
    ten, model = Ten(), model or layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    Engine(model, optimizer, Fit(), device="cpu", grad_clip=1.0, hooks=[*hooks, ten]).run(
        [torch.ones(2, 4)] * 20, max_steps=20
    )
    return ten.counts[True], ten.counts[False]


def test_a_step_calls_few_functions_of_the_library():
    ours, _ = calls_of_ten_steps()
    assert 200 < ours <= 700  # the lower limit shows that it counts


def test_python_around_a_step_is_not_more_than_that_of_a_hand_loop_which_lists_parameters():
    model, counts = layers(), Counter()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with counting(counts):
        for batch in [torch.ones(2, 4)] * 10:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    _, others = calls_of_ten_steps()
    assert others <= counts[False]


def test_the_librarys_own_calls_do_not_grow_with_the_number_of_parameters():
    assert calls_of_ten_steps(model=layers(2))[0] == calls_of_ten_steps(model=layers(8))[0]


def test_hooks_that_do_nothing_cost_nothing():
    assert calls_of_ten_steps([Idle(number) for number in range(10)]) == calls_of_ten_steps()


def test_hooks_that_have_nothing_to_do_at_a_step_ask_little(tmp_path):
    without, others = calls_of_ten_steps()
    checkpointing, others_too = calls_of_ten_steps([CheckpointingHook(1000, path=tmp_path, load=None)])
    assert 20 <= checkpointing - without <= 65  # its methods, the properties it reads, whether this is the last step
    assert others_too == others


def test_a_hook_that_reports_means_calls_a_few_functions_for_each_value():
    without, _ = calls_of_ten_steps()
    reporting, _ = calls_of_ten_steps([ProgressHook(1000)])
    assert 100 <= reporting - without <= 260  # five values in each step, and one report


def test_an_average_that_a_graph_moved_is_counted_in_one_call():
    engine, counts = scalar_engine(hooks=[hook := EmaHook(0.9)]), Counter()
    engine.run([1.0], max_steps=1)
    ema, idle = hook.ema_model, Counter()
    with counting(idle):
        pass
    with counting(counts):
        ema.count_update()
    assert (counts[True] - idle[True], counts[False] - idle[False]) == (1, 0)  # none of torch's
    assert ema.num_updates == ema.snapshot()["num_updates"] == 2


def test_methods_replaced_on_a_hook_are_called_as_those_of_its_class():
    calls = []
    hook = Idle(0)
    hook.on_before_step = lambda trainer: calls.append("before")

    class Replaces(BaseHook):
        def on_before_train(self, trainer):
            hook.on_after_step = lambda trainer: calls.append("after")

    scalar_engine(hooks=[hook, Replaces()]).run([1.0], max_steps=2)
    assert calls == ["before", "after"] * 2


@pytest.mark.parametrize("replace", [False, True])
def test_hooks_that_come_or_go_during_a_run_are_heard_from_then_on(replace):
    calls = []

    class Late(Idle):
        def on_after_step(self, trainer):
            calls.append((self.number, trainer.step))

    class Changes(BaseHook):
        def on_before_step(self, trainer):
            if trainer.step == 2 and replace:
                trainer.hooks = [*trainer.hooks[1:], Late(2)]
            elif trainer.step == 2:
                del trainer.hooks[0]
                trainer.hooks.append(Late(2))

    scalar_engine(hooks=[Late(1), Changes()]).run([1.0], max_steps=3)
    assert calls == [(1, 1), (2, 2), (2, 3)]


def test_between_two_runs_a_hook_may_change_and_single_steps_call_every_hook():
    calls = []
    hook = Idle(0)
    engine = scalar_engine(hooks=[hook])
    engine.run([1.0], max_steps=1)
    hook.on_after_step = lambda trainer: calls.append(trainer.step)
    engine.run([1.0], max_steps=2)
    hook.on_before_step = lambda trainer: calls.append("before")
    engine.step_group([1.0])
    assert calls == [2, "before", 3]


NOT_LOOKED_INTO = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, logging.Logger)


def num_reachable(root):
    """Return how many objects can be reached from one, numbers and texts in containers included."""
    seen, waiting = {}, [root]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, NOT_LOOKED_INTO):
            seen[id(one)] = one
            waiting.extend(gc.get_referents(one))
    return len(seen)


class Sizes(BaseHook):
    """Counts what the trainer holds at some steps."""

    def __init__(self, *steps):
        self.steps = steps
        self.found = []

    def on_after_step(self, trainer):
        if trainer.step in self.steps:
            self.found.append(num_reachable(trainer))


def held_by_a_run(tmp_path, *extra, blocks):
    """Return how many objects a trainer with the usual hooks holds after 128 steps and so many blocks later."""
    optimizer = torch.optim.SGD((model := layers()).parameters(), lr=0.01)
    hooks = [
        EmaHook(0.9), ProgressHook(32), LoggingHook(16), ThroughputHook(32), StepLogHook(tmp_path / "steps.jsonl", 64),
        CheckpointingHook(320, path=tmp_path, keep_previous=1), *extra, sizes := Sizes(128, last := 128 + 320 * blocks),
    ]  # fmt: skip
    # In 320 steps each hook has reported, means are folded in blocks of 64, and an epoch of 10 has ended.
    engine = Engine(model, optimizer, Fit(), device="cpu", grad_clip=1.0, hooks=hooks)
    engine.run([torch.ones(2, 4)] * 10, max_steps=last + 1)
    return sizes.found


def test_what_a_run_holds_does_not_grow_with_its_steps(tmp_path):
    early, late = held_by_a_run(tmp_path, blocks=3)
    assert abs(late - early) <= 20  # of 960 steps; some, since small numbers are shared and large ones are not


def test_a_hook_that_keeps_a_number_of_each_step_would_be_seen(tmp_path):
    class Keeps(BaseHook):
        numbers = ()

        def on_after_step(self, trainer):
            self.numbers = (*self.numbers, 0.5 * trainer.step)

    early, late = held_by_a_run(tmp_path, Keeps(), blocks=1)
    assert late - early >= 320
