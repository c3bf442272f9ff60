"""Detection of samples read repeatedly because several workers or ranks read the same data."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from treadle import distributed
from treadle.data.order import in_global_order
from treadle.data.samplers import samplers_of

_SHARES = ("worker", "rank", "shard", "replica")
_FIX = "pass it treadle.data.shard_iterable(items), or select items by treadle.data.rank_and_worker()"


def repeated_by_workers(loader: Any) -> list[str]:
    """Return a warning if every worker of a loader reads all items of its stream.

    Whether a stream splits its items is inferred from the names in its code: one that reads its worker or rank, or has
    a ``worker_init_fn``, is trusted.

    Example:
        >>> class Stream(IterableDataset):
        ...     def __iter__(self):
        ...         return iter(range(10))
        >>> repeated_by_workers(DataLoader(Stream(), num_workers=2))[0][:83]
        'an IterableDataset (Stream) and num_workers=2: every worker reads all items, so eac'
    """
    if not _is_unshared_stream(loader) or loader.num_workers < 2:
        return []
    return [
        f"an IterableDataset ({type(loader.dataset).__name__}) and num_workers={loader.num_workers}: every worker "
        f"reads all items, so each occurs {loader.num_workers} times in an epoch; {_FIX}, or use one worker"
    ]


def repeated_by_ranks(loader: Any, *, same_data: bool) -> list[str]:
    """Return a warning if every rank trains on all samples of a loader.

    Args:
        loader: the training loader.
        same_data: whether the ranks have the same data set, see :func:`fingerprint`.
    """
    ranks = distributed.world_size()
    if ranks == 1 or not isinstance(loader, DataLoader):
        return []
    name = type(loader.dataset).__name__
    if _is_unshared_stream(loader):
        return [f"an IterableDataset ({name}) on {ranks} ranks: every rank reads all items of it; {_FIX}"]
    if not same_data:
        return []
    return [
        f"loader: each of the {ranks} ranks trains on all {_size(loader.dataset)} samples of the {name}, so each "
        f"sample occurs {ranks} times in an epoch; split them with DataLoader(dataset, "
        "batch_sampler=treadle.data.RankBatchSampler(dataset, batch_size, shuffle=True))"
    ]


def fingerprint(loader: Any) -> int:
    """Return a number that is equal on ranks that read the same samples; 0 if they are sharded or unknown.

    Example:
        >>> fingerprint([1, 2])
        0
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or _shares(loader):
        return 0
    try:
        described = (type(loader.dataset).__qualname__, _size(loader.dataset), *_fingerprint(loader.dataset, 4))
    except Exception:  # noqa: BLE001  (a data set of any kind; a warning is not worth an error)
        return 0
    return 1 + zlib.crc32(repr(described).encode())


def _size(dataset: Any) -> int:
    return len(dataset)


def _shares(loader: DataLoader[Any]) -> bool:
    """Return whether a loader or one of its samplers shards by rank."""
    known = ("rank", "num_replicas", "_rank", "world_size")
    owners = [loader, *samplers_of(loader)]
    shared = any(hasattr(owner, name) for owner in owners for name in known)
    return shared or in_global_order(loader) is not None or any(map(_names_a_share, owners[1:]))


def _fingerprint(dataset: Any, depth: int) -> Iterator[Any]:
    """Yield values that differ between parts of a data set: indices, numbers, strings, ends of tensors and lists."""
    if isinstance(dataset, Subset):
        yield list(dataset.indices)
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            yield tensor.shape, tensor[:1].flatten()[:8].tolist(), tensor[-1:].flatten()[:8].tolist()
    elif isinstance(dataset, (list, tuple)):
        yield repr(dataset[:1]), repr(dataset[-1:])
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        if isinstance(value, (bool, int, float, str)):
            yield name, value
        elif isinstance(value, torch.Tensor):
            yield name, value.shape, value.flatten()[:8].tolist(), value.flatten()[-8:].tolist()
        elif isinstance(value, (list, tuple, range)):
            yield name, len(value), repr(value[:1]), repr(value[-1:])
        elif isinstance(value, Dataset) and depth:
            yield from _fingerprint(value, depth - 1)


def _is_unshared_stream(loader: Any) -> bool:
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return False
    if loader.worker_init_fn is not None:
        return False
    return not _names_a_share(loader.dataset)


def _names_a_share(owner: Any) -> bool:
    """Return whether the code of a data set or sampler names a worker or rank."""
    return any(word in name.lower() for name in _names_in(owner, 4) for word in _SHARES)


def _names_in(dataset: Any, depth: int) -> Iterator[str]:
    """Yield the names used in the code of a data set and of the data sets that it wraps."""
    yield type(dataset).__name__
    for kind in type(dataset).__mro__:
        if kind.__module__.startswith("torch.utils.data"):
            continue
        for value in vars(kind).values():
            yield from _names_of(getattr(value, "__code__", None))
    for name, value in getattr(dataset, "__dict__", {}).items():
        yield name
        for part in value if isinstance(value, (list, tuple)) else [value]:  # such as the stages of a pipeline
            if isinstance(part, Dataset) and depth:
                yield from _names_in(part, depth - 1)
            elif code := getattr(part, "__code__", None):
                yield part.__name__
                yield from _names_of(code)


def _names_of(code: CodeType | None) -> Iterable[str]:
    if code is None:
        return
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)
