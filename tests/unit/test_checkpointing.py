from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
import torch

from helpers import Scalar, Slopes, differences, scalar_engine
from treadle import CheckpointingHook, EpochTrainer, HistoryHook, LoggingHook
from treadle.checkpoint import load_checkpoint
from treadle.errors import CheckpointError, ConfigError, NonFiniteError
from treadle.hooks import BaseHook, EmaHook


def run(folder, steps, loader=(1.0,), hooks=(), **kwargs):
    settings = {"interval": 1, "path": folder, **kwargs}
    engine = scalar_engine(hooks=[*hooks, CheckpointingHook(**settings)])
    engine.run(list(loader), max_steps=steps)
    return engine


def steps_in(folder):
    names = [path.name for path in Path(folder).iterdir() if not path.is_symlink()]
    return sorted(int("".join(c for c in name if c.isdigit())) for name in names)


def test_the_newest_and_the_multiples_of_the_keep_interval_stay(tmp_path):
    run(tmp_path, 9, interval=2, keep_previous=2, keep_interval=3)
    assert steps_in(tmp_path) == [3, 6, 8, 9]


def test_the_steps_to_keep_are_saved_off_the_interval_and_stay(tmp_path):
    run(tmp_path, 9, interval=4, keep_previous=1, keep_steps=[3, 4])
    assert steps_in(tmp_path) == [3, 4, 9]
    for wrong in ([0], [2.5], [True]):
        with pytest.raises(ConfigError, match="keep_steps="):
            CheckpointingHook(4, keep_steps=wrong)


@pytest.mark.parametrize(("keep", "left"), [(None, [1, 2, 3, 4, 5]), (1, [5]), (3, [3, 4, 5])])
def test_keep_previous_counts_the_newest_too(tmp_path, keep, left):
    run(tmp_path, 5, keep_previous=keep)
    assert steps_in(tmp_path) == left


@pytest.mark.parametrize(("interval", "named"), [(2, "checkpoint_step_2.pt"), (5, None)])
def test_the_last_good_checkpoint_is_named_when_a_gradient_ends_the_run(tmp_path, caplog, interval, named):
    with pytest.raises(NonFiniteError):
        run(tmp_path, 5, [1.0, 1.0, 1.0, float("nan")], interval=interval)
    said = [line for line in caplog.messages if line.startswith("the last good checkpoint is")]
    assert said == ([] if named is None else [f"the last good checkpoint is {tmp_path.resolve() / named}"])


class SetClockBack(BaseHook):
    """Leaves the first checkpoints as a clock left them that was an hour ahead and is set back then."""

    def __init__(self, folder, until):
        self.folder, self.until = folder, until

    def on_after_step(self, trainer):
        trainer.request_write(lambda: self.date(trainer.step))

    def date(self, step):
        if step <= self.until:
            hour_ahead = time.time_ns() + 3600 * 10**9
            os.utime(self.folder / f"checkpoint_step_{step}.pt", ns=(hour_ahead, hour_ahead))


def test_a_clock_that_is_set_back_does_not_make_the_newest_the_oldest(tmp_path):
    engine = scalar_engine(hooks=[CheckpointingHook(1, path=tmp_path), SetClockBack(tmp_path, 3)])
    engine.run([1.0], max_steps=6)
    assert steps_in(tmp_path) == [5, 6]
    (tmp_path / "checkpoint_latest.pt").unlink()
    assert run(tmp_path, 7).resume_source.endswith("checkpoint_step_6.pt")


def test_the_link_is_relative_and_points_to_the_newest(tmp_path):
    run(tmp_path, 3)
    link = tmp_path / "checkpoint_latest.pt"
    assert os.readlink(link) == "checkpoint_step_3.pt"
    assert load_checkpoint(link)["global_step"] == 3


@pytest.mark.parametrize("broken", [("symlink",), ("symlink", "link")])
def test_without_links_the_newest_is_a_copy_under_the_same_name(tmp_path, monkeypatch, broken):
    def refuse(*args, **kwargs):
        raise OSError("not supported here")

    for name in broken:
        monkeypatch.setattr(os, name, refuse)
    run(tmp_path, 3)
    assert not (tmp_path / "checkpoint_latest.pt").is_symlink()
    assert load_checkpoint(tmp_path / "checkpoint_latest.pt")["global_step"] == 3
    assert run(tmp_path, 5).step == 5
    assert load_checkpoint(tmp_path / "checkpoint_latest.pt")["global_step"] == 5


@pytest.mark.parametrize("harm", ["missing", "dangling", "empty", "flipped"])
def test_a_harmed_link_or_target_falls_back_to_the_newest_intact_file(tmp_path, harm, caplog):
    run(tmp_path, 4, keep_previous=3)
    link, target = tmp_path / "checkpoint_latest.pt", tmp_path / "checkpoint_step_4.pt"
    if harm == "missing":
        link.unlink()
    elif harm == "dangling":
        target.unlink()
    elif harm == "empty":
        target.write_bytes(b"")
    else:
        data = bytearray(target.read_bytes())
        data[len(data) // 3] ^= 1
        target.write_bytes(data)
    resumed = scalar_engine(hooks=[CheckpointingHook(100, path=tmp_path)])
    steps = []

    class Look(BaseHook):
        def on_before_train(self, trainer):
            steps.append(trainer.step)

    resumed.hooks.append(Look())
    with caplog.at_level(logging.WARNING, "treadle"):
        resumed.run([1.0], max_steps=6)
    assert steps == [4 if harm == "missing" else 3]
    assert ("checkpoint_step_4.pt" in caplog.text) == (harm != "missing")
    assert resumed.model.weight.item() == -6.0


def test_no_intact_file_is_an_error_and_not_a_fresh_start(tmp_path):
    run(tmp_path, 2, keep_previous=1)
    (tmp_path / "checkpoint_step_2.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"checkpoint_step_2\.pt"):
        run(tmp_path, 4)


def test_after_a_resume_that_was_refused_the_same_trainer_does_not_start_from_nothing(tmp_path):
    run(tmp_path, 2)
    files = {path: path.read_bytes() for path in tmp_path.glob("checkpoint_step_*.pt")}
    for path, content in files.items():
        path.write_bytes(content[:-9])
    engine = scalar_engine(hooks=[CheckpointingHook(1, path=tmp_path)])
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        engine.run([1.0], max_steps=3)
    for path, content in files.items():
        path.write_bytes(content)
    engine.run([1.0], max_steps=3)
    assert engine.applied_steps == 3
    assert engine.model.weight.item() == -3.0
    assert engine.resume_source.endswith("checkpoint_step_2.pt")


def test_a_poisoned_state_is_neither_linked_nor_resumed_from_and_prunes_nothing(tmp_path):
    class Poisons(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step == 3:
                trainer.model.weight.data.fill_(float("nan"))

    class ReadsNoWeight(Slopes):
        """Its gradient stays finite, so nothing else stops the run."""

        def step(self, model, batch, totals=None, generator=None):
            from treadle import StepOutput

            return StepOutput(model.weight * batch * 1.0 - model.weight.detach() * 0)

    engine = scalar_engine(task=ReadsNoWeight(), hooks=[Poisons(), CheckpointingHook(1, 2, path=tmp_path)])
    engine.run([1.0], max_steps=8)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [n for n in names if "nonfinite" not in n] == [
        "checkpoint_latest.pt", "checkpoint_step_1.pt", "checkpoint_step_2.pt",
    ]  # fmt: skip
    for unlink in (False, True):
        if unlink:
            (tmp_path / "checkpoint_latest.pt").unlink()
        resumed = scalar_engine(hooks=[CheckpointingHook(100, path=tmp_path)])
        resumed.prepare()
        assert resumed.hooks[0].checkpoint_to_resume(resumed)["global_step"] == 2


def test_a_file_of_another_name_is_not_resumed_from(tmp_path):
    run(tmp_path, 2)
    (tmp_path / "checkpoint_latest.pt").unlink()
    (tmp_path / "checkpoint_step_old.pt").write_bytes((tmp_path / "checkpoint_step_1.pt").read_bytes())
    engine = scalar_engine(hooks=[CheckpointingHook(100, path=tmp_path)])
    assert engine.hooks[0].checkpoint_to_resume(engine)["global_step"] == 2


def test_a_bare_name_is_looked_up_inside_the_folder_and_a_missing_path_is_an_error(tmp_path):
    run(tmp_path, 3, keep_previous=None)
    assert run(tmp_path / "new", 2, load=str(tmp_path / "checkpoint_step_1.pt")).model.weight.item() == -2.0
    resumed = scalar_engine(hooks=[CheckpointingHook(100, path=tmp_path, load="checkpoint_step_1.pt")])
    resumed.prepare()
    assert resumed.hooks[0].checkpoint_to_resume(resumed)["global_step"] == 1
    with pytest.raises(CheckpointError, match=r"none\.pt"):
        run(tmp_path, 5, load="none.pt")


def test_load_none_starts_afresh(tmp_path):
    run(tmp_path, 3)
    assert run(tmp_path, 2, load=None).step == 2


def test_after_a_rewind_later_files_are_overwritten_when_they_are_reached(tmp_path):
    run(tmp_path, 4, keep_previous=None)
    old = (tmp_path / "checkpoint_step_4.pt").read_bytes()
    run(tmp_path, 4, loader=[5.0], load="checkpoint_step_2.pt", keep_previous=None)
    assert (tmp_path / "checkpoint_step_4.pt").read_bytes() != old
    assert load_checkpoint(tmp_path / "checkpoint_latest.pt")["model"]["weight"] == -12.0


def test_a_state_loaded_by_hand_wins_over_the_folder_with_a_warning(tmp_path, caplog):
    run(tmp_path, 3)
    other = scalar_engine()
    other.run([10.0], max_steps=1)
    engine = scalar_engine(hooks=[CheckpointingHook(100, path=tmp_path)])
    with caplog.at_level(logging.WARNING, "treadle"):
        engine.load_state_dict(other.state_dict())
        engine.run([10.0], max_steps=2)
    assert engine.model.weight.item() == -20.0
    assert "a state was already loaded" in caplog.text


def test_a_relative_folder_lies_in_the_workspace_and_needs_one(tmp_path):
    engine = scalar_engine(hooks=[CheckpointingHook(1)])
    with pytest.raises(ConfigError, match="workspace"):
        engine.run([1.0], max_steps=1)
    engine = scalar_engine(hooks=[CheckpointingHook(1)])
    engine.workspace = tmp_path
    engine.run([1.0], max_steps=1)
    assert (tmp_path / "checkpoints" / "checkpoint_step_1.pt").exists()


def test_one_step_is_written_once(tmp_path, monkeypatch):
    from treadle.hooks import checkpointing

    written = []
    original = checkpointing.save_checkpoint
    monkeypatch.setattr(
        checkpointing, "save_checkpoint", lambda tree, path: written.append(path.name) or original(tree, path)
    )
    run(tmp_path, 4, interval=2, keep_interval=4)
    assert written == ["checkpoint_step_2.pt", "checkpoint_step_4.pt"]


def test_a_save_that_failed_is_tried_again_at_the_next_occasion(tmp_path, monkeypatch):
    from treadle.hooks import checkpointing

    original = checkpointing.save_checkpoint
    hook = CheckpointingHook(1, path=tmp_path)
    engine = scalar_engine(hooks=[hook])
    engine.run([1.0], max_steps=1)

    def fail(tree, path):
        raise CheckpointError("disk full")

    monkeypatch.setattr(checkpointing, "save_checkpoint", fail)
    with pytest.raises(CheckpointError):
        engine.run([1.0], max_steps=2)
    monkeypatch.setattr(checkpointing, "save_checkpoint", original)
    hook.save(engine)
    assert steps_in(tmp_path) == [1, 2]


class Stop(BaseHook):
    def on_after_step(self, trainer):
        trainer.should_stop = trainer.step == 3


@pytest.mark.parametrize("stop", [False, True])
def test_the_order_of_hooks_changes_nothing_in_a_checkpoint(tmp_path, stop):
    trees = []
    for number, order in enumerate([(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)]):
        folder = tmp_path / str(number)
        parts = [CheckpointingHook(2, None, path=folder), EmaHook(0.5), LoggingHook(2), Stop() if stop else BaseHook()]
        engine = scalar_engine(hooks=[parts[i] for i in order])
        engine.run([1.0, 2.0], max_steps=5)
        trees.append({path.name: load_checkpoint(path) for path in sorted(folder.iterdir())})
    assert sorted(trees[0])[-1] == f"checkpoint_step_{3 if stop else 5}.pt"
    for other in trees[1:]:
        assert differences(other, trees[0]) == []


@pytest.mark.parametrize(
    "wrong",
    [{"interval": 0}, {"keep_previous": 0}, {"keep_interval": -1}, {"exit_code": "x"}, {"exit_signals": 9}],
)
def test_a_setting_outside_its_range_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CheckpointingHook(**{"interval": 1, **wrong})


def history_run(folder, epochs, state=None):
    trainer = None
    hook = HistoryHook(folder / "history.json", lambda: trainer.history)
    engine = scalar_engine(hooks=[hook])
    trainer = EpochTrainer(engine)
    if state is not None:
        engine.load_state_dict(state)
    trainer.fit([1.0], None, epochs)
    return engine


def epochs_in(path):
    import json

    return [record["epoch"] for record in json.loads(path.read_text())]


def test_on_a_resume_the_history_file_is_that_of_the_checkpoint_at_once(tmp_path):
    engine = history_run(tmp_path, 2)
    state = engine.state_dict()
    history_run(tmp_path, 4, state)
    assert epochs_in(tmp_path / "history.json") == [1, 2, 3, 4]

    trainer = None
    hook = HistoryHook(tmp_path / "history.json", lambda: trainer.history)
    resumed = scalar_engine(hooks=[hook], task=Slopes(fail_at={n: KeyboardInterrupt() for n in range(1, 9)}))
    trainer = EpochTrainer(resumed)
    resumed.load_state_dict(state)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit([1.0], None, 4)
    assert epochs_in(tmp_path / "history.json") == [1, 2]


def test_epochs_that_never_happened_are_no_history_of_a_run_resumed_inside_its_first(tmp_path):
    engine = scalar_engine()
    EpochTrainer(engine)
    engine.run([1.0, 2.0], max_steps=1)
    history_run(tmp_path, 3)
    trainer = None
    hook = HistoryHook(tmp_path / "history.json", lambda: trainer.history)
    resumed = scalar_engine(hooks=[hook], task=Slopes(fail_at={n: KeyboardInterrupt() for n in range(1, 9)}))
    trainer = EpochTrainer(resumed)
    resumed.load_state_dict(engine.state_dict())
    with pytest.raises(KeyboardInterrupt):
        trainer.fit([1.0, 2.0], None, 3)
    assert not (tmp_path / "history.json").exists()
    assert epochs_in(tmp_path / "history.1.json") == [1, 2, 3]


def test_a_fresh_run_renames_the_history_of_another(tmp_path):
    history_run(tmp_path, 2)
    history_run(tmp_path, 1)
    history_run(tmp_path, 3)
    assert [epochs_in(tmp_path / f"history{n}.json") for n in ("", ".1", ".2")] == [[1, 2, 3], [1, 2], [1]]


def load_into(caplog, hooks, tree, **kwargs):
    caplog.clear()
    engine = scalar_engine(hooks=hooks, **kwargs)
    with caplog.at_level(logging.WARNING, "treadle"):
        engine.load_state_dict(tree)
    return engine


def state_of(hooks=(), steps=2, **kwargs):
    engine = scalar_engine(hooks=hooks, **kwargs)
    engine.run([1.0], max_steps=steps)
    return engine.state_dict()


def test_what_a_checkpoint_lacks_or_has_too_much_is_said(caplog):
    load_into(caplog, [], state_of())
    assert caplog.text == ""
    engine = load_into(caplog, [EmaHook(0.5)], state_of())
    assert "no average 'ema'" in caplog.text
    assert engine.averages["ema"].module.weight.item() == -2.0
    load_into(caplog, [], state_of([EmaHook(0.5)]))
    assert "average 'ema' is ignored" in caplog.text
    load_into(caplog, [LoggingHook(5)], state_of())
    assert "no state of hook 'LoggingHook'" in caplog.text
    load_into(caplog, [], state_of([LoggingHook(5)]))
    assert "state of hook 'LoggingHook' is ignored" in caplog.text
    load_into(caplog, [], state_of(precision="fp16"))
    assert "scaler" in caplog.text
    load_into(caplog, [], state_of(), precision="fp16")
    assert "scaler" in caplog.text


def test_a_file_with_only_weights_of_plain_torch_loads_and_the_rest_starts_fresh(caplog):
    engine = load_into(caplog, [], {"model": {"module.weight": torch.tensor(5.0)}})
    assert engine.model.weight.item() == 5.0
    assert "optimizer" in caplog.text
    assert "start fresh" in caplog.text


def test_loading_into_a_used_engine_leaves_nothing_of_its_own_run():
    saved = state_of(steps=3)
    used = scalar_engine()
    used.run([7.0] * 5, max_steps=4)
    used.load_state_dict(saved)
    assert differences(used.state_dict(), saved) == []
    fresh = scalar_engine()
    used.load_state_dict({"model": fresh.state_dict()["model"]})
    assert (used.step, used.epoch, used.cursor.position, used.train_means()) == (0, 0, 0, {})


@pytest.mark.parametrize(
    ("saved", "word"),
    [
        ({"other": torch.zeros(())}, "unexpected other"),
        ({}, "missing weight"),
        ({"weight": torch.zeros(3)}, r"weight is \(3,\)"),
    ],
)
def test_a_model_that_does_not_fit_lists_the_names_and_advises(saved, word):
    engine = scalar_engine()
    with pytest.raises(CheckpointError, match=word) as caught:
        engine.load_state_dict({"model": saved})
    assert "another folder" in str(caught.value).lower()


def test_a_hook_may_write_its_own_entry_and_not_that_of_others():
    class Writes(BaseHook):
        def __init__(self, write):
            self.write = write

        def on_state_dict(self, trainer, state_dict):
            self.write(state_dict)

    fine = scalar_engine(hooks=[Writes(lambda s: (s["hooks"].update(Writes=1), s.update(extra=[1])))])
    assert fine.state_dict()["extra"] == [1]
    for write in (
        lambda s: s.update(model={}),
        lambda s: s["hooks"].update(LoggingHook=1),
        lambda s: s.pop("rng"),
        lambda s: s.update(hooks={}),
    ):
        engine = scalar_engine(hooks=[LoggingHook(3), Writes(write)])
        with pytest.raises(CheckpointError, match=r"Writes\.on_state_dict"):
            engine.state_dict()


def test_a_hook_whose_state_is_not_plain_is_told_where():
    class Odd(BaseHook):
        def on_state_dict(self, trainer, state_dict):
            state_dict["hooks"][self.state_key] = {"when": object()}

    with pytest.raises(CheckpointError, match=r"hooks\.Odd\.when"):
        scalar_engine(hooks=[Odd()]).state_dict()


def test_the_tree_has_the_keys_of_the_schema_in_their_order():
    from treadle.checkpoint.schema import KEYS

    assert list(scalar_engine().state_dict()) == list(KEYS)
    assert Scalar().weight.item() == 0.0
