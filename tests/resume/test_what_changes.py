"""What changes between a stop and a resume is refused or said in words, never taken in silence."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from helpers import Augmented, MeanSquare, Snapshots, differences, scalar_engine, small_model, through_a_file
from treadle import (
    BestRule,
    CheckpointError,
    ConfigError,
    Engine,
    EpochTrainer,
    TensorLoader,
    Trainer,
    TransferLoader,
    set_seed,
)
from treadle.graphs import get_scheduler
from treadle.hooks import BaseHook, EmaHook
from treadle.optim.optimizer import _refuse_another_kind
from treadle.spectra import build_warmup_cosine

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def engine_with(model=None, **settings):
    set_seed(0)
    model = small_model() if model is None else model
    snapshots = Snapshots()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Engine(model, optimizer, MeanSquare(), device="cpu", hooks=[snapshots], **settings), snapshots


def stopped(loader, steps=2, **settings):
    engine, snapshots = engine_with(**settings)
    engine.run(loader, max_steps=steps)
    return snapshots.states[steps]


def resumed(state, loader, **settings):
    engine, _ = engine_with(**settings)
    engine.load_state_dict(state)
    engine.run(loader, max_steps=engine.step + 2)
    return engine


def test_another_batch_size_is_said(caplog):
    resumed(stopped(DataLoader(Augmented(), batch_size=4)), DataLoader(Augmented(), batch_size=2))
    assert "an epoch had 5 micro-batches and now has 10: another batch size" in caplog.text


@pytest.mark.parametrize("stop", [5, 10])
@pytest.mark.parametrize(("make", "text"), [
    (lambda size: DataLoader(Augmented(), batch_size=size), "batches had 4 samples"),
    (lambda size: TransferLoader(DataLoader(Augmented(), batch_size=size), "cpu"), "batches had 4 samples"),
    (lambda size: TensorLoader(torch.ones(20, 4), torch.ones(20, 1), batch_size=size), "batches had 4 samples"),
    (lambda size: StatefulDataLoader(Augmented(), batch_size=size), "an epoch had 5 micro-batches"),
])  # fmt: skip
def test_another_batch_size_at_the_end_of_an_epoch_is_named(stop, make, text, caplog):
    state = stopped(make(4), steps=stop)
    resumed(state, make(4))
    assert text not in caplog.text
    resumed(state, make(3))
    assert text in caplog.text


class EachEpochLarger(BaseHook):
    """Makes the batches and the steps larger from epoch to epoch."""

    def __init__(self, loader):
        self.loader = loader

    def on_after_epoch(self, trainer):
        self.loader.batch_sampler.batch_size += 2
        trainer.accumulation_steps += 1


@pytest.mark.parametrize("stop", [3, 5, 6])
def test_sizes_that_a_hook_moves_are_not_named(stop, caplog):
    def made(state=None):
        engine, snapshots = engine_with()
        loader = DataLoader(Augmented(), batch_size=4)
        engine.hooks.append(EachEpochLarger(loader))
        if state is not None:
            engine.load_state_dict(state)
        engine.run(loader, max_steps=8 if state is not None else stop)
        return snapshots.states[engine.step]

    made(made())
    assert "in the run that wrote" not in caplog.text
    assert "resumed with another loader" not in caplog.text


@pytest.mark.parametrize("stop", range(1, 7))
@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), (2, 3)])
def test_another_number_of_micro_batches_is_named_after_every_stop(before, now, stop, caplog):
    loader = DataLoader(Augmented(), batch_size=4)
    state = stopped(loader, steps=stop, accumulation_steps=before)
    resumed(state, loader, accumulation_steps=before)
    assert "accumulation_steps:" not in caplog.text
    resumed(state, loader, accumulation_steps=now)
    assert f"accumulation_steps: a step had {before} micro-batches" in caplog.text


def test_another_setting_of_the_optimizer_is_said_since_the_checkpoints_goes_on(caplog):
    state = stopped(loader := DataLoader(Augmented(), batch_size=4))
    engine, _ = engine_with()
    engine.optimizer.param_groups[0].update(lr=0.5, betas=(0.5, 0.9))
    engine.load_state_dict(state)
    assert "betas=[0.9, 0.999] (built as [0.5, 0.9]), lr=0.01 (built as 0.5)" in caplog.text
    assert engine.optimizer.param_groups[0]["lr"] == 0.01
    caplog.clear()
    resumed(state, loader)
    assert "continues with the checkpoint's" not in caplog.text


def test_a_schedule_that_has_moved_the_rate_is_no_other_setting(caplog):
    def scheduled(lr):
        engine, snapshots = engine_with()
        engine.optimizer.param_groups[0]["lr"] = lr
        engine.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
        return engine, snapshots

    engine, snapshots = scheduled(0.01)
    engine.run(DataLoader(Augmented(), batch_size=4), max_steps=2)
    scheduled(0.01)[0].load_state_dict(snapshots.states[2])
    assert "continues with the checkpoint's" not in caplog.text
    scheduled(0.02)[0].load_state_dict(snapshots.states[2])
    assert "checkpoint's initial_lr=0.01 (built as 0.02);" in caplog.text


class MovesTheRate(BaseHook):
    """A schedule of a user's, which sets the rate itself."""

    def on_before_step(self, trainer):
        trainer.optimizer.param_groups[0]["lr"] = 0.01 / trainer.step


def test_a_rate_that_a_hook_has_moved_is_no_other_setting(caplog):
    def moved(lr, state=None):
        engine, snapshots = engine_with()
        engine.hooks.append(MovesTheRate())
        engine.optimizer.param_groups[0]["lr"] = lr
        if state is not None:
            engine.load_state_dict(state)
        engine.run(DataLoader(Augmented(), batch_size=4), max_steps=engine.step + 2)
        return snapshots.states[engine.step]

    twice = moved(0.01, moved(0.01))
    moved(0.01, twice)
    assert "continues with the checkpoint's" not in caplog.text
    moved(0.02, twice)
    assert "continues with the checkpoint's lr=0.0025 (built as 0.02)" in caplog.text


class Factor:
    """A factor of the rate that moves, and one that does not."""

    def __init__(self, base):
        self.base, self.calls = base, 0

    def __call__(self, epoch):
        self.calls += 1
        return self.base / self.calls


def test_what_moves_in_the_object_of_a_schedule_is_no_other_setting(caplog):
    def scheduled(base):
        engine, snapshots = engine_with()
        engine.lr_scheduler = lrs.LambdaLR(engine.optimizer, Factor(base))
        return engine, snapshots

    engine, snapshots = scheduled(1.0)
    engine.run(DataLoader(Augmented(), batch_size=4), max_steps=2)
    scheduled(1.0)[0].load_state_dict(snapshots.states[2])
    assert "continues with the checkpoint's" not in caplog.text
    with pytest.raises(CheckpointError, match=r"scheduler\.lr_lambdas\[0\]\.base: .* \(1\.0 and 2\.0"):
        scheduled(2.0)[0].load_state_dict(snapshots.states[2])


def test_another_kind_of_loader_is_said(caplog):
    resumed(stopped(DataLoader(Augmented(), batch_size=4)), list(DataLoader(Augmented(), batch_size=4)))
    assert "was of kind 'indexed', this one is 'replayed'" in caplog.text


def test_workers_where_there_were_none_are_said(caplog):
    resumed(stopped(DataLoader(Augmented(), batch_size=4)), DataLoader(Augmented(), batch_size=4, num_workers=1))
    assert "num_workers was 0 and is now 1" in caplog.text


def test_a_stateful_loader_with_other_workers_is_refused_in_words():
    state = stopped(StatefulDataLoader(Augmented(), batch_size=4, num_workers=1))
    with pytest.raises(CheckpointError, match="num_workers=1 and cannot be loaded with num_workers=2"):
        resumed(state, StatefulDataLoader(Augmented(), batch_size=4, num_workers=2))


def test_a_tensor_loader_over_other_rows_is_refused_in_words():
    data = Augmented()
    state = stopped(TensorLoader(data.x, data.y, batch_size=4))
    with pytest.raises(ConfigError, match="num_rows was 20"):
        resumed(state, TensorLoader(data.x[:16], data.y[:16], batch_size=4))


def test_another_batch_size_of_a_tensor_loader_goes_on_with_the_rows_that_are_left(caplog):
    data = Augmented()
    state = stopped(TensorLoader(data.x, data.y, batch_size=4))
    loader = TensorLoader(data.x, data.y, batch_size=3)
    engine = resumed(state, loader)
    assert list(loader.last_rows) == [11, 12, 13], "8 rows were read, then two batches of 3"
    assert "after 8 of its 20 samples" in caplog.text
    assert engine.target.total_steps(engine) == engine.step


def test_another_model_is_refused_with_every_name(caplog):
    state = stopped(DataLoader(Augmented(), batch_size=4))
    other = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 1))
    with pytest.raises(CheckpointError, match=r"0\.weight is \(8, 4\) in the checkpoint and \(9, 4\) in the model"):
        resumed(state, DataLoader(Augmented(), batch_size=4), model=other)


def test_a_larger_target_goes_on_and_a_smaller_one_is_a_finished_run():
    loader = DataLoader(Augmented(), batch_size=4)
    state = stopped(loader, steps=4)
    engine, _ = engine_with()
    engine.load_state_dict(state)
    engine.run(loader, max_steps=3)
    assert engine.step == 4
    engine.run(loader, max_steps=6)
    assert engine.step == 6


def test_a_scaler_that_comes_or_goes_is_said(caplog):
    loader = DataLoader(Augmented(), batch_size=4)
    resumed(stopped(loader), loader, precision="fp16")
    assert "the fp16 scale starts fresh" in caplog.text
    resumed(stopped(loader, precision="fp16"), loader)
    assert "gradient-scaler state is ignored" in caplog.text


@pytest.mark.parametrize("saved", [{"bad": 1}, {"scale": 1.0}, {"scale": "much"}, "65536"])
def test_a_scaler_state_that_is_none_is_refused_before_anything_is_loaded(saved):
    loader = DataLoader(Augmented(), batch_size=4)
    state = stopped(loader, precision="fp16")
    if isinstance(saved, dict) and saved.get("scale") == "much":
        saved = {**state["scaler"], **saved}
    engine, _ = engine_with(precision="fp16")
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    with pytest.raises(CheckpointError, match="scaler"):
        engine.load_state_dict({**state, "scaler": saved})
    assert all(torch.equal(value, engine.model.state_dict()[name]) for name, value in before.items())
    assert engine.step == 0


def scheduled(make, optimizer=torch.optim.AdamW):
    model = small_model()
    built = optimizer(model.parameters(), lr=0.01)
    return Engine(model, built, MeanSquare(), device="cpu", scheduler=make(built))


def moved(make, optimizer=torch.optim.AdamW):
    """The state of a run of a few steps under a schedule."""
    engine = scheduled(make, optimizer)
    engine.run(DataLoader(Augmented(), batch_size=4), max_steps=3)
    return engine.state_dict()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (lambda o: lrs.CosineAnnealingLR(o, 10), lambda o: lrs.CosineAnnealingLR(o, 20), "T_max=10 (built as 20)"),
        (
            lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.5, 2), lrs.StepLR(o, 2)], [2]),
            lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.5, 2), lrs.StepLR(o, 3)], [4]),
            "_milestones=[2] (built as [4]), step_size=2 (built as 3)",
        ),
        (lambda o: lrs.MultiStepLR(o, [2, 2]), lambda o: lrs.MultiStepLR(o, [3]), "milestones={2: 2} (built as"),
    ],
)
def test_another_setting_of_the_schedule_is_said_since_the_checkpoints_goes_on(caplog, old, new, said):
    state = moved(old)
    scheduled(new).load_state_dict(state)
    assert f"the schedule continues with the checkpoint's {said}" in caplog.text
    caplog.clear()
    scheduled(old).load_state_dict(through_a_file(state))
    assert "continues with the checkpoint's" not in caplog.text


@pytest.mark.parametrize("make", [
    lambda o, steps: build_warmup_cosine(o, warmup_steps=1, total_steps=steps),
    lambda o, steps: get_scheduler(o, "linear", total_epochs=steps),
    lambda o, steps: lrs.LambdaLR(o, lambda n: 1 - n / steps),
])  # fmt: skip
def test_a_schedule_of_a_function_with_another_length_is_said_since_its_rate_jumps(make, caplog):
    state = moved(lambda o: make(o, 10))
    scheduled(lambda o: make(o, 20)).load_state_dict(state)
    assert "after 3 scheduler steps the learning rate is" in caplog.text
    caplog.clear()
    scheduled(lambda o: make(o, 10)).load_state_dict(through_a_file(state))
    assert "scheduler steps the learning rate" not in caplog.text


def test_another_kind_of_schedule_is_refused_in_words():
    def plain(optimizer):
        return lrs.StepLR(optimizer, 2)

    state, engine = moved(plain), scheduled(lambda o: lrs.LambdaLR(o, lambda n: 1.0))
    with pytest.raises(CheckpointError, match="has gamma, step_size, the LambdaLR of this run has lr_lambdas"):
        engine.load_state_dict(state)
    engine.load_state_dict({**state, "scheduler": None})
    assert engine.step == 3


@pytest.mark.parametrize("kinds", [("SGD", "AdamW"), ("Adam", "SGD"), ("Adam", "RMSprop"), ("Adagrad", "NAdam")])
def test_another_kind_of_optimizer_is_refused_in_words(kinds):
    old, new = (getattr(torch.optim, kind) for kind in kinds)
    with pytest.raises(CheckpointError, match=f"of another kind: it has .*, the {kinds[1]} of this run has"):
        scheduled(lambda o: None, new).load_state_dict(moved(lambda o: None, old))


def test_an_optimizer_of_an_older_torch_that_lacks_a_switch_is_taken():
    state = moved(lambda o: None)
    for group in state["optimizer"]["param_groups"]:
        del group["decoupled_weight_decay"], group["amsgrad"]
        group["of_the_user"] = 1
    engine = scheduled(lambda o: None)
    engine.load_state_dict(state)
    engine.run(DataLoader(Augmented(), batch_size=4), max_steps=4)


class Averaged(torch.optim.SGD):
    """Keeps a count of its own in its state."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict):
        self.calls = state_dict["calls"]
        super().load_state_dict(state_dict)


def test_what_an_optimizer_keeps_beside_torchs_entries_goes_on():
    state = through_a_file(moved(lambda o: None, Averaged))
    engine = scheduled(lambda o: None, Averaged)
    engine.load_state_dict(state)
    assert engine.optimizer.calls == 3


@pytest.mark.parametrize("change", ["optimizer", "scheduler", "ema", "selection"])
def test_a_state_that_does_not_fit_changes_nothing(change):
    def make(changed=False):
        set_seed(int(changed))
        model = small_model()
        groups = [{"params": [p]} for p in model.parameters()] if changed and change == "optimizer" else None
        optimizer = torch.optim.AdamW(groups or model.parameters(), lr=0.02 if changed else 0.01)
        schedule = lrs.ExponentialLR if not (changed and change == "scheduler") else lrs.ConstantLR
        scheduler = schedule(optimizer, 0.5)
        hooks = [EmaHook(0.9)]
        engine = Engine(model, optimizer, MeanSquare(), scheduler=scheduler, device="cpu", hooks=hooks)
        EpochTrainer(engine, best=BestRule("val_loss" if changed and change == "selection" else "train_loss"))
        return engine

    engine = make()
    engine.run(DataLoader(Augmented(), batch_size=4), max_steps=3)
    state, other = engine.state_dict(), make(changed=True)
    if change == "ema":
        state["ema"]["ema"]["shadow"].popitem()
    before = other.state_dict()
    with pytest.raises((CheckpointError, ConfigError)):
        other.load_state_dict(state)
    assert differences(other.state_dict(), before) == []


@pytest.mark.parametrize(
    ("before", "now", "deterministic", "said"),
    [
        ("cpu", "cpu", False, None),
        ("cuda", "cpu", False, "was written on cuda and this run is on cpu: kernels round differently"),
        ("cpu", "cuda", True, "was written on cpu and this run is on cuda: kernels round differently"),
        ("cuda", "cuda", False, "exact only if this model's kernels are deterministic: on cuda"),
        ("cuda", "cuda", True, None),
        (None, "cpu", False, None),
    ],
)
def test_another_device_and_kernels_that_may_vary_are_said(before, now, deterministic, said, caplog, monkeypatch):
    engine = scalar_engine()
    tree = engine.state_dict()
    assert tree["progress"]["device"] == "cpu"
    tree["progress"]["device"] = before
    engine.precision.device = torch.device(now)  # nothing is put there: the running epoch has no means
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    engine.load_state_dict(tree)
    assert (said in caplog.text) if said else caplog.messages == []


def trained(folder, epochs, *, rows=32, workers=0, **settings):
    set_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Trainer(model, optimizer, nn.MSELoss(), device="cpu", progress=False, **settings)
    data = TensorDataset(torch.ones(rows, 2), torch.ones(rows, 1))
    trainer.train(DataLoader(data, 8, num_workers=workers), epochs, save_dir=folder, resume_from="auto")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"rows": 64}, "resumed with another loader: an epoch had 4 micro-batches and now has 8"),
        ({"rows": 16}, "resumed with another loader: an epoch had 4 micro-batches and now has 2"),
        ({"workers": 1}, "resumed with another loader: num_workers was 0 and is now 1"),
        ({"max_grad_norm": 1.0}, "settings that differ from the checkpoint's: max_grad_norm=None (here 1.0)"),
        ({"mixed_precision": "bf16"}, "mixed_precision=None (here 'bf16')"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=1 (here 2)"),
        ({"log_interval": 7}, None),
    ],
    ids=str,
)
def test_what_changes_between_two_epochs_is_said(changed, said, tmp_path, caplog):
    trained(tmp_path, 1)
    caplog.clear()
    trained(tmp_path, 2, **changed)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (said is not None)
    assert said is None or said in warnings[0]


def test_another_decay_of_the_average_is_said(tmp_path, caplog):
    trained(tmp_path, 1, ema_decay=0.5)
    trained(tmp_path, 2, ema_decay=0.9)
    assert "ema_decay=0.5 (here 0.9)" in caplog.text


def test_adam_and_adamw_are_two_kinds(caplog):
    first, second = (kind(nn.Linear(2, 1).parameters()) for kind in (torch.optim.Adam, torch.optim.AdamW))
    with pytest.raises(CheckpointError, match="decays weights as Adam does, the AdamW of this run as AdamW does"):
        _refuse_another_kind(second, first.param_groups[0])
    assert caplog.text == ""


class OfHooks(list):
    """A list that can be referred to weakly."""


def test_parts_that_are_known_by_id_outlive_their_replacement():
    """A value of the user's at the address of a part that is gone was left out of checkpoints as one."""
    engine = scalar_engine()
    engine.hooks = OfHooks()
    held = weakref.ref(engine.hooks)
    engine.prepare()
    engine.hooks = [Snapshots()]
    gc.collect()
    assert held() is not None
