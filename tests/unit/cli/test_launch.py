"""What the commands do when torchrun launched them, without launching anything."""

from __future__ import annotations

import json
import logging

import pytest

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.engine.failure import errors_logged_with_rank, write_error_file
from treadle.errors import ConfigError
from treadle.runs.launch import process_group, refuse_ranks


@pytest.fixture
def rank_1(monkeypatch, tmp_path):
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return tmp_path / "error.json"


def test_other_ranks_than_the_first_print_errors_only(rank_1, capsys):
    result_console().print("a result")
    messages = message_console()
    with log_to(messages):
        messages.print("a bar")
        logging.getLogger("treadle.x").info("progress")
        logging.getLogger("treadle.x").warning("the same on all ranks")
        logging.getLogger("treadle.x").error("rank 1 failed")
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "error: rank 1 failed\n"


def test_a_script_of_one_process_refuses_several_ranks_and_names_what_to_launch(rank_1, capsys):
    with pytest.raises(SystemExit) as left, errors_as_one_line(message_console()):
        refuse_ranks("scripts/train.py", instead="treadle train graphs")
    assert left.value.code == 2
    said = (
        "rank 1: scripts/train.py: trains in one process, but torchrun started 2; use torchrun -m treadle train graphs"
    )
    assert said in capsys.readouterr().err
    assert "trains in one process" in json.loads(rank_1.read_text())["message"]["message"]


def test_a_time_to_wait_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="rank-timeout"), process_group(0.0):
        pass


def test_without_torchrun_there_is_no_group():
    import torch.distributed as dist

    with process_group():
        assert not dist.is_initialized()


def test_an_error_that_was_caught_is_not_the_cause_of_what_happens_in_a_later_run(rank_1):
    write_error_file(ValueError("caught"))
    assert rank_1.exists()
    with errors_logged_with_rank(None):
        pass
    assert not rank_1.exists()
