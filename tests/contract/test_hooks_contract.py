"""What every hook must do, whichever face it is used with. A new hook joins the list and goes through all of it."""

from __future__ import annotations

import inspect
import json
import logging

import pytest
import torch

import astro_trainer_kit
import functional_kit
import graph_kit
import spectra_kit
from helpers import Scalar, Slopes, differences, through_a_file
from treadle import BaseTrainer, StepOutput, hooks
from treadle.checkpoint import load_checkpoint
from treadle.engine import Engine
from treadle.errors import ConfigError
from treadle.hooks import BaseHook, CheckpointingHook, EmaHook, LoggingHook
from treadle.seed import set_seed

MAKE = {
    "CheckpointingHook": lambda folder: hooks.CheckpointingHook(2, path=folder / "own"),
    "CsvHook": lambda folder: hooks.CsvHook(folder / "m.csv"),
    "CudaMaxMemoryHook": lambda folder: hooks.CudaMaxMemoryHook(),
    "EqualRanksHook": lambda folder: hooks.EqualRanksHook(2),
    "EmaHook": lambda folder: hooks.EmaHook(0.5, name="mine"),
    "HistoryHook": lambda folder: Renamed(folder / "h.json", lambda: [{"epoch": 1, "loss": float("nan")}]),
    "ImageFileLoggerHook": lambda folder: hooks.ImageFileLoggerHook(path=folder / "images"),
    "JsonlHook": lambda folder: hooks.JsonlHook(folder / "m.jsonl"),
    "LoggingHook": lambda folder: hooks.LoggingHook(2),
    "NonFiniteHook": lambda folder: hooks.NonFiniteHook("skip", path=folder / "nonfinite"),
    "ProfilerHook": lambda folder: hooks.ProfilerHook(folder / "profile", wait=0, warmup=1, active=1),
    "ProgressBarHook": lambda folder: hooks.ProgressBarHook(),
    "ProgressHook": lambda folder: hooks.ProgressHook(2, with_records=True),
    "SessionLogHook": lambda folder: hooks.SessionLogHook(folder / "sessions.jsonl"),
    "SignalHook": lambda folder: hooks.SignalHook(lambda: None),
    "StepLogHook": lambda folder: hooks.StepLogHook(folder / "steps.jsonl", interval=2),
    "StuckRankHook": lambda folder: hooks.StuckRankHook(60.0),
    "SwaHook": lambda folder: hooks.SwaHook(2, name="mine"),
    "TensorBoardHook": lambda folder: hooks.TensorBoardHook(folder / "tensorboard"),
    "ThroughputHook": lambda folder: hooks.ThroughputHook(2),
    "ValidationHook": lambda folder: hooks.ValidationHook(
        [3.0], interval=2, eval_step=lambda trainer, batch: (torch.tensor(batch), {}), best=folder / "best.pt"
    ),
}
# These need services or packages of others, or a workspace of their own, and are tested elsewhere.
ELSEWHERE = {
    "MlflowHook", "OptunaPruningHook", "RemoteShardsHook", "RemoteWorkspaceHook", "TrackioHook", "WandbHook",
}  # fmt: skip
NAMES = sorted(MAKE)


class Renamed(hooks.HistoryHook):
    """The spectra trainer has a HistoryHook of its own; a second one needs another key."""

    state_key = "Renamed"


class SecondOfAKind:
    """Makes a second hook of a kind under another key."""

    @staticmethod
    def of(hook):
        kind = type(f"Second{type(hook).__name__}", (type(hook),), {"state_key": "second"})
        second = object.__new__(kind)
        second.__dict__.update(vars(hook))
        return second


class Small(BaseTrainer):
    def __init__(self, max_steps, given, folder):
        super().__init__(max_steps, device="cpu", workspace=folder)
        self.given = given

    def build_data_loader(self):
        return [1.0, 2.0, 4.0]

    def build_model(self):
        return Scalar()

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def build_hooks(self):
        return self.given

    def forward(self, input):
        return StepOutput(self.model(input), {"g": input}, num_samples=1)


class OnEngine:
    def __init__(self, given, folder, task=None):
        model = Scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.engine = Engine(model, optimizer, task or Slopes(), device="cpu", hooks=given)
        self.engine.workspace = folder

    def train(self, steps):
        self.engine.run([1.0, 2.0, 4.0], max_steps=steps)


class OnMini:
    def __init__(self, given, folder):
        self.engine = Small(0, given, folder)

    def train(self, steps):
        self.engine.max_steps = steps
        self.engine.train()


class OnSpectra:
    """One epoch is one step."""

    def __init__(self, given, folder):
        data = spectra_kit.spectra(count=8)
        settings = {"scheduler": False, "val": False, "selection": "last", "resume_from": None}
        self.trainer = spectra_kit.make(folder / "run", data=data, hooks=given, **settings)
        self.engine = self.trainer._engine

    def train(self, steps):
        self.trainer.fit(steps)


class OnFunctional:
    """One epoch is one step."""

    def __init__(self, given, folder):
        self.folder = folder / "run"
        self.trainer = functional_kit.make(hooks=given)
        self.engine = self.trainer._engine

    def train(self, steps):
        self.trainer.train(functional_kit.loader(8), steps, functional_kit.loader(5), save_dir=self.folder)


class OnGraphs:
    """One epoch is one step."""

    def __init__(self, given, folder):
        self.trainer = graph_kit.make(folder / "run", hooks=given)
        self.engine = self.trainer._engine

    def train(self, steps):
        self.trainer.fit(graph_kit.loader(graph_kit.graphs(4)), graph_kit.loader(graph_kit.graphs(3, seed=1)), steps)


class OnAstro:
    """One epoch is one step."""

    def __init__(self, given, folder):
        train = astro_trainer_kit.loader(shuffle=True, batch_size=14)
        self.trainer = astro_trainer_kit.make(folder / "run", train=train, hooks=given, total_steps=9)
        self.engine = self.trainer._engine

    def train(self, steps):
        self.trainer.train(steps, astro_trainer_kit.loader())


FACES = {
    "engine": OnEngine,
    "mini": OnMini,
    "spectra": OnSpectra,
    "functional": OnFunctional,
    "astro": OnAstro,
    "graphs": OnGraphs,
}


def test_every_hook_is_in_the_list():
    exported = {name for name in hooks.__all__ if inspect.isclass(getattr(hooks, name))} - {"BaseHook", "Tracker"}
    assert exported == set(MAKE) | ELSEWHERE


@pytest.mark.parametrize("name", NAMES)
def test_construction_touches_no_file_and_gives_a_hook_with_its_own_key(name, tmp_path):
    hook = MAKE[name](tmp_path)
    assert isinstance(hook, BaseHook)
    assert isinstance(hook.state_key, str)
    assert hook.state_key
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_no_hook_uses_an_event_that_does_not_exist(name):
    events = {attribute for attribute in dir(getattr(hooks, name)) if attribute.startswith("on_")}
    assert events == {*hooks.EVENTS, "on_after_steps"}  # the last is on_after_step of a block of captured steps


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", NAMES)
def test_three_steps_then_saved_and_loaded_and_three_more(name, face, tmp_path):
    plain = FACES[face]([], tmp_path / "plain")
    with_hook = FACES[face]([MAKE[name](tmp_path / "a")], tmp_path / "a")
    for run in (plain, with_hook):
        set_seed(0)
        run.train(3)
    trees = [run.engine.state_dict() for run in (plain, with_hook)]
    for key in ("model", "optimizer", "rng", "data", "epoch", "global_step"):
        assert differences(trees[1][key], trees[0][key]) == [], f"{name} changes {key}"
    trees[1].pop("config")  # names the folder
    saved = through_a_file(trees[1])
    resumed = FACES[face]([MAKE[name](tmp_path / "b")], tmp_path / "b")
    resumed.engine.load_state_dict(saved)
    again = resumed.engine.state_dict()
    again.pop("config")
    assert differences(again, trees[1]) == []
    resumed.train(6)
    assert resumed.engine.step == 6


@pytest.mark.parametrize("name", NAMES)
def test_its_place_in_the_list_changes_no_checkpoint(name, tmp_path):
    trees = []
    for number, order in enumerate([slice(None), slice(None, None, -1)]):
        folder = tmp_path / str(number)
        kept = type("Kept", (CheckpointingHook,), {})(1, None, path=folder / "kept", load=None)
        others = [LoggingHook(5)] if name != "LoggingHook" else []
        OnEngine([MAKE[name](folder), EmaHook(0.9), *others, kept][order], folder).train(4)
        trees.append({path.name: load_checkpoint(path) for path in sorted((folder / "kept").iterdir())})
    assert len(trees[0]) == 5
    assert differences(trees[0], trees[1]) == []


@pytest.mark.parametrize("name", NAMES)
def test_two_of_a_kind_are_refused_unless_named_apart(name, tmp_path):
    with pytest.raises(ConfigError, match="state key"):
        OnEngine([MAKE[name](tmp_path / "a"), MAKE[name](tmp_path / "b")], tmp_path).train(1)
    if name == "EmaHook":
        second = EmaHook(0.5, name="other")
    elif name == "SwaHook":
        return  # one average of this kind is kept; its name is that of the average
    elif name == "ProfilerHook":
        return  # torch runs one profiler at a time
    elif name == "NonFiniteHook":
        return  # one hook decides about a refused step
    else:
        second = SecondOfAKind.of(MAKE[name](tmp_path / "d"))
    run = OnEngine([MAKE[name](tmp_path / "c"), second], tmp_path)
    run.train(2)
    assert run.engine.step == 2


@pytest.mark.parametrize("name", NAMES)
def test_an_exception_of_the_training_leaves_unchanged_and_closes_the_hook(name, tmp_path, monkeypatch):
    closed = []
    error = KeyError("mine")
    hook = MAKE[name](tmp_path)
    original = hook.on_close
    monkeypatch.setattr(hook, "on_close", lambda trainer, error=None: closed.append(error) or original(trainer, error))
    with pytest.raises(KeyError) as caught:
        OnEngine([hook], tmp_path, Slopes(fail_at={2: error})).train(3)
    assert caught.value is error
    assert closed == [error]


@pytest.mark.parametrize("name", NAMES)
def test_it_says_nothing_at_warning_level_in_a_run_that_is_fine(name, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "treadle"):
        OnEngine([MAKE[name](tmp_path)], tmp_path).train(3)
    expected = 1 if name == "CudaMaxMemoryHook" and not torch.cuda.is_available() else 0
    assert len(caplog.records) == expected


@pytest.mark.parametrize("name", NAMES)
def test_it_prints_nothing(name, tmp_path, capfd):
    if name == "ProgressBarHook":
        pytest.skip("the bar is made to be seen")
    OnEngine([MAKE[name](tmp_path)], tmp_path).train(3)
    captured = capfd.readouterr()
    assert captured.out == ""


def test_what_the_history_hook_writes_is_strict_json(tmp_path):
    FACES["spectra"]([MAKE["HistoryHook"](tmp_path)], tmp_path).train(1)

    def refuse(constant):
        raise ValueError(constant)

    assert json.loads((tmp_path / "h.json").read_text(), parse_constant=refuse) == [{"epoch": 1, "loss": None}]
