"""Clustering on the unit sphere: cosine k-means, von Mises-Fisher mixtures, elbows and silhouettes.

Usable without a trainer: every function takes an (N, D) tensor, scales its rows to unit length, and draws from its own
generator. `chunk` limits how many rows are on the device at once; it does not affect the result.
"""

from __future__ import annotations

from .elbow import elbow_ckmeans, elbow_vmf
from .kmeans import CosineKMeans
from .silhouette import silhouette_samples_cosine, silhouette_score_cosine
from .vmf import VMFMixture, vmf_bessel_ratio, vmf_log_normalizer

__all__ = [
    "CosineKMeans",
    "VMFMixture",
    "elbow_ckmeans",
    "elbow_vmf",
    "silhouette_samples_cosine",
    "silhouette_score_cosine",
    "vmf_bessel_ratio",
    "vmf_log_normalizer",
]
