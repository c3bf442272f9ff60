"""Between log points no face makes the host wait for the device: ``"meta"`` stands for one where there is no GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import treadle
from helpers import accept_meta, no_waits_for_meta
from treadle.hooks import BaseHook
from treadle.optim.nonfinite import FiniteGuard, Verdict

FAR = torch.device("meta")


class Enough(Exception):
    """The steps that were to be watched are done; the end of an epoch may read."""


class Strict(BaseHook):
    """Makes a wait inside a step an error, and ends the run after three of them."""

    def __init__(self):
        self.watching = contextlib.ExitStack()

    def on_before_step(self, trainer):
        self.watching.enter_context(no_waits_for_meta())

    def on_after_step(self, trainer):
        self.watching.close()
        if trainer.step == 3:
            raise Enough


@pytest.fixture
def strict(monkeypatch):
    def judge(self, norm, weight):
        assert not isinstance(weight, torch.Tensor), "the weight lies on the device, and the step would read it"
        return Verdict(finite=True, counted=True)

    accept_meta(monkeypatch)
    monkeypatch.setattr(FiniteGuard, "judge", judge)  # on a GPU its verdict comes a step late
    hook = Strict()
    yield hook
    hook.watching.close()


def test_a_wait_would_be_seen(strict):
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        step_face(strict, lambda gap: {"gap": gap.item()})


def test_the_step_face(strict):
    with pytest.raises(Enough):
        step_face(strict, lambda gap: {"gap": gap})


def step_face(strict, values):
    class Fit(treadle.BaseTrainer):
        def build_data_loader(self):
            return DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)

        def build_model(self):
            return torch.nn.Linear(4, 1).to(self.device)

        def build_optimizer(self):
            return torch.optim.AdamW(self.model.parameters())

        def build_hooks(self):
            return [treadle.EmaHook(0.9), strict]

        def forward(self, input):
            gap = self.model(input[0].to(self.device, non_blocking=True)).square().mean()
            return gap, values(gap), len(input[0])

    Fit(8, grad_clip=1.0, device="meta").train()


@pytest.mark.parametrize("kind", ["numbers", "labels"])
def test_ready_parts(strict, kind):
    import functional_kit as kit

    if kind == "numbers":
        model, loss, data = kit.net(), torch.nn.MSELoss(), kit.loader(64)
    else:
        labels = torch.randint(-1, 3, (64,))
        labels[labels < 0] = -100
        model, loss = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()
        data = DataLoader(TensorDataset(torch.randn(64, 4), labels), batch_size=8)
    model = model.to(FAR)
    settings = {"training": {"max_grad_norm": 1.0, "ema_decay": 0.9, "log_interval": None}}
    trainer = treadle.Trainer(model, torch.optim.Adam(model.parameters()), loss, settings, "meta", hooks=[strict])
    with pytest.raises(Enough):
        trainer.train(data, num_epochs=1)


@pytest.mark.parametrize("reduction", ["mean", "batch_mean", "sum"])
def test_spectra(strict, tmp_path, reduction):
    import spectra_kit as kit
    from treadle.spectra import ChemoMAE, SpectraTrainer, TrainerConfig, build_optimizer

    model = ChemoMAE(
        seq_len=32, d_model=16, nhead=2, num_layers=1, dim_feedforward=32, latent_dim=8, n_blocks=8, n_mask=4
    ).to(FAR)
    config = TrainerConfig(out_dir=tmp_path, amp=False, ema_decay=0.8, device="meta", reduction=reduction)
    data = DataLoader(TensorDataset(kit.spectra(60)), batch_size=8)
    trainer = SpectraTrainer(model, build_optimizer(model, lr=3e-3), data, None, cfg=config, hooks=[strict])
    with pytest.raises(Enough):
        trainer.fit(1)


def test_graphs(strict):
    import graph_kit as kit

    trainer = kit.make(model=kit.model_of().to(FAR), device="meta", hooks=[strict], grad_clip=1.0)
    with pytest.raises(Enough):
        trainer.train_epoch(kit.loader(kit.graphs(16)))


def test_astronomy(strict):
    import astro_trainer_kit as kit

    train = DataLoader(kit.sequences(32), batch_size=4, collate_fn=kit.collate_sequences)
    trainer = kit.make(train=train, hooks=[strict], device="meta", use_amp=False)
    with pytest.raises(Enough):
        trainer.train(1)
