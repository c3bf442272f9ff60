"""What an earlier run left is set aside whole: never deleted, never mixed with a later one, also after a kill."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from treadle.runs.folder import set_results_aside, set_run_aside


def finished(folder: Path, mark: str = "1") -> Path:
    for name in ("run.json", "metrics.json", "page.html", "steps.jsonl", "checkpoints/last.pt", "pictures/a.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(mark + name)
    return folder


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_moved_whole_and_its_folder_is_free(tmp_path: Path) -> None:
    before = files(finished(tmp_path))
    (tmp_path / "train.log").write_text("open")
    set_run_aside(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier.1", "train.log"]
    assert files(tmp_path / "earlier.1") == before
    again = files(finished(tmp_path, "2"))
    set_run_aside(tmp_path)
    assert files(tmp_path / "earlier.1") == before
    assert files(tmp_path / "earlier.2") == {
        name: text for name, text in again.items() if name.startswith(tuple(before))
    }


@pytest.mark.parametrize("at", range(1, 8))
def test_a_move_that_was_cut_off_is_ended_by_the_next_start(tmp_path: Path, monkeypatch, at: int) -> None:
    before = files(finished(tmp_path))
    real, calls = os.rename, []

    def rename(*given: object) -> None:
        calls.append(given)
        if len(calls) == at:
            raise KeyboardInterrupt
        real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        set_run_aside(tmp_path)
    monkeypatch.setattr(os, "rename", real)
    set_run_aside(tmp_path)
    assert files(tmp_path / "earlier.1") == before
    assert [path.name for path in tmp_path.iterdir()] == ["earlier.1"]


def test_a_start_that_was_killed_before_it_had_a_state_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    set_run_aside(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "run.json"]


def test_results_go_with_a_copy_of_the_settings_and_the_states_stay(tmp_path: Path) -> None:
    before = files(finished(tmp_path))
    set_results_aside(tmp_path, ["metrics.json", "page.html", "pictures", "samples.txt"])
    aside = files(tmp_path / "earlier.1")
    assert aside == {name: before[name] for name in ("metrics.json", "page.html", "pictures/a.png", "run.json")}
    assert (tmp_path / "checkpoints" / "last.pt").exists()
    assert (tmp_path / "run.json").exists()
    set_results_aside(tmp_path, ["metrics.json"])
    assert not (tmp_path / "earlier.2").exists()
