from __future__ import annotations

import math
import sys

import pytest
import torch

from hook_kit import bare_engine, picture, stop_at_15_and_resume_from_10, wait_for_the_next_second
from treadle.errors import ConfigError
from treadle.hooks import TensorBoardHook


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return events


def steps(events, tag):
    return [event.step for event in events.Scalars(tag)]


def test_after_a_stop_at_15_and_a_resume_from_10_curves_neither_go_back_nor_double(tmp_path):
    stop_at_15_and_resume_from_10(tmp_path, TensorBoardHook)
    events = read(tmp_path / "tensorboard")
    assert steps(events, "train/loss") == list(range(1, 21))
    assert steps(events, "epoch_end/number") == [4, 8, 12, 16]
    assert [event.value for event in events.Scalars("train/number")] == list(range(1, 21))
    assert {"train/lr/group_0", "train/grad_norm", "train/step_time"} <= set(events.Tags()["scalars"])


def test_at_the_resumed_step_only_what_is_missing_is_written(tmp_path):
    for resumed_from, records in ((9, {"a": 1}), (10, {"a": 2, "epoch": 2})):
        hook, engine = TensorBoardHook(), bare_engine(tmp_path, step=resumed_from)
        hook.on_before_train(engine)
        engine.progress.step = 10
        hook.on_log(engine, records)
        hook.on_close(engine)
        wait_for_the_next_second()
    events = read(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(10, 1.0)]
    assert [(event.step, event.value) for event in events.Scalars("epoch")] == [(10, 2.0)]


def test_a_run_from_nothing_hides_the_curve_of_an_older_one(tmp_path):
    for last in (5, 2):
        hook, engine = TensorBoardHook(), bare_engine(tmp_path)
        hook.on_before_train(engine)
        for engine.progress.step in range(last + 1):
            hook.on_log(engine, {"a": last})
        hook.on_close(engine)
        wait_for_the_next_second()
    events = read(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(0, 2.0), (1, 2.0), (2, 2.0)]


def test_nan_infinity_and_tensors_are_written_through_at_once(tmp_path):
    hook, engine = TensorBoardHook(), bare_engine(tmp_path, step=1)
    hook.on_before_train(engine)
    engine.progress.step = 2
    hook.on_log(
        engine, {"nan": math.nan, "inf": torch.tensor(math.inf), "bf16": torch.tensor(2.0).bfloat16(), "s": "x"}
    )
    events = read(tmp_path / "tensorboard")  # the writer is still open
    assert math.isnan(events.Scalars("nan")[0].value)
    assert events.Scalars("inf")[0].value == math.inf
    assert events.Scalars("bf16")[0].value == 2.0
    assert "s" not in events.Tags()["scalars"]
    hook.on_close(engine)


def test_images_are_read_back(tmp_path):
    hook, engine = TensorBoardHook(), bare_engine(tmp_path, step=1)
    hook.on_before_train(engine)
    engine.progress.step = 2
    hook.on_log_images(engine, {"val": {"sample": picture(7), "tensor": torch.zeros(3, 5, 6)}})
    hook.on_log_images(engine, {"dry": picture()}, dry_run=True)
    hook.on_close(engine)
    events = read(tmp_path / "tensorboard")
    assert sorted(events.Tags()["images"]) == ["val/sample", "val/tensor"]
    image = events.Images("val/tensor")[0]
    assert (image.step, image.height, image.width) == (2, 5, 6)


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"treadle\[track\]"):
        TensorBoardHook().on_before_train(bare_engine(tmp_path))


def test_a_relative_path_without_a_workspace_names_the_fix():
    with pytest.raises(ConfigError, match="workspace="):
        TensorBoardHook().on_before_train(bare_engine(None))


def test_only_rank_0_writes(tmp_path, other_rank):
    hook, engine = TensorBoardHook(), bare_engine(tmp_path)
    hook.on_before_train(engine)
    hook.on_log(engine, {"a": 1})
    hook.on_close(engine)
    assert list(tmp_path.iterdir()) == []
