"""Members that launch much or wait let the others work: the order of launches and waits, on made-up streams."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import signal
import threading
import time

import pytest
import torch

from treadle.capture.graph import Branch
from treadle.device.handover import host_is_shared, launch_times, run_off_turn, wait_for
from treadle.population import Population, member_thread, turns
from treadle.population.member import Member, Workspaces


class Stream:
    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


@pytest.fixture(autouse=True)
def made_up_streams(monkeypatch):
    monkeypatch.setattr(turns._Streams, "__init__", lambda self: setattr(self, "_free", [Stream() for _ in range(8)]))
    monkeypatch.setattr(turns._Streams, "take", lambda self: self._free.pop(0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


class Event:
    """Is over after some looks at it."""

    def __init__(self, looks):
        self.looks, self.waited = looks, False

    def query(self):
        self.looks -= 1
        return self.looks < 0

    def synchronize(self):
        self.waited = True


def run(tmp_path, train, seeds=3):
    def make(seed):
        return functools.partial(train, seed)

    return Population(make, seeds=range(seeds), out=tmp_path, progress=False).run()


def test_launches_of_members_alternate_and_are_all_made_before_a_member_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(member_thread, "LAUNCH_SECONDS", 60.0)
    launched = []

    def train(seed):
        launch_times(lambda: launched.append(seed), 100)
        return {"launched": launched.count(seed)}

    results = run(tmp_path, train)
    assert [row.metrics["launched"] for row in results.rows] == [100, 100, 100]
    at_once = [len(list(group)) for _, group in itertools.groupby(launched)]
    assert len(at_once) > 3 * 100 / member_thread.LAUNCHES_PER_TURN / 2
    assert max(at_once[3:-3]) == member_thread.LAUNCHES_PER_TURN


def test_launches_that_take_long_alternate_one_by_one(tmp_path):
    launched = []

    def train(seed):
        launch_times(lambda: (launched.append(seed), time.sleep(2 * member_thread.LAUNCH_SECONDS)), 20)
        return {"launched": launched.count(seed)}

    results = run(tmp_path, train)
    assert [row.metrics["launched"] for row in results.rows] == [20, 20, 20]
    assert max(len(list(group)) for _, group in itertools.groupby(launched)) <= 2


def test_a_launch_that_fails_fails_its_member_alone(tmp_path):
    def train(seed):
        def launch():
            if seed == 1:
                raise ValueError("no memory")

        launch_times(launch, 20)
        return {"done": seed}

    rows = run(tmp_path, train).rows
    assert [row.status for row in rows] == ["finished", "failed", "finished"]
    assert rows[1].error == "ValueError: no memory"


def test_members_begin_one_in_a_round_so_that_their_epochs_do_not_end_together(tmp_path):
    order = []

    def train(seed):
        for number in range(3):
            order.append((seed, number))
            wait_for(Event(looks=1))  # over at the next look: a turn ends
        return {}

    run(tmp_path, train, seeds=3)
    reached = {seed: order.index((seed, 0)) for seed in range(3)}
    done = [sum(each[0] == 0 for each in order[: reached[seed]]) for seed in range(3)]
    assert done == sorted(set(done))  # the first has moved on between the starts of the others


def test_others_work_while_a_member_waits(tmp_path):
    order = []

    def train(seed):
        event = Event(looks=3 if seed == 0 else 0)
        order.append(f"{seed} waits")
        wait_for(event)
        order.append(f"{seed} goes on")
        return {"waited": int(event.waited)}

    rows = run(tmp_path, train, seeds=2).rows
    assert order == ["0 waits", "1 waits", "1 goes on", "0 goes on"]
    assert [row.metrics for row in rows] == [{"waited": 1.0}] * 2


def test_where_all_wait_one_goes_on(tmp_path):
    assert len(run(tmp_path, lambda seed: wait_for(Event(looks=10**6)), seeds=2).rows) == 2


def test_others_work_while_a_member_writes(tmp_path):
    order = []
    others_done = threading.Event()

    def train(seed):
        if seed == 0:
            order.append("0 writes")
            done = run_off_turn(lambda: others_done.wait(30))
            order.append("0 goes on")
            return {"done": int(done)}
        order.append(f"{seed} works")
        if seed == 2:
            others_done.set()
        return {"done": 1}

    rows = run(tmp_path, train).rows
    assert order == ["0 writes", "1 works", "2 works", "0 goes on"]
    assert [row.metrics for row in rows] == [{"done": 1.0}] * 3


def test_an_error_of_what_a_member_writes_is_its_own(tmp_path):
    def train(seed):
        before = random.random()
        with contextlib.suppress(OSError):
            run_off_turn(functools.partial(os.stat, tmp_path / "nothing"))
        return {"drawn": before + random.random()}

    rows = run(tmp_path, train, seeds=2).rows
    random.seed(1)
    assert rows[1].metrics == {"drawn": random.random() + random.random()}


def test_where_all_write_a_signal_finds_them(tmp_path):
    member = Member("seed=0", {"seed": 0}, tmp_path)
    thread = member_thread.MemberThread(
        lambda seed: lambda: run_off_turn(lambda: time.sleep(0.2)), member, turns.ProcessState.capture(),
        workspaces=Workspaces(), steps=1, stream=Stream(),
    )  # fmt: skip
    thread.take_turn()
    assert thread.waits
    thread.end_with(SystemExit(128 + signal.SIGTERM))
    assert thread.ended


def test_random_numbers_are_those_of_the_run_alone_whatever_a_member_waits_for(tmp_path):
    def train(seed, alone=False):
        random.seed(seed), torch.manual_seed(seed)
        drawn = []
        for _ in range(3):
            if not alone:
                launch_times(lambda: random.random(), 9)
                wait_for(Event(looks=2))
            drawn.append(random.random() + float(torch.rand(())))
        return {f"drawn {number}": value for number, value in enumerate(drawn)}

    rows = run(tmp_path, train).rows
    assert [row.metrics for row in rows] == [train(seed, alone=True) for seed in range(3)]


def test_a_member_that_is_ended_has_launched_what_it_began(tmp_path, monkeypatch):
    monkeypatch.setattr(member_thread, "LAUNCH_SECONDS", 60.0)
    launched = []

    def make(seed):
        return lambda: launch_times(lambda: launched.append(seed), 50)

    member = Member("seed=0", {"seed": 0}, tmp_path)
    thread = member_thread.MemberThread(
        make, member, turns.ProcessState.capture(), workspaces=Workspaces(), steps=1, stream=Stream()
    )
    thread.take_turn()
    thread.take_turn()
    assert len(launched) == member_thread.LAUNCHES_PER_TURN
    thread.end_with(SystemExit(128 + signal.SIGTERM))
    assert len(launched) == 50


def test_steps_of_members_are_recorded_without_branches(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr("treadle.capture.graph._branch_stream", lambda device: "beside")
    seen = []
    run(tmp_path, lambda seed: seen.append((host_is_shared(), Branch(torch.device("cuda"))._stream)), seeds=1)
    assert (*seen, Branch(torch.device("cuda"))._stream) == ((True, None), "beside")
