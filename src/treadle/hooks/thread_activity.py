"""Activity of a thread, read from its Python stack at no cost to the thread."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from types import CodeType, FrameType

from treadle import checkpoint
from treadle.data import cursor
from treadle.distributed import gradients, ranks
from treadle.engine import epoch_end, evaluation, session
from treadle.engine.events import Events

_INNERMOST = 6  # innermost frames that may contain a collective
_BY_FUNCTION: dict[CodeType, str] = {
    session.resume_from_hooks.__code__: "resuming",
    epoch_end.finish_epoch.__code__: "ending the epoch",
    Events.write_requested.__code__: "saving",
}
_BY_PATH = (
    (evaluation.__file__, "evaluating"),
    (os.path.dirname(checkpoint.__file__) + os.sep, "saving"),
    (cursor.__file__, "loading data"),
)
_WAITING = (
    os.path.join("torch", "distributed") + os.sep,
    ranks.__file__,
    gradients.__file__,
)


@dataclass(frozen=True)
class ThreadActivity:
    """Activity of a thread at one moment.

    Attributes:
        doing: description, outermost part first; empty if no part of the library is on the stack.
        waits: whether it is inside a collective, so that it may wait for other ranks.
    """

    doing: str
    waits: bool


def thread_activity(thread: int) -> ThreadActivity:
    """Return the activity of a thread at this moment.

    Args:
        thread: ``ident`` of the thread.

    Example:
        >>> import threading
        >>> thread_activity(threading.get_ident())
        ThreadActivity(doing='', waits=False)
    """
    frames = _outermost_first(sys._current_frames().get(thread))
    words: list[str] = []
    in_hooks = False
    for frame in frames:
        if in_hooks:
            words.append(f"in {frame.f_code.co_name} of {type(frame.f_locals.get('self')).__name__}")
        in_hooks = frame.f_code is Events.emit.__code__
        word = _word_for(frame.f_code)
        if word is not None and word not in words:
            words.append(word)
    innermost = [frame.f_code.co_filename for frame in frames[-_INNERMOST:]]
    waits = any(place in path for path in innermost for place in _WAITING)
    return ThreadActivity(", ".join(words), waits)


def _word_for(code: CodeType) -> str | None:
    by_path = (word for path, word in _BY_PATH if code.co_filename.startswith(path))
    return _BY_FUNCTION.get(code) or next(by_path, None)


def stack_of(thread: int) -> str:
    """Return the Python stack of a thread, innermost call last, like a traceback.

    Example:
        >>> import threading
        >>> "stack_of" in stack_of(threading.get_ident())
        True
    """
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)).rstrip()


def _outermost_first(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]
