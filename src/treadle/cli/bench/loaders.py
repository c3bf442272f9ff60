"""Alternative loaders for the data of a run, each timed with the run's own steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, default_collate

from treadle.cli.bench.timing import Clock, step_seconds
from treadle.cli.bench.trials import NotTried, Trial
from treadle.data import TensorLoader, TransferLoader
from treadle.data.cursor import Group
from treadle.engine import Engine
from treadle.nested import map_nested_tensor

_WARM_UP = 3
_WORKERS = 2


def try_loaders(engine: Engine, loader: Any, *, count: int, clock: Clock, share: float) -> list[Trial]:
    """Time the run's steps with each loader that could replace its own.

    Args:
        engine: the run.
        loader: its loader; only a plain DataLoader can be replaced here.
        count: steps per measurement.
        clock: the clock for the device.
        share: share of a step spent waiting for data, in [0, 1].
    """
    if share < 0.03:
        return [Trial("another loader", "", note=f"the loader takes {share:.1%} of a step: there is little to gain")]
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or loader.batch_sampler is None
    ):
        return [Trial("another loader", "", note=f"only a DataLoader with a map-style data set can be replaced here, "
                                                 f"and this is a {type(loader).__name__}")]  # fmt: skip
    trials = []
    for name, how, make in _others(engine):
        present = _seconds(engine, loader, count=count, clock=clock)
        try:
            changed = _seconds(engine, make(loader), count=count, clock=clock)
        except NotTried as reason:
            trials.append(Trial(name, how, note=str(reason)))
        except (RuntimeError, TypeError, ValueError) as error:
            trials.append(Trial(name, how, note=f"failed: {type(error).__name__}: {error}"[:200]))
        else:
            trials.append(Trial(name, how, changed, present))
    return trials


def _others(engine: Engine) -> Iterator[tuple[str, str, Callable[[Any], Iterable[Any]]]]:
    on = "" if engine.device.type == "cpu" else f", device={engine.device.type!r}"
    how = f"treadle.TensorLoader(*tensors, batch_size=...{on})"
    yield "TensorLoader", how, lambda loader: as_tensor_loader(loader, engine.device)
    yield f"{_WORKERS} workers", f"DataLoader(..., num_workers={_WORKERS}, persistent_workers=True)", with_workers
    if engine.device.type == "cuda":
        how = "treadle.TransferLoader(loader)"
        yield "TransferLoader", how, lambda loader: with_transfers(loader, engine.device)


def as_tensor_loader(loader: Any, device: torch.device) -> TensorLoader:
    """Return a TensorLoader over the tensors of a DataLoader, on the device that trains.

    Raises:
        NotTried: its data set is not a TensorDataset, or it has its own collate function.
    """
    if type(loader.dataset) is not TensorDataset or loader.collate_fn is not default_collate:
        raise NotTried("the data set is not a TensorDataset with torch's own collate function")
    if loader.batch_size is None:
        raise NotTried("the DataLoader was given a batch sampler")
    shuffle = isinstance(loader.sampler, RandomSampler)
    return TensorLoader(
        *loader.dataset.tensors,
        batch_size=loader.batch_size,
        shuffle=shuffle,
        drop_last=loader.drop_last,
        device=device,
    )


def with_workers(loader: Any) -> Any:
    """Return the same DataLoader with worker processes.

    Raises:
        NotTried: it has workers already.
    """
    if loader.num_workers:
        raise NotTried(f"it has {loader.num_workers} workers already")
    return DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn, num_workers=_WORKERS,
        pin_memory=torch.cuda.is_available(), persistent_workers=True, worker_init_fn=loader.worker_init_fn,
    )  # fmt: skip


def with_transfers(loader: Any, device: torch.device) -> TransferLoader:
    """Return the loader with copies to the device made in the background.

    Raises:
        NotTried: its batches hold no CPU tensor.
    """
    on_host: list[bool] = []
    map_nested_tensor(lambda tensor: on_host.append(tensor.device.type == "cpu"), next(iter(loader)))
    if not any(on_host):
        raise NotTried("the batches are on the device already")
    return TransferLoader(loader, device)


def _seconds(engine: Engine, loader: Iterable[Any], *, count: int, clock: Clock) -> float:
    """Return the median time of a step including the wait for its data, but not the start of workers."""
    batches = _endless(loader)

    def step(_: Any) -> None:
        group = [next(batches) for _ in range(engine.accumulation_steps)]
        engine.steps(Group(group, [0.0] * len(group), [None] * len(group)))

    try:
        for _ in range(_WARM_UP):
            step(None)
        return step_seconds(step, [None], count=count, clock=clock, block=1)
    finally:
        batches.close()


def _endless(loader: Iterable[Any]) -> Any:
    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    return batches()
