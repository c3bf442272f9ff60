"""The folder beside the checkpoints that from_pretrained loads: the scored weights, whole or not at all."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from torch import nn

import language_kit as kit
from fault_points import foreign, hurt, killed, no_space, record
from helpers import differences
from treadle import Trainer, load_weights
from treadle.checkpoint.store import load_checkpoint
from treadle.errors import CheckpointError
from treadle.exchange.pretrained import has_save_pretrained, write_pretrained

# peft 0.21 asks a model of transformers 5.24 by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def loaded(folder):
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(folder)


@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.5}])
def test_the_folder_holds_the_weights_that_were_scored(settings, tmp_path):
    trainer = kit.trainer(kit.gpt2(), lr=0.1, **settings)
    trainer.train(kit.loader(), 4, kit.loader(7), save_dir=tmp_path, best_mode="max")
    assert trainer.best_epoch < 4, "the last epoch must not be the best one"
    model = loaded(tmp_path / "pretrained")
    assert differences(dict(model.state_dict()), load_weights(tmp_path / "best_model.pt")) == []
    assert load_checkpoint(tmp_path / "best_model.pt")["format"]["scored"] == ("ema" if settings else "model")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.config.n_embd == 16
    assert trainer.evaluate(kit.loader(7))["loss"] != pytest.approx(trainer.best_metric, abs=1e-3)
    assert kit.trainer(model).evaluate(kit.loader(7))["loss"] == pytest.approx(trainer.best_metric, abs=1e-6)


def test_without_a_best_rule_the_folder_holds_the_last_epochs_weights(tmp_path):
    trainer = kit.trainer(kit.gpt2())
    trainer.train(kit.loader(), 2, save_dir=tmp_path, best_model_metric=None)
    assert differences(dict(loaded(tmp_path / "pretrained").state_dict()), dict(trainer.model.state_dict())) == []
    assert sorted(os.listdir(tmp_path / "pretrained")) == ["config.json", "generation_config.json", "model.safetensors"]


def test_the_progress_bars_of_transformers_stay_out_of_the_screen(tmp_path, capfd):
    from transformers.utils import logging

    logging.enable_progress_bar()  # other libraries' trainers may have disabled it
    kit.gpt2().save_pretrained(tmp_path / "own")
    assert "it/s" in capfd.readouterr().err
    write_pretrained(kit.gpt2(), tmp_path / "pretrained")
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled()


def test_the_folder_of_a_model_with_adapters_holds_the_adapters(tmp_path):
    from peft import PeftModel

    trainer = kit.trainer(kit.with_lora(kit.gpt2()), ema_decay=0.5)
    trainer.train(kit.loader(), 2, kit.loader(7), save_dir=tmp_path)
    folder = tmp_path / "pretrained"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(os.listdir(folder))
    assert (folder / "adapter_model.safetensors").stat().st_size < 4000
    model = PeftModel.from_pretrained(kit.gpt2(), folder)
    scored, state = load_weights(tmp_path / "best_model.pt"), model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in scored.items())
    assert kit.trainer(model.requires_grad_()).evaluate(kit.loader(7))["loss"] == pytest.approx(trainer.best_metric)


def test_a_model_without_save_pretrained_gets_no_folder(tmp_path):
    model = nn.Linear(2, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), device="cpu")
    trainer.train([(torch.ones(2, 2), torch.ones(2, 1))], 1, save_dir=tmp_path)
    assert not (tmp_path / "pretrained").exists()


# -- compiled models ----------------------------------------------------------------------------------------------


def compiled_whole(model):
    return torch.compile(model, backend="eager")


def compiled_in_part(model):
    model.transformer.h[0] = torch.compile(model.transformer.h[0], backend="eager")
    return model


@pytest.mark.parametrize("compiled", [compiled_whole, compiled_in_part])
def test_files_of_a_compiled_model_know_nothing_of_it_and_fit_the_plain_one_both_ways(compiled, tmp_path):
    from safetensors import safe_open

    with torch.compiler.set_stance("force_eager"):  # tracing takes a minute and is not what is looked at
        trainer = kit.trainer(compiled(kit.gpt2()), ema_decay=0.5)
        trainer.train(kit.loader(), 1, save_dir=tmp_path)
        plain = kit.trainer(kit.gpt2(seed=1), ema_decay=0.5)
        plain.load_checkpoint(tmp_path / "best_model.pt")
        plain.train(kit.loader(), 2, save_dir=tmp_path / "plain")
        trainer.load_checkpoint(tmp_path / "plain" / "best_model.pt")
    tree = load_checkpoint(tmp_path / "best_model.pt")
    names = [*tree["model"], *tree["ema"]["ema"]["shadow"], *tree["optimizer"]["param_groups"][0]["param_names"]]
    with safe_open(tmp_path / "pretrained" / "model.safetensors", "pt") as file:
        names += file.keys()
    assert not [name for name in names if "_orig_mod" in name]
    assert (
        differences(dict(loaded(tmp_path / "pretrained").state_dict()), load_weights(tmp_path / "best_model.pt")) == []
    )
    later = load_checkpoint(tmp_path / "plain" / "best_model.pt")
    assert differences(later["model"], trainer._engine.state_dict()["model"]) == []


# -- whole or not at all ------------------------------------------------------------------------------------------


class Writes(nn.Module):
    """Writes two files that belong together, and as many more as the number in it says."""

    def __init__(self, number):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(number)))

    def save_pretrained(self, folder):
        number = int(self.weight)
        for name in ("config.txt", "weights.txt", *(f"shard{n}.txt" for n in range(number))):
            with open(os.path.join(folder, name), "w") as file:
                file.write(str(number))


def holds(folder):
    """The number of a whole folder."""
    numbers = {(folder / name).read_text() for name in os.listdir(folder)}
    assert len(numbers) == 1, numbers
    number = int(numbers.pop())
    assert len(os.listdir(folder)) == number + 2
    return number


@pytest.mark.parametrize("act", [no_space, foreign, killed])
def test_hurt_anywhere_the_folder_is_the_old_one_or_the_new_one(act, tmp_path):
    folder = tmp_path / "run"
    target = folder / "pretrained"

    def prepare():
        shutil.rmtree(folder, ignore_errors=True)
        write_pretrained(Writes(1), target)

    prepare()
    seen = record(folder, lambda: write_pretrained(Writes(2), target))
    assert len(seen) > 15
    stepped_aside = 0
    for at in range(1, len(seen) + 1):
        prepare()
        error = hurt(folder, lambda: write_pretrained(Writes(2), target), at, act)
        assert error is None or isinstance(error, CheckpointError), (seen[at - 1], repr(error))
        stepped_aside += not target.exists()
        where = target if target.exists() else folder / ".pretrained.old"
        assert holds(where) in (1, 2), seen[at - 1]
        write_pretrained(Writes(3), target)
        assert holds(target) == 3
        assert os.listdir(folder) == ["pretrained"], seen[at - 1]
    assert stepped_aside == (1 if act is killed else 0), "only a kill between the two renames leaves the old name empty"


def test_a_model_that_cannot_write_itself_leaves_the_old_folder(tmp_path):
    class Fails(Writes):
        def save_pretrained(self, folder):
            super().save_pretrained(folder)
            raise ValueError("the weights are of a kind\nthat cannot be written")

    write_pretrained(Writes(1), tmp_path / "pretrained")
    with pytest.raises(CheckpointError, match=r"of a kind\. Existing files are intact"):
        write_pretrained(Fails(2), tmp_path / "pretrained")
    assert holds(tmp_path / "pretrained") == 1
    assert os.listdir(tmp_path) == ["pretrained"]


def test_weights_that_are_not_finite_never_replace_finite_ones(tmp_path, caplog):
    write_pretrained(Writes(1), tmp_path / "pretrained")
    model = Writes(2)
    model.register_buffer("mean", torch.tensor(float("nan")))
    write_pretrained(model, tmp_path / "pretrained")
    assert "not finite (first: mean)" in caplog.text
    assert holds(tmp_path / "pretrained") == 1


def test_a_wrapped_model_is_known_by_its_own_method():
    assert has_save_pretrained(nn.DataParallel(Writes(1)))
    assert not has_save_pretrained(nn.Linear(1, 1))
