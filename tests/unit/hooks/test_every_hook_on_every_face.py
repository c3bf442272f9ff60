from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hook_kit
import treadle
from helpers import differences
from hook_kit import (
    FACES,
    Small,
    Stop,
    all_hooks,
    bare_engine,
    killable_hooks,
    picture,
    run_mini,
    wait_for_the_next_second,
)
from treadle.hooks import BaseHook, CheckpointingHook, LoggingHook

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

LIGHT = ["CudaMaxMemoryHook", "ThroughputHook", "ImageFileLoggerHook", "JsonlHook", "ProfilerHook", "TensorBoardHook"]
NAMES = [*LIGHT, "MlflowHook", "WandbHook"]


class Images(BaseHook):
    """Logs an image at every step."""

    def on_after_step(self, trainer):
        trainer.log_images({"sample": picture()})


def warnings_of_hooks(caplog):
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in said if "Hook" in message and "CudaMaxMemoryHook" not in message]


def one(name):
    return next(hook for hook in all_hooks() if type(hook).__name__ == name)


@pytest.fixture
def workspace(tmp_path, empty_mlflow_store):
    shutil.copy(empty_mlflow_store, tmp_path / "mlflow.db")
    return tmp_path


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", LIGHT)
def test_each_hook_alone(tmp_path, face, name, caplog):
    FACES[face](tmp_path, [LoggingHook(1), Images(), one(name)])
    assert warnings_of_hooks(caplog) == []


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("order", [1, -1])
def test_all_hooks_together_in_either_order(workspace, face, order, caplog):
    hooks = [LoggingHook(1), Images(), *all_hooks(), CheckpointingHook(2, load=None)][::order]
    engine = FACES[face](workspace, hooks)
    assert engine.step == 4
    assert warnings_of_hooks(caplog) == []
    assert (workspace / "images" / "4" / "sample.png").is_file()
    assert len((workspace / "metrics.jsonl").read_text().splitlines()) >= 4
    for name in ("profile", "tensorboard", "wandb", "wandb_run_id", "mlflow_run_id"):
        assert (workspace / name).exists(), name


def test_training_does_not_notice_the_hooks(workspace):
    def state(hooks, folder):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        saved = run_mini(folder, hooks).state_dict()
        return {"model": saved["model"], "rng": saved["rng"]}

    plain = state([LoggingHook(1)], workspace / "plain")
    assert differences(plain, state([LoggingHook(1), Images(), *all_hooks()], workspace)) == []


def test_they_put_nothing_into_a_checkpoint(tmp_path):
    hooks = [one(name) for name in LIGHT]
    trainer = run_mini(tmp_path, hooks)
    assert trainer.state_dict()["hooks"] == {}


@pytest.mark.parametrize("name", NAMES)
def test_construction_touches_nothing(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    one(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_two_of_a_kind_are_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(treadle.ConfigError, match=name):
        Small(2, tmp_path, [one(name), one(name)]).train()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", LIGHT)
def test_an_error_of_the_training_leaves_unchanged(tmp_path, name):
    with pytest.raises(RuntimeError, match="stopped"):
        Small(4, tmp_path, [LoggingHook(1), Images(), one(name), Stop(3)]).train()


@pytest.mark.parametrize("name", NAMES)
def test_a_hook_that_saw_no_training_can_be_closed(tmp_path, name):
    one(name).on_close(bare_engine(tmp_path), RuntimeError())


class HostReads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_on_the_host_between_log_points(tmp_path):
    def reads(hooks, folder):
        class Tensors(Small):
            def forward(self, input):
                output = super().forward(input)
                return output.loss, {"loss_again": output.loss.detach()}

        trainer = Tensors(5, folder, hooks)
        trainer.prepare()
        with HostReads() as mode:
            trainer.train()
        return mode.count

    interval = LoggingHook(100), treadle.ThroughputHook(100)
    hooks = [one(name) for name in LIGHT if name not in ("ThroughputHook", "ProfilerHook")]
    with_hooks = reads([*interval, *hooks], tmp_path / "a")
    assert with_hooks == reads([LoggingHook(100)], tmp_path / "b")


def test_importing_treadle_and_making_the_hooks_imports_no_tracker():
    code = """
        import sys
        import treadle
        treadle.WandbHook(project="p"), treadle.TensorBoardHook(), treadle.MlflowHook(), treadle.ImageFileLoggerHook()
        treadle.JsonlHook(), treadle.ProfilerHook(), treadle.ThroughputHook(), treadle.CudaMaxMemoryHook()
        loaded = {"wandb", "mlflow", "tensorboard", "PIL", "matplotlib", "torch.utils.tensorboard"} & set(sys.modules)
        assert not loaded, loaded
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


@pytest.mark.skipif(sys.platform == "win32", reason="kills with SIGKILL")
def test_a_killed_process_loses_no_point_and_the_next_one_doubles_none(tmp_path):
    code = """
        import os, signal, sys
        from pathlib import Path
        from hook_kit import Small, killable_hooks
        from treadle.hooks import BaseHook

        class Kill(BaseHook):
            def on_after_step(self, trainer):
                if trainer.step == 15:
                    os.kill(os.getpid(), signal.SIGKILL)

        Small(20, Path(sys.argv[1]), [*killable_hooks(), Kill()]).train()
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    # Without this the process would write through the wandb service of the one that runs the tests, and outlive itself.
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_SERVICE")}
    tests = Path(hook_kit.__file__).parent
    killed = subprocess.run(command, cwd=tests, env=own, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -9, killed.stderr
    wait_for_the_next_second()
    Small(20, tmp_path, killable_hooks()).train()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 21))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == [f'{{"step": {step}' for step in range(1, 21)]
    first, second = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert first.name.split("-")[-1] == second.name.split("-")[-1]
    assert (tmp_path / "wandb_last_step").read_text().split()[1] == "20"
