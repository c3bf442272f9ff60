"""What a thread is doing, read off its Python stack: the thread itself pays nothing for it."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from types import FrameType

_LIBRARY = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH_DISTRIBUTED = os.path.join("torch", "distributed") + os.sep
_EXCHANGES = ("gradient_exchange.py", os.path.join("treadle", "distributed.py"))
_INNERMOST = 6  # frames; a collective is called by what waits for it
# The outermost match counts; a pair (file, function) says more than a file.
_PLACES = (
    ("session.py", "resume_from_hooks", "resuming"),
    ("epoch_end.py", "finish_epoch", "ending the epoch"),
    ("evaluation.py", None, "evaluating"),
    ("events.py", "write_requested", "saving"),
    ("checkpoint" + os.sep, None, "saving"),
    ("data" + os.sep + "cursor.py", None, "loading data"),
)


@dataclass(frozen=True)
class Whereabouts:
    """Where a thread is.

    Attributes:
        doing: in words, the outer part first; empty where the library's files say nothing.
        waits: whether it is inside a collective, so that it may wait for other ranks.
    """

    doing: str
    waits: bool


def whereabouts(thread: int) -> Whereabouts:
    """Returns what a thread does at this moment.

    Args:
        thread: its ``ident``.

    Example:
        >>> import threading
        >>> whereabouts(threading.get_ident())
        Whereabouts(doing='', waits=False)
    """
    frames = _outermost_first(sys._current_frames().get(thread))
    words: list[str] = []
    in_hooks = False
    for frame in frames:
        path, function = frame.f_code.co_filename, frame.f_code.co_name
        if in_hooks:
            words.append(f"in {function} of {type(frame.f_locals.get('self')).__name__}")
        inside = path.removeprefix(_LIBRARY) if path.startswith(_LIBRARY) else None
        in_hooks = inside == "events.py" and function == "emit"
        for place, name, word in _PLACES if inside is not None else ():
            if inside is not None and inside.startswith(place) and name in (None, function) and word not in words:
                words.append(word)
    innermost = [frame.f_code.co_filename for frame in frames[-_INNERMOST:]]
    waits = any(_TORCH_DISTRIBUTED in path or path.endswith(_EXCHANGES) for path in innermost)
    return Whereabouts(", ".join(words), waits)


def stack_of(thread: int) -> str:
    """Returns the Python stack of a thread, the innermost call last, as a traceback shows it.

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
