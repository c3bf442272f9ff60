"""Optimizers and loaders of packages that few installations have: their rows are skipped where one is missing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils import data as torch_data

from strangers.bench import ROWS, WIDTH, Case, Points, Row
from strangers.data import of_graphs
from treadle import Trainer

OPTIMIZERS, LOADERS, TARGETS = "Optimizers", "Loaders", "Targets that do not count"
STOPS = (2, 5, 7)


def of_bitsandbytes(name: str) -> Any:
    def case() -> Case:
        import bitsandbytes

        return Case(optimizer=lambda model: getattr(bitsandbytes.optim, name)(model.parameters(), lr=0.02))

    return case


def of_torchao(name: str) -> Any:
    def case() -> Case:
        from torchao import optim

        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
        return Case(model=model, optimizer=lambda of: getattr(optim, name)(of.parameters(), lr=0.02))

    return case


def _as_rows(item: Any) -> Any:
    return torch.as_tensor(item["x"]), torch.as_tensor(item["y"])


def of_datasets(*, streams: bool) -> Any:
    def case() -> Case:
        import datasets

        rows = Points()
        found = datasets.Dataset.from_dict(
            {"x": (rows.x / 10).tolist(), "y": (rows.x.sum(1, keepdim=True) / 10).tolist()}
        )
        if streams:
            found = found.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=5)
            return Case(loader=torch_data.DataLoader(found, batch_size=3, collate_fn=_collate))
        return Case(
            loader=torch_data.DataLoader(found.with_format("torch"), batch_size=3, shuffle=True, collate_fn=_collate)
        )

    return case


def _collate(items: Any) -> Any:
    return torch_data.default_collate([_as_rows(item) for item in items])


def of_webdataset() -> Case:
    import webdataset

    folder, rows = Path(tempfile.mkdtemp()), Points()
    with webdataset.TarWriter(str(folder / "rows.tar")) as made:
        for number in range(ROWS):
            made.write({"__key__": f"{number:03d}", "x.pth": rows[number][0], "y.pth": rows[number][1]})
    found = (
        webdataset.WebDataset(str(folder / "rows.tar"), shardshuffle=False)
        .shuffle(6)
        .decode()
        .to_tuple("x.pth", "y.pth")
    )
    return Case(loader=torch_data.DataLoader(found.batched(3), batch_size=None))


def of_litdata() -> Case:
    import litdata

    folder = tempfile.mkdtemp()
    litdata.optimize(lambda number: Points()[number], list(range(ROWS)), folder, num_workers=1, chunk_size=4)
    return Case(loader=litdata.StreamingDataLoader(litdata.StreamingDataset(folder, shuffle=True), batch_size=3))


def with_missing(targets: Any, loss: Any) -> Any:
    def case() -> Case:
        x = Points().x / 10
        model = torch.nn.Linear(WIDTH, 3 if targets.dtype == torch.long else 1)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), loss, device="cpu", progress=False)
        return Case(engine=trainer._engine, loader=torch_data.DataLoader(torch_data.TensorDataset(x, targets), 3))

    return case


CLASSES = torch.tensor([0, -100, 1, 2, -100, -100, -100, 0, 1, 2, 0, -100])
MISSING = torch.where(torch.arange(ROWS) % 5 == 1, torch.nan, torch.arange(1.0, ROWS + 1)).reshape(-1, 1)

PEERS = [
    *(Row(f"bitsandbytes.{name}", OPTIMIZERS, of_bitsandbytes(name), needs=("bitsandbytes",), stops=STOPS)
      for name in ("AdamW8bit", "Lion8bit")),
    *(Row(f"torchao.{name}", OPTIMIZERS, of_torchao(name), needs=("torchao",), stops=STOPS)
      for name in ("AdamW8bit", "AdamW4bit")),
    Row("datasets.Dataset", LOADERS, of_datasets(streams=False), needs=("datasets",), stops=STOPS),
    Row("datasets.IterableDataset", LOADERS, of_datasets(streams=True), needs=("datasets",), stops=STOPS),
    Row("webdataset", LOADERS, of_webdataset, needs=("webdataset",), stops=STOPS),
    Row("litdata.StreamingDataLoader", LOADERS, of_litdata, needs=("litdata",), stops=STOPS),
    Row("torch_geometric NeighborLoader", LOADERS, of_graphs("NeighborLoader", num_neighbors=[2]),
        needs=("torch_geometric", "pyg_lib"), stops=STOPS),
    Row("classes of -100 with CrossEntropyLoss", TARGETS, with_missing(CLASSES, torch.nn.CrossEntropyLoss()),
        stops=STOPS),
    Row("targets of NaN with MSELoss", TARGETS, with_missing(MISSING, torch.nn.MSELoss()), ("not finite",)),
]  # fmt: skip
