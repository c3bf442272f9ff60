"""The step as one CUDA graph: the bits of the eager step, its protection, its resume, what cannot be captured."""

from __future__ import annotations

import gc
import itertools
import logging

import pytest
import torch
from torch import nn

from treadle import ConfigError, Engine, NonFiniteError, StepOutput, TensorLoader
from treadle.hooks import BaseHook, CudaMaxMemoryHook, EmaHook, StepLogHook, StuckRankHook
from treadle.hooks.base import capturable
from treadle.hooks.steplog import StepRows
from treadle.means import RunningMeans
from treadle.optim.precision import Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 200


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.GELU(),
            nn.Dropout(0.3), nn.Linear(64, 4),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


class Fit:
    """Masks half of the inputs at random on the device; a loss, a record, a constant."""

    weight = staticmethod(lambda mask: float(len(mask)))
    spoil = None

    def step(self, model, batch, totals=None, generator=None):
        x, y = batch
        mask = torch.rand_like(x) < 0.5
        gap = (model(torch.where(mask, x, 0)) - y).square().mean()
        if self.spoil is not None:
            gap = self.spoil(gap)
        return StepOutput(gap, {"double": gap * 2, "three": 3}, weight=self.weight(mask), num_samples=len(x))


def rows(count=200, bad=None):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(count, 16, generator=generator), torch.randn(count, 4, generator=generator)
    if bad is not None:
        x[bad] = float("nan")
    return x, y


def engine_of(capture, *, task=None, make=None, hooks=(), **options):
    torch.manual_seed(0)
    torch.cuda.manual_seed(0)
    model = Net().cuda()
    optimizer = make(model) if make else torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.995**step)
    settings = {"grad_clip": 1.0, "hooks": [EmaHook(0.9), *hooks], "capture": capture, **options}
    return Engine(model, optimizer, task or Fit(), scheduler=schedule, device="cuda", **settings)


def loader_of(*, on_device=True, bad=None, **options):
    x, y = rows(bad=bad)
    return TensorLoader(x, y, batch_size=16, shuffle=True, device="cuda" if on_device else None, **options)


def run(capture, steps=STEPS, *, state=None, loader=None, hooks=(), **options):
    engine = engine_of(capture, hooks=[*hooks, Losses()], **options)
    if state is not None:
        engine.load_state_dict(state)
    engine.losses = []
    engine.run(loader_of() if loader is None else loader, max_steps=steps)
    return engine


class Losses(EmaHook):
    """Keeps each step's loss and norm, on the device."""

    def __init__(self):
        self.kept = []

    state_key = "losses"

    def averages(self, trainer):
        return {}

    def on_after_step(self, trainer):
        trainer.losses.append([*trainer.step_info["loss"], trainer.step_info["grad_norm"]])


def same(one, other):
    """Return all saved state, and the losses of the steps that both ran."""
    a, b = one.state_dict(), other.state_dict()
    for key in ("model", "ema", "optimizer", "rng", "progress", "scheduler"):
        assert equal(a[key], b[key]), key
    for mine, theirs in zip(reversed(one.losses), reversed(other.losses), strict=False):
        assert equal(mine, theirs)  # a norm is NaN where fp16 overflows
    return True


def equal(a, b):
    if isinstance(a, torch.Tensor):  # the running mean of a batch norm is NaN after a batch with one
        return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.fixture(scope="module")
def eager():
    return run(False)


def test_200_captured_steps_have_the_bits_of_eager_ones(eager):
    captured = run(True)
    assert len(captured.steps._steps) == 2  # whole batches, and the short one at each epoch's end
    assert same(eager, captured)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 3, 13, 14, 100])
def test_a_stop_in_one_mode_goes_on_in_the_other(eager, first, cut):
    state = run(first, cut).state_dict()
    assert same(eager, run(not first, state=state))


@pytest.mark.parametrize("cut", [1, 2, 13, 100])
def test_a_captured_run_resumes_captured(eager, cut):
    assert same(eager, run(True, state=run(True, cut).state_dict()))


def test_loading_a_state_in_the_middle_of_a_captured_run_is_noticed(eager):
    engine = engine_of(True, hooks=[Losses()])
    engine.losses = []
    loader = loader_of()
    engine.run(loader, max_steps=30)
    state = engine.state_dict()
    engine.run(loader, max_steps=60)
    engine.load_state_dict(state)
    engine.losses = []
    engine.run(loader, max_steps=STEPS)
    assert same(eager, engine)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulation_steps": 3},
        {"precision": "bf16"},
        {"grad_clip": None},
        {"max_non_finite_grad_retries": 2},
        {"make": lambda model: torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01), momentum=0.9, fused=True)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_settings_have_the_bits_of_eager_steps(options):
    assert same(run(False, 60, **options), run(True, 60, **options))


UNFUSED = ("Adadelta", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


def unfused(name):
    def make(model):
        rate = torch.tensor(0.01, device="cuda")
        return getattr(torch.optim, name)(model.parameters(), lr=rate, capturable=True)

    return make


@pytest.mark.parametrize("name", UNFUSED)
def test_optimizers_that_are_capturable_and_not_fused_have_the_bits_of_eager_steps(name):
    eager, captured = (run(capture, 40, make=unfused(name)) for capture in (False, True))
    assert captured.steps._steps
    assert same(eager, captured)
    for first, then in itertools.product((False, True), repeat=2):
        state = run(first, 20, make=unfused(name)).state_dict()
        assert same(eager, run(then, 40, make=unfused(name), state=state))


def test_a_captured_run_whose_rate_was_a_number_goes_on_eagerly_with_the_same_bits():
    def make(model):
        return torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)

    captured = run(True, 40, make=make)
    assert same(captured, run(False, 40, make=make, state=run(True, 20, make=make).state_dict()))


@pytest.mark.parametrize("name", UNFUSED)
def test_a_nan_leaves_the_state_of_optimizers_that_are_not_fused(name):
    (one, error), (other, seen) = (run_to_the_error(capture, make=unfused(name)) for capture in (False, True))
    assert (seen.step, seen.epoch) == (error.step, error.epoch)
    assert equal(list(one.model.parameters()), list(other.model.parameters()))
    assert equal(one.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"])


class Halves(BaseHook):
    @capturable
    def on_before_optimizer_step(self, trainer):
        for parameter in trainer.model.parameters():
            parameter.grad.mul_(0.5)


def test_a_hook_that_is_marked_is_captured_with_the_bits_of_eager_steps():
    eager, captured = (run(capture, 60, hooks=[Halves()]) for capture in (False, True))
    assert captured.steps._steps
    assert same(eager, captured)
    assert not equal(list(captured.model.parameters()), list(run(False, 60).model.parameters()))


@pytest.mark.parametrize("make", [lambda: StuckRankHook(60), CudaMaxMemoryHook], ids=["watchdog", "memory"])
def test_marked_hooks_of_the_library_are_captured_with_the_bits_of_eager_steps(make):
    captured = run(True, 60, hooks=[make()])
    assert captured.steps._steps
    assert same(run(False, 60), captured)
    if "max_memory" in captured.step_info:
        assert captured.step_info["max_memory"] > 0


def two_batches(capture):
    loader = TensorLoader(*rows(32), batch_size=16, shuffle=True, device="cuda", num_buffers=1)
    return run(capture, 12, loader=loader)


@pytest.mark.parametrize("capture", ["auto", True])
def test_a_step_is_captured_in_an_epoch_of_two_batches(capture):
    captured = two_batches(capture)
    assert captured.steps._steps
    assert same(two_batches(False), captured)


def test_garbage_that_holds_a_graph_breaks_no_recording():
    def leave_a_graph():
        circle = [run(True, 4)]
        circle.append(circle)

    threshold = gc.get_threshold()
    gc.disable()
    try:
        leave_a_graph()
        fresh = engine_of(True, hooks=[Losses()])
        fresh.losses = []
        gc.set_threshold(1, 1, 1)
        gc.enable()
        fresh.run(loader_of(), max_steps=20)
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
    assert fresh.steps._steps
    assert same(run(False, 20), fresh)


@pytest.fixture
def one_nccl_rank(tmp_path):
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_the_exchange_of_replicas_through_nccl_is_in_the_graph(one_nccl_rank, monkeypatch):
    calls = []
    all_reduce = torch.distributed.all_reduce
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *a, **k: calls.append(1) or all_reduce(*a, **k))

    def replicas(capture):
        engine = engine_of(capture, hooks=[Losses()])
        engine.model = nn.parallel.DistributedDataParallel(engine.model)
        engine.losses = []
        engine.prepare()
        engine.exchange._ranks = 2  # or one rank would exchange nothing
        before = len(calls)
        engine.run(loader_of(drop_last=True), max_steps=60)
        return engine, len(calls) - before

    with torch.cuda.stream(torch.cuda.Stream()):  # DistributedDataParallel keeps nodes of the stream it is built on
        (eager, of_eager), (captured, of_captured) = replicas(False), replicas(True)
    assert captured.steps._steps
    assert of_eager >= 60
    assert of_captured < of_eager / 2  # replays exchange by themselves
    assert same(eager, captured)


class Plain(Fit):
    """Leaves a loss alone: the records of steps that run ahead would be those of one step."""

    def step(self, model, batch, totals=None, generator=None):
        return StepOutput(super().step(model, batch).loss, weight=float(len(batch[0])))


def test_steps_that_are_launched_several_at_a_time_have_the_bits_of_eager_ones():
    def blocks(capture):
        torch.manual_seed(0)
        torch.cuda.manual_seed(0)
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
        engine = Engine(model, optimizer, Plain(), device="cuda", grad_clip=1.0, hooks=[EmaHook(0.9)], capture=capture)
        engine.run(TensorLoader(*rows(1600), batch_size=16, shuffle=True, device="cuda", num_buffers=1), max_steps=300)
        engine.losses = []
        return engine

    captured = blocks(True)
    assert captured.steps._latest_step._several is not None
    assert same(blocks(False), captured)


@pytest.mark.parametrize("buffers", [None, 1, 2])
def test_the_loaders_own_buffers_are_read_where_they_are(buffers):
    assert same(run(False, 60), run(True, 60, loader=loader_of(num_buffers=buffers)))


def test_data_on_the_host_is_copied_in():
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*rows()), batch_size=16, pin_memory=True, num_workers=2
    )

    class Moving(Fit):
        def step(self, model, batch, totals=None, generator=None):
            return super().step(model, [part.cuda(non_blocking=True) for part in batch])

    assert same(run(False, 60, task=Moving(), loader=loader), run(True, 60, task=Moving(), loader=loader))


def test_a_number_as_learning_rate_becomes_a_tensor_that_the_schedule_moves():
    engine = run(True, 60, make=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    rate = engine.optimizer.param_groups[0]["lr"]
    assert rate.device.type == "cuda"
    assert float(rate) == pytest.approx(0.01 * 0.995**60, rel=1e-5)


def test_a_weight_on_the_device_is_read_once_a_step():
    task = Fit()
    task.weight = lambda mask: mask.sum()
    assert same(run(False, 60, task=task), run(True, 60, task=task))


def test_nothing_counts_in_a_step_and_nothing_changes():
    task = Fit()
    task.weight = lambda mask: mask.sum() * 0
    engine = engine_of(True, task=task)
    engine.run(loader_of(), max_steps=20)
    assert engine.applied_steps == 0
    assert engine.step_info["reason"] == "the total weight is 0"


def run_to_the_error(capture, **options):
    engine = engine_of(capture, **options)
    with pytest.raises(NonFiniteError) as caught:
        engine.run(loader_of(bad=slice(0, 1)), max_steps=STEPS)
    return engine, caught.value


@pytest.mark.parametrize("options", [{}, {"max_non_finite_grad_retries": 1}], ids=["error", "retries"])
def test_a_nan_leaves_weights_and_optimizer_of_the_last_applied_step(options):
    if options:
        one, other = (run(capture, 60, loader=loader_of(bad=slice(0, 1)), **options) for capture in (False, True))
        assert same(one, other)
        return
    (one, error), (other, seen) = run_to_the_error(False), run_to_the_error(True)
    assert (seen.step, seen.epoch, seen.batch_index) == (error.step, error.epoch, error.batch_index)
    assert other.applied_steps == one.applied_steps == error.step - 1
    assert equal(list(one.model.parameters()), list(other.model.parameters()))
    state, there = one.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    assert equal(state, there)


def test_no_captured_step_waits_for_the_device():
    watched = []

    class Watch(Losses):
        def on_before_step(self, trainer):
            torch.cuda.set_sync_debug_mode("error" if trainer.step > 5 else "default")

        def on_after_step(self, trainer):
            watched.append(torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("default")

    try:
        engine_of(True, hooks=[Watch()]).run(loader_of(drop_last=True), max_steps=11)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watched == [0] * 5 + [2] * 6


class HostScaler(torch.amp.GradScaler):
    """Scaler of a user, whose result the host reads in each step."""

    def update(self, new_scale=None):
        super().update(new_scale)


class Notes(StepLogHook):
    """Notes each step without being due, as a log does."""

    def on_before_train(self, trainer):
        self._rows = StepRows()
        trainer.noted = []

    def on_after_step(self, trainer):
        self._rows.add(trainer)

    def on_after_steps(self, trainer, block):
        self._rows.add_block(block)

    def on_state_dict(self, trainer, state_dict):
        pass

    def on_close(self, trainer, error=None):
        trainer.noted = self._rows.lines()


def in_fp16(capture, steps=90, *, state=None, kind=torch.amp.GradScaler, scheduled=False, sees=False, **options):
    engine = engine_of(capture, hooks=[Notes(), *([Losses()] if sees else [])], precision="fp16", **options)
    if not scheduled:
        engine.lr_scheduler = None
    scaler = kind("cuda", init_scale=2.0**24, growth_interval=9)
    engine.precision = Precision("fp16", engine.device, scaler=scaler)
    engine.losses = []
    if state is not None:
        engine.load_state_dict(state)
    engine.run(loader_of(num_buffers=options.get("accumulation_steps", 1)), max_steps=steps)
    return engine


def same_in_fp16(one, other):
    assert equal(one.state_dict()["scaler"], other.state_dict()["scaler"])
    return same(one, other)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01), momentum=0.9, fused=True)


FP16 = {
    "nothing": {}, "sees": {"sees": True}, "schedule": {"scheduled": True}, "momentum": {"make": momentum},
    "plain": {"task": "plain"}, "accumulation": {"accumulation_steps": 2},
}  # fmt: skip


@pytest.mark.parametrize("options", FP16.values(), ids=FP16)
def test_fp16_skips_on_the_device_what_a_host_skips_captured_or_not(options):
    options = {**options, **({"task": Plain()} if "task" in options else {})}
    decided, eager, captured = (
        in_fp16(capture, kind=kind, **options)
        for capture, kind in ((False, HostScaler), (False, torch.amp.GradScaler), (True, torch.amp.GradScaler))
    )
    assert decided.guard.skips is None
    assert captured.steps._steps
    assert captured.applied_steps < captured.step
    assert same_in_fp16(decided, eager)
    assert same_in_fp16(eager, captured)
    assert len(captured.noted) == captured.step
    assert decided.noted == eager.noted == captured.noted


@pytest.mark.parametrize(("first", "then"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("cut", [1, 30])
def test_fp16_resumes_in_either_mode(first, then, cut):
    assert same_in_fp16(in_fp16(False, 60), in_fp16(then, 60, state=in_fp16(first, cut).state_dict()))


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("scheduled", [False, True])
def test_no_step_of_fp16_reads_the_device(capture, scheduled):
    class Watch(Losses):
        state_key, watched = "watch", 0

        def steps_ahead(self, trainer):
            return None

        def on_before_step(self, trainer):
            if trainer.step > 5:
                self.watched += 1
                torch.cuda.set_sync_debug_mode("error")

        def on_after_step(self, trainer):
            torch.cuda.set_sync_debug_mode("default")

    watch = Watch()
    try:
        engine = engine_of(capture, hooks=[watch], precision="fp16")
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
        engine.precision = Precision("fp16", engine.device, scaler=scaler)
        engine.lr_scheduler = engine.lr_scheduler if scheduled else None
        engine.run(loader_of(drop_last=True), max_steps=11)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.watched == 6
    assert engine.applied_steps == 11


@pytest.mark.parametrize("capture", [False, True])
def test_fp16_ends_in_the_error_of_a_host_that_decides(capture):
    def broken(capture, kind):
        engine = engine_of(capture, precision="fp16")
        engine.lr_scheduler = None
        engine.precision = Precision("fp16", engine.device, scaler=kind("cuda", init_scale=3.0))
        with pytest.raises(NonFiniteError) as caught:
            engine.run(loader_of(bad=slice(0, 2)), max_steps=STEPS)
        return engine, caught.value

    (one, error), (other, seen) = broken(False, HostScaler), broken(capture, torch.amp.GradScaler)
    assert (seen.step, seen.epoch, seen.batch_index) == (error.step, error.epoch, error.batch_index)
    assert bool(capture) == bool(getattr(other.steps, "_steps", False))
    assert one.applied_steps == other.applied_steps
    assert equal(list(one.model.parameters()), list(other.model.parameters()))
    assert equal(list(one.averages["ema"].module.parameters()), list(other.averages["ema"].module.parameters()))
    assert one.precision.scaler.state_dict() == other.precision.scaler.state_dict()


def reads(loss):
    return loss * (1.0 if loss.item() > -1 else 2.0)


def draws(loss):
    return loss * torch.rand(()).item()


@pytest.mark.parametrize(
    ("spoil", "reason"), [(reads, "cannot be captured"), (lambda loss: loss * float(torch.rand(())), "on the CPU")]
)
def test_what_cannot_be_captured_is_refused_or_told_and_run_eagerly(spoil, reason, caplog):
    task = Fit()
    task.spoil = spoil
    with pytest.raises(ConfigError, match=reason):
        run(True, 20, task=task)
    plain = run(False, 40, task=task)
    stream = torch.cuda.current_stream()
    with caplog.at_level(logging.WARNING):
        fallen = run("auto", 40, task=task)
    assert torch.cuda.current_stream() == stream
    assert "previous error" not in caplog.text
    assert same(plain, fallen)
    assert [reason in record.getMessage() for record in caplog.records].count(True) == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"make": lambda model: torch.optim.AdamW(model.parameters(), foreach=True)}, "fused=True"),
    ],
)
def test_what_is_known_before_is_refused_before(options, reason):
    with pytest.raises(ConfigError, match=reason):
        engine_of(True, **options).prepare()


def test_freezing_a_layer_makes_another_graph():
    def frozen_at_20(capture):
        class Freeze(Losses):
            state_key = "freeze"

            def on_after_step(self, trainer):
                if trainer.step == 20:
                    trainer.model.layers[0].requires_grad_(False)

        return run(capture, 60, hooks=[Freeze()])

    assert same(frozen_at_20(False), frozen_at_20(True))


def spectra_run(folder, capture, *, amp):
    from treadle.spectra import ChemoMAE, SpectraTrainer, TrainerConfig

    torch.manual_seed(0)
    model = ChemoMAE(seq_len=64, d_model=32, nhead=2, num_layers=2, dim_feedforward=64, n_blocks=8, n_mask=5).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), fused=True)
    spectra = torch.randn(150, 64, generator=torch.Generator().manual_seed(3))
    loader = TensorLoader(spectra, batch_size=32, shuffle=True, device="cuda")
    settings = TrainerConfig(out_dir=folder, amp=amp, amp_dtype="bf16", capture=capture, early_stop_patience=None)
    trainer = SpectraTrainer(model, optimizer, loader, loader, cfg=settings, device="cuda")
    trainer.fit(epochs=4)
    return trainer


@pytest.mark.parametrize("amp", [False, True])
def test_the_spectra_face_has_the_bits_of_eager_steps_masks_included(tmp_path, amp):
    eager, captured = (spectra_run(tmp_path / str(capture), capture, amp=amp) for capture in (False, True))
    assert captured._engine.steps._steps
    assert equal(dict(eager.model.state_dict()), dict(captured.model.state_dict()))
    assert [row["val_loss"] for row in eager.history] == [row["val_loss"] for row in captured.history]


def test_the_functional_face_has_the_bits_of_eager_steps():
    from treadle import Trainer

    def fit(capture):
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
        settings = {"training": {"max_grad_norm": 1.0, "ema_decay": 0.9}}
        trainer = Trainer(model, optimizer, nn.MSELoss(), settings, device="cuda", capture=capture)
        history = trainer.train(loader_of(), num_epochs=5)
        return trainer, history

    (eager, one), (captured, other) = fit(False), fit(True)
    assert captured._engine.steps._steps
    assert one["train_loss"] == other["train_loss"]
    assert equal(dict(eager.model.state_dict()), dict(captured.model.state_dict()))


def test_the_step_face_has_the_bits_of_eager_steps():
    from treadle import BaseTrainer

    class Fitting(BaseTrainer):
        def build_data_loader(self):
            return loader_of(num_buffers=1)

        def build_model(self):
            return Net().to(self.device)

        def build_optimizer(self):
            return torch.optim.AdamW(self.model.parameters(), lr=torch.tensor(0.01), fused=True)

        def forward(self, input):
            x, y = input
            return nn.functional.mse_loss(self.model(x), y), {}

    def fit(capture):
        torch.manual_seed(0)
        trainer = Fitting(max_steps=60, grad_clip=1.0, device="cuda", capture=capture)
        trainer.train()
        return trainer

    eager, captured = fit(False), fit(True)
    assert captured.steps._steps
    assert equal(dict(eager.model.state_dict()), dict(captured.model.state_dict()))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_labels_that_do_not_count_are_counted_on_the_host_and_no_step_waits(accumulation):
    from treadle import Trainer

    class Watch(Losses):
        state_key = "watch"

        def on_before_step(self, trainer):
            torch.cuda.set_sync_debug_mode("error" if trainer.step > 4 else "default")

        def on_after_step(self, trainer):
            torch.cuda.set_sync_debug_mode("default")

    draw = torch.Generator().manual_seed(2)
    x, labels = rows()[0], torch.randint(0, 4, (200,), generator=draw)
    labels[torch.rand(200, generator=draw) < 0.3] = -100
    data = torch.utils.data.TensorDataset(x, labels)

    def fit(capture, hooks):
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
        training = {"gradient_accumulation_steps": accumulation, "log_interval": None}
        settings = {"training": training}
        trainer = Trainer(
            model, optimizer, nn.CrossEntropyLoss(), settings, device="cuda", hooks=hooks, capture=capture
        )
        loader = torch.utils.data.DataLoader(data, batch_size=20, pin_memory=True)
        try:
            return trainer, trainer.train(loader, 3)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    (eager, one), (captured, other) = fit(False, []), fit(True, [Watch()])
    assert 1 <= len(captured._engine.steps._steps) <= 2  # where two micro-batches weigh the same, and where they do not
    assert one["train_loss"] == other["train_loss"]
    assert equal(dict(eager.model.state_dict()), dict(captured.model.state_dict()))


def test_additions_in_any_order_are_captured_and_named(caplog):
    grid = torch.rand(1, 512, 512, 2, generator=torch.Generator().manual_seed(0)).cuda() * 2 - 1

    class Sampling(Fit):
        def step(self, model, batch, totals=None, generator=None):
            x, _ = batch
            picture = model(x).reshape(1, 1, len(x), -1)
            points = nn.functional.grid_sample(picture, grid, align_corners=False)  # backward: atomic additions
            return StepOutput(points.sin().mean() + points.square().mean(), weight=float(len(x)))

    with caplog.at_level(logging.WARNING):
        engine = engine_of(True, task=Sampling())
        engine.run(loader_of(), max_steps=20)
    assert engine.applied_steps == 20
    said = [message for message in caplog.messages if "not deterministic" in message]
    assert said, "these additions come in another order each time"
    assert all("grid_sampler_2d_backward" in message for message in said)


@pytest.mark.parametrize("weight", [1.0, 0.1])
def test_a_column_of_losses_is_added_as_its_values_one_by_one(weight):
    columns = torch.rand(4, 512, 2, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    single, whole = RunningMeans(), RunningMeans()
    for number, column in enumerate(columns):
        for value in column[number:, 1]:
            single.add({"loss": value}, weight)
        whole.add_column(("loss",), column[number:, 1], weight)
    assert equal(whole.state_dict(), single.state_dict())
