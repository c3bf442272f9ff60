"""Masked-autoencoder encoder from visible channels to a unit-norm latent, and its linear decoder.

Shapes: B = rows, L = channels, K = packed visible channels, S = 1 + K tokens (CLS first), Q = queries,
D = model width, H = heads, E = D / H, F = feed-forward width, Z = latent width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treadle.errors.arguments import check_least, check_within, checked


def sine_positions(seq_len: int, d_model: int) -> Tensor:
    """Return fixed sine/cosine positions (Vaswani et al. 2017, section 3.5), for even and odd widths.

    Column 2i holds sin(p / 10000^(2i/D)), column 2i+1 the cosine of the same angle; an odd width ends with a sine.

    Returns:
        (seq_len, d_model) float32.

    Example:
        >>> sine_positions(2, 3).shape
        torch.Size([2, 3])
    """
    even = torch.arange(0, d_model, 2, dtype=torch.float64)
    rate = torch.exp(even * (-math.log(10000.0) / d_model))
    angle = torch.arange(seq_len, dtype=torch.float64)[:, None] * rate
    table = torch.empty(seq_len, d_model, dtype=torch.float64)
    table[:, 0::2] = angle.sin()
    table[:, 1::2] = angle[:, : d_model // 2].cos()
    return table.float()


class EncoderLayer(nn.Module):
    """Pre-norm transformer layer of attention and a GELU feed-forward, each with a residual connection.

    Mathematically equal to ``nn.TransformerEncoderLayer(norm_first=True, activation="gelu")``, with two differences in
    the interface: the mask is True where a key may be attended to, and ``n_queries`` limits the output to the first
    tokens, since the last layer only needs to output the CLS token.

    Example:
        >>> import torch
        >>> layer = EncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.0)
        >>> layer(torch.randn(3, 5, 8), None, n_queries=1).shape
        torch.Size([3, 1, 8])
    """

    def __init__(self, d_model: int, *, nhead: int, dim_feedforward: int, dropout: float) -> None:
        super().__init__()
        self.nhead = nhead
        self.attention_dropout = dropout
        self.norm1 = nn.LayerNorm(d_model)
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.dropout = nn.Dropout(dropout)
        nn.init.xavier_uniform_(self.in_proj.weight)
        nn.init.zeros_(self.in_proj.bias)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, tokens_BSD: Tensor, attend_B11S: Tensor | None, *, n_queries: int | None = None) -> Tensor:
        """Transform the tokens.

        Args:
            tokens_BSD: (B, S, D).
            attend_B11S: (B, 1, 1, S) bool, True = may be attended to; None = every token may.
            n_queries: Return only the first ``n_queries`` tokens; None returns all.

        Returns:
            (B, S or n_queries, D).
        """
        normed_BSD = self.norm1(tokens_BSD)
        kept_BQD = tokens_BSD if n_queries is None else tokens_BSD[:, :n_queries]
        kept_BQD = kept_BQD + self.dropout(self._attend(normed_BSD, attend_B11S, n_queries))
        hidden_BQF = self.dropout(F.gelu(self.linear1(self.norm2(kept_BQD))))
        out_BQD: Tensor = kept_BQD + self.dropout(self.linear2(hidden_BQF))
        return out_BQD

    def _attend(self, normed_BSD: Tensor, attend_B11S: Tensor | None, n_queries: int | None) -> Tensor:
        width = normed_BSD.shape[-1]
        if n_queries is None:
            query, key, value = self.in_proj(normed_BSD).chunk(3, dim=-1)
        else:
            weight, bias = self.in_proj.weight, self.in_proj.bias
            query = F.linear(normed_BSD[:, :n_queries], weight[:width], bias[:width])
            key, value = F.linear(normed_BSD, weight[width:], bias[width:]).chunk(2, dim=-1)
        mixed_BHQE = F.scaled_dot_product_attention(
            self._split_heads(query),
            self._split_heads(key),
            self._split_heads(value),
            attn_mask=attend_B11S,
            dropout_p=self.attention_dropout if self.training else 0.0,
        )
        out_BQD: Tensor = self.out_proj(mixed_BHQE.transpose(1, 2).flatten(2))
        return out_BQD

    def _split_heads(self, x_BSD: Tensor) -> Tensor:
        batch, length, width = x_BSD.shape
        return x_BSD.view(batch, length, self.nhead, width // self.nhead).transpose(1, 2)


class SpectrumEncoder(nn.Module):
    """Transformer encoder from the visible channels of each spectrum to a unit-norm latent.

    Example:
        >>> import torch
        >>> encoder = SpectrumEncoder(
        ...     seq_len=6, d_model=8, nhead=2, num_layers=1, dim_feedforward=16, dropout=0.0,
        ...     use_learnable_pos=True, latent_dim=4)
        >>> encoder(torch.randn(3, 6), torch.ones(3, 6, dtype=torch.bool)).shape
        torch.Size([3, 4])
    """

    pos_embed: Tensor

    @checked
    def __init__(
        self,
        *,
        seq_len: int,
        d_model: int = 256,
        nhead: int = 4,
        num_layers: int = 4,
        dim_feedforward: int = 1024,
        dropout: float = 0.1,
        use_learnable_pos: bool = True,
        latent_dim: int = 64,
    ) -> None:
        super().__init__()
        check_least(
            1, seq_len=seq_len, d_model=d_model, nhead=nhead, num_layers=num_layers, dim_feedforward=dim_feedforward,
            latent_dim=latent_dim,
        )  # fmt: skip
        check_within("[0, 1)", dropout=dropout)
        self.seq_len = seq_len
        self.token_proj = nn.Linear(1, d_model, bias=False)
        self.cls_token = nn.Parameter(torch.empty(d_model))
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        if use_learnable_pos:
            self.pos_embed = nn.Parameter(torch.empty(seq_len, d_model))
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        else:
            self.register_buffer("pos_embed", sine_positions(seq_len, d_model))
        self.layers = nn.ModuleList(
            EncoderLayer(d_model, nhead=nhead, dim_feedforward=dim_feedforward, dropout=dropout)
            for _ in range(num_layers)
        )
        self.to_latent = nn.Linear(d_model, latent_dim, bias=False)

    def forward(self, x: Tensor, visible_mask: Tensor, *, visible_count: int | None = None) -> Tensor:
        """Encode the channels of ``x`` where ``visible_mask`` is True.

        Values of ``x`` outside the mask are never read, so NaN there is harmless.

        Args:
            x: (B, L) spectra.
            visible_mask: (B, L) bool, True = visible. Rows without visible channels are allowed.
            visible_count: The number of True entries in **every** row, if known; it is trusted and avoids a device
                synchronisation. None reads the largest count once.

        Returns:
            (B, Z) rows of norm 1, at least float32, even under autocast.

        Raises:
            ValueError: When a shape or the mask's dtype is wrong.
        """
        check_input(x, visible_mask, self.seq_len)
        channels_BK, real_BK = pack_visible(visible_mask, visible_count=visible_count)
        tokens_BSD = self._tokens(x, channels_BK, real_BK)
        attend_B11S = None
        if real_BK is not None:
            attend_B11S = F.pad(real_BK, (1, 0), value=True)[:, None, None, :]
        for layer in self.layers[:-1]:
            tokens_BSD = layer(tokens_BSD, attend_B11S)
        cls_B1D = self.layers[-1](tokens_BSD, attend_B11S, n_queries=1)
        latent_BZ = self.to_latent(cls_B1D[:, 0])
        # bf16 has 8 bits of precision: dividing in it would leave rows up to 0.4 % off the unit sphere.
        return F.normalize(latent_BZ.to(torch.promote_types(latent_BZ.dtype, torch.float32)), dim=-1)

    def _tokens(self, x_BL: Tensor, channels_BK: Tensor, real_BK: Tensor | None) -> Tensor:
        # Values are gathered before projection: if all channels were projected, a NaN in a hidden one would reach the
        # gradient of the projection as 0 * NaN.
        values_BK = x_BL.gather(1, channels_BK)
        if real_BK is not None:
            values_BK = torch.where(real_BK, values_BK, 0)
        values_BK1 = values_BK.unsqueeze(-1).to(self.token_proj.weight.dtype)
        tokens_BKD = self.token_proj(values_BK1) + F.embedding(channels_BK, self.pos_embed)
        cls_B1D = self.cls_token.expand(x_BL.shape[0], 1, -1)
        return torch.cat([cls_B1D.to(tokens_BKD.dtype), tokens_BKD], dim=1)


class SpectrumDecoder(nn.Linear):
    """Linear decoder from a latent to the channels of a spectrum, without bias.

    Args:
        seq_len: Channels L of the output.
        latent_dim: Width Z of the latent.

    Example:
        >>> import torch
        >>> SpectrumDecoder(seq_len=6, latent_dim=4)(torch.zeros(3, 4)).shape
        torch.Size([3, 6])
    """

    @checked
    def __init__(self, *, seq_len: int, latent_dim: int = 64) -> None:
        check_least(1, seq_len=seq_len, latent_dim=latent_dim)
        super().__init__(latent_dim, seq_len, bias=False)


def check_input(x: Tensor, visible_mask: Tensor | None, seq_len: int) -> None:
    """Raise ValueError unless x is (B, seq_len) and the mask, if given, a bool tensor of its shape."""
    if x.dim() != 2 or x.shape[1] != seq_len:
        raise ValueError(
            f"x has shape {tuple(x.shape)} but must be (B, {seq_len}), as the model was built with "
            f"seq_len={seq_len}; reshape or resample the spectra"
        )
    if visible_mask is None:
        return
    if visible_mask.shape != x.shape or visible_mask.dtype != torch.bool:
        raise ValueError(
            f"visible_mask has shape {tuple(visible_mask.shape)} and dtype {visible_mask.dtype} but must be "
            f"bool of the shape {tuple(x.shape)} of x, True = seen; expand or convert it (.bool())"
        )


def pack_visible(visible_BL: Tensor, *, visible_count: int | None = None) -> tuple[Tensor, Tensor | None]:
    """List the visible channels of each row, in channel order.

    Args:
        visible_BL: (B, L) bool, True = visible.
        visible_count: The number of True entries in every row, if known.

    Returns:
        ``channels_BK``, int64, the visible channels of each row in ascending order, and ``real_BK``, bool, True where
        an entry is a channel and not padding (padding points at the last channel), or None if no row needs padding. K
        is the largest count of a row.

    Example:
        >>> import torch
        >>> channels, real = pack_visible(torch.tensor([[True, False, True], [False, True, False]]))
        >>> channels.tolist(), real.tolist()
        ([[0, 2], [1, 2]], [[True, True], [True, False]])
    """
    seq_len = visible_BL.shape[1]
    fewest, most = (visible_count, visible_count) if visible_count is not None else _row_counts(visible_BL)
    order_L = torch.arange(seq_len, device=visible_BL.device)
    # A hidden channel becomes L, which sorts after every visible one.
    channels_BK = torch.where(visible_BL, order_L, seq_len).sort(dim=1).values[:, :most]
    if fewest == most:
        return channels_BK, None
    return channels_BK.clamp(max=seq_len - 1), channels_BK < seq_len


def _row_counts(visible_BL: Tensor) -> tuple[int, int]:
    """Return the smallest and largest number of visible channels in a row, or bounds that hold for any mask."""
    if visible_BL.shape[0] == 0:
        return 0, 0
    if torch.compiler.is_compiling() or (visible_BL.is_cuda and torch.cuda.is_current_stream_capturing()):
        # Shapes must not depend on data here; every row is padded to the full length instead.
        return 0, visible_BL.shape[1]
    fewest, most = torch.stack(visible_BL.sum(dim=1).aminmax()).tolist()  # one device synchronisation for both
    return int(fewest), int(most)
