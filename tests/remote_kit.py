"""Object stores for tests: counted and failing requests, and a real S3 server in a separate process."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from treadle.checkpoint import remote_claim
from treadle.checkpoint.objects import ObjectStore
from treadle.checkpoint.remote import RemoteWorkspace
from treadle.checkpoint.store import save_checkpoint

REQUESTS = ("pipe_file", "cat_file", "find", "rm_file")


class Killed(BaseException):
    """Exception that ends a process in a test like SIGKILL; nothing catches it."""


class Requests:
    """File system whose n-th request fails.

    Attributes:
        seen: the requests so far.
    """

    def __init__(self, files: Any, at: int = 0, act: Any = None, *, after: bool = False):
        self._files, self.at, self.act, self.after = files, at, act, after
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._files, name)
        return self._watched(name, real) if name in REQUESTS else real

    def _watched(self, name: str, real: Any) -> Any:
        def request(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            if len(self.seen) != self.at:
                return real(*args, **kwargs)
            result = real(*args, **kwargs) if self.after else None
            self.act()
            return result

        return request


def killed() -> None:
    raise Killed


def failing() -> None:
    raise OSError("500 internal error")


@contextlib.contextmanager
def process(number: int, monkeypatch: Any) -> Any:
    """Run the block as in a process that ends afterwards."""
    with monkeypatch.context() as patch:
        patch.setattr(remote_claim.os, "getpid", lambda: 2**30 + number)
        patch.setattr(remote_claim, "process_lives", lambda pid: pid == 2**30 + number)
        yield


def workspace(url: str, staging: Path, **settings: Any) -> RemoteWorkspace:
    store = ObjectStore(url, tries=settings.pop("tries", 3), pause=0.0)
    return RemoteWorkspace(store, staging, **{"lease": 0.2, "part": 700, **settings})


def train_to(staging: Path, step: int) -> None:
    """Write the files of a run at a step: a numbered state, the last one, a log; prune one."""
    save_checkpoint({"global_step": step, "epoch": 0, "model": {"w": torch.full((100,), float(step))}},
                    staging / "checkpoints" / f"checkpoint_step_{step}.pt")  # fmt: skip
    with contextlib.suppress(FileNotFoundError):
        os.unlink(staging / "checkpoints" / f"checkpoint_step_{step - 1}.pt")
    link = staging / "checkpoints" / "checkpoint_latest.pt"
    link.unlink(missing_ok=True)
    link.symlink_to(f"checkpoint_step_{step}.pt")
    with open(staging / "steps.jsonl", "a") as file:
        file.write(f'{{"step": {step}}}\n')


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder
