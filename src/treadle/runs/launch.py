"""What the commands do when torchrun launched them: the process group, who may print, where an error is left."""

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
TIMEOUT = 600.0  # seconds; of every process group that a command starts, whatever its backend


def launched() -> bool:
    """Return whether torchrun launched this process; import nothing.

    Example:
        >>> launched()
        False
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def launched_rank() -> int:
    """Return the rank that torchrun gave this process, 0 without it.

    Example:
        >>> launched_rank()
        0
    """
    return int(os.environ["RANK"]) if launched() else 0


def leave_for_torchrun(error: BaseException) -> None:
    """Leave an error where the summary of torchrun looks for it, if torchrun launched this process."""
    if launched():
        from treadle.engine.failure import leave_error

        leave_error(error)


@contextlib.contextmanager
def process_group(timeout: float = TIMEOUT) -> Iterator[None]:
    """Start the process group of a process that torchrun launched, on its own GPU where there are some, and end it.

    NCCL where there are GPUs, with one of them for each rank of a machine, else gloo.

    Args:
        timeout: seconds after which a collective that waits for another rank fails, > 0.

    Raises:
        ConfigError: the timeout is out of its range, or a machine has fewer GPUs than ranks.

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
    control_group(limit)  # where NCCL carries the gradients, decisions have a separate group
    try:
        yield
    except BaseException as error:  # no collective any more: the process ends, and so does its part of the group
        if not isinstance(error, SystemExit):
            leave_for_torchrun(error)
        raise
    if dist.is_initialized():  # the command of a pack ends it after its training
        dist.destroy_process_group()


def _meeting_point(limit: timedelta) -> tuple[Any, int, int]:
    """Return torchrun's store, this rank and the number of ranks.

    torchrun keeps its store over a restart, and with it the addresses of ranks that are gone, so that those of the
    restart would knock there (pytorch#135712). On one machine, the number of the restart keeps them apart. On several,
    where that number may differ, only a variable that is set for torchrun itself helps.
    """
    import torch.distributed as dist

    store, rank, size = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"treadle/{number}", store), rank, size  # type: ignore[attr-defined]
    if restarts and rank == 0 and os.environ.get(_OWN_STORE) != "1":
        _log.warning("torchrun --max-restarts=%d on several machines: set %s=1 for torchrun, or no restart succeeds",
                     restarts, _OWN_STORE)  # fmt: skip
    return store, rank, size


def refuse_ranks(script: str, *, instead: str) -> None:
    """Raise where several ranks would each do the work of a script that trains in one process.

    Args:
        script: its name.
        instead: what to launch by torchrun.

    Raises:
        ConfigError: there are several.
    """
    size = int(os.environ.get("WORLD_SIZE", "1")) if launched() else 1
    if size > 1:
        raise ConfigError(
            f"{script}: trains in one process, and torchrun started {size}; use torchrun -m {instead} on several, "
            "which takes the same settings"
        )
