from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
import torch

from hook_kit import Small, bare_engine, stop_at_15_and_resume_from_10
from treadle.errors import ConfigError
from treadle.hooks import JsonlHook, LoggingHook


def strict(text):
    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.fixture
def opened():
    """Open a hook for calls by hand and close it in the end."""
    used = []

    def opens(workspace, step=0, hook=None):
        engine, hook = bare_engine(workspace, step=step), hook or JsonlHook()
        hook.on_before_train(engine)
        used.append((engine, hook))
        return engine, hook

    yield opens
    for engine, hook in used:
        hook.on_close(engine)


def lines(tmp_path, name="metrics.jsonl"):
    return strict((tmp_path / name).read_text())


def test_values_that_json_has_no_word_for_are_null_and_tensors_are_numbers(tmp_path, opened):
    engine, hook = opened(tmp_path, step=3)
    records = {
        "nan": math.nan,
        "inf": -math.inf,
        "tensor": torch.tensor(float("nan")),
        "bf16": torch.tensor(0.5, dtype=torch.bfloat16),
        "one": torch.ones(1),
        "float32": np.float32(0.25),
        "nested": {"count": 3, "flag": True, "none": None, "text": "a", "list": [1.0, math.inf]},
    }
    hook.on_log(engine, records)
    assert lines(tmp_path) == [
        {
            "step": 3, "nan": None, "inf": None, "tensor": None, "bf16": 0.5, "one": 1.0, "float32": 0.25,
            "nested/count": 3, "nested/flag": True, "nested/none": None, "nested/text": "a", "nested/list": [1.0, None],
        }
    ]  # fmt: skip


def test_after_a_stop_at_15_and_a_resume_from_10_each_step_is_there_once(tmp_path):
    stop_at_15_and_resume_from_10(tmp_path, JsonlHook)
    records = lines(tmp_path)
    assert [record["step"] for record in records if "train/loss" in record] == list(range(1, 21))
    assert [record["step"] for record in records if "epoch_end/number" in record] == [4, 8, 12, 16]
    assert all(record["train/number"] == record["step"] for record in records if "train/loss" in record)


def test_what_a_killed_process_left_of_a_line_is_cut(tmp_path, opened):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\n{"step": 4, "'
    )
    engine, hook = opened(tmp_path, step=2)
    engine.progress.step = 3
    hook.on_log(engine, {"a": 30})
    assert lines(tmp_path) == [{"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 3, "a": 30}]


def test_a_key_of_the_resumed_step_is_not_written_again_but_a_new_one_is(tmp_path, opened):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "a": 2}\n')
    engine, hook = opened(tmp_path, step=2)
    hook.on_log(engine, {"a": 2})
    hook.on_log(engine, {"a": 2, "epoch": 1})
    assert lines(tmp_path) == [{"step": 2, "a": 2}, {"step": 2, "epoch": 1}]


def test_a_run_from_nothing_sets_an_older_file_aside(tmp_path):
    for _ in range(2):
        Small(2, tmp_path, [LoggingHook(1), JsonlHook()]).train()
    assert [record["step"] for record in lines(tmp_path)] == [1, 2]
    assert [record["step"] for record in lines(tmp_path, "metrics.1.jsonl")] == [1, 2]


def test_training_on_continues_the_file(tmp_path):
    trainer = Small(2, tmp_path, [LoggingHook(1), JsonlHook()])
    trainer.train()
    trainer.max_steps = 4
    trainer.train()
    assert [record["step"] for record in lines(tmp_path)] == [1, 2, 3, 4]


def test_a_dry_run_writes_nothing(tmp_path, opened):
    engine, hook = opened(tmp_path)
    hook.on_log(engine, {"a": 1}, dry_run=True)
    assert lines(tmp_path) == []


def test_values_it_cannot_write_are_named_once_and_the_others_written(tmp_path, caplog, opened):
    engine, hook = opened(tmp_path)
    for _ in range(2):
        hook.on_log(engine, {"a": 1, "object": object(), "vector": torch.ones(3), "step": 7})
    assert lines(tmp_path) == [{"step": 0, "a": 1}] * 2
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert all(name in warnings[0] for name in ("object", "vector", "step"))


def test_a_full_disk_does_not_end_the_training_and_is_said_once(tmp_path, caplog):
    class Full(JsonlHook):
        def write(self, trainer, values):
            raise OSError(28, "No space left on device")

    trainer = Small(3, tmp_path, [LoggingHook(1), Full()])
    trainer.train()
    assert trainer.step == 3
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "No space left" in warnings[0]


def test_a_relative_path_without_a_workspace_names_the_fix():
    with pytest.raises(ConfigError, match=r"workspace="):
        JsonlHook().on_before_train(bare_engine(None))


def test_an_absolute_path_needs_no_workspace(tmp_path, opened):
    engine, hook = opened(None, hook=JsonlHook(tmp_path / "sub" / "m.jsonl"))
    hook.on_log(engine, {"a": 1})
    assert strict((tmp_path / "sub" / "m.jsonl").read_text()) == [{"step": 0, "a": 1}]


def test_only_rank_0_writes(tmp_path, other_rank, opened):
    engine, hook = opened(tmp_path)
    hook.on_log(engine, {"a": 1})
    hook.on_close(engine)
    assert list(tmp_path.iterdir()) == []


def test_what_is_logged_outside_of_training_is_warned_of_once(tmp_path, caplog):
    engine, hook = bare_engine(tmp_path), JsonlHook()
    for _ in range(2):
        hook.on_log(engine, {"a": 1})
    assert sum("outside of training" in record.message for record in caplog.records) == 1
