"""Models that compute their own loss: labels are theirs, tokens are counted, ignored labels count nothing."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import language_kit as kit
from helpers import differences

# peft 0.21 asks a model of transformers 5.24 by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def batches(*rows, empty=()):
    texts = kit.Texts(empty=empty)
    return [torch.utils.data.default_collate([texts[row] for row in group]) for group in rows]


def gradients(model, groups):
    """The gradients of one step over given micro-batches."""
    seen = {}

    class Keep(kit.treadle.BaseHook):
        def on_before_optimizer_step(self, trainer):
            named = trainer.model.named_parameters()
            seen.update({name: value.grad.clone() for name, value in named if value.grad is not None})

    trainer = kit.trainer(model, hooks=[Keep()], gradient_accumulation_steps=len(groups))
    kit.treadle.set_seed(1)
    trainer.train(groups, 1)
    return seen


def close(found, expected, atol):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=atol, rtol=0, msg=name)


def test_labels_are_shifted_once():
    model, (batch,) = kit.gpt2(), batches([0, 1, 2])
    loss = kit.trainer(model).eval_step({**batch, "labels": batch["input_ids"]})["loss"]
    with torch.no_grad():
        expected = kit.cross_entropy(model.eval(), {**batch, "labels": batch["input_ids"]})
    assert loss == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("make", [kit.gpt2, lambda **kwargs: kit.with_lora(kit.gpt2(**kwargs), dropout=0.0)])
def test_micro_batches_of_unequal_token_counts_give_the_gradient_of_the_joint_batch(make):
    parts, (joint,) = batches([0, 1], [2, 3, 4], [5]), batches([0, 1, 2, 3, 4, 5])
    assert len({kit.predicted(batch) for batch in parts}) == 3
    close(gradients(make(dropout=0.0), parts), gradients(make(dropout=0.0), [joint]), 1e-6)


class Swallowing(nn.Module):
    """Takes any keyword and ignores it, as models do that were written before there was a num_items_in_batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(kit.VOCAB, kit.VOCAB)

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.embedding(input_ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def test_a_model_that_ignores_num_items_in_batch_is_weighted_right_too():
    parts, (joint,) = batches([0, 1], [2, 3, 4]), batches([0, 1, 2, 3, 4])
    close(gradients(Swallowing(), parts), gradients(Swallowing(), [joint]), 1e-6)


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    kit.treadle.set_seed(0)
    config = MixtralConfig(
        vocab_size=kit.VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=1.0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def test_an_auxiliary_loss_does_not_grow_with_the_number_of_micro_batches():
    (batch,) = batches([0, 1, 2])
    once, thrice = gradients(mixtral(), [batch]), gradients(mixtral(), [batch] * 3)
    router = next(name for name in once if "gate" in name and "experts" not in name)
    assert once[router].abs().max() > 1e-4
    close(thrice, once, 1e-6)


# -- nothing to predict -------------------------------------------------------------------------------------------


def test_the_model_itself_returns_nan_where_every_label_is_ignored():
    (empty,) = batches([0, 1], empty=[0, 1])
    assert kit.gpt2()(**empty).loss.isnan()


def test_a_batch_without_labels_alone_in_a_step_is_a_skipped_step():
    model, (empty,) = kit.gpt2(), batches([0, 1], empty=[0, 1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = kit.trainer(model)
    assert math.isnan(trainer.train_step(empty)["loss"])
    assert (trainer.step, trainer.applied_steps) == (1, 0)
    assert differences(before, model.state_dict()) == []


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_batch_without_labels_in_a_group_changes_nothing(order):
    full, empty = batches([2, 3], [0, 1], empty=[0, 1])
    group = [[full, empty][number] for number in order]
    close(gradients(kit.gpt2(dropout=0.0), group), gradients(kit.gpt2(dropout=0.0), [full]), 1e-8)


def test_an_epoch_with_batches_without_labels_trains_and_reports_finite_numbers():
    trainer = kit.trainer(kit.gpt2(), gradient_accumulation_steps=2)
    history = trainer.train(kit.loader(12, empty=range(6), shuffle=False), 1, kit.loader(6, empty=[0, 1, 2]))
    assert (trainer.step, trainer.applied_steps) == (2, 1)
    assert math.isfinite(history["train_loss"][0])
    assert math.isfinite(history["eval_loss"][0])


def test_a_batch_without_labels_changes_no_evaluation():
    trainer = kit.trainer(kit.gpt2())
    full, empty = batches([2, 3, 4], [0, 1], empty=[0, 1])
    assert trainer.evaluate([empty, full, empty]) == trainer.evaluate([full])
    assert math.isnan(trainer.evaluate([empty])["loss"])


def test_an_evaluation_between_two_steps_in_half_precision_keeps_every_gradient():
    model, (batch,) = kit.gpt2(), batches([2, 3, 4])
    trainer = kit.trainer(model, mixed_precision="bf16")
    trainer.train_step(batch)
    trainer.evaluate([batch])
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainer.train_step(batch)
    assert [name for name, value in model.named_parameters() if torch.equal(before[name], value)] == []
