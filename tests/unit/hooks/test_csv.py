"""CsvHook: one table a run, with a column for each key, the same over any stop."""

from __future__ import annotations

import csv

import torch
from torch import nn

import treadle


class Fit(treadle.BaseTrainer):
    def build_data_loader(self):
        return [torch.tensor([[1.0]])] * 3

    def build_model(self):
        return nn.Linear(1, 1)

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self, batch):
        if self.step == 4:
            self.log({"extra": {"note": "a, b"}})
        return self.model(batch).square().mean(), {}


def run(folder, *stops, interval=2, checkpoints=True):
    for stop in stops:
        treadle.set_seed(0)
        saves = [treadle.CheckpointingHook(1)] if checkpoints else []
        hooks = [treadle.LoggingHook(interval), *saves]
        Fit(stop, device="cpu", workspace=folder, progress=False, hooks=hooks, trackers="csv").train()
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def values(rows):
    return [{key: value for key, value in row.items() if "time" not in key and value} for row in rows]


def test_each_log_point_is_a_row_and_each_key_a_column(tmp_path):
    rows = run(tmp_path, 6)
    assert [row["step"] for row in rows] == ["2", "4", "4", "6"]
    assert [row["extra/note"] for row in rows] == ["", "a, b", "", ""]
    assert all(float(row["train/loss"]) >= 0 for row in rows if row["train/loss"])
    assert next(iter(rows[0])) == "step"


def test_a_stopped_run_has_the_rows_of_one_that_was_not(tmp_path):
    assert values(run(tmp_path / "stopped", 4, 6)) == values(run(tmp_path / "straight", 6))


def test_the_table_of_another_run_is_set_aside(tmp_path):
    before = values(run(tmp_path, 4, checkpoints=False))
    assert values(run(tmp_path, 4, checkpoints=False)) == before
    assert (tmp_path / "metrics.1.csv").exists()


def test_rows_after_the_step_resumed_from_and_torn_ones_are_cut(tmp_path):
    run(tmp_path, 4)
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("9,1.0\n")
    assert values(run(tmp_path, 6)) == values(run(tmp_path / "straight", 6))
