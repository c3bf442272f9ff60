"""Tiny language models built from their configuration, and batches with uneven numbers of labels."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import treadle
from treadle import Trainer

VOCAB, LENGTH = 32, 12


def gpt2(*, seed=0, dropout=0.1):
    """Return a GPT-2 with a few thousand weights and tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    treadle.set_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
        use_cache=False,  # training does not need cached keys, and recomputing activations turns the cache off
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def with_lora(model, *, seed=0, dropout=0.2, **settings):
    """Return a model with LoRA adapters on its attention, with dropout."""
    from peft import LoraConfig, get_peft_model

    treadle.set_seed(seed)
    config = LoraConfig(
        r=2, lora_alpha=8, lora_dropout=dropout, target_modules=["c_attn"], fan_in_fan_out=True,
        task_type="CAUSAL_LM", init_lora_weights="gaussian", **settings,
    )  # fmt: skip
    return get_peft_model(model, config)


class Texts(Dataset):
    """Data set of token rows with 1 to ``LENGTH`` - 1 predicted tokens each; the other labels are -100."""

    def __init__(self, rows=20, *, empty=()):
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(1, VOCAB, (rows, LENGTH), generator=generator)
        self.lengths = torch.randint(2, LENGTH + 1, (rows,), generator=generator).tolist()
        self.empty = frozenset(empty)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, row):
        seen = torch.arange(LENGTH) < self.lengths[row]
        labels = torch.where(seen, self.tokens[row], -100)
        # No position predicts the first token. The Trainer of transformers 5.24 still counts it for a GPT-2.
        labels[0] = -100
        if row in self.empty:
            labels[:] = -100
        return {"input_ids": self.tokens[row], "labels": labels, "attention_mask": seen.long()}


def loader(rows=20, *, batch_size=3, shuffle=True, empty=(), workers=0):
    return DataLoader(Texts(rows, empty=empty), batch_size=batch_size, shuffle=shuffle, num_workers=workers)


def trainer(model, *, lr=1e-2, hooks=(), scheduler=None, **training):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    schedule = None if scheduler is None else scheduler(optimizer)
    config = {"training": {"log_interval": None, **training}}
    return Trainer(model, optimizer, None, config=config, device="cpu", scheduler=schedule, hooks=hooks)


def predicted(batch):
    """Return the number of predicted tokens of a batch."""
    return int((batch["labels"][:, 1:] != -100).sum())


def cross_entropy(model, batch):
    """Compute the mean loss explicitly: position t predicts token t + 1."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1))
