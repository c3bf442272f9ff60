"""Start block of a pack's command: its decisions on threads, device and precision, one per line."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from treadle.runs.report import wrapped

if TYPE_CHECKING:
    from rich.console import Console


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Set torch's number of threads inside the block; None leaves it unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_line(device: torch.device, *, explicit: bool) -> str:
    """Describe the device of a run and why it was chosen.

    Args:
        device: the device.
        explicit: whether the user named it.

    Example:
        >>> with cpu_threads(1):
        ...     device_line(torch.device("cpu"), explicit=True)
        'cpu, 1 thread (as requested)'
    """
    if device.type == "cpu":
        why = "as requested" if explicit else "neither CUDA nor MPS is available"
        count = torch.get_num_threads()
        return f"cpu, {count} thread{'s' if count > 1 else ''} ({why})"
    name = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return f"{device}{name} ({'as requested' if explicit else 'the first accelerator found'})"


def precision_line(mixed_precision: str | None, device: torch.device, *, setting: str) -> str:
    """Describe the precision of a run and why it was chosen.

    Args:
        mixed_precision: the dtype of autocast; None for none.
        device: the device of the run.
        setting: the name of the setting.

    Example:
        >>> precision_line("bf16", torch.device("cuda"), setting="mixed_precision")
        'bf16 autocast (mixed_precision=none turns it off)'
    """
    if mixed_precision is not None:
        return f"{mixed_precision} autocast ({setting}=none turns it off)"
    why = "bf16 is slower than fp32 on most CPUs" if device.type == "cpu" else f"{setting}=none"
    return f"fp32 ({why})"


def print_block(lines: Mapping[str, str], console: Console) -> None:
    """Print names in bold, each followed by its description, one per line."""
    for name, text in lines.items():
        line = wrapped(f"{name:<10}{text}", console, indent=10)
        console.print(f"[bold]{line[:10]}[/bold]", end="")
        console.print(line[10:], markup=False, soft_wrap=True)


@contextlib.contextmanager
def without_epoch_lines(pack: str) -> Iterator[None]:
    """Suppress the epoch lines of a pack's trainer, since the bar shows the same."""
    logger, shared = logging.getLogger(f"treadle.{pack}.epochs"), logging.getLogger("treadle.functional")
    before = logger.level
    logger.setLevel(logging.WARNING)
    shared.addFilter(_other_than_epochs)
    try:
        yield
    finally:
        logger.setLevel(before)
        shared.removeFilter(_other_than_epochs)


def _other_than_epochs(record: logging.LogRecord) -> bool:
    return getattr(record, "topic", None) != "epoch"
