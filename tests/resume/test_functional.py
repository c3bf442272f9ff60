"""The functional face stops after any epoch or step and ends like a run that never stopped: files, history, weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError

import treadle
from functional_kit import make, same_weights
from helpers import Augmented, differences, small_model
from treadle import BaseHook, CheckpointingHook
from treadle.checkpoint import load_checkpoint

EPOCHS, STEPS = 4, 3 * 4


class Stop(BaseHook):
    """Ends the run after a step, once its checkpoint is written."""

    def __init__(self, step):
        self.step = step

    def on_before_step(self, trainer):
        if trainer.step == self.step + 1:
            raise KeyboardInterrupt


class Adds(treadle.Trainer):
    """Overrides what a run goes through, and adds a number at each place."""

    def train_step(self, batch):
        return {**super().train_step(batch), "rows": len(batch[0])}

    def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
        return {**super().train_epoch(train_dataloader, eval_dataloader, epoch), "index": epoch}

    def eval_step(self, batch):
        return {**super().eval_step(batch), "rows": len(batch[0])}


def trainer(cls=treadle.Trainer, *, seed=0, stop=None, hooks=(), plateau=False):
    torch.manual_seed(seed)
    return make(
        cls, seed=seed, model=small_model(), ema_decay=0.8, max_grad_norm=0.5, metrics={"mae": MeanAbsoluteError()},
        scheduler=(lambda o: ReduceLROnPlateau(o, patience=0)) if plateau else (lambda o: CosineAnnealingLR(o, STEPS)),
        scheduler_step_per_batch=not plateau, hooks=[*hooks, *([] if stop is None else [Stop(stop)])],
    )  # fmt: skip


def train(given, folder=None, epochs=EPOCHS, **arguments):
    data = DataLoader(Augmented(), batch_size=8, shuffle=True)
    return given.train(data, epochs, DataLoader(Augmented(9), batch_size=4), save_dir=folder, **arguments)


def state(given):
    tree = given._engine.state_dict()
    return {key: tree[key] for key in tree if key not in ("hooks", "config")}


@pytest.mark.parametrize("cls", [treadle.Trainer, Adds])
@pytest.mark.parametrize("plateau", [True, False])
def test_every_epoch_in_a_new_object(cls, plateau, tmp_path):
    straight = trainer(cls, plateau=plateau)
    history = train(straight, tmp_path / "straight")
    for epoch in range(1, EPOCHS + 1):
        given = trainer(cls, seed=epoch if epoch > 1 else 0, plateau=plateau)
        last = train(given, tmp_path / "run", epoch, resume_from="auto")
    assert last == history
    assert differences(state(given), state(straight)) == []
    names = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("straight", "run")]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith(".pt"):
            one, other = (load_checkpoint(tmp_path / folder / name) for folder in ("straight", "run"))
            marks = [tree["data"].pop("built") for tree in (one, other)]  # with whether the call was to read on
            assert marks[0]["values"] == marks[1]["values"]
            assert differences(one, other) == [], name


@pytest.mark.parametrize("cls", [treadle.Trainer, Adds])
def test_stopped_after_any_step_with_a_checkpointing_hook(cls, tmp_path):
    straight = trainer(cls)
    history = train(straight)
    for cut in range(1, STEPS, 2 if cls is Adds else 1):
        folder = tmp_path / str(cut)
        with pytest.raises(KeyboardInterrupt):
            train(trainer(cls, stop=cut, hooks=[CheckpointingHook(1, path=folder / "steps")]), folder)
        resumed = trainer(cls, seed=5, hooks=[CheckpointingHook(1, path=folder / "steps")])
        assert train(resumed, folder) == history, f"stopped after step {cut}"
        assert differences(state(resumed), state(straight)) == []
        assert json.loads((folder / "history.json").read_text()) == history


def test_the_same_object_goes_on_after_an_exception():
    straight = trainer()
    history = train(straight)

    class Once(BaseHook):
        done = False

        def on_after_step(self, given):
            if given.step == 5 and not self.done:
                self.done = True
                raise KeyboardInterrupt

    interrupted = trainer(hooks=[Once()])
    with pytest.raises(KeyboardInterrupt):
        train(interrupted)
    assert train(interrupted) == history
    assert same_weights(interrupted, straight)


def test_patience_and_the_best_epoch_go_on_where_they_were(tmp_path):
    def rising(folder, epochs, **arguments):
        given = make(lr=0.0)
        data = [(torch.ones(4, 4), torch.ones(4, 1))]
        given.train(data, epochs, data, save_dir=folder, early_stopping_patience=3, **arguments)
        return given

    straight = rising(tmp_path / "straight", 9)
    rising(tmp_path / "run", 2)
    resumed = rising(tmp_path / "run", 9, resume_from="auto")
    assert (straight.epoch, straight.best_epoch) == (resumed.epoch, resumed.best_epoch) == (4, 1)
    assert rising(tmp_path / "run", 9, resume_from="auto").epoch == 4


SCRIPT = """
    import os, signal, sys
    from pathlib import Path
    from test_functional import Adds, train, trainer
    import treadle

    class Kill(treadle.BaseHook):
        def on_after_step(self, engine):
            if engine.step == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)

    folder = Path(sys.argv[1])
    given = trainer(seed=int(sys.argv[3]), hooks=[treadle.CheckpointingHook(2, path=folder / "steps"), Kill()])
    train(given, folder)
"""


@pytest.mark.slow  # three processes; the tests above stop at every step in one
@pytest.mark.skipif(sys.platform == "win32", reason="kills with SIGKILL")
def test_the_same_command_after_kills_ends_with_the_same_history(tmp_path):
    history = train(trainer())
    code = textwrap.dedent(SCRIPT)
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    for number, (kill, expected) in enumerate([(5, -9), (9, -9), (0, 0)]):
        command = [sys.executable, "-c", code, str(tmp_path), str(kill), str(number)]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        assert done.returncode == expected, done.stderr
    assert json.loads((tmp_path / "history.json").read_text()) == history
