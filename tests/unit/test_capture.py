"""What is decided about capturing steps, with a graph that runs its work anew; the real one is tried on a GPU."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import treadle.capture.graph
from capture_kit import Rerun, capture_on_the_cpu, refuse_on_the_device
from helpers import differences
from treadle import BaseTrainer, ConfigError, Engine, NonFiniteError, StepOutput, TensorLoader
from treadle.capture.check import unordered_kernels
from treadle.capture.graph import CudaGraph
from treadle.capture.memory import FixedBatch, Results, shape_of
from treadle.capture.obstacles import reason_against, reason_against_ranks
from treadle.capture.step import CapturedStep
from treadle.data.tensors import RowGather
from treadle.hooks import BaseHook, CudaMaxMemoryHook, EmaHook, StuckRankHook, SwaHook
from treadle.hooks.base import capturable
from treadle.optim.ema import Ema
from treadle.optim.loss_weights import GivenWeights
from treadle.optim.precision import Precision


@pytest.fixture(params=["read", "told later"])
def on_the_cpu(request, monkeypatch):
    """Refusals are read of each step, as with retries, or the device tells them later, as on CUDA without."""
    capture_on_the_cpu(monkeypatch)
    if request.param == "told later":
        refuse_on_the_device(monkeypatch)
    return request.param


class Fit:
    def step(self, model, batch, totals=None, generator=None):
        x, y = batch
        gap = (model(x) - y).square().mean()
        return StepOutput(gap, {"double": gap * 2, "three": 3}, weight=float(len(x)), num_samples=len(x))


def engine_of(capture, *, task=None, hooks=(), **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    hooks = [EmaHook(0.9), *hooks]
    return Engine(
        model, optimizer, task or Fit(), scheduler=schedule, device="cpu", grad_clip=1.0, hooks=hooks, capture=capture,
        **options,
    )  # fmt: skip


def loader_of(**options):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(50, 8, generator=generator), torch.randn(50, 1, generator=generator)
    if options.pop("bad", False):
        x[0] = float("nan")
    return TensorLoader(x, y, batch_size=8, shuffle=True, **options)


def run(capture, steps=40, *, state=None, loader=None, **options):
    engine = engine_of(capture, **options)
    if state is not None:
        engine.load_state_dict(state)
    engine.run(loader_of() if loader is None else loader, max_steps=steps)
    return engine


def same(one, other):
    a, b = one.state_dict(), other.state_dict()
    for key in ("model", "optimizer", "rng", "progress", "scheduler", "ema"):
        assert not differences(a[key], b[key]), key
    return True


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}, {"max_non_finite_grad_retries": 1}])
def test_captured_steps_count_log_and_average_as_eager_ones(on_the_cpu, options):
    bad = "max_non_finite_grad_retries" in options
    loaders = loader_of(bad=bad), loader_of(bad=bad, num_buffers=options.get("accumulation_steps", 1))
    one, other = (run(capture, loader=loader, **options) for capture, loader in zip((False, True), loaders))
    assert same(one, other)
    assert one.train_means() == other.train_means()
    assert Rerun.made == 2  # whole groups, and the short one at each epoch's end


@pytest.mark.parametrize("cut", [1, 2, 7])
@pytest.mark.parametrize("first", [False, True])
def test_a_stop_in_one_mode_goes_on_in_the_other(on_the_cpu, first, cut):
    state = run(first, cut).state_dict()
    assert same(run(False), run(not first, state=state))


def scaled_run(capture, *, steps=40, state=None, scale=2.0**20):
    engine = engine_of(capture, precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=7)
    engine.precision = Precision("fp16", engine.device, scaler=scaler)
    if state is not None:
        engine.load_state_dict(state)
    seen = Scales()
    engine.hooks.append(seen)
    engine.run(loader_of(num_buffers=1 if capture else None), max_steps=steps)
    return engine, seen.rows


class Scales(BaseHook):
    def __init__(self):
        self.rows = []

    def on_after_step(self, trainer):
        self.rows.append((trainer.step_info["applied"], trainer.precision.scaler.get_scale()))


def test_the_scale_of_fp16_moves_as_in_eager_steps(on_the_cpu):
    eager, rows = scaled_run(False)
    captured, again = scaled_run(True)
    assert Rerun.made == 2
    assert rows == again
    assert {applied for applied, _ in rows[4:]} == {True, False}  # refused and applied, captured, too
    assert len({scale for _, scale in rows}) > 3
    assert same(eager, captured)
    assert differences(eager.state_dict()["scaler"], captured.state_dict()["scaler"]) == []


@pytest.mark.parametrize("first", [False, True])
def test_a_run_in_fp16_goes_on_in_the_other_mode(on_the_cpu, first):
    state = scaled_run(first, steps=13)[0].state_dict()
    whole, rest = scaled_run(False)[0], scaled_run(not first, state=state)[0]
    assert same(whole, rest)
    assert differences(whole.state_dict()["scaler"], rest.state_dict()["scaler"]) == []


class Masked(Fit):
    def __init__(self):
        self.draw = torch.Generator().manual_seed(5)  # the graph's own draws are on a device

    def prepare_batch(self, model, batch):
        x, y = batch
        mask = torch.rand(len(x), generator=self.draw) < 0.5
        return {"x": x, "y": y, "mask": mask}, float(mask.sum())

    def step(self, model, batch, totals=None, generator=None):
        given = batch if isinstance(batch, dict) else self.prepare_batch(model, batch)[0]
        gaps = (model(given["x"]) - given["y"]).square().mean(1)
        count = given["mask"].sum()
        return StepOutput(gaps.mul(given["mask"]).sum() / count, weight=float(count))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_host_part_of_a_task_stays_outside_and_its_weights_are_those_of_each_step(on_the_cpu, accumulation):
    one, other = (run(capture, task=Masked(), accumulation_steps=accumulation) for capture in (False, True))
    assert same(one, other)
    assert one.train_means() == other.train_means()
    assert Rerun.made == 2  # although the weights are others in each step


def test_a_layer_that_is_frozen_and_a_number_as_learning_rate_are_noticed(on_the_cpu):
    class Change(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step == 15:
                trainer.model[0].requires_grad_(False)
            if trainer.step == 20:
                trainer.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)

    assert same(run(False, hooks=[Change()]), run(True, hooks=[Change()]))


def test_a_step_that_gives_other_numbers_is_refused_or_told_once(on_the_cpu, caplog):
    class Counts(Fit):
        calls = 0

        def step(self, model, batch, totals=None, generator=None):
            self.calls += 1
            output = super().step(model, batch)
            return StepOutput(output.loss * self.calls, weight=output.weight)

    with pytest.raises(ConfigError, match="something that changes between calls") as caught:
        run(True, task=Counts())
    assert "capture='auto' or False" in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "reason"), [([1, {1, 2}], "a set"), ((torch.zeros(1), object()), "a object")], ids=["set", "object"]
)
def test_a_batch_of_unknown_kind_is_refused(on_the_cpu, batch, reason):
    class Odd(Fit):
        def step(self, model, batch, totals=None, generator=None):
            return StepOutput(model(torch.ones(1, 8)).mean())

    with pytest.raises(ConfigError, match=f"a batch holds {reason}"):
        run(True, task=Odd(), loader=[batch] * 3, steps=3)


def test_an_equal_average_moves_beside_the_graph(on_the_cpu):
    hooks = [[SwaHook(5, name="swa")] for _ in range(2)]
    eager, captured = run(False, hooks=hooks[0]), run(True, hooks=hooks[1])
    assert Rerun.made
    assert same(eager, captured)
    assert hooks[1][0].swa_model.num_updates == 36


def test_terms_counted_on_the_host_are_refused(on_the_cpu):
    class Terms(Fit):
        def weights(self, batch):
            return {"gap": float(len(batch[0]))}

    with pytest.raises(ConfigError, match="terms of the loss are counted on the host"):
        run(True, task=Terms())


def test_without_cuda_true_is_an_error_before_any_step_and_auto_says_why(caplog):
    with pytest.raises(ConfigError, match="the device is cpu; CUDA graphs need a CUDA device"):
        engine_of(True).prepare()
    with caplog.at_level(logging.WARNING):
        auto = run("auto", steps=5)
    assert same(run(False, steps=5), auto)
    assert sum("steps are not captured: the device is cpu" in message for message in caplog.messages) == 1


def test_another_value_is_an_error_at_once():
    with pytest.raises(ConfigError, match="capture='yes': must be True or False or 'auto'"):
        BaseTrainer(max_steps=1, capture="yes")


def test_shapes_types_and_plain_values_tell_batches_apart():
    x = torch.zeros(2, 3)
    alike = [(x, x + 1), (x, 3), {"a": x, "b": [x, None]}]
    assert len({shape_of(batch) for batch in alike}) == 3
    assert shape_of([x, 3]) != shape_of([x, 4])
    assert shape_of((x, [x, 3])) != shape_of((x, [x, 4]))
    assert shape_of(x) != shape_of(x.long())
    assert shape_of({"a": x}) != shape_of({"b": x})
    assert shape_of((x, 3)) != shape_of((3, x))
    assert shape_of([x]) != shape_of((x,))


def test_results_of_any_shape_are_told_apart():
    left = [torch.zeros(0), torch.tensor([1.0, 2.0]), torch.tensor(3)]
    assert [tensor.tolist() for tensor in Results(left).read()] == [[], [1.0, 2.0], 3]


def test_batches_are_copied_into_fixed_memory_unless_they_lie_there():
    first = {"x": torch.zeros(2), "n": 3}
    fixed, own = FixedBatch(first, torch.device("cpu")), FixedBatch(first, torch.device("cpu"), in_place=True)
    first["x"] += 1
    assert fixed.batch["x"].tolist() == [0, 0]
    assert own.batch["x"].tolist() == [1, 1]
    fixed.fill(first)
    own.fill({"x": torch.full((2,), 5.0), "n": 3})
    assert fixed.batch["x"].tolist() == [1, 1]
    assert first["x"].tolist() == [5, 5]


class Averages(BaseHook):
    """Keeps two averages: of every step, and of every third."""

    def __init__(self):
        self.kept = {}

    def averages(self, trainer):
        self.kept = self.kept or {
            "each": Ema(trainer.model, 0.9), "third": Ema(trainer.model, 0.8, update_interval=3),
        }  # fmt: skip
        return self.kept


def test_averages_of_every_step_move_in_the_graph_unless_each_step_is_looked_at(on_the_cpu, monkeypatch):
    beside = []
    update = Ema.update
    monkeypatch.setattr(Ema, "update", lambda self, *args, **more: beside.append(self) or update(self, *args, **more))
    one, other = Averages(), Averages()
    assert same(run(False, hooks=[one]), run(True, hooks=[other]))
    assert [beside.count(hook.kept["third"]) for hook in (one, other)] == [40, 40]
    assert beside.count(one.kept["each"]) == 40
    inside = 40 - beside.count(other.kept["each"])
    assert inside > 30 if on_the_cpu == "told later" else inside == 0  # the first steps of a shape are eager
    assert other.kept["each"].num_updates == 40


def test_a_decay_that_changes_is_noticed(on_the_cpu):
    class Faster(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step == 15:
                trainer.averages["ema"].decay = 0.5

    assert same(run(False, hooks=[Faster()]), run(True, hooks=[Faster()]))


def test_an_average_stays_where_the_device_knows_whether_a_step_counts(on_the_cpu):
    class Weighed(Fit):
        def step(self, model, batch, totals=None, generator=None):
            output = super().step(model, batch)
            return StepOutput(output.loss, weight=batch[0].isfinite().all().float())

    one, other = (run(capture, task=Weighed(), loader=loader_of(bad=True), max_non_finite_grad_retries=1)
                  for capture in (False, True))  # fmt: skip
    assert same(one, other)


def test_a_gradient_that_is_not_finite_ends_the_run_with_the_weights_before_it(on_the_cpu):
    class Spoil(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step == 7:  # an epoch is over; of the next one the third batch is spoilt
                loader = trainer.cursor.loader
                loader.tensors[0][loader.order.rows(1)[20]] = float("nan")

    ends = []
    for capture in (False, True):
        engine = engine_of(capture, hooks=[Spoil()])
        with pytest.raises(NonFiniteError) as caught:
            engine.run(loader_of(), max_steps=40)
        ends.append((caught.value.step, engine.applied_steps, engine.model, engine.optimizer.state_dict()["state"]))
    assert ends[0][:2] == ends[1][:2] == (10, 9)
    assert differences(ends[0][2].state_dict(), ends[1][2].state_dict()) == []
    assert differences(ends[0][3], ends[1][3]) == []


def test_what_the_host_weighs_is_compared_with_steps_that_are_not_captured(on_the_cpu, monkeypatch, caplog):
    scaled = GivenWeights.scaled
    monkeypatch.setattr(GivenWeights, "scaled", lambda self, output: scaled(self, output) * (1 + 2**-20))
    with caplog.at_level(logging.WARNING):
        run("auto", task=Masked(), accumulation_steps=2)
    assert "a captured step differs from an eager one" in caplog.text


class Noisy(Fit):
    """Gradients of its eager steps differ from those of captured ones, and torch knows a kernel of it as unordered."""

    def __init__(self, monkeypatch, *, noise, named=True):
        self.noise, self.named, self.eager = noise, named, False
        plain = CapturedStep.eager

        def eager(step):
            self.eager = True
            left = plain(step)
            self.eager = False
            return left

        monkeypatch.setattr(CapturedStep, "eager", eager)

    def step(self, model, batch, totals=None, generator=None):
        output = super().step(model, batch)
        if self.named:
            torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))
        if self.eager:
            extra = model(batch[0]).mean() * self.noise
            output = StepOutput(output.loss + extra - extra.detach(), output.records, weight=output.weight)
        return output


def test_steps_that_differ_by_the_order_of_additions_are_captured_and_the_kernel_is_named(
    on_the_cpu, monkeypatch, caplog
):
    with caplog.at_level(logging.WARNING):
        run(True, task=Noisy(monkeypatch, noise=1e-6))
    (said,) = {message for message in caplog.messages if "not deterministic" in message}
    assert "not deterministic: put_. A captured and an eager step differ by" in said
    assert said.endswith("two eager ones by up to 0")
    assert Rerun.made == 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_warn_always_enabled()


def test_unordered_kernels_of_compiled_parts_are_named_without_compiling_them_again():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    class Part(nn.Module):
        def forward(self, x):
            return x.put_(torch.tensor([0]), torch.ones(1)) * 2

    part = Part()
    part.compile(backend=backend)
    part(torch.zeros(3))
    assert unordered_kernels(part, lambda: part(torch.zeros(3))) == ["put_"]
    part(torch.zeros(3))
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("noise", "named"), [(1e-6, False), (10.0, True)], ids=["torch knows of none", "the update is another"]
)
def test_other_differences_are_refused(on_the_cpu, monkeypatch, noise, named):
    with pytest.raises(ConfigError, match="a captured step differs from an eager one"):
        run(True, task=Noisy(monkeypatch, noise=noise, named=named))


def test_a_recording_that_fails_keeps_nothing_of_its_trial_alive(on_the_cpu, monkeypatch):
    """Check that the trial leaves no graph, whose nodes would belong to the recording's stream."""
    left = []

    class FailsOnce(Fit):
        def step(self, model, batch, totals=None, generator=None):
            output = super().step(model, batch)
            if len(left) == 1:
                left.append(weakref.ref(output.loss))
                raise RuntimeError("it reads the device")
            return output

    def record(self, function, *, prepare):
        reasons = []
        try:
            left.append(None)
            return function()
        except RuntimeError as error:
            reasons.append(error)  # a frame of the traceback holds what holds the traceback
            raise reasons[0] from None

    monkeypatch.setattr(Rerun, "record", record)
    gc.disable()
    try:
        run("auto", steps=4, task=FailsOnce())
    finally:
        gc.enable()
    _, loss = left
    assert loss() is None


def test_a_recording_that_fails_gives_the_stream_back_and_its_own_reason(monkeypatch):
    class Stream:
        def wait_stream(self, other):
            pass

    class Graph:
        """As torch.cuda.graph: the end of a broken recording is an error before the stream is the one of before."""

        def __init__(self, graph, *, stream, **options):
            self.stream = stream

        def __enter__(self):
            now[0] = self.stream

        def __exit__(self, *error):
            raise RuntimeError("operation failed due to a previous error during capture")

    usual, now, ended = Stream(), [], []
    now.append(usual)
    fakes = {
        "CUDAGraph": object, "Stream": lambda device: Stream(), "graph": Graph, "current_device": lambda: 7,
        "stream": contextlib.nullcontext, "current_stream": lambda: now[0],
        "default_stream": lambda: usual,
        "set_stream": lambda stream: now.__setitem__(0, stream),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(treadle.capture.graph, "_end_broken_recording", lambda stream: ended.append(now[0]))
    monkeypatch.setattr(treadle.capture.graph, "keep_garbage_from_forks", lambda: None)
    calls = []

    def function():
        calls.append(now[0])
        if len(calls) > 3:  # after the warm-up
            raise RuntimeError("it reads the device")

    with pytest.raises(RuntimeError, match="it reads the device"):
        CudaGraph().record(function, prepare=lambda: None)
    treadle.capture.graph._recording_stream.cache_clear()
    assert len(calls) == 4
    assert calls[3] is not usual
    assert now == [usual]
    assert ended == [usual]


class TestGatheringInTheGraph:
    """With one set of buffers the graph gathers the batch; the loader only says which rows."""

    def loader(self, **options):
        return loader_of(**{"num_buffers": 1, **options})

    def test_it_is_left_to_the_graph_and_all_bits_are_the_same(self, on_the_cpu):
        gathered = []
        run_gather = RowGather.run

        def counted(self):
            gathered.append(len(gathered))
            run_gather(self)

        loader = self.loader()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RowGather, "run", counted)
            engine = run(True, loader=loader)
        assert same(run(False, loader=loader_of()), engine)
        replayed = 40 - 1 - 5  # all but the first step and the short ones at the end of 5 epochs
        trials = 3 + 1  # the warm-up, and the replay of the comparison
        by_the_loader = 1 + 5  # the first batch after the first, and the first one of each further epoch
        assert len(gathered) == replayed + trials + by_the_loader

    def test_named_tensors_are_gathered_too(self, on_the_cpu):
        class Named(Fit):
            def step(self, model, batch, totals=None, generator=None):
                return super().step(model, (batch["x"], batch["y"]))

        def loader(**options):
            x, y = loader_of().tensors
            return TensorLoader({"x": x, "y": y}, batch_size=8, shuffle=True, **options)

        captured = loader(num_buffers=1)
        assert same(run(False, loader=loader(), task=Named()), run(True, loader=captured, task=Named()))
        assert captured.gather()._expected is not None

    @pytest.mark.parametrize("cut", [1, 2, 3, 6, 7, 8, 20])
    def test_a_run_that_stops_goes_on_in_either_mode(self, on_the_cpu, cut):
        plain = run(False, loader=loader_of())
        for first, second in ((True, False), (False, True), (True, True)):
            state = run(first, cut, loader=self.loader()).state_dict()
            assert same(plain, run(second, state=state, loader=self.loader()))

    def test_another_loader_of_the_same_shape_is_not_mistaken_for_it(self, on_the_cpu):
        def two_runs(capture, **options):
            engine = engine_of(capture)
            first, second = loader_of(**options), loader_of(**options)
            second.tensors[0].add_(1.0)
            engine.run(first, max_steps=6)
            engine.run(second, max_steps=12)
            engine.run(first, max_steps=20)
            return engine

        assert same(two_runs(False), two_runs(True, num_buffers=1))

    def test_an_eager_step_between_captured_ones_gets_the_batch_that_was_left(self, on_the_cpu):
        class Freeze(BaseHook):
            state_key = "freeze"

            def on_after_step(self, trainer):
                if trainer.step in (4, 11):  # the next step is of another kind, met for the first time: an eager one
                    trainer.optimizer.param_groups[0]["weight_decay"] += 0.1

        plain, captured = (
            run(capture, loader=loader, hooks=[Freeze()])
            for capture, loader in ((False, loader_of()), (True, self.loader()))
        )
        assert same(plain, captured)

    def test_when_capturing_is_given_up_batches_are_whole_again(self, on_the_cpu, monkeypatch):
        plain = run(False, loader=loader_of())
        engine = engine_of("auto")
        loader = self.loader()
        engine.run(loader, max_steps=10)
        assert loader.gather()._expected is not None
        engine.steps._give_up("a test", known=True)
        engine.run(loader, max_steps=40)
        assert same(plain, engine)

    def test_who_reads_the_loader_after_a_run_gets_whole_batches(self, on_the_cpu):
        loader = self.loader()
        run(True, 10, loader=loader)
        loader.set_epoch(0)
        plain = loader_of()
        for mine, theirs in zip(loader, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def test_a_task_with_a_part_on_the_host_gets_whole_batches(self, on_the_cpu):
        loader = self.loader()
        assert same(run(False, task=Masked(), loader=loader_of()), run(True, task=Masked(), loader=loader))
        assert loader._gather is None

    def test_who_looks_at_a_batch_when_it_is_taken_can_have_it_gathered(self, on_the_cpu):
        seen = {}

        def looking(name, engine, loader):
            take = engine.cursor.take

            def looked_at(count):
                group = take(count)
                loader.settle()
                seen.setdefault(name, []).extend(tensor.clone() for batch in group.batches for tensor in batch)
                return group

            engine.cursor.take = looked_at
            engine.run(loader, max_steps=20)
            return engine

        engines = [looking(capture, engine_of(capture), self.loader()) for capture in (False, True)]
        assert same(*engines)
        assert all(torch.equal(a, b) for a, b in zip(seen[False], seen[True], strict=True))

    def test_a_batch_that_is_trained_on_again_and_again_stays_what_it_is(self, on_the_cpu):
        def again(capture, loader):
            engine = run(capture, 5, loader=loader)
            group = engine.group
            for _ in range(30):  # longer than an epoch
                assert engine.steps(group) == "applied"
            return engine

        def kept():
            loader = loader_of()
            return [tuple(tensor.clone() for tensor in batch) for batch in loader][:5]

        assert same(again(False, kept()), again(True, self.loader()))

    def test_a_batch_that_the_task_changes_in_an_eager_step_is_whole_in_the_next(self, on_the_cpu):
        class Wants(Fit):
            def step(self, model, batch, totals=None, generator=None):
                x, y = batch
                if not x.requires_grad:
                    x.requires_grad_()
                return super().step(model, (x, y))

        loader = self.loader()
        assert same(run(False, 12, task=Wants(), loader=loader_of()), run(True, 12, task=Wants(), loader=loader))


class Halves(BaseHook):
    """Halves the gradients, and counts its calls."""

    def __init__(self):
        self.calls = 0

    @capturable
    def on_before_optimizer_step(self, trainer):
        self.calls += 1
        for parameter in trainer.model.parameters():
            parameter.grad.mul_(0.5)


def test_a_hook_that_is_marked_is_in_the_captured_step(on_the_cpu):
    one, other = (run(capture, hooks=[Halves()], loader=loader_of(num_buffers=1)) for capture in (False, True))
    assert other.steps._steps
    assert same(one, other)
    assert not same_weights(one, run(False))


def same_weights(one, other):
    return all(map(torch.equal, one.model.parameters(), other.model.parameters()))


@pytest.mark.parametrize("hook", [Halves(), StuckRankHook(60), CudaMaxMemoryHook()])
def test_hooks_that_are_marked_forbid_no_capture(hook):
    class Unmarked(BaseHook):
        def on_before_optimizer_step(self, trainer):
            pass

    def reason(*hooks):
        engine = engine_of(False, hooks=hooks)
        engine.precision.device = torch.device("cuda")
        return reason_against(engine) or ""

    assert "Unmarked acts before" in reason(Unmarked(), hook)
    assert "acts before" not in reason(hook)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"exchange": SimpleNamespace(recordable=False)}, "only the NCCL all-reduce"),
        ({"capture": "auto"}, "only with capture=True"),
        ({"settings": SimpleNamespace(accumulation_steps=2)}, None),
        ({"task": SimpleNamespace(prepare_batch=None)}, "counts each batch on the host"),
        ({"guard": SimpleNamespace(deferred=False, can_wait=False)}, "the host decides on each step"),
        ({"stream": 0}, "the default stream cannot be captured"),
    ],
)
def test_what_several_ranks_cannot_capture_is_named(monkeypatch, changed, reason):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: changed.pop("stream", 1))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: 0)
    usual = {
        "capture": True, "exchange": SimpleNamespace(recordable=True), "task": object(),
        "settings": SimpleNamespace(accumulation_steps=1), "guard": SimpleNamespace(deferred=True, can_wait=True),
        "device": torch.device("cuda"),
    }  # fmt: skip
    engine = SimpleNamespace(**{**usual, **{name: value for name, value in changed.items() if name != "stream"}})
    found = reason_against_ranks(engine)
    assert found is None if reason is None else reason in found
