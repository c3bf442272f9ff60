"""The rank that the others wait for is named, with what it is doing; nobody is accused in a healthy run."""

from __future__ import annotations

import logging
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_on_ranks
from treadle import BaseTrainer, StuckRankHook, distributed
from treadle.errors import ConfigError
from treadle.hooks import BaseHook, watchdog
from treadle.hooks.thread_activity import thread_activity
from treadle.hooks.watchdog import Note, stuck_ranks

TIMEOUT, INTERVAL, PATIENCE = 0.8, 0.1, 120.0  # seconds


class Clock:
    """The watchdog's, which goes on only while a rank is stuck on purpose: on a slow machine others are quiet too."""

    def __init__(self, goes_on):
        self.goes_on, self.value, self.last = goes_on, 0.0, None

    def monotonic(self):
        now = time.monotonic() if self.goes_on.exists() else None
        if now is not None and self.last is not None:
            self.value += now - self.last
        self.last = now
        return self.value


class Pause:
    """Keeps a rank where it is until the watchdog has shown where that is, once the others wait for it."""

    def __init__(self, goes_on):
        self.goes_on = goes_on

    def __call__(self, trainer):
        wait_until(lambda: self.others_wait(trainer))
        self.began = time.monotonic()
        self.goes_on.touch()
        wait_until(lambda: any("is here" in line for _, line in trainer.listener.lines))
        self.goes_on.unlink()

    def others_wait(self, trainer):
        mine, watch = trainer.watch.place(trainer)[:3], trainer.watch._watch
        notes = watch._board.notes() if watch._board.is_shared else []
        waiting = [note.rank for note in notes if note.waits and note.place >= mine]
        return len(waiting) == distributed.world_size() - 1


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


class Data:
    def __init__(self, pause):
        self.pause = pause

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 6:
            raise IndexError
        if index == 3 and self.pause:
            self.pause()  # here it is stuck
        return torch.ones(2, 3)


class Heard(logging.Handler):
    def __init__(self):
        super().__init__(logging.ERROR)
        self.lines = []

    def emit(self, record):
        self.lines.append((time.monotonic(), record.getMessage()))


class Fit(BaseTrainer):
    def __init__(self, watch, *hooks, pause=None):
        super().__init__(6, device="cpu", logger=logging.getLogger("treadle.stuck"))
        self.watch, self.given, self.pause, self.listener = watch, [watch, *hooks], pause, Heard()

    def build_data_loader(self):
        return Data(self.pause and (lambda: self.pause(self)))

    def build_model(self):
        model = nn.Linear(3, 1)
        return nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def build_hooks(self):
        return self.given

    def forward(self, input):
        return self.model(input).mean(), {}


class Slow(BaseHook):
    """Stuck in a hook of its own after a step."""

    def __init__(self, pause):
        self.pause = pause

    def on_after_step(self, trainer):
        if trainer.step == 2 and dist.get_rank() == 0:
            self.pause(trainer)


def listened(fit):
    logger = logging.getLogger("treadle.stuck")
    logger.addHandler(fit.listener)
    fit.train()
    for thread in threading.enumerate():
        if thread.name == "treadle-watchdog":
            thread.join(PATIENCE)  # it was told to end, and has the time that a slow machine takes
            assert not thread.is_alive()
    logger.removeHandler(fit.listener)
    return fit.listener.lines


def train(folder):
    goes_on = Path(folder, "goes_on")
    pause = Pause(goes_on)
    watchdog.time = Clock(goes_on)
    stuck = Fit(StuckRankHook(TIMEOUT, INTERVAL), pause=pause if dist.get_rank() == 1 else None)
    loading = listened(stuck), getattr(pause, "began", None)
    in_a_hook = listened(Fit(StuckRankHook(TIMEOUT, INTERVAL), Slow(pause)))
    watchdog.time = time
    healthy = listened(Fit(StuckRankHook(30.0, 0.05), pause=lambda trainer: time.sleep(0.5)))
    return loading, in_a_hook, healthy


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    return run_on_ranks(train, 2, str(tmp_path_factory.mktemp("clock")))


def test_the_stuck_rank_is_named_with_its_step_and_what_it_does(heard):
    (moment, line), *more = heard[0][0][0]
    assert more == []
    pattern = r"rank 1 \(.+, process \d+\) has been in step 4 \(loading data\) for \d+ s; the others wait for it"
    assert re.fullmatch(pattern, line)
    assert moment - heard[1][0][1] > TIMEOUT


def test_the_stuck_rank_shows_the_line_where_it_is(heard):
    (_, line), *more = heard[1][0][0]
    assert more == []
    assert line.startswith("rank 1 is here:")
    assert "self.pause()  # here it is stuck" in line
    assert "py-spy dump --pid" in line


def test_a_rank_stuck_in_a_hook_is_told_from_those_that_wait_for_it(heard):
    assert "rank 0" in heard[0][1][0][1]
    assert "(in on_after_step of Slow)" in heard[0][1][0][1]
    assert heard[1][1] == []


def test_nobody_is_accused_in_a_healthy_run(heard):
    assert heard[0][2] == heard[1][2] == []


def test_one_process_says_what_it_is_doing(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "time", Clock(tmp_path / "goes_on"))
    (_, line), (_, stack) = listened(Fit(StuckRankHook(0.3, 0.05), pause=Pause(tmp_path / "goes_on")))
    assert re.fullmatch(r"rank 0 \(.+, process \d+\) has been in step 4 \(loading data\) for \d+ s", line)
    assert "here it is stuck" in stack


def note(rank, *place, waits=False, quiet=10.0):
    return Note(rank, "host", 1, place, "", waits, quiet, 1)


@pytest.mark.parametrize(("notes", "stuck"), [
    ([note(0, 5, 0, 4, waits=True), note(1, 4, 2, 4)], [1]),
    ([note(0, 5, 0, 4), note(1, 4, 2, 4, quiet=1.0)], []),
    ([note(0, 5, 0, 4), note(1, 5, 0, 4, waits=True), note(2, 5, 0, 4, waits=True)], [0]),
    ([note(0, 5, 1, 4, waits=True), note(1, 5, 0, 4, waits=True)], [1]),
    ([note(0, 5, 0, 4), note(1, 5, 0, 4)], [0, 1]),
    ([], []),
])  # fmt: skip
def test_stuck_is_who_waits_for_nobody_and_is_behind(notes, stuck):
    assert [found.rank for found in stuck_ranks(notes, 5.0)] == stuck


@pytest.mark.parametrize("settings", [{"timeout": 0.0}, {"timeout": -1.0}, {"timeout": 10.0, "interval": 11.0},
                                      {"timeout": float("nan")}, {"interval": 0.0}])  # fmt: skip
def test_values_outside_their_range_are_refused(settings):
    with pytest.raises(ConfigError):
        StuckRankHook(**settings)


def test_a_thread_in_no_part_of_the_library_says_nothing():
    assert thread_activity(-1).doing == ""
