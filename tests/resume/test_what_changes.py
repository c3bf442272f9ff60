"""What changes between a stop and a resume is refused or said in words, never taken in silence."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from helpers import Augmented, MeanSquare, Snapshots, small_model
from treadle import CheckpointError, ConfigError, Engine, TensorLoader, set_seed

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def engine_with(model=None, **settings):
    set_seed(0)
    model = small_model() if model is None else model
    snapshots = Snapshots()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Engine(model, optimizer, MeanSquare(), device="cpu", hooks=[snapshots], **settings), snapshots


def stopped(loader, steps=2, **settings):
    engine, snapshots = engine_with(**settings)
    engine.run(loader, max_steps=steps)
    return snapshots.states[steps]


def resumed(state, loader, **settings):
    engine, _ = engine_with(**settings)
    engine.load_state_dict(state)
    engine.run(loader, max_steps=engine.step + 2)
    return engine


def test_another_batch_size_is_said(caplog):
    resumed(stopped(DataLoader(Augmented(), batch_size=4)), DataLoader(Augmented(), batch_size=2))
    assert "an epoch had 5 micro-batches and now has 10: another batch size" in caplog.text


def test_another_setting_of_the_optimizer_is_said_since_the_checkpoints_goes_on(caplog):
    state = stopped(loader := DataLoader(Augmented(), batch_size=4))
    engine, _ = engine_with()
    engine.optimizer.param_groups[0].update(lr=0.5, betas=(0.5, 0.9))
    engine.load_state_dict(state)
    assert "betas=[0.9, 0.999] (built as [0.5, 0.9]), lr=0.01 (built as 0.5)" in caplog.text
    assert engine.optimizer.param_groups[0]["lr"] == 0.01
    caplog.clear()
    resumed(state, loader)
    assert "goes on with the checkpoint's" not in caplog.text


def test_a_schedule_that_has_moved_the_rate_is_no_other_setting(caplog):
    def scheduled(lr):
        engine, snapshots = engine_with()
        engine.optimizer.param_groups[0]["lr"] = lr
        engine.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
        return engine, snapshots

    engine, snapshots = scheduled(0.01)
    engine.run(DataLoader(Augmented(), batch_size=4), max_steps=2)
    scheduled(0.01)[0].load_state_dict(snapshots.states[2])
    assert "goes on with the checkpoint's" not in caplog.text
    scheduled(0.02)[0].load_state_dict(snapshots.states[2])
    assert "checkpoint's initial_lr=0.01 (built as 0.02);" in caplog.text


def test_another_kind_of_loader_is_said(caplog):
    resumed(stopped(DataLoader(Augmented(), batch_size=4)), list(DataLoader(Augmented(), batch_size=4)))
    assert "was of kind 'indexed', this one is 'replayed'" in caplog.text


def test_workers_where_there_were_none_are_said(caplog):
    resumed(stopped(DataLoader(Augmented(), batch_size=4)), DataLoader(Augmented(), batch_size=4, num_workers=1))
    assert "num_workers was 0 and is now 1" in caplog.text


def test_a_stateful_loader_with_other_workers_is_refused_in_words():
    state = stopped(StatefulDataLoader(Augmented(), batch_size=4, num_workers=1))
    with pytest.raises(CheckpointError, match="num_workers=1 and cannot be loaded with num_workers=2"):
        resumed(state, StatefulDataLoader(Augmented(), batch_size=4, num_workers=2))


def test_a_tensor_loader_over_other_rows_is_refused_in_words():
    data = Augmented()
    state = stopped(TensorLoader(data.x, data.y, batch_size=4))
    with pytest.raises(ConfigError, match="num_rows was 20"):
        resumed(state, TensorLoader(data.x[:16], data.y[:16], batch_size=4))


def test_another_batch_size_of_a_tensor_loader_goes_on_with_the_rows_that_are_left(caplog):
    data = Augmented()
    state = stopped(TensorLoader(data.x, data.y, batch_size=4))
    loader = TensorLoader(data.x, data.y, batch_size=3)
    engine = resumed(state, loader)
    assert list(loader.last_rows) == [11, 12, 13], "8 rows were read, then two batches of 3"
    assert "after 8 of its 20 samples" in caplog.text
    assert engine.target.total_steps(engine) == engine.step


def test_another_model_is_refused_with_every_name(caplog):
    state = stopped(DataLoader(Augmented(), batch_size=4))
    other = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 1))
    with pytest.raises(CheckpointError, match=r"0\.weight is \(8, 4\) in the checkpoint and \(9, 4\) in the model"):
        resumed(state, DataLoader(Augmented(), batch_size=4), model=other)


def test_a_larger_target_goes_on_and_a_smaller_one_is_a_finished_run():
    loader = DataLoader(Augmented(), batch_size=4)
    state = stopped(loader, steps=4)
    engine, _ = engine_with()
    engine.load_state_dict(state)
    engine.run(loader, max_steps=3)
    assert engine.step == 4
    engine.run(loader, max_steps=6)
    assert engine.step == 6


def test_a_scaler_that_comes_or_goes_is_said(caplog):
    loader = DataLoader(Augmented(), batch_size=4)
    resumed(stopped(loader), loader, precision="fp16")
    assert "the fp16 scale starts fresh" in caplog.text
    resumed(stopped(loader, precision="fp16"), loader)
    assert "gradient-scaler state is ignored" in caplog.text
