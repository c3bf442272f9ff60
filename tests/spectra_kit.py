"""Small reproducible spectra trainer on real spectra."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle import RankBatchSampler
from treadle.datasets import load_spex
from treadle.spectra import ChemoMAE, SNVScaler, SpectraTrainer, TrainerConfig, build_optimizer, build_scheduler


def spectra(count=40, length=32):
    real = torch.from_numpy(load_spex().spectra[:count, : length * 8 : 8])
    return SNVScaler().transform(real)


def make(
    out_dir,
    *,
    val=True,
    epochs=4,
    seed=0,
    data=None,
    hooks=(),
    scheduler=True,
    workers=0,
    limits=None,
    metric=None,
    spread=None,
    **settings,
):
    """Return a trainer; ``val``: whether to validate, or loaders by name; ``metric``: ``best_model_metric``.

    ``spread`` distributes batches and model over the ranks, as ``"ddp"`` or ``"fsdp"``.
    """
    treadle.set_seed(seed)
    x = spectra() if data is None else data
    train = DataLoader(TensorDataset(x[:28]), batch_size=8, shuffle=True, num_workers=workers)
    validation = DataLoader(TensorDataset(x[28:]), batch_size=5, num_workers=workers)
    if spread is not None:
        train, validation = (
            DataLoader(
                each.dataset, batch_sampler=RankBatchSampler(each.dataset, global_batch_size=8, shuffle=shuffled)
            )
            for each, shuffled in ((train, True), (validation, False))
        )
    model = ChemoMAE(
        seq_len=32, d_model=16, nhead=2, num_layers=1, dim_feedforward=32, latent_dim=8, n_blocks=8, n_mask=4
    )
    optimizer = build_optimizer(model, lr=3e-3)
    steps = treadle.steps_per_epoch(train, settings.get("accumulation_steps", 1))
    schedule = build_scheduler(optimizer, steps_per_epoch=steps, epochs=epochs) if scheduler else None
    given = {"out_dir": out_dir, "amp": False, "ema_decay": 0.8, "device": "cpu", "parallel": spread, **settings}
    cfg = TrainerConfig(**given)
    loaders = {True: validation, False: None}[val] if isinstance(val, bool) else val
    return SpectraTrainer(
        model, optimizer, train, loaders, scheduler=schedule, cfg=cfg, hooks=hooks, limits=limits,
        best_model_metric=metric,
    )  # fmt: skip
