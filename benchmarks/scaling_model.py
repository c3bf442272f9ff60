"""Predicted milliseconds per step of scaling.py's decoders on 2, 4 and 8 ranks, compared with the measured ones.

    python benchmarks/scaling_model.py          # reads results/scaling.json and collectives.json; writes scaling_model
    python benchmarks/scaling_model.py --dry    # writes nothing

A step takes its computation, as measured on one rank, plus the part of its messages that is not hidden: sizes from the
layout of buckets and shards, times from collectives.json. Without that file, one bus bandwidth is fitted to one row of
two ranks. The result is a range:

    least    a message is hidden if something is computed meanwhile: a third of the step alone can hide those of the
             forward pass, two thirds those of the backward pass; what is longer shows
    most     nothing is hidden
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import machine
from decoder import SIZES
from messages import ON_DEVICE, Cost, Message, bandwidth_cost, bus_share, measured_cost, messages_of

PASSES = {"forward": 1 / 3, "backward": 2 / 3}  # shares of the computation
RANKS = (2, 4, 8)
FITTED = ("1b", "weak", "ddp", 2)  # the row of two ranks that gives the bandwidth if no collectives were measured
COLUMNS = (
    "model", "scaling", "way", "ranks", "what it is", "ms least", "ms most", "efficiency", "measured ms",
    "measured efficiency", "error",
)  # fmt: skip
Key = tuple[str, str, str, int]  # model, scaling, way, ranks


@dataclass(frozen=True)
class Span:
    """Range of a step's milliseconds: with all communication hidden that can be, and with none."""

    least: float
    most: float


def step_of(computed: float, messages: Sequence[Message], cost: Cost, ranks: int) -> Span:
    """Return the time of a step from that of its computation, in milliseconds."""
    shown = sum(cost(message, ranks) for message in messages if message.hidden_by is None)
    for name, share in PASSES.items():
        hidden = sum(cost(message, ranks) for message in messages if message.hidden_by == name)
        shown += max(0.0, hidden - share * computed)
    return Span(computed + shown, computed + sum(cost(message, ranks) for message in messages))


def times_of(rows: Iterable[Mapping[str, Any]]) -> dict[Key, float]:
    """Return the milliseconds of the step-time rows of scaling.json."""
    found = {}
    for row in rows:
        if row.get("tokens/s/rank"):
            found[row["model"], row["scaling"], row["way"], int(row["ranks"])] = float(row["ms a step"])
    return found


def share_of(size: str, ranks: int) -> float:
    """Return the share of one rank's micro-batch that each rank has if the ranks split it."""
    rows = SIZES[size][4]
    return max(1, rows // ranks) / rows


def predict(key: Key, times: Mapping[Key, float], cost: Cost) -> Span:
    """Return the time of a step.

    Weak: on more than two ranks, the upper bound includes the unexplained time that two ranks took beyond it. Strong:
    the computation is that of one rank with as few rows if scaling.py measured it; otherwise it is a share of the
    whole, and the upper bound is no less than a strong step of two ranks, since Python's time does not depend on the
    rows.
    """
    size, scaling, way, ranks = key
    messages, computed = messages_of(way, size), times[size, "weak", way, 1]
    if scaling == "weak":
        span, two = step_of(computed, messages, cost, ranks), step_of(computed, messages, cost, 2)
        beyond = max(0.0, times.get((size, "weak", way, 2), 0.0) - two.most) if ranks > 2 else 0.0
        return Span(span.least, span.most + beyond)
    few = times.get((size, f"share of {ranks}", way, 1))
    if few is not None:
        return step_of(few, messages, cost, ranks)
    span = step_of(share_of(size, ranks) * computed, messages, cost, ranks)
    floor = times.get((size, "strong", way, 2), 0.0) if ranks > 2 else 0.0
    return Span(span.least, max(span.most, floor))


def fitted_bandwidth(times: Mapping[Key, float]) -> float:
    """Return the bus bandwidth in GB/s that explains the row FITTED if nothing was hidden there."""
    size, scaling, way, ranks = FITTED
    crossing = sum(
        bus_share(message.operation, ranks) * message.num_bytes
        for message in messages_of(way, size)
        if message.operation in ON_DEVICE
    )
    return crossing / (times[FITTED] - times[size, scaling, way, 1]) / 1e6


def table(times: Mapping[Key, float], cost: Cost, *, fitted: Key | None) -> list[dict[str, Any]]:
    """Return the lines of the result; ``fitted`` is the row that cannot serve as a check."""
    sizes = [size for size in SIZES if (size, "weak", "ddp", 1) in times]
    lines = []
    for key in [(s, g, w, n) for s in sizes for g in ("weak", "strong") for w in ("ddp", "fsdp") for n in RANKS]:
        size, scaling, way, ranks = key
        span, measured = predict(key, times, cost), times.get(key)
        alone = times[size, "weak", way, 1] * (share_of(size, ranks) if scaling == "strong" else 1.0)
        line = {
            "model": size, "scaling": scaling, "way": way, "ranks": ranks, "what it is": "predicted",
            "ms least": f"{span.least:.1f}", "ms most": f"{span.most:.1f}",
            "efficiency": f"{alone / span.most:.2f} to {alone / span.least:.2f}",
        }  # fmt: skip
        if measured is not None:
            line |= {
                "what it is": "fitted" if key == fitted else "check", "measured ms": f"{measured:.1f}",
                "measured efficiency": f"{alone / measured:.2f}",
                "error": f"{span.least / measured - 1:+.0%} to {span.most / measured - 1:+.0%}",
            }  # fmt: skip
        lines.append(line)
    return lines


def errors_of(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return the deviation of the upper bound from the measured value, in the rows that are checks."""
    told = []
    for scaling in ("weak", "strong"):
        found = [
            float(line["ms most"]) / float(line["measured ms"]) - 1
            for line in lines
            if line["what it is"] == "check" and line["scaling"] == scaling
        ]
        told += [f"{scaling} {min(found):+.0%} to {max(found):+.0%} in {len(found)} rows"] if found else []
    return f"The most against what was measured, where the row is a check: {', '.join(told) or 'no such row'}."


def notes_of(lines: Sequence[Mapping[str, Any]], bandwidth: float | None) -> list[str]:
    """Return the notes needed to read the table."""
    source = (
        "Times of messages are those of collectives.md. For more ranks than were measured, the bandwidth of the bus "
        "stays and the fixed cost grows with the logarithm of the ranks: an assumption."
        if bandwidth is None
        else f"One number is fitted: a bus bandwidth of {bandwidth:.0f} GB/s explains the row that says so if nothing "
        "of it was hidden. It holds the fixed cost of messages and the exchange between hosts too, and is taken to be "
        "the same on 4 and 8 ranks. No collective was measured by itself yet. Rows of two ranks that were not fitted "
        "are checks; rows without a measured time are predictions that nothing has checked."
    )
    return [
        errors_of(lines),
        source,
        "Least: a message is hidden if something is computed meanwhile; a third of the step alone hides those of the "
        "forward pass, two thirds those of the backward pass. Never hidden: the last bucket of replicas; the first two "
        "gathers of a sharded model and the reduction of what is in no block; the norm; what hosts tell each other. "
        "Most: nothing is hidden. That messages take multiprocessors and memory bandwidth from the computation is not "
        "in it, nor is the optimizer of a sharded model, which has less to do on more ranks. On more than two ranks, "
        "the most has what two took beyond it.",
        "Strong scaling: where one rank was not measured with as few rows, the computation is that part of the whole "
        "step, which leaves out that Python takes its time whatever the rows; so the most is at least the strong step "
        "of two ranks, and the least cannot be relied on.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="print the table only")
    options = parser.parse_args()
    scaling = json.loads((machine.RESULTS / "scaling.json").read_text(encoding="utf-8"))
    times, found = times_of(scaling["rows"]), machine.RESULTS / "collectives.json"
    bandwidth, fitted = None, None
    if found.exists():
        cost, how = measured_cost(json.loads(found.read_text(encoding="utf-8"))["rows"]), "times of single collectives"
    else:
        bandwidth, fitted = fitted_bandwidth(times), FITTED
        cost, how = bandwidth_cost(bandwidth), "a bandwidth fitted to one row of two ranks, which is no check"
    title = f"Milliseconds a step by a model: one rank as measured, and {how}"
    lines = table(times, cost, fitted=fitted)
    if options.dry:
        print(title, *lines, sep="\n")
        return
    where = {key: value for key, value in scaling["machine"].items() if "saves" not in key}
    machine.write_result("scaling_model", title, COLUMNS, lines, where, notes=notes_of(lines, bandwidth))


if __name__ == "__main__":
    main()
