"""Unknown targets, and split masks: each entry counts in its own split, once, or is refused by name."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from graph_batches import collate
from graph_kit import Scale, graphs, loader, make
from treadle.errors import ConfigError
from treadle.graphs import get_loss_fn, pad_batch, plan_buckets


def batch(x, y, **masks):
    named = {name: torch.tensor(mask) for name, mask in masks.items()}
    return SimpleNamespace(x=torch.tensor(x), y=torch.tensor(y), num_graphs=len(x), **named)


def scale(start=0.0, lr=1.0, **kwargs):
    model = Scale(start)
    return make(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), **kwargs)


MASKS = {"train_mask": [True, False, False], "val_mask": [False, True, False], "test_mask": [False, False, True]}
THREE = batch([[1.0], [1.0], [1.0]], [[2.0], [3.0], [5.0]], **MASKS)


def test_training_counts_its_rows_and_an_evaluation_those_of_the_mask_that_it_names():
    trainer = scale(lr=0.25)
    history = trainer.fit([THREE], [THREE], epochs=1)
    assert history["train"][0]["loss"] == history["train"][0]["mse"] == 4.0
    assert trainer.model.weight.item() == 1.0  # 0.25 * 2 * 2
    assert history["val"][0]["loss"] == history["val"][0]["mse"] == 4.0
    assert trainer.eval_epoch([THREE])["mse"] == 4.0
    assert trainer.eval_epoch([THREE], mask="test_mask")["loss"] == 16.0
    assert trainer.eval_epoch([THREE], mask="train_mask")["mae"] == 1.0
    assert len(trainer.predict([THREE])) == 3


def test_masks_weigh_micro_batches_by_what_they_count():
    one = batch([[1.0], [1.0]], [[1.0], [9.0]], train_mask=[True, False])
    two = batch([[1.0], [1.0]], [[2.0], [4.0]], train_mask=[True, True])
    trainer = scale(lr=0.5, accumulation_steps=2, loss_fn=get_loss_fn("regression", "mae"))
    record = trainer.train_epoch([one, two])
    assert record["loss"] == pytest.approx(7 / 3)
    assert record["mae"] == pytest.approx(7 / 3)


def test_masks_and_unknown_targets_both_leave_out():
    part = batch([[1.0], [1.0], [1.0]], [[math.nan], [3.0], [5.0]], train_mask=[True, True, False])
    assert scale().train_epoch([part])["loss"] == 9.0


def test_a_mask_leaves_as_much_as_its_rows_do():
    """A step on all nodes with a mask is the step on targets of which the others are unknown."""
    data = graphs(6, level="node", classes=None)
    for graph in data:
        graph.train_mask = torch.rand(len(graph.y), generator=torch.Generator().manual_seed(len(graph.y))) < 0.5
    hidden = graphs(6, level="node", classes=None)
    for graph, masked in zip(hidden, data, strict=True):
        graph.y[~masked.train_mask] = math.nan
    settings = {"model": {"task": "node", "dropout": 0.0}}
    with_masks, with_unknown = make(**settings), make(**settings)
    assert with_masks.train_epoch(loader(data, 2))["loss"] == with_unknown.train_epoch(loader(hidden, 2))["loss"]
    for one, other in zip(with_masks.model.parameters(), with_unknown.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_batch_of_other_masks_is_refused_by_name_before_a_step():
    trainer = scale()
    only_val = batch([[1.0]], [[1.0]], val_mask=[True])
    with pytest.raises(ConfigError, match="train_mask: the batch has val_mask and no train_mask"):
        trainer.train_epoch([only_val])
    assert trainer.global_step == 0 or trainer.model.weight.item() == 0.0
    with pytest.raises(ConfigError, match="test_mask: the batch has val_mask and no test_mask"):
        trainer.eval_epoch([only_val], mask="test_mask")
    with pytest.raises(ConfigError, match=r"train_mask: a torch\.int64 tensor"):
        scale().train_epoch([batch([[1.0]], [[1.0]], train_mask=[1])])
    with pytest.raises(ConfigError, match=r"mask='test': did you mean 'test_mask'"):
        trainer.eval_epoch([only_val], mask="test")


def test_what_cannot_count_by_a_mask_is_refused_by_name():
    with pytest.raises(ConfigError, match="which only losses of get_loss_fn apply"):
        scale(loss_fn=torch.nn.functional.l1_loss).train_epoch([THREE])
    data = graphs(4, level="node")
    for graph in data:
        graph.train_mask = torch.ones(len(graph.y), dtype=torch.bool)
    with pytest.raises(ConfigError, match="train_mask: the batch has split masks, which padded batches do not support"):
        pad_batch(collate(data), plan_buckets(data, 4), level="node")
    with pytest.raises(ConfigError, match="padded batches do not support"):
        make(model={"task": "node"}, pad_to=1).train_epoch(loader(data, 2))


def test_an_own_loss_that_unknown_targets_make_nan_is_refused_and_one_that_leaves_them_out_is_taken():
    part = batch([[1.0], [1.0]], [[2.0], [math.nan]])
    trainer = scale(loss_fn=torch.nn.functional.l1_loss)
    with pytest.raises(ConfigError, match=r"NaN \(unknown\) targets"):
        trainer.train_epoch([part])
    assert trainer.model.weight.item() == 0.0

    def known(pred, target):
        return (pred - target).abs().nanmean()

    assert scale(loss_fn=known).train_epoch([part])["loss"] == 2.0


def test_metrics_of_others_do_not_see_unknown_targets():
    torchmetrics = pytest.importorskip("torchmetrics")
    part = batch([[1.0], [1.0]], [[2.0], [math.nan]])
    metrics = torchmetrics.MetricCollection({"error": torchmetrics.MeanAbsoluteError()})
    assert scale(metrics=metrics).eval_epoch([part])["error"] == 2.0
