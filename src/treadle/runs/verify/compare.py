"""Comparison of the records of two runs: the first difference, and how many records differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.runs.verify.recorder import PARTS

COMPARED = ("step", "epoch", "end")
STEPS = "steps"


@dataclass(frozen=True)
class Difference:
    """First difference between a run and the first uninterrupted one.

    Attributes:
        uninterrupted: whether the other run was uninterrupted too.
        kind: the record, ``"step"``, ``"epoch"`` or ``"end"``.
        step: the step of the record.
        resumed_at: the step that the process of the record started from.
        part: a key of ``PARTS``, or ``"steps"``.
        leaf: the position in the part.
        expected: the value of the first uninterrupted run.
        found: the value of the other run.
        parts: every part of the record that differs.
        outside: values outside checkpoints that differ: name -> (expected, found).
        seeds: calls that seeded a generator in the forward pass: (of the first uninterrupted run, of the other).
    """

    uninterrupted: bool
    kind: str
    step: int
    resumed_at: int
    part: str
    leaf: str
    expected: str
    found: str
    parts: frozenset[str] = frozenset()
    outside: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    seeds: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @property
    def after_resume(self) -> int:
        """The number of steps after a resume; 1 is the first."""
        return self.step - self.resumed_at


@dataclass
class PartResult:
    """Comparison of one part over all records.

    Attributes:
        records: the number of records compared.
        differing: the number of records that differ.
        first_step: the smallest step where it differs, or None.
    """

    records: int = 0
    differing: int = 0
    first_step: int | None = None

    def count(self, step: int, differs: bool) -> None:
        """Add one record."""
        self.records += 1
        self.differing += differs
        if differs:
            self.first_step = step if self.first_step is None else min(step, self.first_step)


class Comparison:
    """Comparison of runs with the first uninterrupted one.

    Args:
        reference: the lines of the first uninterrupted run.

    Attributes:
        parts: the result of each part, in the order of ``PARTS``.
        records: the number of records compared.
        unseeded: generators not compared, since their initial state differs between runs: ``"python"``, ``"numpy"``.
    """

    def __init__(self, reference: Iterable[Mapping[str, Any]]):
        self._reference = {(line["kind"], line["step"]): line for line in reference if line["kind"] in COMPARED}
        self.parts: dict[str, PartResult] = {}
        self.records = 0
        self.unseeded: frozenset[str] = frozenset()

    def leave_out_unseeded(self, other: Sequence[Mapping[str, Any]]) -> None:
        """Find the generators whose initial state differs in another uninterrupted run.

        A script may seed torch alone. That is fine as long as nothing draws from the others; if something does, the
        drawn values differ and are reported.
        """
        part = "random state before the forward pass"
        ours = next((line for line in self._reference.values() if line["kind"] == "step"), None)
        theirs = next((line for line in other if line["kind"] == "step"), None)
        if ours is not None and theirs is not None:
            before, now = ours["parts"].get(part, {}), theirs["parts"].get(part, {})
            self.unseeded = frozenset(name for name in ("python", "numpy") if before.get(name) != now.get(name))

    def first_difference(self, lines: Iterable[Mapping[str, Any]], *, uninterrupted: bool) -> Difference | None:
        """Compare every record of a run and return the first difference."""
        first: Difference | None = None
        resumed_at = 0
        for line in lines:
            if line["kind"] == "start":
                resumed_at = line["step"]
            if line["kind"] in COMPARED:
                found = self._compare(line, resumed_at, uninterrupted)
                first = first or found
        return first

    def _compare(self, line: Mapping[str, Any], resumed_at: int, uninterrupted: bool) -> Difference | None:
        self.records += 1
        place = {"uninterrupted": uninterrupted, "kind": line["kind"], "step": line["step"], "resumed_at": resumed_at}
        reference = self._reference.get((line["kind"], line["step"]))
        if reference is None:
            return Difference(**place, part=STEPS, leaf="", expected="no such step", found="one more")
        differing: dict[str, tuple[str, str, str]] = {}
        for part in PARTS:
            ours, theirs = reference["parts"].get(part, {}), line["parts"].get(part, {})
            if ours or theirs:
                leaf = self._first_leaf(part, ours, theirs)
                self.parts.setdefault(part, PartResult()).count(line["step"], leaf is not None)
                if leaf is not None:
                    differing[part] = (leaf, ours.get(leaf, "nothing"), theirs.get(leaf, "nothing"))
        if not differing:
            return None
        part, (leaf, expected, found) = next(iter(differing.items()))
        return Difference(
            **place,
            part=part, leaf=leaf, expected=expected, found=found, parts=frozenset(differing),
            outside=_changed(reference["outside"], line["outside"]),
            seeds=(tuple(reference["seeds"]), tuple(line["seeds"])),
        )  # fmt: skip

    def _first_leaf(self, part: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
        if ours == theirs:
            return None
        random = part.startswith("random state") or part == "data position"
        for leaf in dict.fromkeys([*ours, *theirs]):
            left_out = random and not self.unseeded.isdisjoint(leaf.split("."))
            if ours.get(leaf) != theirs.get(leaf) and not left_out:
                return leaf
        return None


def _changed(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    names = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    return {name: (ours[name], theirs[name]) for name in names}


def same_seed_each_step(lines: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a call that seeds a generator alike in the forward pass of every step, or None.

    A resume is still exact, but this is hardly intended. A call inside a block that restores the state does not count,
    since the generator continues afterwards.
    """
    steps = [line for line in lines if line["kind"] == "step"]
    for call in steps[0]["seeds"] if len(steps) > 1 else []:
        generator = {"torch": "torch", "numpy": "numpy"}.get(call.partition(".")[0], "python")
        states = {line["parts"].get("random state after the forward pass", {}).get(generator) for line in steps}
        if len(states) == 1 and all(call in line["seeds"] for line in steps):
            return str(call)
    return None
