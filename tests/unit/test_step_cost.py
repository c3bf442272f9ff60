"""What a step may cost: no host read between log points, few library frames above forward, few files entered."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import treadle
from helpers import CountReads, ReadsPerStep, library_frames
from step_profile_kit import COLUMNS, FACES, StepProfile, profile_of
from treadle import BaseTrainer, EmaHook, LoggingHook, ProgressHook


class Fit(BaseTrainer):
    device_name = "cpu"
    fused = True

    def build_data_loader(self):
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(8, 4, generator=generator).to(self.device) for _ in range(50)]

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(self.device)

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=self.fused)

    def build_lr_scheduler(self):
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def build_hooks(self):
        return [EmaHook(0.9), ProgressHook(20, with_records=True), LoggingHook(20)]

    def forward(self, input):
        out = self.model(input)
        return out.square().mean(), {"mean": out.mean()}


@pytest.mark.parametrize("fused", [True, False])
def test_nothing_is_read_on_the_host_between_log_points_with_clipping_on(fused):
    watch = ReadsPerStep()

    class Watched(Fit):
        def build_hooks(self):
            return [*super().build_hooks(), watch]

    trainer = Watched(40, grad_clip=0.1, device="cpu")
    trainer.fused = fused
    trainer.train()
    between = [reads for step, reads in enumerate(watch.per_step, start=1) if step % 20]
    # torch's own unfused optimizer reads its step counters on the CPU, in a hand loop as well.
    assert between == [count_plain_loop(fused)] * 38
    assert fused is False or between == [0] * 38


def count_plain_loop(fused):
    trainer = Fit(1, device="cpu")
    trainer.fused = fused
    trainer.prepare()
    with CountReads() as mode:
        trainer.forward(trainer.data_loader[0])[0].backward()
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1)
        trainer.optimizer.step()
    return len(mode.reads)


def test_the_counter_would_see_a_read():
    with CountReads() as mode:
        torch.ones(1).item()
    assert len(mode.reads) == 1


def test_at_most_three_library_frames_lie_between_the_script_and_forward():
    seen = []

    class Looking(Fit):
        def forward(self, input):
            seen.append(library_frames())
            return super().forward(input)

    Looking(2, device="cpu").train()
    assert seen == [["train_step", "run", "train"]] * 2


# Upper bounds of one plain step by face, see step_profile_kit; lower them when a step gets simpler.
PROFILES = {
    #               files, functions, calls, moves, back
    "BaseTrainer": (14, 58, 63, 34, 20),
    "Trainer": (23, 93, 117, 67, 44),
    "spectra": (25, 96, 125, 56, 31),  # in a folder, so with the step log and the session log
    "graphs": (35, 131, 187, 106, 71),  # looks for split masks; explains errors about edges
    "astro": (35, 156, 378, 146, 111),
}


@pytest.mark.parametrize("face", FACES)
def test_a_plain_step_enters_few_files_and_moves_rarely_between_them(face):
    profile = profile_of(face)
    numbers = {column: getattr(profile, column) for column in COLUMNS}
    over = {
        column: f"{number}, at most {most}"
        for (column, number), most in zip(numbers.items(), PROFILES[face], strict=True)
        if number > most
    }
    assert over == {}, f"{face}: python benchmarks/step_profile.py --face {face} --calls lists the calls"


def test_a_move_is_a_call_into_another_file_than_the_call_before():
    codes = {file: compile("0", f"{file}.py", "exec") for file in "abc"}
    profile = StepProfile([codes[file] for file in "aabbacb"])
    assert (profile.calls, profile.files, profile.functions, profile.moves, profile.back) == (7, 3, 3, 5, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_waits_for_no_tensor_on_a_gpu():
    class Strict(treadle.BaseHook):
        def on_before_step(self, trainer):
            if trainer.step > 3 and trainer.step % 20:
                torch.cuda.set_sync_debug_mode("error")

        def on_after_step(self, trainer):
            torch.cuda.set_sync_debug_mode("default")

    class Watched(Fit):
        def build_hooks(self):
            return [*super().build_hooks(), Strict()]

    try:
        trainer = Watched(60, grad_clip=0.1, device="cuda")
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.applied_steps == 60


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fused", [True, False])
def test_a_nan_on_a_gpu_leaves_the_weights_of_the_last_applied_step(fused):
    def run(steps, poisoned):
        treadle.set_seed(0)
        trainer = Fit(steps, grad_clip=0.1, device="cuda")
        trainer.fused = fused
        trainer.prepare()
        if poisoned:
            trainer.data_loader[12][0, 0] = torch.nan
        return trainer

    good = run(12, poisoned=False)
    good.train()
    bad = run(40, poisoned=True)
    with pytest.raises(treadle.NonFiniteError) as caught:
        bad.train()
    assert caught.value.step == 13
    assert bad.applied_steps == 12
    for a, b in zip(good.model.parameters(), bad.model.parameters(), strict=True):
        assert torch.equal(a, b)
    steps = [float(state["step"]) for state in bad.optimizer.state.values()]
    assert steps == [12.0] * len(steps)
