"""What the functional face writes and reads: full checkpoints, whole or not at all, found by name."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import treadle
from functional_kit import loader, make, net, same_weights
from helpers import differences
from processes import Forked
from treadle import CheckpointError, CheckpointingHook, EmaHook
from treadle.checkpoint import load_checkpoint, save_checkpoint
from treadle.checkpoint.schema import KEYS


def run(folder, epochs=2, **rest):
    trainer = make(**rest)
    trainer.train(loader(shuffle=True), epochs, loader(seed=6), save_dir=folder)
    return trainer


def test_a_checkpoint_of_another_loss_is_named(tmp_path, caplog):
    run(tmp_path, epochs=1)
    with caplog.at_level(logging.WARNING, "treadle"):
        make().load_checkpoint(tmp_path / "best_model.pt")
        assert caplog.messages == []
        make(loss_fn=nn.L1Loss()).load_checkpoint(tmp_path / "best_model.pt")
    (line,) = caplog.messages
    assert "another loss: loss='MSELoss()' (here 'L1Loss()')" in line


def test_a_checkpoint_holds_the_documented_table_and_the_epochs_record(tmp_path):
    trainer = run(tmp_path, max_grad_norm=0.5)
    tree = load_checkpoint(tmp_path / "checkpoint_epoch_2.pt")
    assert set(tree) == {*KEYS, "built"}
    assert tree["format"]["face"] == "functional"
    assert tree["format"]["scored"] == "model"
    assert (tree["epoch"], tree["global_step"]) == (2, 6)
    record = {key: values[-1] for key, values in trainer.history.items()}
    assert tree["metrics"] == tree["history"][-1] == record
    assert tree["best_metric"] == trainer.best_metric
    assert tree["best_epoch"] == trainer.best_epoch
    assert tree["config"]["max_grad_norm"] == 0.5


def test_the_best_file_holds_the_epochs_completed_and_what_was_scored(tmp_path):
    trainer = run(tmp_path, 3, hooks=[EmaHook(0.9)])
    tree = load_checkpoint(tmp_path / "best_model.pt")
    assert tree["epoch"] == trainer.best_epoch
    assert tree["best_metric"] == trainer.best_metric == tree["metrics"]["eval_loss"]
    assert tree["format"]["scored"] == "ema"
    scored = make(seed=3)
    scored.model.load_state_dict(treadle.load_weights(tmp_path / "best_model.pt"))
    assert scored.evaluate(loader(seed=6))["loss"] == trainer.best_metric


def test_what_hurts_one_of_the_two_files_of_an_epoch_leaves_the_other(tmp_path):
    trainer = run(tmp_path)
    assert trainer.best_epoch == 2
    best, own = tmp_path / "best_model.pt", tmp_path / "checkpoint_epoch_2.pt"
    assert best.read_bytes() == own.read_bytes()
    own.write_bytes(b"written into, not replaced")
    resumed = make()
    resumed.train(loader(shuffle=True), 2, loader(seed=6), save_dir=tmp_path, resume_from="auto")
    assert resumed.history == trainer.history
    assert same_weights(resumed, trainer)


def test_a_model_that_is_not_finite_is_put_aside_under_both_names_of_an_epoch(tmp_path):
    trainer = make()
    trainer.model.register_buffer("unused", torch.tensor(float("nan")))
    trainer.train(loader(shuffle=True), 1, loader(seed=6), save_dir=tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [
        "best_model.nonfinite.pt", "checkpoint_epoch_1.nonfinite.pt",
    ]  # fmt: skip


@pytest.mark.parametrize("spelling", ["absolute", "in the folder", "with the suffix in the name"])
def test_a_path_is_taken_as_given_and_else_in_the_last_folder(tmp_path, spelling, monkeypatch):
    trainer = run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    path = {"absolute": tmp_path / "run" / "best_model.pt", "in the folder": "best_model.pt"}.get(
        spelling, "run/best_model.pt"
    )
    tree = trainer.load_checkpoint(path)
    assert isinstance(tree, dict)
    assert tree["epoch"] == trainer.epoch == trainer.best_epoch
    assert make().train(loader(), tree["epoch"], save_dir="run", resume_from=path) == trainer.history
    with pytest.raises(CheckpointError, match=r"best_model\.pt\.pt"):
        trainer.load_checkpoint("best_model.pt.pt")


def test_loading_is_in_place_and_restores_everything(tmp_path):
    saved = run(tmp_path, scheduler=lambda o: StepLR(o, 1, 0.5), ema_decay=0.9)
    fresh = make(seed=7, scheduler=lambda o: StepLR(o, 1, 0.5), ema_decay=0.9)
    model, parameters = fresh.model, list(fresh.model.parameters())
    tree = fresh.load_checkpoint(tmp_path / "checkpoint_epoch_2.pt")
    assert fresh.model is model
    assert all(a is b for a, b in zip(parameters, fresh.model.parameters()))
    groups = fresh.optimizer.param_groups
    assert all(a is b for a, b in zip(parameters, (p for group in groups for p in group["params"])))
    assert differences(fresh._engine.state_dict(), tree) == []
    assert fresh.history == saved.history
    assert (fresh.best_metric, fresh.best_epoch) == (saved.best_metric, saved.best_epoch)


@pytest.mark.parametrize("part", ["optimizer", "scheduler"])
def test_a_part_that_is_left_out_stays_as_it_is_with_a_warning(tmp_path, part, caplog):
    run(tmp_path, scheduler=lambda o: StepLR(o, 1, 0.5))
    fresh = make(scheduler=lambda o: StepLR(o, 1, 0.5))
    tree = fresh.load_checkpoint(tmp_path / "checkpoint_epoch_2.pt", **{f"load_{part}": False})
    assert f"{part}" in caplog.text
    assert "not exact" in caplog.text
    assert len(caplog.records) == 1
    assert tree[part] is not None
    assert bool(fresh.optimizer.state) is (part == "scheduler")
    assert fresh.scheduler.last_epoch == (2 if part == "optimizer" else 0)


def test_auto_starts_afresh_without_files_and_goes_on_with_the_newest(tmp_path):
    straight = make().train(loader(shuffle=True), 4, loader(seed=6))
    for epochs in (1, 3, 4):
        trainer = make(seed=0 if epochs == 1 else epochs)
        history = trainer.train(
            loader(shuffle=True), epochs, loader(seed=6), save_dir=tmp_path / "run", resume_from="auto"
        )
    assert history == straight
    assert json.loads((tmp_path / "run" / "history.json").read_text()) == history
    assert trainer.step == 12


def test_auto_passes_over_a_damaged_file_by_name_and_refuses_where_all_are(tmp_path, caplog):
    run(tmp_path, 3)
    paths = sorted(tmp_path.glob("*.pt"))
    newest = tmp_path / "checkpoint_epoch_3.pt"
    for path in paths:
        data = path.read_bytes()
        path.unlink()  # the best may be another name of it
        path.write_bytes(data if path.name == "checkpoint_epoch_1.pt" else data[: len(data) // 2])
    os.utime(newest, (2e9, 2e9))
    resumed = make()
    resumed.train(loader(shuffle=True), 3, loader(seed=6), save_dir=tmp_path, resume_from="auto")
    assert "checkpoint_epoch_3.pt" in caplog.text
    for path in tmp_path.glob("*.pt"):
        path.unlink()
        path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        make().train(loader(), 3, save_dir=tmp_path, resume_from="auto")


def test_an_explicit_path_must_be_there(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        make().train(loader(), 2, resume_from=tmp_path / "best_model.pt")


def test_a_path_for_a_trainer_that_has_trained_already_is_warned_about(tmp_path, caplog):
    trainer = run(tmp_path)
    trainer.train(loader(shuffle=True), 3, loader(seed=6), resume_from=tmp_path / "checkpoint_epoch_1.pt")
    assert "is already at step 6" in caplog.text
    assert trainer.step == 9


def test_a_kill_between_the_best_and_the_epochs_file_loses_neither(tmp_path):
    run(tmp_path, 2)
    (tmp_path / "checkpoint_epoch_2.pt").unlink()  # the best was written, and that was as far as it came
    make().train(loader(shuffle=True), 3, loader(seed=6), save_dir=tmp_path, resume_from="auto")
    assert load_checkpoint(tmp_path / "checkpoint_epoch_2.pt")["epoch"] == 2
    assert load_checkpoint(tmp_path / "checkpoint_epoch_3.pt")["epoch"] == 3


def test_another_model_is_refused_with_advice(tmp_path):
    run(tmp_path)
    other = make(model=nn.Linear(4, 1))
    with pytest.raises(CheckpointError, match="another save_dir, or resume_from=None"):
        other.train(loader(), 3, save_dir=tmp_path, resume_from="auto")


def test_a_fresh_run_in_a_used_folder_keeps_the_old_history(tmp_path):
    old = run(tmp_path).history
    run(tmp_path, 1)
    assert json.loads((tmp_path / "history.1.json").read_text()) == old
    assert json.loads((tmp_path / "history.json").read_text())["epoch"] == [1]


def test_the_folder_is_made_only_when_training_starts(tmp_path):
    trainer = make()
    with pytest.raises(treadle.ConfigError):
        trainer.train(loader(), -1, save_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_finite_replace_no_file(tmp_path, caplog):
    def poison(trainer, epoch, metrics):
        with torch.no_grad():
            trainer.model[0].bias.fill_(float("nan"))

    make().train(loader(), 1, save_dir=tmp_path)
    before = (tmp_path / "best_model.pt").read_bytes()
    trainer = make()
    trainer.train(loader(), 1, save_dir=tmp_path / "other", callbacks=[poison])
    trainer._save_checkpoint(tmp_path / "best_model.pt", 1)
    assert (tmp_path / "best_model.pt").read_bytes() == before
    assert (tmp_path / "best_model.nonfinite.pt").exists()


def test_a_save_on_ones_own_holds_the_value_given_and_warns_of_another_epoch(tmp_path, caplog):
    trainer = make()
    trainer.train(loader(), 1)
    trainer._save_checkpoint(tmp_path / "mine.pt", 1, 0.25)
    assert load_checkpoint(tmp_path / "mine.pt")["best_metric"] == 0.25
    assert caplog.text == ""
    trainer._save_checkpoint(str(tmp_path / "mine.pt"), 7)
    assert "epoch=7" in caplog.text
    assert load_checkpoint(tmp_path / "mine.pt")["epoch"] == 1


def test_hooks_with_relative_paths_write_into_the_folder(tmp_path):
    make(hooks=[CheckpointingHook(2), treadle.JsonlHook(), treadle.LoggingHook(1)]).train(
        loader(), 1, save_dir=tmp_path / "run"
    )
    assert (tmp_path / "run" / "checkpoints" / "checkpoint_latest.pt").exists()
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_callback_that_changes_the_working_directory_moves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    make().train(loader(), 2, save_dir="run", callbacks=[lambda *args: os.chdir(tmp_path / "elsewhere")])
    assert (tmp_path / "run" / "checkpoint_epoch_2.pt").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


TAKES = """
    import sys
    from treadle.checkpoint.lock import RunLock
    lock = RunLock()
    lock.take(sys.argv[1])
    print("taken", flush=True)
    input()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_second_process_cannot_train_in_the_folder(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(TAKES), str(tmp_path)]
    with Forked(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "taken\n"
        with pytest.raises(CheckpointError, match=str(process.pid)):
            make().train(loader(), 1, save_dir=tmp_path)
        process.communicate("\n")


def test_weights_of_a_plain_loop_can_be_started_from_with_a_warning(tmp_path, caplog):
    model = net()
    save_checkpoint({"model": model.state_dict()}, tmp_path / "theirs.pt")
    trainer = make(seed=5)
    with caplog.at_level(logging.WARNING, "treadle"):
        trainer.load_checkpoint(tmp_path / "theirs.pt")
    assert "start fresh" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trainer.model.parameters()))


@pytest.mark.parametrize("first_compiled", [True, False])
def test_a_compiled_model_and_a_plain_one_read_each_others_files(tmp_path, first_compiled):
    def trainer(compiled, seed=0):
        treadle.set_seed(seed)
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model = torch.compile(model, backend="eager") if compiled else model
        made = treadle.Trainer(model, optimizer, nn.MSELoss(), {"training": {"log_interval": 0}}, "cpu")
        assert made.model is model
        return made

    straight = trainer(not first_compiled)
    straight.train(loader(), 3)
    trainer(first_compiled).train(loader(), 1, save_dir=tmp_path)
    assert not any("_orig_mod" in name for name in load_checkpoint(tmp_path / "best_model.pt")["model"])
    resumed = trainer(not first_compiled, seed=4)
    resumed.train(loader(), 3, save_dir=tmp_path, resume_from="auto")
    assert same_weights(straight, resumed)
