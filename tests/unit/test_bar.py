"""The progress bar: a bar on a terminal, lines anywhere else, nothing in a checkpoint."""

from __future__ import annotations

import builtins
import io
import logging
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from treadle import ConfigError, Engine, ProgressBarHook, ProgressHook, StepOutput
from treadle.engine.screens import fit_to_width


class _Square:
    def step(self, model: nn.Module, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        return StepOutput(((model(batch) - 1) ** 2).mean(), num_samples=len(batch))


class _Clock:
    """Stands for ``time``: every look at it is at the time that was set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


class _Slow(_Square):
    """Each step takes as long as the clock is moved."""

    def __init__(self, clock: _Clock, seconds: float):
        self.clock, self.seconds = clock, seconds

    def step(self, *args: Any, **kwargs: Any) -> StepOutput:
        self.clock.now += self.seconds
        return super().step(*args, **kwargs)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    for module in ("treadle.hooks.bar.time", "treadle.hooks.progress.time", "treadle.hooks.reporting.time"):
        monkeypatch.setattr(module, made)
    return made


def _engine(hook: ProgressBarHook) -> Engine:
    model = nn.Linear(1, 1)
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), _Square(), device="cpu", hooks=[hook])


_LOADER = [torch.ones(2, 1)] * 4


def _terminal(width: int = 120) -> Console:
    return Console(force_terminal=True, file=io.StringIO(), width=width)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_a_bar_with_everything_on_it() -> None:
    console = _terminal()
    _engine(ProgressBarHook(console=console, status=lambda: "val 0.5")).run(_LOADER, epochs=2)
    text = _text(console)
    assert "\x1b[" in text
    for part in ("epoch 2/2", "step 8/8", "loss ", "lr 0.1", "grad ", "/s", "val 0.5", "━"):
        assert part in text


def test_the_line_never_wraps_on_a_narrow_terminal() -> None:
    console = _terminal(width=40)
    _engine(ProgressBarHook(console=console)).run(_LOADER, epochs=1)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", _text(console)).replace("\r", "\n").splitlines()
    assert max(len(line) for line in lines) <= 40
    assert "epoch 1/1 loss" in lines[-1] or any("epoch 1/1" in line and "loss" in line for line in lines)


def test_what_does_not_fit_goes_by_rank() -> None:
    parts = [(0, "loss 1"), (2, "lr 2"), (1, "eta 3")]
    assert fit_to_width(parts, 100) == "loss 1 lr 2 eta 3"
    assert fit_to_width(parts, 13) == "loss 1 eta 3"
    assert fit_to_width(parts, 3) == "los"
    assert fit_to_width([(0, "loss 1"), (1, "a long score"), (2, "lr 2")], 13) == "loss 1 lr 2"  # what is left is used


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = _terminal()
    _engine(ProgressBarHook(console=console)).run(_LOADER, epochs=1)
    assert "\x1b[3" not in _text(console)  # no colours; the cursor still moves


def test_anything_else_gets_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "treadle.engine")
    _engine(ProgressBarHook(line_seconds=0, console=Console(file=io.StringIO()))).run(_LOADER, epochs=2)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch")]
    assert lines[0].startswith("epoch 1/2 step 1/8 loss ")
    assert lines[-1].startswith("epoch 2/2 step 8/8 loss ")
    assert len(lines) == 8  # the last step of an epoch is told with its evaluation
    assert not any("\x1b" in line for line in lines)


def test_few_lines_when_epochs_are_short(clock: _Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "treadle.engine")
    engine = _engine(ProgressBarHook(console=Console(file=io.StringIO())))
    engine.task = _Slow(clock, 0.01)
    engine.run(_LOADER, epochs=50)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch")]
    assert len(lines) == 1  # the end
    assert "step 200/200" in lines[0]


def test_force_color_makes_no_bar_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    _engine(ProgressBarHook()).run(_LOADER, epochs=1)
    assert "\x1b" not in capsys.readouterr().err


def test_tensors_are_read_only_when_something_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = ProgressBarHook(refresh_seconds=1000, console=_terminal())
    reads: list[int] = []
    compute = hook._means.compute
    monkeypatch.setattr(hook._means, "compute", lambda *args: reads.append(1) or compute(*args))
    _engine(hook).run(_LOADER, max_steps=4)
    assert len(reads) == 1  # the last step


def test_the_time_left_is_of_this_process(clock: _Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "treadle.engine")
    hook = ProgressBarHook(line_seconds=0, console=Console(file=io.StringIO()))
    engine = _engine(hook)
    engine.task = _Slow(clock, 100.0)
    engine.run(_LOADER, max_steps=2)
    caplog.clear()
    engine.task = _Slow(clock, 100_000.0)
    engine.run(_LOADER, max_steps=4)
    assert hook._first_step == 2
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch")]
    assert "eta 27:46:40" in lines[0]


def test_it_is_no_part_of_a_checkpoint() -> None:
    engine = _engine(ProgressBarHook(console=_terminal()))
    engine.run(_LOADER, max_steps=2)
    assert engine.state_dict()["hooks"] == {}


def test_the_bar_is_closed_when_training_fails() -> None:
    class Broken(_Square):
        def step(self, *args: Any, **kwargs: Any) -> StepOutput:
            raise KeyError("user code")

    hook = ProgressBarHook(console=_terminal())
    engine = _engine(hook)
    engine.task = Broken()
    with pytest.raises(KeyError):
        engine.run(_LOADER, max_steps=2)
    assert hook._screen is None


def test_a_failed_run_leaves_no_bar_above_its_error() -> None:
    class Broken(_Square):
        def step(self, *args: Any, **kwargs: Any) -> StepOutput:
            raise KeyError("user code")

    console = _terminal()
    engine = _engine(ProgressBarHook(console=console))
    engine.task = Broken()
    with pytest.raises(KeyError):
        engine.run(_LOADER, max_steps=2)
    drawn = _text(console)
    assert "starting at step 0" in drawn
    assert "starting" not in drawn[drawn.rindex("\x1b[2K") :]  # the last thing done is to erase the line


def test_the_number_of_epochs_is_that_of_the_target(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "treadle.engine")
    engine = _engine(ProgressBarHook(line_seconds=0, console=Console(file=io.StringIO())))
    engine.run(_LOADER, epochs=3)
    engine.run(_LOADER[:2], epochs=4)  # step 14 of 14, in which an epoch has 2 steps
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch")]
    assert lines[-1].startswith("epoch 4/4 step 14/14")


def test_rich_is_asked_for_only_when_training_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_rich(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError("No module named 'rich'")
        return real(name, *args, **kwargs)

    engine = _engine(ProgressBarHook())
    monkeypatch.setattr(builtins, "__import__", without_rich)
    with pytest.raises(ImportError, match=r"pip install 'treadle\[cli\]'"):
        engine.run(_LOADER, max_steps=1)


@pytest.mark.parametrize("values", [{"refresh_seconds": 0.0}, {"line_seconds": -1.0}, {"line_seconds": float("nan")}])
def test_times_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ProgressBarHook(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda: ProgressBarHook(line_seconds=0), lambda: ProgressHook(eta_warmup=1)])
def test_rate_and_time_left_after_a_resume_are_of_this_process(
    make: Any, clock: _Clock, caplog: pytest.LogCaptureFixture
) -> None:
    first = _engine(make())
    first.task = _Slow(clock, 100.0)
    first.run(_LOADER, max_steps=6)
    second = _engine(make())
    second.load_state_dict(first.state_dict())
    second.task = _Slow(clock, 2.0)
    clock.now += 3600  # it lay still for an hour
    caplog.clear()
    with caplog.at_level(logging.INFO):
        second.run(_LOADER, max_steps=10)
    lines = [message for message in caplog.messages if "/10" in message and "loss" in message]
    left = [found[1] for line in lines if (found := re.search(r"eta (\S+)", line))]
    assert left[:3] == ["0:00:06", "0:00:04", "0:00:02"]
    rates = [found[1] for line in lines if (found := re.search(r" (\d+)/s", line))]
    assert set(rates) <= {"1"}  # two samples in two seconds


class _Notebook(io.StringIO):
    """What a kernel gives for stderr: it is no terminal, and has no number."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


def test_a_notebook_without_widgets_gets_one_line_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    stream = _Notebook()
    _engine(ProgressBarHook(console=Console(force_jupyter=True, file=stream))).run(_LOADER, epochs=2)
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    last = text.rstrip().split("\r")[-1]
    assert "epoch 2/2 step 8/8 loss " in last
    assert "\x1b" not in text


@pytest.mark.parametrize("stream", [_Notebook(), None, object()])
def test_any_stream_for_stderr_is_good_enough(
    stream: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    with caplog.at_level(logging.INFO):
        _engine(ProgressBarHook(line_seconds=0)).run(_LOADER, epochs=1)
    assert any("epoch 1/1" in message for message in caplog.messages)


def test_no_color_draws_a_bar_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = _terminal()
    _engine(ProgressBarHook(console=console)).run(_LOADER, epochs=1)
    assert "epoch 1/1" in _text(console)
    assert re.findall(r"\x1b\[(?:3|4|9|10)\d", _text(console)) == []
