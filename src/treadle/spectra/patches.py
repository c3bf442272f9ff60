"""PatchMAE, a masked autoencoder whose tokens are patches of a spectrum.

It computes the same function as ChemoMAE of chemomae 0.2, with the same parameter names.
:class:`treadle.spectra.ChemoMAE`, whose tokens are single channels, corresponds to chemomae 0.1.

Shapes: B = rows, L = channels, P = patches, S = L / P channels of a patch, K = visible patches, D = model width,
Z = latent width.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.checkpoint.schema import versions
from treadle.checkpoint.store import load_checkpoint, save_checkpoint
from treadle.device import get_device
from treadle.distributed.state_names import check_model_state, load_model_state
from treadle.errors import CheckpointError, ConfigError, refuse_unknown
from treadle.errors.arguments import check_whole, check_within, checked
from treadle.spectra.masks import CountedMasksAutoencoder, check_patches, make_patch_mask
from treadle.spectra.patch_encoder import PatchDecoder, PatchEncoder, Representation

_KIND, _VERSION = "chemomae.model", 1
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@checked
@dataclass(frozen=True)
class PatchMAEConfig:
    """Validated constructor arguments of :class:`PatchMAE`.

    Raises:
        ConfigError: a size is out of range.

    Example:
        >>> PatchMAEConfig(latent_dim=8).to_dict()["latent_dim"]
        8
    """

    seq_len: int = 256
    n_patches: int = 16
    d_model: int = 256
    nhead: int = 4
    num_layers: int = 4
    dim_feedforward: int | None = None
    dropout: float = 0.0
    latent_dim: int = 16
    latent_normalize: bool = True
    decoder_num_layers: int = 2
    n_mask: int = 4

    def __post_init__(self) -> None:
        sizes = ("seq_len", "n_patches", "d_model", "nhead", "num_layers", "latent_dim", "decoder_num_layers")
        for name in (*sizes, *(["dim_feedforward"] if self.dim_feedforward is not None else [])):
            check_whole(1, **{name: getattr(self, name)})
        check_patches(self.seq_len, self.n_patches, self.n_mask)
        if self.d_model % self.nhead:
            raise ConfigError(f"must be a multiple of nhead={self.nhead}", argument="d_model", value=self.d_model)
        check_within("[0, 1]", dropout=self.dropout)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> PatchMAEConfig:
        """Build a configuration from a mapping with all of its fields.

        Raises:
            ConfigError: a field is missing or unknown.
        """
        if not isinstance(config, Mapping):
            raise ConfigError("must be a mapping", argument="config", value=config)
        known = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown("PatchMAEConfig", config, known)
        if missing := [name for name in known if name not in config]:
            raise ConfigError(f"lacks {', '.join(missing)}; give every field", argument="config")
        return cls(**config)


class PatchMAE(CountedMasksAutoencoder):
    """Masked autoencoder of spectra whose tokens are patches.

    Args:
        seq_len: Channels L of a spectrum, a multiple of ``n_patches``.
        n_patches: Equal patches P, each one token.
        d_model: Width of the tokens.
        nhead: Attention heads; must divide ``d_model``.
        num_layers: Transformer layers.
        dim_feedforward: Width of the feed-forward layers; None means 4 d_model.
        dropout: Dropout probability.
        latent_dim: Width Z of the latent.
        latent_normalize: Scale the latent to norm 1.
        decoder_num_layers: Linear layers of the decoder.
        n_mask: Patches hidden by default.

    Attributes:
        takes_counted_mask: As in :class:`ChemoMAE`.

    Raises:
        ConfigError: When an argument is out of range.

    Example:
        >>> model = PatchMAE(seq_len=64, d_model=16, nhead=2, num_layers=1, n_patches=8, n_mask=4).eval()
        >>> x_recon, z, visible_mask = model(torch.randn(5, 64))
        >>> x_recon.shape, z.shape, visible_mask.sum(dim=1).tolist()
        (torch.Size([5, 64]), torch.Size([5, 16]), [32, 32, 32, 32, 32])
    """

    _make_mask = staticmethod(make_patch_mask)
    _parts = "n_patches"

    def __init__(
        self,
        *,
        seq_len: int = 256,
        n_patches: int = 16,
        d_model: int = 256,
        nhead: int = 4,
        num_layers: int = 4,
        dim_feedforward: int | None = None,
        dropout: float = 0.0,
        latent_dim: int = 16,
        latent_normalize: bool = True,
        decoder_num_layers: int = 2,
        n_mask: int = 4,
    ) -> None:
        super().__init__()
        self._config = PatchMAEConfig(
            seq_len=seq_len, n_patches=n_patches, d_model=d_model, nhead=nhead, num_layers=num_layers,
            dim_feedforward=dim_feedforward, dropout=dropout, latent_dim=latent_dim,
            latent_normalize=latent_normalize, decoder_num_layers=decoder_num_layers, n_mask=n_mask,
        )  # fmt: skip
        self.seq_len, self.n_patches, self.n_mask = seq_len, n_patches, n_mask
        self.encoder = PatchEncoder(
            seq_len=seq_len, n_patches=n_patches, d_model=d_model, nhead=nhead, num_layers=num_layers,
            dim_feedforward=dim_feedforward, dropout=dropout, latent_dim=latent_dim, latent_normalize=latent_normalize,
        )  # fmt: skip
        self.decoder = PatchDecoder(seq_len=seq_len, latent_dim=latent_dim, num_layers=decoder_num_layers)

    def encode(self, x: Tensor, *, representation: Representation = "latent") -> Tensor:
        """Encode spectra with every patch visible; the caller controls train/eval mode and gradients.

        Args:
            x: (B, L) floating, B of at least 1.
            representation: as in :class:`PatchEncoder`.

        Returns:
            (B, Z), or (B, D) for ``"cls"``.

        Raises:
            TypeError: ``x`` is not a floating tensor.
            ValueError: its shape is wrong, or the representation is unknown.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"x is a {getattr(x, 'dtype', type(x).__name__)} but must be a floating tensor (B, L)")
        if x.dim() != 2 or len(x) == 0:
            raise ValueError(f"x has shape {tuple(x.shape)} but must be (B, {self.seq_len}) with B of at least 1")
        visible = torch.ones_like(x, dtype=torch.bool)
        latent: Tensor = self.encoder(x, visible, representation=representation, visible_count=self.seq_len)
        return latent

    def get_config(self) -> dict[str, Any]:
        """Return the constructor arguments, with the current ``n_mask`` and ``encoder.latent_normalize``."""
        now = {"n_mask": self.n_mask, "latent_normalize": self.encoder.latent_normalize}
        return dataclasses.replace(self._config, **now).to_dict()  # type: ignore[arg-type]

    def save(self, path: str | os.PathLike[str], *, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the configuration and weights to one file atomically; chemomae 0.2 can read it.

        Args:
            path: the file; its folder is created.
            state_dict: weights to write, such as averaged ones; None writes the model's.

        Raises:
            ConfigError: the model is a subclass, whose constructor may differ.
            CheckpointError: the weights do not match the model, are not finite or have several floating dtypes.
        """
        if type(self) is not PatchMAE:
            raise ConfigError(
                f"a {type(self).__name__} is not saved: its arguments are not known; save its state dict",
                argument="model",
            )
        weights = dict(self.state_dict() if state_dict is None else state_dict)
        check_model_state(self, weights)
        _check_finite(weights)
        kinds = {value.dtype for value in weights.values() if value.is_floating_point()}
        names = [name for name, dtype in _DTYPES.items() if dtype in kinds]
        if len(kinds) != 1 or not names:
            raise CheckpointError(
                f"the weights have the dtypes {sorted(map(str, kinds))}, but must have a single floating dtype"
            )
        payload = {
            "artifact": _KIND, "format_version": _VERSION, "package_version": versions()["treadle"],
            "config": self.get_config(), "dtype": names[0], "state_dict": weights,
        }  # fmt: skip
        save_checkpoint(payload, Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str | int = "cpu") -> PatchMAE:
        """Load a file written by :meth:`save`, or an ``.artifact.pt`` of chemomae 0.2, as a model in eval mode.

        Raises:
            CheckpointError: the file is missing, damaged or of another type, or its weights do not match or are not
                finite.
            ConfigError: its configuration is incomplete or out of range.
        """
        payload = load_checkpoint(path)
        if payload.get("artifact") != _KIND or payload.get("format_version") != _VERSION:
            raise CheckpointError(
                f"{os.fspath(path)!r} does not hold a model of format {_VERSION}; weights alone are read by "
                "load_foreign(model, path)"
            )
        if payload.get("dtype") not in _DTYPES:
            raise CheckpointError(f"{os.fspath(path)!r}: its floating type is {payload.get('dtype')!r}")
        model = cls(**PatchMAEConfig.from_dict(payload.get("config") or {}).to_dict()).to(_DTYPES[payload["dtype"]])
        weights = payload.get("state_dict") or {}
        _check_finite(weights)
        load_model_state(model, weights)
        return model.to(get_device(device)).eval()


def _check_finite(weights: Mapping[str, Tensor]) -> None:
    for name, value in weights.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"{name} is not finite")
