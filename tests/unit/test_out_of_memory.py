"""Memory runs out: the last finished step is saved, the message says what to change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers import differences
from treadle import BaseTrainer, CheckpointingHook, Engine, ProgressHook, StepOutput
from treadle.errors import OutOfMemoryError, TreadleError

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 79 GiB."


class Fit(BaseTrainer):
    """Runs out of memory at one step, in its forward pass, until it is told not to."""

    fails_at = None

    def build_data_loader(self):
        return [torch.full((6, 2), float(number)) for number in range(4)]

    def build_model(self):
        torch.manual_seed(0)
        return nn.Linear(2, 1)

    def build_optimizer(self):
        return torch.optim.Adam(self.model.parameters(), lr=0.1)

    def build_hooks(self):
        return [CheckpointingHook(100)]

    def forward(self, input):
        if self.step == self.fails_at:
            raise torch.OutOfMemoryError(CUDA)
        return self.model(input).square().mean(), {}


def test_the_last_finished_step_is_saved_and_a_resumed_run_ends_as_one_that_never_failed(tmp_path):
    failing = Fit(7, workspace=tmp_path, device="cpu", gradient_accumulation_steps=2)
    failing.fails_at = 4  # the end of the second epoch
    with pytest.raises(OutOfMemoryError) as caught:
        failing.train()
    assert str(caught.value) == (
        "out of memory at step 4 on cpu with micro-batches of 6 and gradient_accumulation_steps=2. Use a batch size of "
        "3 and gradient_accumulation_steps=4, which computes the same step in smaller parts, or use mixed precision. "
        "Step 3 was saved; a resumed run continues from there. PyTorch's message: CUDA out of memory. "
        "Tried to allocate 2.00 GiB."
    )
    assert isinstance(caught.value, (TreadleError, torch.OutOfMemoryError))
    resumed = Fit(7, workspace=tmp_path, device="cpu", gradient_accumulation_steps=2)
    resumed.train()
    assert "checkpoint_step_3" in resumed.resume_source
    straight = Fit(7, workspace=tmp_path / "straight", device="cpu", gradient_accumulation_steps=2)
    straight.train()
    for part in ("model", "optimizer", "global_step", "progress", "epoch"):
        assert differences(resumed.state_dict()[part], straight.state_dict()[part]) == [], part


def test_the_first_step_leaves_nothing_to_save(tmp_path):
    failing = Fit(7, workspace=tmp_path, device="cpu")
    failing.fails_at = 1
    with pytest.raises(OutOfMemoryError, match="Nothing was saved, as no step was finished"):
        failing.train()
    assert list(tmp_path.glob("checkpoints/*.pt")) == []


class Square:
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput(model(batch).square().mean(), num_samples=len(batch))


class FailingUpdate(torch.optim.SGD):
    """Runs out of memory between two parameters."""

    def step(self, closure=None):
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1)
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory")


def test_weights_that_may_be_half_updated_are_not_saved(tmp_path):
    model = nn.Linear(2, 1)
    hook = CheckpointingHook(100, path=tmp_path)
    engine = Engine(model, FailingUpdate(model.parameters(), lr=0.1), Square(), device="cpu", hooks=[hook])
    with pytest.raises(
        OutOfMemoryError, match=r"continues from the last checkpoint: the state in memory is not that of a"
    ):
        engine.run([torch.ones(1, 2)], max_steps=1)
    assert list(tmp_path.glob("*.pt")) == []


def test_a_run_without_a_hook_that_saves_says_so_and_a_single_sample_is_not_halved():
    class Fails(Square):
        def step(self, model, batch, totals=None, generator=None):
            raise MemoryError

    model = nn.Linear(2, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), Fails(), device="cpu", hooks=[ProgressHook(1)])
    with pytest.raises(OutOfMemoryError, match=r"Use a smaller model, .*\. Nothing was saved, as no hook saves"):
        engine.run([{"x": (torch.ones(1, 2), 7)}], max_steps=1)


def test_a_save_that_fails_hides_nothing(tmp_path, monkeypatch):
    def fails(self, trainer):
        raise OSError("no space left")

    monkeypatch.setattr(CheckpointingHook, "save", fails)
    failing = Fit(7, workspace=tmp_path, device="cpu")
    failing.fails_at = 2
    with pytest.raises(OutOfMemoryError, match=r"continues from the last checkpoint\. PyTorch's message"):
        failing.train()


def test_other_errors_leave_unchanged(tmp_path):
    class Wrong(Fit):
        def forward(self, input):
            return self.model(input[:, :1]).mean(), {}

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        Wrong(2, workspace=tmp_path, device="cpu").train()
    assert not isinstance(caught.value, TreadleError)
