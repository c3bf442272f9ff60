"""A run shows itself where no handler of the user's does, and only there; what it shows changes no bit of it."""

from __future__ import annotations

import logging
import os
import pty
import re
import select
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle import BaseTrainer, CheckpointingHook, ProgressHook, Trainer
from treadle.engine.run_log import RUN_LOG

SCRIPT = """
import torch
from torch import nn
from treadle import BaseTrainer, CheckpointingHook

class Fit(BaseTrainer):
    def build_data_loader(self):
        return [torch.ones(2, 1)] * 3
    def build_model(self):
        return nn.Linear(1, 1)
    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)
    def build_hooks(self):
        return [CheckpointingHook(2)]
    def forward(self, input):
        return self.model(input).square().mean() * 1e-5, {}

Fit(6, workspace="run", device="cpu").train()
"""


class Fit(BaseTrainer):
    def build_data_loader(self):
        return [torch.ones(2, 1)] * 3

    def build_model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def build_hooks(self):
        return [CheckpointingHook(2)]

    def forward(self, input):
        return self.model(input).square().mean(), {}


@pytest.fixture(autouse=True)
def _audible(monkeypatch):
    monkeypatch.delenv("TREADLE_PROGRESS", raising=False)


@pytest.fixture
def parts():
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1), loader


def test_a_run_says_where_it_starts_what_it_lost_what_it_saved_and_why_it_ends(tmp_path, capsys):
    Fit(6, workspace=tmp_path, device="cpu").train()
    start, progress, end = capsys.readouterr().err.splitlines()
    assert start == "training starts on cpu, to step 6"
    assert re.match(r"epoch 2/2 step 6/6 loss \S+ lr 0.1 grad \S+ .*saved 6$", progress)
    assert re.match(r"done at step 6, epoch 1; .* for 6 steps; saved .*checkpoint_step_6.pt$", end)


def test_a_run_that_goes_on_or_is_finished_says_so(tmp_path, capsys, caplog):
    Fit(4, workspace=tmp_path, device="cpu").train()
    capsys.readouterr()
    Fit(6, workspace=tmp_path, device="cpu").train()
    assert re.match(
        r"training resumes at step 4, epoch 1 \(.*checkpoint_step_4.pt\), on cpu, to step 6\n", capsys.readouterr().err
    )
    Fit(6, workspace=tmp_path, device="cpu").train()
    assert "nothing to do: already at step 6, epoch 1 (target of the whole run: step 6)" in caplog.messages[-1]


def test_epochs_are_lines_and_early_stopping_names_epoch_and_best_value(tmp_path, capsys, parts):
    model, optimizer, loader = parts
    trainer = Trainer(model, optimizer, nn.MSELoss(), {"training": {"min_delta": 1e9}}, device="cpu")
    trainer.train(loader, 10, loader, save_dir=tmp_path, early_stopping_patience=2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training starts on cpu, to epoch 10"
    assert [line.split(":")[0] for line in lines[1:-1]] == ["Epoch 1", "Epoch 2", "Epoch 3"]
    assert "stopped early, 2 epochs without a better eval_loss, at step 12, epoch 3;" in lines[-1]
    assert re.search(r"best eval_loss \S+ at epoch 1; saved .*checkpoint_epoch_3.pt$", lines[-1])


def test_a_stop_that_was_asked_for_is_named(capsys, parts):
    model, optimizer, loader = parts

    def stop(trainer, epoch, metrics):
        trainer.should_stop = True

    Trainer(model, optimizer, nn.MSELoss(), device="cpu").train(loader, 10, callbacks=[stop])
    assert "stopped before epoch 10, as should_stop was set, at step 4, epoch 1;" in capsys.readouterr().err


def test_epochs_of_an_overridden_train_epoch_make_one_start_and_one_end(capsys, parts):
    class Own(Trainer):
        def train_epoch(self, *args, **kwargs):
            return super().train_epoch(*args, **kwargs)

    model, optimizer, loader = parts
    Own(model, optimizer, nn.MSELoss(), device="cpu").train(loader, 3)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["training", "Epoch", "Epoch", "Epoch", "done"]


@pytest.mark.parametrize("how", ["argument", "environment", "level", "disabled"])
def test_one_setting_turns_it_off(how, capsys, monkeypatch):
    if how == "environment":
        monkeypatch.setenv("TREADLE_PROGRESS", "0")
    elif how == "level":
        monkeypatch.setattr(logging.getLogger("treadle"), "level", logging.WARNING)
    elif how == "disabled":
        monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)
    Fit.build_hooks, before = (lambda self: []), Fit.build_hooks
    try:
        Fit(3, device="cpu", progress=how != "argument").train()
    finally:
        Fit.build_hooks = before
    assert capsys.readouterr().err == ""


def test_a_handler_of_the_users_takes_over(capsys, caplog):
    caplog.set_level(logging.INFO)
    Fit.build_hooks, before = (lambda self: [ProgressHook(3)]), Fit.build_hooks
    try:
        Fit(3, device="cpu").train()
    finally:
        Fit.build_hooks = before
    assert capsys.readouterr().err == ""
    assert [record.getMessage().split()[0] for record in caplog.records] == ["training", "Step", "done"]


def test_warnings_reach_the_users_handlers_once_and_nothing_else_does(capsys, caplog):
    class Lazy(Fit):
        def build_hooks(self):
            return []

        def build_optimizer(self):
            return torch.optim.SGD(self.model[0].parameters(), lr=0.1)

    Lazy(3, device="cpu").train()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    shown = capsys.readouterr().err
    assert "training starts" in shown
    assert "will not be trained" not in shown  # the handler that pytest has at the root shows it


def test_the_loggers_are_as_they_were_afterwards_also_after_an_error(capsys):
    class Broken(Fit):
        def forward(self, input):
            raise ValueError("of the user")

    logger = logging.getLogger("treadle")
    before = (logger.level, logger.propagate, list(logger.handlers))
    for kind in (Fit, Broken):
        kind.build_hooks = lambda self: []
        try:
            kind(2, device="cpu").train()
        except ValueError:
            assert kind is Broken
        finally:
            del kind.build_hooks
            Fit.build_hooks = lambda self: [CheckpointingHook(2)]
        assert (logger.level, logger.propagate, list(logger.handlers)) == before
        assert (RUN_LOG.screen, RUN_LOG.replaces_lines, RUN_LOG.is_active()) == (None, False, False)
    assert "done at" not in capsys.readouterr().err.splitlines()[-1]


def test_small_losses_have_digits(capsys):
    class Small(Fit):
        def build_hooks(self):
            return [ProgressHook(2)]

        def forward(self, input):
            return self.model(input).square().mean() * 0 + 2.6e-14, {"part": torch.tensor(1.5e-7)}

    Small(3, device="cpu").train()
    lines = capsys.readouterr().err.splitlines()
    assert "loss 2.6e-14" in lines[1]
    assert lines[2].endswith("(means of the last 1 step)")


def test_importing_configures_nothing():
    code = "import logging, treadle; print(logging.root.handlers, logging.getLogger('treadle').handlers)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[] []\n"


def on_a_terminal(command, cwd):
    """Run a command on a terminal of 100 columns and return what it wrote there."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, cwd=cwd, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    while True:
        ready, _, _ = select.select([master], [], [], 60)
        try:
            part = os.read(master, 1 << 16) if ready else b""
        except OSError:
            part = b""
        if not part:
            break
        shown += part
    os.close(master)
    assert process.wait(60) == 0, shown.decode()
    return shown.decode()


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "torch alone"])
def test_a_terminal_has_one_live_line_that_ends_with_the_last_step(rich, tmp_path):
    hidden = "" if rich else "import sys; sys.modules['rich'] = sys.modules['rich.console'] = None\n"
    (tmp_path / "fit.py").write_text(hidden + SCRIPT, encoding="utf-8")
    shown = on_a_terminal([sys.executable, "fit.py"], tmp_path)
    assert shown.startswith("training starts on cpu, to step 6")
    last = [line for line in re.split(r"[\r\n]+", shown) if "step 6/6" in line][-1]
    assert re.search(r"epoch 2/2 step 6/6 loss \d\S*e-\d\d", last)
    assert "saved 6" in last
    assert re.search(r"done at step 6, epoch 1; .*\s*.*checkpoint_step_6.pt", shown)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints", "sessions.jsonl", "settings.json", "steps.jsonl",
    ]  # fmt: skip


def test_the_bits_of_a_run_are_those_of_a_silent_one(tmp_path, capsys):
    loud, silent = Fit(20, workspace=tmp_path / "loud", device="cpu"), Fit(20, device="cpu", progress=False)
    silent.workspace = tmp_path / "silent"
    for trainer in (loud, silent):
        treadle.set_seed(0)
        trainer.prepare()
        for hook in trainer.hooks:
            if type(hook).__name__ == "RunProgress":
                hook.line_seconds = 0.0  # shown at nearly every step
        trainer.train()
    assert len(capsys.readouterr().err.splitlines()) > 8
    for one, other in zip(loud.model.parameters(), silent.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_long_evaluation_shows_how_far_it_is_and_scores_the_same(tmp_path, capsys, parts, monkeypatch):
    model, optimizer, loader = parts
    before = Trainer(model, optimizer, nn.MSELoss(), device="cpu").train(loader, 2, loader)["eval_loss"]
    for name in ("_COUNT_AFTER", "_COUNT_EVERY", "_COUNT_LINE_EVERY"):
        monkeypatch.setattr(f"treadle.engine.run_log.{name}", 0.0)
    capsys.readouterr()
    trainer = Trainer(model, optimizer, nn.MSELoss(), device="cpu")
    own = trainer.evaluate(loader)["loss"]
    assert capsys.readouterr().err == ""  # outside a run nothing is shown
    trainer.train(loader, 2, loader, save_dir=tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("evaluating")][-4:] == [f"evaluating {n}/4" for n in (1, 2, 3, 4)]
    assert own == before[-1]


def test_files_of_an_earlier_run_are_one_line(tmp_path, capsys, parts):
    model, optimizer, loader = parts
    for _ in range(2):
        capsys.readouterr()
        Trainer(model, optimizer, nn.MSELoss(), device="cpu").train(loader, 1, save_dir=tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if "earlier run" in line and "warning" not in line]
    assert len(lines) == 1
    assert "steps.1.jsonl" in lines[0]
    assert "settings.1.json" in lines[0]
