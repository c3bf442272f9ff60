"""Golden checkpoints and run folders of an earlier commit load, go on and replay to the bit; new ones look the same.

``make.py`` wrote the files. Where torch or the processor is another one than there, last bits may differ: numbers are
then compared with a tolerance, and everything else as strictly as ever.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest

import golden_kit as kit
from ranks import run_on_ranks
from treadle import verify_checkpoint
from treadle.checkpoint import load_checkpoint

RECORDED = json.loads((kit.FILES / "golden.json").read_text(encoding="utf-8"))
EXACT = RECORDED["platform"] == kit.this_platform()

# -- checkpoints of the faces -------------------------------------------------------------------------------------


def stored_end(face: str) -> Any:
    return load_checkpoint(kit.FILES / "faces" / f"{face}-end.pt")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a face from its beginning to its end, once; gives the checkpoint that it wrote and the end's state."""

    @functools.cache
    def trained(face: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("straight")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            end = kit.run(face, Path(face))
        return folder / face / "saved" / kit.checkpoint_name(face), end

    return trained


@pytest.mark.parametrize("face", kit.MAKE)
def test_a_golden_checkpoint_is_intact_and_what_the_index_says(face: str) -> None:
    path = kit.golden(face)
    assert verify_checkpoint(path) == []
    assert list(kit.index(load_checkpoint(path)).items()) == list(RECORDED["checkpoints"][face].items())


@pytest.mark.parametrize("face", kit.ALONE)
def test_a_golden_checkpoint_goes_on_to_the_end_of_the_uninterrupted_run(
    face: str, straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    end = kit.run(face, Path(face), resume=kit.golden(face))
    assert kit.far(end, straight(face)[1], exact=EXACT) == []
    assert kit.far(kit.end_of(end), stored_end(face), exact=EXACT) == []
    assert "fresh" not in caplog.text


@pytest.mark.parametrize("face", kit.ALONE)
def test_a_checkpoint_written_now_has_the_same_keys_in_the_same_order(face: str, straight: Any) -> None:
    compare(kit.index(load_checkpoint(straight(face)[0])), RECORDED["checkpoints"][face])


def compare(found: dict[str, str], recorded: dict[str, str]) -> None:
    assert kit.shapes(found) == kit.shapes(recorded)
    if EXACT:
        assert kit.values(found) == kit.values(recorded)


def on_ranks(folder: str, golden: str) -> tuple[Any, Any]:
    """Trains the sharded face on this rank, from the beginning and from the golden checkpoint; gives both ends."""
    os.chdir(folder)
    straight = kit.run("fsdp", Path("straight"))
    return straight, kit.run("fsdp", Path("resumed"), resume=Path(golden))


def test_the_golden_shards_of_two_ranks_go_on_there_and_are_written_alike(tmp_path: Path) -> None:
    straight, resumed = run_on_ranks(on_ranks, 2, str(tmp_path), str(kit.golden("fsdp")))[0]
    assert kit.far(resumed, straight, exact=EXACT) == []
    assert kit.far(kit.end_of(resumed), stored_end("fsdp"), exact=EXACT) == []
    written = tmp_path / "straight" / "saved" / kit.checkpoint_name("fsdp")
    compare(kit.index(load_checkpoint(written)), RECORDED["checkpoints"]["fsdp"])
    assert sorted(path.name for path in written.iterdir()) == sorted(path.name for path in kit.golden("fsdp").iterdir())
