"""Exports: the right weights of the right file, equal to the bit, whole or not at all, and loaded by other programs."""

from __future__ import annotations

import os
import shutil
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import spectra_kit
from foreign_kit import trained
from helpers import differences
from treadle import (
    BaseTrainer,
    CheckpointError,
    CheckpointingHook,
    ConfigError,
    EmaHook,
    load_foreign,
    load_weights,
    read_foreign,
)
from treadle.checkpoint import load_checkpoint, save_checkpoint
from treadle.checkpoint.schema import KEYS, to_plain, versions
from treadle.exchange import export_weights

# Of transformers itself, when it saves a model; nothing here depends on it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def own(path, model, **entries):
    """Write a checkpoint of treadle with the weights of a model."""
    tree = {**dict.fromkeys(KEYS), "model": model.state_dict(), "global_step": 12, "epoch": 3}
    tree["format"] = {"name": "treadle", "version": 1, "face": "functional", "scored": "model"}
    save_checkpoint(to_plain({**tree, **entries}), path)
    return path


def loaded(path):
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def spectra_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("spectra") / "run"
    spectra_kit.make(out).fit(4)
    return out


# -- which weights ------------------------------------------------------------------------------------------------


def test_of_a_run_the_best_checkpoint_and_the_weights_that_were_validated_are_exported(spectra_run, tmp_path):
    done = export_weights(spectra_run, "torch", out=tmp_path / "w.pt")
    best = spectra_run / "checkpoints" / "best.pt"
    assert (done.source.path, done.source.which, done.source.face) == (best, "ema", "spectra")
    assert (done.source.step, done.source.epoch) == (
        load_checkpoint(best)["global_step"],
        load_checkpoint(best)["epoch"],
    )
    assert differences(loaded(tmp_path / "w.pt"), load_weights(best)) == []
    assert differences(loaded(tmp_path / "w.pt"), load_weights(spectra_run / "best_model.pt")) == []


def test_the_best_checkpoint_is_taken_though_others_are_newer(tmp_path):
    best = own(tmp_path / "best_model.pt", trained()[0], epoch=2)
    for epoch in (3, 4):
        newer = own(tmp_path / f"checkpoint_epoch_{epoch}.pt", trained()[0], epoch=epoch)
        os.utime(newer, (time.time() + epoch, time.time() + epoch))
    assert export_weights(tmp_path, "torch").source.path == best
    best.unlink()
    assert export_weights(tmp_path, "torch").source.path == newer


def test_raw_takes_the_raw_weights(spectra_run, tmp_path):
    done = export_weights(spectra_run, "torch", out=tmp_path / "w.pt", raw=True)
    tree = load_checkpoint(spectra_run / "checkpoints" / "best.pt")
    assert done.source.which == "model"
    assert differences(loaded(tmp_path / "w.pt"), tree["model"]) == []
    assert differences(tree["model"], load_weights(spectra_run / "checkpoints" / "best.pt")) != []


def test_a_damaged_best_file_is_named_and_the_newest_intact_one_taken(spectra_run, tmp_path, caplog):
    run = shutil.copytree(spectra_run, tmp_path / "run")
    best = run / "checkpoints" / "best.pt"
    best.unlink()
    best.write_bytes(b"PK torn")
    done = export_weights(run, "torch")
    assert done.source.path == run / "checkpoints" / "last.pt"
    assert "best.pt" in caplog.text
    (run / "checkpoints" / "last.pt").unlink()
    with pytest.raises(CheckpointError, match="has no intact checkpoint"):
        export_weights(run, "torch", force=True)


class Fit(BaseTrainer):
    def build_data_loader(self):
        return [(torch.ones(2, 4), torch.ones(2, 1))] * 4

    def build_model(self):
        return nn.Linear(4, 1)

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self, input):
        return nn.functional.mse_loss(self.model(input[0]), input[1]), {}

    def build_hooks(self):
        return [EmaHook(0.9), CheckpointingHook(2)]


def test_without_a_best_file_the_newest_is_taken_and_an_average_that_nobody_validated_is_named(tmp_path):
    trainer = Fit(max_steps=6, workspace=tmp_path, device="cpu")
    trainer.train()
    done = export_weights(tmp_path, "safetensors")
    assert done.path == tmp_path / "export" / "checkpoint_step_6.safetensors"
    assert (done.source.which, done.source.step, done.source.not_validated) == ("model", 6, ["ema"])
    assert differences(load_file(done.path), dict(trainer.model.state_dict())) == []


def test_a_file_is_exported_beside_itself(tmp_path):
    model, _ = trained()
    done = export_weights(own(tmp_path / "a.pt", model), "torch")
    assert done.path == tmp_path / "export" / "a.pt"
    assert differences(loaded(done.path), dict(model.state_dict())) == []


def test_files_of_other_frameworks_are_exported_alike(tmp_path):
    model, optimizer = trained()
    tree = {
        "state_dict": nn.DataParallel(model).state_dict(),
        "optimizer": optimizer.state_dict(),
        "args": 1,
        "epoch": 3,
    }
    torch.save(tree, tmp_path / "old.pth")
    done = export_weights(tmp_path / "old.pth", "safetensors")
    assert (done.source.kind, done.source.which, done.source.left_out) == ("torch", "stored", ["optimizer", "args"])
    assert differences(load_file(done.path), dict(model.state_dict())) == []
    again = export_weights(done.path, "torch", out=tmp_path / "again.pt")
    assert (again.source.kind, again.source.epoch) == ("safetensors", 3)
    assert differences(loaded(again.path), dict(model.state_dict())) == []


# -- the forms ----------------------------------------------------------------------------------------------------


def test_the_header_of_a_safetensors_file_says_what_it_is(tmp_path):
    done = export_weights(own(tmp_path / "a.pt", trained()[0]), "safetensors")
    with safe_open(done.path, framework="pt") as file:
        assert file.metadata() == {
            "format": "pt", "treadle": versions()["treadle"], "weights": "model", "face": "functional", "step": "12",
            "epoch": "3",
        }  # fmt: skip


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_tied_weights_are_stored_once_and_come_back_under_both_names(tmp_path, form):
    model, other = Tied(), Tied()
    done = export_weights(own(tmp_path / "a.pt", model), form)
    assert done.tied == {"head.weight": "embedding.weight"}
    assert (done.tensors, done.nbytes) == (1, 5 * 3 * 4)
    load_foreign(other, done.path)
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []
    assert set(read_foreign(done.path).model) == {"embedding.weight", "head.weight"}
    if form == "safetensors":
        assert set(load_file(done.path)) == {"embedding.weight"}
    else:
        weights = loaded(done.path)
        assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()


def test_a_part_of_a_larger_tensor_does_not_drag_it_along(tmp_path):
    large = torch.randn(100_000)
    torch.save({"a": large[:2], "b": large[2:8].view(2, 3).t()}, tmp_path / "old.pt")
    small = export_weights(tmp_path / "old.pt", "torch")
    assert small.path.stat().st_size < 10_000
    assert torch.equal(
        load_file(export_weights(tmp_path / "old.pt", "safetensors").path)["b"], large[2:8].view(2, 3).t()
    )


def test_weights_that_are_not_finite_are_exported_with_a_warning(tmp_path, caplog):
    torch.save({"a": torch.tensor([1.0, float("nan")])}, tmp_path / "old.pt")
    export_weights(tmp_path / "old.pt", "torch")
    assert "1 tensors are not finite (first: a)" in caplog.text


# -- for from_pretrained ------------------------------------------------------------------------------------------


def small_gpt2(**settings):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **settings))


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_with_a_pretrained_folder_becomes_a_folder_that_from_pretrained_loads(tmp_path, tied):
    from transformers import GPT2LMHeadModel

    model = small_gpt2(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "pretrained")
    (tmp_path / "pretrained" / "tokenizer.json").write_text("{}")
    with torch.no_grad():
        model.transformer.wte.weight.add_(1)
    own(tmp_path / "best_model.pt", model)
    done = export_weights(tmp_path, "hf")
    assert done.path == tmp_path / "export" / "best_model-hf"
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} == set(
        os.listdir(done.path)
    )
    again, report = GPT2LMHeadModel.from_pretrained(done.path, output_loading_info=True)
    assert not any(report.values())
    assert differences(dict(again.state_dict()), dict(model.state_dict())) == []


def test_weights_tied_by_hand_are_written_under_both_names_for_a_model_that_ties_nothing(tmp_path):
    from transformers import GPT2LMHeadModel

    model = small_gpt2(tie_word_embeddings=False)
    model.config.save_pretrained(tmp_path / "config")
    model.lm_head.weight = model.transformer.wte.weight
    done = export_weights(own(tmp_path / "a.pt", model), "hf", config=tmp_path / "config")
    again, report = GPT2LMHeadModel.from_pretrained(done.path, output_loading_info=True)
    assert not any(report.values())
    assert differences(dict(again.state_dict()), dict(model.state_dict())) == []


def test_without_a_config_the_places_where_it_was_looked_for_are_named(tmp_path):
    own(tmp_path / "best_model.pt", trained()[0])
    (tmp_path / "config.json").write_text("{}")  # a run's settings, not a model's configuration
    with pytest.raises(ConfigError, match=r"config\.json, which is not in '.*pretrained'.*config\.save_pretrained"):
        export_weights(tmp_path, "hf")
    assert sorted(os.listdir(tmp_path)) == ["best_model.pt", "config.json"]


def test_adapters_alone_become_no_pretrained_folder(tmp_path):
    path = own(tmp_path / "a.pt", trained()[0], base={"frozen": "float32 1 00000000"})
    assert export_weights(path, "torch").source.adapters_only
    with pytest.raises(CheckpointError, match="adapters without their base"):
        export_weights(path, "hf", config=tmp_path)


# -- never worse than before --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["torch", "safetensors", "hf"])
def test_what_is_there_is_replaced_only_when_forced(tmp_path, form):
    model = small_gpt2()
    model.config.save_pretrained(tmp_path / "config")
    config = tmp_path / "config" if form == "hf" else None
    first = export_weights(own(tmp_path / "a.pt", model), form, out=tmp_path / "out", config=config)
    with torch.no_grad():
        model.transformer.wte.weight.add_(1)
    own(tmp_path / "b.pt", model)
    with pytest.raises(ConfigError, match="already exists"):
        export_weights(tmp_path / "b.pt", form, out=tmp_path / "out", config=config)
    export_weights(tmp_path / "b.pt", form, out=tmp_path / "out", config=config, force=True)
    again = small_gpt2()
    load_foreign(again, first.path)
    assert differences(dict(again.state_dict()), dict(model.state_dict())) == []
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt", "config", "out"]


@pytest.mark.parametrize("form", ["torch", "safetensors", "hf"])
def test_a_full_disk_leaves_what_was_there(tmp_path, form, monkeypatch):
    model = small_gpt2()
    model.config.save_pretrained(tmp_path / "config")
    config = tmp_path / "config" if form == "hf" else None
    path = own(tmp_path / "a.pt", model)
    first = export_weights(path, form, out=tmp_path / "out", config=config)
    file = first.path / "model.safetensors" if form == "hf" else first.path
    before = file.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        export_weights(path, form, out=tmp_path / "out", config=config, force=True)
    assert file.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "config", "out"]


def test_a_folder_is_no_file_and_a_file_no_folder(tmp_path):
    path = own(tmp_path / "a.pt", trained()[0])
    with pytest.raises(ConfigError, match="is a folder; give the name of a file"):
        export_weights(path, "torch", out=tmp_path, force=True)
    with pytest.raises(ConfigError, match="is a file; give the name of a folder"):
        export_weights(path, "hf", out=path, force=True)


def test_wrong_arguments_are_refused(tmp_path):
    path = own(tmp_path / "a.pt", trained()[0])
    with pytest.raises(ConfigError, match="did you mean 'safetensors'"):
        export_weights(path, "safetensor")
    with pytest.raises(ConfigError, match="is for to='hf' only"):
        export_weights(path, "torch", config=tmp_path)
    with pytest.raises(ConfigError, match="no such file or folder"):
        export_weights(tmp_path / "absent", "torch")
    assert os.listdir(tmp_path) == ["a.pt"]


def test_an_export_into_the_runs_own_folder_does_not_hide_its_checkpoints(tmp_path):
    model, _ = trained()
    path = own(tmp_path / "best_model.pt", model)
    export_weights(tmp_path, "safetensors", out=tmp_path / "model.safetensors")
    assert export_weights(tmp_path, "torch").source.path == path


def test_what_is_no_tensor_is_refused(tmp_path):
    path = own(tmp_path / "a.pt", trained()[0])
    tree = load_checkpoint(path)
    tree["model"]["part._extra_state"] = {"scale": 2.0}
    save_checkpoint(tree, path)
    with pytest.raises(CheckpointError, match=r"part\._extra_state is not a tensor"):
        export_weights(path, "torch")
