"""What the commands do when torchrun launched them: the process group, who may print, where an error is left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

from treadle.errors import ConfigError

TIMEOUT = 600.0  # seconds; of every process group that a command starts, whatever its backend


def launched() -> bool:
    """Returns whether torchrun launched this process; imports nothing.

    Example:
        >>> launched()
        False
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def launched_rank() -> int:
    """Returns the rank that torchrun gave this process, 0 without it.

    Example:
        >>> launched_rank()
        0
    """
    return int(os.environ["RANK"]) if launched() else 0


def leave_for_torchrun(error: BaseException) -> None:
    """Leaves an error where the summary of torchrun looks for it, if torchrun launched this process."""
    if launched():
        from treadle.failure import leave_error

        leave_error(error)


@contextlib.contextmanager
def process_group(timeout: float = TIMEOUT) -> Iterator[None]:
    """Starts the process group of a process that torchrun launched, on its own GPU where there are some, and ends it.

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
        raise ConfigError(f"rank-timeout={timeout:g}: must be more than 0 seconds")
    if not launched():
        yield
        return
    import torch
    import torch.distributed as dist

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
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), device_id=device)
    try:
        yield
    except BaseException as error:  # no collective any more: the process ends, and so does its part of the group
        if not isinstance(error, SystemExit):
            leave_for_torchrun(error)
        raise
    dist.destroy_process_group()


def refuse_ranks(command: str) -> None:
    """Raises where several ranks would each do the work of a command that trains in one process.

    Raises:
        ConfigError: there are several.
    """
    size = int(os.environ.get("WORLD_SIZE", "1")) if launched() else 1
    if size > 1:
        raise ConfigError(
            f"treadle train {command}: trains in one process, and torchrun started {size}. To train on several, give a "
            "configuration file with a trainer of your own and its setting parallel"
        )
