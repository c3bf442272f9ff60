"""Checkpoints that an earlier version wrote are read, resumed from, and end where they ended then."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from treadle import load_weights, verify_checkpoint
from treadle.checkpoint.safe.inspect import inspect_path
from treadle.checkpoint.schema import FORMAT_VERSION, KEYS, versions
from treadle.checkpoint.store import load_checkpoint

FROZEN = Path(__file__).parents[1] / "data" / "frozen"
FORMATS = sorted(path.stem for path in FROZEN.glob("format-*.json"))


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("frozen_make", FROZEN / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded(name):
    return json.loads((FROZEN / f"{name}.json").read_text(encoding="utf-8"))


def close(found, expected, tree):
    """To the bit under the torch that wrote them; kernels of another may round differently, and Adam enlarges that.

    A step moves a weight by up to 0.01.
    """
    same = tree["versions"]["torch"] == versions()["torch"]
    allowed = {"rtol": 0, "atol": 0} if same else {"rtol": 1e-3, "atol": 1e-4}
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].flatten(), torch.tensor(value, dtype=found[name].dtype), **allowed)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("face", ["mini", "spectra"])
def test_a_frozen_file_is_intact_small_and_gives_the_recorded_weights(name, face):
    path = FROZEN / f"{name}-{face}.pt"
    assert path.stat().st_size < 60_000
    assert verify_checkpoint(path) == []
    assert inspect_path(path)["kind"] == "treadle checkpoint"
    close(load_weights(path), recorded(name)[face]["weights"], load_checkpoint(path))


@pytest.mark.parametrize("name", FORMATS)
def test_the_step_face_resumes_from_a_frozen_file(name, maker, tmp_path, caplog):
    source = FROZEN / f"{name}-mini.pt"
    shutil.copyfile(source, tmp_path / f"checkpoint_step_{maker.STEPS}.pt")
    trainer = maker.mini(tmp_path, maker.STEPS + maker.MORE)
    trainer.train()
    expected = recorded(name)["mini_end"]
    assert trainer.step == expected["step"]
    close(trainer.state_dict()["model"], expected["weights"], load_checkpoint(source))
    assert "fresh" not in caplog.text


@pytest.mark.parametrize("name", FORMATS)
def test_the_spectra_face_resumes_from_a_frozen_file(name, maker, tmp_path, caplog):
    source = FROZEN / f"{name}-spectra.pt"
    (tmp_path / "checkpoints").mkdir()
    shutil.copyfile(source, tmp_path / "checkpoints" / "last.pt")
    trainer = maker.spectra(tmp_path)
    trainer.fit(maker.EPOCHS + maker.MORE)
    expected = recorded(name)["spectra_end"]
    assert trainer.epoch == expected["epoch"]
    close(trainer.model.state_dict(), expected["weights"], load_checkpoint(source))
    assert [record["epoch"] for record in trainer.history] == [record["epoch"] for record in expected["history"]]
    losses = [record["val_loss"] for record in expected["history"]]
    assert [record["val_loss"] for record in trainer.history] == pytest.approx(losses, rel=1e-4)
    assert "fresh" not in caplog.text


def test_the_document_of_the_format_names_every_key_and_no_other():
    document = (Path(__file__).parents[2] / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", document, flags=re.MULTILINE)
    assert rows == list(KEYS)
    assert f"format number is {FORMAT_VERSION}" in document
