"""chemomae's model without reads of the device in its forward pass, which a captured step needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treadle.spectra import ChemoMAE
from treadle.spectra.encoder import pack_visible

LENGTH, PATCHES, MASKED, LATENT = 256, 16, 4, 16  # of the spectra; patches per spectrum, hidden patches, latent size


class PatchMAE(ChemoMAE):
    """Model of chemomae 0.2.4, parameter by parameter, for an equal number of visible patches in every row."""

    takes_counted_mask = True

    def __init__(self, width: int, num_layers: int):
        super().__init__(
            seq_len=LENGTH, d_model=width, num_layers=1, latent_dim=LATENT, n_blocks=PATCHES, n_mask=MASKED, dropout=0.0
        )
        self.encoder = PatchEncoder(width, num_layers)  # type: ignore[assignment]
        self.decoder = nn.Module()  # type: ignore[assignment]
        self.decoder.net = nn.Sequential(nn.Linear(LATENT, LENGTH), nn.GELU(), nn.Linear(LENGTH, LENGTH))

    def forward(  # type: ignore[override]
        self, x: Tensor, visible_mask: Tensor | None = None, *, visible_count: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if visible_mask is None:
            visible_mask = self.make_visible(len(x), device=x.device)
        latent = self.encoder(x, visible_mask, (visible_count or self.visible_count()) * PATCHES // LENGTH)
        return self.decoder.net(latent), latent, visible_mask  # type: ignore[operator]


class PatchEncoder(nn.Module):
    """Encoder of chemomae 0.2.4."""

    def __init__(self, width: int, num_layers: int):
        super().__init__()
        self.patch_proj = nn.Linear(LENGTH // PATCHES, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + PATCHES, width))
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.to_latent = nn.Linear(width, LATENT)

    def forward(self, x: Tensor, visible_mask: Tensor, num_seen: int) -> Tensor:
        seen = visible_mask.view(len(x), PATCHES, -1)[:, :, 0]
        order = pack_visible(seen, visible_count=num_seen)[0][:, :, None]
        tokens = self.patch_proj(x.view(len(x), PATCHES, -1)) + self.pos_embed[:, 1:]
        tokens = tokens.gather(1, order.expand(-1, -1, tokens.shape[-1]))
        start = (self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1).to(tokens.dtype)
        states = self.encoder(torch.cat([start, tokens], dim=1))
        return F.normalize(self.to_latent(states[:, 0]), dim=1)
