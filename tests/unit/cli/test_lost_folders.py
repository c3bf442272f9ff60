"""A run folder that cannot be written, is removed, or is relative: refused early, written again, or found."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from torch import nn

import treadle
from command_kit import Stop, leave_the_report_out
from command_kit import treadle as command
from functional_kit import loader
from golden_runs_kit import PACKS, RUNS
from treadle.engine.observers import observing
from treadle.errors import ConfigError
from treadle.runs.packs import find_pack
from treadle.spectra.runs import SpectraPack

TINY = [
    "data.max_rows=80", "epochs=1", "batch_size=32", "model.d_model=16", "model.num_layers=1", "threads=1",
]  # fmt: skip


def spectra(out: object) -> int:
    return command("train", "spectra", *TINY, "--out", out, "--device", "cpu")


@pytest.fixture
def places(tmp_path: Path, monkeypatch) -> Path:
    """A folder with a file, a link to nothing, and a folder that cannot be written, even by root."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "locked").mkdir()
    real = os.access

    def access(path: object, mode: int, **rest: bool) -> bool:
        return not (mode & os.W_OK and Path(str(path)).name == "locked") and real(path, mode, **rest)

    monkeypatch.setattr(os, "access", access)
    return tmp_path


REASONS = [
    ("file", "file is not a folder"),
    ("file/run", "file is not a folder"),
    ("link", "nothing, which does not exist"),
    ("link/run", "nothing, which does not exist"),
    ("locked", "locked cannot be written"),
    ("locked/run", "locked cannot be written"),
]


@pytest.mark.parametrize("pack", ["spectra", "astro", "text", "graphs"])
@pytest.mark.parametrize(("place", "reason"), REASONS[::2])
def test_a_pack_refuses_the_folder_before_it_reads_data(places: Path, monkeypatch, capsys, pack, place, reason) -> None:
    monkeypatch.setattr(type(find_pack(pack)), "prepare", lambda *given: pytest.fail("the data was read"))
    assert command("train", pack, "--out", places / place, "--device", "cpu") == 2
    error = capsys.readouterr().err
    assert f"--out {places / place}: " in error
    assert reason in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("place", "reason"), REASONS)
def test_several_runs_refuse_the_folder_before_the_first(places: Path, capsys, place: str, reason: str) -> None:
    assert command("train", "spectra", *TINY, "--seeds", "0..1", "--out", places / place, "--device", "cpu") == 2
    error = capsys.readouterr().err
    assert f"--out {places / place}: " in error
    assert reason in error


@pytest.mark.parametrize(("place", "reason"), REASONS[1:])
def test_a_trainer_names_save_dir_and_reads_no_data(places: Path, place: str, reason: str) -> None:
    trainer = treadle.Trainer(nn.Linear(4, 1), None, nn.MSELoss(), device="cpu")
    with pytest.raises(ConfigError, match="save_dir=.*" + reason):
        trainer.train(loader(), 1, save_dir=places / place)
    assert trainer.step == 0


def test_a_full_disk_at_the_plots_is_one_line_and_the_next_run_ends_the_work(tmp_path, monkeypatch, capsys) -> None:
    def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(SpectraPack, "finish", full)
        assert spectra(tmp_path / "run") == 1
    error = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert error.startswith("error: No space left on device; ")
    assert "free some space" in error
    leave_the_report_out(monkeypatch, SpectraPack)
    assert spectra(tmp_path / "run") == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("pack", PACKS)
def test_a_relative_folder_stays_where_it_was_when_the_working_directory_changes(tmp_path, monkeypatch, pack) -> None:
    leave_the_report_out(monkeypatch, type(find_pack(pack)))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with observing(Stop("on_after_step", 1, lambda: os.chdir(tmp_path / "other"))):
        assert command(*RUNS[pack].start) == 0
    assert (tmp_path / "run" / "metrics.json").is_file()
    assert not list((tmp_path / "other").iterdir())


def test_a_folder_that_is_removed_during_the_run_gets_its_settings_again(tmp_path, monkeypatch, capsys) -> None:
    leave_the_report_out(monkeypatch, SpectraPack)
    with observing(Stop("on_after_step", 1, lambda: shutil.rmtree(tmp_path / "run"))):
        assert spectra(tmp_path / "run") == 0
    assert "was removed during the run" in capsys.readouterr().err
    assert (tmp_path / "run" / "run.json").is_file()
    assert (tmp_path / "run" / "config.json").is_file()


def test_a_folder_that_cannot_be_searched_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    def closed(*given: object, **named: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "run" / "metrics.json"))

    monkeypatch.setattr("treadle.runs.folder.finished_metrics", closed)
    assert spectra(tmp_path / "run") == 2
    assert f"--out {tmp_path / 'run'}: cannot be read (Permission denied); choose" in capsys.readouterr().err
