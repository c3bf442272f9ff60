"""Metadata recorded with every benchmark: machine, versions, date.

Tables go into ``benchmarks/results``, or into the folder that the environment variable BENCHMARK_RESULTS names.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).parent / "results")


def describe() -> dict[str, str]:
    """Return the machine and the versions, without names or paths."""
    described = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    return described


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_result(
    name: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    machine: Mapping[str, str],
    *,
    notes: Sequence[str] = (),
    partial: bool = False,
) -> None:
    """Write a table, and paragraphs below it, as Markdown and JSON into the folder of results and print it.

    A partial table, from a run in progress, has a note below it and is not printed.
    """
    notes = ["This run was cut short.", *notes] if partial else notes
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    body = "".join(f"| {' | '.join(str(row.get(column, '')) for column in columns)} |\n" for row in rows)
    where = ", ".join(f"{key} {value}" for key, value in machine.items())
    text = f"# {title}\n\n{head}{body}\nMachine: {where}.\n" + "".join(f"\n{note}\n" for note in notes)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    data = {"title": title, "machine": dict(machine), "rows": [dict(row) for row in rows]}
    data |= {"notes": list(notes)} if notes else {}
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if not partial:
        print(text)
