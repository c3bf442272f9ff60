"""Every Python block of the qurious document runs after its import lines are rewritten."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Callable, Optional  # noqa: UP035  (the document's own names)

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle import Trainer
from treadle.checkpoint import load_checkpoint

_spec = importlib.util.spec_from_file_location("seed_blocks", Path(__file__).parent / "blocks.py")
seed_blocks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(seed_blocks)

RECORDS = ("sessions.jsonl", "settings.json", "steps.jsonl")  # of every run folder
METHODS = [
    "train_step", "eval_step", "train_epoch", "evaluate", "train", "load_checkpoint", "_prepare_batch", "_forward_pass",
    "_compute_loss", "_save_checkpoint",
]  # fmt: skip


@pytest.fixture
def blocks():
    return [
        seed_blocks.rewrite_imports(block, {"qurious": "treadle"}) for block in seed_blocks.python_blocks("qurious")
    ]


def find(blocks, text):
    (block,) = [block for block in blocks if text in block]
    return block


def test_the_document_has_fifteen_blocks(blocks):
    assert len(blocks) == 15
    assert len([block for block in blocks if "->" in block]) == len(METHODS)


def test_the_basic_example_trains_and_prints_its_history(blocks, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    treadle.set_seed(0)
    names: dict[str, Any] = {}
    exec(find(blocks, "# 1. Define your model"), names)
    history = names["history"]
    assert capsys.readouterr().out.startswith("Training history: {'epoch': [1, 2, 3, 4, 5], 'train_loss': [")
    assert history["train_loss"][-1] < history["train_loss"][0]
    assert names["trainer"].step == 5 * 32
    written = sorted(path.name for path in Path("checkpoints").iterdir())
    assert written == ["best_model.pt", *(f"checkpoint_epoch_{n}.pt" for n in range(1, 6)), "history.json", *RECORDS]


def test_the_constructor_block_is_our_signature(blocks):
    block = find(blocks, "Trainer(\n    model: torch.nn.Module")
    documented = [line.split(":")[0].strip() for line in block.splitlines() if ":" in line]
    ours = list(inspect.signature(Trainer).parameters.values())
    assert [parameter.name for parameter in ours[: len(documented)]] == documented
    assert all(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in ours[: len(documented)])
    kinds = {parameter.kind for parameter in ours[len(documented) :]}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}  # settings, checked by name


@pytest.mark.parametrize("method", METHODS)
def test_every_documented_signature_is_ours_in_order_and_defaults(blocks, method):
    block = next(block for block in blocks if block.startswith(f"{method}(") and "->" in block)
    names = {
        "Any": Any, "Dict": dict, "List": list, "Optional": Optional, "Tuple": tuple, "Callable": Callable,
        "DataLoader": DataLoader, "torch": torch,
    }  # fmt: skip
    exec(f"def {block}: ...", names)
    documented = inspect.signature(names[method]).parameters
    ours = list(inspect.signature(getattr(Trainer, method)).parameters.values())[1:]
    for theirs, own in zip(documented.values(), ours):
        assert (own.name, own.default) == (theirs.name, theirs.default)
        assert own.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert all(own.kind is inspect.Parameter.KEYWORD_ONLY for own in ours[len(documented) :])


def classes():
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long()), batch_size=32)


def classification_trainer(blocks):
    treadle.set_seed(0)
    names: dict[str, Any] = {"Trainer": Trainer, "torch": torch}
    exec(find(blocks, "class ClassificationTrainer"), names)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return names["ClassificationTrainer"](model, optimizer, nn.CrossEntropyLoss(), device="cpu")


def test_the_classification_example_keeps_the_best_and_not_the_worst_epoch(blocks, tmp_path):
    trainer = classification_trainer(blocks)
    history = trainer.train(
        classes(), 6, classes(), save_dir=tmp_path, best_model_metric="accuracy", early_stopping_patience=6
    )
    assert list(history) == ["epoch", "train_loss", "lr", "eval_loss", "eval_accuracy"]
    best = max(history["eval_accuracy"])
    assert trainer.best_metric == best > min(history["eval_accuracy"])
    assert trainer.best_epoch == history["eval_accuracy"].index(best) + 1
    assert load_checkpoint(tmp_path / "best_model.pt")["metrics"]["eval_accuracy"] == best
    assert trainer.model.training


def test_the_classification_example_works_with_its_default_metric_and_does_not_disturb_training(blocks):
    ours = classification_trainer(blocks)
    ours.train(classes(), 2, classes())
    assert ours.best_metric == min(ours.history["eval_loss"])
    plain = classification_trainer(blocks)
    plain.train(classes(), 2)
    assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), plain.model.parameters()))


def test_the_callback_example_prints_every_epoch_from_one(blocks, capsys):
    trainer = classification_trainer(blocks)
    names = {"trainer": trainer, "train_dataloader": classes(), "eval_dataloader": classes()}
    exec(find(blocks, "def log_metrics_callback"), names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" metrics")[0] for line in lines] == [f"Epoch {n}" for n in range(1, 11)]
    assert "'train_loss':" in lines[0]
    assert "'eval_loss':" in lines[0]


def small_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    treadle.set_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def manual(first_row, rows):
    """Rows of 32 bytes of Python's own manual, which every installation has."""
    text = "".join(topics.values()).encode()[first_row * 32 : (first_row + rows) * 32]
    tokens = torch.tensor(list(text)).reshape(rows, 32)
    return DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=8)


def test_the_language_model_example_fine_tunes_a_model_built_from_its_config(blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = find(blocks, "AutoModelForCausalLM")
    # Nothing is fetched: a model built from a config and the bytes of a text that is there.
    block = block.replace('AutoModelForCausalLM.from_pretrained("gpt2")', "small_model()")
    block = block.replace('AutoTokenizer.from_pretrained("gpt2")', "Tokenizer()")
    assert "from_pretrained" not in block

    class Tokenizer:
        pad_token, eos_token = None, "<end>"

    names = {
        "small_model": small_model, "Tokenizer": Tokenizer, "Trainer": Trainer, "train_dataloader": manual(0, 64),
        "eval_dataloader": manual(64, 16),
    }  # fmt: skip
    exec(block, names)
    history = names["history"]
    assert names["tokenizer"].pad_token == "<end>"
    assert history["epoch"] == [1, 2, 3]
    assert history["eval_loss"][-1] < history["eval_loss"][0]
    assert Path("checkpoints/checkpoint_epoch_3.pt").exists()
    assert Path("checkpoints/pretrained").is_dir()
