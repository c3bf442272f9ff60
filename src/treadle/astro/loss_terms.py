"""Loss terms as sums over positions, with hand-written gradients.

The same code serves logits in memory and logits computed in chunks from hidden states: a `LogitSource` provides the
chunks and accumulates their gradients. Autograd records nothing here.

Shapes: R = rows of one chunk, V = vocabulary, G = groups of a block, M = slots of each, K = ids of one group, D =
dimensions of a codebook's values.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treadle.astro.loss_inputs import Codebook, Codebooks
from treadle.astro.sampling import Block, LossPositions
from treadle.errors import ConfigError

# Logits converted to float32 at one time: 16 MiB per copy, so that they stay in the cache of a large GPU.
FLOAT_LOGITS = 1 << 22

_HALF = (torch.float16, torch.bfloat16)

Rows = Tensor | slice


@dataclass(frozen=True)
class LossValues:
    """Loss of one batch and its terms.

    Attributes:
        loss: 0-d, attached to the graph: the weighted sum of the terms, each divided by its own total.
        means: mean of each term that has positions, 0-d and detached.
        counts: number of positions of every term; 0 if it is disabled.
    """

    loss: Tensor
    means: Mapping[str, Tensor]
    counts: Mapping[str, int]

    def stats(self) -> dict[str, Tensor | int]:
        """Return ``loss_ce``, ``loss_img``, ``loss_sca``, ``loss_spec`` and ``n_ce``, …; spectrum groups are combined.

        The value of a term without positions is 0.
        """
        zero = self.loss.detach().new_zeros(())
        groups = [mean for term, mean in self.means.items() if term.startswith("spec/")]
        stats: dict[str, Tensor | int] = {f"loss_{term}": self.means.get(term, zero) for term in ("ce", "img", "sca")}
        stats["loss_spec"] = torch.stack(groups).mean() if groups else zero
        stats |= {f"n_{term}": self.counts.get(term, 0) for term in ("ce", "img", "sca")}
        stats["n_spec"] = sum(count for term, count in self.counts.items() if term.startswith("spec/"))
        return stats


def term_scales(
    counts: Mapping[str, int], weights: Mapping[str, float], totals: Mapping[str, float] | None
) -> dict[str, float]:
    """Return the factor of each term's sum in the loss: its weight divided by its total.

    The spectrum term is the mean over the groups that occur, each a mean over its own positions.

    Args:
        counts: number of positions of each term in this batch.
        weights: weights of ``img``, ``sca`` and ``spec``.
        totals: positions of each term in the whole step, over micro-batches and ranks; None: this batch is the step.

    Raises:
        ConfigError: a total is missing or smaller than the count of this batch alone.

    Example:
        >>> term_scales({"ce": 2, "spec/a": 1, "spec/b": 1}, {"spec": 0.5}, {"ce": 4, "spec/a": 1, "spec/b": 5})
        {'ce': 0.25, 'spec/a': 0.25, 'spec/b': 0.05}
    """
    if totals is None:
        totals = counts
    for term, count in counts.items():
        if not totals.get(term, 0.0) >= count:
            raise ConfigError(
                f"totals[{term!r}]={totals.get(term)}: this batch alone has {count} positions; give the sum of the "
                "counts of all micro-batches and ranks of the step"
            )
    occurring = sum(total > 0 for term, total in totals.items() if term.startswith("spec/"))
    scales = {}
    for term, count in counts.items():
        if count:
            weight = 1.0 if term == "ce" else weights[term.split("/")[0]]
            scales[term] = weight / totals[term] / (occurring if term.startswith("spec/") else 1)
    return scales


def require_codebooks(positions: LossPositions, codebooks: Codebooks) -> None:
    """Raise ConfigError if positions were chosen for a modality without a codebook."""
    arguments = {"img": "image_codebook", "sca": "scalar_centers", "spec": "spectrum_codebook"}
    given = {"img": codebooks.image, "sca": codebooks.scalar, "spec": codebooks.spectrum}
    for term in positions.terms:
        modality = term.split("/")[0]
        if modality != "ce" and given[modality] is None:
            raise ConfigError(
                "=None but its term has a weight; give the codebook or set the weight to 0",
                argument=arguments[modality],
            )


class LogitSource(Protocol):
    """Provider of logits and accumulator of their gradients.

    Attributes:
        vocab_size: V.
        device: device of the logits.
        piece_logits: number of logits to request from `at` at a time.
    """

    vocab_size: int
    device: torch.device
    piece_logits: int

    def at(self, rows: Rows) -> Tensor:
        """Return the logits (R, V) of rows, possibly wider with -inf beyond V; the caller may overwrite them."""
        ...

    def of(self, block: Block) -> Tensor:
        """Return the logits (G, M, K) of a block."""
        ...

    def add_at(self, rows: Rows, gradient_RV: Tensor, *, scale: float) -> None:
        """Accumulate ``scale`` times a gradient with respect to the result of `at`."""
        ...

    def add_of(self, block: Block, gradient_GMK: Tensor, *, scale: float) -> None:
        """Accumulate ``scale`` times a gradient with respect to the result of `of`; it is 0 in empty slots."""
        ...


@torch.no_grad()
def sum_terms(
    source: LogitSource,
    positions: LossPositions,
    codebooks: Codebooks,
    scales: Mapping[str, float],
    *,
    with_gradient: bool,
) -> dict[str, Tensor]:
    """Sum each term over its positions, and add the gradient of Σ scale·sum to the source.

    Args:
        source: the logits.
        positions: on the device of the source.
        codebooks: on the device of the source.
        scales: factor of each term's sum in the loss, for terms that have positions.
        with_gradient: whether to accumulate gradients in the source.

    Returns:
        0-d float32 (float64 for float64 logits) sums of the terms that have positions: negative log likelihoods for
        ``ce``, squared errors averaged over the dimensions for the others.
    """
    with torch.autocast(source.device.type, enabled=False):
        sums: dict[str, Tensor] = {}
        if positions.counts["ce"]:
            sums["ce"] = _cross_entropy(source, positions, scales["ce"], with_gradient)
        books = {"img": codebooks.image, "sca": codebooks.scalar, "spec": codebooks.spectrum}
        for block in positions.blocks:
            book = books[block.terms[0].split("/")[0]]
            assert book is not None
            errors = _squared_errors(source, block, book, scales, with_gradient)
            for term, error in zip(block.terms, errors, strict=True):
                sums[term] = sums[term] + error if term in sums else error
    return sums


def _cross_entropy(source: LogitSource, positions: LossPositions, scale: float, with_gradient: bool) -> Tensor:
    count = positions.counts["ce"]
    step = _even(source.piece_logits // source.vocab_size)
    sums = []
    for start in range(0, count, step):
        piece = slice(start, min(start + step, count))
        rows = piece if positions.ce_rows is None else positions.ce_rows[piece]
        logits_RV = source.at(rows)
        sums += _negative_log_likelihoods(logits_RV, positions.ce_targets[piece], with_gradient)
        if with_gradient:
            source.add_at(rows, logits_RV, scale=scale)
        del logits_RV  # so that the next chunk can reuse its memory
    return torch.stack(sums).sum()


def _negative_log_likelihoods(logits_RV: Tensor, targets_R: Tensor, with_gradient: bool) -> list[Tensor]:
    """Return sums over parts of the rows; overwrite the logits with their gradient, softmax - 1[target]."""
    if logits_RV.is_cuda and logits_RV.dtype in _HALF and _has_triton():
        from treadle.astro.nll_kernel import negative_log_likelihoods

        return [negative_log_likelihoods(logits_RV, targets_R, with_gradient=with_gradient).sum()]
    sums = []
    step = max(1, FLOAT_LOGITS // logits_RV.shape[1])
    for part_RV, part_R in zip(torch.split(logits_RV, step), torch.split(targets_R, step), strict=True):
        log_p_RV = torch.log_softmax(_full(part_RV), dim=-1)
        chosen_R1 = log_p_RV.gather(1, part_R[:, None])
        sums.append(-chosen_R1.sum())
        if with_gradient:
            torch.exp(log_p_RV, out=part_RV)
            part_RV.scatter_(1, part_R[:, None], chosen_R1.expm1().to(part_RV.dtype))
    return sums


def _squared_errors(
    source: LogitSource, block: Block, book: Codebook, scales: Mapping[str, float], with_gradient: bool
) -> list[Tensor]:
    """Return the sums of squared errors of a block by term, each averaged over its dimensions."""
    groups = slice(block.first_group, block.first_group + len(block.rows_GM))
    num_dims = book.num_dims[groups]
    terms = block.terms * len(num_dims) if len(block.terms) == 1 else block.terms
    # The gradient is computed relative to the largest scale, which keeps it in the range of half precision.
    largest = max(scales.get(term, 0.0) for term in terms) or 1.0
    ratios = [scales.get(term, 0.0) / largest for term in terms]
    factors = [2 * ratio / dims for ratio, dims in zip(ratios, num_dims, strict=True)]
    errors_G, gradient_GMK = _expected_value_errors(
        _full(source.of(block)), book.values_GKD[groups], block, factors, with_gradient
    )
    if gradient_GMK is not None:
        source.add_of(block, gradient_GMK, scale=largest)
    if len(block.terms) == 1 and len(set(num_dims)) == 1:
        return [errors_G.sum() / num_dims[0]]
    return [error / dims for error, dims in zip(errors_G, num_dims, strict=True)]


def _expected_value_errors(
    logits_GMK: Tensor, values_GKD: Tensor, block: Block, factors: list[float], with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return Σ (p·C - C[code])² by group, and the gradient of Σ factor/2 of it with respect to the logits.

    With p the softmax, e = p·C and E = factor·(e - C[code]): d/dz_k = p_k (C_k - e)·E.
    """
    values_GKD = values_GKD.to(logits_GMK.dtype)
    empty_GM1 = (block.codes_GM < 0)[:, :, None] if len(block.filled) < block.codes_GM.numel() else None
    if empty_GM1 is not None:  # logits of another group, possibly all -inf
        logits_GMK = logits_GMK.masked_fill_(empty_GM1, 0.0)
    p_GMK = torch.softmax(logits_GMK, dim=-1)
    del logits_GMK
    expected_GMD = torch.bmm(p_GMK, values_GKD)
    index = block.codes_GM.clamp(min=0)[:, :, None].expand(-1, -1, values_GKD.shape[2])
    error_GMD = expected_GMD - values_GKD.gather(1, index)
    if empty_GM1 is not None:
        error_GMD.masked_fill_(empty_GM1, 0.0)
    errors_G = error_GMD.square().sum(dim=(1, 2))
    if not with_gradient:
        return errors_G, None
    for error_MD, factor in zip(error_GMD, factors, strict=True):
        error_MD.mul_(factor)
    offset_GM1 = -(error_GMD * expected_GMD).sum(dim=2, keepdim=True)
    return errors_G, torch.baddbmm(offset_GM1, error_GMD, values_GKD.mT).mul_(p_GMK)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _full(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _even(rows: int) -> int:
    """Round down to whole tiles of a matrix product if there is at least one."""
    return rows - rows % 128 if rows > 128 else max(1, rows)
