"""Extractor and tester of chemomae 0.2: batch-wise features, and the loss over a loader."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from treadle.checkpoint.store import save_tensor, write_bytes
from treadle.data.cursor import Cursor
from treadle.device import get_device
from treadle.distributed import unwrap
from treadle.engine.evaluation import evaluate, evaluation_mode, refuse_no_batch
from treadle.errors import ConfigError
from treadle.errors.arguments import checked
from treadle.optim.precision import Precision
from treadle.spectra import inference
from treadle.spectra.patch_encoder import Representation, check_representation
from treadle.spectra.task import Augmenter, PreparedSpectra, SpectraTask, spectra_of
from treadle.task import Rng, StepOutput, Totals

Features = Tensor | NDArray[Any]
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _device_of(model: nn.Module, asked: torch.device | str | int | None) -> torch.device:
    first = next(model.parameters(), None)
    if asked is not None:
        return get_device(asked)
    return first.device if first is not None else torch.device("cpu")


def _precision(amp: bool, dtype: str, device: torch.device) -> Precision:
    if not amp:
        return Precision(None, device)
    return Precision("bf16" if dtype == "bf16" else "fp16", device)


@contextlib.contextmanager
def _augmenting(augmenter: Augmenter | None, device: torch.device) -> Iterator[None]:
    """Move an augmenter module to the device and switch it to training mode inside the block."""
    if not isinstance(augmenter, nn.Module):
        yield
        return
    modes = {module: module.training for module in augmenter.modules()}
    try:
        augmenter.to(device).train()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@checked
@dataclass(frozen=True)
class ExtractorConfig:
    """Settings of :class:`Extractor` from chemomae 0.2.

    Raises:
        ConfigError: a value is out of range, or NumPy does not support the dtype.

    Example:
        >>> ExtractorConfig(representation="cls").output_type
        'tensor'
    """

    device: str | torch.device | None = None
    """None uses the device of the model."""
    amp: bool = False
    amp_dtype: Literal["bf16", "fp16"] = "bf16"
    representation: Representation = "latent"
    """``"latent"``, ``"raw_latent"``, ``"normalized_latent"`` or ``"cls"``."""
    output_type: Literal["tensor", "numpy"] = "tensor"
    output_device: str | torch.device | None = None
    """None: the device of the model, or the CPU for NumPy output."""
    output_dtype: torch.dtype = torch.float32
    save_path: str | Path | None = None
    """``.npy`` for NumPy, else a tensor file; written by :meth:`Extractor.transform`."""
    progress: bool = False
    """Has no effect here."""

    def __post_init__(self) -> None:
        check_representation(self.representation)
        if self.output_dtype not in _TYPES:
            raise ConfigError(f"must be one of {', '.join(map(str, _TYPES))}", argument="output_dtype")
        array = self.output_type == "numpy" or Path(self.save_path or "x").suffix.lower() == ".npy"
        if array and self.output_dtype == torch.bfloat16:
            raise ConfigError("NumPy has no bfloat16; choose another", argument="output_dtype", value="bfloat16")
        if self.output_type == "numpy" and torch.device(self.output_device or "cpu").type != "cpu":
            raise ConfigError(
                "must be the CPU or None with output_type='numpy'", argument="output_device", value=self.output_device
            )


class Extractor:
    """Feature extractor with every channel visible, in the order of the loader.

    Args:
        model: with ``encode(x, representation=)``, like :class:`treadle.spectra.chemomae.ChemoMAE`.
        cfg: settings; None uses the defaults.
        augmenter: augments the spectra before they are encoded.

    Example:
        >>> # for features_BZ in Extractor(model).iter_transform(loader): ...
    """

    @checked
    def __init__(self, model: nn.Module, cfg: ExtractorConfig | None = None, *, augmenter: Augmenter | None = None):
        self.model = model
        self.cfg = ExtractorConfig() if cfg is None else cfg
        self.augmenter = augmenter
        self.device = _device_of(model, self.cfg.device)
        numpy = self.cfg.output_type == "numpy"
        self.output_device = torch.device("cpu") if numpy else get_device(self.cfg.output_device or self.device)

    def iter_transform(self, loader: Iterable[Any]) -> Generator[Features, None, None]:
        """Yield the features of each batch, (B, Z), without writing anything.

        Raises:
            TypeError: a batch has no floating tensor.
            ValueError: spectra or features are not finite, or have the wrong shape.
        """
        for features in self._batches(loader):
            yield self._as_output(features)

    def transform(self, loader: Iterable[Any]) -> Features:
        """Return the features of all batches, (N, Z), and write them to ``save_path``; (0, Z) for an empty loader."""
        parts = list(self._batches(loader))
        features = torch.cat(parts) if parts else self._empty()
        if self.cfg.save_path is not None:
            path, stored = Path(self.cfg.save_path), features.cpu()
            if path.suffix.lower() == ".npy":
                write_bytes(lambda file: np.save(file, stored.numpy()), path)
            else:
                save_tensor(stored, path)
        return self._as_output(features)

    def extract(self, loader: Iterable[Any]) -> Features:
        """Call :meth:`transform`."""
        return self.transform(loader)

    def __call__(self, loader: Iterable[Any]) -> Features:
        """Call :meth:`transform`."""
        return self.transform(loader)

    def _batches(self, loader: Iterable[Any]) -> Iterator[Tensor]:
        model: Any = unwrap(self.model.to(self.device))
        precision = _precision(self.cfg.amp, self.cfg.amp_dtype, self.device)
        for batch in loader:
            x = self._spectra(batch)
            if not len(x):
                yield self._empty()
                continue
            # Closed before each yield: the caller's code must not run in eval mode or without gradients.
            with evaluation_mode(self.model), _augmenting(self.augmenter, self.device), torch.no_grad():
                seen = x if self.augmenter is None else self.augmenter(x)
                if seen.shape != x.shape:
                    raise ValueError(f"the augmenter returned {tuple(seen.shape)} for spectra of {tuple(x.shape)}")
                with precision.autocast():
                    features = model.encode(seen, representation=self.cfg.representation)
                features = features.to(device=self.output_device, dtype=self.cfg.output_dtype)
                if not bool(torch.isfinite(features).all()):
                    raise ValueError(f"features are not finite as {self.cfg.output_dtype}")
            yield features

    def _spectra(self, batch: Any) -> Tensor:
        x = spectra_of(batch)
        if not x.is_floating_point():
            raise TypeError(f"spectra are {x.dtype}; they must be floating")
        if x.dim() != 2 or x.shape[1] != unwrap(self.model).seq_len:
            raise ValueError(f"spectra of shape {tuple(x.shape)}: must be (B, {unwrap(self.model).seq_len})")
        x = x.to(device=self.device, dtype=next(self.model.parameters()).dtype)
        if not bool(torch.isfinite(x).all()):
            raise ValueError("spectra are not finite; mask or fill missing values")
        return x

    def _empty(self) -> Tensor:
        encoder: Any = unwrap(self.model).encoder
        width = encoder.d_model if self.cfg.representation == "cls" else encoder.latent_dim
        return torch.empty((0, int(width)), device=self.output_device, dtype=self.cfg.output_dtype)

    def _as_output(self, features: Tensor) -> Features:
        return features.numpy() if self.cfg.output_type == "numpy" else features


@checked
@dataclass
class TesterConfig(inference.TesterConfig):
    """Settings of :class:`Tester` from chemomae 0.2: full precision, on the device of the model."""

    __test__ = False  # otherwise pytest would collect it as a test

    amp: bool = False
    progress: bool = True
    """Has no effect here."""


class Tester(inference.Tester):
    """Evaluation of a model's loss over a loader, optionally with augmented input and clean targets.

    Args:
        model: returns ``(x_recon, z, visible_mask)``.
        cfg: settings; None uses the defaults.
        augmenter: augments the model's input, not the target.

    Raises:
        ConfigError: a setting is invalid.

    Example:
        >>> # loss = Tester(model, TesterConfig(out_dir="run"))(test_loader)
    """

    @checked
    def __init__(
        self, model: nn.Module, cfg: inference.TesterConfig | None = None, *, augmenter: Augmenter | None = None
    ):
        self.cfg = TesterConfig() if cfg is None else cfg
        self.device = _device_of(model, self.cfg.device)
        self.model = model.to(self.device)
        self.augmenter = augmenter

    def __call__(self, loader: Any) -> float:
        """Return the loss over all batches and append it to the test history.

        Raises:
            ConfigError: the loader is empty, or no channel counts in the loss; nothing is written then.
        """
        cfg = self.cfg
        history = self._read_history() if cfg.log_history else []
        task = _CountingTask(cfg, self.device, self.augmenter)
        cursor = Cursor()
        precision = _precision(cfg.amp, cfg.amp_dtype, self.device)
        with _augmenting(self.augmenter, self.device):
            values = evaluate(self.model, loader, task, precision=precision, eval_seed=cfg.eval_seed, cursor=cursor)
        refuse_no_batch(cursor.position, "loader: it")
        selected = sum(int(count) for count in task.selected)
        if not selected:
            raise ConfigError("no channel counts in the loss; hide some, or use 'all'", argument="loss_region")
        loss = float(values["loss"])
        if cfg.log_history:
            counts = {"samples": task.samples, "selected_elements": selected, "augmented": self.augmenter is not None}
            self._append_history(history, loss, {"loss_region": cfg.loss_region, **counts})
        return loss


class _CountingTask(SpectraTask):
    """Reconstruction task for evaluation that augments and counts the elements of its loss."""

    def __init__(self, cfg: inference.TesterConfig, device: torch.device, augmenter: Augmenter | None):
        super().__init__(
            device, loss_type=cfg.loss_type, reduction=cfg.reduction, loss_region=cfg.loss_region, augmenter=augmenter,
            fixed_visible=cfg.fixed_visible,
        )  # fmt: skip
        self.samples = 0
        self.selected: list[Tensor] = []

    def step(self, model: nn.Module, batch: Any, totals: Totals = None, generator: Rng = None) -> StepOutput:
        output = super().step(model, batch, totals, generator)
        self.samples += len(spectra_of(batch))
        return output

    def counted(self, visible_mask: Tensor) -> Tensor:
        mask = super().counted(visible_mask)
        self.selected.append(mask.sum())
        return mask

    def _prepared(self, model: nn.Module, batch: Any) -> PreparedSpectra:
        prepared = super()._prepared(model, batch)
        if self.augmenter is None:
            return prepared
        x = spectra_of(batch).to(self.device)
        return PreparedSpectra(x, self.augmenter(x), prepared.visible_mask, prepared.visible_count)


__all__ = ["Extractor", "ExtractorConfig", "Tester", "TesterConfig"]
