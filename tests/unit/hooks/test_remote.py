"""RemoteWorkspaceHook: a run whose workspace is a URL ends, resumes and complains as one in a local folder."""

from __future__ import annotations

import shutil
import uuid

import pytest
import torch
from torch import nn

from helpers import differences
from treadle import BaseTrainer, CheckpointingHook, set_seed
from treadle.checkpoint.objects import ObjectStore
from treadle.checkpoint.remote import RemoteWorkspace
from treadle.errors import CheckpointError, ConfigError
from treadle.hooks import RemoteWorkspaceHook
from treadle.hooks.base import BaseHook

pytest.importorskip("fsspec")


class Fit(BaseTrainer):
    def build_data_loader(self):
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(x, batch_size=3, shuffle=True)

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def build_hooks(self):
        return [CheckpointingHook(2)]

    def forward(self, input):
        return self.model(input).square().mean(), {}


@pytest.fixture
def url(monkeypatch, tmp_path):
    monkeypatch.setenv("TREADLE_STAGING", str(tmp_path / "staging"))
    return f"memory://{uuid.uuid4().hex}/run"


def fit(url, steps, hooks=()):
    set_seed(0)
    trainer = Fit(steps, workspace=url, device="cpu", hooks=hooks)
    trainer.train()
    return trainer


def test_a_run_goes_on_from_the_store_on_a_machine_that_has_nothing(url, tmp_path):
    straight = fit(tmp_path / "local", 9)
    first = fit(url, 5)
    assert first.workspace.parent == tmp_path / "staging"
    shutil.rmtree(first.workspace)
    second = fit(url, 9)
    assert second.state.source is not None
    assert differences(straight.model.state_dict(), second.model.state_dict()) == []
    shutil.rmtree(second.workspace)
    assert fit(url, 9).step == 9
    remote = RemoteWorkspace(ObjectStore(url), tmp_path / "looked")
    assert remote.leftovers() == []
    assert {"steps.jsonl", "sessions.jsonl", "settings.json"} <= remote.latest()[0].files.keys()


class Breaks(BaseHook):
    """Breaks the store at a step, and mends it at another."""

    def __init__(self, store, broken, mended=None):
        self.store, self.broken, self.mended, self.real = store, broken, mended, store._files

    def on_after_step(self, trainer):
        if trainer.step == self.broken:
            self.store._files = None
        if trainer.step == self.mended:
            self.store._files = self.real


@pytest.mark.parametrize("mended", [5, None])
def test_an_upload_that_fails_is_warned_of_and_is_an_error_at_the_end_only(url, tmp_path, caplog, mended):
    hook = RemoteWorkspaceHook(url, poll=0.001)
    hook.store.tries = 1

    class Waits(Breaks):
        def on_after_step(self, trainer):
            super().on_after_step(trainer)
            if trainer.step == self.broken + 1:  # until the thread has met it
                while not hook._logged:
                    self.real.invalidate_cache()

    class Own(Fit):
        def build_hooks(self):
            return [hook, CheckpointingHook(1), Waits(hook.store, 2, mended)]

    trainer = Own(6, workspace=tmp_path / "run", device="cpu")
    if mended is None:
        with pytest.raises(CheckpointError, match="a request failed"):
            trainer.train()
    else:
        trainer.train()
    assert trainer.step == 6
    assert "Training continues; the next save uploads again" in caplog.text


def test_a_hook_without_a_folder_and_bad_numbers_are_refused_by_name(url):
    with pytest.raises(ConfigError, match="lease=0"):
        RemoteWorkspaceHook(url, lease=0)

    class Bare(Fit):
        def build_hooks(self):
            return []

    with pytest.raises(ConfigError, match="workspace"):
        Bare(2, device="cpu", hooks=[RemoteWorkspaceHook(url)]).train()


def test_a_state_that_was_not_uploaded_before_a_kill_is_when_the_run_starts_again(url, tmp_path):
    hook = RemoteWorkspaceHook(url)

    class Own(Fit):
        def build_hooks(self):
            return [*([hook] if self.max_steps == 4 else []), CheckpointingHook(2)]

    set_seed(0)
    local = Own(6, workspace=tmp_path / "run", device="cpu")
    local.train()
    Own(4, workspace=tmp_path / "run", device="cpu").train()  # finished already
    remote = RemoteWorkspace(ObjectStore(url), tmp_path / "looked")
    assert remote.latest()[0].reach.step == 6


def test_what_a_killed_upload_left_is_deleted_by_a_run_that_has_nothing_more_to_do(url, tmp_path):
    fit(url, 5)
    store = ObjectStore(url)
    store.put("objects/00000001/00000099/steps.jsonl.0000", b"half of an upload")
    store.put("notes.txt", b"somebody's")
    fit(url, 5)
    remote = RemoteWorkspace(store, tmp_path / "looked")
    assert remote.leftovers() == ["notes.txt"]
    assert remote.restore()
