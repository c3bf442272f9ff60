"""StepLogHook: one line for each step, exact to the bit, whatever ends the run."""

from __future__ import annotations

import json
import math
import resource
import signal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import Scalar
from hook_kit import Stop
from treadle import BaseTrainer, CheckpointingHook, ConfigError, NonFiniteError, StepLogHook, StepOutput
from treadle.hooks import BaseHook
from treadle.hooks.steplog import read_steps


class Fit(BaseTrainer):
    def __init__(self, folder, hooks, steps=7, data=(1.0, 2.0, 4.0), **settings):
        super().__init__(steps, workspace=folder, device="cpu", **settings)
        self.given, self.data = hooks, data

    def build_data_loader(self):
        return list(self.data)

    def build_model(self):
        return Scalar(0.3)

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self, input):
        if input is None:
            return StepOutput(None)
        return StepOutput(self.model(input), weight=input if input > 0 else 1.0)

    def build_hooks(self):
        return self.given


class Losses(BaseHook):
    def __init__(self):
        self.seen = {}

    def on_after_step(self, trainer):
        self.seen[trainer.step] = [None if loss is None else float(loss) for loss in trainer.step_info["loss"]]


def lines(folder):
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_one_line_a_step_with_the_loss_to_the_bit(tmp_path):
    losses = Losses()
    Fit(tmp_path, [StepLogHook(), losses]).train()
    rows = lines(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert [[row["loss"]] for row in rows] == list(losses.seen.values())
    assert [(row["epoch"], row["position"]) for row in rows] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1)]
    assert rows[0] == {
        "step": 1, "epoch": 1, "position": 1, "loss": float(torch.tensor(0.3)), "grad_norm": 1.0, "lr": [0.1],
        "applied": True, "retries": 0, "reason": None,
    }  # fmt: skip


def test_with_accumulation_the_loss_is_the_weighted_mean_of_those_beside_it(tmp_path):
    losses = Losses()
    Fit(tmp_path, [StepLogHook(), losses], 2, (1.0, None, 3.0), gradient_accumulation_steps=3).train()
    for row in lines(tmp_path):
        first, none, third = row["losses"]
        assert [first, none, third] == losses.seen[row["step"]]
        assert row["loss"] == (first * 1.0 + third * 3.0) / 4.0


def test_a_step_without_a_loss_has_a_line_that_says_why(tmp_path):
    Fit(tmp_path, [StepLogHook()], 2, (None, 1.0)).train()
    first, second = lines(tmp_path)
    assert (first["loss"], first["applied"], first["reason"]) == (None, False, "no micro-batch had a loss")
    assert second["applied"]


@pytest.mark.parametrize("interval", [1, 3, 100])
def test_a_resumed_run_has_the_lines_of_one_that_never_stopped(tmp_path, interval):
    Fit(tmp_path / "straight", [StepLogHook(interval=interval), CheckpointingHook(2)]).train()
    for stop in range(1, 7):
        folder = tmp_path / str(stop)
        with pytest.raises(RuntimeError, match="stopped"):
            Fit(folder, [StepLogHook(interval=interval), CheckpointingHook(2), Stop(stop)]).train()
        assert len(lines(folder)) == stop  # what was noted is written when the run ends, by an error too
        Fit(folder, [CheckpointingHook(2), StepLogHook(interval=interval)]).train()
        assert (folder / "steps.jsonl").read_text() == (tmp_path / "straight" / "steps.jsonl").read_text()


def test_a_checkpoint_never_lies_ahead_of_the_lines(tmp_path):
    seen = []

    class Look(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step == 5:  # as a kill would find it
                seen.append([row["step"] for row in lines(tmp_path)])

    Fit(tmp_path, [StepLogHook(interval=100), CheckpointingHook(2), Look()]).train()
    assert seen == [[1, 2, 3, 4]]


def test_the_step_that_ended_the_run_is_in_it(tmp_path):
    with pytest.raises(NonFiniteError):
        Fit(tmp_path, [StepLogHook()], 3, (1.0, math.nan)).train()
    first, second = lines(tmp_path)
    assert first["applied"]
    assert (second["loss"], second["grad_norm"], second["applied"]) == (None, None, False)
    assert second["reason"] == "non-finite gradient"


def test_a_fresh_run_sets_the_file_aside(tmp_path):
    for _ in range(2):
        Fit(tmp_path, [StepLogHook()], 2).train()
    assert (tmp_path / "steps.1.jsonl").read_text() == (tmp_path / "steps.jsonl").read_text()


class Reads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_before_it_is_written(tmp_path):
    counts = []
    for hooks in ([], [StepLogHook(interval=100)]):
        with Reads() as reads:
            Fit(tmp_path, hooks, 7).train()
        counts.append(reads.count)
    assert counts[1] == counts[0]  # seven steps are read as one tensor


def test_damaged_lines_are_left_out(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"loss": 1}\n[]\n{"step": 2, "lo')
    assert read_steps(path) == {1: {"step": 1, "loss": 0.5}}


def test_an_interval_below_one_is_refused():
    with pytest.raises(ConfigError, match="interval=0"):
        StepLogHook(interval=0)


class Full(BaseHook):
    """Lets files grow no further than the step log has by now, for one step: as a full disk does."""

    def __init__(self, path, step):
        self.path, self.step, self.before = path, step, resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_before_step(self, trainer):
        if trainer.step == self.step:
            most = self.path.stat().st_size + 20
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, self.before[1]))

    def on_before_optimizer_step(self, trainer):
        if trainer.step > self.step:
            self.on_close(trainer)

    def on_close(self, trainer, error=None):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_a_full_disk_costs_lines_and_not_the_training(tmp_path, caplog):
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        Fit(tmp_path, [Full(tmp_path / "steps.jsonl", 4), StepLogHook(interval=1)]).train()
    finally:
        signal.signal(signal.SIGXFSZ, before)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 5, 6, 7], "and no half line among them"
    assert "StepLogHook: writing at step 4 failed" in caplog.text
