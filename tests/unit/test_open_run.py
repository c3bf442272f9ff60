"""open_run: a run opened again as a trainer, read-only unless it is asked to train on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import treadle
from functional_kit import loader, make, net, same_weights
from helpers import Slopes, differences, scalar_engine
from treadle import BaseTrainer, CheckpointError, CheckpointingHook, ConfigError, EmaHook, EpochTrainer, open_run
from treadle.checkpoint import load_checkpoint
from treadle.runs.opening import find_checkpoint


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def train(folder, epochs=3, **rest):
    trainer = make(ema_decay=0.5, **rest)
    trainer.train(loader(shuffle=True), epochs, loader(seed=6), save_dir=folder, resume_from="auto")
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, train(folder)


def test_a_trainer_of_epochs_has_the_best_state_and_the_folder_is_only_read(run):
    folder, trained = run
    before = files(folder)
    trainer = open_run(folder, make(ema_decay=0.5))
    assert trainer.epoch == trained.best_epoch
    assert trainer.test(loader(seed=6))["loss"] == trained.best_metric
    assert torch.equal(
        trainer.predict(loader()), open_run(folder / "best_model.pt", make(ema_decay=0.5)).predict(loader())
    )
    with pytest.raises(ConfigError, match=r"was opened read-only; open it with read_only=False"):
        trainer.train(loader(), 5)
    with pytest.raises(ConfigError, match="was opened read-only"):
        trainer.train_step(next(iter(loader())))
    assert files(folder) == before


def test_the_last_state_or_a_named_one_is_taken_when_asked_for(run):
    folder, trained = run
    last = open_run(folder, make(ema_decay=0.5), checkpoint="last")
    assert (last.epoch, last.history) == (3, trained.history)
    assert same_weights(last, trained)
    assert open_run(folder, make(ema_decay=0.5), checkpoint="checkpoint_epoch_2.pt").epoch == 2
    with pytest.raises(ConfigError, match=r"checkpoint='checkpoint_epoch_9\.pt': there is no such checkpoint"):
        open_run(folder, make(), checkpoint="checkpoint_epoch_9.pt")


def test_a_model_has_the_weights_that_were_scored(run):
    folder, _ = run
    model = open_run(folder, net())
    weights = treadle.load_weights(folder / "best_model.pt")
    assert differences(dict(model.state_dict()), dict(weights)) == []


def test_it_trains_on_in_the_folder_when_asked_to(tmp_path):
    straight = train(tmp_path / "straight", 4)
    train(tmp_path / "run", 2)
    trainer = open_run(tmp_path / "run", make(ema_decay=0.5), read_only=False)
    assert trainer.epoch == 2
    trainer.train(loader(shuffle=True), 4, loader(seed=6), save_dir=tmp_path / "run")
    assert same_weights(straight, trainer)
    assert (tmp_path / "run" / "checkpoint_epoch_4.pt").exists()


class Saved(BaseTrainer):
    def __init__(self, max_steps, **rest):
        super().__init__(max_steps, device="cpu", progress=False, **rest)

    def build_data_loader(self):
        treadle.set_seed(0)
        return loader(shuffle=True)

    def build_model(self):
        return net()

    def build_optimizer(self):
        return torch.optim.Adam(self.model.parameters(), 0.05)

    def build_hooks(self):
        return [EmaHook(0.5), CheckpointingHook(5)]

    def forward(self, input):
        return nn.functional.mse_loss(self.model(input[0]), input[1]), {}, len(input[0])

    def predict_step(self, input):
        return self.model(input[0])


def test_a_trainer_of_steps(tmp_path):
    trained = Saved(7, workspace=tmp_path)
    trained.train()
    before = files(tmp_path)
    trainer = open_run(tmp_path, Saved(7, workspace=tmp_path))
    assert trainer.step == 7
    assert trainer.test(loader()) == trained.test(loader())
    assert torch.equal(trainer.predict(loader()), trained.predict(loader()))
    with pytest.raises(ConfigError, match="was opened read-only"):
        trainer.train()
    assert files(tmp_path) == before
    longer = open_run(tmp_path, Saved(9), read_only=False)
    longer.train()
    assert (tmp_path / "checkpoints" / "checkpoint_step_9.pt").exists()


def test_an_epoch_driver(tmp_path):
    def driver():
        return EpochTrainer(scalar_engine(task=Slopes(), hooks=[CheckpointingHook(1, path=tmp_path / "checkpoints")]))

    driver().fit([1.0, 2.0], None, 2)
    assert len(open_run(tmp_path, driver()).history) == 2


def test_what_does_not_fit_is_named(run, tmp_path):
    folder, _ = run
    with pytest.raises(ConfigError, match=r"no such run folder or checkpoint"):
        open_run(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"holds no checkpoint that can be read"):
        open_run(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer=None: is the run of a script.*load_weights\('.*best.pt'\)"):
        open_run(folder)
    with pytest.raises(ConfigError, match="must be a BaseTrainer"):
        open_run(folder, "model")
    with pytest.raises(CheckpointError, match=r"best\.pt: "):
        open_run(folder, make(ema_decay=0.5, model=nn.Linear(4, 1)))
    assert load_checkpoint(find_checkpoint(folder, "last"))["epoch"] == 3
