"""Streams of every supported kind, each with random augmentation and a count of reads."""

from __future__ import annotations

import io
import multiprocessing
import random
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from treadle.data import ShardedStream, ShuffleBuffer, rank_and_worker

FILES, ROWS = 4, 11  # files, and samples of each: 2 ranks and 2 workers have one file each
counted = multiprocessing.RawArray("q", 8)  # samples read, one slot a worker and one for no worker; in no checkpoint


def count() -> None:
    info = get_worker_info()
    counted[0 if info is None else info.id + 1] += 1


def reads() -> int:
    """Return the number of samples read since the last call."""
    total, counted[:] = sum(counted), [0] * 8
    return total


def row(number: float) -> Any:
    """Return sample ``number``, with noise from the three global generators."""
    count()
    noise = 0.1 * torch.rand(1) + 0.1 * random.random() + 0.1 * float(np.random.rand())
    x = torch.sin(torch.arange(4) * float(number)) + noise
    return x, x.sum(0, keepdim=True)


def decoded(sample: Any) -> Any:
    return row(float(sample["x"]))


def tar_files(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for file in range(FILES):
        with tarfile.open(folder / f"part{file}.tar", "w") as tar:
            for number in range(ROWS):
                member = tarfile.TarInfo(f"{file:02d}_{number:03d}.x")
                text = str(file * ROWS + number).encode()
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
    return folder


def parquet_files(folder: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(exist_ok=True, parents=True)
    for file in range(FILES):
        table = pyarrow.table({"x": [float(file * ROWS + number) for number in range(ROWS)], "unused": ["a"] * ROWS})
        parquet.write_table(table, folder / f"part{file}.parquet", row_group_size=3)
    return folder


class Counting(IterableDataset):
    """Custom stream following torchdata's protocol: its state is its position."""

    def __init__(self, files: int = FILES) -> None:
        self.files = files
        self.epoch = 0
        self.place = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> Any:
        return {"place": self.place}

    def load_state_dict(self, state: Any) -> None:
        self.place = state["place"]

    def order(self) -> list[int]:
        reader, readers = rank_and_worker()
        mixed = torch.randperm(self.files * ROWS, generator=torch.Generator().manual_seed(self.epoch))
        return mixed[reader::readers].tolist()

    def __iter__(self) -> Any:
        order = self.order()
        while self.place < len(order):
            self.place += 1
            yield row(order[self.place - 1])
        self.place = 0


class Iterating(Counting):
    """The same stream with the state in its iterator."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __iter__(self) -> Any:
        return _Pass(self.order())


class _Pass:
    def __init__(self, order: list[int]) -> None:
        self.order, self.place = order, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.place >= len(self.order):
            raise StopIteration
        self.place += 1
        return row(self.order[self.place - 1])

    def state_dict(self) -> Any:
        return {"place": self.place}

    def load_state_dict(self, state: Any) -> None:
        self.place = state["place"]


class Late(Counting):
    """Stream whose state is one sample behind, a common mistake."""

    def __iter__(self) -> Any:
        order = self.order()
        for number in range(self.place, len(order)):
            yield row(order[number])
            self.place = number + 1
        self.place = 0


class Restarting(Counting):
    """Stream that counts its samples and starts at the first one whatever its state is."""

    def __iter__(self) -> Any:
        for number in self.order():
            self.place += 1
            yield row(number)


class Forgets(Counting):
    """Stream whose state is its position for six samples only."""

    def state_dict(self) -> Any:
        return {"place": min(self.place, 6), "given": self.place}


class Rows(Dataset):
    def __len__(self) -> int:
        return FILES * ROWS

    def __getitem__(self, index: int) -> Any:
        return row(index)


def own(kind: type[Counting], **settings: Any) -> Any:
    return DataLoader(kind(), batch_size=4, **settings)


def hugging_face(folder: Path, *, buffer: int = 0) -> Any:
    """Return a ``datasets.IterableDataset`` of Parquet files, its files shuffled, with augmentation."""
    datasets = sys.modules.get("datasets") or __import__("datasets")
    files = [str(path) for path in sorted(parquet_files(folder).iterdir())]
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    if torch.distributed.is_initialized():
        from datasets.distributed import split_dataset_by_node

        stream = split_dataset_by_node(
            stream, rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size()
        )
    stream = stream.shuffle(seed=3, buffer_size=buffer) if buffer else stream
    return stream.map(_augmented).with_format("torch").select_columns(["sample", "target"])


def _augmented(example: Any) -> Any:
    x, y = row(example["x"])
    return {"sample": x.numpy(), "target": y.numpy()}


def pairs(samples: Any) -> Any:
    return torch.stack([sample["sample"] for sample in samples]), torch.stack([sample["target"] for sample in samples])


def make(kind: str, folder: Path, workers: int) -> Any:
    """Return the loader of a kind."""
    shared: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
    if workers:  # otherwise a rank of a test would start new interpreters, which takes seconds
        shared["multiprocessing_context"] = "fork"
    if kind == "tar":
        return DataLoader(ShardedStream(tar_files(folder), shuffle=True, window=2, decode=decoded), **shared)
    if kind == "parquet":
        stream = ShardedStream(parquet_files(folder), shuffle=True, window=2, decode=decoded, columns=["x"])
        return DataLoader(stream, **shared)
    if kind in ("own", "late", "restarting", "forgets"):
        kinds = {"own": Counting, "late": Late, "restarting": Restarting, "forgets": Forgets}
        return DataLoader(kinds[kind](), **shared)
    if kind == "buffer":
        return DataLoader(ShuffleBuffer(Counting(), 5), **shared)
    if kind == "hf_joined":
        from datasets import concatenate_datasets

        stream = concatenate_datasets([hugging_face(folder / "one"), hugging_face(folder / "two")])
        return DataLoader(stream, collate_fn=pairs, **shared)
    if kind in ("hf", "hf_buffer", "hf_in_ours"):
        stream = hugging_face(folder, buffer=6 if kind == "hf_buffer" else 0)
        stream = ShuffleBuffer(stream, 5) if kind == "hf_in_ours" else stream
        return DataLoader(stream, collate_fn=pairs, **shared)
    return _of_others(kind, folder, shared)


def _of_others(kind: str, folder: Path, shared: dict[str, Any]) -> Any:
    if kind.startswith("torchdata"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        data = {"torchdata_rows": Rows, "torchdata_own": Counting, "torchdata_iterator": Iterating}[kind]()
        return StatefulDataLoader(data, shuffle=True if kind == "torchdata_rows" else None, **shared)
    if kind == "webdataset":
        import webdataset

        files = [str(path) for path in sorted(tar_files(folder).iterdir())]
        stream = webdataset.WebDataset(files, shardshuffle=False, nodesplitter=webdataset.split_by_node)
        return DataLoader(stream.map(decoded), **shared)
    if kind == "litdata":
        return DataLoader(_litdata(folder), **shared)
    raise AssertionError(kind)


def _litdata(folder: Path) -> Any:
    import litdata

    class Noisy(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            return row(super().__getitem__(index))

    if not (folder / "index.json").exists():
        numbers = [float(number) for number in range(FILES * ROWS)]
        litdata.optimize(float, numbers, str(folder), num_workers=1, chunk_size=ROWS)
    return Noisy(str(folder), shuffle=True, seed=3)
