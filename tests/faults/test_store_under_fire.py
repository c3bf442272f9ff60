"""Every call of every kind of save is hurt once: an error, a foreign error, SIGKILL. Old or new, never neither."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from fault_points import foreign, hurt, killed, no_space, record
from helpers import differences, scalar_engine
from treadle import CheckpointingHook
from treadle.checkpoint.store import copy_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint, write_text
from treadle.errors import CheckpointError
from treadle.spectra import SpectraTrainer, TrainerConfig

ACTS = [no_space, foreign, killed]


def tree(value):
    return {"format": {"name": "treadle", "version": 1}, "model": {"w": torch.full((9,), float(value))}, "epoch": 1}


def holds(path):
    return int(load_checkpoint(path)["model"]["w"][0])


def leftovers(folder):
    return [path for path in folder.rglob("*") if path.name.endswith("treadle-tmp")]


def check_error(error, where):
    if error is not None:
        assert isinstance(error, CheckpointError), (where, repr(error))
        assert "\n" not in str(error), where
        assert len(str(error)) < 500, where


def every_point(tmp_path, prepare, action, act):
    """Yield (a fresh folder, the error, what was hurt) for each point that one clean action passes."""
    clean = tmp_path / "clean"
    prepare(clean)
    seen = record(clean, lambda: action(clean))
    assert len(seen) > 5
    for at in range(1, len(seen) + 1):
        folder = tmp_path / "hurt"
        shutil.rmtree(folder, ignore_errors=True)
        prepare(folder)
        error = hurt(folder, lambda: action(folder), at, act)
        check_error(error, (at, seen[at - 1]))
        yield folder, error, (at, seen[at - 1])


def middle_of_a_file(where):
    number, (call, _) = where
    return call == "write" and number % 20


def old_file(folder):
    folder.mkdir(parents=True)
    save_checkpoint(tree(1), folder / "a.pt")


# -- the functions of the store -----------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ACTS)
def test_save_checkpoint_hurt_anywhere_leaves_the_old_file_or_the_new(tmp_path, act):
    for folder, error, where in every_point(
        tmp_path, old_file, lambda folder: save_checkpoint(tree(2), folder / "a.pt"), act
    ):
        assert holds(folder / "a.pt") in (1, 2), where
        assert error is not None or act is killed or holds(folder / "a.pt") == 2, where
        save_checkpoint(tree(3), folder / "a.pt")
        assert holds(folder / "a.pt") == 3, where
        assert leftovers(folder) == [], where


@pytest.mark.parametrize("act", ACTS)
def test_a_first_save_into_a_new_folder_hurt_anywhere_leaves_nothing_or_a_whole_file(tmp_path, act):
    def save(folder, value=2):
        save_checkpoint(tree(value), folder / "deep" / "er" / "a.pt")

    for folder, _, where in every_point(tmp_path, lambda folder: folder.mkdir(), save, act):
        target = folder / "deep" / "er" / "a.pt"
        assert not target.exists() or holds(target) == 2, where
        save(folder, 3)
        assert holds(target) == 3, where
        assert leftovers(folder) == [], where


@pytest.mark.parametrize("act", ACTS)
def test_copy_checkpoint_hurt_anywhere_leaves_the_old_file_or_the_new(tmp_path, act):
    def prepare(folder):
        old_file(folder)
        save_checkpoint(tree(2), folder / "b.pt")

    copy = lambda folder: copy_checkpoint(folder / "b.pt", folder / "a.pt")  # noqa: E731
    for folder, _, where in every_point(tmp_path, prepare, copy, act):
        assert holds(folder / "a.pt") in (1, 2), where
        assert holds(folder / "b.pt") == 2, where
        copy(folder)
        assert holds(folder / "a.pt") == 2, where
        assert leftovers(folder) == [], where


@pytest.mark.parametrize("act", ACTS)
def test_write_text_hurt_anywhere_leaves_the_old_text_or_the_new(tmp_path, act):
    def prepare(folder):
        folder.mkdir()
        write_text("old", folder / "h.json")

    for folder, _, where in every_point(tmp_path, prepare, lambda folder: write_text("new", folder / "h.json"), act):
        assert (folder / "h.json").read_text() in ("old", "new"), where
        write_text("newer", folder / "h.json")
        assert (folder / "h.json").read_text() == "newer", where
        assert leftovers(folder) == [], where


# -- the two faces ------------------------------------------------------------------------------------------------


def engine_at(folder, steps, **settings):
    engine = scalar_engine(hooks=[CheckpointingHook(1, 2, path=folder, **settings)])
    engine.run([1.0] * 50, max_steps=steps)
    return engine


@pytest.mark.parametrize("act", ACTS)
def test_the_hooks_save_hurt_anywhere_is_resumed_from_the_newest_intact_step(tmp_path, act):
    engine_at(tmp_path / "kept", 4)
    hook = CheckpointingHook(1, 2)
    engine = scalar_engine(hooks=[hook])
    engine.load_state_dict(load_checkpoint(tmp_path / "kept" / "checkpoint_latest.pt"))
    engine.progress.begin_step()
    engine.model.weight.data -= 1

    def prepare(folder):
        shutil.copytree(tmp_path / "kept", folder, symlinks=True)
        hook._saved = None

    def save(folder):
        hook.path = folder
        hook.save(engine)

    for folder, error, where in every_point(tmp_path, prepare, save, act):
        tried = scalar_engine(hooks=[CheckpointingHook(1, 2, path=folder)])
        tried.prepare()
        found = tried.hooks[0].checkpoint_to_resume(tried)
        assert found is not None, where
        assert found["global_step"] in ((4, 5) if error or act is killed else (5,)), where
        assert found["model"]["weight"] == -found["global_step"], where
        if middle_of_a_file(where):
            continue
        if act is not killed:
            save(folder)  # the same run tries again, as at its next step
            assert load_checkpoint(folder / "checkpoint_latest.pt")["global_step"] == 5, where
        rerun = engine_at(folder, 6)
        assert rerun.model.weight.item() == -6.0, where
        assert leftovers(folder) == [], where


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x, *args, **kwargs):
        return x * self.weight, x[:, :1], torch.zeros_like(x, dtype=torch.bool)


def tiny_trainer(folder, **settings):
    treadle.set_seed(0)
    model = Tiny()
    loader = DataLoader(TensorDataset(torch.arange(16.0).reshape(4, 4)), batch_size=2, shuffle=True)
    cfg = TrainerConfig(
        **{"out_dir": folder, "amp": False, "device": "cpu", "use_ema": False, "selection": "best", **settings}
    )
    return SpectraTrainer(model, torch.optim.SGD(model.parameters(), lr=0.0005), loader, loader, cfg=cfg)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("best", [False, True])
def test_the_spectra_trainers_save_hurt_anywhere_is_resumed_and_ends_the_same(tmp_path, act, best):
    straight = tiny_trainer(tmp_path / "straight")
    straight.fit(3)
    end = load_checkpoint(tmp_path / "straight" / "checkpoints" / "last.pt")
    tiny_trainer(tmp_path / "kept").fit(1)
    shutil.copytree(tmp_path / "kept", tmp_path / "further")
    trainer = tiny_trainer(tmp_path / "further")
    trainer._write_epoch = lambda record: None
    trainer.fit(2)
    state = trainer._engine.state_dict()  # now, since the reruns below move the global generators
    trainer._engine.state_dict = lambda: state

    def save(folder):
        trainer.out_dir = folder
        trainer.save_checkpoint(2, best)

    for folder, error, where in every_point(
        tmp_path, lambda folder: shutil.copytree(tmp_path / "kept", folder), save, act
    ):
        rerun = tiny_trainer(folder)
        rerun._resume()
        assert rerun.epoch in ((1, 2) if error or act is killed else (2,)), where
        assert verify_checkpoint(folder / "checkpoints" / "best.pt") == [], where
        if middle_of_a_file(where):
            continue  # the folder is as after the first byte of that file: the end is compared there
        rerun.fit(3)
        last = load_checkpoint(folder / "checkpoints" / "last.pt")
        assert differences({**end, "config": None}, {**last, "config": None}) == [], where
        assert leftovers(folder) == [], where
