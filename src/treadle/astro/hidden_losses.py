"""Losses computed from hidden states and the head's weight, without materialising the (N, V) logits.

Logits are computed in chunks. Each chunk is overwritten by its gradient and multiplied into the gradients of the hidden
states and the head before the next chunk is computed. The forward pass thus does all the work, since the upstream
gradient of the loss is a scalar. Products use the autocast dtype; sums over chunks are float32.

Shapes: N = positions (B·L), E = width of the hidden states, V = vocabulary, R = rows of a chunk, G = groups of a block,
M = slots of each, K = ids of one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from treadle.astro.loss_inputs import Codebooks, LossConfig, needed_codebooks
from treadle.astro.loss_terms import LossValues, Rows, require_codebooks, sum_terms, term_scales
from treadle.astro.losses import Stats, check_rows, check_shapes, weighted
from treadle.astro.sampling import Block, LossPositions, choose_positions
from treadle.astro.vocab import VocabSpec
from treadle.errors import ConfigError

# Logits of a chunk: 96 MiB in bfloat16. More rows mean larger products and fewer additions to the head's gradient;
# fewer rows take less memory.
_PIECE_LOGITS = 3 << 24
# Entries of the head's gradient held at one time in addition to their sum: 32 MiB in bfloat16.
_PRODUCT = 1 << 24
# Fast GPU matrix products need every dimension to be a multiple of at least 8; with 68,613 unpadded ids they took seven
# times as long. Rows of logits therefore start at multiples of this, and the last ids are multiplied separately.
_ALIGNED = 64
# In float16 a sum over the rows of a chunk could overflow; scaling the hidden states down by this factor prevents it.
_FLOAT16_SHRINK = 2.0**-5


def combined_loss_from_hidden(
    hidden: Tensor,
    head: nn.Linear | Tensor,
    targets: Tensor,
    vocab: VocabSpec,
    image_codebook: Any,
    spectrum_codebook: Any,
    scalar_centers: Any,
    config: Any = None,
    use_ce: bool = True,
    *,
    generator: torch.Generator | None = None,
    positions: LossPositions | None = None,
    totals: Mapping[str, float] | None = None,
) -> tuple[Tensor, Stats]:
    """Compute `combined_loss` of ``hidden @ head.T`` without materialising those logits.

    The value and the gradients of ``hidden`` and the head are equal up to rounding.

    Args:
        hidden: (B, L, E) or (N, E), the input of the head.
        head: a linear layer without bias, or its weight (V, E).
        targets: this and the remaining arguments as in `combined_loss`.

    Raises:
        ConfigError: the head has a bias, or its width or dtype differs from the hidden states'; or as `combined_loss`.

    Example:
        >>> from treadle.astro.vocab import build_vocab_spec
        >>> vocab = build_vocab_spec(2, 4, 2, ["a"], scalar_bins=2)
        >>> hidden, head = torch.randn(1, 3, 8, requires_grad=True), nn.Linear(8, 13, bias=False)
        >>> loss, stats = combined_loss_from_hidden(
        ...     hidden, head, torch.tensor([[5, 8, 0]]), vocab, [[0.0], [2.0]], None, [1.0, 3.0, 10.0, 30.0],
        ...     {"weight_spectrum": 0},
        ... )
        >>> loss.backward()
        >>> hidden.grad[0, 2].abs().sum(), stats["n_ce"]
        (tensor(0.), 2)
    """
    weight = _weight_of(head)
    codebooks = image_codebook, spectrum_codebook, scalar_centers
    config = LossConfig.read(config)
    if positions is None:
        check_shapes("hidden", hidden, len(weight), targets, vocab)
        positions = choose_positions(targets, vocab, config, use_ce=use_ce, generator=generator)
    weights = config.term_weights(vocab)
    needed = needed_codebooks(vocab, codebooks, weights, hidden.device, each_batch=True)
    values = loss_of_hidden(hidden, weight, positions, needed, weights, totals=totals)
    return values.loss, values.stats()


def loss_of_hidden(
    hidden: Tensor,
    head: nn.Linear | Tensor,
    positions: LossPositions,
    codebooks: Codebooks,
    weights: Mapping[str, float],
    *,
    totals: Mapping[str, float] | None = None,
) -> LossValues:
    """Return the loss at the chosen positions with its terms and counts; called by the training step.

    Args:
        hidden: (B, L, E) or (N, E).
        head: a linear layer without bias, or its weight (V, E).
        positions: chosen from the targets of these hidden states.
        codebooks: prepared for the vocabulary.
        weights: weights of ``img``, ``sca`` and ``spec``.
        totals: positions of each term in the whole step; None: this batch is the step.

    Raises:
        ConfigError: the head does not match, the positions are from another batch, a codebook is missing, or a total is
            too small.
    """
    weight = _weight_of(head)
    require_codebooks(positions, codebooks)
    check_rows("hidden", hidden, positions)
    scales = term_scales(positions.counts, weights, totals)
    dtype = _product_type(hidden, weight)
    moved = Codebooks(*(book and book.to(hidden.device) for book in codebooks))
    records = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss, *sums = _LossOfHidden.apply(  # type: ignore[no-untyped-call]
        hidden, weight, dtype, records, positions.to(hidden.device), moved, scales
    )
    means = {term: total / positions.counts[term] for term, total in zip(positions.terms, sums, strict=True)}
    return LossValues(loss, means, positions.counts)


def _weight_of(head: nn.Linear | Tensor) -> Tensor:
    if isinstance(head, Tensor):
        return head
    if head.bias is not None:
        raise ConfigError("head has a bias, which the losses do not add; make it with bias=False")
    return head.weight


def _product_type(hidden: Tensor, weight: Tensor) -> torch.dtype:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ConfigError(f"head of shape {tuple(weight.shape)} does not fit hidden of shape {tuple(hidden.shape)}")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    if hidden.dtype != weight.dtype:
        raise ConfigError(f"hidden is {hidden.dtype} and the head {weight.dtype}; use one type, or autocast")
    return hidden.dtype


class _HeadLogits:
    """Logits computed on demand from hidden states; gradients go to the hidden states and the head."""

    def __init__(self, hidden: Tensor, weight_VE: Tensor, dtype: torch.dtype, *, wanted: tuple[bool, bool]) -> None:
        hidden_NE = hidden.reshape(-1, hidden.shape[-1])
        self.hidden_NE, self.weight_VE = hidden_NE.to(dtype), weight_VE.to(dtype)
        self.vocab_size = len(weight_VE)
        self.parts = _aligned_parts(self.weight_VE)
        self.device = hidden.device
        self.piece_logits = _PIECE_LOGITS
        self.shrink = _FLOAT16_SHRINK if dtype == torch.float16 else 1.0
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        self.hidden_grad_NE = torch.zeros_like(hidden_NE, dtype=sums) if wanted[0] else None
        self.weight_grad_VE = torch.zeros_like(weight_VE, dtype=sums) if wanted[1] else None

    def at(self, rows: Rows) -> Tensor:
        hidden_RE = self.hidden_NE[rows]
        logits = hidden_RE.new_empty(len(hidden_RE), sum(len(part) for _, part in self.parts))
        for first, part in self.parts:
            torch.mm(hidden_RE, part.T, out=logits[:, first : first + len(part)])
        logits[:, self.vocab_size :] = -torch.inf
        return logits

    def of(self, block: Block) -> Tensor:
        return torch.bmm(self.hidden_NE[block.rows_GM], self._groups(self.weight_VE, block).mT)

    def add_at(self, rows: Rows, gradient_RV: Tensor, *, scale: float) -> None:
        for first, part in self.parts:
            gradient_RK = gradient_RV[:, first : first + len(part)]
            if self.hidden_grad_NE is not None:
                product_RE = gradient_RK @ part
                self.hidden_grad_NE[rows] += product_RE.to(self.hidden_grad_NE.dtype).mul_(scale)
            if self.weight_grad_VE is not None:
                sums_KE = self.weight_grad_VE[first : first + len(part)]
                self._add_products(sums_KE, gradient_RK, self._shrunk(self.hidden_NE[rows]), scale / self.shrink)

    @staticmethod
    def _add_products(sums_KE: Tensor, gradient_RK: Tensor, hidden_RE: Tensor, factor: float) -> None:
        """Add ``factor`` times gradientᵀ @ hidden, a block of ids at a time; extra columns are ignored."""
        ids = gradient_RK.shape[1]
        step = _aligned(-(-ids // max(1, -(-ids * hidden_RE.shape[1] // _PRODUCT))))
        for start in range(0, len(sums_KE), step):
            product_KE = gradient_RK[:, start : start + step].T @ hidden_RE
            sums = sums_KE[start : start + step]
            sums.add_(product_KE[: len(sums)], alpha=factor)

    def add_of(self, block: Block, gradient_GMK: Tensor, *, scale: float) -> None:
        size = None
        if self.shrink != 1.0:  # large codebook values must not overflow float16
            size = gradient_GMK.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
            gradient_GMK = gradient_GMK / size
        gradient_GMK = gradient_GMK.to(self.hidden_NE.dtype)
        if self.hidden_grad_NE is not None:
            product_SE = torch.bmm(gradient_GMK, self._groups(self.weight_VE, block)).flatten(0, 1)[block.filled]
            product_SE = product_SE.to(self.hidden_grad_NE.dtype).mul_(scale)
            if size is not None:
                product_SE *= size
            # Each position is in at most one slot, so nothing is added twice and the order does not matter.
            self.hidden_grad_NE[block.rows_GM.flatten()[block.filled]] += product_SE
        if self.weight_grad_VE is not None:
            hidden_GME = self._shrunk(self.hidden_NE[block.rows_GM])
            sum_GKE = self._groups(self.weight_grad_VE, block)
            step = max(1, _PRODUCT // sum_GKE[0].numel())
            for start in range(0, len(sum_GKE), step):
                groups = slice(start, start + step)
                product_GKE = torch.bmm(gradient_GMK[groups].mT, hidden_GME[groups])
                if size is None:
                    sum_GKE[groups].add_(product_GKE, alpha=scale / self.shrink)
                else:
                    sum_GKE[groups].addcmul_(product_GKE, size, value=scale / self.shrink)

    def _shrunk(self, states: Tensor) -> Tensor:
        return states if self.shrink == 1.0 else states * self.shrink

    @staticmethod
    def _groups(table_VE: Tensor, block: Block) -> Tensor:
        num_groups = len(block.rows_GM)
        ids = table_VE[block.first_id : block.first_id + num_groups * block.num_ids]
        return torch.unflatten(ids, 0, (num_groups, block.num_ids))


def _aligned(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED


def _aligned_parts(weight_VE: Tensor) -> list[tuple[int, Tensor]]:
    """Return (first id, rows) of parts with aligned lengths: nearly all rows unchanged, the rest zero-padded."""
    whole = len(weight_VE) - len(weight_VE) % _ALIGNED
    rest_KE = weight_VE[whole:]
    parts = [(0, weight_VE[:whole])] if whole else []
    if len(rest_KE):
        filled_KE = rest_KE.new_zeros(_ALIGNED, rest_KE.shape[1])
        filled_KE[: len(rest_KE)] = rest_KE
        parts.append((whole, filled_KE))
    return parts


class _LossOfHidden(torch.autograd.Function):
    """Loss whose gradients are computed in the forward pass, while each chunk of logits exists."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype, records: bool, *rest: Any
    ) -> tuple[Tensor, ...]:
        wanted = (records and hidden.requires_grad, records and weight.requires_grad)
        source = _HeadLogits(hidden, weight, dtype, wanted=wanted)
        positions, codebooks, scales = rest
        sums = sum_terms(source, positions, codebooks, scales, with_gradient=records)
        ctx.save_for_backward(hidden, weight)
        ctx.settings = dtype, wanted, rest
        ctx.sums = (source.hidden_grad_NE, source.weight_grad_VE) if records else None
        return weighted(source.hidden_NE, positions, sums, scales, ctx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Any, ...]:
        hidden, weight = ctx.saved_tensors
        sums, ctx.sums = ctx.sums, None
        if sums is None:  # a second backward pass: the first has already returned the sums
            dtype, wanted, rest = ctx.settings
            source = _HeadLogits(hidden, weight, dtype, wanted=wanted)
            sum_terms(source, *rest, with_gradient=True)
            sums = source.hidden_grad_NE, source.weight_grad_VE
        hidden_grad = _times(sums[0], upstream, like=hidden)
        weight_grad = _times(sums[1], upstream, like=weight)
        return hidden_grad, weight_grad, None, None, None, None, None


def _times(sums: Tensor | None, upstream: Tensor, *, like: Tensor) -> Tensor | None:
    """Return the sums times a scalar in the dtype and shape of ``like``, in place where possible."""
    if sums is None:
        return None
    result = sums if sums.dtype == like.dtype else torch.empty_like(sums, dtype=like.dtype)
    return torch.mul(sums, upstream, out=result).view(like.shape)
