"""No work is lost between runs: the furthest state wins whoever wrote it and whenever, and the last one is on disk."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal

import pytest
import torch
from torch import nn

import astro_trainer_kit
import functional_kit
import graph_kit
import spectra_kit
from helpers import differences, scalar_engine
from treadle import BaseHook, BestRule, CheckpointingHook, Engine, EpochTrainer
from treadle.checkpoint import load_checkpoint

GRAPHS = graph_kit.graphs()


def functional(folder, epochs, hooks=(), resume="auto", **rest):
    trainer = functional_kit.make(hooks=hooks)
    data = functional_kit.loader(shuffle=True), functional_kit.loader(seed=6)
    trainer.train(data[0], epochs, data[1], folder, rest.pop("save_freq", 2), resume_from=resume, **rest)
    return trainer


def spectra(folder, epochs, hooks=(), resume="auto", **rest):
    trainer = spectra_kit.make(folder, epochs=4, hooks=hooks, resume_from=resume, **rest)
    trainer.fit(epochs)
    return trainer


def graphs(folder, epochs, hooks=(), resume="auto"):
    trainer = graph_kit.make(folder, hooks=hooks)
    trainer.fit(graph_kit.loader(GRAPHS, shuffle=True), graph_kit.loader(GRAPHS), epochs, resume_from=resume)
    return trainer


def astro(folder, epochs, hooks=(), resume="auto"):
    trainer = astro_trainer_kit.make(folder, hooks=hooks, total_steps=20)
    trainer.train(epochs, astro_trainer_kit.loader(), resume_from=resume)
    return trainer


FACES = {"functional": functional, "spectra": spectra, "graphs": graphs, "astro": astro}
faces = pytest.mark.parametrize("face", FACES)


class At(BaseHook):
    """Does something after one step, and counts the steps that it saw."""

    def __init__(self, step=None, act=None):
        self.step, self.act = step, act
        self._seen = multiprocessing.RawArray("i", 1)  # which no checkpoint holds: a resumed run counts its own

    @property
    def seen(self):
        return self._seen[0]

    def on_after_step(self, trainer):
        self._seen[0] += 1
        if trainer.step == self.step:
            self.act(trainer)


def term(trainer):
    os.kill(os.getpid(), signal.SIGTERM)


def stop(trainer):
    trainer.should_stop = True


def end(trainer):
    tree = trainer._engine.state_dict()
    history = [{key: value for key, value in record.items() if key != "time"} for record in tree["history"]]
    return {**{key: tree[key] for key in ("model", "optimizer", "global_step", "epoch", "selection")}, "h": history}


def stamps(folder):
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@faces
@pytest.mark.parametrize("where", ["checkpoints", "elsewhere"])
def test_auto_goes_on_from_the_hooks_state_if_that_is_further(tmp_path, face, where):
    straight = end(FACES[face](tmp_path / "straight", 4))
    path = "checkpoints" if where == "checkpoints" else tmp_path / "q"
    hooks = lambda: [CheckpointingHook(100, path=path, exit_signals=[signal.SIGTERM])]  # noqa: E731
    with pytest.raises(SystemExit):
        FACES[face](tmp_path / "run", 4, [At(11, term), *hooks()])
    count = At()
    again = FACES[face](tmp_path / "run", 4, [count, *(hooks() if where == "elsewhere" else [])])
    assert again._engine.resume_source.endswith("checkpoint_step_11.pt")
    assert count.seen == straight["global_step"] - 11
    assert differences(straight, end(again)) == []


@faces
def test_auto_takes_the_epochs_own_file_if_the_hooks_is_older(tmp_path, face, caplog):
    FACES[face](tmp_path / "run", 2, [CheckpointingHook(5)])
    (tmp_path / "run" / "checkpoints" / "checkpoint_latest.pt").unlink()
    for path in (tmp_path / "run" / "checkpoints").glob("checkpoint_step_*.pt"):
        if path.name != "checkpoint_step_5.pt":
            path.unlink()
    caplog.clear()
    again = FACES[face](tmp_path / "run", 3, [CheckpointingHook(5)])
    assert "checkpoint_step" not in again._engine.resume_source
    assert "wins" not in caplog.text


@faces
def test_a_copy_whose_write_times_are_reversed_goes_on_where_the_original_was(tmp_path, face):
    straight = end(FACES[face](tmp_path / "straight", 4))
    FACES[face](tmp_path / "run", 3, [CheckpointingHook(4, 2)])
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
    for number, path in enumerate(sorted(tmp_path.glob("copy/**/*.pt"), key=lambda path: -path.stat().st_mtime_ns)):
        if path.is_symlink():
            path.unlink()
        else:
            os.utime(path, ns=(10**18 + number * 10**9,) * 2)
    count = At()
    again = FACES[face](tmp_path / "copy", 4, [count, CheckpointingHook(4, 2)])
    assert differences(straight, end(again)) == []
    assert count.seen == straight["global_step"] // 4


@faces
@pytest.mark.parametrize("ends", ["target", "stop in an epoch"])
def test_what_a_run_ended_with_is_on_disk_and_a_rerun_does_nothing(tmp_path, face, ends):
    epochs, inside = 3, ends != "target"
    first = FACES[face](tmp_path / "run", epochs, [At(5, stop)] if inside else [])
    again = At(6, stop)
    files = stamps(tmp_path / "run")
    second = FACES[face](tmp_path / "run", epochs, [again])
    if inside:  # a stop is not stored: the rerun goes on behind the step, and repeats none
        assert (first._engine.step, again.seen, second._engine.step) == (5, 1, 6)
    else:
        assert again.seen == 0
        assert stamps(tmp_path / "run") == files
        assert differences(end(first), end(second)) == []


@pytest.mark.parametrize("save_freq", [4, 0, None])
def test_an_early_stop_between_two_numbered_files_is_on_disk(tmp_path, save_freq):
    def run():
        told = functional_kit.evaluations([3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])
        trainer = functional_kit.scalar(told, hooks=[count := At()])
        data = [torch.ones(2, 1)] * 3
        trainer.train(data, 10, data, tmp_path, save_freq, early_stopping_patience=3, resume_from="auto")
        return trainer, count.seen

    trainer, steps = run()
    assert (trainer.epoch, steps) == (6, 18)
    trainer, steps = run()
    assert (trainer.epoch, steps, trainer.best_metric) == (6, 0, 1.0)
    assert (tmp_path / ("checkpoint_epoch_6.pt" if save_freq else "last.pt")).exists()


def test_a_callback_that_stops_between_two_numbered_files_leaves_the_epoch_on_disk(tmp_path):
    def stops(trainer, epoch, metrics):
        trainer.should_stop = epoch == 5

    functional(tmp_path, 10, save_freq=4, callbacks=[stops])
    count = At()
    assert functional(tmp_path, 6, [count], save_freq=4).epoch == 6
    assert count.seen == 0


class Sum:
    def step(self, model, batch, totals=None, generator=None):
        return model(batch).square().mean(), {}


def driven(folder, epochs, **hook):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    saving, count = CheckpointingHook(**{"interval": 2, "path": folder, **hook}), At()
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), Sum(), device="cpu", hooks=[saving, count])
    driver, evaluated = EpochTrainer(engine, best=BestRule("val_loss")), []
    engine_evaluate = engine.evaluate
    engine.evaluate = lambda *args: evaluated.append(1) or engine_evaluate(*args)
    driver.fit([torch.ones(2, 4)] * 3, [torch.ones(2, 4)], epochs)
    return driver, count.seen, len(evaluated)


@pytest.mark.parametrize("background", [False, True])
def test_the_hook_saves_the_last_epochs_record_and_best_value(tmp_path, background):
    driver, *_ = driven(tmp_path, 2, background=background)
    saved = load_checkpoint(tmp_path / "checkpoint_latest.pt")
    assert (saved["global_step"], saved["epoch"], len(saved["history"])) == (6, 2, 2)
    assert saved["best_metric"] == driver.best.best
    files = stamps(tmp_path)
    again, steps, evaluations = driven(tmp_path, 2)
    assert (steps, evaluations, again.history, stamps(tmp_path)) == (0, 0, driver.history, files)


def test_after_times_were_reversed_and_the_link_is_lost_nothing_further_is_deleted(tmp_path):
    def run(steps, **hook):
        engine = scalar_engine(hooks=[CheckpointingHook(**{"interval": 1, "path": tmp_path, **hook})])
        engine.run([1.0], max_steps=steps)
        return engine

    run(1000, interval=500)
    (tmp_path / "checkpoint_latest.pt").unlink()
    early = load_checkpoint(tmp_path / "checkpoint_step_500.pt")
    os.utime(tmp_path / "checkpoint_step_1000.pt", (1, 1))
    assert run(1001).resume_source.endswith("checkpoint_step_1000.pt")
    assert early["global_step"] == 500
    engine = run(502, load="checkpoint_step_1000.pt")  # beyond its target already: nothing happens
    assert engine.step == 1000


def test_a_damaged_file_that_is_further_is_not_counted_among_those_that_stay(tmp_path):
    def run(steps):
        engine = scalar_engine(hooks=[CheckpointingHook(1, keep_previous=2, path=tmp_path)])
        engine.run([1.0], max_steps=steps)

    run(3)
    half = (tmp_path / "checkpoint_step_3.pt").read_bytes()[:500]
    (tmp_path / "checkpoint_step_99.pt").write_bytes(half)
    run(6)
    left = sorted(path.name for path in tmp_path.glob("checkpoint_step*"))
    assert left == [f"checkpoint_step_{step}.pt" for step in (3, 5, 6, 99)]  # it resumed from the first


def test_the_file_that_was_named_to_resume_from_is_not_pruned(tmp_path):
    astro_trainer_kit.make(tmp_path).train(1)
    trainer = astro_trainer_kit.make(tmp_path, save_total_limit=1)
    trainer.train(3, resume_from="ckpt_epoch_001.pt")
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["ckpt_epoch_001.pt", "ckpt_epoch_003.pt"]


def test_a_trainer_that_goes_on_in_another_folder_leaves_its_state_there(tmp_path):
    trainer = functional_kit.make()
    for name in ("a", "b", "b"):
        trainer.train(functional_kit.loader(), 2, save_dir=tmp_path / name, save_freq=None, best_model_metric=None)
        assert load_checkpoint(tmp_path / name / "last.pt")["epoch"] == 2


class Interrupts(BaseHook):
    def __init__(self, event):
        self.event = event

    def _at(self, trainer, event):
        if (trainer.step, event) == (2, self.event):
            self.event = None
            raise KeyboardInterrupt

    def on_before_optimizer_step(self, trainer):
        self._at(trainer, "inside")

    def on_after_step(self, trainer):
        self._at(trainer, "after")


@pytest.mark.parametrize("event", ["inside", "after"])
def test_a_step_that_was_broken_off_is_named_when_its_object_trains_on(event, caplog):
    engine = scalar_engine(hooks=[Interrupts(event)])
    with pytest.raises(KeyboardInterrupt):
        engine.run([1.0] * 4, max_steps=4)
    assert "interrupted by an error" not in caplog.text
    engine.run([1.0] * 4, max_steps=4)
    assert ("step 2 was interrupted by an error" in caplog.text) == (event == "inside")
    assert (engine.step, engine.applied_steps) == (4, 3 if event == "inside" else 4)


def test_a_rewind_sets_aside_what_lies_beyond_it_and_deletes_nothing(tmp_path):
    def run(steps, **hook):
        engine = scalar_engine(hooks=[CheckpointingHook(**{"interval": 1, "path": tmp_path, **hook})])
        engine.run([1.0], max_steps=steps)
        return engine

    run(6, keep_previous=None)
    run(4, load="checkpoint_step_3.pt", keep_previous=1)
    left = sorted(path.name for path in tmp_path.glob("*.pt"))
    beyond = [f"checkpoint_step_{step}.superseded.pt" for step in (4, 5, 6)]
    assert [name for name in left if "superseded" in name] == beyond
    assert run(5).resume_source.endswith("checkpoint_step_4.pt")
    assert load_checkpoint(tmp_path / beyond[2])["global_step"] == 6
    assert run(7, load=beyond[2]).step == 7


@faces
def test_a_fresh_run_in_a_used_folder_is_not_mixed_with_the_earlier_one(tmp_path, face):
    FACES[face](tmp_path, 3, [CheckpointingHook(2)])
    fresh = FACES[face](tmp_path, 1, [CheckpointingHook(2, load=None)], resume=None)
    again = FACES[face](tmp_path, 1)
    assert differences(end(fresh), end(again)) == []
    assert again._engine.epoch == 1
