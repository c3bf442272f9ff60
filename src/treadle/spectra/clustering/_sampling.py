"""Sampling from von Mises-Fisher distributions (Wood 1994), in float64 on the CPU.

Shape suffixes: n draws, D columns, M draws still to be accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._rows import normalised


def sample_directions(mus_nD: Tensor, kappas_n: Tensor, *, generator: torch.Generator) -> Tensor:
    """Draw one sample (n, D) per mean direction and concentration; kappa = 0 gives uniform directions."""
    cosine_n1 = _sample_cosines(kappas_n, mus_nD.shape[1], generator=generator)[:, None]
    tangent_nD = torch.randn(mus_nD.shape, generator=generator, dtype=torch.float64, device="cpu")
    tangent_nD = tangent_nD - (tangent_nD * mus_nD).sum(dim=1, keepdim=True) * mus_nD
    sine_n1 = (1 - cosine_n1**2).clamp(min=0.0).sqrt()
    return normalised(cosine_n1 * mus_nD + sine_n1 * normalised(tangent_nD))


def _sample_cosines(kappas_n: Tensor, d: int, *, generator: torch.Generator) -> Tensor:
    """Draw the cosine of each sample to its mean direction, by rejection from Wood's envelope."""
    b_n = (d - 1) / (2 * kappas_n + torch.sqrt(4 * kappas_n**2 + (d - 1) ** 2))
    centre_n = (1 - b_n) / (1 + b_n)
    limit_n = kappas_n * centre_n + (d - 1) * torch.log(4 * b_n / (1 + b_n) ** 2)  # 1 - centre^2
    cosine_n = torch.empty_like(kappas_n)
    waiting_M = torch.arange(len(kappas_n), device="cpu")
    while len(waiting_M) > 0:
        b_M, centre_M, kappa_M = b_n[waiting_M], centre_n[waiting_M], kappas_n[waiting_M]
        # (1 + first coordinate of a uniform direction in R^d) / 2 follows Beta((d-1)/2, (d-1)/2).
        normal_MD = torch.randn(len(waiting_M), d, generator=generator, dtype=torch.float64, device="cpu")
        beta_M = (1 + normal_MD[:, 0] / torch.linalg.vector_norm(normal_MD, dim=1)) / 2
        value_M = (1 - (1 + b_M) * beta_M) / (1 - (1 - b_M) * beta_M)
        uniform_M = torch.rand(len(waiting_M), generator=generator, dtype=torch.float64, device="cpu")
        log_density_M = kappa_M * value_M + (d - 1) * torch.log1p(-centre_M * value_M)
        accepted_M = log_density_M - limit_n[waiting_M] >= torch.log(uniform_M)
        cosine_n[waiting_M[accepted_M]] = value_M[accepted_M]
        waiting_M = waiting_M[~accepted_M]
    return cosine_n
