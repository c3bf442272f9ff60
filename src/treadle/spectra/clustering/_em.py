"""Expectation-maximisation steps and initialisation for von Mises-Fisher mixtures.

Parameters stay in float64 on the CPU (K is small, and MPS has no float64); only rows are on the device.
Shape suffixes: N rows, D columns, K components, B rows of one block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._rows import UnitRows, assign_and_sum, compute_dtype
from ._seeding import kmeans_plus_plus, random_rows
from .bessel import kappa_from_mean_length, log_normalizer

_LEAST_WEIGHT = 1e-300  # keeps the log weight of an empty component finite


class Parameters(NamedTuple):
    """Mean directions (K, D), concentrations (K,) and log weights (K,)."""

    mus_KD: Tensor
    kappas_K: Tensor
    logpi_K: Tensor


class Scorer:
    """Joint log densities log(pi_k C_k exp(kappa_k mu_k . x)) for blocks of rows, with precomputed constants."""

    def __init__(self, parameters: Parameters, device: torch.device) -> None:
        mus_KD, kappas_K, logpi_K = parameters
        dtype = compute_dtype(device)
        self._scaled_DK = (kappas_K[:, None] * mus_KD).to(dtype).to(device).T
        self._offset_K = (logpi_K + log_normalizer(mus_KD.shape[1], kappas_K)).to(dtype).to(device)

    def __call__(self, block_BD: Tensor) -> Tensor:
        """Return the joint log densities, (B, K)."""
        return block_BD @ self._scaled_DK + self._offset_K


def start(rows: UnitRows, n_components: int, *, init: str, generator: torch.Generator) -> Parameters:
    """Choose seeds, assign each row to its nearest seed, and estimate the parameters from these groups."""
    seeding = kmeans_plus_plus if init == "kmeans++" else random_rows
    seeds_KD = seeding(rows, n_components, generator=generator)
    _, sums_KD, counts_K = assign_and_sum(rows, seeds_KD)
    sums_KD, counts_K = sums_KD.cpu().double(), counts_K.cpu().double()
    # Groups of one row have no spread and use the pooled length.
    pooled = torch.linalg.vector_norm(sums_KD, dim=1).sum() / rows.n
    kappas_K = kappa_from_mean_length(rows.d, pooled.expand(n_components))
    equal_K = torch.full_like(counts_K, -math.log(n_components))
    return maximise(Parameters(seeds_KD.cpu().double(), kappas_K, equal_K), counts_K, sums_KD, rows.n)


def expect(rows: UnitRows, parameters: Parameters) -> tuple[float, Tensor, Tensor]:
    """Return the log-likelihood, and per component the weight (K,) and weighted sum (K, D) of the rows."""
    scorer = Scorer(parameters, rows.device)
    loglik = 0.0
    counts_K = torch.zeros(len(parameters.kappas_K), dtype=rows.dtype, device=rows.device)
    sums_KD = torch.zeros(len(counts_K), rows.d, dtype=rows.dtype, device=rows.device)
    for _, block_BD in rows.blocks():
        joint_BK = scorer(block_BD)
        evidence_B = torch.logsumexp(joint_BK, dim=1)
        share_BK = torch.exp(joint_BK - evidence_B[:, None])
        loglik += float(evidence_B.sum())
        counts_K += share_BK.sum(dim=0)
        sums_KD += share_BK.T @ block_BD
    return loglik, counts_K.cpu().double(), sums_KD.cpu().double()


def maximise(before: Parameters, counts_K: Tensor, sums_KD: Tensor, n_rows: int) -> Parameters:
    """Return the parameters that maximise the expected log-likelihood; values kept from before cannot lower it."""
    length_K = torch.linalg.vector_norm(sums_KD, dim=1)
    has_direction_K = length_K > 1e-12 * counts_K.clamp(min=1e-12)
    unit_KD = sums_KD / length_K.clamp(min=_LEAST_WEIGHT)[:, None]
    mus_KD = torch.where(has_direction_K[:, None], unit_KD, before.mus_KD)
    solved_K = kappa_from_mean_length(sums_KD.shape[1], length_K / counts_K.clamp(min=_LEAST_WEIGHT))
    # Fewer than two rows: R is (nearly) 1 regardless of the spread, and kappa would run to its bound.
    kappas_K = torch.where(counts_K >= 2.0, solved_K, before.kappas_K)
    logpi_K = torch.log((counts_K / n_rows).clamp(min=_LEAST_WEIGHT))
    return Parameters(mus_KD, kappas_K, logpi_K)
