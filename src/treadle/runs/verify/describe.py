"""Descriptions of a verification's result, in words and as plain values."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from treadle.errors import number_of
from treadle.runs.verify.compare import STEPS, Difference
from treadle.runs.verify.jobs import Kill
from treadle.runs.verify.recorder import PARTS

if TYPE_CHECKING:
    from treadle.runs.verify.runs import Verification


def verdict_reason(result: Verification) -> str:
    """Return the sentence after the verdict."""
    steps = number_of(result.last_step - result.first_step, "step")
    if result.verdict == "EXACT":
        kills = f"{number_of(len(result.kills), 'kill')} ({'; '.join(describe_kill(kill) for kill in result.kills)})"
        return (
            f"{steps}, {kills}: {number_of(result.records, 'record')} and the end state equal the uninterrupted run's "
            f"to the bit ({result.seconds:.0f} s)"
        )
    difference = result.difference
    if difference is None:
        return result.reason
    what = "the number of steps" if difference.part == STEPS else difference.part
    if difference.uninterrupted:
        return f"two uninterrupted runs already differ, first in the {what} of step {difference.step}"
    return f"step {difference.step} differs in the {what}, {_since(difference)}"


def _since(difference: Difference) -> str:
    if difference.resumed_at == 0:
        return "though the run had not been resumed"
    if difference.after_resume == 1:
        return f"in the first step after the resume at step {difference.resumed_at}"
    return f"{difference.after_resume} steps after the resume at step {difference.resumed_at}"


def describe_difference(difference: Difference) -> str:
    """Return a sentence with the first difference of two runs and both values.

    Example:
        >>> describe_difference(Difference(False, "step", 7, 6, "loss", "0.0", "0.5", "0.25"))
        'step 7, loss (0.0): 0.5 in the uninterrupted run and 0.25 in the first step after the resume at step 6'
    """
    where = {"step": "step", "epoch": "the epoch's end at step", "end": "the end, at step"}[difference.kind]
    leaf = f" ({difference.leaf})" if difference.leaf else ""
    if difference.part == "sample ids":
        leaf = f" (micro-batch {int(difference.leaf.split(' ')[0]) + 1})"
    other = "in the second" if difference.uninterrupted else _since(difference)
    run = "first uninterrupted run" if difference.uninterrupted else "uninterrupted run"
    return (
        f"{where} {difference.step}, {difference.part}{leaf}: {difference.expected} in the {run} and "
        f"{difference.found} {other}"
    )


def describe_kill(kill: Kill) -> str:
    """Describe where a kill happened.

    Example:
        >>> describe_kill(Kill(5, "SIGKILL", "before"))
        'SIGKILL before the checkpoint of step 5'
    """
    place = "inside step" if kill.place == "inside" else f"{kill.place} the checkpoint of step"
    return f"{kill.signal} {place} {kill.step}"


def as_json(result: Verification) -> dict[str, Any]:
    """Return the result as plain values."""
    difference = None
    if result.difference is not None:
        difference = dataclasses.asdict(result.difference)
        difference["parts"] = [part for part in PARTS if part in result.difference.parts]
        difference["sentence"] = describe_difference(result.difference)
    plain = {
        field.name: getattr(result, field.name)
        for field in dataclasses.fields(result)
        if field.name not in ("difference", "cause", "parts", "kills", "folder", "reason")
    }
    return {
        **plain,
        "reason": verdict_reason(result),
        "folder": str(result.folder),
        "kills": [dataclasses.asdict(kill) for kill in result.kills],
        "parts": {part: dataclasses.asdict(counted) for part, counted in result.parts.items()},
        "difference": difference,
        "cause": None if result.cause is None else dataclasses.asdict(result.cause),
    }
