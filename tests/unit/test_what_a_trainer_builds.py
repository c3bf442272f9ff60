"""What a trainer's own methods and a list of hooks may give: the rest is refused by name before a step is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from treadle import BaseHook, BaseTrainer, CheckpointingHook, EmaHook, Trainer
from treadle.errors import ConfigError


class Line(BaseTrainer):
    forgets = ""
    given_hooks: object = ()

    def build_data_loader(self):
        return None if self.forgets == "build_data_loader" else [(torch.ones(2, 1), torch.ones(2, 1))]

    def build_model(self):
        return None if self.forgets == "build_model" else nn.Linear(1, 1)

    def build_optimizer(self):
        return None if self.forgets == "build_optimizer" else torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self, input):
        x, y = input
        return nn.functional.mse_loss(self.model(x), y), {}

    def build_hooks(self):
        return None if self.forgets == "build_hooks" else self.given_hooks


@pytest.mark.parametrize("method", ["build_data_loader", "build_model", "build_optimizer", "build_hooks"])
def test_a_method_that_builds_nothing_is_named(method):
    trainer = Line(2, device="cpu")
    trainer.forgets = method
    with pytest.raises(ConfigError, match=rf"Line\.{method}\(\) returned None"):
        trainer.train()


def test_hooks_that_are_given_come_after_those_that_are_built():
    built, given = BaseHook(), EmaHook(0.5)
    trainer = Line(2, device="cpu", hooks=[given], trackers="jsonl")
    trainer.given_hooks = [built]
    assert trainer.hooks is None
    trainer.prepare()
    assert trainer.hooks[:2] == [built, given]
    assert list(trainer.state_dict()["ema"]) == ["ema"]
    with pytest.raises(ConfigError, match=r"hooks\[0\]: must be a hook, but this is the class EmaHook"):
        Line(2, device="cpu", hooks=[EmaHook])


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_a_wrong_number_of_micro_batches_is_refused_by_the_name_that_it_was_given(steps):
    with pytest.raises(ConfigError, match=rf"^gradient_accumulation_steps={steps}: "):
        Line(2, gradient_accumulation_steps=steps, device="cpu")


def test_an_evaluation_before_the_training_says_what_to_call():
    trainer = Line(2, device="cpu")
    with pytest.raises(ConfigError, match=r"evaluate\(\) was called before train\(\)"):
        trainer.evaluate([])
    trainer.prepare()
    assert trainer.evaluate(trainer.data_loader)["loss"] >= 0


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (CheckpointingHook(5), r"hooks: must be a list of hooks, but this is of type CheckpointingHook"),
        ([CheckpointingHook], r"hooks\[0\]: must be a hook, but this is the class CheckpointingHook"),
        ([BaseHook(), "jsonl"], r"hooks\[1\]: must be a hook, but this is of type str"),
    ],
)
def test_what_is_no_list_of_hooks_is_refused(hooks, message):
    trainer = Line(2, device="cpu")
    trainer.given_hooks = hooks
    with pytest.raises(ConfigError, match=message):
        trainer.train()
    with pytest.raises(ConfigError, match=message):
        Trainer(nn.Linear(1, 1), None, nn.MSELoss(), device="cpu", hooks=hooks)


def test_a_method_named_almost_as_an_event_is_a_warning(caplog):
    class Misspelt(BaseHook):
        def on_after_stp(self, trainer):
            raise AssertionError("no event has this name")

        def on_something_else(self):  # of its own, and far from every event
            raise AssertionError("no event has this name")

    trainer = Line(1, device="cpu")
    trainer.given_hooks = [Misspelt()]
    trainer.train()
    warnings = sorted(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warnings[0] == "Misspelt.on_after_stp: no event calls it; did you mean 'on_after_step'?"
    assert warnings[1].startswith("Misspelt.on_something_else: no event calls it; the events are on_before_train")
    assert len(warnings) == 2


def test_a_build_of_the_subclass_acts_around_ours_and_must_call_it():
    class Around(Line):
        def _build(self):
            super()._build()
            self.built = (type(self.model).__name__, self.optimizer.param_groups[0]["lr"])

    class Never(Line):
        def _build(self):
            self.model = nn.Linear(1, 1)

    class Helper(Line):
        given_hooks = []

        def _build(self, width):
            return nn.Linear(width, 1)

        def build_model(self):
            return self._build(1)

    trainer = Around(2, device="cpu")
    trainer.given_hooks = []
    trainer.train()
    assert trainer.built == ("Linear", 0.1)
    with pytest.raises(ConfigError, match=r"Never\._build\(\) did not call super\(\)\._build\(\)"):
        Never(2, device="cpu").train()
    Helper(2, device="cpu").train()


def test_a_run_step_that_nothing_would_call_is_refused_when_the_trainer_is_made():
    class Own(Line):
        def _run_step(self):
            super()._run_step()

    class Helper(Line):
        def _run_step(self):
            return 1

        def forward(self, input):
            self._run_step()
            return super().forward(input)

    with pytest.raises(ConfigError, match=r"Own\._run_step: nothing calls it; override train_step\(group\)"):
        Own(2, device="cpu")
    assert Helper(2, device="cpu").max_steps == 2


def test_a_step_tells_its_retries_by_the_names_of_trainloop_too():
    trainer = Line(1, device="cpu", max_non_finite_grad_retries=1)
    trainer.given_hooks, calls = [], []
    trainer.build_data_loader = lambda: [(torch.ones(2, 1), torch.ones(2, 1))] * 2

    def forward(input):
        calls.append(1)
        return trainer.model(input[0]).sum() * (float("inf") if len(calls) == 1 else 1.0), {}

    trainer.forward = forward
    trainer.train()
    info = trainer.step_info
    assert info["retries"] == info["non_finite_grad_retries"] == info["non_finite_grad_retry_count"] == 1
    with pytest.raises(KeyError, match="non_finite"):
        info["non_finite"]
