"""Every method that a subclass may override takes effect, and breaks no rule of the loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import treadle
from functional_kit import constant, line, loader, make, same_weights, scalar
from helpers import RUN_FILES, differences
from treadle import ConfigError
from treadle.checkpoint import load_checkpoint


def test_the_protected_methods_are_used_in_training_and_in_evaluation():
    used = []

    class Own(treadle.Trainer):
        def _prepare_batch(self, batch):
            used.append("prepare")
            return super()._prepare_batch((batch["rows"], batch["sums"]))

        def _forward_pass(self, inputs):
            used.append("forward")
            return super()._forward_pass(inputs)

        def _compute_loss(self, outputs, targets):
            used.append("loss")
            return super()._compute_loss(outputs, targets) * 2

        def _loss_weight(self, inputs, outputs, targets):
            used.append("weight")
            return 1.0

    data = [{"rows": x, "sums": y} for x, y in loader()]
    history = make(Own).train(data, 1, data)
    # Of three batches each in training and evaluation. The trial before step 1 puts back what it appended to the list.
    assert used == ["prepare", "forward", "loss", "weight"] * 6
    plain = make()
    means = [plain.eval_step(batch)["loss"] for batch in loader()]
    assert make(Own).evaluate(data)["loss"] == pytest.approx(2 * sum(means) / 3)  # each batch weighs the same now
    assert history["train_loss"][0] > 0


def test_an_override_that_only_calls_super_changes_no_bit():
    class Own(treadle.Trainer):
        def train_step(self, batch):
            return super().train_step(batch)

        def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
            return super().train_epoch(train_dataloader, eval_dataloader, epoch)

        def evaluate(self, dataloader):
            return super().evaluate(dataloader)

        def eval_step(self, batch):
            return super().eval_step(batch)

        def _save_checkpoint(self, path, epoch, metric_value=None):
            super()._save_checkpoint(path, epoch, metric_value)

    trainers = [make(cls, ema_decay=0.5, max_grad_norm=0.5) for cls in (treadle.Trainer,)]
    histories = [trainers[0].train(loader(shuffle=True), 3, loader(seed=6))]
    trainers.append(make(Own, ema_decay=0.5, max_grad_norm=0.5))
    histories.append(trainers[1].train(loader(shuffle=True), 3, loader(seed=6)))
    assert same_weights(*trainers)
    assert histories[0]["train_loss"] == histories[1]["train_loss"]
    assert histories[0]["eval_loss"] == pytest.approx(histories[1]["eval_loss"])
    assert trainers[0].step == trainers[1].step


def test_what_an_overridden_train_step_adds_is_averaged_over_the_epoch():
    class Own(treadle.Trainer):
        def train_step(self, batch):
            numbers = super().train_step(batch)
            seen.append(numbers)
            return {**numbers, "rows": len(batch[0])}

    seen = []
    history = make(Own).train(loader(), 2)
    assert [set(numbers) for numbers in seen] == [{"loss", "lr", "grad_norm"}] * 6
    assert history["train_rows"] == pytest.approx([(8 * 8 + 8 * 8 + 4 * 4) / 20] * 2)


def test_a_train_step_may_hand_on_another_batch_and_works_on_its_own():
    class Doubles(treadle.Trainer):
        def train_step(self, batch):
            return super().train_step((2 * batch[0], batch[1]))

    doubled = make(Doubles, model=line())
    doubled.train(loader(), 1)
    plain = make(model=line())
    plain.train([(2 * x, y) for x, y in loader()], 1)
    assert same_weights(doubled, plain)
    batch = next(iter(loader()))
    assert doubled.train_step(batch) == plain.train_step((2 * batch[0], batch[1]))
    assert doubled.step == 4


class Sometimes(treadle.Trainer):
    def train_step(self, batch):
        return super().train_step(batch) if self.step > 1 else {"loss": 0.0}


class Twice(treadle.Trainer):
    def train_step(self, batch):
        super().train_step(batch)
        return super().train_step(batch)


class Silent(treadle.Trainer):
    def train_step(self, batch):
        super().train_step(batch)


@pytest.mark.parametrize(
    ("cls", "word", "steps"), [(Sometimes, "did not call", 0), (Twice, "a second time", 1), (Silent, "NoneType", 1)]
)
def test_a_train_step_that_neither_adds_to_the_step_nor_replaces_it_is_refused_at_its_first_use(cls, word, steps):
    trainer = make(cls)
    with pytest.raises(ConfigError, match=word):
        trainer.train(loader(), 1)
    assert trainer.step == 1
    assert trainer.applied_steps == steps


def test_a_train_step_of_ones_own_cannot_accumulate():
    class Own(treadle.Trainer):
        def train_step(self, batch):
            return super().train_step(batch)

    trainer = make(Own, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=2"):
        trainer.train(loader(), 1)
    assert trainer.step == 0


def test_a_refused_step_is_retried_through_the_override():
    class Own(treadle.Trainer):
        def train_step(self, batch):
            calls.append(len(calls))
            return super().train_step(batch * float("nan") if len(calls) == 1 else batch)

        def _compute_loss(self, outputs, targets):
            return outputs.mean()

    calls = []
    trainer = scalar(Own, lr=1.0, max_non_finite_grad_retries=1)
    trainer.train([constant(1), constant(2), constant(3)], 1)
    assert (trainer.step, trainer.applied_steps, len(calls)) == (2, 2, 3)
    assert trainer.model.weight.item() == 1 - 2 - 3


def test_what_an_overridden_train_epoch_adds_is_in_the_record_the_files_and_the_callbacks(tmp_path):
    class Own(treadle.Trainer):
        def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
            numbers = super().train_epoch(train_dataloader, eval_dataloader, epoch)
            return {**numbers, "ten_times": 10 * epoch}

    seen = []
    history = make(Own).train(
        loader(), 3, loader(), save_dir=tmp_path, callbacks=[lambda t, e, metrics: seen.append(metrics["ten_times"])]
    )
    assert list(history) == ["epoch", "train_loss", "lr", "eval_loss", "ten_times"]
    assert history["ten_times"] == seen == [0.0, 10.0, 20.0]
    assert load_checkpoint(tmp_path / "checkpoint_epoch_3.pt")["history"][-1]["ten_times"] == 20.0
    assert '"ten_times": [0.0, 10.0, 20.0]' in (tmp_path / "history.json").read_text()


def test_an_overridden_train_epoch_may_leave_an_evaluation_out():
    class Own(treadle.Trainer):
        def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
            return super().train_epoch(train_dataloader, eval_dataloader if epoch % 2 else None, epoch)

    history = make(Own).train(loader(), 4, loader(), best_model_metric="train_loss")
    assert [value is None for value in history["eval_loss"]] == [True, False, True, False]


def test_an_overridden_train_epoch_obeys_early_stopping_should_stop_and_resume(tmp_path):
    class Own(treadle.Trainer):
        def _compute_loss(self, outputs, targets):
            return outputs.mean()

        def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
            return super().train_epoch(train_dataloader, eval_dataloader, epoch)

    def stop(trainer, epoch, metrics):
        trainer.should_stop = True

    train = [constant(1)]
    assert scalar(Own).train(train, 9, train, early_stopping_patience=2)["epoch"] == [1, 2, 3]
    assert scalar(Own).train(train, 9, save_dir=tmp_path, callbacks=[stop])["epoch"] == [1]
    assert scalar(Own).train(train, 4, save_dir=tmp_path, resume_from="auto")["epoch"] == [1, 2, 3, 4]
    assert scalar(Own).train(train, 4, save_dir=tmp_path, resume_from="auto")["epoch"] == [1, 2, 3, 4]


@pytest.mark.parametrize("calls", [0, 2])
def test_a_train_epoch_that_does_not_call_super_once_is_refused(calls):
    class Own(treadle.Trainer):
        def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
            for _ in range(calls):
                super().train_epoch(train_dataloader, eval_dataloader, epoch)
            return {}

    with pytest.raises(ConfigError, match=f"{calls} times"):
        make(Own).train(loader(), 3)


class Classifies(treadle.Trainer):
    """The evaluation of the seed document, with what it does to the mode and the generators."""

    def evaluate(self, dataloader):
        self.model.eval()
        torch.manual_seed(99)
        np.random.seed(99)
        total, steps = 0.0, 0
        for batch in dataloader:
            total += self.eval_step(batch)["loss"]
            steps += 1
        seen.append(self.model.weight.requires_grad and torch.is_grad_enabled())
        return {"loss": torch.tensor(total / steps), "eval_accuracy": np.float32(0.5)}


seen: list[bool] = []


def test_an_overridden_evaluation_runs_by_the_rules_though_it_sets_the_mode_itself():
    def run(cls, evaluate):
        trainer = make(cls, model=line(), ema_decay=0.5)
        modes = []
        history = trainer.train(
            loader(shuffle=True), 2, loader(5, 3, shuffle=True) if evaluate else None,
            callbacks=[lambda t, e, m: modes.append(t.model.training)],
        )  # fmt: skip
        return trainer, history, modes

    ours, history, modes = run(Classifies, True)
    plain, _, _ = run(treadle.Trainer, False)
    assert same_weights(ours, plain)
    assert modes == [True, True]
    assert not any(seen)
    assert list(history) == ["epoch", "train_loss", "lr", "eval_loss", "eval_accuracy"]
    assert {type(value) for value in history["eval_accuracy"]} == {float}
    assert differences(*[t._engine.state_dict()["rng"] for t in (ours, plain)]) == []


def test_two_overridden_evaluations_of_the_same_weights_agree_to_the_bit():
    class Draws(treadle.Trainer):
        def evaluate(self, dataloader):
            return {"loss": sum(float(x.sum() + torch.rand(1)) for x, _ in dataloader)}

    trainer = make(Draws, lr=0.0)
    history = trainer.train(loader(), 3, loader(shuffle=True))
    assert len(set(history["eval_loss"])) == 1


def test_an_overridden_evaluation_scores_the_average():
    class Reads(treadle.Trainer):
        def evaluate(self, dataloader):
            return {"loss": 1.0, "weight": float(self.model.weight), "score": self.eval_step(constant(1))["loss"]}

        def _compute_loss(self, outputs, targets):
            return outputs.mean()

    trainer = scalar(Reads, lr=1.0, ema_decay=0.5)
    history = trainer.train([constant(1)], 1, [constant(1)])
    assert trainer.model.weight.item() == 0.0
    assert history["eval_weight"] == history["eval_score"] == [0.5]


def test_an_evaluation_that_raises_puts_the_weights_and_modes_back():
    class Fails(treadle.Trainer):
        def evaluate(self, dataloader):
            self.model.eval()
            raise KeyError("mine")

        def _compute_loss(self, outputs, targets):
            return outputs.mean()

    trainer = scalar(Fails, lr=1.0, ema_decay=0.5)
    with pytest.raises(KeyError):
        trainer.train([constant(1)], 1, [constant(1)])
    assert trainer.model.weight.item() == 0.0
    assert trainer.model.training


def test_the_numbers_of_an_overridden_eval_step_are_weighted_as_the_loss_is():
    class Own(treadle.Trainer):
        def eval_step(self, batch):
            inputs, targets = self._prepare_batch(batch)
            outputs = self._forward_pass(inputs)
            loss = self._compute_loss(outputs, targets)
            return {"loss": loss.item(), "rows": len(inputs), "nested": {"mae": (outputs - targets).abs().mean()}}

    found = make(Own).evaluate(loader())
    assert found["loss"] == pytest.approx(make().evaluate(loader())["loss"])
    assert found["rows"] == pytest.approx((8 * 8 + 8 * 8 + 4 * 4) / 20)
    assert found["nested/mae"] > 0
    history = make(Own).train(loader(), 1, loader(), best_model_metric="nested/mae", best_mode="min")
    assert "eval_nested/mae" in history


def test_an_eval_step_that_goes_its_own_way_is_weighted_by_its_batch():
    class Own(treadle.Trainer):
        def eval_step(self, batch):
            return {"loss": float(len(batch[0]))}

    assert make(Own).evaluate(loader())["loss"] == pytest.approx((8 * 8 + 8 * 8 + 4 * 4) / 20)


def test_an_eval_step_without_a_loss_gives_none_and_the_default_metric_then_names_what_there_is():
    class Own(treadle.Trainer):
        def eval_step(self, batch):
            return {"eval_rows": len(batch[0])}

    assert list(make(Own).evaluate(loader())) == ["rows"]
    with pytest.raises(ConfigError, match=r"'eval_loss'.*eval_rows"):
        make(Own).train(loader(), 1, loader())
    history = make(Own).train(loader(), 1, loader(), best_model_metric="rows", best_mode="max")
    assert list(history) == ["epoch", "train_loss", "lr", "eval_rows"]


def test_an_eval_step_of_a_summed_loss_adds_up():
    class Own(treadle.Trainer):
        def eval_step(self, batch):
            return {**super().eval_step(batch), "one": 1.0}

    found = make(Own, loss_fn=nn.MSELoss(reduction="sum")).evaluate(loader())
    assert found["loss"] == pytest.approx(make(loss_fn=nn.MSELoss(reduction="sum")).evaluate(loader())["loss"])
    assert found["one"] == 1.0


def test_watching_an_eval_step_leaves_nothing_on_the_trainer():
    class Own(treadle.Trainer):
        def eval_step(self, batch):
            return super().eval_step(batch)

    trainer = make(Own)
    trainer._forward_pass = own = lambda inputs: trainer.model(inputs)
    trainer.evaluate(loader())
    assert vars(trainer)["_forward_pass"] is own
    assert "_prepare_batch" not in vars(trainer)


def test_one_name_with_the_prefix_and_without_is_refused():
    class Both(treadle.Trainer):
        def evaluate(self, dataloader):
            return {"loss": 1.0, "eval_loss": 2.0}

    with pytest.raises(ConfigError, match="become one key"):
        make(Both).train(loader(), 1, loader())


def test_a_result_that_is_no_number_is_refused_by_name():
    class Texts(treadle.Trainer):
        def evaluate(self, dataloader):
            return {"loss": 1.0, "note": "good"}

    with pytest.raises(ConfigError, match="'note'"):
        make(Texts).train(loader(), 1, loader())


@pytest.mark.parametrize("method", ["evaluate", "eval_step"])
def test_an_evaluation_that_forgets_its_return_is_refused_by_name(method):
    forgetful = type("Forgetful", (treadle.Trainer,), {method: lambda self, batches: None})
    with pytest.raises(ConfigError, match=f"^{method}: the override returned a NoneType"):
        make(forgetful).train(loader(), 1, loader())


def test_every_file_goes_through_an_overridden_save(tmp_path):
    class Own(treadle.Trainer):
        def _save_checkpoint(self, path, epoch, metric_value=None):
            saved.append((path.name, epoch, metric_value))
            super()._save_checkpoint(tmp_path / "elsewhere" / path.name, epoch, metric_value)

    saved = []
    history = make(Own).train(loader(), 2, save_dir=tmp_path / "run")
    best = history["train_loss"]
    assert [(name, epoch) for name, epoch, _ in saved] == [
        ("best_model.pt", 1), ("checkpoint_epoch_1.pt", 1), ("best_model.pt", 2), ("checkpoint_epoch_2.pt", 2),
    ]  # fmt: skip
    assert saved[0][2] == best[0]
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name not in RUN_FILES) == ["history.json"]
    assert len(list((tmp_path / "elsewhere").iterdir())) == 3
