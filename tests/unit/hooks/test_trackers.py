"""The setting `trackers`: one for every face, by name or an object; settings and final metrics go along."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch

import treadle
from hook_kit import Small, Stop, bare_engine, picture
from treadle import ConfigError, LoggingHook, TensorBoardHook, with_trackers
from treadle.hooks import Tracker
from treadle.hooks.files import RunNotes
from treadle.spectra import SpectraTrainer

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


class Lines:
    """A tracker of the user's own."""

    def start(self, config, workspace, step):
        self.config, self.workspace, self.step, self.sent, self.end = config, workspace, step, [], None

    def log(self, values, step):
        self.sent.append((step, values))

    def finish(self, final, error):
        self.end = (final, error)


class FakeRun:
    def __init__(self, module, arguments):
        self.module, self.arguments, self.sent, self.finished = module, arguments, [], 0
        self.name = self.id = arguments.get("name") or f"run-{len(module.runs)}"
        self.summary = {}

    def log(self, values, step):
        self.module.fails("log")
        self.sent.append((step, dict(values)))

    def finish(self, exit_code=0):
        self.finished += 1


class FakeTracker(types.ModuleType):
    """Stands for wandb or trackio, and fails where it is told to."""

    def __init__(self, name):
        super().__init__(name)
        self.runs, self.fail = [], None
        self.Image = lambda image: ("image", image.size)

    def fails(self, where):
        if self.fail == where:
            raise ConnectionError("no network")

    def init(self, **arguments):
        self.fails("init")
        print("* what a tracker prints")
        self.runs.append(FakeRun(self, arguments))
        return self.runs[-1]

    def finish(self):
        self.runs[-1].finish()


@pytest.fixture
def fake(monkeypatch):
    def install(name):
        module = FakeTracker(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


def faces(tmp_path, **setting):
    """One epoch or four steps on every face; gives the face's name and its engine."""
    import astro_trainer_kit
    import graph_kit
    import spectra_kit

    trainer = treadle.Trainer(torch.nn.Linear(3, 1), None, torch.nn.MSELoss(), device="cpu", **setting)
    batches = [(torch.ones(2, 3), torch.ones(2, 1))] * 4
    trainer.train(batches, 1, batches[:1], save_dir=tmp_path / "functional")
    yield "functional", trainer._engine
    small = Small(4, tmp_path / "mini")
    small.trackers = setting["trackers"]
    small.train()
    yield "mini", small
    made = spectra_kit.make(tmp_path / "spectra", epochs=1)
    spectra = SpectraTrainer(made.model, made.optimizer, made.train_loader, made.val_loader, cfg=made.cfg, **setting)
    spectra.fit(1)
    yield "spectra", spectra._engine
    graphs = graph_kit.make(tmp_path / "graphs", **setting)
    graphs.fit(graph_kit.loader(graph_kit.graphs(8)), graph_kit.loader(graph_kit.graphs(5, seed=1)), 1)
    yield "graphs", graphs._engine
    astro = astro_trainer_kit.make(tmp_path / "astro", **setting)
    astro.train(num_epochs=1)
    yield "astro", astro._engine


def test_every_face_takes_the_setting(tmp_path):
    tracker = Lines()
    for face, engine in faces(tmp_path, trackers=[tracker]):
        assert tracker.step == 0, face
        assert tracker.config == {**tracker.config, **{k: v for k, v in engine.config.items() if isinstance(v, int)}}
        keys = {key for _, values in tracker.sent for key in values}
        assert {"train/loss", "train/lr/group_0"} <= keys, face
        final, error = tracker.end
        assert error is None
        if face == "mini":
            assert "final/train/loss" in final
        else:
            assert {"epoch/epoch", "epoch/lr"} <= keys, face
            assert final["final/epoch"] == 1, face


def test_a_name_an_own_object_and_a_hook_stand_side_by_side():
    hooks = with_trackers([LoggingHook(5)], ["tensorboard", TensorBoardHook("other"), Lines()])
    names = ["LoggingHook", "EpochRecordsHook", "TensorBoardHook", "TensorBoardHook", "tracker Lines"]
    assert [hook.state_key for hook in hooks] == names
    assert with_trackers([], ()) == []
    assert isinstance(Lines(), Tracker)


@pytest.mark.parametrize(
    ("trackers", "words"),
    [
        (["tensorbord"], "did you mean 'tensorboard'"),
        ("wandb,mlflo", "did you mean 'mlflow'"),
        ([object()], "object is neither a name nor a hook, and has no method start, log, finish"),
        (7, r"must be a list, such as \['tensorboard'\]"),
    ],
)
def test_a_wrong_tracker_is_told_before_anything_is_built(trackers, words):
    with pytest.raises(ConfigError, match=words):
        Wrong(3, trackers=trackers)


class Wrong(treadle.BaseTrainer):
    """Builds nothing."""


# -- trackers that fail -------------------------------------------------------------------------------------------


def fails_in(name, where, fake, monkeypatch):
    """Make a tracker fail when it is started, or at every log point."""

    def failing(*args, **kwargs):
        raise ConnectionError("no network")

    if name in ("wandb", "trackio"):
        fake(name).fail = where
    elif name == "tensorboard":
        from torch.utils import tensorboard

        monkeypatch.setattr(tensorboard.SummaryWriter, "__init__" if where == "init" else "add_scalar", failing)
    else:
        import mlflow

        monkeypatch.setattr(mlflow.MlflowClient, "create_run" if where == "init" else "log_batch", failing)


@pytest.mark.parametrize("where", ["init", "log"])
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_tracker_that_fails_ends_no_training_and_says_so_once(request, fake, monkeypatch, caplog, name, where):
    workspace = request.getfixturevalue("mlflow_workspace" if name == "mlflow" else "tmp_path")
    fails_in(name, where, fake, monkeypatch)
    trainer = Small(4, workspace, [LoggingHook(1)])
    trainer.trackers = [name]
    trainer.train()
    assert trainer.step == 4
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "no network" in warnings[0]
    assert "Training continues" in warnings[0]


def test_training_does_not_notice_a_tracker_that_fails_at_the_start(tmp_path, fake):
    def weights(trackers, folder):
        torch.manual_seed(1)
        trainer = Small(4, tmp_path / folder)
        trainer.trackers = trackers
        trainer.train()
        return trainer.model.weight

    fake("wandb").fail = "init"
    assert torch.equal(weights(["wandb"], "with"), weights([], "without"))


def test_an_error_of_the_training_reaches_the_tracker_and_nothing_is_final(tmp_path):
    tracker = Lines()
    trainer = Small(4, tmp_path, [Stop(2)])
    trainer.trackers = [tracker]
    with pytest.raises(RuntimeError, match="stopped"):
        trainer.train()
    final, error = tracker.end
    assert final == {}
    assert str(error) == "stopped"


# -- settings, final metrics, trackio -----------------------------------------------------------------------------


def test_tensorboard_has_settings_and_final_metrics(tmp_path):
    trainer = Small(4, tmp_path, [LoggingHook(1)])
    trainer.trackers = "tensorboard"
    trainer.train()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    last = events.Scalars("train/loss")[-1].value
    assert events.Scalars("final/train/loss")[0].value == last
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert HParamsPluginData.FromString(content).session_start_info.hparams["max_steps"].number_value == 4


def test_mlflow_has_settings_and_final_metrics(mlflow_workspace):
    trainer = Small(2, mlflow_workspace, [LoggingHook(1)])
    trainer.trackers = "mlflow"
    trainer.train()
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{mlflow_workspace}/mlflow.db")
    run = client.get_run((mlflow_workspace / "mlflow_run_id").read_text().strip())
    assert run.data.params["max_steps"] == "2"
    assert run.data.metrics["final/train/loss"] == run.data.metrics["train/loss"]


def test_wandb_has_settings_and_final_metrics(tmp_path, fake):
    module = fake("wandb")
    trainer = Small(2, tmp_path, [LoggingHook(1)])
    trainer.trackers = ["wandb"]
    trainer.train()
    run = module.runs[0]
    assert run.arguments["config"]["max_steps"] == 2
    assert run.summary["final/train/loss"] == run.sent[-1][1]["train/loss"]


def test_trackio_goes_on_with_its_run_and_sends_no_step_twice(tmp_path, fake, capsys):
    module = fake("trackio")
    for last in (3, 5):
        trainer = Small(last, tmp_path, [LoggingHook(1), treadle.CheckpointingHook(3)])
        trainer.trackers = [treadle.TrackioHook("digits", config={"lr": 0.1, "_own": torch.nn.ReLU()})]
        trainer.train()
    first, second = module.runs
    assert first.arguments == {
        "project": "digits", "name": None, "resume": "never", "embed": False, "config": {"lr": 0.1, "own": "ReLU()"},
    }  # fmt: skip
    assert (second.arguments["name"], second.arguments["resume"]) == (first.name, "allow")
    steps = [step for run in module.runs for step, values in run.sent if "train/loss" in values]
    assert steps == [1, 2, 3, 4, 5]
    assert "final/train/loss" in second.sent[-1][1]
    assert first.finished == second.finished == 1
    assert capsys.readouterr().out == ""


def test_trackio_takes_images(tmp_path, fake):
    module = fake("trackio")
    hook, engine = treadle.TrackioHook(), bare_engine(tmp_path)
    hook.on_before_train(engine)
    hook.on_log_images(engine, {"sample": picture()})
    assert module.runs[0].sent == [(0, {"sample": ("image", (4, 4))})]


def test_without_trackio_the_error_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ImportError, match=r"treadle\[trackio\]"):
        treadle.TrackioHook().on_before_train(bare_engine(tmp_path))


def test_a_run_that_is_held_ends_with_the_metrics_of_its_test(tmp_path):
    tracker = Lines()
    hooks = with_trackers([LoggingHook(1)], [tracker])
    hooks[-1].held = True
    trainer = Small(2, tmp_path, hooks)
    trainer.train()
    assert tracker.end is None
    hooks[-1].release(trainer, {"test": {"mae": 0.5, "note": "x"}})
    final, error = tracker.end
    assert (final["final/test/mae"], error) == (0.5, None)
    assert set(final) == {"final/test/mae", "final/train/loss", "final/train/grad_norm", "final/train/number"}


def test_notes_are_read_back_and_those_of_another_run_do_not_count(tmp_path):
    notes = RunNotes(tmp_path / "run", "tracker")
    notes.keep("a name with spaces")
    notes.note("a name with spaces", 12)
    assert notes.run_id == "a name with spaces"
    assert notes.last_step("a name with spaces") == 12
    assert notes.last_step("other") == -1


def test_verify_leaves_out_what_would_send_its_runs_away(tmp_path):
    from types import SimpleNamespace

    from treadle.runs.verify.child import Arrangement
    from treadle.runs.verify.jobs import Job

    notes = []
    file = SimpleNamespace(write=lambda kind, text: notes.append(text))
    arrangement = Arrangement(Job("train.py", [], str(tmp_path), 0, 3, None, 3), file)
    engine = bare_engine(tmp_path, with_trackers([], ["tensorboard", "wandb", "mlflow", "trackio", "jsonl", Lines()]))
    arrangement._arrange_files(engine)
    kept = ["LoggingHook", "EpochRecordsHook", "TensorBoardHook", "JsonlHook", "CheckpointingHook"]
    assert [hook.state_key for hook in engine.hooks] == kept
    assert [note.split(" left out")[0] for note in notes[:4]] == [
        "WandbHook", "MlflowHook", "TrackioHook", "tracker Lines",
    ]  # fmt: skip
    assert engine.hooks[2].path.is_relative_to(arrangement.job.workspace)
