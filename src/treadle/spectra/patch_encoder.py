"""Encoder and decoder of PatchMAE.

Shapes: B = rows, L = channels, P = patches, S = L / P channels of a patch, K = visible patches, D = model width,
Z = latent width.
"""

from __future__ import annotations

import itertools
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, check_within, checked
from treadle.spectra.encoder import check_input, pack_visible
from treadle.spectra.masks import check_patches

Representation = Literal["latent", "raw_latent", "normalized_latent", "cls"]


def check_representation(name: str) -> None:
    """Raise ConfigError unless ``name`` is one of the four representations."""
    if name not in get_args(Representation):
        raise ConfigError(
            f"must be one of {', '.join(get_args(Representation))}", argument="representation", value=name
        )


class PatchEncoder(nn.Module):
    """Transformer encoder over the visible patches of each spectrum, preceded by a CLS token.

    Args:
        seq_len: Channels L, a multiple of ``n_patches``.
        n_patches: Patches P.
        d_model: Width of the tokens.
        nhead: Attention heads; must divide ``d_model``.
        num_layers: Transformer layers.
        dim_feedforward: Width of the feed-forward layers; None means 4 d_model.
        dropout: Dropout probability.
        latent_dim: Width Z of the latent.
        latent_normalize: Scale the latent to norm 1.

    Example:
        >>> encoder = PatchEncoder(seq_len=8, n_patches=4, d_model=8, nhead=2, num_layers=1, latent_dim=3)
        >>> encoder(torch.randn(2, 8), torch.ones(2, 8, dtype=torch.bool)).shape
        torch.Size([2, 3])
    """

    @checked
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
        check_least(1, d_model=d_model, nhead=nhead, num_layers=num_layers, latent_dim=latent_dim)
        check_within("[0, 1)", dropout=dropout)
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
            visible_mask: (B, L) bool, True = visible, constant within each patch. Rows without a visible patch are
                allowed.
            representation: ``"latent"`` scaled if ``latent_normalize`` is True, ``"raw_latent"`` before scaling,
                ``"normalized_latent"`` with norm 1, or ``"cls"`` before the projection.
            visible_count: The number of True entries in **every** row, if known; it is trusted, which avoids a device
                synchronisation and skips the check that the mask follows the patches.

        Returns:
            (B, Z), or (B, D) for ``"cls"``.

        Raises:
            ValueError: When a shape, the mask's dtype or its patches are wrong, or the representation is unknown.
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
    """Decoder from a latent to a whole spectrum: a linear map, or with more layers an MLP with GELU.

    Args:
        seq_len: Channels L of the output.
        latent_dim: Width Z of the latent.
        num_layers: Linear layers, at least 1.
        hidden_dim: Width of the hidden layers; None means ``seq_len``.

    Example:
        >>> PatchDecoder(seq_len=8, latent_dim=3)(torch.zeros(2, 3)).shape
        torch.Size([2, 8])
    """

    @checked
    def __init__(self, *, seq_len: int, latent_dim: int, num_layers: int = 2, hidden_dim: int | None = None) -> None:
        super().__init__()
        check_least(1, num_layers=num_layers)
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
            ValueError: When ``z`` has the wrong shape.
        """
        if z.dim() != 2 or z.shape[1] != self.latent_dim:
            raise ValueError(f"z has shape {tuple(z.shape)} but must be (B, {self.latent_dim})")
        weight = next(self.net.parameters())
        decoded: Tensor = self.net(z.to(weight.dtype))
        return decoded
