"""Search strategies that decide which member runs next: in order, successive halving, or an Optuna study.

Every decision is recorded in a journal before it takes effect, so that a killed population neither repeats nor revises
any: it reads them back, continues with the members that were running, and decides from there.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from treadle.errors import CheckpointError, ConfigError
from treadle.errors.arguments import check_whole
from treadle.hooks.files import append_lines, to_json
from treadle.population.member import Member, Outcome, Until

Placed = Callable[[Mapping[str, Any]], Member]


class InOrder:
    """Source of members in order, each trained to its end.

    Args:
        members: members in order.
        record: called with every outcome.

    Example:
        >>> source = InOrder([Member("a", {}, Path("a"))], record=lambda member, outcome: None)
        >>> source.next().name, source.next()
        ('a', None)
    """

    def __init__(self, members: Sequence[Member], *, record: Callable[[Member, Outcome], None]):
        self._waiting = list(members)
        self._record = record

    def next(self) -> Member | None:
        """Return the next member."""
        return self._waiting.pop(0) if self._waiting else None

    def tell(self, member: Member, outcome: Outcome) -> None:
        """Pass on an outcome."""
        self._record(member, outcome)


class Journal:
    """Journal of the decisions of a search in JSON lines, each appended before it takes effect.

    Args:
        path: the file.
        about: plain values of the search, which must match those in the file.

    Attributes:
        entries: entries of the file when it was opened.

    Raises:
        ConfigError: the file belongs to another search.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]):
        self.path = path
        kept = _lines_of(path)
        self.entries = kept[1:]
        about = json.loads(json.dumps(to_json(about)))
        if not kept:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(path, [json.dumps(about)])
        elif kept[0] != about:
            changed = sorted(key for key in {*about, *kept[0]} if about.get(key) != kept[0].get(key))
            raise ConfigError(
                f"{path} is of a search with different {', '.join(changed)}; choose another out=, or move the file away"
            )

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append an entry."""
        append_lines(self.path, [json.dumps(to_json(entry))])


def _lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a journal, truncating one left unfinished by a kill."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


@dataclasses.dataclass(frozen=True)
class SuccessiveHalving:
    """Asynchronous successive halving (ASHA): of the runs that reach a rung, the best fraction continues.

    A run that reaches a rung pauses there: it saves and ends. It continues once it is among the best ``1 / eta`` of
    those that have reached the rung; if no run can continue, a new one starts. With one member at a time the order of
    decisions is deterministic; with several it depends on which finishes first, and is recorded.

    Args:
        metric: a name of :attr:`Outcome.metrics`.
        rungs: epochs (or steps) at which runs pause, ascending; a run that passes all of them trains to its end.
        eta: reciprocal of the fraction that continues, >= 2.
        mode: whether the smallest or the largest value is best.
        unit: unit of the rungs.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> SuccessiveHalving("val_loss", rungs=[1, 3, 9]).eta
        3
    """

    metric: str
    rungs: Sequence[int]
    eta: int = 3
    mode: Literal["min", "max"] = "min"
    unit: Literal["epochs", "steps"] = "epochs"

    def __post_init__(self) -> None:
        rungs = list(self.rungs)
        if not rungs or rungs != sorted(set(rungs)) or rungs[0] < 1:
            raise ConfigError(
                "must be rising whole numbers of epochs or steps, >= 1", argument="rungs", value=self.rungs
            )
        check_whole(2, eta=self.eta)
        if self.mode not in ("min", "max"):
            raise ConfigError("must be 'min' or 'max'", argument="mode", value=self.mode)

    def source(
        self, members: Sequence[Member], folder: Path, *, record: Callable[[Member, Outcome], None]
    ) -> HalvingSource:
        """Return the source of a population's members, with the journal in its folder."""
        return HalvingSource(self, members, Journal(folder / "halving.jsonl", self._about(members)), record=record)

    def _about(self, members: Sequence[Member]) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "rungs": list(self.rungs), "members": [member.name for member in members]}


class HalvingSource:
    """Source of members by successive halving.

    Args:
        rule: the rule.
        members: members in the order in which they start.
        journal: journal, with entries of earlier processes.
        record: called with every outcome.
    """

    def __init__(
        self,
        rule: SuccessiveHalving,
        members: Sequence[Member],
        journal: Journal,
        *,
        record: Callable[[Member, Outcome], None],
    ):
        self._rule = rule
        self._members = {member.name: member for member in members}
        self._journal = journal
        self._record = record
        self._values: list[dict[str, float]] = [{} for _ in rule.rungs]  # values of each rung, by member
        self._promoted: list[set[str]] = [set() for _ in rule.rungs]
        self._started: list[str] = []
        self._running: dict[str, int] = {}
        for entry in journal.entries:
            self._note(entry)
        self._again = list(self._running)  # members that were running when the process ended

    def _note(self, entry: Mapping[str, Any]) -> None:
        name, rung = entry["member"], entry["rung"]
        if entry["event"] == "start":
            self._running[name] = rung
            if rung == 0:
                self._started.append(name)
            else:
                self._promoted[rung - 1].add(name)
        else:
            self._running.pop(name, None)
            if rung < len(self._values):
                self._values[rung][name] = math.inf if entry["value"] is None else entry["value"]

    def next(self) -> Member | None:
        """Return a member with its target rung: one that was running, one to promote, or a new one."""
        if self._again:
            name = self._again.pop(0)
            return self._until(name, self._running[name])
        found = self._to_promote()
        if found is None:
            fresh = [name for name in self._members if name not in self._started]
            if not fresh:
                return None
            found = (fresh[0], 0)
        entry = {"event": "start", "member": found[0], "rung": found[1]}
        self._journal.write(entry)
        self._note(entry)
        return self._until(*found)

    def _to_promote(self) -> tuple[str, int] | None:
        for rung in reversed(range(len(self._values))):
            values = self._values[rung]
            best = sorted(values, key=lambda name: (values[name], list(self._members).index(name)))
            for name in best[: len(values) // self._rule.eta]:
                if name not in self._promoted[rung] and math.isfinite(values[name]):
                    return name, rung + 1
        return None

    def _until(self, name: str, rung: int) -> Member:
        until = Until(self._rule.rungs[rung], self._rule.unit) if rung < len(self._rule.rungs) else None
        return dataclasses.replace(self._members[name], until=until)

    def tell(self, member: Member, outcome: Outcome) -> None:
        """Record a member's value at its rung; a stopped member runs the rung again."""
        if outcome.status != "stopped":
            value = self._value_of(member, outcome)
            entry = {"event": "reached", "member": member.name, "rung": self._running[member.name], "value": value}
            self._journal.write(entry)
            self._note(json.loads(json.dumps(to_json(entry))))
        self._record(member, outcome)

    def _value_of(self, member: Member, outcome: Outcome) -> float:
        if outcome.status == "failed":
            return math.inf
        if self._rule.metric not in outcome.metrics:
            raise ConfigError(
                f"is not among the numbers of member {member.name}: {', '.join(outcome.metrics) or 'none'}",
                argument="metric", value=self._rule.metric,
            )  # fmt: skip
        value = float(outcome.metrics[self._rule.metric])
        value = value if self._rule.mode == "min" else -value
        return value if math.isfinite(value) else math.inf


class StudySource:
    """Source of members with settings from an Optuna study; exact on resume.

    The journal records every ask and tell in order. A later process replays the calls on a new study, which must
    suggest the same settings, and continues.

    Args:
        study: a new ``optuna.Study`` whose sampler has a seed.
        space: returns the settings of a trial, by its ``suggest_`` methods.
        trials: number of trials.
        metric: a name of :attr:`Outcome.metrics`, which the study minimises or maximises.
        folder: folder of the journal.
        place: creates a member from settings.
        record: called with every outcome.

    Raises:
        CheckpointError: the study suggests settings that differ from the journal.
    """

    def __init__(
        self,
        study: Any,
        space: Callable[[Any], Mapping[str, Any]],
        *,
        trials: int,
        metric: str,
        folder: Path,
        place: Placed,
        record: Callable[[Member, Outcome], None],
    ):
        self._study, self._space, self._trials, self._metric = study, space, trials, metric
        self._place, self._record = place, record
        direction = study.direction.name.lower()
        about = {"metric": metric, "direction": direction, "sampler": type(study.sampler).__name__}
        self._journal = Journal(folder / "study.jsonl", about)
        self._asked: dict[str, Any] = {}
        self._count = 0
        self._again: list[Member] = []
        for entry in self._journal.entries:
            self._repeat(entry)

    def _repeat(self, entry: Mapping[str, Any]) -> None:
        if entry["event"] == "tell":
            self._finish(entry["member"], entry["value"])
            self._again = [member for member in self._again if member.name != entry["member"]]
            return
        member = self._ask()
        if member.name != entry["member"]:
            raise CheckpointError(
                f"{self._journal.path}: the study proposed {entry['member']} then and {member.name} now; start from a "
                "new study whose sampler has the same seed, or choose another out="
            )
        self._again.append(member)

    def _ask(self) -> Member:
        trial = self._study.ask()
        settings = dict(self._space(trial))
        member = self._place(settings)
        if member.name in self._asked:  # settings suggested twice are two runs
            member = dataclasses.replace(
                member, name=f"{member.name}.{trial.number}",
                folder=member.folder.with_name(f"{member.name}.{trial.number}"),
            )  # fmt: skip
        self._asked[member.name] = trial
        self._count += 1
        return member

    def next(self) -> Member | None:
        """Return a member that was running, else one with settings suggested by the study."""
        if self._again:
            return self._again.pop(0)
        if self._count >= self._trials:
            return None
        member = self._ask()
        self._journal.write({"event": "ask", "member": member.name, "settings": dict(member.settings)})
        return member

    def tell(self, member: Member, outcome: Outcome) -> None:
        """Report the value to the study; a failed run is a failed trial, and a stopped one runs again."""
        if outcome.status != "stopped":
            value = outcome.metrics.get(self._metric) if outcome.status == "finished" else None
            if value is None and outcome.status == "finished":
                raise ConfigError(
                    f"is not among the numbers of member {member.name}: {', '.join(outcome.metrics) or 'none'}",
                    argument="metric", value=self._metric,
                )  # fmt: skip
            value = None if value is None or not math.isfinite(value) else value
            self._journal.write({"event": "tell", "member": member.name, "value": value})
            self._finish(member.name, value)
        self._record(member, outcome)

    def _finish(self, name: str, value: float | None) -> None:
        from optuna.trial import TrialState

        trial = self._asked[name]
        if value is None:
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, value)
