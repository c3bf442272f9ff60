"""A language model trained by this face, by a hand-written loop and by the Trainer of transformers: the same losses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer as HfTrainer
from transformers import TrainingArguments, default_data_collator

import language_kit as kit
import treadle
from treadle import BaseHook

EPOCHS, CLIP, LR = 2, 0.5, 1e-2
STEPS = {1: 14, 4: 4}  # 7 batches an epoch, the last one short; with 4 to a step the last window is of 3


class StepLosses(BaseHook):
    """The loss of each step: the mean over all its tokens."""

    def __init__(self):
        self.losses = []

    def on_after_step(self, trainer):
        losses, weights = trainer.step_info["loss"], trainer.step_info["weight"]
        self.losses.append(float(sum(loss * weight for loss, weight in zip(losses, weights)) / sum(weights)))


def parts(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def by_treadle(k, *, shuffle=False):
    model, hook = kit.gpt2(), StepLosses()
    trainer = kit.trainer(
        model, hooks=[hook], lr=LR, scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        gradient_accumulation_steps=k, max_grad_norm=CLIP, scheduler_step_per_batch=True,
    )  # fmt: skip
    treadle.set_seed(1)
    trainer.train(kit.loader(shuffle=shuffle), EPOCHS)
    return model, hook.losses


def by_hand(k, backward, *, shuffle=False):
    """The loop that a person writes; ``backward`` is how one window of batches becomes one gradient."""
    model, losses = kit.gpt2(), []
    optimizer, scheduler = parts(model)
    treadle.set_seed(1)
    loader = kit.loader(shuffle=shuffle)
    model.train()
    for _ in range(EPOCHS):
        batches = iter(loader)
        while window := list(itertools.islice(batches, k)):
            losses.append(float(backward(model, window)))
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model, losses


def plain(model, window):
    (batch,) = window
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def by_token_counts(model, window):
    """Mean losses weighted by their tokens; each is scaled to its own size first, as half precision needs it."""
    counts = [kit.predicted(batch) for batch in window]
    unit, total = len(window) * counts[0], 0.0
    for batch, count in zip(window, counts):
        loss = model(**batch).loss
        (loss / (unit / count)).backward()
        total = total + loss.detach() * count
    for parameter in model.parameters():
        parameter.grad.div_(sum(counts) / unit)
    return total / sum(counts)


def by_num_items(model, window):
    """The way of transformers: the model itself divides its sums by the tokens of the whole window."""
    total, tokens = 0.0, sum(kit.predicted(batch) for batch in window)
    for batch in window:
        loss = model(**batch, num_items_in_batch=tokens).loss
        loss.backward()
        total = total + loss.detach()
    return total


def equal(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("k", "backward"), [(1, plain), (4, by_token_counts)])
def test_a_language_model_equals_a_hand_written_loop_to_the_bit(k, backward, shuffle):
    model, losses = by_treadle(k, shuffle=shuffle)
    other, expected = by_hand(k, backward, shuffle=shuffle)
    assert len(losses) == STEPS[k]
    assert losses == expected
    assert equal(model, other)


def test_token_weights_are_what_num_items_in_batch_gives():
    _, losses = by_treadle(4)
    _, expected = by_hand(4, by_num_items)
    assert losses == pytest.approx(expected, abs=1e-6, rel=0)


class Recording(HfTrainer):
    """Keeps what it backpropagates, before its log rounds or filters it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.by_step = {}

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        step = self.state.global_step
        self.by_step[step] = self.by_step.get(step, 0.0) + float(loss)
        return loss


def by_transformers(k, folder):
    model = kit.gpt2()
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=3, gradient_accumulation_steps=k, num_train_epochs=EPOCHS,
        max_grad_norm=CLIP, train_sampling_strategy="sequential", use_cpu=True, seed=1, disable_tqdm=True,
        logging_strategy="no", save_strategy="no", report_to=[],
    )  # fmt: skip
    trainer = Recording(
        model=model, args=arguments, train_dataset=kit.Texts(), optimizers=parts(model),
        data_collator=default_data_collator,
    )  # fmt: skip
    treadle.set_seed(1)  # its constructor draws
    trainer.train()
    return model, list(trainer.by_step.values())


def test_the_trainer_of_transformers_gives_the_same_bits_without_accumulation(tmp_path):
    model, losses = by_treadle(1)
    other, expected = by_transformers(1, tmp_path)
    assert losses == expected
    assert equal(model, other)


def test_the_trainer_of_transformers_gives_the_same_losses_with_accumulation(tmp_path):
    model, losses = by_treadle(4)
    other, expected = by_transformers(4, tmp_path)
    assert losses == pytest.approx(expected, abs=1e-6, rel=0)
    # The gradient of the key biases is zero but for rounding, and Adam divides it by its own size.
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
