"""Limits of a run: time, batches, short trials; a limited run that stops resumes to the bit."""

from __future__ import annotations

import json
import queue
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import astro_trainer_kit
import graph_kit
import spectra_kit
import treadle
from functional_kit import loader, make, same_weights
from treadle import BaseTrainer, CheckpointingHook, ConfigError, Limits, TensorLoader, ValidationHook
from treadle.engine import limits as limits_module
from treadle.engine.limits import as_seconds


class Fit(BaseTrainer):
    """Shuffled batches, dropout and batch norm; counts its forward passes."""

    def __init__(self, *args, data=None, interval=2, **rest):
        super().__init__(*args, device="cpu", progress=False, **rest)
        self._data = data or loader(40, 4, shuffle=True)
        self._interval = interval

    def build_data_loader(self):
        treadle.set_seed(0)
        return self._data

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    def build_optimizer(self):
        return torch.optim.Adam(self.model.parameters(), 0.01)

    def forward(self, input):
        x, y = input
        return nn.functional.mse_loss(self.model(x), y), {}, len(x)

    def build_hooks(self):
        return [] if self.workspace is None else [CheckpointingHook(self._interval)]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values()))


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""
    now = [0.0]
    monkeypatch.setattr(limits_module, "now", lambda: now[0])
    return now


class Tick(treadle.BaseHook):
    """Moves the clock by a second with each step."""

    def __init__(self, clock):
        self.clock = clock

    def on_after_step(self, trainer):
        self.clock[0] += 1


# -- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("01:02:03", 3723), ("1:00:00:00", 86400), ("90s", 90), ("1h 30m", 5400), (timedelta(minutes=2), 120), (7, 7),
     ({"minutes": 1, "seconds": 5}, 65)],
)  # fmt: skip
def test_a_time_has_the_usual_forms(value, seconds):
    assert as_seconds(value) == seconds


@pytest.mark.parametrize("value", ["1:2", "soon", 0, -1, True, float("inf"), {"weeks": "a"}, "10", []])
def test_other_times_are_refused(value):
    with pytest.raises(ConfigError, match=r"max_time=.*HH:MM:SS"):
        Limits(max_time=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("limit_train_batches", 0), ("limit_train_batches", 1.5), ("limit_eval_batches", True), ("overfit_batches", "3"),
     ("fast_dev_run", -1), ("fast_dev_run", 1.5), ("num_sanity_eval_steps", -2)],
)  # fmt: skip
def test_wrong_amounts_are_refused_by_every_face(name, value):
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: value})
    with pytest.raises(ConfigError, match=name):
        Fit(3, **{name: value})
    with pytest.raises(ConfigError, match=f"config.training.{name}"):
        make(**{name: value})


def test_an_unknown_limit_is_named():
    with pytest.raises(ConfigError, match="limits: unknown key 'max_tim'; did you mean 'max_time'"):
        Limits.of({"max_tim": 3})


# -- batches ------------------------------------------------------------------------------------------------------


def rows():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(5))
    return x, x.sum(1, keepdim=True)


class Stream:
    """A loader with a state of its own."""

    def __init__(self):
        self.data, self.at = list(zip(*[part.split(4) for part in rows()])), 0

    def __iter__(self):
        self.at = 0
        while self.at < len(self.data):
            self.at += 1
            yield self.data[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        at = state["at"]
        self.__class__ = _Placed
        self.at = at


class _Placed(Stream):
    def __iter__(self):
        self.__class__ = Stream
        while self.at < len(self.data):
            self.at += 1
            yield self.data[self.at - 1]


LOADERS = {
    "shuffled": lambda: loader(40, 4, shuffle=True),
    "generator": lambda: DataLoader(
        TensorDataset(*rows()), 4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "rows": lambda: TensorLoader(*rows(), batch_size=4, shuffle=True),
    "stream": Stream,
    "list": lambda: list(zip(*[part.split(4) for part in rows()])),
}


@pytest.mark.parametrize(
    ("kind", "cut"), [("shuffled", 4), ("shuffled", 6), *((kind, 5) for kind in LOADERS)], ids="{}".format
)
def test_a_limited_run_that_stops_inside_or_between_epochs_equals_the_straight_one(kind, cut, tmp_path):
    straight = Fit(12, data=LOADERS[kind](), limit_train_batches=5)
    straight.train()
    assert straight.epoch == 2
    assert straight.step == 12
    for steps in (cut, 12):
        stopped = Fit(steps, data=LOADERS[kind](), limit_train_batches=5, workspace=tmp_path, interval=100)
        stopped.train()
    assert stopped.state.source is not None
    assert equal(straight, stopped)


@pytest.mark.slow  # two processes that load batches, four times
def test_a_limited_run_with_workers_equals_the_straight_one(tmp_path):
    def data():
        return DataLoader(TensorDataset(*rows()), 4, shuffle=True, num_workers=1, persistent_workers=True)

    straight = Fit(12, data=data(), limit_train_batches=5)
    straight.train()
    for steps in (7, 12):
        stopped = Fit(steps, data=data(), limit_train_batches=5, workspace=tmp_path)
        stopped.train()
    assert equal(straight, stopped)


def test_the_epoch_of_trainer_ends_at_the_limit_and_so_does_its_evaluation(tmp_path):
    seen = []

    class Counts(treadle.Trainer):
        def _forward_pass(self, inputs):
            seen.append(self.model.training)
            return super()._forward_pass(inputs)

    trainer = make(Counts, limit_train_batches=0.5, limit_eval_batches=2)
    trainer.train(loader(40, 4, shuffle=True), 2, loader(20, 4))
    assert trainer.step == 10
    assert len(trainer.history["epoch"]) == 2
    assert seen.count(True) == 10
    evaluated = seen.count(False)
    assert evaluated in (4, 5)  # and the batch that is tried before step 1
    trainer.evaluate(loader(20, 4))
    assert seen.count(False) == evaluated + 2


def test_a_limit_changes_nothing_but_where_an_epoch_ends():
    limited, short = Fit(5, limit_train_batches=5), Fit(5)
    limited.train()
    short.train()
    assert equal(limited, short)
    assert (limited.epoch, limited.cursor.ended, short.cursor.ended) == (0, True, False)


def test_a_part_of_an_epoch_needs_a_length():
    def batches():
        yield from LOADERS["list"]()

    class Endless:
        def __iter__(self):
            return batches()

    with pytest.raises(ConfigError, match=r"limit_train_batches=0.5: a fraction of an epoch needs a loader"):
        Fit(3, data=Endless(), limit_train_batches=0.5).train()
    with pytest.raises(ConfigError, match="gives no batch out of 10"):
        Fit(3, limit_train_batches=0.01).train()
    trainer = Fit(7, data=Endless(), limit_train_batches=3)
    trainer.train()
    assert trainer.epoch == 2


def test_overfitting_sees_the_same_batches_in_every_epoch_and_resumes_exactly(tmp_path):
    class Sums(Fit):
        def forward(self, input):
            seen.append(float(input[0].sum()))
            return super().forward(input)

    seen = []
    straight = Sums(9, overfit_batches=2)
    straight.train()
    assert seen == seen[:2] * 4 + seen[:1]
    whole = seen
    seen = []
    for steps in (4, 9):
        stopped = Sums(steps, overfit_batches=2, workspace=tmp_path, interval=3)
        stopped.train()
    assert seen == whole
    assert equal(straight, stopped)


# -- time ---------------------------------------------------------------------------------------------------------


def test_max_time_ends_a_call_of_the_step_face_and_the_next_process_resumes_exactly(tmp_path, clock):
    straight = Fit(12)
    straight.train()
    first = Fit(12, max_time="00:00:05", workspace=tmp_path, interval=100, hooks=[Tick(clock)])
    first.train()
    assert first.step == 6  # the sixth is the first that begins after the time, and is not broken off
    lines = [json.loads(line) for line in (tmp_path / "sessions.jsonl").read_text().splitlines()]
    assert lines[0]["limits"] == {"max_time": 5.0}
    assert (lines[-1]["event"], lines[-1]["status"], lines[-1]["reason"]) == ("end", "stopped", "max_time")
    second = Fit(12, workspace=tmp_path)
    second.train()
    assert second.step == 12
    assert equal(straight, second)


def test_the_next_call_of_the_same_trainer_has_the_time_again(clock):
    straight, trainer = Fit(12), Fit(12, max_time=5, hooks=[Tick(clock)])
    straight.train()
    trainer.train()
    trainer.train()
    assert trainer.step == 12
    assert equal(straight, trainer)


@pytest.mark.parametrize("own_epoch", [False, True], ids=["", "overridden train_epoch"])
def test_max_time_is_of_the_call_in_trainer(tmp_path, clock, own_epoch):
    class Own(treadle.Trainer):
        def train_epoch(self, *args, **kwargs):
            return super().train_epoch(*args, **kwargs)

    cls = Own if own_epoch else treadle.Trainer

    def train(**rest):
        trainer = make(cls, hooks=[Tick(clock)], **rest)
        trainer.train(loader(40, 4, shuffle=True), 3, loader(8, 4), save_dir=tmp_path / "run", resume_from="auto")
        return trainer

    straight = make(cls)
    straight.train(loader(40, 4, shuffle=True), 3, loader(8, 4))
    stopped = train(max_time=12)
    assert stopped.step == 13
    assert stopped.epoch == 1
    resumed = train()
    assert resumed.step == 30
    assert same_weights(straight, resumed)
    assert resumed.history == straight.history


def test_a_run_that_time_ends_says_so(clock, caplog):
    caplog.set_level("INFO", "treadle")
    Fit(12, max_time=3, hooks=[Tick(clock)]).train()
    assert "stopped before step 12, as max_time of 3 s has passed" in caplog.text


# -- trials -------------------------------------------------------------------------------------------------------


def test_a_fast_dev_run_of_trainer_trains_and_evaluates_one_batch_and_writes_nothing(tmp_path, caplog):
    caplog.set_level("INFO", "treadle")
    where = tmp_path / "run"
    hooks = [CheckpointingHook(1, path=tmp_path / "hook"), treadle.JsonlHook(tmp_path / "log.jsonl")]
    trainer = make(fast_dev_run=True, hooks=hooks)
    history = trainer.train(loader(40, 4), 30, loader(8, 4), save_dir=where, resume_from="auto")
    assert (trainer.step, history["epoch"]) == (1, [1])
    assert list(tmp_path.iterdir()) == []
    assert "fast_dev_run=True: a short trial; nothing is written or resumed, without " in caplog.text


def test_a_fast_dev_run_ends_where_epochs_go_through_an_own_train_epoch():
    class Own(treadle.Trainer):
        def train_epoch(self, *args, **kwargs):
            return super().train_epoch(*args, **kwargs)

    trainer = make(Own, fast_dev_run=2)
    trainer.train(loader(40, 4), 30, loader(8, 4))
    assert (trainer.step, trainer.epoch) == (2, 1)


def graphs(folder, epochs, limits):
    trainer, data = graph_kit.make(folder, limits=limits), graph_kit.loader(graph_kit.graphs())
    trainer.fit(data, data, epochs=epochs, resume_from="auto")
    return trainer


def astro(folder, epochs, limits):
    trainer = astro_trainer_kit.make(folder, limits=limits)
    trainer.train(epochs, astro_trainer_kit.loader(), resume_from="auto")
    return trainer


def spectra(folder, epochs, limits):
    trainer = spectra_kit.make(folder, limits=limits)
    trainer.fit(epochs)
    return trainer


@pytest.mark.parametrize("train", [graphs, astro, spectra])
def test_the_trainers_of_packs_have_limits_too(train, tmp_path):
    trial = train(tmp_path / "trial", 9, {"fast_dev_run": True})
    assert (trial.step, trial.epoch) == (1, 1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    limits = {"limit_train_batches": 2, "limit_eval_batches": 1}
    straight = train(tmp_path / "straight", 3, limits)
    for epochs in (1, 3):
        stopped = train(tmp_path / "stopped", epochs, limits)
    assert straight.step == stopped.step == 6
    assert same_weights(straight, stopped)


def test_a_fast_dev_run_of_the_step_face_makes_so_many_steps_and_validates(tmp_path):
    hook = ValidationHook(loader(20, 4))
    trainer = Fit(100, fast_dev_run=3, workspace=tmp_path / "run", hooks=[hook])
    trainer.train()
    assert trainer.step == 3
    assert len(hook.history) == 1
    assert list(tmp_path.iterdir()) == []


# -- sanity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, -1])
def test_a_sanity_evaluation_leaves_the_bits_of_the_run(steps, caplog):
    caplog.set_level("INFO", "treadle")

    def run(**rest):
        treadle.set_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        trainer = make(model=model, ema_decay=0.9, **rest)
        trainer.train(loader(40, 4, shuffle=True), 2, loader(20, 4, shuffle=True))
        return trainer

    plain, tried = run(), run(num_sanity_eval_steps=steps)
    assert "evaluated before step 1: " in caplog.text
    assert same_weights(plain, tried)
    assert plain.history == tried.history


def test_a_sanity_evaluation_of_a_validation_hook_leaves_the_bits_of_the_run():
    notes = queue.SimpleQueue()  # of a type that no trial puts back

    class Seen(Fit):
        def forward(self, input):
            notes.put((self.step, self.model.training))
            return super().forward(input)

    plain = Fit(5, hooks=[ValidationHook(loader(20, 4), interval=5)])
    plain.train()
    hook = ValidationHook(loader(20, 4, shuffle=True), interval=5)
    tried = Seen(5, hooks=[hook], num_sanity_eval_steps=2)
    tried.train()
    # One batch of the trial that every run has, two of the sanity evaluation, the first step.
    assert [notes.get() for _ in range(4)] == [(0, False), (0, False), (0, False), (1, True)]
    assert len(hook.history) == 1
    assert equal(plain, tried)


def test_a_broken_evaluation_is_found_before_step_1():
    class Broken(treadle.Trainer):
        def evaluate(self, dataloader):
            raise RuntimeError("broken")

    trainer = make(Broken, num_sanity_eval_steps=1)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(loader(), 1, loader())
    assert trainer.step == 0


def test_a_list_is_entered_in_the_middle_without_a_warning(tmp_path, caplog):
    caplog.set_level("WARNING", "treadle")
    for steps in (4, 12):
        Fit(steps, data=LOADERS["list"](), workspace=tmp_path).train()
    assert caplog.messages == []
