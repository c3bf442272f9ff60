from __future__ import annotations

import json
import logging
import struct
import sys
import time
import types

import pytest
import torch

from hook_kit import Small, Stop, bare_engine, picture, stop_at_15_and_resume_from_10
from treadle.hooks import CheckpointingHook, LoggingHook, WandbHook


class FakeRun:
    """Takes what wandb takes: a step that is not new joins or is refused."""

    def __init__(self, server, arguments):
        self.server, self.arguments = server, arguments
        self.id = arguments.get("id") or "made-up"
        self.exit_code = None
        self.summary = {}

    def log(self, data, step):
        if step < self.server.last:
            self.server.rejected.append(step)
            raise ValueError(f"step {step} is not after {self.server.last}")
        self.server.last = step
        self.server.sent.append((step, dict(data)))

    def finish(self, exit_code=None):
        self.exit_code = exit_code


class FakeWandb(types.ModuleType):
    """Remembers over runs, as the server does."""

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.sent, self.rejected, self.last = [], [], [], -1
        self.Image = lambda image: ("image", image.size)

    def init(self, **arguments):
        self.runs.append(FakeRun(self, arguments))
        return self.runs[-1]


@pytest.fixture
def fake(monkeypatch):
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def rows(workspace, complete=True):
    """The history rows of every offline run in a workspace, in the order they were made."""
    found = []
    for file in sorted(workspace.glob("wandb/offline-run-*/*.wandb")):
        for record in whole(file) if complete else parsed(file):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return found


def whole(file):
    """Wait for the record of the end: wandb's own process writes on a moment after the run was finished."""
    for _ in range(600):
        records = parsed(file)
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.05)
    raise AssertionError(f"{file.name} has no end")


def parsed(file):
    from wandb.proto import wandb_internal_pb2

    return [wandb_internal_pb2.Record.FromString(data) for data in records_of(file.read_bytes())]


def records_of(data):
    """Read the log format of a .wandb file: a header of 7 bytes, blocks of 32 KiB, records in one or more chunks."""
    assert data[:4] == b":W&B"[: len(data)]
    position, parts = 7, []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if position + 7 + length > len(data):
            return  # still being written
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last chunk of one
            yield b"".join(parts)
            parts = []


def test_an_offline_run_stopped_at_15_and_resumed_from_10_has_each_step_once(tmp_path):
    stop_at_15_and_resume_from_10(tmp_path, lambda: WandbHook(project="test", tags=None))
    found = [row for row in rows(tmp_path) if "train/loss" in row]
    assert [row["_step"] for row in found] == list(range(1, 21))
    assert [row["train/number"] for row in found] == list(range(1, 21))
    assert {"train/lr/group_0", "train/grad_norm", "train/step_time"} <= set(found[0])
    assert [row["_step"] for row in rows(tmp_path) if "epoch_end/number" in row] == [4, 8, 12, 16]
    folders = list(tmp_path.glob("wandb/offline-run-*"))
    kept = (tmp_path / "wandb_run_id").read_text().strip()
    assert len(folders) == 2
    assert all(folder.name.endswith(kept) for folder in folders)


def test_nan_bf16_and_images_are_read_back(tmp_path):
    hook, engine = WandbHook(), bare_engine(tmp_path, step=1)
    hook.on_before_train(engine)
    hook.on_log(engine, {"a": {"nan": float("nan"), "bf16": torch.tensor(0.5).bfloat16()}})
    hook.on_log_images(engine, {"val": {"sample": picture(7), "tensor": torch.zeros(3, 4, 4)}})
    hook.on_close(engine)
    (row,) = rows(tmp_path)
    assert row["_step"] == 1
    assert row["a/bf16"] == 0.5
    assert row["a/nan"] != row["a/nan"] or row["a/nan"] == "NaN"
    assert row["val/sample/_type"] == "image-file"
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/images/val/*.png"))) == 2


def test_a_run_that_rejects_old_steps_is_never_sent_one(tmp_path, fake):
    stop_at_15_and_resume_from_10(tmp_path, WandbHook)
    assert fake.rejected == []
    assert [step for step, data in fake.sent if "train/loss" in data] == list(range(1, 21))
    assert [run.exit_code for run in fake.runs] == [1, 0]
    assert fake.runs[1].arguments["id"] == "made-up"
    assert fake.runs[1].arguments["resume"] == "allow"


def test_a_server_that_knows_its_last_step_is_believed(tmp_path, fake):
    stop_at_15_and_resume_from_10(tmp_path, WandbHook, max_steps=16)
    FakeRun.resumed, FakeRun.step = True, 14  # the server got no further than 13
    try:
        fake.last = 13
        hook, engine = WandbHook(), bare_engine(tmp_path, step=10)
        hook.on_before_train(engine)
        assert hook.sent_through == 13
    finally:
        del FakeRun.resumed, FakeRun.step


def test_none_arguments_are_left_out_and_others_are_passed_on(tmp_path, fake):
    WandbHook(project="p", name=None, config={"lr": 1}, tags=None, group="g").on_before_train(bare_engine(tmp_path))
    assert fake.runs[0].arguments == {"project": "p", "config": {"lr": 1}, "group": "g", "dir": str(tmp_path)}


def test_the_environment_wins_over_the_kept_id(tmp_path, fake, monkeypatch):
    (tmp_path / "wandb_run_id").write_text("kept")
    WandbHook().on_before_train(bare_engine(tmp_path))
    monkeypatch.setenv("WANDB_RUN_ID", "env")
    WandbHook().on_before_train(bare_engine(tmp_path))
    assert [run.arguments["id"] for run in fake.runs] == ["kept", "env"]
    assert (tmp_path / "wandb_run_id").read_text().strip() == "env"


def test_the_last_step_of_another_run_does_not_count(tmp_path, fake):
    (tmp_path / "wandb_last_step").write_text("other 15\n")
    hook = WandbHook(id="mine")
    hook.on_before_train(bare_engine(tmp_path))
    assert hook.sent_through == -1


def test_a_branch_of_a_run_is_left_to_wandb(tmp_path, fake):
    (tmp_path / "wandb_run_id").write_text("kept")
    WandbHook(fork_from="kept?_step=10").on_before_train(bare_engine(tmp_path))
    assert "resume" not in fake.runs[0].arguments
    assert "id" not in fake.runs[0].arguments


def test_a_start_from_nothing_in_a_run_that_has_points_warns(tmp_path, fake, caplog):
    Small(3, tmp_path, [LoggingHook(1), WandbHook()]).train()
    Small(5, tmp_path, [LoggingHook(1), WandbHook()]).train()
    assert [step for step, _ in fake.sent] == [1, 2, 3, 4, 5]
    assert any("up to step 3" in record.message for record in caplog.records if record.levelno == logging.WARNING)


def test_a_tracker_that_fails_does_not_end_the_training_and_is_said_once(tmp_path, fake, caplog):
    def log(self, data, step):
        raise ConnectionError("no network")

    fake.init = lambda **arguments: type("Run", (FakeRun,), {"log": log, "finish": log})(fake, arguments)
    trainer = Small(4, tmp_path, [LoggingHook(1), WandbHook()])
    trainer.train()
    assert trainer.step == 4
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "no network" in warnings[0]


def test_the_exit_code_is_1_after_an_error(tmp_path, fake):
    with pytest.raises(RuntimeError, match="stopped"):
        Small(4, tmp_path, [WandbHook(), Stop(2), CheckpointingHook(10)]).train()
    assert fake.runs[0].exit_code == 1


def test_a_dry_run_sends_nothing(tmp_path, fake):
    hook, engine = WandbHook(), bare_engine(tmp_path)
    hook.on_before_train(engine)
    hook.on_log(engine, {"a": 1}, dry_run=True)
    hook.on_log_images(engine, {"a": picture()}, dry_run=True)
    assert fake.sent == []


def test_without_a_workspace_it_runs_and_says_that_the_id_is_lost(fake, caplog):
    Small(2, None, [LoggingHook(1), WandbHook()]).train()
    assert [step for step, _ in fake.sent] == [1, 2]
    assert any("run id is not saved" in record.message for record in caplog.records)


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    hook = WandbHook()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"treadle\[track\]"):
        hook.on_before_train(bare_engine(tmp_path))


def test_only_rank_0_starts_a_run(tmp_path, fake, other_rank):
    hook, engine = WandbHook(), bare_engine(tmp_path)
    hook.on_before_train(engine)
    hook.on_log(engine, {"a": 1})
    hook.on_close(engine)
    assert fake.runs == []
