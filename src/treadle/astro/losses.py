"""Losses on token logits: cross-entropy, and squared error of the expected values behind the tokens.

With p the softmax over a modality's ids (a scalar: over the bins of its column) and C their codebook, a reconstruction
term is the mean over positions and dimensions of (p·C - C[target])²; the spectrum term is the mean of that over the
groups that occur. The cross-entropy is the mean over all non-padding targets.

All arithmetic is float32 regardless of autocast; float64 logits stay float64. Logits are read only at the chosen
positions and ids, and the only tensor allocated at their size is their gradient. Given ``positions``
(`choose_positions`) and prepared codebooks (`prepare_codebooks`), the losses never synchronise with the device.

Shapes: B = sequences, L = positions of each, N = B·L, V = vocabulary, G = groups of a block, M = slots of each,
K = ids of one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treadle.astro.loss_inputs import Codebooks, LossConfig, needed_codebooks
from treadle.astro.loss_terms import FLOAT_LOGITS, LossValues, Rows, require_codebooks, sum_terms, term_scales
from treadle.astro.sampling import Block, LossPositions, choose_positions, valid_positions
from treadle.astro.vocab import VocabSpec
from treadle.errors import ConfigError

Stats = dict[str, "Tensor | int"]


def combined_loss(
    logits: Tensor,
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
    """Return the cross-entropy plus the weighted reconstruction terms defined at the top of this module.

    Args:
        logits: (B, L, V) or (N, V), contiguous.
        targets: ids (B, L) or (N,); on an accelerator they are copied to the host unless ``positions`` are given.
        vocab: the vocabulary.
        image_codebook: this and the next two as `prepare_codebooks` accepts or returns them; None if the weight is 0.
        spectrum_codebook: one table per group.
        scalar_centers: one value per bin.
        config: mapping with ``enabled``, ``sample_k``, ``weight_image``, ``weight_scalar``, ``weight_spectrum``.
        use_ce: whether to include the cross-entropy.
        generator: CPU generator of the positions; None uses torch's global one.
        positions: positions already chosen from the same targets; None chooses them here.
        totals: positions of each term in the whole step, if this batch is one of several; None: this batch is the step.

    Returns:
        The loss, 0-d and attached, and ``stats``: the means ``loss_ce``, ``loss_img``, ``loss_sca``, ``loss_spec``
        of this batch, 0-d and detached, and their counts ``n_ce``, ``n_img``, ``n_sca``, ``n_spec``. A term without
        positions is 0 with count 0 and no gradient.

    Raises:
        ConfigError: shapes, targets, codebooks or settings do not match the vocabulary or each other.

    Example:
        >>> from treadle.astro.vocab import build_vocab_spec
        >>> vocab = build_vocab_spec(2, 4, 2, ["a"], scalar_bins=2)
        >>> logits, image, scalars = torch.zeros(1, 2, 13), [[0.0, 0.0], [2.0, 4.0]], [[1.0, 3.0], [10.0, 30.0]]
        >>> loss, stats = combined_loss(logits, torch.tensor([[5, 10]]), vocab, image, [[0.0], [4.0]], scalars)
        >>> stats["loss_img"], stats["loss_sca"], stats["n_spec"]
        (tensor(2.5000), tensor(100.), 0)
    """
    codebooks = image_codebook, spectrum_codebook, scalar_centers
    config = LossConfig.read(config)
    if positions is None:
        check_shapes("logits", logits, logits.shape[-1], targets, vocab)
        positions = choose_positions(targets, vocab, config, use_ce=use_ce, generator=generator)
    weights = config.term_weights(vocab)
    needed = needed_codebooks(vocab, codebooks, weights, logits.device, each_batch=True)
    values = loss_of_logits(logits, positions, needed, weights, totals=totals)
    return values.loss, values.stats()


def meaningful_loss(
    logits: Tensor,
    targets: Tensor,
    vocab: VocabSpec,
    image_codebook: Any,
    spectrum_codebook: Any,
    scalar_centers: Any,
    config: Any = None,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Stats]:
    """Return the weighted reconstruction terms without the cross-entropy; see `combined_loss`."""
    return combined_loss(
        logits, targets, vocab, image_codebook, spectrum_codebook, scalar_centers, config, False, generator=generator
    )


def image_reconstruction_loss(
    logits: Tensor,
    targets: Tensor,
    vocab: VocabSpec,
    codebook: Any,
    sample_k: int,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, int]:
    """Return the unweighted image term and the number of positions it averages over; see `combined_loss`.

    Args:
        logits: (B, L, V) or (N, V).
        targets: ids (B, L) or (N,).
        vocab: the vocabulary.
        codebook: (v_image, D).
        sample_k: maximum number of positions.
        generator: CPU generator of the positions.
    """
    config = LossConfig(sample_k=sample_k, weight_image=1.0, weight_scalar=0.0, weight_spectrum=0.0)
    loss, stats = meaningful_loss(logits, targets, vocab, codebook, None, None, config, generator=generator)
    return loss, int(stats["n_img"])


def scalar_reconstruction_loss(
    logits: Tensor,
    targets: Tensor,
    vocab: VocabSpec,
    bin_centers: Any,
    sample_k: int,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, int]:
    """Return the unweighted scalar term and the number of positions it averages over; see `combined_loss`.

    Args:
        logits: (B, L, V) or (N, V).
        targets: ids (B, L) or (N,).
        vocab: the vocabulary.
        bin_centers: (v_scalar,) or (n_columns, n_bins).
        sample_k: maximum number of positions.
        generator: CPU generator of the positions.
    """
    config = LossConfig(sample_k=sample_k, weight_image=0.0, weight_scalar=1.0, weight_spectrum=0.0)
    loss, stats = meaningful_loss(logits, targets, vocab, None, None, bin_centers, config, generator=generator)
    return loss, int(stats["n_sca"])


def spectrum_reconstruction_loss(
    logits: Tensor,
    targets: Tensor,
    vocab: VocabSpec,
    codebook: Any,
    sample_k: int,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, int]:
    """Return the unweighted spectrum term and the number of positions of all its groups; see `combined_loss`.

    Args:
        logits: (B, L, V) or (N, V).
        targets: ids (B, L) or (N,).
        vocab: the vocabulary.
        codebook: one table per group, as `prepare_codebooks` accepts it.
        sample_k: maximum number of positions over all groups; each gets an equal share, at least one.
        generator: CPU generator of the positions.
    """
    config = LossConfig(sample_k=sample_k, weight_image=0.0, weight_scalar=0.0, weight_spectrum=1.0)
    loss, stats = meaningful_loss(logits, targets, vocab, None, codebook, None, config, generator=generator)
    return loss, int(stats["n_spec"])


def cross_entropy_loss(logits: Tensor, targets: Tensor, pad_id: int) -> Tensor:
    """Return the mean cross-entropy over targets other than ``pad_id``; 0, attached to the graph, if there are none.

    Args:
        logits: (B, L, V) or (N, V).
        targets: ids (B, L) or (N,); on an accelerator they are copied to the host.
        pad_id: the id to ignore.

    Example:
        >>> cross_entropy_loss(torch.zeros(1, 2, 4), torch.tensor([[1, 0]]), 0)
        tensor(1.3863)
    """
    check_shapes("logits", logits, logits.shape[-1], targets, None)
    rows, kept = valid_positions(targets.detach().cpu().reshape(-1).long(), pad_id)
    if len(kept) and not 0 <= int(kept.min()) <= int(kept.max()) < logits.shape[-1]:
        raise ConfigError(
            f"targets from {int(kept.min())} to {int(kept.max())}: the logits are of ids in [0, {logits.shape[-1]})"
        )
    positions = LossPositions({"ce": len(kept)}, targets.numel(), rows, kept, ())
    return loss_of_logits(logits, positions, Codebooks(), {}).loss


def loss_of_logits(
    logits: Tensor,
    positions: LossPositions,
    codebooks: Codebooks,
    weights: Mapping[str, float],
    *,
    totals: Mapping[str, float] | None = None,
) -> LossValues:
    """Return the loss at the chosen positions with its terms and counts; called by the training step.

    Args:
        logits: (B, L, V) or (N, V), contiguous.
        positions: chosen from the targets of these logits.
        codebooks: prepared for the vocabulary.
        weights: weights of ``img``, ``sca`` and ``spec``.
        totals: positions of each term in the whole step; None: this batch is the step.

    Raises:
        ConfigError: the positions are from another batch, a codebook is missing, or a total is too small.
    """
    require_codebooks(positions, codebooks)
    check_rows("logits", logits, positions)
    scales = term_scales(positions.counts, weights, totals)
    moved = Codebooks(*(book and book.to(logits.device) for book in codebooks))
    loss, *sums = _LossOfLogits.apply(logits, positions.to(logits.device), moved, scales)  # type: ignore[no-untyped-call]
    means = {term: total / positions.counts[term] for term, total in zip(positions.terms, sums, strict=True)}
    return LossValues(loss, means, positions.counts)


def check_rows(name: str, given: Tensor, positions: LossPositions) -> None:
    """Raise ConfigError if the positions were chosen for a different number of rows."""
    rows = given.numel() // given.shape[-1]
    if rows != positions.num_rows:
        raise ConfigError(
            f"{name} of shape {tuple(given.shape)} have {rows} positions, but positions were chosen from "
            f"{positions.num_rows} targets; choose them from the targets of these {name}"
        )


def check_shapes(name: str, given: Tensor, width: int, targets: Tensor, vocab: VocabSpec | None) -> None:
    """Raise ConfigError if the targets or the vocabulary do not match the logits or hidden states."""
    if targets.shape != given.shape[:-1]:
        raise ConfigError(
            f"targets of shape {tuple(targets.shape)} do not fit {name} of shape {tuple(given.shape)}; "
            "give one id for each position"
        )
    if vocab is not None and width != vocab.vocab_size:
        raise ConfigError(
            f"logits of {width} ids for a vocabulary of {vocab.vocab_size}; build both for the same vocabulary"
        )


class _GivenLogits:
    """Logits in memory, read-only."""

    def __init__(self, logits: Tensor) -> None:
        self.logits_NV = logits.reshape(-1, logits.shape[-1])
        self.vocab_size = logits.shape[-1]
        self.device = logits.device
        self.piece_logits = FLOAT_LOGITS

    def at(self, rows: Rows) -> Tensor:
        return self.logits_NV[rows]

    def of(self, block: Block) -> Tensor:
        return _groups_of(self.logits_NV, block)[block.rows_GM, _group_numbers(block)]

    def add_at(self, rows: Rows, gradient_RV: Tensor, *, scale: float) -> None:
        raise NotImplementedError

    def add_of(self, block: Block, gradient_GMK: Tensor, *, scale: float) -> None:
        raise NotImplementedError


class _LogitsWithGradient(_GivenLogits):
    """Logits in memory, with their gradient scaled by the upstream gradient."""

    def __init__(self, logits: Tensor, upstream: Tensor) -> None:
        super().__init__(logits)
        self.upstream = upstream
        self.gradient_NV = torch.zeros_like(self.logits_NV)

    def at(self, rows: Rows) -> Tensor:
        logits_RV = super().at(rows)
        return logits_RV.clone() if isinstance(rows, slice) else logits_RV

    def add_at(self, rows: Rows, gradient_RV: Tensor, *, scale: float) -> None:
        self.gradient_NV[rows] += gradient_RV.mul_(self.upstream * scale)

    def add_of(self, block: Block, gradient_GMK: Tensor, *, scale: float) -> None:
        rows = block.rows_GM.flatten()[block.filled]
        groups = _group_numbers(block).expand_as(block.rows_GM).flatten()[block.filled]
        scaled = gradient_GMK.flatten(0, 1)[block.filled] * (self.upstream * scale)
        # Each position is in at most one slot, so nothing is added twice and the order does not matter.
        _groups_of(self.gradient_NV, block)[rows, groups] += scaled.to(self.gradient_NV.dtype)


def _groups_of(table_NV: Tensor, block: Block) -> Tensor:
    """Return the columns of the block's groups (N, G, K) as a view."""
    num_groups = len(block.rows_GM)
    ids = table_NV[:, block.first_id : block.first_id + num_groups * block.num_ids]
    return torch.unflatten(ids, 1, (num_groups, block.num_ids))


def _group_numbers(block: Block) -> Tensor:
    return torch.arange(len(block.rows_GM), device=block.rows_GM.device)[:, None]


class _LossOfLogits(torch.autograd.Function):
    """Loss that reads the logits in forward and again in backward, and saves nothing else."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, positions: LossPositions, codebooks: Codebooks, scales: Mapping[str, float]
    ) -> tuple[Tensor, ...]:
        sums = sum_terms(_GivenLogits(logits), positions, codebooks, scales, with_gradient=False)
        ctx.save_for_backward(logits)
        ctx.rest = positions, codebooks, scales
        return weighted(logits, positions, sums, scales, ctx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        source = _LogitsWithGradient(logits, upstream)
        sum_terms(source, *ctx.rest, with_gradient=True)
        return source.gradient_NV.view(logits.shape), None, None, None


def weighted(
    like: Tensor, positions: LossPositions, sums: Mapping[str, Tensor], scales: Mapping[str, float], ctx: Any
) -> tuple[Tensor, ...]:
    """Return the loss of an autograd function and the non-differentiable sums of the terms, in order."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    loss = torch.zeros((), dtype=dtype, device=like.device)
    for term in positions.terms:
        loss = loss.add(sums[term], alpha=scales[term])
    ordered = [sums[term] for term in positions.terms]
    ctx.mark_non_differentiable(*ordered)
    return (loss, *ordered)
