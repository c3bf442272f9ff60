"""Every Python block of the ChemoMAE document runs after its import lines are rewritten."""

from __future__ import annotations

import importlib.util
import inspect
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Optional

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle.datasets import load_spex
from treadle.spectra import SNVScaler, SpectraTrainer, TrainerConfig, masked_mse, masked_sse

_spec = importlib.util.spec_from_file_location("seed_blocks", Path(__file__).parent / "blocks.py")
seed_blocks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(seed_blocks)

ROOTS = {"chemomae": "treadle.spectra"}


@pytest.fixture
def blocks():
    return [seed_blocks.rewrite_imports(block, ROOTS) for block in seed_blocks.python_blocks("chemomae")]


def test_the_document_has_five_blocks(blocks):
    assert len(blocks) == 5


def test_the_config_block_has_our_fields_and_defaults(blocks):
    names = {"dataclass": dataclass, "Path": Path, "Optional": Optional, "__name__": "treadle.spectra.config"}
    exec(compile(blocks[0], "chemomae.md", "exec"), names)
    ours = {field.name: field.default for field in fields(TrainerConfig)}
    for field in fields(names["TrainerConfig"]):
        assert ours[field.name] == field.default, field.name


def test_the_constructor_block_is_our_signature(blocks):
    documented = [line.split(":")[0].strip() for line in blocks[1].splitlines() if ":" in line]
    ours = inspect.signature(SpectraTrainer).parameters
    assert documented == [name for name in ours if name in documented]
    keyword_only = {name for name in documented if ours[name].kind is inspect.Parameter.KEYWORD_ONLY}
    assert keyword_only == {"scheduler", "cfg"}


@pytest.mark.parametrize("loss_type", ["mse", "sse"])
def test_the_loss_block_runs(blocks, loss_type):
    x = torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 0]])
    names = {
        "masked_mse": masked_mse, "masked_sse": masked_sse, "cfg": TrainerConfig(loss_type=loss_type), "x": x,
        "x_recon": torch.tensor([[0.0, 0, 0, 0], [2, 2, 2, 2]]),
        "visible": torch.tensor([[False, False, True, True], [False, True, True, True]]),
    }  # fmt: skip
    exec(blocks[2], names)
    assert names["loss"].item() == 3.0


@pytest.mark.parametrize("epochs", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_both_usage_examples_train_on_real_spectra(blocks, tmp_path, monkeypatch, capsys, epochs):
    monkeypatch.chdir(tmp_path)
    spectra = SNVScaler().transform(torch.from_numpy(load_spex().spectra[:4]))
    treadle.set_seed(0)
    names = {
        "train_loader": DataLoader(TensorDataset(spectra[:2]), batch_size=2, shuffle=True),
        "val_loader": DataLoader(TensorDataset(spectra[2:]), batch_size=2),
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for block in blocks[3:]:
        exec(block.replace('"cuda"', repr(device)).replace("fit(epochs=100)", f"fit(epochs={epochs})"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("Best: {'epoch': ")
    history = json.loads(Path("runs/training_history.json").read_text())
    assert [record["epoch"] for record in history] == list(range(1, len(history) + 1))
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    # The second example is the same command run again: a finished run, nothing trained twice.
    assert names["trainer"].epoch == len(history) == names["history"]["epochs"]
