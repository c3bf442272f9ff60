"""Runs of one process that take turns: one thread each, of which exactly one runs at a time, with its own RNG.

A member is a function that is independent of the others, so that every front end, pack and script can be one. After
some steps it yields to the next. Process-wide state that changes during a run belongs to the member and is swapped with
it: the generators of Python, NumPy and torch, the number of threads, torch's flags and the observers. On a GPU each
member has a stream, on which its graphs are captured too; the GPU works on all of them concurrently while the host
launches one after another. So that no member blocks the host, it also yields when it would wait for the GPU, and when
it would launch many graphs: the main thread launches these, some of each member at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from treadle.device.garbage import ShortCollections
from treadle.device.handover import shared_host
from treadle.engine.observers import exchange_observers
from treadle.engine.run_log import RUN_LOG
from treadle.engine.signals import SignalRelay
from treadle.population.member import Make, Member, Outcome, run_member

T = TypeVar("T")
MAX_STREAMS = 32  # streams in torch's pool before it reuses one
SWITCH = 1e-4  # switch interval in seconds while another thread writes a file; 5e-3 by default
AT_ONCE = 8  # graphs of a member launched before those of the next,
AT_LONGEST = 5e-5  # and the time limit in seconds: a few large graphs would fill the stream's queue,
OF_SEVERAL = 2e-4  # unlike graphs of several short steps


class Source(Protocol):
    """Source of members that decides which runs next."""

    def next(self) -> Member | None:
        """Return a member to run, or None if there is none, or none before another ends."""
        ...

    def tell(self, member: Member, outcome: Outcome) -> None:
        """Receive the outcome of a member."""
        ...


@dataclass
class ProcessState:
    """Process-wide state that belongs to the running member."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: list[torch.Generator]
    observers: list[Any]
    threads: int
    deterministic: tuple[bool, bool]
    cudnn: tuple[bool, bool, bool]
    matmul_tf32: bool
    dtype: torch.dtype

    @classmethod
    def capture(cls) -> ProcessState:
        """Read the current state; for CUDA the generators themselves, which graphs refer to."""
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(),
            cpu=torch.get_rng_state(),
            cuda=[generator.graphsafe_get_state() for generator in _cuda_generators()],
            observers=exchange_observers([]),
            threads=torch.get_num_threads(),
            deterministic=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            cudnn=(
                torch.backends.cudnn.deterministic,
                torch.backends.cudnn.benchmark,
                torch.backends.cudnn.allow_tf32,
            ),
            matmul_tf32=torch.backends.cuda.matmul.allow_tf32,
            dtype=torch.get_default_dtype(),
        )

    def restore(self) -> None:
        """Restore the state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for generator, state in zip(_cuda_generators(), self.cuda, strict=False):
            generator.graphsafe_set_state(state)
        exchange_observers(self.observers)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != self.deterministic:
            torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        cudnn = torch.backends.cudnn
        if (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32) != self.cudnn:
            cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = self.cudnn
        if torch.backends.cuda.matmul.allow_tf32 != self.matmul_tf32:
            torch.backends.cuda.matmul.allow_tf32 = self.matmul_tf32
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)


def _cuda_generators() -> list[torch.Generator]:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return []
    return list(torch.cuda.default_generators)


def _cloned(generators: list[torch.Generator]) -> list[torch.Generator]:
    """Return generators with the same state that share nothing with the given ones or their graphs."""
    return [generator.clone_state() for generator in generators]


def _closed() -> threading.Lock:
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

    def go_on(self, most: int) -> None:
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


class Seat:
    """Thread of a member that shares the host with the others.

    Args:
        make: the factory.
        member: whose run.
        state: initial state of the run.
        steps: steps per turn.
        stream: on which the member computes; None for that of the thread.
    """

    def __init__(self, make: Make, member: Member, state: ProcessState, *, steps: int, stream: Any = None):
        self.member = member
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None  # that ended the thread without an outcome
        self._make = make
        self._state = dataclasses.replace(state, cuda=_cloned(state.cuda), observers=list(state.observers))
        self._steps = steps
        self._stream = stream
        self._left = steps
        self._go, self._back = _closed(), _closed()
        self._asks: Callable[[], None] | None = None
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
            self._launches.go_on(AT_ONCE)
            if self._launches.left:
                return
        self._run()

    def _run(self) -> None:
        """Run the member for a turn and serve its requests."""
        RUN_LOG.member = self.member.name
        try:
            if self.thread.ident is None:
                self.thread.start()
            else:
                self._go.release()
            self._back.acquire()
            while (asked := self._asks) is not None:
                self._asks = None
                asked()
                self._go.release()
                self._back.acquire()
        finally:
            RUN_LOG.member = None
        if self.outcome is not None or self.error is not None:
            self.thread.join()

    def end_with(self, error: BaseException) -> None:
        """Raise an error in the member and wait for its end."""
        if self._launches is not None and self._launches.left:
            while self._launches.left:  # no step is left partially launched
                self._launches.go_on(self._launches.left)
        self._ends_with = error
        while not self.ended:
            self.take_turn()

    # -- in the thread of the member --------------------------------------------------------------------------------

    def ask(self, function: Callable[[], None]) -> None:
        """Call a function in the main thread, and wait for it."""
        if threading.current_thread() is not self.thread:
            function()
            return
        self._asks = function
        self._back.release()
        self._go.acquire()

    def _work(self, device: int | None) -> None:
        try:
            with contextlib.ExitStack() as stack:
                if device is not None:
                    torch.cuda.set_device(device)
                    stack.enter_context(torch.cuda.stream(self._stream))
                stack.enter_context(shared_host(self))
                self._state.restore()
                self.outcome = run_member(self._make, self.member, turn=self._after_steps)
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
            self._hand_over()
        if self._ends_with is not None:
            error, self._ends_with = self._ends_with, None
            raise error

    def launch(self, launch: Callable[[], None], count: int, steps: int) -> None:
        """Launch work on the member's stream from the main thread, interleaved with that of the others."""
        if self._stream is None or count * steps <= AT_ONCE or self._ends_with is not None:
            for _ in range(count):
                launch()
            return
        self._launches = Launches(launch, count, self._stream, AT_LONGEST if steps == 1 else OF_SEVERAL)
        self._left += count * steps  # their turn has already passed when they are counted
        self._hand_over()
        error, self._launches = self._launches.error, None
        if error is not None:
            raise error

    def wait(self, ready: Callable[[], bool]) -> None:
        """Yield to the others until something is ready, or until all of them wait."""
        if self._ends_with is not None:
            return
        self._ready = ready
        self._hand_over()
        self._ready = None

    def beside(self, work: Callable[[], T]) -> T:
        """Yield to the others until a function has returned, in this thread."""
        if self._ends_with is not None:
            return work()
        done = threading.Event()
        self._ready = done.is_set
        self._state = ProcessState.capture()
        self._back.release()
        try:
            return work()
        finally:
            done.set()
            self._go.acquire()
            self._state.restore()
            self._ready = None

    def _hand_over(self) -> None:
        self._state = ProcessState.capture()
        self._back.release()
        self._go.acquire()
        self._state.restore()


def run_in_turns(
    make: Make, source: Source, *, together: int, steps: int, admit: Callable[[int], bool] = lambda running: True
) -> int | None:
    """Train the members of a source in this process, several at a time in turns of some steps.

    Args:
        make: the factory.
        source: gives members and receives their outcomes.
        together: number of concurrent members, >= 1.
        steps: steps per turn, >= 1.
        admit: called with the number of running members before another one starts.

    Returns:
        The signal that ended the run of the members, or None.

    Raises:
        KeyboardInterrupt: SIGINT arrived and no member handles it.
    """
    streams = _Streams()
    begun, interval = ProcessState.capture(), sys.getswitchinterval()
    begun.restore()
    seats: list[Seat] = []
    relay = SignalRelay(functools.partial(_ask_from_this_thread, seats))
    collections = ShortCollections()
    try:
        if torch.cuda.is_available():
            collections.begin()  # during a full one no member launches work
        sys.setswitchinterval(SWITCH)
        with relay.installed():
            waiting: Member | None = None
            while True:
                # One in each round: members that begin together also end their epochs together, and then all of them
                # want the host while the GPU has nothing to do.
                begins = False
                if len(seats) < together and relay.received is None:
                    waiting = waiting or source.next()
                    begins = waiting is not None and (not seats or admit(len(seats)))
                if begins:
                    assert waiting is not None
                    seats.append(Seat(make, waiting, begun, steps=steps, stream=streams.take()))
                    waiting = None
                    seats[-1].take_turn()
                    _collect(seats, source, streams)
                elif not seats:
                    return relay.received
                able = [seat for seat in seats if not seat.waits] or ([] if begins else seats[:1])
                for seat in list(seats) if relay.received is not None else able:
                    if relay.received is not None and not relay.serves(seat.thread):
                        seat.end_with(SystemExit(128 + relay.received))
                    else:
                        seat.take_turn()
                _collect(seats, source, streams)
    except BaseException as error:
        for seat in seats:
            seat.end_with(type(error)() if isinstance(error, KeyboardInterrupt) else SystemExit(1))
        raise
    finally:
        sys.setswitchinterval(interval)
        collections.end()
        begun.restore()


def _ask_from_this_thread(seats: list[Seat], function: Callable[[], None]) -> None:
    """Have the main thread call a function, and wait for it."""
    seat = next((each for each in seats if each.thread is threading.current_thread()), None)
    function() if seat is None else seat.ask(function)


def _collect(seats: list[Seat], source: Source, streams: _Streams) -> None:
    """Report the members that have ended to the source."""
    for seat in [each for each in seats if each.ended]:
        seats.remove(seat)
        streams.give_back(seat._stream)
        if seat.error is not None:
            raise seat.error
        assert seat.outcome is not None
        source.tell(seat.member, seat.outcome)


class _Streams:
    """Streams of the members, each used by one at a time; none on the CPU."""

    def __init__(self) -> None:
        self._free: list[Any] = []
        if torch.cuda.is_available():
            self._free = [torch.cuda.Stream() for _ in range(MAX_STREAMS)]  # type: ignore[no-untyped-call]

    def take(self) -> Any:
        """Return a stream that waits for earlier launches."""
        if not self._free:
            return None
        stream = self._free.pop(0)
        stream.wait_stream(torch.cuda.current_stream())
        return stream

    def give_back(self, stream: Any) -> None:
        """Return a stream to the pool once it is idle."""
        if stream is not None:
            stream.synchronize()
            self._free.append(stream)


@contextlib.contextmanager
def kept_levels() -> Iterator[None]:
    """Restore the levels of the library's loggers, since overlapping runs restore each other's.

    Example:
        >>> with kept_levels():
        ...     logging.getLogger("treadle.population").setLevel(logging.ERROR)
    """
    names = [name for name in logging.root.manager.loggerDict if name.startswith("treadle")]
    before = {name: logging.getLogger(name).level for name in names}
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
