"""PatchMAE: a masked autoencoder whose tokens are patches of a spectrum.

The same function as ChemoMAE of chemomae 0.2, with the same names of weights. :class:`treadle.spectra.ChemoMAE`, whose
tokens are single channels, is that of its line 0.1.

Shapes: B = rows, L = channels, P = patches, S = L / P channels of a patch, K = visible patches, D = model width,
Z = latent width.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treadle.checkpoint.schema import versions
from treadle.checkpoint.store import load_checkpoint, save_checkpoint
from treadle.device import get_device
from treadle.distributed.state_names import check_model_state, load_model_state
from treadle.errors import CheckpointError, ConfigError, refuse_unknown
from treadle.spectra.encoder import check_input, pack_visible
from treadle.spectra.masks import check_patches

Representation = Literal["latent", "raw_latent", "normalized_latent", "cls"]

_KIND, _VERSION = "chemomae.model", 1
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def check_representation(name: str) -> None:
    """Raises ConfigError unless a representation is one of the four.

    Example:
        >>> check_representation("cls")
    """
    if name not in get_args(Representation):
        raise ConfigError(
            f"must be one of {', '.join(get_args(Representation))}", argument="representation", value=name
        )


def make_patch_mask(
    batch_size: int,
    seq_len: int,
    n_patches: int,
    n_mask: int,
    *,
    device: torch.device | str | int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a mask that hides ``n_mask`` of ``n_patches`` equal patches in every row.

    The draw is made on the CPU and then moved. On the CPU one seed gives the masks of chemomae 0.2.

    Args:
        batch_size: Number of rows B.
        seq_len: Number of channels L, a multiple of ``n_patches``.
        n_patches: Number of equal patches.
        n_mask: Patches to hide in each row, 0 to ``n_patches``; 0 draws nothing.
        device: Where the result lies; None means the CPU.
        generator: A CPU generator; None draws from torch's global CPU generator.

    Returns:
        (B, L) bool, **True = hidden**.

    Raises:
        ValueError: For sizes outside these ranges, or a generator that is not on the CPU.

    Example:
        >>> make_patch_mask(2, 12, 4, 1).sum(dim=1).tolist()
        [3, 3]
    """
    check_patches(seq_len, n_patches, n_mask)
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(f"generator is on {generator.device}, but masks are drawn on the CPU; pass torch.Generator()")
    hidden_BP = torch.zeros(batch_size, n_patches, dtype=torch.bool)
    if n_mask > 0:
        draw_BP = torch.rand(batch_size, n_patches, generator=generator)
        hidden_BP.scatter_(1, draw_BP.argsort(dim=1)[:, :n_mask], True)
    if device is not None:
        hidden_BP = hidden_BP.to(device, non_blocking=True)
    return hidden_BP.repeat_interleave(seq_len // n_patches, dim=1)


@dataclass(frozen=True)
class PatchMAEConfig:
    """Sizes of a :class:`PatchMAE`: every argument of its constructor, checked.

    Raises:
        ConfigError: a size is out of its range.

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
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError("must be a whole number of 1 or more", argument=name, value=value)
        if type(self.n_mask) is not int:
            raise ConfigError("must be a whole number of patches", argument="n_mask", value=self.n_mask)
        check_patches(self.seq_len, self.n_patches, self.n_mask)
        if self.d_model % self.nhead:
            raise ConfigError(f"must be a multiple of nhead={self.nhead}", argument="d_model", value=self.d_model)
        if type(self.latent_normalize) is not bool:
            raise ConfigError("must be True or False", argument="latent_normalize", value=self.latent_normalize)
        number = isinstance(self.dropout, (int, float)) and not isinstance(self.dropout, bool)
        if not (number and math.isfinite(self.dropout) and 0 <= self.dropout <= 1):
            raise ConfigError("must lie in [0, 1]", argument="dropout", value=self.dropout)

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> PatchMAEConfig:
        """Makes a configuration from all of its fields.

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


class PatchEncoder(nn.Module):
    """Transformer over the visible patches of each spectrum, with a CLS token in front.

    Args:
        seq_len: Channels L, a multiple of ``n_patches``.
        n_patches: Patches P.
        d_model: Width of the tokens.
        nhead: Attention heads; must divide the width.
        num_layers: Transformer layers.
        dim_feedforward: Width of the feed-forward; None means 4 d_model.
        dropout: Dropout probability.
        latent_dim: Width Z of the latent.
        latent_normalize: Scale the latent to norm 1.

    Example:
        >>> encoder = PatchEncoder(seq_len=8, n_patches=4, d_model=8, nhead=2, num_layers=1, latent_dim=3)
        >>> encoder(torch.randn(2, 8), torch.ones(2, 8, dtype=torch.bool)).shape
        torch.Size([2, 3])
    """

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
    ) -> None:
        super().__init__()
        check_patches(seq_len, n_patches, 0)
        self.seq_len, self.n_patches, self.patch_size = seq_len, n_patches, seq_len // n_patches
        self.d_model, self.latent_dim, self.latent_normalize = d_model, latent_dim, latent_normalize
        self.patch_proj = nn.Linear(self.patch_size, d_model)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d_model))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + n_patches, d_model))
        layer = nn.TransformerEncoderLayer(
            d_model,
            nhead,
            dim_feedforward or 4 * d_model,
            dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=num_layers, enable_nested_tensor=False)
        self.to_latent = nn.Linear(d_model, latent_dim)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(
        self,
        x: Tensor,
        visible_mask: Tensor,
        *,
        representation: Representation = "latent",
        visible_count: int | None = None,
    ) -> Tensor:
        """Encode the patches of ``x`` where ``visible_mask`` is True.

        Args:
            x: (B, L) spectra.
            visible_mask: (B, L) bool, True = seen, alike within each patch. Rows without a visible patch are legal.
            representation: ``"latent"`` as ``latent_normalize`` asks, ``"raw_latent"`` before scaling,
                ``"normalized_latent"`` with norm 1, or ``"cls"`` before the projection.
            visible_count: The number of True in **every** row, if the caller knows it; it is trusted and spares a read
                of the device by the host, and the check that the mask follows the patches.

        Returns:
            (B, Z), or (B, D) for ``"cls"``.

        Raises:
            ValueError: When a shape, the dtype of the mask or its patches are wrong, or the representation is unknown.
        """
        check_representation(representation)
        check_input(x, visible_mask, self.seq_len)
        rows = x.shape[0]
        visible_BPS = visible_mask.to(x.device).view(rows, self.n_patches, self.patch_size)
        visible_BP = visible_BPS.all(dim=2)
        if visible_count is None:
            self._check_aligned(visible_BP, visible_BPS.any(dim=2))
        else:
            visible_count //= self.patch_size
        patches_BK, real_BK = pack_visible(visible_BP, visible_count=visible_count)
        index_BKD = patches_BK.unsqueeze(-1).expand(-1, -1, self.d_model)
        tokens_BKD = self.patch_proj(x.view(rows, self.n_patches, self.patch_size)).gather(1, index_BKD)
        places_BPD = self.pos_embed[:, 1:].expand(rows, -1, -1)
        cls_B1D = (self.cls_token + self.pos_embed[:, :1]).expand(rows, -1, -1)
        tokens_BSD = torch.cat([cls_B1D, tokens_BKD + places_BPD.gather(1, index_BKD)], dim=1)
        padding_BS = None if real_BK is None else F.pad(~real_BK, (1, 0), value=False)
        cls_BD: Tensor = self.encoder(tokens_BSD, src_key_padding_mask=padding_BS)[:, 0]
        if representation == "cls":
            return cls_BD
        latent_BZ: Tensor = self.to_latent(cls_BD)
        if representation == "normalized_latent" or (representation == "latent" and self.latent_normalize):
            return F.normalize(latent_BZ.to(torch.promote_types(latent_BZ.dtype, torch.float32)), dim=1)
        return latent_BZ

    def _check_aligned(self, all_BP: Tensor, any_BP: Tensor) -> None:
        if torch.compiler.is_compiling() or (all_BP.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if not torch.equal(all_BP, any_BP):
            raise ValueError(
                f"visible_mask shows parts of patches, but each of the {self.n_patches} patches of {self.patch_size} "
                "channels must be all True or all False; draw it with make_patch_mask"
            )


class PatchDecoder(nn.Module):
    """Decoder of a latent into a whole spectrum: a linear map, or with more layers an MLP with GELU between them.

    Args:
        seq_len: Channels L of the output.
        latent_dim: Width Z of the latent.
        num_layers: Linear layers, at least 1.
        hidden_dim: Width of the layers between; None means ``seq_len``.

    Example:
        >>> PatchDecoder(seq_len=8, latent_dim=3)(torch.zeros(2, 3)).shape
        torch.Size([2, 8])
    """

    def __init__(self, *, seq_len: int, latent_dim: int, num_layers: int = 2, hidden_dim: int | None = None) -> None:
        super().__init__()
        if num_layers < 1:
            raise ConfigError("must be at least 1", argument="num_layers", value=num_layers)
        self.seq_len, self.latent_dim = seq_len, latent_dim
        widths = [latent_dim, *[hidden_dim or seq_len] * (num_layers - 1), seq_len]
        layers: list[nn.Module] = []
        for number, (before, after) in enumerate(itertools.pairwise(widths)):
            layers += [nn.GELU()] if number else []
            layers.append(nn.Linear(before, after))
        self.net = layers[0] if num_layers == 1 else nn.Sequential(*layers)

    def forward(self, z: Tensor) -> Tensor:
        """Decode latents (B, Z) into spectra (B, L).

        Raises:
            ValueError: When ``z`` has another shape.
        """
        if z.dim() != 2 or z.shape[1] != self.latent_dim:
            raise ValueError(f"z has shape {tuple(z.shape)} but must be (B, {self.latent_dim})")
        weight = next(self.net.parameters())
        decoded: Tensor = self.net(z.to(weight.dtype))
        return decoded


class PatchMAE(nn.Module):
    """Masked autoencoder of spectra whose tokens are patches.

    Args:
        seq_len: Channels L of a spectrum, a multiple of ``n_patches``.
        n_patches: Equal patches P, each one token.
        d_model: Width of the tokens.
        nhead: Attention heads; must divide the width.
        num_layers: Transformer layers.
        dim_feedforward: Width of the feed-forward; None means 4 d_model.
        dropout: Dropout probability.
        latent_dim: Width Z of the latent.
        latent_normalize: Scale the latent to norm 1.
        decoder_num_layers: Linear layers of the decoder.
        n_mask: Patches hidden by default.

    Attributes:
        takes_counted_mask: As in :class:`ChemoMAE`.

    Raises:
        ConfigError: When an argument breaks one of these rules.

    Example:
        >>> model = PatchMAE(seq_len=64, d_model=16, nhead=2, num_layers=1, n_patches=8, n_mask=4).eval()
        >>> x_recon, z, visible_mask = model(torch.randn(5, 64))
        >>> x_recon.shape, z.shape, visible_mask.sum(dim=1).tolist()
        (torch.Size([5, 64]), torch.Size([5, 16]), [32, 32, 32, 32, 32])
    """

    takes_counted_mask = True

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
        self._masks_by_patches = type(self).make_visible is PatchMAE.make_visible
        self.encoder = PatchEncoder(
            seq_len=seq_len, n_patches=n_patches, d_model=d_model, nhead=nhead, num_layers=num_layers,
            dim_feedforward=dim_feedforward, dropout=dropout, latent_dim=latent_dim, latent_normalize=latent_normalize,
        )  # fmt: skip
        self.decoder = PatchDecoder(seq_len=seq_len, latent_dim=latent_dim, num_layers=decoder_num_layers)

    def forward(
        self,
        x: Tensor,
        visible_mask: Tensor | None = None,
        *,
        n_mask: int | None = None,
        generator: torch.Generator | None = None,
        visible_count: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode the visible patches of ``x`` and reconstruct all channels.

        Args:
            x: (B, L) spectra.
            visible_mask: (B, L) bool, True = seen, alike within each patch. None draws one.
            n_mask: Patches to hide in the drawn mask; None means the model's ``n_mask``.
            generator: CPU generator of the draw; None takes torch's global CPU generator.
            visible_count: The number of True in every row of a given mask, if the caller knows it; it is trusted.

        Returns:
            ``x_recon`` (B, L), ``z`` (B, Z), and the ``visible_mask`` (B, L) that was used.

        Raises:
            ValueError: When a shape, the mask or ``n_mask`` is wrong.
        """
        check_input(x, visible_mask, self.seq_len)
        if visible_mask is None:
            visible_mask = self.make_visible(x.shape[0], n_mask=n_mask, device=x.device, generator=generator)
            visible_count = self.visible_count(n_mask)
        z = self.encoder(x, visible_mask, visible_count=visible_count)
        return self.decoder(z), z, visible_mask

    def reconstruct(
        self,
        x: Tensor,
        visible_mask: Tensor | None = None,
        *,
        n_mask: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return only ``x_recon`` (B, L) of the forward pass; arguments and errors as there."""
        x_recon: Tensor = self(x, visible_mask, n_mask=n_mask, generator=generator)[0]
        return x_recon

    def encode(self, x: Tensor, *, representation: Representation = "latent") -> Tensor:
        """Encode spectra with every patch visible; mode and gradients are the caller's.

        Args:
            x: (B, L) floating, B of at least 1.
            representation: as in :class:`PatchEncoder`.

        Returns:
            (B, Z), or (B, D) for ``"cls"``.

        Raises:
            TypeError: ``x`` is no floating tensor.
            ValueError: its shape is wrong, or the representation is unknown.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"x is a {getattr(x, 'dtype', type(x).__name__)} but must be a floating tensor (B, L)")
        if x.dim() != 2 or len(x) == 0:
            raise ValueError(f"x has shape {tuple(x.shape)} but must be (B, {self.seq_len}) with B of at least 1")
        visible = torch.ones_like(x, dtype=torch.bool)
        latent: Tensor = self.encoder(x, visible, representation=representation, visible_count=self.seq_len)
        return latent

    def visible_count(self, n_mask: int | None = None) -> int | None:
        """Return how many channels of each row a drawn mask leaves visible; None where a subclass draws otherwise."""
        if not self._masks_by_patches:
            return None
        return (self.n_patches - (self.n_mask if n_mask is None else n_mask)) * (self.seq_len // self.n_patches)

    def make_visible(
        self,
        batch_size: int,
        *,
        n_mask: int | None = None,
        device: torch.device | str | int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw which channels are visible: the complement of `make_patch_mask`.

        Args:
            batch_size: Number of rows B.
            n_mask: Patches to hide; None means the model's ``n_mask``.
            device: Where the mask lies; None means the CPU.
            generator: CPU generator of the draw; None takes torch's global CPU generator.

        Returns:
            (B, L) bool, **True = seen**.
        """
        hide = self.n_mask if n_mask is None else n_mask
        return ~make_patch_mask(batch_size, self.seq_len, self.n_patches, hide, device=device, generator=generator)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, with the present ``n_mask`` and ``encoder.latent_normalize``."""
        now = {"n_mask": self.n_mask, "latent_normalize": self.encoder.latent_normalize}
        return dataclasses.replace(self._config, **now).to_dict()  # type: ignore[arg-type]

    def save(self, path: str | os.PathLike[str], *, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write configuration and weights into one file, whole or not at all; chemomae 0.2 reads it too.

        Args:
            path: the file; its folder is created.
            state_dict: weights to write, such as averaged ones; None writes the model's.

        Raises:
            ConfigError: the model is of a subclass, whose constructor may be another.
            CheckpointError: the weights do not fit the model, are not finite or have several floating types.
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
            raise CheckpointError(f"the weights have the types {sorted(map(str, kinds))}; one floating type is written")
        payload = {
            "artifact": _KIND, "format_version": _VERSION, "package_version": versions()["treadle"],
            "config": self.get_config(), "dtype": names[0], "state_dict": weights,
        }  # fmt: skip
        save_checkpoint(payload, Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str | int = "cpu") -> PatchMAE:
        """Read a file of :meth:`save`, or an ``.artifact.pt`` of chemomae 0.2, into a model in eval mode.

        Raises:
            CheckpointError: it is missing, damaged, another kind of file, or its weights do not fit or are not finite.
            ConfigError: its configuration is incomplete or out of range.
        """
        payload = load_checkpoint(path)
        if payload.get("artifact") != _KIND or payload.get("format_version") != _VERSION:
            raise CheckpointError(
                f"{os.fspath(path)!r} holds no model of format {_VERSION}; weights alone are read by "
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
