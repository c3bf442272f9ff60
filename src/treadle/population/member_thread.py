"""Thread of a member, which shares the host with the threads of the others."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from treadle.device.handover import shared_host
from treadle.engine.run_log import RUN_LOG
from treadle.population.member import Make, Member, Outcome, Workspaces, run_member
from treadle.population.process_state import ProcessState, cloned

T = TypeVar("T")
LAUNCHES_PER_TURN = 8  # graphs of a member launched before those of the next,
LAUNCH_SECONDS = 5e-5  # and the time limit in seconds: a few large graphs would fill the stream's queue,
BLOCK_LAUNCH_SECONDS = 2e-4  # unlike graphs of several short steps


def _closed_gate() -> threading.Lock:
    """Return a gate at which one thread waits until another opens it for a single pass."""
    gate = threading.Lock()
    gate.acquire()
    return gate


@dataclass
class Launches:
    """Pending work of a member on its stream, launched some at a time.

    Attributes:
        launch: launches one piece of work.
        left: number of pieces left to launch.
        stream: stream of the work.
        seconds: time limit before the next member's turn.
        error: error of a launch, which ends the work.
    """

    launch: Callable[[], None]
    left: int
    stream: Any
    seconds: float
    error: Exception | None = None

    def launch_some(self, most: int) -> None:
        """Launch some work, at least one piece."""
        end = time.perf_counter() + self.seconds
        try:
            with torch.cuda.stream(self.stream):
                for _ in range(min(most, self.left)):
                    self.launch()
                    self.left -= 1
                    if time.perf_counter() > end:
                        break
        except Exception as error:  # noqa: BLE001  (raised again in the thread of the member)
            self.error, self.left = error, 0


class MemberThread:
    """Thread of a member that shares the host with the others.

    Args:
        make: the factory.
        member: member to train.
        state: initial state of the run.
        workspaces: workspaces of all members.
        steps: steps per turn.
        stream: stream on which the member computes; None for that of the thread.
    """

    def __init__(
        self,
        make: Make,
        member: Member,
        state: ProcessState,
        *,
        workspaces: Workspaces,
        steps: int,
        stream: Any = None,
    ):
        self.member = member
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None  # that ended the thread without an outcome
        self.stream = stream
        self._make, self._workspaces = make, workspaces
        self._state = dataclasses.replace(
            state, numpy=state.numpy.cloned(), cuda=cloned(state.cuda), observers=list(state.observers)
        )
        self._steps = steps
        self._left = steps
        self._go, self._back = _closed_gate(), _closed_gate()
        self._requested: Callable[[], None] | None = None
        self._launches: Launches | None = None
        self._ready: Callable[[], bool] | None = None
        self._ends_with: BaseException | None = None
        device = torch.cuda.current_device() if stream is not None else None
        self.thread = threading.Thread(target=self._work, args=(device,), name=f"treadle {member.name}", daemon=True)

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return not self.thread.is_alive() and self.thread.ident is not None

    @property
    def waits(self) -> bool:
        """Whether the member is waiting for the GPU."""
        return self._ready is not None and not self._ready()

    def take_turn(self) -> None:
        """Launch some of the member's work, or let it run for a turn while the main thread waits."""
        if self._launches is not None and self._launches.left:
            self._launches.launch_some(LAUNCHES_PER_TURN)
            if self._launches.left:
                return
        self._run()

    def _run(self) -> None:
        """Run the member for a turn and serve its requests."""
        RUN_LOG.name_member(self.member.name)
        try:
            if self.thread.ident is None:
                self.thread.start()
            else:
                self._go.release()
            self._back.acquire()
            while (asked := self._requested) is not None:
                self._requested = None
                asked()
                self._go.release()
                self._back.acquire()
        finally:
            RUN_LOG.name_member(None)
        if self.outcome is not None or self.error is not None:
            self.thread.join()

    def end_with(self, error: BaseException) -> None:
        """Raise an error in the member and wait for its end."""
        if self._launches is not None and self._launches.left:
            while self._launches.left:  # no step is left partially launched
                self._launches.launch_some(self._launches.left)
        self._ends_with = error
        while not self.ended:
            self.take_turn()

    # -- in the thread of the member --------------------------------------------------------------------------------

    def call_in_main_thread(self, function: Callable[[], None]) -> None:
        """Call a function in the main thread, and wait for it."""
        if threading.current_thread() is not self.thread:
            function()
            return
        self._requested = function
        self._back.release()
        self._go.acquire()

    def _work(self, device: int | None) -> None:
        try:
            with contextlib.ExitStack() as stack:
                if device is not None:
                    torch.cuda.set_device(device)
                    stack.enter_context(torch.cuda.stream(self.stream))
                stack.enter_context(shared_host(self))
                self._state.restore()
                self.outcome = run_member(self._make, self.member, workspaces=self._workspaces, turn=self._after_steps)
        except BaseException as error:  # noqa: BLE001  (raised again in the main thread)
            self.error = error
        finally:
            self._make = None  # type: ignore[assignment]  # nothing of the run stays alive
            self._back.release()

    def _after_steps(self, count: int) -> None:
        self._left -= count
        if self._left > 0 and self._ends_with is None:
            return
        self._left = self._steps
        if self._ends_with is None:
            self._yield_host()
        if self._ends_with is not None:
            error, self._ends_with = self._ends_with, None
            raise error

    def launch(self, launch: Callable[[], None], count: int, steps: int) -> None:
        """Launch work on the member's stream from the main thread, interleaved with that of the others."""
        if self.stream is None or count * steps <= LAUNCHES_PER_TURN or self._ends_with is not None:
            for _ in range(count):
                launch()
            return
        self._launches = Launches(launch, count, self.stream, LAUNCH_SECONDS if steps == 1 else BLOCK_LAUNCH_SECONDS)
        self._left += count * steps  # their turn has already passed when they are counted
        self._yield_host()
        error, self._launches = self._launches.error, None
        if error is not None:
            raise error

    def wait(self, ready: Callable[[], bool]) -> None:
        """Yield to the others until something is ready, or until all of them wait."""
        if self._ends_with is not None:
            return
        self._ready = ready
        self._yield_host()
        self._ready = None

    def run_off_turn(self, work: Callable[[], T]) -> T:
        """Yield to the others until a function has returned, in this thread."""
        if self._ends_with is not None:
            return work()
        done = threading.Event()
        self._ready = done.is_set
        self._state = ProcessState.capture(self._state)
        self._back.release()
        try:
            return work()
        finally:
            done.set()
            self._go.acquire()
            self._state.restore()
            self._ready = None

    def _yield_host(self) -> None:
        self._state = ProcessState.capture(self._state)
        self._back.release()
        self._go.acquire()
        self._state.restore()
