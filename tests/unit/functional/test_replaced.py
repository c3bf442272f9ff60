"""A subclass that writes its own step or its own loop, as the document of qurious advises."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

import treadle
from functional_kit import loader, make, net, same_weights
from treadle import BaseHook, CheckpointingHook
from treadle.checkpoint import load_checkpoint
from treadle.errors import ConfigError


class Step(treadle.Trainer):
    """Mixed precision in a step of its own, word for word as a user of qurious writes it."""

    def train_step(self, batch):
        self.optimizer.zero_grad()
        x, y = self._prepare_batch(batch)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self._compute_loss(self._forward_pass(x), y)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item(), "rows": len(x)}


class Gathers(treadle.Trainer):
    """Accumulates two batches in a step of its own."""

    calls = 0

    def train_step(self, batch):
        x, y = self._prepare_batch(batch)
        loss = self._compute_loss(self._forward_pass(x), y)
        (loss / 2).backward()
        self.calls += 1
        if self.calls % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"train_loss": loss}


class Loop(treadle.Trainer):
    """A loop of its own, in the two forms of the package: without the argument ``epoch``."""

    def train_epoch(self, train_dataloader, eval_dataloader=None):
        self.model.train()
        total = 0.0
        for x, y in train_dataloader:
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        numbers = {"train_loss": total / len(train_dataloader)}
        return {**numbers, "eval_loss": self.evaluate(eval_dataloader)["loss"]} if eval_dataloader else numbers


class LoopOverSteps(treadle.Trainer):
    def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
        losses = [self.train_step(batch)["loss"] for batch in train_dataloader]
        return {"train_loss": sum(losses) / len(losses), "index": epoch}


def by_hand(epochs, *, bf16):
    """The weights that a plain loop gives."""
    treadle.set_seed(0)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for x, y in loader():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                prediction = model(x)
            nn.functional.mse_loss(prediction.float(), y).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize(("cls", "bf16"), [(Step, True), (Loop, False)])
def test_what_replaces_a_step_or_an_epoch_trains_as_its_loop_by_hand(cls, bf16, caplog):
    trainer = make(cls)
    assert len([record for record in caplog.records if "replaces this trainer's" in record.getMessage()]) == 1
    trainer.train(loader(), 2)
    assert (trainer.step, trainer.applied_steps, trainer.micro_steps, trainer.epoch) == (6, 6, 6, 2)
    expected = by_hand(2, bf16=bf16).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in trainer.model.state_dict().items())
    assert len(caplog.records) == 1


@pytest.mark.parametrize("cls", [Step, Loop, LoopOverSteps])
def test_a_run_of_them_resumes_to_the_bit(cls, tmp_path):
    def run(epochs, folder, **rest):
        trainer = make(cls, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        return trainer, trainer.train(
            loader(shuffle=True), epochs, loader(), save_dir=tmp_path / folder, best_model_metric="train_loss", **rest
        )

    straight, history = run(4, "straight")
    run(2, "parts")
    resumed, again = run(4, "parts", resume_from="auto")
    assert same_weights(straight, resumed)
    assert history == again
    assert history["lr"] == [0.01, 0.005, 0.0025, 0.00125]
    assert resumed.step == 12


class LoopWithEvaluation(treadle.Trainer):
    """Fails on an epoch of no batch, as a loop by hand does; the mean is by the length of the loader."""

    def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
        total, rows = 0.0, 0
        for batch in train_dataloader:
            total += self.train_step(batch)["loss"]
            rows += len(batch[0])
        mean = {"train_loss": total / len(train_dataloader), "batches": rows / rows}
        return {**mean, "eval_loss": self.evaluate(eval_dataloader)["loss"]}


@pytest.mark.parametrize("stop", [4, 5, 6])
def test_an_epoch_of_ones_own_that_was_stopped_inside_or_after_its_last_batch_goes_on(stop, tmp_path, caplog):
    class Signals(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step == stop:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(folder, *hooks):
        saving = CheckpointingHook(100, path=tmp_path / folder, exit_signals=[signal.SIGTERM])
        trainer = make(LoopWithEvaluation, hooks=[saving, *hooks])
        return trainer, trainer.train(loader(24, shuffle=True), 3, loader(), best_model_metric="train_loss")

    straight, history = run("straight")
    caplog.clear()
    with pytest.raises(SystemExit):
        run("parts", Signals())
    resumed, again = run("parts")
    assert resumed.step == 9
    assert same_weights(straight, resumed)
    assert again["eval_loss"] == history["eval_loss"]
    assert again["train_loss"] == pytest.approx(history["train_loss"], rel=1e-6)
    messages = [record.getMessage() for record in caplog.records]
    assert any("train_epoch" in text and f"{stop - 3} batches" in text for text in messages)


class Counted(torch.utils.data.Sampler):
    """An order drawn from the epochs that have begun."""

    begun = 0

    def __iter__(self):
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.begun)).tolist())

    def __len__(self):
        return 24


class Begins:
    """Moves whatever an epoch may move before its first step: numbers, rates, weights, a meter, a random number."""

    def begin(self, batches):
        batches.sampler.begun += 1
        self.epochs_begun = getattr(self, "epochs_begun", 0) + 1
        self.total = 0.0
        self.meter = Meter()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
        with torch.no_grad():
            self.model[0].weight.add_(0.1 * torch.randn(()) * self.epochs_begun)

    def train_step(self, batch):
        numbers = super().train_step(batch)
        self.total += numbers["loss"]
        self.meter.values.append(numbers["loss"])
        return numbers


class Meter:
    def __init__(self):
        self.values = []


class BeginsAroundTheLoop(Begins, treadle.Trainer):
    def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
        self.begin(train_dataloader)
        return {**super().train_epoch(train_dataloader, eval_dataloader, epoch), "total": self.total}


class BeginsInPlaceOfTheLoop(Begins, treadle.Trainer):
    def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
        self.begin(train_dataloader)
        for batch in train_dataloader:
            self.train_step(batch)
        return {"train_loss": self.total / 3, "total": self.total}


@pytest.mark.parametrize("cls", [BeginsAroundTheLoop, BeginsInPlaceOfTheLoop])
@pytest.mark.parametrize("stop", [1, 3, 4, 5])
def test_what_an_epoch_of_ones_own_does_before_its_first_step_is_not_done_twice(cls, stop, tmp_path):
    class Signals(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step == stop and stop != 3:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_before_step(self, trainer):
            if trainer.step == stop + 1 == 4:  # the first step of an epoch whose beginning no checkpoint holds
                raise KeyboardInterrupt

    def run(folder, *hooks):
        saving = CheckpointingHook(100, path=tmp_path / folder, exit_signals=[signal.SIGTERM])
        trainer = make(cls, hooks=[saving, *hooks])
        counted = torch.utils.data.DataLoader(loader(24).dataset, 8, sampler=Counted())
        folder = tmp_path / f"{folder}.epochs"
        return trainer, trainer.train(counted, 3, save_dir=folder, best_model_metric="train_loss", resume_from="auto")

    straight, history = run("straight")
    with pytest.raises(KeyboardInterrupt if stop == 3 else SystemExit):
        run("parts", Signals())
    resumed, again = run("parts")
    assert same_weights(straight, resumed)
    assert (resumed.epochs_begun, again["total"], again["lr"]) == (3, history["total"], history["lr"])
    assert resumed.meter.values == straight.meter.values


def test_a_step_without_a_move_of_the_optimizer_is_not_applied_and_keeps_its_gradients():
    trainer = make(Gathers)
    trainer.train(loader(32), 2)
    assert (trainer.step, trainer.applied_steps) == (8, 4)
    treadle.set_seed(0)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        batches = list(loader(32))
        for pair in (batches[:2], batches[2:]):
            optimizer.zero_grad()
            for x, y in pair:
                (nn.functional.mse_loss(model(x), y) / 2).backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True))


def test_the_loss_of_such_a_step_weighs_samples_and_other_numbers_are_records():
    class Told(treadle.Trainer):
        def train_step(self, batch):
            self.optimizer.step()
            return {"loss": {8: 1.0, 4: 4.0}[len(batch[0])], "tens": 10.0}

    record = make(Told).train(loader(20), 1)
    assert record["train_loss"] == [pytest.approx((8 + 8 + 16) / 20)]
    assert record["train_tens"] == [10.0]


def test_hooks_averages_and_a_schedule_per_step_move_with_it_but_not_twice():
    class Counts(BaseHook):
        steps = 0

        def on_after_step(self, trainer):
            self.steps += 1

    class Moves(Step):
        def train_step(self, batch):
            self.optimizer.step()
            self.scheduler.step()
            return {"loss": 1.0}

    class Leaves(Step):
        def train_step(self, batch):
            self.optimizer.step()
            return {"loss": 1.0}

    for cls in (Moves, Leaves):
        hook = Counts()
        trainer = make(
            cls, lr=1.0, hooks=[hook], scheduler_step_per_batch=True, ema_decay=0.5,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        )  # fmt: skip
        record = trainer.train(loader(), 1)
        assert hook.steps == 3
        assert trainer.optimizer.param_groups[0]["lr"] == 0.125
        assert record["lr"] == [0.25]


def test_an_epoch_of_ones_own_steps_its_schedule_once(tmp_path):
    class Moves(Loop):
        def train_epoch(self, train_dataloader, eval_dataloader=None):
            numbers = super().train_epoch(train_dataloader, eval_dataloader)
            self.scheduler.step()
            return numbers

    for cls in (Loop, Moves):
        trainer = make(cls, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1))
        trainer.train(loader(), 2)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_an_epoch_of_ones_own_obeys_best_files_early_stopping_and_callbacks(tmp_path):
    class Told(Loop):
        def train_epoch(self, train_dataloader, eval_dataloader=None):
            numbers = super().train_epoch(train_dataloader)
            return {**numbers, "eval_accuracy": values.pop(0)}

    values, seen = [0.1, 0.3, 0.2, 0.2, 0.9], []
    history = make(Told).train(
        loader(), 9, save_dir=tmp_path, best_model_metric="accuracy", early_stopping_patience=2,
        callbacks=[lambda trainer, epoch, metrics: seen.append((epoch, trainer.epoch, metrics["eval_accuracy"]))],
    )  # fmt: skip
    assert history["epoch"] == [1, 2, 3, 4]
    assert seen == [(0, 1, 0.1), (1, 2, 0.3), (2, 3, 0.2), (3, 4, 0.2)]
    assert load_checkpoint(tmp_path / "best_model.pt")["epoch"] == 2


@pytest.mark.parametrize("cls", [Step, Loop])
def test_settings_that_cannot_act_in_it_are_refused_or_named(cls, caplog):
    with pytest.raises(ConfigError, match="mixed_precision"):
        make(cls, mixed_precision="bf16")
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        make(cls, gradient_accumulation_steps=2).train(loader(), 1)
    if cls is Step:
        make(cls, max_grad_norm=1.0)
        assert "max_grad_norm=1.0" in caplog.text


@pytest.mark.parametrize("result", [None, {}, {"accuracy": 1.0}])
def test_a_step_that_returns_no_loss_is_refused(result):
    class Own(treadle.Trainer):
        def train_step(self, batch):
            return result

    with pytest.raises(ConfigError, match="train_step: the override returned"):
        make(Own).train(loader(), 1)


def test_an_epoch_that_reads_nothing_or_returns_nothing_is_refused():
    class Nothing(treadle.Trainer):
        def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
            return {"train_loss": 0.0}

    class Silent(treadle.Trainer):
        def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
            list(train_dataloader)

    with pytest.raises(ConfigError, match="read no batch"):
        make(Nothing).train(loader(), 1)
    with pytest.raises(ConfigError, match="NoneType"):
        make(Silent).train(loader(), 1)


def test_a_function_that_is_set_on_the_object_acts():
    trainer = make()
    trainer.evaluate = lambda batches: {"loss": 2.0}
    trainer.train_epoch = lambda batches, evaluation, epoch: {"train_loss": float(len(list(batches))), **evaluation[0]}
    history = trainer.train(loader(), 2, [{"eval_loss": 4.0}])
    assert (history["train_loss"], history["eval_loss"]) == ([3.0, 3.0], [4.0, 4.0])


def test_limits_of_batches_and_trials_hold_in_it(caplog):
    class Counts(Loop):
        def train_epoch(self, train_dataloader, eval_dataloader=None):
            return {"train_loss": float(len(list(train_dataloader)))}

    assert make(Counts, limit_train_batches=2).train(loader(), 2)["train_loss"] == [2.0, 2.0]
    assert make(Counts, fast_dev_run=1).train(loader(), 5)["train_loss"] == [1.0]
    make(Loop, grad_clip_value=0.5)
    assert "grad_clip_value=0.5" in caplog.text


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation as its public form has it: two steps, of which the second calls the inner one."""

    def __init__(self, params, **settings):
        super().__init__(params, settings)
        self.inner = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def first_step(self):
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            self.state[weight]["ascent"] = 0.05 * weight.grad
            weight.add_(self.state[weight]["ascent"])

    @torch.no_grad()
    def second_step(self):
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            weight.sub_(self.state[weight]["ascent"])
        self.inner.step()

    def step(self, closure=None):
        raise NotImplementedError


def sharp(trainer, batch):
    x, y = trainer._prepare_batch(batch)
    for move in (trainer.optimizer.first_step, trainer.optimizer.second_step):
        trainer.optimizer.zero_grad()
        loss = trainer._compute_loss(trainer._forward_pass(x), y)
        loss.backward()
        move()
    return {"loss": loss.item()}


class SharpStep(treadle.Trainer):
    def train_step(self, batch):
        return sharp(self, batch)


class SharpLoop(treadle.Trainer):
    def train_epoch(self, train_dataloader, eval_dataloader=None):
        for batch in train_dataloader:
            loss = sharp(self, batch)["loss"]
            self.scheduler.step()
        return {"train_loss": loss}


class ByHand(treadle.Trainer):
    def train_step(self, batch):
        x, y = self._prepare_batch(batch)
        loss = self._compute_loss(self._forward_pass(x), y)
        self.model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.sub_(0.1 * weight.grad)
        return {"loss": loss.item()}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch's, of the loop's own scheduler.step()
@pytest.mark.parametrize("cls", [SharpStep, SharpLoop, ByHand])
def test_steps_that_move_the_weights_by_another_way_are_applied(cls, caplog):
    model = net()
    optimizer = Sam(model.parameters(), lr=0.1) if cls is not ByHand else torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    config = {"training": {"scheduler_step_per_batch": True}}
    trainer = cls(model, optimizer, nn.MSELoss(), config, "cpu", schedule)
    trainer.train(loader(), 2)
    assert (trainer.step, trainer._engine.progress.applied_steps) == (6, 6)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
    assert "no step changed the weights" not in caplog.text


@pytest.mark.parametrize("cls", [Step, Loop, LoopOverSteps])
def test_a_batch_of_one_in_a_batch_norm_layer_is_named_in_them_too(cls):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with pytest.raises(ConfigError, match=r"batch 3 of epoch 1 \(step 3\) has one sample, but 1 \(BatchNorm1d\)"):
        make(cls, model=model).train(loader(17), 1)
