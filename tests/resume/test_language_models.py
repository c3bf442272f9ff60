"""Language models stopped after any step and resumed equal the uninterrupted run, to the bit."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

import language_kit as kit
import treadle
from helpers import Snapshots, differences, through_a_file
from treadle.checkpoint.store import load_checkpoint, verify_checkpoint
from treadle.cli.app import app
from treadle.errors import CheckpointError

# peft 0.21 asks a model of transformers 5.24 by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

EPOCHS = 2


def tied(seed):
    return kit.gpt2(seed=seed)


def lora(seed):
    return kit.with_lora(kit.gpt2(), seed=seed)


def lora_and_a_norm(seed):
    return kit.with_lora(kit.gpt2(), seed=seed, modules_to_save=["ln_f"])


def recompute(model):
    """Under either name: the releases of transformers for Python 3.10 have the former one."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def recomputing(seed):
    model = kit.gpt2(seed=seed)
    recompute(model)
    return model


def lora_recomputing(seed):
    base = kit.gpt2()
    recompute(base)
    return kit.with_lora(base, seed=seed)


KINDS = {
    "tied weights": (tied, {}),
    "tied weights, averaged, 4 to a step": (tied, {"ema_decay": 0.8, "gradient_accumulation_steps": 4}),
    "lora": (lora, {}),
    "lora, averaged": (lora, {"ema_decay": 0.8}),
    "lora and a whole layer, 4 to a step": (lora_and_a_norm, {"gradient_accumulation_steps": 4}),
    "activation checkpointing": (recomputing, {}),
    "lora, activation checkpointing": (lora_recomputing, {}),
}


def run(make, *, seed=0, resume=None, **settings):
    """Train, and return the state after each step."""
    states = Snapshots()
    trainer = kit.trainer(make(seed), hooks=[states], **settings)
    treadle.set_seed(5 + seed)
    if resume is not None:
        trainer.load_checkpoint(resume)
    trainer.train(kit.loader(empty=[4, 11]), EPOCHS, kit.loader(7, shuffle=False))
    return trainer, states.states


@pytest.mark.parametrize("stops", ["a few", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_stopping_after_any_step_changes_nothing(kind, stops, tmp_path):
    make, settings = KINDS[kind]
    straight, states = run(make, **settings)
    expected = through_a_file(straight._engine.state_dict())
    for step in sorted(states)[:: 1 if stops == "all" else len(states) // 3]:
        torch.save(states[step], tmp_path / "cut.pt")
        assert verify_checkpoint(tmp_path / "cut.pt") == []
        resumed, _ = run(make, seed=1, resume=tmp_path / "cut.pt", **settings)
        assert differences(expected, through_a_file(resumed._engine.state_dict())) == [], step
        assert differences(straight.model.state_dict(), resumed.model.state_dict()) == [], step


def test_recomputing_activations_changes_no_bit():
    _, expected = run(tied)
    _, states = run(recomputing)
    assert differences(expected, states) == []


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    _, states = run(tied)
    torch.save(states[3], tmp_path / "cut.pt")
    saved = load_checkpoint(tmp_path / "cut.pt")["model"]
    assert saved["lm_head.weight"].data_ptr() == saved["transformer.wte.weight"].data_ptr()
    model = kit.gpt2(seed=1)
    kit.trainer(model).load_checkpoint(tmp_path / "cut.pt")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(model.lm_head.weight, saved["lm_head.weight"])


@pytest.mark.parametrize("make", [lora, lora_and_a_norm])
def test_a_checkpoint_of_adapters_holds_what_is_trained_and_nothing_of_the_base(make, tmp_path):
    trainer, states = run(make, ema_decay=0.8)
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    tree = states[max(states)]
    assert set(tree["model"]) == set(tree["ema"]["ema"]["shadow"]) == trained
    frozen = {name for name, _ in trainer.model.named_parameters(remove_duplicate=False)} - trained
    assert set(tree["base"]) == frozen
    torch.save(tree, tmp_path / "cut.pt")
    assert set(treadle.load_weights(tmp_path / "cut.pt")) == trained
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "cut.pt")]).output
    assert f"{len(frozen)} frozen weights are not in the file" in shown
    assert "base.base_model" not in shown


def test_adapters_of_another_base_are_refused_in_words(tmp_path):
    _, states = run(lora)
    torch.save(states[3], tmp_path / "cut.pt")
    trainer = kit.trainer(kit.with_lora(kit.gpt2(seed=1)))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"another base model: 11 of 29 frozen weights differ.*float32") as info:
        trainer.load_checkpoint(tmp_path / "cut.pt")
    assert "cut.pt" in str(info.value)
    assert differences(before, trainer.model.state_dict()) == []


def test_adapters_without_their_base_and_a_base_without_its_adapters_are_refused(tmp_path):
    _, states = run(lora)
    torch.save(states[3], tmp_path / "lora.pt")
    with pytest.raises(CheckpointError, match="missing here"):
        kit.trainer(kit.gpt2()).load_checkpoint(tmp_path / "lora.pt")
    _, states = run(tied)
    torch.save(states[3], tmp_path / "full.pt")
    with pytest.raises(CheckpointError, match="lora_A"):
        kit.trainer(lora(0)).load_checkpoint(tmp_path / "full.pt")


def test_a_frozen_weight_that_was_changed_after_all_is_saved(tmp_path):
    model = lora(0)
    trainer = kit.trainer(model)
    trainer.train(kit.loader(), 1)
    name = "base_model.model.transformer.ln_f.bias"
    with torch.no_grad():
        model.get_parameter(name).fill_(0.25)
    torch.save(trainer._engine.state_dict(), tmp_path / "cut.pt")
    tree = load_checkpoint(tmp_path / "cut.pt")
    assert name in tree["model"]
    assert name not in tree["base"]
    resumed = kit.trainer(lora(1))
    resumed.load_checkpoint(tmp_path / "cut.pt")
    assert differences(model.state_dict(), resumed.model.state_dict()) == []
    assert differences(tree, resumed._engine.state_dict()) == []
