"""How many things a loss is a mean over, a batch in which nothing counts, and full precision of losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from functional_kit import line, loader, make
from treadle import ConfigError
from treadle.functional.losses import loss_weight
from treadle.optim.loss_weights import without_empty

LABELS = torch.tensor([[5, 6, -100], [-100, 7, 8]])  # 4 count, 3 of them from position 1 on
CLASSES = torch.tensor([0, 2, -100, 2])
WEIGHTS = torch.tensor([1.0, 10.0, 0.25])


class TinyCausalLM(nn.Linear):
    """Named as causal language models are."""


class Masked(nn.Linear):
    """Predicts a label where it stands."""


def weight(loss_fn, targets, *, model=None, inputs=torch.zeros(2, 3), outputs=None):
    return loss_weight(model or line(), loss_fn, inputs=inputs, outputs=outputs, targets=targets)


@pytest.mark.parametrize(
    "kind", [nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss]
)
def test_a_mean_over_elements_weighs_elements(kind):
    assert weight(kind(), torch.zeros(4, 3)) == 12.0


@pytest.mark.parametrize(
    ("loss_fn", "targets", "expected"),
    [
        (nn.CrossEntropyLoss(), CLASSES, 3.0),
        (nn.CrossEntropyLoss(ignore_index=2), torch.tensor([0, 2, 1, 2]), 2.0),
        (nn.CrossEntropyLoss(), torch.zeros(2, 5, 5, dtype=torch.long), 50.0),
        (nn.CrossEntropyLoss(weight=WEIGHTS), CLASSES, 1.5),
        (nn.NLLLoss(weight=WEIGHTS), CLASSES, 1.5),
        (nn.NLLLoss(), torch.full((4,), -100), 0.0),
        (nn.CrossEntropyLoss(), torch.full((4, 3), 1 / 3), 4.0),
        (nn.CrossEntropyLoss(), torch.full((4, 3, 7), 1 / 3), 28.0),
    ],
    ids=["ignored", "another index", "pictures", "class weights", "nll", "all ignored", "probabilities", "of pictures"],
)
def test_a_mean_over_labels_weighs_labels_that_count(loss_fn, targets, expected):
    found = weight(loss_fn, targets)
    assert found == expected
    assert isinstance(found, float)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_weight_is_what_turns_the_mean_into_the_sum(reduction):
    logits, x = torch.randn(4, 3), torch.randn(5, 2)
    for make_loss, outputs, targets in (
        (nn.CrossEntropyLoss, logits, CLASSES),
        (lambda reduction: nn.CrossEntropyLoss(weight=WEIGHTS, reduction=reduction), logits, CLASSES),
        (lambda reduction: nn.NLLLoss(weight=WEIGHTS, reduction=reduction), logits.log_softmax(1), CLASSES),
        (nn.CrossEntropyLoss, logits, torch.rand(4, 3).softmax(1)),
        (nn.MSELoss, x, x + 1),
        (nn.BCEWithLogitsLoss, x, torch.rand(5, 2)),
    ):
        mean, total = make_loss(reduction="mean"), make_loss(reduction="sum")
        torch.testing.assert_close(mean(outputs, targets) * weight(mean, targets), total(outputs, targets))


@pytest.mark.parametrize(
    ("loss_fn", "inputs", "targets", "expected"),
    [
        (F.cross_entropy, torch.zeros(2, 3), CLASSES, 4.0),
        (F.mse_loss, torch.zeros(2, 3), torch.zeros(6, 5), 6.0),
        (nn.KLDivLoss(reduction="batchmean"), torch.zeros(2, 3), torch.zeros(5, 5), 5.0),
        (lambda outputs, targets: None, {"x": torch.zeros(3, 2)}, {"a": torch.zeros(7, 1), "b": torch.zeros(3)}, 7.0),
        (None, {"n": 1, "x": torch.zeros(3, 2)}, None, 3.0),
        (None, "nothing", None, 1.0),
    ],
)
def test_everything_else_weighs_samples(loss_fn, inputs, targets, expected):
    assert weight(loss_fn, targets, inputs=inputs) == expected


@pytest.mark.parametrize(("model", "expected"), [(TinyCausalLM(1, 1), 3.0), (Masked(1, 1), 4.0)])
def test_the_models_own_loss_weighs_the_labels_it_predicts(model, expected):
    inputs, outputs = {"input_ids": torch.zeros(2, 3), "labels": LABELS}, {"loss": torch.tensor(1.0)}
    assert weight(None, None, model=model, inputs=inputs, outputs=outputs) == expected
    assert weight(None, None, model=model, inputs=inputs, outputs={"loss": None}) == 2.0


def test_the_models_own_loss_with_other_labels_weighs_samples():
    for labels in (torch.zeros(2, dtype=torch.long), torch.zeros(2, 3), None):
        inputs = {"x": torch.zeros(2, 3), "labels": labels}
        assert weight(None, None, inputs=inputs, outputs={"loss": torch.tensor(1.0)}) == 2.0


def test_an_adapter_around_a_causal_model_is_one():
    class Adapter(nn.Module):
        def get_base_model(self):
            return TinyCausalLM(1, 1)

    inputs = {"labels": LABELS}
    assert weight(None, None, model=Adapter(), inputs=inputs, outputs={"loss": torch.tensor(1.0)}) == 3.0


class Classifier(nn.Module):
    """Like a model that computes its loss, with ``labels`` as keywords."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return {"loss": loss, "logits": logits}


def own_loss_batch(*ignored, rows=2, seed=0):
    x = torch.randn(rows, 3, 4, generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(rows * 3).reshape(rows, 3) % 3
    labels[list(ignored)] = -100
    return {"x": x, "labels": labels}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("k", [1, 3])
def test_a_batch_in_which_every_label_is_ignored_counts_nothing(own, k):
    def batches(*, with_empty):
        found = [own_loss_batch(seed=1), own_loss_batch(0, 1, seed=2), own_loss_batch(1, seed=3)]
        found = found if with_empty else [found[0], found[2]]
        return found if own else [(b["x"].flatten(0, 1), b["labels"].flatten()) for b in found]

    def run(data):
        model = Classifier() if own else nn.Sequential(Classifier().layer)
        trainer = make(
            model=model, loss_fn=None if own else nn.CrossEntropyLoss(), gradient_accumulation_steps=k,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        )  # fmt: skip
        return trainer, trainer.train(data, 2, data)

    with_empty, history = run(batches(with_empty=True))
    without, expected = run(batches(with_empty=False))
    assert all(math.isfinite(value) for values in history.values() for value in values)
    torch.testing.assert_close(history["train_loss"], expected["train_loss"])
    torch.testing.assert_close(history["eval_loss"], expected["eval_loss"])
    for a, b in zip(with_empty.model.parameters(), without.model.parameters()):
        assert torch.equal(a, b) if k == 1 else torch.allclose(a, b)
    assert with_empty.applied_steps == without.applied_steps


def test_where_nothing_counts_at_all_the_mean_is_nan_and_nothing_is_trained():
    trainer = make(model=Classifier(), loss_fn=None)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    batch = own_loss_batch(0, 1)
    history = trainer.train([batch], 1)
    assert math.isnan(history["train_loss"][0])
    assert (trainer.step, trainer.applied_steps) == (1, 0)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert math.isnan(trainer.train_step(batch)["loss"])
    assert math.isnan(trainer.eval_step(batch)["loss"])
    assert math.isnan(trainer.evaluate([batch])["loss"])


def test_a_count_on_a_device_makes_an_empty_loss_an_exact_zero_with_its_graph():
    logits = torch.randn(2, 3, requires_grad=True)
    loss = F.cross_entropy(logits, torch.tensor([-100, -100]))
    kept = without_empty(loss, torch.tensor(0))
    assert torch.isnan(loss)
    assert kept == 0.0
    kept.backward()
    assert torch.equal(logits.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("k", [1, 3])
def test_an_empty_batch_whose_count_lies_on_a_device_is_no_part_of_the_step(k):
    class OnDevice(treadle.Trainer):
        """Counts as a trainer on an accelerator does: the host never learns the number."""

        def _loss_weight(self, inputs, outputs, targets):
            return torch.tensor(super()._loss_weight(inputs, outputs, targets))

    data = [own_loss_batch(seed=1), own_loss_batch(0, 1, seed=2), own_loss_batch(1, seed=3)]
    trainers = []
    for cls in (OnDevice, treadle.Trainer):
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainers.append(make(cls, model=model, loss_fn=None, optimizer=optimizer, gradient_accumulation_steps=k))
    histories = [trainer.train(data, 2, data) for trainer in trainers]
    for key in histories[0]:
        assert histories[0][key] == pytest.approx(histories[1][key])
    for a, b in zip(trainers[0].model.parameters(), trainers[1].model.parameters()):
        torch.testing.assert_close(a, b)
    assert trainers[0].applied_steps == trainers[1].applied_steps


def test_a_sum_gives_the_plain_gradient_and_the_plain_total():
    data = list(loader(10, 4))
    model = line()
    trainer = make(
        model=model, loss_fn=nn.MSELoss(reduction="sum"), optimizer=torch.optim.SGD(model.parameters(), lr=0.001),
        gradient_accumulation_steps=3,
    )  # fmt: skip
    reference = line()
    total = sum(nn.MSELoss(reduction="sum")(reference(x), y) for x, y in data)
    total.backward()
    history = trainer.train(data, 1, data)
    assert history["train_loss"] == pytest.approx([total.item()])
    for parameter, other in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(parameter, other - 0.001 * other.grad)
    evaluated = sum(nn.MSELoss(reduction="sum")(model(x), y).item() for x, y in data)
    assert history["eval_loss"] == pytest.approx([evaluated])


def test_a_loss_that_is_not_reduced_is_refused_unless_a_subclass_reduces_it():
    with pytest.raises(ConfigError, match="reduction='none'"):
        make(loss_fn=nn.MSELoss(reduction="none"))

    class Reduces(treadle.Trainer):
        def _compute_loss(self, outputs, targets):
            return super()._compute_loss(outputs, targets).mean()

    assert make(Reduces, loss_fn=nn.MSELoss(reduction="none")).train(loader(), 1)["train_loss"][0] > 0


def test_a_model_without_a_loss_and_no_loss_fn_says_so_at_the_first_step():
    with pytest.raises(ConfigError, match="loss_fn=None"):
        make(loss_fn=None).train(loader(), 1)
    with pytest.raises(ConfigError, match="has no targets"):
        make().train([torch.ones(2, 4)], 1)


def test_a_loss_with_parameters_of_its_own_is_warned_about(caplog):
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, outputs, targets):
            return (self.scale * (outputs - targets)).square().mean()

    make(loss_fn=Learned()).train([(torch.ones(2, 4), torch.ones(2, 1))], 1)
    assert "the parameters of Learned require gradients" in caplog.text


def test_the_loss_is_computed_in_full_precision_under_autocast():
    seen = []

    def loss_fn(outputs, targets):
        product = outputs @ outputs.T  # autocast would take half precision here
        seen.append((outputs.dtype, product.dtype))
        return (outputs - targets).square().mean() + 0 * product.sum()

    trainer = make(mixed_precision="bf16", loss_fn=loss_fn)
    dtypes = []
    trainer.model.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    trainer.train(loader(), 1, loader())
    assert set(seen) == {(torch.float32, torch.float32)}
    assert set(dtypes) == {torch.bfloat16}


def test_accumulated_labels_give_the_gradient_of_the_joint_batch():
    parts = [own_loss_batch(1, rows=2), own_loss_batch(rows=4, seed=1)]  # 3 and 12 labels that count
    joint = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    models = []
    for data, k in ((parts, 2), ([joint], 1)):
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        make(model=model, loss_fn=None, optimizer=optimizer, gradient_accumulation_steps=k).train(data, 1)
        models.append(model)
    for a, b in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
