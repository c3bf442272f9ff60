"""Small reproducible trainers of token models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from treadle.astro import AstroTrainer, CausalTransformerLM, build_vocab_spec, collate_sequences, encode_sequence
from treadle.hooks import BaseHook
from treadle.seed import set_seed

VOCAB = build_vocab_spec(7, 8, 6, ["a", "b"], scalar_bins=4)


def codebooks(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {
        "image_codebook": torch.randn(7, 3, generator=draw),
        "spectrum_codebook": {"a": torch.randn(6, 2, generator=draw), "b": torch.randn(6, 4, generator=draw)},
        "scalar_centers": torch.randn(2, 4, generator=draw),
    }


def sequences(count=14, seed=0):
    """Return sequences of several lengths, with some images, columns and groups missing."""
    draw = torch.Generator().manual_seed(seed)

    def ids(most, size):
        return torch.randint(0, size, (int(torch.randint(0, most + 1, (), generator=draw)),), generator=draw)

    made = []
    for number in range(count):
        scalars = [None if number % 3 == column else int(ids(1, 4).sum()) for column in range(2)]
        spectra = {"a": ids(3, 6), **({} if number % 4 else {"b": ids(4, 6)})}
        made.append(encode_sequence(VOCAB, image=ids(5, 7), scalars=scalars, spectra=spectra))
    return made


def loader(data=None, batch_size=4, *, shuffle=False, **kwargs):
    data = sequences() if data is None else data
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle, collate_fn=collate_sequences, **kwargs)


def model(dropout=0.1, **changes):
    """Return the same model each time."""
    torch.manual_seed(3)
    sizes = {"vocab_size": VOCAB.vocab_size, "n_types": 9, "d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 32}
    return CausalTransformerLM(**{**sizes, "dropout": dropout, "max_len": 64, **changes})


class LogitsOnly(nn.Module):
    """Model that returns only logits, without hidden states."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, tokens, types, attn_mask):
        return self.inner(tokens, types, attn_mask)


class OverflowAt(BaseHook):
    """Hook that makes the gradient of one step infinite, as a loss too large for half precision would."""

    def __init__(self, step):
        self.step = step

    def on_before_step(self, trainer):
        if trainer.step == self.step:
            parameter = next(trainer.model.parameters())
            self._handle = parameter.register_hook(lambda gradient: gradient * torch.inf)

    def on_after_step(self, trainer):
        if trainer.step == self.step:
            self._handle.remove()


def make(folder=None, *, cls=AstroTrainer, seed=0, net=None, train=None, lr=0.02, sample_k=3, loss=None, **rest: Any):
    """Return a trainer; ``loss`` are settings of the expected-value terms, ``rest`` other training settings."""
    set_seed(seed)
    own = ("use_amp", "use_ce", "compile_model", "amp_dtype", "optimizer", "scheduler", "scheduler_interval", "hooks",
           "eval_seed", "device", "trackers", "parallel", "limits", "save_total_limit")  # fmt: skip
    kept = {name: rest.pop(name) for name in own if name in rest}
    books = {name: rest.pop(name) for name in codebooks() if name in rest}
    config = {
        "warmup_steps": 2, "learning_rate": lr, "log_every": None, "save_every_steps": None, "epochs": 3,
        "meaningful_loss": {"sample_k_per_modality": sample_k, **(loss or {})}, **rest,
    }  # fmt: skip
    net = model() if net is None else net
    train = loader(shuffle=True) if train is None else train
    settings = {"device": "cpu", "output_dir": folder, **codebooks(), **books, **kept}
    return cls(net, VOCAB, train, config, **settings)


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values()))
