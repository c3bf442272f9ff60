"""The files of a graph run, and what is loaded from them."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from graph_kit import graphs, loader, make, records, same_weights
from helpers import differences
from treadle import load_weights
from treadle.checkpoint import load_checkpoint, verify_checkpoint
from treadle.errors import CheckpointError, ConfigError
from treadle.graphs import get_loss_fn, get_scheduler
from treadle.hooks import EmaHook


def data(shuffle=True):
    return loader(graphs(10), shuffle=shuffle)


def warmed(optimizer):
    return get_scheduler(optimizer, total_epochs=4, warmup_epochs=1)


def strict(path):
    def refuse(constant):
        raise ValueError(constant)

    return json.loads(path.read_text(), parse_constant=refuse)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make().fit(data(), data(), epochs=1)
    assert list(tmp_path.iterdir()) == []


def test_construction_writes_nothing(tmp_path):
    make(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_run_leaves_its_last_and_best_epoch_and_its_history(tmp_path):
    trainer = make(tmp_path, scheduler=warmed)
    history = trainer.fit(data(), data(), epochs=3)
    assert {path.name for path in tmp_path.iterdir() if path.suffix in (".pt", ".json")} - {"settings.json"} == {
        "best.pt", "history.json", "last.pt",
    }  # fmt: skip
    assert strict(tmp_path / "history.json") == history
    last = load_checkpoint(tmp_path / "last.pt")
    assert set(last) >= {
        "model", "optimizer", "scheduler", "epoch", "global_step", "best_metric", "best_epoch", "metrics",
    }  # fmt: skip
    assert (last["epoch"], last["global_step"], last["format"]["face"]) == (3, 9, "graphs")
    assert (last["best_epoch"], last["best_metric"]) == (trainer.best_epoch, trainer.best_metric)
    assert last["metrics"] == {k: v for k, v in history["val"][-1].items() if k != "epoch"}
    best = load_checkpoint(tmp_path / "best.pt")
    assert best["epoch"] == trainer.best_epoch
    assert best["metrics"]["loss"] == trainer.best_metric
    assert verify_checkpoint(tmp_path / "best.pt") == []


def test_the_best_file_holds_the_weights_that_were_scored(tmp_path):
    trainer = make(tmp_path, hooks=[EmaHook(0.5)])
    trainer.fit(data(), data(shuffle=False), epochs=3)
    other = make(seed=5)
    other.model.load_state_dict(load_weights(tmp_path / "best.pt"))
    assert other.eval_epoch(data(shuffle=False))["loss"] == pytest.approx(trainer.best_metric, abs=1e-6)


def test_the_history_is_on_the_disk_after_every_epoch_with_nan_as_null(tmp_path):
    seen = []
    trainer = make(tmp_path)
    trainer.add_log_hook(lambda m, s, prefix: prefix == "val" and seen.append(strict(tmp_path / "history.json")))
    unknown = graphs(4, unknown=1.0)
    trainer.fit(data(), loader(unknown), epochs=2)
    assert [len(history["train"]) for history in seen] == [1, 2]
    assert seen[-1]["val"][-1] == {"epoch": 2, "loss": None, "mse": None, "mae": None, "rmse": None}


def test_a_run_in_a_used_folder_that_starts_anew_keeps_the_old_history(tmp_path):
    make(tmp_path).fit(data(), epochs=1)
    make(tmp_path).fit(data(), epochs=2)
    assert len(strict(tmp_path / "history.json")["train"]) == 2
    assert len(strict(tmp_path / "history.1.json")["train"]) == 1


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["auto", "last.pt", "best.pt"])
def test_a_run_that_was_cut_off_ends_as_one_that_was_not(tmp_path, source):
    straight = make(tmp_path / "straight", scheduler=warmed)
    straight.fit(data(), data(), epochs=4)
    cut = make(tmp_path / "cut", scheduler=warmed)
    cut.fit(data(), data(), epochs=2)
    resumed = make(tmp_path / "cut", scheduler=warmed, seed=9)
    resumed.fit(data(), data(), epochs=4, resume_from=source if source == "auto" else tmp_path / "cut" / source)
    assert records(resumed.history) == records(straight.history)
    assert same_weights(resumed, straight)
    assert (resumed.best_epoch, resumed.best_metric) == (straight.best_epoch, straight.best_metric)
    ends = []
    for folder in ("straight", "cut"):
        tree = load_checkpoint(tmp_path / folder / "last.pt")
        for record in tree["history"]:
            record.pop("time")
        ends.append(tree)
    assert differences(*ends) == []


def test_auto_in_an_empty_folder_starts_and_of_a_finished_run_does_nothing(tmp_path):
    history = make(tmp_path).fit(data(), epochs=2, resume_from="auto")
    before = (tmp_path / "last.pt").stat().st_mtime_ns
    again = make(tmp_path, seed=3).fit(data(), epochs=2, resume_from="auto")
    assert again == history
    assert (tmp_path / "last.pt").stat().st_mtime_ns == before


def test_auto_takes_the_best_where_the_last_is_damaged(tmp_path):
    make(tmp_path).fit(data(), data(), epochs=2)
    (tmp_path / "last.pt").unlink()
    (tmp_path / "last.pt").write_bytes(b"torn")
    trainer = make(tmp_path)
    trainer.fit(data(), data(), epochs=3, resume_from="auto")
    assert trainer.epoch == 3


def test_a_kill_between_the_best_and_the_last_leaves_nothing_old_after_a_rerun(tmp_path):
    make(tmp_path).fit(data(), data(), epochs=1)
    first = (tmp_path / "last.pt").read_bytes()
    make(tmp_path).fit(data(), data(), epochs=2, resume_from="auto")
    (tmp_path / "best.pt").write_bytes((tmp_path / "last.pt").read_bytes())  # the second epoch was the best
    (tmp_path / "last.pt").write_bytes(first)  # and its last.pt was not written any more
    make(tmp_path).fit(data(), data(), epochs=2, resume_from="auto")
    last = load_checkpoint(tmp_path / "last.pt")
    assert last["epoch"] == 2
    assert differences(last, load_checkpoint(tmp_path / "best.pt")) == []


def test_resume_needs_a_folder_an_intact_file_and_the_same_model(tmp_path):
    with pytest.raises(ConfigError, match="checkpoint_dir"):
        make().fit(data(), epochs=1, resume_from="auto")
    with pytest.raises(CheckpointError, match=r"missing\.pt"):
        make().fit(data(), epochs=1, resume_from=tmp_path / "missing.pt")
    make(tmp_path).fit(data(), epochs=1)
    with pytest.raises(CheckpointError, match="another checkpoint_dir"):
        make(tmp_path, model={"hidden_dim": 32}).fit(data(), epochs=2, resume_from="auto")


def test_early_stopping_goes_on_counting(tmp_path):
    settings = {"min_delta": 100.0, "early_stopping": 3}
    straight = make()
    straight.fit(data(), data(), 10, **settings)
    make(tmp_path).fit(data(), data(), 2, **settings)
    resumed = make(tmp_path)
    resumed.fit(data(), data(), 10, resume_from="auto", **settings)
    assert resumed.epoch == straight.epoch == 4


# -- saving and loading by hand ---------------------------------------------------------------------------------------


def test_a_checkpoint_saved_by_hand_lies_in_the_folder_and_gives_its_metrics_back(tmp_path):
    trainer = make(tmp_path / "run")
    trainer.fit(data(), data(), epochs=1)
    assert trainer.save_checkpoint("mine.pt", {"score": 0.5, "tensor": torch.tensor(1.0)}) == tmp_path / "run/mine.pt"
    assert trainer.save_checkpoint(tmp_path / "there.pt") == tmp_path / "there.pt"
    other = make(tmp_path / "run", seed=4)
    loaded = other.load_checkpoint("mine.pt")
    assert loaded["score"] == 0.5
    assert (other.epoch, other.global_step) == (1, 3)
    assert same_weights(other, trainer)
    metrics = make().load_checkpoint(tmp_path / "there.pt")
    assert metrics == {k: v for k, v in trainer.history["val"][-1].items() if k != "epoch"}


def test_a_path_as_given_goes_before_one_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = make(tmp_path / "run"), make(tmp_path / "other", seed=8)
    first.save_checkpoint("a.pt")
    second.save_checkpoint(tmp_path / "a.pt")
    third = make(tmp_path / "run", seed=9)
    third.load_checkpoint("a.pt")
    assert same_weights(third, second)
    (tmp_path / "a.pt").unlink()
    third.load_checkpoint("a.pt")
    assert same_weights(third, first)


def test_training_goes_on_to_the_absolute_target_after_a_load(tmp_path):
    straight = make(scheduler=warmed)
    straight.fit(data(), epochs=4)
    first = make(tmp_path, scheduler=warmed)
    first.fit(data(), epochs=3)
    second = make(scheduler=warmed, seed=2)
    second.load_checkpoint(tmp_path / "last.pt")
    assert records(second.fit(data(), epochs=4)) == records(straight.history)
    assert same_weights(second, straight)


def test_without_the_optimizer_all_that_moves_with_it_starts_fresh_and_is_named(tmp_path, caplog):
    trainer = make(tmp_path, scheduler=warmed, mixed_precision="fp16")
    trainer.fit(data(), data(), epochs=2)
    other = make(tmp_path / "other", scheduler=warmed, mixed_precision="fp16", seed=7)
    fresh = other._engine.state_dict()
    with caplog.at_level(logging.WARNING, "treadle.graphs"):
        metrics = other.load_checkpoint(tmp_path / "last.pt", load_optimizer=False)
    assert same_weights(other, trainer)
    assert metrics["loss"] == trainer.history["val"][-1]["loss"]
    for key in ("optimizer", "scheduler", "scaler", "epoch", "global_step", "progress", "best_metric", "history"):
        assert differences(other._engine.state_dict()[key], fresh[key]) == [], key
    assert "optimizer, global_step, progress" in caplog.text
    assert len(other.fit(data(), data(), epochs=1)["train"]) == 1


def test_a_run_that_goes_on_from_its_own_checkpoint_is_told_nothing(tmp_path, caplog):
    make(tmp_path).fit(data(), data(), epochs=1)
    with caplog.at_level(logging.WARNING, "treadle"):
        make(tmp_path).fit(data(), data(), epochs=2, resume_from="auto")
    assert caplog.messages == []


def test_a_file_of_a_plain_loop_goes_on_and_what_starts_fresh_is_named(tmp_path, caplog):
    trainer = make(scheduler=warmed)
    trainer.fit(data(), data(), epochs=2)
    seed_keys = ("model", "optimizer", "scheduler", "epoch", "global_step", "best_metric", "best_epoch", "metrics")
    torch.save({key: trainer._engine.state_dict()[key] for key in seed_keys}, tmp_path / "theirs.pt")
    other = make(scheduler=warmed, seed=7)
    with caplog.at_level(logging.WARNING, "treadle.graphs"):
        other.load_checkpoint(tmp_path / "theirs.pt")
    assert [message.split(",")[0] for message in caplog.messages] == ["nothing was loaded for progress"]
    assert "progress, rng, data, selection, history," in caplog.text
    assert (other.epoch, other.global_step, other.best_epoch) == (2, trainer.global_step, None)
    assert [record["epoch"] for record in other.fit(data(), data(), epochs=3)["train"]] == [3]


def test_a_checkpoint_of_another_loss_is_named(tmp_path, caplog):
    make(tmp_path, loss_fn=lambda pred, target: (pred - target).square().mean()).fit(data(), data(), epochs=1)
    with caplog.at_level(logging.WARNING, "treadle"):
        make(tmp_path, loss_fn=lambda pred, target: (pred - target).square().mean()).load_checkpoint("last.pt")
        assert caplog.messages == []  # two functions of one name
        make(tmp_path, loss_fn=get_loss_fn("regression", "mae")).load_checkpoint("last.pt")
    (line,) = caplog.messages
    assert "another loss: loss=" in line
    assert "GraphLoss('regression', 'mae', num_classes=None)" in line
    caplog.clear()
    make(tmp_path, loss_fn=get_loss_fn("regression", "mae")).load_checkpoint("last.pt", load_optimizer=False)
    assert "another loss" not in caplog.text  # the weights alone


def test_a_model_that_is_not_finite_overwrites_nothing(tmp_path):
    trainer = make(tmp_path)
    trainer.fit(data(), epochs=1)
    kept = (tmp_path / "last.pt").read_bytes()
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    assert trainer.save_checkpoint("last.pt").name == "last.nonfinite.pt"
    assert (tmp_path / "last.pt").read_bytes() == kept
    resumed = make(tmp_path)
    resumed.fit(data(), epochs=1, resume_from=tmp_path / "last.pt")
    assert all(bool(parameter.isfinite().all()) for parameter in resumed.model.parameters())


def test_the_settings_are_in_the_checkpoint_and_more_may_be_added(tmp_path):
    trainer = make(tmp_path, experiment_name="mine", accumulation_steps=2)
    trainer.config["run"] = {"dataset": "nci"}
    trainer.fit(data(), epochs=1)
    config = load_checkpoint(tmp_path / "last.pt")["config"]
    assert (config["experiment_name"], config["accumulation_steps"], config["run"]) == ("mine", 2, {"dataset": "nci"})
