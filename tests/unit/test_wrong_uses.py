"""Wrong uses of the faces that are refused or named before step 1, or before the step that they would spoil."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from treadle import BaseTrainer, CheckpointingHook, ConfigError, SwaHook, Trainer, ValidationHook


def rows(width: int = 4, *, targets: torch.Tensor | None = None) -> DataLoader:
    x = torch.linspace(-1, 1, 16 * width).reshape(16, width)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True) if targets is None else targets), 4)


def trainer_of(model: nn.Module | None = None, loss=None, **options) -> Trainer:
    model = model or nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, loss or nn.MSELoss(), device="cpu", progress=False, **options)


class Steps(BaseTrainer):
    lr = 0.1

    def __init__(self, max_steps: int = 6, **options):
        super().__init__(max_steps, device="cpu", progress=False, **options)

    def build_data_loader(self):
        return rows()

    def build_model(self):
        return nn.Linear(4, 1)

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=self.lr)

    def forward(self, input):
        return nn.functional.mse_loss(self.model(input[0]), input[1]), {}


def weights(trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", []))


def test_an_error_of_the_first_evaluation_names_it_and_the_batch_before_step_1():
    trainer = trainer_of()
    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        trainer.train(rows(), 1, eval_dataloader=rows(5))
    assert "the evaluation, tried before step 1; what the loader gave: (float32 (4, 5), float32 (4, 1))" in notes(
        raised.value
    )
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("loss", "advice"),
    [(lambda o, t: float((o - t).square().mean()), "cut it off"), (lambda o, t: ((o - t).mean(), 1), "loss alone")],
)
@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_a_loss_that_is_no_tensor_gets_advice_that_fits(loss, advice):
    with pytest.raises(ConfigError, match=advice):
        trainer_of(loss=loss).train(rows(), 1)


def test_a_model_that_is_frozen_as_a_whole_is_named():
    with pytest.raises(ConfigError, match="all parameters frozen"):
        trainer_of(nn.Linear(4, 1).requires_grad_(False)).train(rows(), 1)


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_a_rate_that_is_not_finite_moves_no_weight(rate):
    class Wrong(Steps):
        lr = rate

    trainer = Wrong()
    trainer.prepare()
    before = weights(trainer)
    with pytest.raises(ConfigError, match=f"lr={rate}: a learning rate must be finite"):
        trainer.train()
    assert all(map(torch.equal, weights(trainer), before))


def test_a_schedule_that_gives_nan_ends_the_run_before_the_step_that_it_would_spoil():
    class Wrong(Steps):
        def build_lr_scheduler(self):
            return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: math.nan if step == 3 else 1.0)

    trainer = Wrong()
    with pytest.raises(ConfigError, match="lr=nan"):
        trainer.train()
    assert trainer.applied_steps == 3
    assert all(weight.isfinite().all() for weight in weights(trainer))


@pytest.mark.parametrize(
    "records", [{"a": "text"}, {"a": torch.ones(3)}, {"a": None}], ids=repr
)
def test_a_record_that_is_no_number_is_named_before_the_step_is_applied(records):
    class Wrong(Steps):
        def forward(self, input):
            return super().forward(input)[0], records

    trainer = Wrong()
    with pytest.raises(TypeError, match="records/a"):
        trainer.train()
    assert trainer.applied_steps == 0
