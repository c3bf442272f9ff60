"""Hand-made run folders: records of steps and epochs, sessions, settings, a checkpoint."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import torch

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def step_rows(count: int, *, lr: float = 0.1, per_epoch: int = 10) -> list[dict[str, Any]]:
    return [
        {
            "step": step, "epoch": (step - 1) // per_epoch + 1, "position": (step - 1) % per_epoch + 1,
            "loss": math.exp(-step / count), "grad_norm": 1 / step, "lr": [lr, lr], "applied": True, "retries": 0,
            "reason": None,
        }
        for step in range(1, count + 1)
    ]  # fmt: skip


def session_lines(count: int, *, status: str | None = "finished", start: float = 1000.0) -> list[dict[str, Any]]:
    """Return the session lines of a process with ten steps per second that records every tenth."""
    first = {
        "event": "start", "step": 0, "time": start, "total_steps": count, "device": "cpu", "device_name": "x86_64",
        "ranks": 1, "threads": 1, "precision": "full", "num_parameters": 1234, "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    marks = [{"event": "step", "step": step, "time": start + step / 10} for step in range(10, count + 1, 10)]
    end = {"event": "end", "step": count, "time": start + count / 10, "status": status}
    return [first, *marks, *([end] if status else [])]


def write_lines(path: Path, rows: list[dict[str, Any]], *, torn: str = "") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn, encoding="utf-8")


def write_checkpoint(path: Path, step: int, epoch: int, *, best: float | None = 0.4) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rule = {"metric": "val_loss", "mode": "min", "best": best, "best_epoch": epoch, "count": 0}
    torch.save(
        {
            "format": {"name": "treadle", "version": 1}, "global_step": step, "epoch": epoch,
            "model": {"w": torch.full((3,), 1.5)}, "selection": None if best is None else rule,
            "config": {"max_steps": step}, "versions": {"torch": "2.13.0"},
        },
        path,
    )  # fmt: skip


def make_run(folder: Path, *, steps: int = 120, lr: float = 0.1, best: float = 0.4) -> Path:
    """Write a finished run with epochs of ten steps."""
    (folder / "pictures").mkdir(parents=True)
    write_lines(folder / "steps.jsonl", step_rows(steps, lr=lr))
    write_lines(folder / "sessions.jsonl", session_lines(steps))
    history = [
        {"epoch": epoch, "train_loss": 1.0, "val_loss": 1 / epoch, "lr": lr} for epoch in range(1, steps // 10 + 1)
    ]
    (folder / "training_history.json").write_text(json.dumps(history))
    (folder / "config.json").write_text(json.dumps({"seed": 0, "optimizer": {"lr": lr, "name": "</script><b>"}}))
    (folder / "metrics.json").write_text(json.dumps({"test": {"loss": best}, "config": {"seed": 0}, "note": "text"}))
    (folder / "pictures" / "two_words.png").write_bytes(PIXEL)
    (folder / "samples.txt").write_text("a <sample> & more")
    write_checkpoint(folder / "checkpoints" / "last.pt", steps, steps // 10, best=best)
    return folder
