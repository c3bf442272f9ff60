from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
from datetime import timedelta

import pytest
import torch
from torch import nn

from processes import python
from treadle import BaseHook, Trainer
from treadle.engine.signals import ExitPlan, SignalListener, exit_plan
from treadle.errors import ConfigError
from treadle.errors.interrupts import repeating_ignored_interrupts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


def write():
    pass


@pytest.mark.parametrize(("number", "code"), [(15, 143), (2, 130), (1, 129), (10, 138), (12, 140)])
def test_the_exit_code_is_128_and_the_signal(number, code):
    assert ExitPlan((1, 2, 10, 12, 15), write).exit_code(number) == code


@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_number_is_used_as_given(code):
    assert exit_plan(signal.SIGTERM, write, code=code).exit_code(15) == code


def test_one_signal_and_several_and_none():
    assert exit_plan(signal.SIGTERM, write).signals == (15,)
    assert exit_plan([signal.SIGTERM, 2], write).signals == (15, 2)
    assert exit_plan(None, write) is None
    assert exit_plan([], write) is None


def test_the_wait_may_be_a_timedelta():
    assert exit_plan(15, write, wait=timedelta(minutes=1)).wait == 60.0
    assert exit_plan(15, write, wait=2).wait == 2.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, 0, -1, 999])
def test_a_signal_that_cannot_be_handled_is_refused(number):
    with pytest.raises(ConfigError, match="exit_signals"):
        exit_plan([15, number], write)


@pytest.mark.parametrize("code", ["signal", "143", "", None, 143.5])
def test_another_word_as_code_is_refused(code):
    with pytest.raises(ConfigError, match="exit_code"):
        exit_plan(15, write, code=code)


def test_a_negative_wait_is_refused():
    with pytest.raises(ConfigError, match="exit_wait"):
        exit_plan(15, write, wait=-1)


def test_a_signal_is_noted_and_nothing_else_happens():
    listener = SignalListener()
    with listener.listening([signal.SIGUSR1, signal.SIGUSR2]):
        assert listener.received is None
        os.kill(os.getpid(), signal.SIGUSR2)
        assert listener.received == signal.SIGUSR2
        os.kill(os.getpid(), signal.SIGUSR1)
        assert listener.received == signal.SIGUSR2, "the first one decides"


@pytest.mark.parametrize("failing", [False, True])
def test_the_earlier_handlers_are_put_back(failing):
    calls = []
    mine = lambda number, frame: calls.append(number)  # noqa: E731
    outer = signal.signal(signal.SIGUSR1, mine), signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        listener = SignalListener()
        try:
            with listener.listening([signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1]):
                assert signal.getsignal(signal.SIGUSR1) is not mine
                if failing:
                    raise KeyError
        except KeyError:
            pass
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, outer[0])
        signal.signal(signal.SIGUSR2, outer[1])


def test_a_third_signal_goes_to_the_handler_from_before():
    calls = []
    outer = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    try:
        listener = SignalListener()
        with listener.listening([signal.SIGUSR1]):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR1)
            assert calls == []
            os.kill(os.getpid(), signal.SIGUSR1)
            assert calls == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, outer)


def test_a_third_signal_ends_a_process_that_had_no_handler():
    script = """
        import os, signal, time
        from treadle.engine.signals import SignalListener
        with SignalListener().listening([signal.SIGTERM]):
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    """
    done = python("-c", textwrap.dedent(script), timeout=60)
    assert done.returncode == -signal.SIGTERM


def test_a_second_use_starts_without_the_signals_of_the_first():
    listener = SignalListener()
    with listener.listening([signal.SIGUSR1]):
        os.kill(os.getpid(), signal.SIGUSR1)
    with listener.listening([signal.SIGUSR1]):
        assert listener.received is None


def test_no_signals_install_nothing():
    before = {number: signal.getsignal(number) for number in (1, 2, 10, 12, 15)}
    with SignalListener().listening([]):
        assert {number: signal.getsignal(number) for number in before} == before


def test_another_thread_is_told_that_python_handles_signals_in_the_main_one():
    errors = []

    def run():
        try:
            with SignalListener().listening([signal.SIGTERM]):
                pass
        except ConfigError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


def test_a_forked_worker_can_be_terminated_during_a_run_and_after_it():
    script = """
        import multiprocessing, os, signal, time
        from treadle.engine import signals
        from treadle.engine.signals import SignalListener
        signals._SECONDS_FOR_MAIN = 0.5
        context = multiprocessing.get_context("fork")
        with SignalListener().listening([signal.SIGTERM, signal.SIGINT]):
            workers = [context.Process(target=time.sleep, args=(50,), daemon=True) for _ in range(2)]
            for worker in workers:
                worker.start()
            time.sleep(0.3)
            workers[0].terminate()  # while the run goes on
            workers[0].join()
        workers[1].terminate()  # after it
        workers[1].join()
        print(*[worker.exitcode for worker in workers])
    """
    done = python("-c", textwrap.dedent(script), timeout=60)
    assert done.stdout.split() == ["-15", "-15"], done.stderr


def test_a_signal_to_the_whole_group_does_not_end_the_workers_that_the_save_needs():
    script = """
        import multiprocessing, os, signal, time
        from treadle.engine.signals import SignalListener
        os.setsid()
        context = multiprocessing.get_context("fork")
        listener = SignalListener()
        with listener.listening([signal.SIGTERM, signal.SIGINT]):
            worker = context.Process(target=time.sleep, args=(50,), daemon=True)
            worker.start()
            time.sleep(0.3)
            os.killpg(0, signal.SIGTERM)
            worker.join(0.5)
            print(listener.received, worker.exitcode)
        worker.terminate()
        worker.join()
        print(worker.exitcode)
    """
    done = python("-c", textwrap.dedent(script), timeout=60)
    assert done.stdout.split() == ["15", "None", "-15"], done.stderr


class Ignoring:
    """Object in whose end Ctrl-C arrives: Python prints a KeyboardInterrupt there and goes on."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


class EndsAnObject(BaseHook):
    def on_after_step(self, trainer):
        if trainer.step == 3:
            Ignoring()


def test_an_interrupt_that_python_ignores_ends_the_run_all_the_same():
    before = sys.unraisablehook
    for attempt in range(2):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, optimizer, nn.MSELoss(), device="cpu", hooks=[EndsAnObject()], progress=False)
        with pytest.raises(KeyboardInterrupt):
            trainer.train([(torch.ones(2, 2), torch.ones(2, 1))] * 10_000, 2)
        assert 3 <= trainer.step < 10_000, attempt
    assert sys.unraisablehook is before


class Fails:
    def __del__(self):
        raise RuntimeError("not an interrupt")


def test_other_errors_that_python_ignores_are_passed_on(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: seen.append(ignored.exc_type))
    with repeating_ignored_interrupts():
        Fails()
    assert seen == [RuntimeError]
