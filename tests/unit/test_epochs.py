from __future__ import annotations

import math

import pytest
import torch

from helpers import Slopes, differences, scalar_engine, through_a_file
from treadle import BestRule, EpochTrainer
from treadle.errors import ConfigError, DataExhaustedError
from treadle.hooks import EmaHook


class Values(Slopes):
    """Evaluations give the next of a list of losses, whatever the weights are."""

    def __init__(self, values):
        super().__init__()
        self.values = list(values)

    def step(self, model, batch, totals=None, generator=None):
        output = super().step(model, batch)
        if model.training:
            return output
        from treadle import StepOutput

        return StepOutput(output.loss * 0 + self.values.pop(0), {"acc": 0.5})


def trainer_of(values=(), best=None, **kwargs):
    engine = scalar_engine(task=Values(values), **kwargs)
    return EpochTrainer(engine, best=best)


def test_a_loader_without_batches_is_refused_unless_another_rank_had_some(monkeypatch):
    trainer = trainer_of()
    with pytest.raises(ConfigError, match="val_loader: it yielded no batch"):
        trainer.evaluate([])
    monkeypatch.setattr("treadle.engine.evaluation.distributed.agree", lambda count: count + 1)
    assert math.isnan(trainer.evaluate([])["loss"])


def test_a_record_per_epoch_starts_at_one_and_holds_both_losses_and_the_rate():
    trainer = trainer_of([3.0, 2.0])
    history = trainer.fit([1.0, 1.0], [0.0], 2)
    assert [(r["epoch"], r["val_loss"], r["val_acc"], r["lr"]) for r in history] == [
        (1, 3.0, 0.5, 1.0),
        (2, 2.0, 0.5, 1.0),
    ]
    assert [r["train_loss"] for r in history] == [-0.5, -2.5]
    assert trainer.metrics == {"loss": 2.0, "acc": 0.5}


def test_a_finished_run_returns_the_stored_history():
    trainer = trainer_of([3.0, 2.0])
    first = trainer.fit([1.0], [0.0], 2)
    assert trainer.fit([1.0], [0.0], 2) == first
    assert trainer.fit([1.0], [0.0], 1) == first
    assert trainer.engine.step == 2


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("cut", [None, 2, 3])
def test_the_rate_of_a_record_is_that_of_the_last_applied_step(cut, rate):
    def fit(epochs, state=None, stop=None):
        engine = scalar_engine(lr=rate if isinstance(rate, float) else rate.clone())
        engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
        trainer = EpochTrainer(engine)
        if state is not None:
            engine.load_state_dict(state)
        if stop is not None:
            engine.run([1.0, 1.0, None], max_steps=stop)
        else:
            trainer.fit([1.0, 1.0, None], None, epochs)
        return engine, trainer

    state = None if cut is None else through_a_file(fit(1, stop=cut)[0].state_dict())
    engine, trainer = fit(1, state)
    assert trainer.history[0]["lr"] == 0.5
    assert engine.optimizer.param_groups[0]["lr"] == 0.25, "what the third step would have used"
    trainer.fit([None], None, 2)
    assert trainer.history[1]["lr"] == 0.25, "no step of the epoch was applied"


@pytest.mark.parametrize("cut", range(1, 6))
def test_early_stop_comes_at_the_same_epoch_after_a_resume(cut):
    values = [1.0] * 20
    straight = trainer_of(values, BestRule("val_loss", patience=5))
    straight.fit([1.0], [0.0], 20)
    assert straight.engine.epoch == 6
    first = trainer_of(values, BestRule("val_loss", patience=5))
    first.fit([1.0], [0.0], cut)
    resumed = trainer_of(values, BestRule("val_loss", patience=5))
    resumed.engine.load_state_dict(through_a_file(first.engine.state_dict()))
    resumed.fit([1.0], [0.0], 20)
    assert resumed.engine.epoch == 6
    assert differences(resumed.engine.state_dict(), straight.engine.state_dict()) == []
    resumed.fit([1.0], [0.0], 30)
    assert resumed.engine.epoch == 6, "a stopped run is a finished one"


@pytest.mark.parametrize(("metric", "sign"), [("val_loss", 1), ("val_acc", -1)])
def test_a_nan_does_not_stay_best(metric, sign):
    class Bad(Values):
        def step(self, model, batch, totals=None, generator=None):
            from treadle import StepOutput

            output = super().step(model, batch)
            return output if model.training else StepOutput(output.loss, {"acc": sign * float(output.loss)})

    engine = scalar_engine(task=Bad([math.nan, 3.0, 2.0, 1.0]))
    rule = BestRule(metric)
    EpochTrainer(engine, best=rule).fit([1.0], [0.0], 4)
    assert (rule.best, rule.best_epoch) == (sign * 1.0, 4)


def test_a_metric_that_is_not_in_the_record_is_refused_with_those_that_are():
    trainer = trainer_of([1.0], BestRule("val_f1"))
    with pytest.raises(ConfigError, match=r"val_f1.*val_loss"):
        trainer.fit([1.0], [0.0], 1)


def test_the_best_metric_of_a_checkpoint_is_that_of_the_rule():
    trainer = trainer_of([2.0, 1.0, 3.0], BestRule("val_loss"))
    trainer.fit([1.0], [0.0], 3)
    state = trainer.engine.state_dict()
    assert (state["best_metric"], state["best_epoch"], state["epoch"], len(state["history"])) == (1.0, 2, 3, 3)


def test_callbacks_see_the_record_of_their_epoch_after_it_was_counted():
    trainer = trainer_of([2.0, 1.0])
    seen = []
    trainer.fit([1.0], [0.0], 2, after_epoch=lambda record: seen.append((record["epoch"], trainer.engine.epoch)))
    assert seen == [(1, 1), (2, 2)]


def test_one_epoch_can_be_trained_by_hand():
    trainer = trainer_of(accumulation_steps=2)
    assert trainer.train_epoch([1.0, 1.0, 1.0])["loss"] == pytest.approx(-1 / 3)
    assert (trainer.engine.epoch, trainer.engine.step, trainer.history) == (1, 2, [])
    with pytest.raises(DataExhaustedError):
        trainer.train_epoch([])


def test_the_scored_weights_are_in_the_model_only_inside_the_block():
    trainer = trainer_of(hooks=[EmaHook(0.5)])
    trainer.train_epoch([2.0])
    with trainer.scored_weights():
        assert trainer.engine.model.weight.item() == -1.0
    assert trainer.engine.model.weight.item() == -2.0


def test_an_epoch_of_nothing_but_missing_losses_has_a_mean_of_nan():
    trainer = trainer_of()
    trainer.fit([None, None], None, 1)
    assert math.isnan(trainer.history[0]["train_loss"])
    assert trainer.engine.applied_steps == 0
