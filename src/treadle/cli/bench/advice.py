"""Advice derived from the measured parts, reads and trials by fixed rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from treadle.cli.bench.timing import DATA, HOOK, WRITES
from treadle.cli.bench.trials import Trial

_GAIN = 0.03  # of a step: smaller gains are within the noise of a busy machine
_SHARE = 0.05  # of a step: smaller parts are not mentioned
REMEDIES = {"find_packed_sequence_indices": "treadle.text.skip_packing_check(model) leaves this out"}
"""What to do about a read, by the function that reads."""
Kind = Literal["switch on", "look at", "no gain", "not tried"]


@dataclass(frozen=True)
class Advice:
    """One line of advice.

    Attributes:
        kind: the category of the advice.
        text: the line, with its figures.
    """

    kind: Kind
    text: str


def advise(
    parts: Mapping[str, float], host_reads: Mapping[str, float], trials: Sequence[Trial], *, on_cuda: bool
) -> list[Advice]:
    """Return the advice: the largest gains first, then expensive parts, then trials without a gain or not run.

    Args:
        parts: seconds of each part of a step, the mean of all steps.
        host_reads: line of code -> reads for each step.
        trials: the settings that were tried.
        on_cuda: whether reading from the device waits for it.

    Example:
        >>> trial = Trial("bf16", 'precision="bf16"', seconds=0.5, present=1.0)
        >>> advise({"forward": 1.0}, {}, [trial], on_cuda=False)[0].text
        'bf16: 1000.0 ms -> 500.0 ms a step (2.00 x as fast): precision="bf16"'
    """
    measured = [trial for trial in trials if trial.seconds is not None]
    gains = sorted([trial for trial in measured if _gain(trial) >= _GAIN], key=_gain, reverse=True)
    lines = [Advice("switch on", _figures(trial, how=True)) for trial in gains if not trial.other_training]
    lines += [Advice("look at", _figures(trial, how=True)) for trial in gains if trial.other_training]
    lines += _parts_to_look_at(parts)
    if host_reads and on_cuda:
        reads, most = sum(host_reads.values()), max(host_reads, key=lambda line: host_reads[line])
        how = next((f"; {how}" for function, how in REMEDIES.items() if most.endswith(f" in {function}")), "")
        lines.append(
            Advice("look at", f"host reads: the host waits for the GPU {reads:.2g} times a step, most at {most}{how}")
        )
    lines += [Advice("no gain", _figures(trial)) for trial in measured if _gain(trial) < _GAIN]
    return lines + [Advice("not tried", f"{trial.name}: {trial.note}") for trial in trials if trial.seconds is None]


def _parts_to_look_at(parts: Mapping[str, float]) -> list[Advice]:
    whole = sum(parts.values())
    lines = []
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        if seconds < _SHARE * whole:
            continue
        if part == DATA:
            lines.append(Advice("look at", f"data: the step waits {seconds / whole:.0%} of its time for the loader"))
        elif part == WRITES:
            how = "save less often, or with CheckpointingHook(background=True)"
            lines.append(Advice("look at", f"files: writing takes {seconds / whole:.0%} of the time; {how}"))
        elif part.startswith(HOOK):
            name = part.removeprefix(HOOK)
            lines.append(Advice("look at", f"{name}: takes {seconds / whole:.0%} of a step; give it a longer interval"))
    return lines


def _gain(trial: Trial) -> float:
    if trial.seconds is None or not trial.present:
        return 0.0
    return 1.0 - trial.seconds / trial.present


def _figures(trial: Trial, *, how: bool = False) -> str:
    present, seconds = trial.present or 0.0, trial.seconds or 0.0
    factor = present / seconds if seconds else 0.0
    written = f": {trial.how}" if how and trial.how else ""
    note = f" [{trial.note}]" if trial.note else ""
    return f"{trial.name}: {in_words(present)} -> {in_words(seconds)} a step ({factor:.2f} x as fast){written}{note}"


def in_words(seconds: float) -> str:
    """Format a time with a suitable unit.

    Example:
        >>> in_words(0.0000000123), in_words(0.0000123), in_words(0.0123)
        ('12 ns', '12 µs', '12.3 ms')
    """
    if seconds < 1e-6:
        return f"{seconds * 1e9:.0f} ns"
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
