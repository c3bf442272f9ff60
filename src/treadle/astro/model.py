"""Causal transformer over the tokens of one object.

Shapes: B = sequences, L = positions, D = model width, V = vocabulary.

Attention uses no mask. A position must attend to the valid positions up to itself and to no others, which plain causal
attention does once the padding of each row is at its end; the ids are therefore permuted into that order before the
first layer and the hidden states back after the last. This handles padding anywhere in a row, never synchronises with
the device, keeps the fast attention kernels, which take no mask, and avoids NaN from rows without keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from treadle.astro.generation import generate
from treadle.astro.layers import CausalLayer, LayerCache, padding_last
from treadle.errors import ConfigError
from treadle.errors.arguments import check_least, check_within, checked

if TYPE_CHECKING:
    from treadle.astro.vocab import VocabSpec


class CausalTransformerLM(nn.Module):
    """Causal transformer with token, type and learned position embeddings and an untied head without bias.

    Matrices and embeddings are initialised from N(0, 0.02), those that write into the residual stream from N(0, 0.02 /
    sqrt(2 n_layers)), biases to 0 and norms to 1 (Radford et al. 2019, section 2.3, as in GPT-2).

    Attributes:
        head: (D -> V) linear layer; ``forward`` is ``head(hidden_states(...))``.
        vocab_size, n_types, max_len, norm_first: as given.

    Args:
        vocab_size: V, number of ids.
        n_types: rows of the type table; at least 7 + spectrum groups.
        d_model: D.
        n_layers: number of layers.
        n_heads: attention heads; must divide ``d_model``.
        d_ff: width of the feed-forward layers.
        dropout: in [0, 1).
        max_len: maximum sequence length.
        norm_first: whether layers are pre-norm; False builds post-norm layers, as in astromodal, whose weights fit only
            such a model.

    Raises:
        ConfigError: a size is out of range.

    Example:
        >>> model = CausalTransformerLM(15, 12, 16, 1, 2, 32, 0.0, 32)
        >>> tokens = torch.tensor([[1, 5, 3]])
        >>> model(tokens, types=tokens, attn_mask=torch.ones(1, 3, dtype=torch.bool)).shape
        torch.Size([1, 3, 15])
    """

    @checked
    def __init__(
        self,
        vocab_size: int,
        n_types: int,
        d_model: int,
        n_layers: int,
        n_heads: int,
        d_ff: int,
        dropout: float,
        max_len: int,
        *,
        norm_first: bool = True,
    ):
        super().__init__()
        sizes = {"vocab_size": vocab_size, "n_types": n_types, "d_model": d_model, "n_layers": n_layers,
                 "n_heads": n_heads, "d_ff": d_ff, "max_len": max_len}  # fmt: skip
        _check_sizes(sizes, dropout)
        self.vocab_size, self.n_types, self.max_len = vocab_size, n_types, max_len
        self.norm_first = norm_first
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        self.type_embedding = nn.Embedding(n_types, d_model)
        self.position_embedding = nn.Embedding(max_len, d_model)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            CausalLayer(d_model, n_heads=n_heads, d_ff=d_ff, dropout=dropout, norm_first=norm_first)
            for _ in range(n_layers)
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        self._checkpointing = False
        self._read_on_accelerator = False
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)  # norms are already initialised
            elif name.endswith(("out_proj.weight", "linear2.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * len(self.layers)) ** 0.5)
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, types: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Return the logits of the token that follows each position.

        Args:
            tokens: (B, L) integer ids.
            types: (B, L) integer type ids.
            attn_mask: (B, L) bool, True = valid; padding may be anywhere. None: no padding.

        Returns:
            (B, L, V). A valid position depends only on the valid positions up to itself; positions are counted without
            padding. Outputs at padding are finite but meaningless.

        Raises:
            ValueError: L exceeds ``max_len``, a shape or dtype is wrong, or an id is out of range. On an accelerator
                only the ids of the first call are checked, since each check synchronises with the device.
        """
        logits_BLV: Tensor = self.head(self.hidden_states(tokens, types, attn_mask))
        return logits_BLV

    def hidden_states(self, tokens: Tensor, types: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Return the input of the head, (B, L, D); otherwise as :meth:`forward`."""
        self._check_input(tokens, types, attn_mask)
        if attn_mask is None:
            return self._transform(tokens, types)
        order_BL, place_BL = padding_last(attn_mask)
        hidden_BLD = self._transform(tokens.gather(1, order_BL), types.gather(1, order_BL))
        return hidden_BLD.gather(1, place_BL[:, :, None].expand_as(hidden_BLD))

    def extend(self, tokens: Tensor, types: Tensor, caches: list[LayerCache]) -> Tensor:
        """Return the hidden states of positions that follow the cached ones, and append them to the caches.

        Args:
            tokens: (B, L) ids without padding; L must be 1 unless the caches are empty.
            types: (B, L) type ids.
            caches: one per layer, from :meth:`new_caches`.

        Returns:
            (B, L, D), equal to the same positions of :meth:`hidden_states` of the whole sequence.

        Raises:
            ValueError: as :meth:`forward`, counting the cached positions; or L is above 1 with non-empty caches.

        Example:
            >>> model = CausalTransformerLM(15, 12, 16, 1, 2, 32, 0.0, 32).eval()
            >>> caches, tokens = model.new_caches(), torch.tensor([[1, 5]])
            >>> _ = model.extend(tokens, tokens, caches)
            >>> model.extend(torch.tensor([[3]]), torch.tensor([[3]]), caches).shape
            torch.Size([1, 1, 16])
        """
        start = caches[0].length
        if start and tokens.shape[1] != 1:
            raise ValueError(f"tokens has {tokens.shape[1]} positions after {start} cached ones; give one at a time")
        self._check_input(tokens, types, None, start=start)
        return self._transform(tokens, types, caches=caches, start=start)

    def new_caches(self, capacity: int | None = None) -> list[LayerCache]:
        """Return empty caches for :meth:`extend`, with room for ``capacity`` positions (None: ``max_len``)."""
        return [LayerCache(capacity or self.max_len) for _ in self.layers]

    def _transform(
        self, tokens_BL: Tensor, types_BL: Tensor, *, caches: list[LayerCache] | None = None, start: int = 0
    ) -> Tensor:
        positions_L = torch.arange(start, start + tokens_BL.shape[1], device=tokens_BL.device)
        embedded_BLD = self.token_embedding(tokens_BL) + self.type_embedding(types_BL)
        hidden_BLD = self.dropout(embedded_BLD + self.position_embedding(positions_L))
        for number, layer in enumerate(self.layers):
            if self._checkpointing and torch.is_grad_enabled():
                hidden_BLD = checkpoint(layer, hidden_BLD, use_reentrant=False)
            else:
                hidden_BLD = layer(hidden_BLD, None if caches is None else caches[number])
        normed_BLD: Tensor = self.norm(hidden_BLD)
        return normed_BLD

    def gradient_checkpointing_enable(self) -> None:
        """Enable activation checkpointing: save only each layer's input and recompute the rest in the backward pass.

        Results are identical to the bit, dropout included. Memory falls to one tensor per layer, at the cost of a
        second forward pass.

        Example:
            >>> CausalTransformerLM(15, 12, 16, 1, 2, 32, 0.0, 32).gradient_checkpointing_enable()
        """
        self._checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Disable activation checkpointing."""
        self._checkpointing = False

    def generate(
        self,
        tokens: Tensor,
        types: Tensor,
        max_new_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        *,
        vocab: VocabSpec | None = None,
        generator: torch.Generator | None = None,
        legal_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Generate continuations of sequences with a key-value cache.

        Runs in eval mode without gradients; the mode of every module is restored.

        Args:
            tokens: (B, L) prompts of equal length, without padding.
            types: (B, L) type ids.
            max_new_tokens: maximum number of new tokens; a sequence never exceeds ``max_len``.
            temperature: divides the logits; 0 selects the most likely id.
            top_k: sample only among the k most likely ids.
            vocab: determines the type of each new id. None: repeat the last type of the prompt.
            generator: generator for sampling, on any device; None uses the global one.
            legal_only: with ``vocab``, sample only ids that are legal at their position in the order of
                `encode_sequence`. A row that has reached EOS is padded with PAD; generation ends when all rows have.

        Returns:
            ``tokens`` and ``types``, each the prompt followed by the new ids, (B, at most L + max_new_tokens).

        Raises:
            ConfigError: an argument is out of range, or with ``legal_only`` a prompt is not legal.

        Example:
            >>> model, tokens = CausalTransformerLM(15, 12, 16, 1, 2, 32, 0.0, 32), torch.tensor([[1, 5]])
            >>> model.generate(tokens, tokens, 3, temperature=0)[0].shape
            torch.Size([1, 5])
        """
        return generate(
            self, tokens, types=types, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k,
            vocab=vocab, generator=generator, legal_only=legal_only,
        )  # fmt: skip

    def _check_input(self, tokens: Tensor, types: Tensor, attn_mask: Tensor | None, *, start: int = 0) -> None:
        if tokens.dim() != 2:
            raise ValueError(f"tokens has shape {tuple(tokens.shape)} but must be (B, L)")
        if types.shape != tokens.shape:
            raise ValueError(f"types has shape {tuple(types.shape)} but must be {tuple(tokens.shape)}, that of tokens")
        if attn_mask is not None and (attn_mask.shape != tokens.shape or attn_mask.dtype != torch.bool):
            raise ValueError(
                f"attn_mask has shape {tuple(attn_mask.shape)} and dtype {attn_mask.dtype} but must be bool of the "
                f"shape {tuple(tokens.shape)} of tokens, True = valid; convert it with .bool()"
            )
        length = start + tokens.shape[1]
        if length > self.max_len:
            raise ValueError(f"a sequence of {length} positions is longer than max_len={self.max_len} of the model")
        if self._may_read(tokens):
            _check_ids("tokens", tokens, "vocab_size", self.vocab_size)
            _check_ids("types", types, "n_types", self.n_types)

    def _may_read(self, ids: Tensor) -> bool:
        """Return whether the host may read ids: always on the CPU, once on an accelerator, never inside a graph."""
        if torch.compiler.is_compiling() or (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        if ids.device.type == "cpu":
            return True
        first, self._read_on_accelerator = not self._read_on_accelerator, True
        return first


def _check_ids(name: str, ids: Tensor, table: str, size: int) -> None:
    if ids.numel() == 0 or ids.device.type == "meta":
        return
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= size:
        raise ValueError(
            f"{name} holds the id {low if low < 0 else high}, but {table}={size} of the model allows 0 to {size - 1}; "
            "build the model for the vocabulary that the sequences were made with"
        )


def _check_sizes(sizes: dict[str, int], dropout: float) -> None:
    check_least(1, **sizes)
    width, heads = sizes["d_model"], sizes["n_heads"]
    if width % heads:
        raise ConfigError(
            f"={width} is not divisible by n_heads={heads}; every head takes an equal share", argument="d_model"
        )
    check_within("[0, 1)", dropout=dropout)
