"""Labels of whole tensors are counted row by row, once; what a batch weighs is then added up without a look at it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import treadle
from capture_kit import Rerun, capture_on_the_cpu
from functional_kit import Tagger
from helpers import differences
from treadle import BaseHook, TensorLoader
from treadle.capture.step import CapturedStep

IGNORED = -100


class TaggerForCausalLM(Tagger):
    """Its loss is over labels that are shifted by one, as the name says."""

    def forward(self, x, labels=None):
        return {"loss": nn.functional.cross_entropy(self.layers(x).transpose(1, 2)[..., :-1], labels[:, 1:])}


class Weights(BaseHook):
    def __init__(self):
        self.seen = []

    def on_after_step(self, trainer):
        self.seen += trainer.step_info["weight"]


def tensors():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(23, 6, 3, generator=draw)
    labels = torch.randint(0, 5, (23, 6), generator=draw)
    labels[torch.rand(23, 6, generator=draw) < 0.4] = IGNORED
    return x, labels


def trainer_of(kind=Tagger, *, own_loss=False, trainer=treadle.Trainer, loss_fn=None, accumulation=1, **options):
    treadle.set_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    training = {"log_interval": None, "gradient_accumulation_steps": accumulation}
    loss_fn = None if own_loss else loss_fn or nn.CrossEntropyLoss()
    weights = Weights()
    return trainer(model, optimizer, loss_fn, {"training": training}, "cpu", hooks=[weights], **options), weights


def loader_of(own_loss, **options):
    x, labels = tensors()
    given = ({"x": x, "labels": labels},) if own_loss else (x, labels)
    return TensorLoader(*given, **{"batch_size": 4, "shuffle": True, **options})


@pytest.fixture
def looks(monkeypatch):
    """Give the batches that were looked at."""
    seen, plain = [], treadle.Trainer._loss_weight

    def counted(self, inputs, outputs, targets):
        seen.append(targets if targets is not None else inputs["labels"])
        return plain(self, inputs, outputs, targets)

    monkeypatch.setattr(treadle.Trainer, "_loss_weight", counted)
    # The trainer takes a method of another name for an override, so the fixture has to stand for its own.
    monkeypatch.setattr(treadle.Trainer, "_overrides", lambda self, name: False)
    return seen


CASES = {
    "loss": (Tagger, False), "own loss": (Tagger, True), "shifted labels": (TaggerForCausalLM, True),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"num_buffers": 3}, {"drop_last": True}], ids=str)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_what_a_batch_weighs_is_what_it_holds(looks, case, accumulation, options):
    kind, own_loss = CASES[case]
    (trainer, weights), loader = trainer_of(kind, own_loss=own_loss, accumulation=accumulation), loader_of(
        own_loss, **options
    )  # fmt: skip
    trainer.train(loader, 2)
    expected = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            labels = batch["labels"] if own_loss else batch[1]
            expected.append(float(((labels[:, 1:] if kind is TaggerForCausalLM else labels) != IGNORED).sum()))
    assert weights.seen == expected
    assert looks == []


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_one_that_looks_at_every_batch(case):
    kind, own_loss = CASES[case]
    ends = []
    for looks in (False, True):
        trainer, weights = trainer_of(kind, own_loss=own_loss, accumulation=2)
        if looks:
            trainer._engine.task.known_weight = lambda batch, outputs: None
        history = trainer.train(loader_of(own_loss), 3)
        ends.append((history["train_loss"], weights.seen, trainer._engine.state_dict()))
    (*a, one), (*b, other) = ends
    assert a == b
    assert not [key for key in ("model", "optimizer", "progress") if differences(one[key], other[key])]


def test_a_resume_inside_an_epoch_counts_the_rows_that_are_left(tmp_path, looks):
    straight, weights = trainer_of()
    straight.train(loader_of(False), 2)

    class Stop(BaseHook):
        def on_after_step(self, trainer):
            trainer.should_stop = trainer.step == 9

    first, _ = trainer_of()
    first._engine.hooks.append(Stop())
    first.train(loader_of(False), 2)
    second, after = trainer_of()
    second._engine.load_state_dict(first._engine.state_dict())
    second.train(loader_of(False), 2)
    assert after.seen == weights.seen  # what the user's own loss had seen before is carried too
    assert looks == []


def test_captured_steps_know_their_weights(monkeypatch):
    capture_on_the_cpu(monkeypatch)
    ends, told, run = [], [], CapturedStep.run

    def noted(self, group, weights):
        told.extend(weights)
        return run(self, group, weights)

    monkeypatch.setattr(CapturedStep, "run", noted)
    for capture in (False, True):
        trainer, weights = trainer_of(own_loss=True, capture=capture)
        trainer.train(loader_of(True), 3)
        ends.append((trainer.history["train_loss"], weights.seen))
    assert ends[0] == ends[1]
    assert Rerun.made == 2, "whole batches, and the short one at the end of an epoch"
    assert len(told) > 10
    assert None not in told


@pytest.mark.parametrize("how", ["new labels", "written in place", "another batch"])
def test_a_batch_that_was_changed_is_looked_at(how):
    class Own(treadle.Trainer):
        def train_step(self, batch):
            x, labels = batch
            if how == "new labels":
                labels = torch.where(torch.arange(6) < 3, labels, IGNORED)
            elif how == "written in place":
                labels[:, 3:] = IGNORED
            else:
                x, labels = x[:2], labels[:2]
            self.expected.append(float((labels != IGNORED).sum()))
            return super().train_step((x, labels))

    trainer, weights = trainer_of(trainer=Own)
    trainer.expected = []
    trainer.train(loader_of(False), 2)
    assert weights.seen == trainer.expected


def test_labels_that_change_between_epochs_are_counted_anew():
    loader = loader_of(False)

    class Spoil(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step == 6:
                loader.tensors[1][::2] = IGNORED

    trainer, weights = trainer_of()
    trainer._engine.hooks.append(Spoil())
    trainer.train(loader, 2)
    kept = (tensors()[1] != IGNORED).sum(1)
    assert sum(weights.seen[:6]) == kept.sum()
    assert sum(weights.seen[6:]) == kept[1::2].sum()


def test_another_rule_is_counted_by_itself():
    (trainer, weights), loader = trainer_of(), loader_of(False, shuffle=False)
    trainer.train(loader, 1)
    trainer.loss_fn.ignore_index = 0
    labels = torch.where(tensors()[1] == IGNORED, 1, tensors()[1])
    loader.tensors[1].copy_(labels)
    trainer.train(loader, 2)
    trainer.loss_fn.ignore_index = 1
    trainer.train(loader, 3)
    for number, weight in enumerate((torch.ones(5), torch.full((5,), 2.0)), start=4):
        trainer.loss_fn.weight = weight
        trainer.train(loader, number)
    assert sum(weights.seen[24:]) == 2 * sum(weights.seen[18:24]) == 2 * sum(weights.seen[12:18])
    epochs = [sum(weights.seen[at : at + 6]) for at in (0, 6, 12)]
    assert epochs == [(tensors()[1] != IGNORED).sum(), (labels != 0).sum(), (labels != 1).sum()]


def test_a_loader_that_is_over_is_let_go():
    trainer, _ = trainer_of()
    trainer.train(loader := loader_of(False), 1)
    held = weakref.ref(trainer._engine.task._row_counts._loader())
    trainer._engine.cursor.close()
    trainer.train(TensorLoader(*tensors(), batch_size=23), 2)
    del loader
    gc.collect()
    assert held() is None


def test_another_loader_is_counted_by_itself(looks):
    trainer, weights = trainer_of()
    x, labels = tensors()
    trainer.train(TensorLoader(x, labels, batch_size=4), 1)
    trainer.train(TensorLoader(x[:8], labels[:8], batch_size=4), 2)
    assert weights.seen[-2:] == [float((labels[i : i + 4] != IGNORED).sum()) for i in (0, 4)]
    assert looks == []


def test_tensors_that_count_no_writes_are_looked_at(looks):
    x, labels = tensors()
    with torch.inference_mode():  # as what another model gave often is
        labels = labels.clone()
    trainer, weights = trainer_of()
    trainer.train(TensorLoader(x, labels, batch_size=4, shuffle=True), 1)
    assert len(looks) == len(weights.seen) == 6


def test_what_rows_cannot_tell_is_looked_at(looks):
    class Flipped(TensorLoader):
        def __iter__(self):
            for x, labels in super().__iter__():
                yield x, labels.flip(0)

    x, labels = tensors()
    for loader, loss_fn in (
        (Flipped(x, labels, batch_size=4), None),
        (TensorLoader(x, labels, batch_size=4), nn.CrossEntropyLoss(weight=torch.ones(5))),
        ([(x[:4], labels[:4])], None),
    ):
        looks.clear()
        trainer_of(loss_fn=loss_fn)[0].train(loader, 1)
        assert len(looks) == len(loader)
