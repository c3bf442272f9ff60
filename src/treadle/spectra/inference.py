"""Inference with a trained model: test loss and latent extraction."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from treadle.checkpoint.store import save_tensor, write_bytes, write_text
from treadle.data.cursor import Cursor
from treadle.device import get_device
from treadle.distributed import unwrap
from treadle.engine.evaluation import evaluate, for_each_batch, refuse_no_batch
from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.hooks.history import dump_records
from treadle.optim.precision import Precision
from treadle.seed import as_seed
from treadle.spectra.task import SpectraTask, spectra_of

_log = logging.getLogger("treadle.spectra")


@checked
@dataclass
class TesterConfig:
    """Settings of :class:`Tester`; fields as in ``TrainerConfig``."""

    __test__ = False  # otherwise pytest would collect it as a test

    out_dir: str | Path = "runs"
    device: torch.device | str | int | None = None
    amp: bool = True
    amp_dtype: Literal["bf16", "fp16"] = "bf16"
    loss_type: Literal["mse", "sse"] = "mse"
    reduction: Literal["mean", "batch_mean", "sum"] = "mean"
    fixed_visible: Tensor | None = None
    """bool (L,) or (B, L), True = visible; None lets the model draw masks with ``eval_seed``."""
    log_history: bool = True
    history_filename: str | Path = "test_history.json"
    eval_seed: int = 0
    loss_region: Literal["masked", "all"] = "masked"
    """``"masked"``: hidden channels count; ``"all"``: all channels count."""

    def __post_init__(self) -> None:
        as_seed("eval_seed", self.eval_seed)
        fixed = self.fixed_visible
        if fixed is not None and not (fixed.dtype == torch.bool and fixed.dim() in (1, 2)):
            raise ConfigError("must be a bool tensor (L,) or (B, L), True where it is seen", argument="fixed_visible")


class Tester:
    """Evaluation of a model's masked loss over a loader.

    Args:
        model: returns ``(x_recon, z, visible_mask)``.
        cfg: settings; None uses the defaults.

    Example:
        >>> # loss = Tester(model, TesterConfig(out_dir="run"))(test_loader)
    """

    __test__ = False  # otherwise pytest would collect it as a test

    @checked
    def __init__(self, model: nn.Module, cfg: TesterConfig | None = None):
        self.cfg = cfg or TesterConfig()
        self.device = get_device(self.cfg.device)
        self.model = model.to(self.device)

    def __call__(self, loader: Any) -> float:
        """Return the weighted mean loss and append it to the test history.

        Raises:
            ConfigError: the loader is empty, or the history file is damaged (it is not overwritten).
        """
        cfg = self.cfg
        history = self._read_history() if cfg.log_history else []
        task = SpectraTask(
            self.device, loss_type=cfg.loss_type, reduction=cfg.reduction, loss_region=cfg.loss_region,
            fixed_visible=cfg.fixed_visible,
        )  # fmt: skip
        precision = _precision(cfg.amp, cfg.amp_dtype, self.device)
        cursor = Cursor()
        values = evaluate(self.model, loader, task, precision=precision, eval_seed=cfg.eval_seed, cursor=cursor)
        refuse_no_batch(cursor.position, "loader: it")
        loss = float(values["loss"])
        if cfg.log_history:
            self._append_history(history, loss, {})
        return loss

    def _append_history(self, history: list[Any], loss: float, more: Mapping[str, Any]) -> None:
        cfg = self.cfg
        record = {"phase": "test", "test_loss": loss, "loss_type": cfg.loss_type, "reduction": cfg.reduction, **more}
        write_text(dump_records([*history, record]), self._history_path)

    @property
    def _history_path(self) -> Path:
        return Path(self.cfg.out_dir) / self.cfg.history_filename

    def _read_history(self) -> list[Any]:
        if not self._history_path.exists():
            return []
        try:
            records = json.loads(self._history_path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"history file {str(self._history_path)!r} is damaged ({error}); move it away or pass another "
                "history_filename"
            ) from error
        if not isinstance(records, list):
            raise ConfigError(f"history file {str(self._history_path)!r} does not hold a JSON list; move it away")
        return records


@checked
@dataclass
class ExtractorConfig:
    """Settings of :class:`Extractor`."""

    device: torch.device | str | int | None = None
    amp: bool = True
    amp_dtype: Literal["bf16", "fp16"] = "bf16"
    save_path: str | Path | None = None
    """``.npy``, ``.pt`` or ``.pth``; None writes nothing."""
    return_numpy: bool = False

    def __post_init__(self) -> None:
        if self.save_path is not None and Path(self.save_path).suffix not in (".npy", ".pt", ".pth"):
            raise ConfigError("must end in .npy, .pt or .pth", argument="save_path", value=os.fspath(self.save_path))


class Extractor:
    """Latent extractor with all channels visible, in the order of the loader.

    Args:
        model: with ``encoder(x, visible_mask) -> z``, like :class:`ChemoMAE`.
        cfg: settings; None uses the defaults.

    Example:
        >>> # latents_ND = Extractor(model)(loader)
    """

    @checked
    def __init__(self, model: nn.Module, cfg: ExtractorConfig | None = None):
        self.cfg = cfg or ExtractorConfig()
        self.device = get_device(self.cfg.device)
        self.model = model.to(self.device)

    def __call__(self, loader: Any) -> Tensor | np.ndarray[Any, np.dtype[np.float32]]:
        """Return the latents (N, latent_dim), float32 on the CPU, as a tensor or, with ``return_numpy``, an array.

        Raises:
            ConfigError: the loader is empty.
        """
        rows: list[Tensor] = []
        encoder: Any = unwrap(self.model).encoder

        def encode(batch: Any) -> None:
            x = spectra_of(batch).to(self.device)
            rows.append(encoder(x, torch.ones_like(x, dtype=torch.bool)).float().cpu())

        for_each_batch(self.model, loader, encode, precision=_precision(self.cfg.amp, self.cfg.amp_dtype, self.device))
        refuse_no_batch(len(rows), "loader: it")
        latents = torch.cat(rows)
        if self.cfg.save_path is not None:
            path = Path(self.cfg.save_path)
            if path.suffix == ".npy":
                write_bytes(lambda file: np.save(file, latents.numpy()), path)
            else:
                save_tensor(latents, path)
        return latents.numpy() if self.cfg.return_numpy else latents


def _precision(amp: bool, dtype: str, device: torch.device) -> Precision:
    if not amp:
        return Precision(None, device)
    return Precision("bf16" if dtype == "bf16" else "fp16", device)
