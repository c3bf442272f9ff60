"""The model: a plain GPT-2 with new weights, adapters that start as nothing, packages imported where they are used."""

from __future__ import annotations

import importlib

import pytest
import torch

from treadle.text import add_lora, build_gpt2, train_tokenizer

SIZES = {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}


def tokens():
    return torch.randint(0, 12, (2, 8), generator=torch.Generator().manual_seed(0))


def test_the_seed_decides_the_weights_and_embedding_and_head_are_one():
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(build_gpt2(12, **SIZES))
    first, same, other = (model.state_dict()["lm_head.weight"] for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert models[0].lm_head.weight is models[0].transformer.wte.weight


def test_a_step_warns_of_nothing(caplog, capfd):
    model = build_gpt2(12, **SIZES)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert caplog.records == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("sizes", "words"),
    [({"n_head": 3}, "multiple of n_head=3"), ({"n_layer": 0}, "n_layer=0"), ({"dropout": 1.0}, "dropout=1.0")],
)
def test_a_wrong_size_is_named(sizes, words):
    with pytest.raises(ValueError, match=words):
        build_gpt2(12, **{**SIZES, **sizes})


def test_adapters_change_nothing_at_first_and_are_all_that_is_trained():
    torch.manual_seed(0)
    model = build_gpt2(12, **SIZES).eval()
    before = model(input_ids=tokens()).logits
    adapted = add_lora(model, r=2).eval()
    assert torch.equal(adapted(input_ids=tokens()).logits, before)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name for name in trained)
    assert len(trained) == 2 * 4 * 2  # two matrices for each of four layers in each of two blocks


@pytest.mark.parametrize(("changes", "words"), [({"r": 0}, "r=0"), ({"dropout": -0.1}, "dropout=-0.1")])
def test_wrong_adapters_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        add_lora(build_gpt2(12, **SIZES), **changes)


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("transformers", lambda: build_gpt2(12, **SIZES)),
        ("tokenizers", lambda: train_tokenizer(["a"], 300)),
        ("peft", lambda: add_lora(None)),
    ],
)
def test_a_missing_package_names_the_extra(package, use, monkeypatch):
    real = importlib.import_module

    def without(name, *rest):
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ImportError, match=rf"needs {package} .*pip install 'treadle\[hf\]'"):
        use()
