"""GraphTrainer on one GPU: nothing is read between log points, and a run that was cut ends as one that was not."""

from __future__ import annotations

import contextlib

import pytest
import torch

from graph_kit import graphs, loader, make, model_of
from helpers import Snapshots, differences
from treadle import ReproducibilityContext
from treadle.graphs import PaddingCollater, get_loss_fn, plan_buckets
from treadle.hooks import BaseHook
from treadle.seed import set_seed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TASKS = {"regression": ({"width": 2, "unknown": 0.3}, 2), "classification": ({"classes": 3}, 3)}


def padded(data, *, level="graph"):
    collate = PaddingCollater(plan_buckets(data, batch_size=4), level=level, collate=loader(data).collate_fn)
    return torch.utils.data.DataLoader(data, 4, collate_fn=collate, pin_memory=True)


def cuda(task, **settings):
    outputs = TASKS[task][1]
    model = {"num_classes": outputs}
    if "metrics" not in settings and task == "classification":
        settings["metrics"] = Nothing()  # the curves need torchmetrics, which a bare machine lacks
    return make(model=model, task_type=task, num_classes=outputs, device="cuda", **settings)


class Nothing:
    from_logits = True

    def reset(self): ...

    def update(self, pred, target): ...

    def compute(self):
        return {}


class NoReads(BaseHook):
    """Makes every wait for the device an error while a step runs, but for the first, which warms up."""

    def on_before_step(self, trainer):
        torch.cuda.set_sync_debug_mode("error" if trainer.step > 1 else "default")

    def on_after_step(self, trainer):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("precision", [False, "bf16"])
def test_a_step_waits_for_nothing_between_log_points(task, precision):
    data = graphs(16, **TASKS[task][0])
    weights = [1.0, 2.0, 3.0] if task == "classification" else None
    loss_fn = get_loss_fn(task, num_classes=TASKS[task][1], class_weights=weights)
    trainer = cuda(task, hooks=[NoReads()], loss_fn=loss_fn, grad_clip=1.0, mixed_precision=precision)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.cuda.set_sync_debug_mode, "default")
        record = trainer.train_epoch(padded(data))
    assert trainer.global_step == 4
    assert 0 < record["loss"] < 10


@pytest.mark.parametrize("task", TASKS)
def test_the_numbers_are_those_of_the_cpu(task):
    data = graphs(10, **TASKS[task][0])
    there = cuda(task)
    here = make(
        model={"num_classes": TASKS[task][1]}, task_type=task, num_classes=TASKS[task][1], metrics=there.metrics
    )
    here.model.load_state_dict(there.model.state_dict())
    assert there.eval_epoch(padded(data)) == pytest.approx(here.eval_epoch(loader(data)), abs=1e-4)
    predicted = there.predict(padded(data))
    assert predicted.device.type == "cpu"
    assert torch.allclose(predicted, here.predict(loader(data)), atol=1e-4)


def test_a_run_that_was_cut_inside_an_epoch_ends_as_one_that_was_not():
    data = graphs(14, width=2, unknown=0.3)
    with ReproducibilityContext(0, deterministic=True):
        snapshots = Snapshots()
        straight = cuda("regression", hooks=[snapshots])
        straight.fit(padded(data), padded(data), epochs=2)
        for cut in (1, 3, 4, 6):
            resumed = cuda("regression", hooks=[Snapshots()], seed=9)
            resumed._engine.load_state_dict(snapshots.states[cut])
            resumed.fit(padded(data), padded(data), epochs=2)
            assert differences(*(end(run) for run in (straight, resumed))) == [], cut


def end(trainer):
    state = trainer._engine.state_dict()
    for record in state["history"]:
        record.pop("time")
    return state


KINDS = {
    "regression": ("regression", {"width": 2, "unknown": 0.3}, 2),
    "node": ("classification", {"level": "node", "classes": 3}, 3),
    "edge": ("edge_prediction", {"level": "edge", "classes": 2}, 1),
}


def captured_run(capture, kind, *, epochs=4, state=None, **settings):
    """Three buckets and dropout; trained from a plain loader, so that the trainer pads."""
    task, data_settings, outputs = KINDS[kind]
    set_seed(0 if state is None else 9)
    model = model_of(outputs, task=data_settings.get("level", "graph"), dropout=0.2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    given = {"metrics": Nothing(), **settings} if task != "regression" else settings
    trainer = make(
        model=model, optimizer=optimizer, task_type=task, num_classes=outputs, device="cuda", capture=capture,
        pad_to=3, grad_clip=1.0, **given,
    )  # fmt: skip
    if state is not None:
        trainer._engine.load_state_dict(state)
    data = graphs(14, **data_settings)
    trainer.fit(loader(data), loader(data), epochs=epochs)
    return trainer


def captured_end(trainer):
    state = end(trainer)
    state["config"].pop("capture", None)
    return state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 2}, {"mixed_precision": "bf16"}], ids=str)
def test_captured_steps_have_the_bits_of_eager_padded_ones_metrics_of_training_included(kind, settings):
    with ReproducibilityContext(0, deterministic=True):
        eager, captured = (captured_run(capture, kind, **settings) for capture in (False, True))
        assert captured._engine.steps._steps
        assert differences(captured_end(eager), captured_end(captured)) == []


@pytest.mark.parametrize(("first", "cut"), [(False, 3), (False, 6), (True, 7), (True, 11)])
def test_a_captured_run_that_was_cut_goes_on_eagerly_and_the_other_way_round(first, cut):
    with ReproducibilityContext(0, deterministic=True):
        snapshots = Snapshots()
        straight = captured_run(first, "regression", hooks=[snapshots])
        resumed = captured_run(not first, "regression", hooks=[Snapshots()], state=snapshots.states[cut])
        assert differences(captured_end(straight), captured_end(resumed)) == []


def test_no_captured_step_on_pinned_padded_batches_waits_for_the_device():
    class NoReadsLater(NoReads):
        def on_before_step(self, trainer):
            torch.cuda.set_sync_debug_mode("error" if trainer.step > 8 else "default")

    data = graphs(16, width=2, unknown=0.3)
    set_seed(0)
    model = model_of(2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    trainer = make(model=model, optimizer=optimizer, num_classes=2, device="cuda", capture=True, hooks=[NoReadsLater()])
    trainer.fit(padded(data), None, epochs=4)
    assert trainer._engine.steps._steps
