"""Streams of samples from ``.tar`` or Parquet files, resumable at any sample; the order depends on seed and epoch.

The content of a shuffle buffer over a stream of tar files does not fit into a small state. Instead, samples of a window
of files are shuffled: their tables of contents are read first, then each sample by offset. So consumed samples are
never read again.
"""

from __future__ import annotations

import itertools
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import torch

from treadle.data.ranks import rank_and_worker, ranks_of, reader_of
from treadle.data.streamed import ResumableStream
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, checked
from treadle.seed import mix_seed

_KINDS = (".tar", ".parquet")


class ShardedStream(ResumableStream):
    """Stream of samples from ``.tar`` or Parquet files, sharded over ranks and workers by whole files.

    Samples of a ``.tar`` are neighbouring members with the same stem, as in WebDataset: ``{"__key__": "0001", "png":
    bytes, "cls": bytes}``. Samples of a Parquet file are its rows, as dicts; it is read by row groups.

    A DataLoader over it resumes at the exact sample, with the same number of workers. Nothing consumed from a ``.tar``
    is read again; for a Parquet file, the row groups of the current window are.

    Args:
        shards: a folder, or paths and URLs of files, all of the same format. URLs need fsspec, Parquet needs pyarrow.
        shuffle: whether to use a new order of files for each epoch, and of samples within each window.
        seed: seeds the orders; equal on all ranks.
        window: number of files (``.tar``) or row groups of one file (Parquet) whose samples are shuffled together, >=
            1.
        decode: converts raw data to a sample; may draw from the global RNG.
        columns: columns of Parquet files to read; None for all.

    Raises:
        ConfigError: there are no files, their formats differ, or ``window`` is below 1; while iterating, there are
            fewer files than readers.

    Example:
        >>> import io, tarfile
        >>> with tarfile.open("part.tar", "w") as tar:
        ...     for number in range(3):
        ...         member = tarfile.TarInfo(f"{number}.txt"); member.size = 1
        ...         tar.addfile(member, io.BytesIO(str(number).encode()))
        >>> stream = ShardedStream(["part.tar"])
        >>> passing = iter(stream)
        >>> next(passing)
        {'__key__': '0', 'txt': b'0'}
        >>> other = ShardedStream(["part.tar"]); other.load_state_dict(stream.state_dict())
        >>> [sample["txt"] for sample in other]
        [b'1', b'2']
    """

    @checked
    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        shuffle: bool = False,
        seed: int = 0,
        window: int = 1,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        columns: Sequence[str] | None = None,
    ):
        self.shards = _listed(shards)
        kinds = {os.path.splitext(shard)[1] for shard in self.shards}
        if len(kinds) != 1 or not kinds <= set(_KINDS):
            where = f"={os.fspath(shards)!r}" if isinstance(shards, (str, os.PathLike)) else f" of {len(self.shards)}"
            raise ConfigError(
                f"{where}: found {', '.join(sorted(kinds)) or 'nothing'}; pass files that all end in .tar, or all in "
                ".parquet",
                argument="shards",
            )
        check_least(1, window=window)
        self.shuffle = shuffle
        self.seed = seed
        self.window = window
        self.decode = decode
        self.columns = None if columns is None else list(columns)
        self.epoch = 0
        self._open: Callable[[Sequence[str], Sequence[int]], _Window] = (
            _TarWindow if kinds == {".tar"} else self._parquet_window
        )
        self._at = _Place()
        self._entered: _Place | None = None
        self._of_main_process: tuple[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no process group.
        return {**self.__dict__, "_of_main_process": self._of_main_process or ranks_of()}

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next pass has; an engine calls it."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last sample."""
        place = self._at if self._entered is None else self._entered
        return dict(vars(place))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Start the next pass at the position of ``state``, if of the same epoch."""
        self._entered = _Place(**state)

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of this rank's and this worker's files."""
        reader, readers = rank_and_worker() if self._of_main_process is None else reader_of(*self._of_main_process)
        if readers > len(self.shards):
            raise ConfigError(
                f": {len(self.shards)} files for {readers} readers (ranks times workers): some would have none; write "
                "more files, or use fewer workers",
                argument="shards",
            )
        entered, self._entered = self._entered, None
        start = entered if entered is not None and entered.epoch == self.epoch else _Place(self.epoch)
        self._at = start
        return self._samples(self._permuted(self.shards, 0)[reader::readers], reader, start)

    def _samples(self, shards: Sequence[str], reader: int, start: _Place) -> Iterator[Any]:
        place = start.place
        for shard, part, window in self._windows(shards, start):
            order = self._permuted(range(len(window)), 1, reader, shard, part)
            for number in range(place, len(order)):
                self._at = _Place(self.epoch, shard, part, number + 1)
                sample = window[order[number]]
                yield sample if self.decode is None else self.decode(sample)
            place = 0

    def _windows(self, shards: Sequence[str], start: _Place) -> Iterator[tuple[int, int, _Window]]:
        if self._open is _TarWindow:
            for shard in range(start.shard, len(shards), self.window):
                yield shard, 0, _TarWindow(shards[shard : shard + self.window], [])
            return
        for shard in range(start.shard, len(shards)):
            groups = self._permuted(range(_row_groups(shards[shard])), 2, shard)
            for part in range(start.part if shard == start.shard else 0, len(groups), self.window):
                yield shard, part, self._open([shards[shard]], groups[part : part + self.window])

    def _parquet_window(self, shards: Sequence[str], groups: Sequence[int]) -> _Window:
        return _ParquetWindow(shards[0], groups, self.columns)

    def _permuted(self, items: Sequence[Any], *numbers: int) -> list[Any]:
        if not self.shuffle:
            return list(items)
        generator = torch.Generator().manual_seed(mix_seed(self.seed, self.epoch, *numbers))
        return [items[index] for index in torch.randperm(len(items), generator=generator).tolist()]


class _Place:
    """Position in a reader's pass: samples yielded from the window that starts at a part of one of its files."""

    def __init__(self, epoch: int = 0, shard: int = 0, part: int = 0, place: int = 0):
        self.epoch = epoch
        self.shard = shard
        self.part = part
        self.place = place


class _Window(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> dict[str, Any]: ...


class _TarWindow:
    """Samples of several ``.tar`` files; tables of contents are read at once, samples lazily."""

    def __init__(self, shards: Sequence[str], groups: Sequence[int]):
        self._files = [_open(shard) for shard in shards]
        self._samples = [(file, key, parts) for file in self._files for key, parts in _contents(file)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        file, key, parts = self._samples[number]
        sample: dict[str, Any] = {"__key__": key}
        for name, offset, size in parts:
            file.seek(offset)
            sample[name] = file.read(size)
            if len(sample[name]) != size:
                raise OSError(f"{getattr(file, 'name', file)}: {key}.{name} has {len(sample[name])} bytes, not {size}")
        return sample

    def __del__(self) -> None:
        for file in getattr(self, "_files", []):
            file.close()


def _contents(file: BinaryIO) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Yield the samples of a ``.tar``: the stem, and suffix, offset and size of each member."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        members = [member for member in tar if member.isreg()]
    for key, group in itertools.groupby(members, key=lambda member: _stem(member.name)):
        yield key, [(member.name[len(key) + 1 :], member.offset_data, member.size) for member in group]


def _stem(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


class _ParquetWindow:
    """Rows of several row groups of a Parquet file, read at once."""

    def __init__(self, shard: str, groups: Sequence[int], columns: Sequence[str] | None):
        with _open(shard) as file:
            self._table = _parquet(file).read_row_groups(list(groups), columns=columns)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return cast("dict[str, Any]", self._table.slice(number, 1).to_pylist()[0])


def _row_groups(shard: str) -> int:
    with _open(shard) as file:
        return int(_parquet(file).num_row_groups)


def _parquet(file: BinaryIO) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(": Parquet files need pyarrow: pip install 'treadle[survey]'", argument="shards") from error
    return parquet.ParquetFile(file)


def _open(shard: str) -> BinaryIO:
    if "://" not in shard:
        return open(shard, "rb")
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(f": {shard!r} needs fsspec: pip install fsspec", argument="shards") from error
    return cast(BinaryIO, fsspec.open(shard, "rb").open())


def _listed(shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    if not isinstance(shards, (str, os.PathLike)):
        return [os.fspath(shard) for shard in shards]
    folder = Path(shards)
    if not folder.is_dir():
        return [os.fspath(shards)]
    return sorted(os.fspath(path) for path in folder.iterdir() if path.suffix in _KINDS)
