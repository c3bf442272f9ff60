"""Between log points no face makes the host wait for the device: counted by torch itself, on one."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle import TensorLoader
from treadle.hooks import BaseHook
from treadle.text import build_gpt2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCKS = torch.arange(64 * 16).reshape(64, 16) * 7 % 64


class Strict(BaseHook):
    """From the third step on, or a later one, a wait inside a step is an error."""

    watched = 0
    first = 3

    def on_before_step(self, trainer):
        if trainer.step >= self.first:
            self.watched += 1
            torch.cuda.set_sync_debug_mode("error")

    def on_after_step(self, trainer):
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def strict():
    yield Strict()
    torch.cuda.set_sync_debug_mode("default")


def pinned(data, **options):
    return DataLoader(data, pin_memory=True, **options)


def loader_of(data, transfers, **options):
    return treadle.TransferLoader(pinned(data, **options)) if transfers else pinned(data, **options)


def test_the_step_face(strict):
    x = torch.randn(64, 4)

    class Fit(treadle.BaseTrainer):
        def build_data_loader(self):
            return pinned(TensorDataset(x), batch_size=8)

        def build_model(self):
            return torch.nn.Linear(4, 1).to(self.device)

        def build_optimizer(self):
            return torch.optim.AdamW(self.model.parameters(), fused=True)

        def build_hooks(self):
            return [treadle.EmaHook(0.9), strict]

        def forward(self, input):
            gap = self.model(input[0].to(self.device, non_blocking=True)).square().mean()
            return gap, {"gap": gap}, len(input[0])

    Fit(8, grad_clip=1.0, device="cuda").train()
    assert strict.watched == 6


def test_ready_parts(strict):
    import functional_kit as kit

    treadle.set_seed(0)
    model = kit.net()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    settings = {"training": {"max_grad_norm": 1.0, "ema_decay": 0.9, "log_interval": None}}
    trainer = treadle.Trainer(model, optimizer, torch.nn.MSELoss(), settings, "cuda", hooks=[strict])
    trainer.train(pinned(kit.loader(64).dataset, batch_size=8), num_epochs=1)
    assert strict.watched == 6


@pytest.mark.parametrize("transfers", [False, True])
def test_labels_of_which_some_do_not_count(strict, transfers):
    treadle.set_seed(0)
    model = torch.nn.Linear(4, 3)
    labels = torch.randint(-1, 3, (64,))
    labels[labels < 0] = -100
    data = TensorDataset(torch.randn(64, 4), labels)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    settings = {"training": {"log_interval": None}}
    trainer = treadle.Trainer(model, optimizer, torch.nn.CrossEntropyLoss(), settings, "cuda", hooks=[strict])
    trainer.train(loader_of(data, transfers, batch_size=8), num_epochs=1)
    assert strict.watched == 6


@pytest.mark.parametrize("capture", [False, True])
def test_a_language_model(strict, capture):
    pytest.importorskip("transformers")
    model = build_gpt2(64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    data = TensorLoader({"input_ids": BLOCKS, "labels": BLOCKS}, batch_size=8, shuffle=True, device="cuda")
    strict.first = 6  # the third step is captured, and compared with an eager one
    settings = {"training": {"log_interval": None}}
    treadle.Trainer(model, None, None, settings, "cuda", hooks=[strict], capture=capture).train(data, 3)
    assert strict.watched == 24 - 5


def test_a_language_model_is_captured_with_the_bits_of_eager_steps():
    pytest.importorskip("transformers")
    ends = []
    for capture in (False, True):
        treadle.set_seed(0)
        model = build_gpt2(64, n_positions=16, n_embd=32, n_layer=2, n_head=2, dropout=0.1)
        data = TensorLoader({"input_ids": BLOCKS, "labels": BLOCKS}, batch_size=8, shuffle=True, device="cuda")
        settings = {"training": {"mixed_precision": "bf16", "max_grad_norm": 1.0}}
        history = treadle.Trainer(model, None, None, settings, "cuda", capture=capture).train(data, 3)
        ends.append((history["train_loss"], model.state_dict()))
    (eager_losses, eager), (losses, captured) = ends
    assert losses == eager_losses
    assert all(torch.equal(value, captured[name]) for name, value in eager.items())


@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
def test_spectra(strict, tmp_path, reduction):
    import spectra_kit as kit

    trainer = kit.make(
        tmp_path, device="cuda", data=kit.spectra(60), hooks=[strict], val=False, selection="last", epochs=2,
        reduction=reduction,
    )  # fmt: skip
    trainer.fit(2)
    assert strict.watched == 6


@pytest.mark.parametrize("transfers", [False, True])
def test_graphs(strict, tmp_path, transfers):
    import graph_kit as kit

    trainer = kit.make(tmp_path, device="cuda", hooks=[strict], grad_clip=1.0, kind="adamw")
    train = loader_of(kit.graphs(32), transfers, batch_size=4, collate_fn=kit.collate)
    trainer.fit(train, kit.loader(kit.graphs(4)), epochs=1)
    assert strict.watched == 6


@pytest.mark.parametrize("transfers", [False, True])
def test_astronomy(strict, transfers):
    import astro_trainer_kit as kit

    train = loader_of(kit.sequences(32), transfers, batch_size=4, collate_fn=kit.collate_sequences)
    trainer = kit.make(train=train, hooks=[strict], device="cuda", use_amp=False)
    trainer.train(1)
    assert strict.watched == 6
