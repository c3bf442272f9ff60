"""Pack commands on several ranks: decisions, distribution of data and model, the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from treadle import distributed
from treadle.checkpoint.ranks import on_rank_0
from treadle.data import RankBatchSampler, TensorLoader
from treadle.device import get_device
from treadle.errors import ConfigError

Result = TypeVar("Result")
_NEWS_OF_FEWER_RANKS = ("number of ranks", "resumed position")  # topics of log lines


def device_of_rank(asked: str | None) -> torch.device:
    """Return the device of this rank: each of several on one machine has its own GPU.

    Args:
        asked: the value of the option ``--device``.

    Raises:
        ConfigError: the device does not exist, or belongs to another rank.

    Example:
        >>> device_of_rank("cpu")
        device(type='cpu')
    """
    device = get_device(asked)
    if not distributed.is_distributed():
        return device
    if dist.get_backend() == "nccl" and device.type != "cuda":
        raise ConfigError(
            f"--device {asked}: torchrun's ranks communicate through NCCL on a machine with GPUs; set "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ConfigError(
            f"--device {asked}: under torchrun each rank has its own GPU, this one "
            f"cuda:{torch.cuda.current_device()}; leave --device out, or give cuda"
        )
    return device


def parallel_of(asked: str | None) -> str | None:
    """Return how a model is distributed: as requested, or by default as replicas on several ranks.

    Args:
        asked: ``"ddp"``, ``"fsdp"`` or None.

    Example:
        >>> parallel_of(None) is None, parallel_of("fsdp")
        (True, 'fsdp')
    """
    return "ddp" if asked is None and distributed.world_size() > 1 else asked


def ranks_line(parallel: str | None) -> dict[str, str]:
    """Return the start block's line about ranks; nothing without a process group.

    Args:
        parallel: the setting.

    Example:
        >>> ranks_line(None)
        {}
    """
    if not distributed.is_distributed():
        return {}
    spread = {None: "one model", "ddp": "replicas (ddp)", "fsdp": "a sharded model (fsdp)"}[parallel_of(parallel)]
    return {
        "ranks": f"{distributed.world_size()}, {spread}; batch_size is split over the ranks, so steps and schedule are "
        "those of one process; rank 0 prints and writes, and continues alone after training"
    }


def shared_batches(data: Sized, batch_size: int, *, shuffle: bool = False, seed: int = 0) -> dict[str, Any]:
    """Return the batching arguments of a ``DataLoader``: under torchrun, each rank reads its part of each batch.

    A batch is shared by all ranks. Under torchrun the order is the same for any number of ranks; otherwise it is drawn
    from torch's global generator.

    Args:
        data: the data set.
        batch_size: samples in a batch, >= the number of ranks.
        shuffle: reshuffle in each epoch.
        seed: seed of the order on ranks.

    Raises:
        ConfigError: there are more ranks than samples, in a batch or in the data.

    Example:
        >>> shared_batches(range(4), 2, shuffle=True)
        {'batch_size': 2, 'shuffle': True}
    """
    if not distributed.is_distributed():
        return {"batch_size": batch_size, "shuffle": shuffle}
    _check_shared(batch_size)
    sampler = RankBatchSampler(data, global_batch_size=batch_size, shuffle=shuffle, seed=seed)
    sampler.order  # noqa: B018  (refuses fewer samples than ranks before anything is built)
    return {"batch_sampler": sampler}


def shared_rows(
    tensors: Tensor | Mapping[str, Tensor],
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    device: torch.device | None = None,
) -> TensorLoader:
    """Return a loader over whole tensors; under torchrun, each rank reads its part of each batch.

    The order is the same for any number of ranks and on every device.

    Args:
        tensors: (N, ...) one tensor, or several by name.
        batch_size: rows in a batch of all ranks together, >= the number of ranks.
        shuffle: reshuffle in each epoch.
        seed: seed of the order.
        device: device of the tensors and batches; None leaves them where they are.

    Raises:
        ConfigError: there are more ranks than rows, in a batch or in the data.

    Example:
        >>> [batch.tolist() for batch in shared_rows(torch.arange(3), 2)]
        [[0, 1], [2]]
    """
    _check_shared(batch_size)
    loader = TensorLoader(
        tensors, global_batch_size=batch_size, shuffle=shuffle, seed=seed, device=device, distributed=True
    )
    loader.order  # noqa: B018  (refuses fewer samples than ranks before anything is built)
    return loader


def _check_shared(batch_size: int) -> None:
    if batch_size < distributed.world_size():
        raise ConfigError(
            f"={batch_size}: is split over {distributed.world_size()} ranks, each of which needs at least one sample; "
            "use a larger one, or fewer ranks",
            argument="batch_size",
        )


def by_rank_0(work: Callable[[], Result]) -> Result:
    """Run a function on rank 0 while the others wait, and return its result on all ranks.

    Args:
        work: the function; its result is sent as a pickle.

    Raises:
        ConfigError: rank 0 did; on all ranks.
        CheckpointError: rank 0 raised another error; on all ranks.

    Example:
        >>> by_rank_0(lambda: 1)
        1
    """
    if distributed.world_size() == 1:
        return work()

    def attempt() -> tuple[Any, ConfigError | None]:
        try:
            return work(), None
        except ConfigError as error:
            return None, error

    result, refusal = on_rank_0(attempt)
    if refusal is not None:
        raise refusal
    return result  # type: ignore[no-any-return]


def rank_0_first(work: Callable[[], Result]) -> Result:
    """Run a function on every rank, first on rank 0, so that the others find the files it writes.

    Raises:
        ConfigError: rank 0 did; on all ranks.
        CheckpointError: rank 0 raised another error; on all ranks.

    Example:
        >>> rank_0_first(lambda: 1)
        1
    """
    results: list[Result] = []
    by_rank_0(lambda: results.append(work()))
    return results[0] if results else work()


def after_ranks(trainer: Result, reopen: Callable[[], Result]) -> Result | None:
    """End the process group after training, so that the report needs no other rank and none waits for it.

    Args:
        trainer: the trainer of the run.
        reopen: rebuilds it in one process, from the files of the run.

    Returns:
        In one process the trainer; on the first rank the result of ``reopen``; None on the others, which are done.

    Example:
        >>> after_ranks("trained", lambda: "reopened")
        'trained'
    """
    if not distributed.is_distributed():
        return trainer
    first = distributed.rank() == 0
    dist.barrier(group=distributed.control_group())
    dist.destroy_process_group()
    if not first:
        return None
    with _fewer_ranks_unmentioned():
        return reopen()


@contextmanager
def _fewer_ranks_unmentioned() -> Iterator[None]:
    """Suppress the log lines about resuming with fewer ranks, since this run has ended."""

    def passes(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO and getattr(record, "topic", None) not in _NEWS_OF_FEWER_RANKS

    handlers = list(logging.getLogger("treadle").handlers)
    for handler in handlers:
        handler.addFilter(passes)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(passes)
