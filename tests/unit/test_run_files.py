"""Every run folder tells what was trained, on what, with which settings, and is drawn without a further hook."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import astro_trainer_kit
import graph_kit
import treadle
from functional_kit import constant, evaluations, loader, make, scalar
from helpers import RUN_FILES, differences
from treadle import BaseTrainer, CheckpointingHook, SessionLogHook, StepLogHook, Trainer, ValidationHook
from treadle.checkpoint import load_checkpoint
from treadle.cli.runpage.curves import series_of
from treadle.cli.runpage.page import run_page
from treadle.cli.runpage.records import read_run
from treadle.cli.runpage.summary import summarize
from treadle.faces.run_files import git_commit
from treadle.hooks.steplog import read_steps


class Fit(BaseTrainer):
    def build_data_loader(self):
        return DataLoader(torch.ones(12, 1), batch_size=4)

    def build_model(self):
        torch.manual_seed(0)
        return nn.Linear(1, 1)

    def build_optimizer(self):
        groups = [{"params": [self.model.weight], "name": "w"}, {"params": [self.model.bias], "weight_decay": 0.5}]
        return torch.optim.AdamW(groups, lr=0.1)

    def build_lr_scheduler(self):
        return torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def build_hooks(self):
        return [CheckpointingHook(2)]

    def forward(self, input):
        return self.model(input).square().mean(), {}


def parts(folder, **options):
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)
    model = nn.Linear(3, 1)
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), nn.MSELoss(), device="cpu", **options
    )
    trainer.train(loader, 3, loader, save_dir=folder, resume_from="auto")
    return trainer


def mini(folder, **options):
    trainer = Fit(8, workspace=folder, device="cpu", grad_clip=1.0, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("train", [mini, parts])
def test_a_folder_has_curves_times_status_and_settings(train, tmp_path):
    train(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= RUN_FILES - {"checkpoints"}
    records = read_run(tmp_path)
    charts = {series.chart for series in series_of(records)}
    assert charts >= {"loss", "grad_norm", "lr"}
    summary = summarize(records)
    assert summary.status == "finished"
    assert summary.seconds is not None
    assert {"optimizer.class", "data.batch_size", "model.parameters", "versions.torch"} <= set(records.config)
    assert "optimizer.class" in run_page([records])


def test_the_settings_name_each_group_the_schedule_and_the_commit(tmp_path):
    mini(tmp_path)
    found = json.loads((tmp_path / "settings.json").read_text())
    first, second = found["optimizer"]["groups"]["w"], found["optimizer"]["groups"]["1"]
    assert (first["lr"], first["weight_decay"], second["weight_decay"]) == (0.1, 0.01, 0.5)
    assert (first["parameters"], second["parameters"], found["model"]["parameters"]) == (1, 1, 2)
    assert found["scheduler"] == {"class": "StepLR", "interval": "step", "step_size": 2, "gamma": 0.5}
    assert found["data"] == {
        "loader": "DataLoader", "dataset": "Tensor", "samples": 12, "batches": 3, "batch_size": 4, "num_workers": 0,
        "drop_last": False, "accumulation_steps": 1,
    }  # fmt: skip
    assert found["trainer"]["grad_clip"] == 1.0
    assert found["target"] == "step 8"


def test_a_fresh_run_in_a_used_folder_keeps_the_settings_of_the_other(tmp_path):
    class Fresh(Fit):
        def build_hooks(self):
            return []

    Fresh(5, workspace=tmp_path, device="cpu").train()
    before = (tmp_path / "settings.json").read_text()
    Fresh(3, workspace=tmp_path, device="cpu", grad_clip=9.0).train()
    assert (tmp_path / "settings.1.json").read_text() == before
    assert json.loads((tmp_path / "settings.json").read_text())["trainer"]["grad_clip"] == 9.0


def test_a_run_that_goes_on_has_the_rate_before_any_schedule_and_each_step_once(tmp_path):
    Fit(5, workspace=tmp_path, device="cpu").train()
    mini(tmp_path)
    assert json.loads((tmp_path / "settings.json").read_text())["optimizer"]["groups"]["w"]["lr"] == 0.1
    assert list(read_steps(tmp_path / "steps.jsonl")) == list(range(1, 9))
    starts = [line for line in (tmp_path / "sessions.jsonl").read_text().splitlines() if '"start"' in line]
    assert len(starts) == 2


def test_hooks_of_the_users_write_their_own_files_alone(tmp_path):
    hooks = [StepLogHook(tmp_path / "mine.jsonl"), SessionLogHook(tmp_path / "own.jsonl")]
    mini(tmp_path / "run", hooks=hooks)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoints", "settings.json"}
    assert len(read_steps(tmp_path / "mine.jsonl")) == 8


def test_a_trainer_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Fit.build_hooks, before = (lambda self: []), Fit.build_hooks
    try:
        Fit(3, device="cpu").train()
    finally:
        Fit.build_hooks = before
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_those_of_a_run_without_the_files_and_load_without_a_word(tmp_path, caplog):
    mini(tmp_path / "with")
    bare = Fit(8, workspace=tmp_path / "bare", device="cpu", grad_clip=1.0)
    bare.prepare()
    bare.hooks = [hook for hook in bare.hooks if not hook.implicit]
    bare.train()
    one, other = (
        treadle.checkpoint.load_checkpoint(tmp_path / name / "checkpoints" / "checkpoint_step_8.pt")
        for name in ("with", "bare")
    )
    assert differences(one["hooks"], other["hooks"]) == differences(one["model"], other["model"]) == []
    caplog.set_level(logging.WARNING)
    Fit(9, workspace=tmp_path / "bare", device="cpu", grad_clip=1.0).train()
    assert caplog.records == []


def test_the_commit_is_read_from_files_of_a_clone_and_of_a_worktree(tmp_path):
    commit = "a" * 40
    git = tmp_path / "clone" / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n")
    inside = tmp_path / "clone" / "src"
    inside.mkdir()
    assert git_commit(inside) == commit
    (git / "refs" / "heads" / "main").write_text("b" * 40 + "\n")
    assert git_commit(inside) == "b" * 40
    own = git / "worktrees" / "side"
    own.mkdir(parents=True)
    (own / "HEAD").write_text("c" * 40 + "\n")
    (tmp_path / "side").mkdir()
    (tmp_path / "side" / ".git").write_text(f"gitdir: {own}\n")
    assert git_commit(tmp_path / "side") == "c" * 40
    assert git_commit(Path("/")) is None


# -- one layout ---------------------------------------------------------------------------------------------------


def named(folder, name):
    """The step of a state under the name that every face gives it."""
    return load_checkpoint(folder / "checkpoints" / name)["global_step"]


def test_every_face_has_its_best_and_its_last_state_under_the_same_names(tmp_path):
    trainer = scalar(evaluations([0.5, 0.2, 0.6]), save_total_limit=1)
    trainer.train([constant(1)] * 4, 3, [constant(1)], save_dir=tmp_path / "functional")
    assert (named(tmp_path / "functional", "best.pt"), named(tmp_path / "functional", "last.pt")) == (8, 12)
    assert (tmp_path / "functional" / "checkpoints" / "last.pt").resolve().name == "checkpoint_epoch_3.pt"

    graphs = graph_kit.make(tmp_path / "graphs")
    data = graph_kit.loader(graph_kit.graphs())
    graphs.fit(data, data, epochs=2)
    assert named(tmp_path / "graphs", "last.pt") == graphs.step
    assert named(tmp_path / "graphs", "best.pt") == graphs.best_epoch * graphs.step // 2

    astro = astro_trainer_kit.make(tmp_path / "astro", save_total_limit=1, save_every_steps=2)
    astro.train(2, astro_trainer_kit.loader())
    kept = sorted(path.name for path in (tmp_path / "astro").glob("ckpt_*"))
    assert kept == ["ckpt_epoch_002.pt", f"ckpt_step_{astro.step:08d}.pt"]
    assert named(tmp_path / "astro", "last.pt") == astro.step
    assert (tmp_path / "astro" / "checkpoints" / "best.pt").exists()

    validation = ValidationHook([torch.ones(2, 1)], interval=4)
    mini(tmp_path / "mini", hooks=[validation])
    assert named(tmp_path / "mini", "last.pt") == 8
    assert named(tmp_path / "mini", "best.pt") == validation.best_rule.best_epoch


def test_the_names_follow_a_run_that_begins_again_before_its_end(tmp_path):
    for last, source in ((4, None), (3, "checkpoint_epoch_2.pt")):
        trainer = make()
        trainer.train(loader(), last, save_dir=tmp_path, resume_from=source)
    assert named(tmp_path, "last.pt") == trainer.step == 9


def test_seeds_of_a_script_are_settings_and_stay_those_of_the_start(tmp_path):
    def seed_of(name):
        return json.loads((tmp_path / name / "settings.json").read_text()).get("seed")

    class Unseeded(Fit):
        def build_model(self):
            return nn.Linear(1, 1)

    for seed in (3, 4):
        treadle.set_seed(seed)
        Unseeded(4, workspace=tmp_path / str(seed), device="cpu").train()
    assert (seed_of("3"), seed_of("4")) == (3, 4)
    treadle.set_seed(5)
    Unseeded(6, workspace=tmp_path / "3", device="cpu").train()  # resumed: its numbers continue from seed 3
    assert seed_of("3") == 3
    torch.seed()
    Unseeded(4, workspace=tmp_path / "none", device="cpu").train()
    assert seed_of("none") is None
