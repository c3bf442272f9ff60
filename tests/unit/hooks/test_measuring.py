from __future__ import annotations

import json
import logging
import re
from types import SimpleNamespace

import pytest
import torch

from helpers import Snapshots
from hook_kit import Small, bare_engine
from treadle.device.host_transfer import HostTransfer
from treadle.errors import ConfigError
from treadle.hooks import BaseHook, CudaMaxMemoryHook, LoggingHook, ProfilerHook, ProgressHook, ThroughputHook


class Logged(BaseHook):
    def __init__(self):
        self.points = []

    def on_log(self, trainer, records, dry_run=False):
        self.points.append((trainer.step, records))


# -- throughput -------------------------------------------------------------------------------------------------------


def test_throughput_is_reported_at_the_interval_and_at_the_last_step(tmp_path):
    logged = Logged()
    Small(5, tmp_path, [ThroughputHook(2), logged]).train()
    assert [step for step, _ in logged.points] == [2, 4, 5]
    for _, records in logged.points:
        rates = records["throughput"]
        assert rates["samples_per_second"] == pytest.approx(2 * rates["steps_per_second"])
        assert rates["steps_per_second"] > 0


def test_throughput_counts_the_steps_and_the_waiting_for_data(tmp_path):
    class Clock(BaseHook):
        def on_after_step(self, trainer):
            trainer.step_info.update(step_time=0.5, data_time=[0.25, 0.25], num_samples=32)

    logged = Logged()
    Small(4, tmp_path, [Clock(), ThroughputHook(2), logged]).train()
    rates = {"throughput": {"steps_per_second": 1.0, "samples_per_second": 32.0}}
    assert logged.points == [(2, rates), (4, rates)]


def test_unknown_samples_are_left_out(tmp_path):
    class Uncounted(Small):
        def forward(self, input):
            return super().forward(input).loss, {}

    logged = Logged()
    Uncounted(2, tmp_path, [ThroughputHook(2), logged]).train()
    assert set(logged.points[0][1]["throughput"]) == {"steps_per_second"}


def test_a_throughput_interval_below_1_is_refused():
    with pytest.raises(ConfigError, match="interval"):
        ThroughputHook(0)


# -- profiler ---------------------------------------------------------------------------------------------------------


def traces(workspace):
    return sorted(path.name for path in (workspace / "profile").iterdir())


def test_the_trace_is_chrome_json_with_the_recorded_steps(tmp_path):
    Small(6, tmp_path, [ProfilerHook(wait=1, warmup=1, active=2)]).train()
    assert traces(tmp_path) == ["trace_step_4.json"]
    events = json.loads((tmp_path / "profile" / "trace_step_4.json").read_text())["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert "aten::linear" in names
    assert {"ProfilerStep#2", "ProfilerStep#3"} <= names
    assert "ProfilerStep#1" not in names


def test_each_round_has_a_trace_of_its_own(tmp_path):
    Small(7, tmp_path, [ProfilerHook(wait=1, warmup=1, active=1, repeat=2)]).train()
    assert traces(tmp_path) == ["trace_step_3.json", "trace_step_6.json"]


def test_a_recording_that_the_end_cuts_short_is_written(tmp_path):
    Small(2, tmp_path, [ProfilerHook(wait=0, warmup=1, active=5)]).train()
    assert traces(tmp_path) == ["trace_step_2.json"]


def test_a_run_too_short_for_a_trace_is_warned_of(tmp_path, caplog):
    Small(2, tmp_path, [ProfilerHook()]).train()
    assert any("no trace" in record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert not (tmp_path / "profile").exists()


def test_a_trace_that_cannot_be_written_does_not_end_the_training(tmp_path, caplog):
    (tmp_path / "profile").write_text("a file where the folder should be")
    trainer = Small(4, tmp_path, [ProfilerHook(wait=0, warmup=1, active=1)])
    trainer.train()
    assert trainer.step == 4
    assert any("writing the trace failed" in record.message for record in caplog.records)


@pytest.mark.parametrize("arguments", [{"wait": -1}, {"warmup": -1}, {"active": 0}, {"repeat": -1}])
def test_a_schedule_outside_its_range_is_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        ProfilerHook(**arguments)


def test_the_profiler_needs_a_workspace_for_a_relative_path():
    with pytest.raises(ConfigError, match="workspace="):
        ProfilerHook().on_before_train(bare_engine(None))


def test_only_rank_0_is_profiled(tmp_path, other_rank):
    Small(3, tmp_path, [ProfilerHook(wait=0, warmup=0, active=1)]).train()
    assert list(tmp_path.iterdir()) == []


# -- memory -----------------------------------------------------------------------------------------------------------


def test_without_cuda_no_memory_is_measured_and_it_is_said_once(tmp_path, caplog):
    hook, logged = CudaMaxMemoryHook(), Logged()
    trainer = Small(2, tmp_path, [hook, LoggingHook(1), logged])
    trainer.train()
    trainer.max_steps = 4
    trainer.train()
    assert all("max_memory" not in records["train"] for _, records in logged.points)
    assert "max_memory" not in trainer.step_info
    assert [record.levelno for record in caplog.records if "CudaMaxMemoryHook" in record.message] == [logging.WARNING]


@pytest.mark.parametrize("first", [True, False])
def test_the_peak_reaches_the_log_wherever_the_hook_stands(tmp_path, monkeypatch, first):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**29)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    hook, logged = CudaMaxMemoryHook(), Logged()
    hooks = [hook, LoggingHook(1)] if first else [LoggingHook(1), hook]
    trainer = Small(2, tmp_path, [*hooks, logged])
    looks_for_cuda = CudaMaxMemoryHook.on_before_train

    def on_a_cuda_device(self, trainer):
        trainer.precision.device, cpu = torch.device("cuda", 0), trainer.device
        looks_for_cuda(self, trainer)
        trainer.precision.device = cpu

    monkeypatch.setattr(CudaMaxMemoryHook, "on_before_train", on_a_cuda_device)
    trainer.train()
    assert [records["train"]["max_memory"] for _, records in logged.points] == [1.5, 1.5]
    assert trainer.step_info["max_memory"] == 1.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_peak_of_a_step_on_cuda_is_that_of_the_allocator():
    hook, engine = CudaMaxMemoryHook(), bare_engine(None)
    engine.precision.device = torch.device("cuda", 0)
    hook.on_before_train(engine)
    engine.attempt.info = {}
    hook.on_before_step(engine)
    before = torch.cuda.memory_allocated() / 2**30  # by other tests of this process
    block = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    del block
    hook.on_after_step(engine)
    assert 0.25 <= engine.step_info["max_memory"] - before < 0.3
    hook.on_before_step(engine)
    hook.on_after_step(engine)
    assert engine.step_info["max_memory"] - before < 0.05


def test_a_progress_line_about_steps_of_another_process_shows_no_times(caplog):
    snapshots = Snapshots()
    bare_engine(hooks=[snapshots, ProgressHook(3)]).run([torch.ones(2, 3)] * 4, max_steps=4)
    hook = ProgressHook(3)
    resumed = bare_engine(hooks=[Snapshots(), hook])
    resumed.load_state_dict(snapshots.states[2])
    with caplog.at_level("INFO", "treadle"):
        hook.on_after_train(resumed)  # nothing but an evaluation was left to do
    assert caplog.messages[-1].startswith("Step 2/0: loss ")


def test_the_time_left_is_hours_minutes_and_seconds_also_of_more_than_a_day(caplog, monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            self.now += 50_000.0
            return self.now

    clock = Clock()
    for module in ("progress", "reporting"):
        monkeypatch.setattr(f"treadle.hooks.{module}.time", clock)
    with caplog.at_level("INFO", "treadle"):
        bare_engine(hooks=[ProgressHook(1, eta_warmup=1)]).run([torch.ones(2, 3)] * 3, max_steps=3)
    assert " eta 27:46:40 loss " in next(line for line in caplog.messages if line.startswith("Step 1/3"))


def lines_of(caplog, *, looks, monkeypatch, **options):
    """Return the lines of a run whose numbers are there after so many looks, without what depends on the time."""
    left = iter([False] * looks)

    def there(numbers):
        nonlocal left
        ready = next(left, True)
        if ready:
            left = iter([False] * looks)
        return ready

    monkeypatch.setattr(HostTransfer, "done", property(there))
    caplog.clear()
    torch.manual_seed(0)
    with caplog.at_level("INFO", "treadle"):
        bare_engine(hooks=[ProgressHook(2), Says()], **options).run([torch.ones(2, 3)] * 3, max_steps=9)
    return [re.sub(r" step .* loss", " loss", line) for line in caplog.messages if line.startswith(("Step", "at"))]


class Says(BaseHook):
    def on_after_step(self, trainer):
        trainer.logger.info("at %d", trainer.step)


def test_lines_that_come_late_are_the_same(caplog, monkeypatch):
    on_time = lines_of(caplog, looks=0, monkeypatch=monkeypatch)
    late = lines_of(caplog, looks=5, monkeypatch=monkeypatch)
    assert sorted(on_time) == sorted(late)
    assert on_time.index("at 2") == late.index("at 2") + 1  # the line of step 2 comes after it
    for lines in (on_time, late):
        assert [line.split("/")[0] for line in lines if line.startswith("S")] == [f"Step {n}" for n in (2, 4, 6, 8, 9)]


def test_a_state_is_saved_after_the_lines_before_it(caplog, monkeypatch):
    monkeypatch.setattr(HostTransfer, "done", False)
    engine = bare_engine(hooks=[ProgressHook(2)])
    with caplog.at_level("INFO", "treadle"):
        engine.run([torch.ones(2, 3)] * 5, max_steps=5)
        before = [line for line in caplog.messages if line.startswith("Step")]
        engine.state_dict()
    assert [line.split("/")[0] for line in before] == ["Step 2", "Step 4", "Step 5"]


def test_a_late_line_about_a_refused_step_is_an_error(monkeypatch):
    monkeypatch.setattr(HostTransfer, "done", False)
    asked = []
    trainer = SimpleNamespace(
        num_ranks=1, is_last_step=False, step=2, step_info={}, last_lr=[],
        raise_if_refused=lambda: asked.append("asked"),
    )  # fmt: skip
    hook = ProgressHook(2)
    hook.report = lambda trainer, means: asked.append("reported")
    for norm in (1.0, float("nan")):
        hook._means.add({"grad_norm": norm})
        hook._report(trainer)
        hook._deliver(trainer)
    assert asked == ["reported", "asked", "reported"]
