"""Construction of objects from configurations, such as ``{"type": "torch.optim.AdamW", "lr": 3e-4}``.

A trainer whose parts come from one configuration gets their sections as arguments, in addition to its own::

    cfg = load_config("configs/train.py")
    trainer = build_from_cfg(
        cfg["trainer"], data_cfg=cfg["data"], model_cfg=cfg["model"], optimizer_cfg=cfg["optimizer"]
    )
    trainer.train()

``build_trainer(cfg)`` does this for any configuration of that form.

A ``type`` may name anything that can be imported and called, so a configuration must be trusted like code.
"""

from __future__ import annotations

from treadle.config.objects import REGISTRY, Registry, build_from_cfg
from treadle.config.trainers import build_trainer

__all__ = ["REGISTRY", "Registry", "build_from_cfg", "build_trainer"]
