"""Ported scripts: no false alarms, and what would fail after an epoch is refused or named before step 1."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from strangers.bench import WIDTH, Points, net, points_loader, run
from strangers.ported import PORTED
from treadle import BaseTrainer, CheckpointError, CheckpointingHook, ConfigError, Trainer, ValidationHook, load_weights
from treadle.hooks import BaseHook


def trainer_of(kind: type[Trainer] = Trainer, *, loss: Any = None, optimizer: Any = None, **settings: Any) -> Trainer:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05) if optimizer is None else optimizer(model)
    return kind(model, optimizer, loss or nn.MSELoss(), device="cpu", progress=False, **settings)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("row", [row for row in PORTED if row.kind != "Loaders"], ids=lambda row: row.name)
def test_what_is_exact_causes_no_warning(row: Any, caplog: pytest.LogCaptureFixture) -> None:
    state = run(row, 0, steps=5)[0].state_dict()
    run(row, 1, steps=7, state=state)
    assert warnings_in(caplog) == []


class Slow(BaseHook):
    """An average whose values an evaluation needs."""

    def on_before_train(self, trainer: Any) -> None:
        self.values = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}


def test_an_evaluation_may_need_what_a_hook_creates_when_training_begins(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()

    class Scores(Trainer):
        def evaluate(self, dataloader: Any) -> Any:
            return {**super().evaluate(dataloader), "slow": float(slow.values["0.weight"].sum())}

    trainer = trainer_of(Scores, hooks=[slow])
    trainer.train(points_loader(), 1, points_loader(), best_model_metric="eval_loss")
    assert len(trainer.history["eval_slow"]) == 1
    assert warnings_in(caplog) == []


def test_a_loss_may_own_the_optimizer_of_its_parameters(caplog: pytest.LogCaptureFixture) -> None:
    class Centers(nn.Module):
        def __init__(self, *, own: bool):
            super().__init__()
            self.center = nn.Parameter(torch.zeros(1))
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.5) if own else None

        def forward(self, outputs: Any, targets: Any) -> Any:
            return (outputs - targets - self.center).square().mean()

    trainer_of(loss=Centers(own=True)).train(points_loader(), 1)
    assert warnings_in(caplog) == []
    trainer_of(loss=Centers(own=False)).train(points_loader(), 1)
    assert any("Centers" in text for text in warnings_in(caplog))


def test_a_memory_map_that_is_opened_at_the_first_read_is_no_state(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Mapped(Points):
        rows = None

        def __init__(self, mode: str):
            super().__init__()
            self.file, self.mode = None, mode

        def __getitem__(self, index: int) -> Any:
            if self.file is None:
                np.save(tmp_path / "rows.npy", self.x.numpy())
                self.file = np.load(tmp_path / "rows.npy", mmap_mode=self.mode)
            return torch.from_numpy(np.array(self.file[index])), super().__getitem__(index)[1]

    trainer_of().train(points_loader(Mapped("r")), 2, save_dir=tmp_path / "read")
    assert warnings_in(caplog) == []
    trainer_of().train(points_loader(Mapped("r+")), 2, save_dir=tmp_path / "written")
    assert any("Mapped.file" in text for text in warnings_in(caplog))


def test_settings_of_a_batch_sampler_without_its_base_are_written(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Pairs(BatchSampler):
        def __init__(self) -> None:
            """Set nothing, so that its length raises."""

        def __iter__(self) -> Any:
            yield from ([index, index + 1] for index in range(0, 12, 2))

    trainer_of().train(DataLoader(Points(), batch_sampler=Pairs()), 1, save_dir=tmp_path)
    assert warnings_in(caplog) == []
    assert (tmp_path / "settings.json").exists()


# -- before step 1


def test_a_schedule_that_fails_in_a_later_epoch_is_refused() -> None:
    rates = [1.0, 0.9, 0.8]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model, optimizer, nn.MSELoss(), device="cpu", progress=False,
        scheduler=LambdaLR(optimizer, lambda epoch: rates[epoch]),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="LambdaLR"):
        trainer.train(points_loader(), 5)
    assert trainer.step == 0
    trainer.train(points_loader(), 2)
    assert trainer.step == 8


def test_a_hooks_state_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    class Unsavable(BaseHook):
        def on_state_dict(self, trainer: Any, state_dict: Any) -> None:
            state_dict["hooks"][self.state_key] = {"function": print}

    trainer = trainer_of(hooks=[Unsavable()])
    with pytest.raises(CheckpointError, match="Unsavable"):
        trainer.train(points_loader(), 1, save_dir=tmp_path)
    assert trainer.step == 0


def test_a_hooks_state_that_needs_a_step_is_not_refused(tmp_path: Path) -> None:
    class AfterASTep(BaseHook):
        loss: Any = None

        def on_after_step(self, trainer: Any) -> None:
            self.loss = trainer.step_info["loss"][0]

        def on_state_dict(self, trainer: Any, state_dict: Any) -> None:
            state_dict["hooks"][self.state_key] = {"loss": self.loss.item()}

    trainer = trainer_of(hooks=[AfterASTep()])
    trainer.train(points_loader(), 1, save_dir=tmp_path)
    assert trainer.step == 4


class Reads(BaseHook):
    """Reads attributes that trainers of other libraries have."""

    def on_after_epoch(self, trainer: Any) -> None:
        if self is None:
            trainer.stop_training = trainer.scheduler.rate
            trainer.later = trainer.later_too


class Sets(BaseHook):
    """Sets what another hook reads."""

    def on_before_step(self, trainer: Any) -> None:
        trainer.later_too = trainer.step


def test_names_that_a_hook_uses_in_vain_are_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer_of(hooks=[Reads(), Sets()]).train(points_loader(), 1)
    found = warnings_in(caplog)
    assert len(found) == 2
    assert "trainer.scheduler" in found[0] + found[1]
    assert "trainer.stop_training" in found[0] + found[1]


def test_names_and_keys_that_a_callback_uses_in_vain_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def callback(trainer: Any, epoch: int, record: Any) -> None:
        assert record["train_loss"] > 0
        if epoch > 5:
            record["val_loss"] = record["val_loss"] / trainer.current_epoch

    trainer_of().train(points_loader(), 1, points_loader(), callbacks=[callback])
    found = warnings_in(caplog)
    assert len(found) == 2
    assert any("trainer.current_epoch" in text for text in found)
    assert any("'val_loss'" in text and "'eval_loss'" in text for text in found)


def test_names_and_keys_that_a_callback_expects_to_be_missing_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    def asks(trainer: Any, epoch: int, record: Any) -> None:
        assert (trainer.global_step if hasattr(trainer, "global_step") else trainer.step) > 0

    def tries(trainer: Any, epoch: int, record: Any) -> None:
        try:
            assert trainer.current_epoch > 0
        except AttributeError:
            assert trainer.step > 0

    def looks_up(trainer: Any, epoch: int, record: Any) -> None:
        assert (record["val_loss"] if "val_loss" in record else record["train_loss"]) > 0

    def gets(trainer: Any, epoch: int, record: Any) -> None:
        assert record.get("val_loss") is None or record["val_loss"] > 0

    trainer_of().train(points_loader(), 1, callbacks=[asks, tries, looks_up, gets])
    assert warnings_in(caplog) == []


def test_a_save_method_with_other_arguments_is_refused() -> None:
    class Saves(Trainer):
        def _save_checkpoint(self, path: Any, epoch: Any) -> None:  # type: ignore[override]
            super()._save_checkpoint(path, epoch)

    with pytest.raises(ConfigError, match="_save_checkpoint"):
        trainer_of(Saves).train(points_loader(), 1)


class Whole(BaseTrainer):
    """Builds everything that a run needs."""

    def build_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8, WIDTH), torch.ones(8, 1)), 2)

    def build_model(self) -> Any:
        return net()

    def build_optimizer(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.05)

    def forward(self, input: Any) -> Any:
        return nn.functional.mse_loss(self.model(input[0]), input[1]), {}


def test_a_property_in_place_of_a_method_is_refused_and_the_reverse(tmp_path: Path) -> None:
    class Hooks(Whole):
        @property
        def build_hooks(self) -> Any:  # type: ignore[override]
            return []

    class Epoch(Whole):
        def epoch(self) -> int:  # type: ignore[override]
            return 7

    for kind, name in ((Hooks, "Hooks.build_hooks"), (Epoch, "Epoch.epoch")):
        with pytest.raises(ConfigError, match=name):
            kind(max_steps=2, device="cpu", workspace=tmp_path).train()


# -- used folders


def test_a_second_trainer_that_finds_the_run_of_the_first_finished_warns(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for _ in range(2):
        trainer_of().train(points_loader(), 1, save_dir=tmp_path, resume_from="auto")
    assert len(warnings_in(caplog)) == 1
    assert "checkpoint_epoch_1.pt" in warnings_in(caplog)[0]


def test_a_fresh_start_keeps_the_best_weights_of_a_validation_hook(tmp_path: Path) -> None:
    class Validates(Whole):
        def build_hooks(self) -> Any:
            return [CheckpointingHook(2, load=None), ValidationHook(self.build_data_loader(), interval=2)]

    Validates(max_steps=4, device="cpu", workspace=tmp_path, progress=False).train()
    best = load_weights(tmp_path / "best_model.pt")
    Validates(max_steps=2, device="cpu", workspace=tmp_path, progress=False).train()
    aside = load_weights(tmp_path / "best_model.superseded.pt")
    assert all(torch.equal(best[name], aside[name]) for name in best)
    assert (tmp_path / "best_model.pt").exists()
