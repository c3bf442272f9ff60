"""Which checkpoints of Trainer stay, and what Ctrl-C and SIGTERM leave."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch

import treadle
from functional_kit import constant, evaluations, loader, make, same_weights, scalar
from treadle import CheckpointingHook, ConfigError, SignalHook, open_run
from treadle.checkpoint import load_checkpoint


def numbers(folder):
    names = (path.stem.rpartition("_")[2] for path in folder.glob("checkpoint_epoch_*.pt"))
    return sorted(int(name) for name in names if name.isdigit())


# -- retention ----------------------------------------------------------------------------------------------------


def test_the_newest_checkpoints_stay(tmp_path):
    make(save_total_limit=2).train(loader(), 5, save_dir=tmp_path)
    assert numbers(tmp_path) == [4, 5]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"save_top_k": 2}, [2, 4, 6]),
        ({"save_top_k": 2, "save_total_limit": 2}, [2, 4, 5, 6]),
        ({}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_those_of_the_best_epochs_stay_as_well_also_over_a_resume(tmp_path, settings, kept):
    values = [0.5, 0.2, 0.6, 0.1, 0.4, 0.3]
    for last in (3, 6):  # the values that are left are state of the trainer
        trainer = scalar(evaluations(values), **settings)
        trainer.train([constant(1)], last, [constant(1)], save_dir=tmp_path, resume_from="auto")
    assert numbers(tmp_path) == kept
    assert load_checkpoint(tmp_path / "best_model.pt")["epoch"] == 4


def test_a_metric_to_maximise_keeps_the_largest(tmp_path):
    trainer = scalar(evaluations([0.1, 0.9, 0.5, 0.2], "accuracy"), save_top_k=1)
    trainer.train([constant(1)], 4, [constant(1)], save_dir=tmp_path, best_model_metric="accuracy")
    assert numbers(tmp_path) == [2, 4]


def test_nothing_further_than_the_run_is_deleted(tmp_path):
    make().train(loader(), 5, save_dir=tmp_path)
    trainer = make(save_total_limit=1)
    trainer.train(loader(), 3, save_dir=tmp_path, resume_from=tmp_path / "checkpoint_epoch_2.pt")
    superseded = sorted(path.name for path in tmp_path.glob("*superseded*"))
    assert [name for name in superseded if "epoch" in name] == [
        f"checkpoint_epoch_{epoch}.superseded.pt" for epoch in (3, 4, 5)
    ]
    assert numbers(tmp_path) == [2, 3]  # and what it resumed from


@pytest.mark.parametrize("name", ["save_total_limit", "save_top_k"])
def test_none_at_all_cannot_be_kept(name):
    with pytest.raises(ConfigError, match=f"{name}=0: must be at least 1"):
        make(**{name: 0})


# -- signals ------------------------------------------------------------------------------------------------------


class Kill(treadle.BaseHook):
    """Sends this process a signal after a step."""

    def __init__(self, step, number=signal.SIGINT):
        self.step, self.number = step, number

    def on_after_step(self, trainer):
        if trainer.step == self.step:
            os.kill(os.getpid(), self.number)


class Own(treadle.Trainer):
    def train_epoch(self, *args, **kwargs):
        return super().train_epoch(*args, **kwargs)


def train(folder, *hooks, epochs=3, cls=None, **rest):
    trainer = make(cls, hooks=hooks)
    trainer.train(loader(40, 4, shuffle=True), epochs, loader(8, 4), save_dir=folder, resume_from="auto", **rest)
    return trainer


@pytest.mark.parametrize(
    ("number", "step", "save_freq"), [(signal.SIGINT, 13, 1), (signal.SIGTERM, 13, None), (signal.SIGINT, 20, 1)]
)
def test_a_signal_saves_the_step_and_the_same_call_resumes_there(tmp_path, caplog, number, step, save_freq):
    caplog.set_level("INFO", "treadle")
    straight = train(tmp_path / "straight")
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "run", Kill(step, number), save_freq=save_freq)
    assert left.value.code == 128 + number
    assert f"{signal.Signals(number).name}" in caplog.text
    assert f": saving at step {step} and exiting" in caplog.text
    assert f"last.pt at step {step}, " in caplog.text or f"checkpoint_epoch_2.pt at step {step}" in caplog.text
    caplog.clear()
    resumed = train(tmp_path / "run", save_freq=save_freq)
    assert f"at step {step}, epoch {step // 10 if step % 10 else 1}" in caplog.text
    assert same_weights(straight, resumed)
    assert straight.history == resumed.history


@pytest.mark.parametrize("step", [13, 20])
def test_a_signal_saves_the_step_where_epochs_go_through_an_own_train_epoch(tmp_path, step):
    straight = train(tmp_path / "straight", cls=Own)
    with pytest.raises(SystemExit):
        train(tmp_path / "run", Kill(step), cls=Own)
    stopped = open_run(tmp_path / "run", make(Own), checkpoint="last")
    assert stopped.step == step
    assert same_weights(straight, train(tmp_path / "run", cls=Own))


def test_without_a_folder_and_with_the_setting_off_ctrl_c_is_pythons(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make(hooks=[Kill(2)]).train(loader(), 2)
    with pytest.raises(KeyboardInterrupt):
        make(hooks=[Kill(2)], save_on_signal=False).train(loader(), 2, save_dir=tmp_path)


def test_it_stands_back_for_hooks_and_handlers_of_the_user(tmp_path):
    written = []
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "a", Kill(2), SignalHook(lambda: written.append(1), exit_code=7))
    assert (left.value.code, written) == (7, [1])
    before = signal.signal(signal.SIGTERM, lambda *_: written.append(2))
    try:
        train(tmp_path / "b", Kill(2, signal.SIGTERM), epochs=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert written == [1, 2]


def test_at_a_prompt_ctrl_c_saves_and_leaves_the_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Kill(13))
    assert load_checkpoint(tmp_path / "last.pt")["global_step"] == 13


def test_a_hooks_further_state_wins_over_the_best_epoch(tmp_path):
    def run(*hooks):
        hook = CheckpointingHook(10, path=tmp_path / "q", exit_signals=[2, 15])
        return train(tmp_path / "p", hook, *hooks, save_freq=None)

    straight = train(tmp_path / "straight", save_freq=None)
    with pytest.raises(SystemExit):
        run(Kill(17))
    trainer = make(hooks=[CheckpointingHook(10, path=tmp_path / "q")])
    trainer.train(loader(40, 4, shuffle=True), 0, save_dir=tmp_path / "p", save_freq=None, resume_from="auto")
    assert trainer.step == 17  # and not 10, where the best epoch is
    assert same_weights(straight, run())


@pytest.mark.parametrize("save_freq", [None, 1, 2])
def test_what_a_callback_changes_after_the_best_epoch_was_written_is_resumed(tmp_path, save_freq):
    def halve(trainer, epoch, metrics):
        with torch.no_grad():
            trainer.model[0].weight.mul_(0.5)

    def run(folder, epochs):
        trainer = make()
        trainer.train(loader(), epochs, loader(), folder, save_freq, callbacks=[halve], resume_from="auto")
        return trainer

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "cut", 1)
    assert same_weights(run(tmp_path / "cut", 4), whole)


class Breaks(torch.utils.data.Dataset):
    """Rows of which the last cannot be read until it is mended."""

    def __init__(self, mended):
        self.rows, self.mended = loader().dataset, mended

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index == len(self) - 1 and not self.mended:
            raise KeyError("no such file")
        return self.rows[index]


def test_an_epoch_whose_evaluation_fails_is_saved_and_evaluated_by_the_next_call(tmp_path):
    def run(folder, mended=True):
        trainer = make()
        val = torch.utils.data.DataLoader(Breaks(mended), 8)
        trainer.train(loader(shuffle=True), 2, val, folder, resume_from="auto")
        return trainer

    with pytest.raises(KeyError, match="no such file"):
        run(tmp_path / "cut", mended=False)
    saved = load_checkpoint(tmp_path / "cut" / "last.pt")
    assert (saved["global_step"], saved["epoch"]) == (3, 0)
    resumed, whole = run(tmp_path / "cut"), run(tmp_path / "whole")
    assert same_weights(resumed, whole)
    assert resumed.history == whole.history


def test_the_folder_of_a_run_is_no_checkpoint_and_a_message_names_its_files(tmp_path):
    make().train(loader(), 1, save_dir=tmp_path)
    with pytest.raises(treadle.ConfigError, match=r"resume_from=.*is a run folder.*checkpoint_epoch_1.pt.*'auto'"):
        make().train(loader(), 2, resume_from=tmp_path)


class Halves:
    """Halves a weight, counts and draws a number; the process is killed between the two halves of one call."""

    def __init__(self, killed_at=None):
        self.killed_at, self.calls = killed_at, 0

    def __call__(self, trainer, epoch, metrics):
        with torch.no_grad():
            trainer.model[0].weight.mul_(0.5)
        if epoch == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1
        trainer.optimizer.param_groups[0]["lr"] *= 0.9 + 0.01 * self.calls * torch.rand(1).item()


@pytest.mark.parametrize(("save_freq", "epoch"), [(None, 0), (1, 1), (2, 2)])
def test_a_callback_in_which_the_process_was_killed_is_called_again(tmp_path, save_freq, epoch):
    def run(folder, killed_at=None):
        trainer, callback = make(), Halves(killed_at)
        trainer.train(loader(), 3, loader(), folder, save_freq, callbacks=[callback], resume_from="auto")
        return trainer, callback.calls

    whole, _ = run(tmp_path / "whole")
    if (child := os.fork()) == 0:
        run(tmp_path / "cut", epoch)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    resumed, calls = run(tmp_path / "cut")
    assert same_weights(resumed, whole)
    assert calls == 3
    assert not (tmp_path / "cut" / ".treadle-callbacks").exists()


def test_a_callback_that_is_called_again_may_stop_the_run(tmp_path):
    def run(broken):
        def callback(trainer, epoch, metrics):
            assert not broken
            trainer.should_stop = True

        trainer = make()
        trainer.train(loader(), 3, None, tmp_path, callbacks=[callback], resume_from="auto")
        return trainer.epoch

    with pytest.raises(AssertionError):
        run(True)
    assert run(False) == 1
    assert run(False) == 2
