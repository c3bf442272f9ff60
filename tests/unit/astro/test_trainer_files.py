"""The files of an astronomy run, and what is loaded from them."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch

from astro_trainer_kit import VOCAB, codebooks, loader, make, model, same_weights
from helpers import differences
from treadle import load_weights
from treadle.astro import AstroTrainer, build_vocab_spec
from treadle.checkpoint import load_checkpoint, verify_checkpoint
from treadle.engine.settings import other_settings
from treadle.errors import CheckpointError, ConfigError
from treadle.hooks import EmaHook


def strict(path):
    def refuse(constant):
        raise ValueError(constant)

    return json.loads(path.read_text(), parse_constant=refuse)


def names(folder):
    found = sorted(path.name for path in folder.iterdir() if path.suffix in (".pt", ".json"))
    return [name for name in found if name != "settings.json"]  # which every run folder has


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(save_every_steps=1).train(1, loader())
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_loss_is_named(tmp_path, caplog):
    make(tmp_path).train(1)
    with caplog.at_level(logging.WARNING, "treadle"):
        make(tmp_path).train(1, resume_from="auto")
        make(tmp_path, meaningful_loss={"weight_image": 0.7}).train(1, resume_from="auto")
    (line,) = (text for text in caplog.messages if "nothing to do" not in text)
    assert "another loss: loss_config={" in line
    assert "'weight_image': 0.7" in line


def test_construction_writes_nothing(tmp_path):
    make(tmp_path / "run", save_every_steps=1)
    assert list(tmp_path.iterdir()) == []


def test_a_run_leaves_checkpoints_by_step_and_epoch_the_best_and_its_history(tmp_path):
    trainer = make(tmp_path, save_every_steps=3)
    records = trainer.train(2, loader())
    assert names(tmp_path) == [
        "best.pt", "ckpt_epoch_001.pt", "ckpt_epoch_002.pt", "ckpt_step_00000003.pt", "ckpt_step_00000006.pt",
        "training_history.json",
    ]  # fmt: skip
    assert strict(tmp_path / "training_history.json") == records
    step = load_checkpoint(tmp_path / "ckpt_step_00000006.pt")
    assert (step["epoch"], step["global_step"], step["progress"]["applied_steps"]) == (1, 6, 6)
    assert step["data"]["position"] == 2
    epoch = load_checkpoint(tmp_path / "ckpt_epoch_002.pt")
    assert (epoch["epoch"], epoch["global_step"], epoch["format"]["face"]) == (2, 8, "astro")
    best = min(records, key=lambda record: record["val_loss_total"])
    assert (epoch["best_epoch"], epoch["best_metric"]) == (best["epoch"], best["val_loss_total"])
    assert load_checkpoint(tmp_path / "best.pt")["epoch"] == best["epoch"]
    assert verify_checkpoint(tmp_path / "best.pt") == []


def test_a_checkpoint_says_of_which_vocabulary_and_settings_it_is(tmp_path):
    make(tmp_path).train(1)
    config = load_checkpoint(tmp_path / "ckpt_epoch_001.pt")["config"]
    assert {name: config[name] for name in ("vocab_size", "base_image", "base_scalar", "base_spectrum")} == {
        "vocab_size": 32, "base_image": 5, "base_scalar": 12, "base_spectrum": {"a": 20, "b": 26},
    }  # fmt: skip
    assert config["loss_config"]["sample_k"] == 3
    assert config["training"]["learning_rate"] == 0.02


def test_without_validation_there_is_no_best(tmp_path):
    make(tmp_path).train(1)
    assert names(tmp_path) == ["ckpt_epoch_001.pt", "training_history.json"]


def test_the_best_file_holds_the_weights_that_were_scored(tmp_path):
    trainer = make(tmp_path, hooks=[EmaHook(0.5)])
    records = trainer.train(2, loader())
    other = make(seed=5)
    other.model.load_state_dict(load_weights(tmp_path / "best.pt"))
    best = min(record["val_loss_total"] for record in records)
    assert other.evaluate(loader())["loss_total"] == pytest.approx(best, abs=1e-6)


def test_a_mean_over_nothing_is_null_in_the_history(tmp_path):
    records = make(tmp_path, loss={"weight_image": 0.0}).train(1)
    assert math.isnan(records[0]["train_loss_img"])
    assert strict(tmp_path / "training_history.json")[0]["train_loss_img"] is None


def test_a_run_in_a_used_folder_that_starts_anew_keeps_the_old_history(tmp_path):
    make(tmp_path).train(1)
    make(tmp_path).train(2)
    assert len(strict(tmp_path / "training_history.json")) == 2
    assert len(strict(tmp_path / "training_history.1.json")) == 1


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["auto", "ckpt_step_00000006.pt", "ckpt_epoch_001.pt", "best.pt"])
def test_a_run_that_was_cut_off_ends_as_one_that_was_not(tmp_path, source):
    settings = {"save_every_steps": 3, "total_steps": 12}
    straight = make(tmp_path / "straight", **settings)
    straight.train(3, loader())
    make(tmp_path / "cut", **settings).train(2, loader())
    resumed = make(tmp_path / "cut", seed=9, **settings)
    resumed.train(3, loader(), resume_from=source if source == "auto" else tmp_path / "cut" / source)
    assert resumed.history == straight.history
    assert same_weights(resumed, straight)
    ends = [load_checkpoint(tmp_path / folder / "ckpt_epoch_003.pt") for folder in ("straight", "cut")]
    assert differences(*ends) == []
    assert strict(tmp_path / "cut" / "training_history.json") == straight.history


def test_load_checkpoint_and_train_go_on_from_the_stored_step(tmp_path):
    straight = make(tmp_path, save_every_steps=6)
    straight.train(None, loader())
    resumed = make(tmp_path / "other", seed=9)
    tree = resumed.load_checkpoint(tmp_path / "ckpt_step_00000006.pt")
    assert (tree["global_step"], resumed.global_step, resumed.micro_steps, resumed.epoch) == (6, 6, 6, 1)
    assert resumed.get_lr() == pytest.approx(tree["optimizer"]["param_groups"][0]["lr"])
    assert resumed.train(None, loader()) == straight.history
    assert same_weights(resumed, straight)


def test_a_finished_run_is_not_trained_again(tmp_path):
    records = make(tmp_path).train(2, resume_from="auto")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.pt")}
    again = make(tmp_path, seed=3)
    assert again.train(2, resume_from="auto") == records
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.pt")} == before
    with pytest.raises(ConfigError, match="needs output_dir"):
        make().train(1, resume_from="auto")


def test_an_epoch_whose_file_a_kill_left_unwritten_gets_it_from_the_best(tmp_path):
    make(tmp_path).train(1, loader())
    (tmp_path / "ckpt_epoch_001.pt").unlink()
    make(tmp_path, seed=3).train(1, loader(), resume_from="auto")
    assert load_checkpoint(tmp_path / "ckpt_epoch_001.pt")["epoch"] == 1


def test_a_resume_with_another_length_names_both(tmp_path, caplog):
    make(tmp_path).train(1)
    resumed = make(tmp_path, total_steps=50)
    with caplog.at_level(logging.WARNING, "treadle.astro"):
        resumed.train(2, resume_from="auto")
    assert "had 4 steps in all and has 50" in caplog.text
    assert resumed.scheduler.total_steps == 50


def test_a_checkpoint_of_another_vocabulary_is_refused_with_the_offsets(tmp_path):
    make(tmp_path).train(1)
    other = build_vocab_spec(7, 8, 6, ["a", "c"], scalar_bins=4)
    books = {**codebooks(), "spectrum_codebook": dict(zip("ac", codebooks()["spectrum_codebook"].values()))}
    trainer = AstroTrainer(model(), other, loader(), {"warmup_steps": 1}, **books, device="cpu")
    with pytest.raises(CheckpointError, match=r"base_spectrum is \{'a': 20, 'b': 26\} there and \{'a': 20, 'c': 26\}"):
        trainer.load_checkpoint(tmp_path / "ckpt_epoch_001.pt")
    assert trainer.global_step == 0
    larger = build_vocab_spec(9, 8, 6, ["a", "b"], scalar_bins=4)
    books = {**codebooks(), "image_codebook": torch.ones(9, 2)}
    trainer = AstroTrainer(model(vocab_size=34), larger, loader(), {"warmup_steps": 1}, **books, device="cpu")
    with pytest.raises(CheckpointError, match="vocab_size is 32 there and 34 here; base_scalar is 12 there and 14"):
        trainer.train(1, resume_from=tmp_path / "ckpt_epoch_001.pt")


def test_a_file_with_the_keys_of_the_seed_document_loads_and_names_what_starts_fresh(tmp_path, caplog):
    donor = make(seed=4)
    donor.train(1)
    config = {"vocab_size": VOCAB.vocab_size, "base_image": VOCAB.base_image, "base_scalar": VOCAB.base_scalar,
              "base_spectrum": VOCAB.base_spectrum, "loss_config": {}}  # fmt: skip
    torch.save(
        {"model": donor.model.state_dict(), "optimizer": donor.optimizer.state_dict(), "scaler": {}, "global_step": 4,
         "epoch": 1, "config": config},
        tmp_path / "seed.pt",
    )  # fmt: skip
    trainer = make()
    with caplog.at_level(logging.WARNING, "treadle"):
        trainer.load_checkpoint(tmp_path / "seed.pt")
    assert "nothing was loaded for progress, rng, data, scheduler, selection, history, missing" in caplog.text
    assert (trainer.global_step, trainer.epoch) == (4, 1)
    assert same_weights(trainer, donor)


def test_a_checkpoint_may_be_saved_by_hand(tmp_path):
    trainer = make(tmp_path)
    trainer.train(1)
    path = trainer.save_checkpoint("mine.pt")
    assert path == tmp_path / "mine.pt"
    other = make(seed=2)
    other.load_checkpoint(path)
    assert same_weights(other, trainer)
    assert other.get_lr() == trainer.get_lr()


@pytest.mark.parametrize("changed", [{"warmup_steps": 4}, {"min_lr_ratio": 0.5}, {"total_steps": 40}])
def test_the_shape_of_the_schedule_may_change_in_a_resumed_run_and_is_named(tmp_path, caplog, changed):
    make(tmp_path, epochs=2, warmup_steps=2).train(1, loader())
    resumed = make(tmp_path, epochs=2, **{"warmup_steps": 2, **changed})
    resumed.train(2, loader(), resume_from="auto")
    assert resumed.epoch == 2
    ((name, value),) = changed.items()
    assert getattr(resumed.scheduler, name) == value
    assert "the learning rate leaves its curve after step 4" in caplog.text


@pytest.mark.parametrize("changed", [{"grad_clip": 0.1}, {"eval_seed": 4}, {"use_amp": True}])
def test_a_resumed_run_names_a_changed_setting(tmp_path, caplog, changed):
    make(tmp_path).train(1, loader())
    make(tmp_path, **changed).train(2, loader(), resume_from="auto")
    assert "resumed with settings that differ from the checkpoint's" in caplog.text


def test_another_seed_of_the_sampled_positions_is_named():
    saved, given = ({"training": {"seed": seed}, "seed": seed} for seed in (0, 5))
    assert other_settings(saved, given) == ["training.seed=0 (here 5)"]
