"""The decoder that the benchmarks of several ranks train, in three sizes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from treadle import StepOutput

# width, layers, heads, length, micro-batch of one rank, vocabulary
SIZES = {"tiny": (32, 2, 2, 16, 4, 64), "100m": (768, 12, 12, 1024, 16, 32_000), "1b": (2048, 18, 16, 1024, 8, 32_000)}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, states_BLD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(states_BLD)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        states_BLD = states_BLD + self.out(mixed)
        return states_BLD + self.down(F.gelu(self.up(self.norm2(states_BLD)), approximate="tanh"))


class Decoder(nn.Module):
    def __init__(self, size: str) -> None:
        super().__init__()
        width, layers, heads, length, _, vocab = SIZES[size]
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        states_BLD = self.tokens(tokens_BL) + self.places.weight[: tokens_BL.shape[1]]
        for block in self.blocks:
            states_BLD = block(states_BLD)
        return self.head(self.norm(states_BLD))


def loss_of(model: nn.Module, tokens_BL: Tensor) -> Tensor:
    logits_BLV = model(tokens_BL)
    return F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1).float(), tokens_BL[:, 1:].flatten())


class NextToken:
    def step(self, model: nn.Module, batch: Tensor, totals: Any = None, generator: Any = None) -> StepOutput:
        return StepOutput(loss_of(model, batch), weight=batch.numel() - len(batch))
