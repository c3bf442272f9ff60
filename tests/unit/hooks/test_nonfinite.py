"""The flight recorder: what it writes about a refused step, and what each policy does with it."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from helpers import differences
from treadle import BaseTrainer, CheckpointingHook, ConfigError, LoggingHook, NonFiniteError, NonFiniteHook, StepOutput
from treadle.checkpoint import load_checkpoint
from treadle.data import TensorLoader
from treadle.engine import Engine
from treadle.hooks import BaseHook, EmaHook, StepLogHook
from treadle.optim.nonfinite import FiniteGuard

STEPS = 8


class Rows(Dataset):
    """32 rows whose random augmentation a resume must repeat; the targets of ``bad`` rows are NaN."""

    def __init__(self, bad=(12,), noise=True):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(32, 3, generator=generator)
        self.y = self.x.sum(1, keepdim=True)
        self.y[list(bad)] = math.nan
        self.noise = noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + (0.01 * torch.rand(1) if self.noise else 0.0), self.y[index]


class Squares:
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput(model(batch).square().mean(), weight=len(batch))


class Fit(BaseTrainer):
    def __init__(self, folder, hooks=(), *, bad=(12,), workers=0, model=None, steps=STEPS, batch=4, **settings):
        super().__init__(steps, workspace=folder, device="cpu", **settings)
        self.given, self.bad, self.workers, self.made, self.batch = list(hooks), bad, workers, model, batch

    def build_data_loader(self):
        return DataLoader(Rows(self.bad), batch_size=self.batch, shuffle=True, num_workers=self.workers)

    def build_model(self):
        torch.manual_seed(3)
        return self.made() if self.made else nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def build_lr_scheduler(self):
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))

    def forward(self, input):
        x, y = input
        return StepOutput(nn.functional.mse_loss(self.model(x), y), num_samples=len(x))

    def build_hooks(self):
        return self.given


class Kept(BaseHook):
    """Keeps weights and a summary after each step."""

    def __init__(self):
        self.infos, self.weights, self.logged = [], [], []

    def on_after_step(self, trainer):
        self.infos.append({**trainer.step_info, "step": trainer.step})
        self.weights.append([p.detach().clone() for p in trainer.model.parameters()])

    def on_log(self, trainer, records, dry_run=False):
        self.logged.append((trainer.step, records["train"].get("loss")))


def events(folder, name="nonfinite"):
    return [json.loads((path / "event.json").read_text()) for path in sorted((folder / name).glob("step_*"))]


def finite(trainer):
    return all(bool(torch.isfinite(value).all()) for value in trainer.model.state_dict().values())


def refused(kept):
    return [info for info in kept.infos if info["reason"] is not None]


@pytest.mark.parametrize("workers", [0, 2])
def test_one_bad_sample_is_skipped_and_named(tmp_path, workers):
    kept = Kept()
    hooks = [NonFiniteHook("skip"), kept, LoggingHook(1), StepLogHook()]
    trainer = Fit(tmp_path, hooks, workers=workers)
    trainer.train()
    (marked,) = refused(kept)
    assert marked["reason"] == "non-finite gradient: skipped"
    assert not marked["applied"]
    assert (trainer.step, trainer.applied_steps) == (STEPS, STEPS - 1)
    assert finite(trainer)
    logged = dict(kept.logged)
    assert logged[marked["step"]] is None  # absent, never 0.0
    assert all(math.isfinite(loss) for step, loss in logged.items() if step != marked["step"])
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["loss"] is None for line in lines] == [not line["applied"] for line in lines]
    (event,) = events(tmp_path)
    assert event["step"] == marked["step"]
    assert len(event["sample_ids"]) == 1
    assert len(event["sample_ids"][0]) == 4
    assert 12 in event["sample_ids"][0]
    assert event["non_finite_inputs"] == ["0/1"]
    assert event["first_module"] is None
    assert event["where"].startswith("the loss")
    assert event["second_run"] == "same losses"
    assert event["grad_norm"] == "nan"
    assert event["losses"] == ["nan"]
    assert event["position"] == marked["step"]


def test_a_skipped_step_leaves_weights_schedule_and_averages_alone(tmp_path):
    kept = Kept()
    trainer = Fit(tmp_path, [NonFiniteHook("skip"), kept, EmaHook(0.5)])
    trainer.train()
    at = refused(kept)[0]["step"] - 1
    assert all(map(torch.equal, kept.weights[at], kept.weights[at - 1]))
    assert trainer.lr_scheduler.last_epoch == STEPS - 1
    assert trainer.averages["ema"].num_updates == STEPS - 1


def test_raise_is_the_engines_own_error_with_a_record(tmp_path):
    trainer = Fit(tmp_path, [NonFiniteHook()])
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    (event,) = events(tmp_path)
    assert event["action"] == "raised"
    assert caught.value.step == event["step"]
    assert finite(trainer)


@pytest.mark.parametrize("settings", [{"max_non_finite_grad_retries": 1}, {"hooks": ("skip",)}], ids=["retry", "skip"])
def test_a_refused_step_leaves_running_statistics_alone(settings, tmp_path):
    """A run over a batch of NaN ends as a run without that batch."""

    def trained(batches, hooks=(), **settings):
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        hooks = [NonFiniteHook(policy, path=tmp_path) for policy in hooks]
        engine = Engine(
            model, torch.optim.SGD(model.parameters(), lr=0.1), Squares(), device="cpu", hooks=hooks, **settings
        )
        engine.run(batches, epochs=1)
        return model.state_dict()

    good = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    bad = torch.full((4, 3), math.nan)
    assert differences(trained(good), trained([*good[:2], bad, *good[2:]], **settings)) == []


def test_retry_uses_the_engines_retries(tmp_path):
    kept = Kept()
    trainer = Fit(tmp_path, [NonFiniteHook("retry"), kept], max_non_finite_grad_retries=2, steps=7)
    trainer.train()
    assert [info["retries"] for info in kept.infos].count(1) == 1
    assert trainer.applied_steps == 7
    (event,) = events(tmp_path)
    assert event["action"] == "retry 1 of 2"
    assert 12 in event["sample_ids"][0]
    with pytest.raises(ConfigError, match="max_non_finite_grad_retries"):
        Fit(tmp_path / "b", [NonFiniteHook("retry")]).train()


def test_rollback_goes_back_with_a_lower_rate_and_on_with_the_data(tmp_path, caplog):
    kept = Kept()
    hooks = [NonFiniteHook("rollback", lr_factor=0.1), kept, CheckpointingHook(1, None, load=None)]
    trainer = Fit(tmp_path, hooks)
    with caplog.at_level(logging.WARNING, "treadle"):
        trainer.train()
    (marked,) = refused(kept)
    at = marked["step"]
    assert f"rolled back to step {at - 1}" in marked["reason"]
    assert "rolled back" in caplog.text
    assert all(map(torch.equal, kept.weights[at - 1], kept.weights[at - 2]))
    plain = [0.01 / (1 + n) for n in range(STEPS)]
    expected = [*plain[:at], *(0.1 * lr for lr in plain[at - 1 : -1])]
    assert [info["lr"][0] for info in kept.infos] == pytest.approx(expected)
    assert trainer.step == STEPS
    assert finite(trainer)
    tree = load_checkpoint(tmp_path / "checkpoints" / f"checkpoint_step_{STEPS}.pt")
    assert tree["hooks"]["NonFiniteHook"] == {"in_a_row": 0, "refused_steps": 1, "rollbacks": 1}
    assert tree["progress"]["applied_steps"] == STEPS - 1


def test_a_rollback_without_a_checkpoint_of_this_run_raises(tmp_path):
    Fit(tmp_path, [CheckpointingHook(1, load=None)], bad=()).train()
    trainer = Fit(tmp_path, [NonFiniteHook("rollback"), CheckpointingHook(100, load=None)])
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert "no good checkpoint of this run" in events(tmp_path)[0]["action"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("raise", 1), ("skip", 4), ("retry", 1), ("rollback", 3)],
)
def test_nothing_but_nan_ends_after_the_bound_with_the_weights_untouched(tmp_path, policy, expected):
    hook = NonFiniteHook(policy, max_in_a_row=3, max_rollbacks=2)
    settings = {"max_non_finite_grad_retries": 2} if policy == "retry" else {}
    first = Fit(tmp_path, [CheckpointingHook(1)], steps=1, bad=())
    first.train()
    before = first.state_dict()["model"]
    trainer = Fit(tmp_path, [hook, CheckpointingHook(100)], steps=100, bad=range(32), **settings)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    assert caught.value.step == 1 + expected
    assert differences(trainer.state_dict()["model"], before) == []
    assert len(events(tmp_path)) == (3 if policy == "retry" else expected)


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)


class BadBackward(nn.Module):
    """Finite forward, infinite gradient."""

    def forward(self, x):
        return torch.sqrt(torch.relu(x) * 0.0) + x


def with_log():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Log(), nn.Linear(4, 1))


def with_bad_backward():
    return nn.Sequential(nn.Linear(3, 4), BadBackward(), nn.Linear(4, 1))


def test_a_planted_log_of_a_negative_number_is_named(tmp_path):
    with pytest.raises(NonFiniteError):
        Fit(tmp_path, [NonFiniteHook()], bad=(), model=with_log, gradient_accumulation_steps=2).train()
    (event,) = events(tmp_path)
    assert (event["first_module"], event["first_module_type"]) == ("2", "Log")
    assert event["first_parameter"] in ("3.weight", "3.bias")
    assert event["non_finite_inputs"] == []
    assert len(event["sample_ids"]) == 2
    assert event["where"] == "output of module '2' (Log)"


def test_a_gradient_that_breaks_in_the_backward_pass_alone_is_named(tmp_path):
    with pytest.raises(NonFiniteError):
        Fit(tmp_path, [NonFiniteHook()], bad=(), model=with_bad_backward).train()
    (event,) = events(tmp_path)
    assert event["first_module"] is None
    assert event["first_parameter"] in ("0.weight", "0.bias")  # behind the layer, in the order of the backward pass
    assert event["non_finite_gradients"] == 2
    assert event["gradients"] == 4
    assert event["where"].startswith("gradient of '0.")


def test_a_norm_that_overflows_is_told_from_a_bad_gradient(tmp_path):
    class Steep(Fit):
        def forward(self, input):
            return self.model(input[0]).sum() * 1e30, {}

    with pytest.raises(NonFiniteError):
        Steep(tmp_path, [NonFiniteHook()], bad=()).train()
    (event,) = events(tmp_path)
    assert event["where"].startswith("the norm, which overflowed")
    assert event["grad_norm"] == "inf"


def test_batch_norm_does_not_keep_what_it_saw_of_the_refused_batch(tmp_path):
    class OnInputs(Fit):
        def forward(self, input):
            return self.model(input[0] + 0 * input[1]).square().mean(), {}

    trainer = OnInputs(
        tmp_path, [NonFiniteHook("skip")], model=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    )
    trainer.train()
    assert finite(trainer)
    assert int(trainer.model[0].num_batches_tracked) == STEPS - 1
    (event,) = events(tmp_path)
    assert event["first_module"] == "0"
    assert event["first_module_type"] == "BatchNorm1d"


def test_the_saved_batch_and_random_state_replay_the_step(tmp_path):
    seen = {}

    class Spy(BaseHook):
        def on_before_optimizer_step(self, trainer):
            seen[trainer.step] = [tuple(part.clone() for part in batch) for batch in trainer.group.batches]

    Fit(tmp_path, [NonFiniteHook("skip"), Spy()]).train()
    (event,) = events(tmp_path)
    (folder,) = (tmp_path / "nonfinite").iterdir()
    batches = torch.load(folder / "batch.pt", weights_only=True)
    assert differences(batches, seen[event["step"]]) == []
    assert set(torch.load(folder / "rng.pt", weights_only=True)) == {"python", "numpy", "torch", "accelerators"}


def test_a_batch_of_other_things_is_named_and_not_saved(tmp_path):
    class Odd(Fit):
        def build_data_loader(self):
            return [{"x": torch.ones(1, 3), "more": object()}]

        def forward(self, input):
            return self.model(input["x"]).sum() * math.nan, {}

    with pytest.raises(NonFiniteError):
        Odd(tmp_path, [NonFiniteHook()]).train()
    (event,) = events(tmp_path)
    assert event["batch"] == "not saved: a builtins.object is not a plain tensor or value"
    assert event["sample_ids"] == [None]
    (folder,) = (tmp_path / "nonfinite").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["event.json", "rng.pt"]


def test_the_recorder_moves_no_random_number_and_no_weight(tmp_path):
    trees = []
    for hooks in ([], [NonFiniteHook("skip")]):
        trainer = Fit(tmp_path, hooks, bad=(), steps=5)
        torch.manual_seed(0)
        trainer.train()
        trees.append(trainer.state_dict())
    trees[1]["hooks"] = trees[0]["hooks"]
    assert differences(trees[1], trees[0]) == []


class Stop(BaseHook):
    def __init__(self, step):
        self.step = step

    def on_after_step(self, trainer):
        if trainer.step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("policy", ["skip", "retry", "rollback"])
def test_a_resume_across_an_event_is_exact(tmp_path, policy, workers):
    settings = {"max_non_finite_grad_retries": 2} if policy == "retry" else {}

    def make(folder, *more):
        hooks = [NonFiniteHook(policy), EmaHook(0.9), CheckpointingHook(2, None), StepLogHook(), *more]
        return Fit(tmp_path / folder, hooks, workers=workers, steps=14, batch=3, **settings)

    def run(trainer):
        torch.manual_seed(0)
        trainer.train()
        return trainer.state_dict()

    straight = run(make("straight"))
    at = events(tmp_path / "straight")[0]["step"]
    for stop in range(at - 1, at + 4) if workers == 0 else [at]:
        folder = f"cut_{stop}"
        with pytest.raises(KeyboardInterrupt):
            run(make(folder, Stop(stop)))
        torch.manual_seed(77)
        resumed = make(folder)
        resumed.train()
        found = differences(resumed.state_dict(), straight)
        assert found == [], stop
        assert events(tmp_path / folder) == events(tmp_path / "straight")
        assert (tmp_path / folder / "steps.jsonl").read_text() == (tmp_path / "straight" / "steps.jsonl").read_text()


def test_the_bound_holds_over_a_resume(tmp_path):
    trainer = Fit(tmp_path, [NonFiniteHook("skip", 3), CheckpointingHook(1)], steps=2, bad=range(32))
    trainer.train()
    again = Fit(tmp_path, [NonFiniteHook("skip", 3), CheckpointingHook(1)], steps=9, bad=range(32))
    with pytest.raises(NonFiniteError) as caught:
        again.train()
    assert caught.value.step == 4


def test_an_fp16_overflow_is_no_event(tmp_path):
    class Overflows(Fit):
        def forward(self, input):
            scale = math.inf if self.step == 2 and self.precision.scaler.get_scale() > 2**15 else 1.0
            return self.model(input[0]).float().square().mean() * scale, {}

    kept = Kept()
    trainer = Overflows(tmp_path, [NonFiniteHook(), kept], bad=(), mixed_precision="fp16")
    trainer.train()
    assert [info["reason"] for info in refused(kept)] == ["non-finite gradient: the fp16 scale was lowered"]
    assert events(tmp_path) == []
    assert trainer.grad_scaler.get_scale() == 2**15


def test_only_so_many_events_are_written(tmp_path):
    hook = NonFiniteHook("skip", max_in_a_row=100, max_events=2)
    Fit(tmp_path, [hook], bad=range(32)).train()
    assert len(events(tmp_path)) == 2
    assert hook.refused_steps == STEPS


def test_a_fresh_run_sets_the_events_of_another_aside(tmp_path):
    for _ in range(2):
        Fit(tmp_path, [NonFiniteHook("skip")]).train()
    assert len(events(tmp_path)) == len(events(tmp_path, "nonfinite.1")) == 1


def test_a_full_disk_does_not_end_a_run_that_skips(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("treadle.hooks.nonfinite.write_text", full)
    trainer = Fit(tmp_path, [NonFiniteHook("skip")])
    trainer.train()
    assert trainer.step == STEPS
    assert "cannot be written" in caplog.text
    assert list((tmp_path / "nonfinite").iterdir()) == []


def test_a_hook_with_a_plan_makes_the_guard_answer_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("treadle.engine.session.skips_on_device", lambda optimizer, device: True)
    asked = Fit(tmp_path, [])
    asked.prepare()
    assert asked.guard.deferred
    trainer = Fit(tmp_path, [NonFiniteHook()])
    trainer.prepare()
    assert not trainer.guard.deferred
    assert isinstance(trainer.guard, FiniteGuard)


def test_two_plans_are_refused(tmp_path):
    class Second(NonFiniteHook):
        state_key = "Second"

    with pytest.raises(ConfigError, match="NonFiniteHook and Second"):
        Fit(tmp_path, [NonFiniteHook(), Second()]).prepare()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"policy": "ignore"}, "policy"), ({"max_in_a_row": 0}, "max_in_a_row"),
        ({"max_rollbacks": 0}, "max_rollbacks"),
        ({"lr_factor": 0.0}, "lr_factor"), ({"lr_factor": 1.5}, "lr_factor"), ({"max_events": -1}, "max_events"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(arguments, name):
    with pytest.raises(ConfigError, match=name):
        NonFiniteHook(**arguments)


def test_the_rows_of_a_tensor_loader_are_named(tmp_path):
    x = torch.ones(20, 3)
    x[13] = math.nan

    class Direct(Fit):
        def build_data_loader(self):
            return TensorLoader(x, torch.ones(20, 1), batch_size=4, shuffle=True)

    Direct(tmp_path, [NonFiniteHook("skip")], steps=5).train()
    (event,) = events(tmp_path)
    assert 13 in event["sample_ids"][0]


def test_step_group_keeps_to_the_policy():
    model = nn.Linear(3, 1)
    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        Mean(),
        device="cpu",
        hooks=[NonFiniteHook("skip", max_events=0)],
    )
    engine.workspace = None
    assert engine.step_group([torch.full((1, 3), math.nan)]) is False
    assert engine.step_group([torch.ones(1, 3)]) is True


class Mean:
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput(model(batch).mean())
