"""Support for commands launched by torchrun: process group, printing rank, error file."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from treadle.errors import ConfigError

_log = logging.getLogger("treadle.cli")
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
TIMEOUT = 600.0  # seconds; for every process group that a command starts, with any backend


def launched() -> bool:
    """Return whether torchrun launched this process, without importing torch.

    Example:
        >>> launched()
        False
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def launched_rank() -> int:
    """Return the rank that torchrun assigned to this process, or 0.

    Example:
        >>> launched_rank()
        0
    """
    return int(os.environ["RANK"]) if launched() else 0


def leave_for_torchrun(error: BaseException) -> None:
    """Record an error for torchrun's summary, if torchrun launched this process."""
    if launched():
        from treadle.engine.failure import write_error_file

        write_error_file(error)


@contextlib.contextmanager
def process_group(timeout: float = TIMEOUT) -> Iterator[None]:
    """Start the process group of a process launched by torchrun, on its own GPU if there are any, and end it.

    Uses NCCL with one GPU per local rank if there are GPUs, else gloo.

    Args:
        timeout: seconds after which a collective that waits for another rank fails, > 0.

    Raises:
        ConfigError: the timeout is out of range, or a machine has fewer GPUs than ranks.

    Example:
        >>> with process_group():  # not launched by torchrun
        ...     launched()
        False
    """
    if not timeout > 0:
        raise ConfigError(f"--rank-timeout {timeout:g}: must be more than 0 seconds")
    if not launched():
        yield
        return
    import torch
    import torch.distributed as dist

    from treadle.distributed import control_group

    if dist.is_initialized():
        yield
        return
    backend, device = "gloo", None
    if torch.cuda.is_available():
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"torchrun started rank {launched_rank()} as number {local} on this machine, which has "
                f"{torch.cuda.device_count()} GPUs: give --nproc-per-node=gpu, or set CUDA_VISIBLE_DEVICES= for the CPU"
            )
        backend, device = "nccl", torch.device("cuda", local)
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    store, rank, size = _meeting_point(limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=device)
    control_group(limit)  # with NCCL for the gradients, decisions have a separate group
    try:
        yield
    except BaseException as error:  # no further collective: the process ends, and with it its part of the group
        if not isinstance(error, SystemExit):
            leave_for_torchrun(error)
        raise
    if dist.is_initialized():  # the command of a pack ends it after training
        dist.destroy_process_group()


def _meeting_point(limit: timedelta) -> tuple[Any, int, int]:
    """Return torchrun's store, this rank and the number of ranks.

    torchrun keeps its store over a restart, and with it the addresses of dead ranks, to which the restarted ranks would
    connect (pytorch#135712). On one machine, the restart count separates them. On several, where that count may differ,
    only a variable set for torchrun itself helps.
    """
    import torch.distributed as dist

    store, rank, size = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"treadle/{number}", store), rank, size  # type: ignore[attr-defined]
    if restarts and rank == 0 and os.environ.get(_OWN_STORE) != "1":
        _log.warning("torchrun --max-restarts=%d on several machines: set %s=1 for torchrun, or every restart fails",
                     restarts, _OWN_STORE)  # fmt: skip
    return store, rank, size


def refuse_ranks(script: str, *, instead: str) -> None:
    """Raise if several ranks would each run a script that trains in one process.

    Args:
        script: the name of the script.
        instead: what to launch with torchrun.

    Raises:
        ConfigError: there are several ranks.
    """
    size = int(os.environ.get("WORLD_SIZE", "1")) if launched() else 1
    if size > 1:
        raise ConfigError(
            f"{script}: trains in one process, but torchrun started {size}; use torchrun -m {instead}, which takes the "
            "same settings"
        )
