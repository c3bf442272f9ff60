"""Causal transformer layer with a key-value cache.

Shapes: B = sequences, L = positions, T = positions seen so far, D = model width, H = heads, E = D / H.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerCache:
    """Key-value cache of one layer, allocated once at the first call.

    Args:
        capacity: maximum number of positions.

    Example:
        >>> cache = LayerCache(4)
        >>> keys, values = cache.extend(torch.zeros(1, 2, 3, 8), torch.ones(1, 2, 3, 8))
        >>> keys.shape, cache.length
        (torch.Size([1, 2, 3, 8]), 3)
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self._memory_2BHTE: Tensor | None = None

    def extend(self, keys_BHLE: Tensor, values_BHLE: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new positions and return those of all positions, (B, H, T, E)."""
        batch, heads, new, width = keys_BHLE.shape
        if self._memory_2BHTE is None:
            self._memory_2BHTE = keys_BHLE.new_empty(2, batch, heads, self.capacity, width)
        end = self.length + new
        self._memory_2BHTE[0, :, :, self.length : end] = keys_BHLE
        self._memory_2BHTE[1, :, :, self.length : end] = values_BHLE
        self.length = end
        return self._memory_2BHTE[0, :, :, :end], self._memory_2BHTE[1, :, :, :end]


class CausalLayer(nn.Module):
    """Transformer layer of causal attention and a GELU feed-forward, each with a residual connection.

    Dropout is applied to the attention weights, inside the feed-forward, and to the output of each block. With
    ``norm_first`` each block normalises its input (pre-norm), otherwise the sum (post-norm, Vaswani et al. 2017). With
    ``causal=False`` every position attends to all others.

    Example:
        >>> layer = CausalLayer(8, n_heads=2, d_ff=16, dropout=0.0)
        >>> layer(torch.randn(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int,
        d_ff: int,
        dropout: float,
        norm_first: bool = True,
        causal: bool = True,
    ):
        super().__init__()
        self.norm_first = norm_first
        self.n_heads = n_heads
        self.causal = causal
        self.norm1 = nn.LayerNorm(d_model)
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.linear1 = nn.Linear(d_model, d_ff)
        self.linear2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BLD: Tensor, cache: LayerCache | None = None) -> Tensor:
        """Transform positions, each attending to itself and to earlier ones.

        Args:
            hidden_BLD: (B, L, D).
            cache: holds the earlier positions; these are appended. L must be 1 unless it is empty.

        Returns:
            (B, L, D).
        """
        if not self.norm_first:
            return self._post_norm(hidden_BLD, cache)
        hidden_BLD = hidden_BLD + self.dropout(self._attend(self.norm1(hidden_BLD), cache))
        inner_BLF = self.dropout(F.gelu(self.linear1(self.norm2(hidden_BLD))))
        out_BLD: Tensor = hidden_BLD + self.dropout(self.linear2(inner_BLF))
        return out_BLD

    def _post_norm(self, hidden_BLD: Tensor, cache: LayerCache | None) -> Tensor:
        hidden_BLD = self.norm1(hidden_BLD + self.dropout(self._attend(hidden_BLD, cache)))
        inner_BLF = self.dropout(F.gelu(self.linear1(hidden_BLD)))
        out_BLD: Tensor = self.norm2(hidden_BLD + self.dropout(self.linear2(inner_BLF)))
        return out_BLD

    def _attend(self, normed_BLD: Tensor, cache: LayerCache | None) -> Tensor:
        queries, keys, values = (self._by_head(part) for part in self.in_proj(normed_BLD).chunk(3, dim=-1))
        if cache is not None:
            keys, values = cache.extend(keys, values)
        mixed_BHLE = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=self.dropout.p if self.training else 0.0,
            is_causal=self.causal
            and queries.shape[2] > 1,  # a single query is the last position and attends to the whole cache
        )
        out_BLD: Tensor = self.out_proj(mixed_BHLE.transpose(1, 2).flatten(2))
        return out_BLD

    def _by_head(self, x_BLD: Tensor) -> Tensor:
        batch, length, width = x_BLD.shape
        return x_BLD.view(batch, length, self.n_heads, width // self.n_heads).transpose(1, 2)


def padding_last(valid_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the permutation that puts the valid positions of each row first, and its inverse.

    Valid and padded positions each keep their relative order. Does not synchronise with the device.

    Args:
        valid_BL: (B, L) bool, True = valid.

    Returns:
        Two (B, L) long tensors, each the inverse of the other.

    Example:
        >>> order, place = padding_last(torch.tensor([[False, True, False, True]]))
        >>> order.tolist(), place.tolist()
        ([[1, 3, 0, 2]], [[2, 0, 3, 1]])
    """
    order_BL = valid_BL.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
    return order_BL, order_BL.argsort(dim=1)
