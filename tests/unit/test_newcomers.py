"""Mistakes of people who port a script for the first time: each is refused or named, with what to write instead."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ranks import run_on_ranks
from treadle import BaseTrainer, ConfigError, Trainer, ValidationHook


def pairs() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(16, 3), torch.randn(16, 1)), batch_size=4)


@pytest.mark.parametrize(
    ("loss", "fix"), [(nn.MSELoss(), r"override _prepare_batch.*\(batch, batch\.y\)"), (None, "'labels'")]
)
def test_a_batch_without_targets_is_told_where_to_put_them(loss, fix):
    with pytest.raises(ConfigError, match=fix):
        Trainer(nn.Linear(3, 1), None, loss, device="cpu").train([torch.randn(4, 3)], 1)


class Steps(BaseTrainer):
    per_epoch = True

    def build_data_loader(self):
        return pairs()

    def build_model(self):
        return nn.Linear(3, 1)

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def build_lr_scheduler(self):
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: min(n / 10, 1))

    def forward(self, batch):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1]), {}


@pytest.mark.parametrize("per_batch", [False, True])
def test_a_warm_up_whose_first_epoch_trains_nothing_is_named(per_batch, caplog):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(n / 10, 1))
    with caplog.at_level(logging.WARNING):
        Trainer(
            model, optimizer, nn.MSELoss(), device="cpu", scheduler=schedule, scheduler_step_per_batch=per_batch
        ).train(pairs(), 1)
    assert ("the learning rate is 0 in the whole of epoch 1" in caplog.text) == (not per_batch)


def test_a_step_face_whose_schedule_moves_with_its_steps_is_not_warned_of_a_rate_of_0(caplog):
    with caplog.at_level(logging.WARNING):
        Steps(4, device="cpu").train()
    assert "learning rate is 0" not in caplog.text


def refused_on_two_ranks():
    rank = torch.distributed.get_rank()
    model, found = nn.Linear(3, 1), []
    trainer = Trainer(model, None, nn.MSELoss(), device="cpu", parallel="ddp", progress=False)
    data = [(torch.ones(4, 3), torch.ones(4, 1))] * 2
    for call in (
        {"eval_dataloader": data if rank == 0 else None},
        {"eval_dataloader": {"ab"[rank]: data}},
        {"n": rank},
    ):
        with pytest.raises(ConfigError) as refused:
            trainer.train(data, 1 + call.pop("n", 0), **call)
        found.append(str(refused.value)[:62])
    hooks = [ValidationHook(data, interval=1)] if rank == 0 else []
    with pytest.raises(ConfigError) as refused:
        Trainer(model, None, nn.MSELoss(), device="cpu", hooks=hooks, progress=False).train(data, 1)
    return [*found, str(refused.value)]


def test_what_ranks_do_together_is_asked_for_by_all_of_them():
    expected = [
        "evaluation_loader: it is given on rank 0 and None on rank 1, a",
        "evaluation_loader: it is ['a'] on rank 0 and ['b'] on rank 1, ",
        "epochs: it is 1 on rank 0 and 2 on rank 1, and must be the sam",
        "hooks: rank 0 has ValidationHook and rank 1 none, whose work all ranks share; pass the same to all",
    ]
    assert run_on_ranks(refused_on_two_ranks, 2) == [expected, expected]


def test_a_forward_may_return_the_loss_alone():
    class Alone(Steps):
        build_lr_scheduler = BaseTrainer.build_lr_scheduler

        def forward(self, batch):
            return super().forward(batch)[0]

    weights = []
    for kind in (Steps, Alone):
        torch.manual_seed(0)
        trainer = type("Same", (kind,), {"build_lr_scheduler": BaseTrainer.build_lr_scheduler})(4, device="cpu")
        trainer.train()
        weights.append(trainer.model.weight.detach().clone())
    assert torch.equal(*weights)


def test_a_dict_that_does_not_fit_the_model_is_explained():
    rows = DataLoader([{"x": torch.randn(3), "y": torch.randn(1)} for _ in range(8)], batch_size=4)
    with pytest.raises(TypeError) as caught:
        Trainer(nn.Linear(3, 1), None, nn.MSELoss(), device="cpu").train(rows, 1)
    assert any("keyword arguments: x, y; override _prepare_batch" in note for note in caught.value.__notes__)


def test_processes_of_torchrun_without_a_group_are_warned(monkeypatch, caplog):
    def train():
        caplog.clear()
        Steps(2, device="cpu").train()
        return "init_process_group" in caplog.text

    assert not train()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert train()
