"""The runs of a verification: two uninterrupted ones, and one that is killed and rerun until it ends."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.engine.failure import NOTE
from treadle.errors import ConfigError, TreadleError, number_of
from treadle.runs.verify.causes import Cause, likely_cause
from treadle.runs.verify.compare import Comparison, Difference, PartResult, same_seed_each_step
from treadle.runs.verify.describe import describe_difference, verdict_reason
from treadle.runs.verify.jobs import Job, Kill, read_records

_INTERVAL = 3
_APART_SECONDS = 1.1  # a seed taken from whole seconds must not be the same in two runs
_LEAST_LIMIT = 120.0


@dataclass
class Verification:
    """Result of a verification.

    Attributes:
        verdict: ``"EXACT"``, ``"NOT EXACT"`` or ``"NOT CHECKED"``.
        reason: why it is not exact or not checked, if no difference shows it.
    """

    target: str
    arguments: list[str]
    seed: int
    folder: Path
    verdict: str = "NOT CHECKED"
    reason: str = ""
    first_step: int = 0
    last_step: int = 0
    kills: list[Kill] = field(default_factory=list)
    resumed_from: list[int] = field(default_factory=list)
    records: int = 0
    parts: dict[str, PartResult] = field(default_factory=dict)
    difference: Difference | None = None
    cause: Cause | None = None
    notes: list[str] = field(default_factory=list)
    arranged: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {verdict_reason(self)}"]
        if self.difference is not None:
            lines.append(f"first difference: {describe_difference(self.difference)}")
        if self.cause is not None:
            lines += [f"likely cause: {self.cause.rule}", f"fix: {self.cause.fix}"]
        return "\n".join([*lines, *self.notes, f"files: {self.folder}"])


class Server:
    """Process that starts the runs of a target; the client of ``treadle.runs.verify.server``."""

    def __init__(self, target: str, hash_seed: int, log: Path):
        # To expose values that depend on the order of a set, the two servers hash strings differently.
        environment = {"PYTHONHASHSEED": str(hash_seed), **os.environ}
        with open(log, "a", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "treadle.runs.verify.server", target],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
                start_new_session=True,  # Ctrl-C is for the command; the server ends with its stdin
            )  # fmt: skip
        self.log = log

    def run(self, job: Job) -> dict[str, Any]:
        """Run one job to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(job.to_line())
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise TreadleError(f"the process that starts the target died: {_last_line(self.log)}")
        return dict(json.loads(answer))

    def close(self) -> None:
        """End the server, and the target if it is running."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def two_servers(target: str, seed: int, log: Path) -> Iterator[tuple[Server, Server]]:
    """Start two servers that hash strings differently, and end them after the block.

    Args:
        target: the target; its imports may be done early.
        seed: seed of the string hashing.
        log: file for errors of the servers themselves.
    """
    one, other = random.Random(seed).sample(range(1, 2**32 - 1), 2)
    servers = Server(target, one, log), Server(target, other, log)
    try:
        yield servers
    finally:
        for server in servers:
            server.close()


class Verifier:
    """Verifier that runs a target twice without a stop and again with kills, and compares the runs.

    Args:
        target: path of a script or a configuration, or the name of a pack.
        arguments: arguments of the script, or settings.
        steps: the number of steps of each run; fewer if the target ends earlier.
        kills: the number of kills.
        seed: seed of the steps and signals of the kills.
        folder: the folder of workspaces, output and records.
        say: receives progress, line by line.
    """

    def __init__(
        self,
        target: str,
        arguments: Sequence[str],
        *,
        steps: int,
        kills: int,
        seed: int,
        folder: Path,
        log_progress: Callable[[str], None],
    ):
        self.steps, self.number_of_kills, self.log_progress = steps, kills, log_progress
        self.rng = random.Random(seed)
        self.result = Verification(target, list(arguments), seed, folder)

    def run(self, servers: Sequence[Server]) -> Verification:
        """Run everything in children of two servers.

        Raises:
            ConfigError: the target creates no trainer, or one that cannot be verified.
            TreadleError: the target itself fails.
        """
        started = time.monotonic()
        first, seconds = self._uninterrupted(servers[0], "uninterrupted-1")
        time.sleep(_APART_SECONDS)
        second, _ = self._uninterrupted(servers[1], "uninterrupted-2")
        comparison = Comparison(first)
        comparison.leave_out_unseeded(second)
        difference = comparison.first_difference(second, uninterrupted=True)
        if difference is None:
            comparison.parts, comparison.records = {}, 0
            lines = self._with_kills(servers, limit=max(_LEAST_LIMIT, 10 * seconds))
            difference = comparison.first_difference(lines, uninterrupted=False)
        self._conclude(comparison, difference, _one(first, "start")["device"])
        same = same_seed_each_step(first)
        if same is not None:
            self.result.notes.append(
                f"the forward pass seeds a generator identically in every step: {same}. So every step draws the same "
                "random numbers, such as dropout masks; remove the call and seed once at the start"
            )
        self.result.seconds = time.monotonic() - started
        return self.result

    def _job(self, name: str, number: int, **changes: Any) -> Job:
        folder = str(self.result.folder / name)
        settings: dict[str, Any] = {"steps": self.steps, "stop_at": None, "interval": _INTERVAL, **changes}
        return Job(self.result.target, self.result.arguments, folder, number, **settings)

    def _uninterrupted(self, server: Server, name: str) -> tuple[list[dict[str, Any]], float]:
        job = self._job(name, 0)
        answer = server.run(job)
        lines = read_records(job.records)
        for line in lines:
            if line["kind"] == "refused":
                raise ConfigError(line["text"])
        if not any(line["kind"] == "over" for line in lines):
            self._raise_failure(job, answer, lines)
        self.result.first_step, self.result.last_step = _one(lines, "start")["step"], _one(lines, "over")["step"]
        self._collect(lines)
        count = self.result.last_step - self.result.first_step
        self.log_progress(f"{name.replace('-', ' run ')}: {number_of(count, 'step')} in {answer['seconds']:.1f} s")
        if count < 2:
            raise ConfigError(
                f"={job.target}: trained {number_of(count, 'step')}, but needs at least 2 to be killed in between",
                argument="TARGET",
            )
        return lines, float(answer["seconds"])

    def _raise_failure(self, job: Job, answer: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        if answer["code"] == 0 and not lines:
            raise ConfigError(
                f"={job.target}: ended without training; it must make a BaseTrainer (or an Engine) and call "
                f"train(), as a script does with `python {job.target}`. Its output is in {job.log}",
                argument="TARGET",
            )
        raise TreadleError(
            f"the target itself failed, without a kill (exit code {answer['code']}): {_last_line(job.log)}. Its "
            f"output is in {job.log}"
        )

    def _collect(self, lines: Sequence[Mapping[str, Any]]) -> None:
        for kind, texts in (("arranged", self.result.arranged), ("warning", self.result.warnings)):
            found = [line["text"] for line in lines if line["kind"] == kind and not line["text"].startswith("signal ")]
            texts += [text for text in dict.fromkeys(found) if text not in texts]

    def _with_kills(self, servers: Sequence[Server], *, limit: float) -> list[dict[str, Any]]:
        result = self.result
        plan: list[Kill | None] = [*plan_kills(self.rng, self.number_of_kills, result.first_step, result.last_step)]
        lines: list[dict[str, Any]] = []
        for number, kill in enumerate([*plan, None]):
            job = self._job("killed", number, stop_at=result.last_step, kill=kill, limit=limit)
            answer = servers[number % 2].run(job)
            lines = read_records(job.records)
            own = [line for line in lines if line["process"] == number]
            if number and any(line["kind"] == "start" for line in own):
                result.resumed_from.append(_one(own, "start")["step"])
            if kill is not None and any(line["kind"] == "kill" for line in own):
                result.kills.append(kill)
                self.log_progress(f"killed run: {kill.signal} {kill.place} {_place(kill)} {kill.step}")
            if any(line["kind"] == "over" for line in own):
                break
            if kill is None or kill not in result.kills:
                result.reason = self._failed_rerun(job, answer)
                break
        self._collect(lines)
        return lines

    def _failed_rerun(self, job: Job, answer: Mapping[str, Any]) -> str:
        how = f"was ended after {job.limit:.0f} s" if answer["timed_out"] else f"failed (exit code {answer['code']})"
        after = f"after kill {job.number}" if job.number else "before any kill"
        return f"an uninterrupted run succeeds, but the run {after} {how}: {_last_line(job.log)}"

    def _conclude(self, comparison: Comparison, difference: Difference | None, device: str) -> None:
        result = self.result
        result.parts, result.records, result.difference = comparison.parts, comparison.records, difference
        if comparison.unseeded:
            result.notes.append(
                f"the generators of {' and '.join(sorted(comparison.unseeded))} start in a different state in each run "
                "and were not compared; nothing depended on them here, but seed them too: treadle.set_seed(0), or "
                "seed: 0 in a configuration"
            )
        if difference is not None:
            result.verdict, result.cause = "NOT EXACT", likely_cause(difference, device)
        elif result.reason:
            result.verdict = "NOT EXACT"
        elif self.number_of_kills and not any(step > result.first_step for step in result.resumed_from):
            result.reason = (
                "no rerun continued from a checkpoint: each started from the beginning, so there was nothing to check. "
                "Give the script's CheckpointingHook load='latest', or use more --steps"
            )
        else:
            result.verdict = "EXACT"


def plan_kills(rng: random.Random, count: int, first_step: int, last_step: int) -> list[Kill]:
    """Plan kills at distinct steps in ascending order, alternating between SIGKILL and SIGTERM.

    Args:
        chance: the random generator.
        count: the number of kills; fewer if there are not enough steps.
        first_step: the first step of the run.
        last_step: the last step; no kill comes after the step before it.

    Example:
        >>> [kill.signal for kill in plan_kills(random.Random(0), 3, 0, 24)]
        ['SIGKILL', 'SIGTERM', 'SIGKILL']
    """
    # Not before the first checkpoint, if possible: a run that starts from the beginning shows nothing.
    low = first_step + _INTERVAL + 1 if last_step - first_step > _INTERVAL + count else first_step + 1
    steps = sorted(rng.sample(range(low, last_step), min(count, last_step - low)))
    plan = []
    for number, step in enumerate(steps):
        hard = number % 2 == 0
        # A handler saves at the end of the step, so a SIGTERM after the penultimate step would leave none to rerun.
        plan.append(
            Kill(step, "SIGKILL", rng.choice(["inside", "before", "after"]))
            if hard
            else Kill(step, "SIGTERM", rng.choice(["inside", "before"]))
        )
    return plan


def _place(kill: Kill) -> str:
    return "step" if kill.place == "inside" else "the checkpoint of step"


def _one(lines: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    return next(line for line in lines if line["kind"] == kind)


def _last_line(log: Path) -> str:
    """Return the last line of an output; for an error, skip the note with the step in which it was raised."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    printed = (line.strip() for line in reversed(lines))
    return next((line for line in printed if line and not line.startswith(f"{NOTE} ")), "it wrote nothing")
