"""API of chemomae 0.2, with its names, arguments, defaults and numerical results.

``from chemomae.models import ChemoMAE`` becomes ``from treadle.spectra.chemomae import ChemoMAE``. The names of
chemomae 0.1, including a different :class:`treadle.spectra.ChemoMAE`, are in ``treadle.spectra``.
"""

from __future__ import annotations

from collections.abc import Sequence

from treadle.errors.arguments import checked
from treadle.spectra.agreement import LLAResult, LLAWindowResult, local_label_agreement
from treadle.spectra.chemomae.augmenter import SpectraAugmenter, SpectraAugmenterConfig
from treadle.spectra.chemomae.clusters import (
    cosine_dissimilarity,
    cosine_fps_downsample,
    cosine_similarity,
    l2_normalize_rows,
    plot_elbow_ckm,
    plot_elbow_vmf,
    silhouette_samples_cosine_gpu,
    silhouette_score_cosine_gpu,
    vmf_logC,
)
from treadle.spectra.chemomae.clusters import find_elbow_curvature as _find_elbow_curvature
from treadle.spectra.chemomae.config import PreparedBatch, TrainerConfig
from treadle.spectra.chemomae.helpers import EarlyStopping, EMACallback, build_optimizer
from treadle.spectra.chemomae.inference import Extractor, ExtractorConfig, Tester, TesterConfig
from treadle.spectra.chemomae.rng import (
    RNGState,
    capture_rng_state,
    enable_deterministic,
    restore_rng_state,
    set_global_seed,
)
from treadle.spectra.chemomae.trainer import Trainer
from treadle.spectra.clustering import CosineKMeans, VMFMixture, elbow_ckmeans, elbow_vmf
from treadle.spectra.losses import masked_mse, masked_sse
from treadle.spectra.masks import make_patch_mask
from treadle.spectra.optim import build_scheduler, build_warmup_cosine
from treadle.spectra.patch_encoder import PatchDecoder as ChemoDecoder
from treadle.spectra.patch_encoder import PatchEncoder as ChemoEncoder
from treadle.spectra.patches import PatchMAE as ChemoMAE
from treadle.spectra.patches import PatchMAEConfig as ChemoMAEConfig
from treadle.spectra.preprocessing import SNVScaler, snv


@checked
def find_elbow_curvature(
    k_list: Sequence[int],
    inertia_list: Sequence[float],
    smooth: bool = True,
    window_length: int = 5,
    polyorder: int = 2,
) -> tuple[int, int, float]:
    """Find the elbow of a curve by its curvature.

    Returns:
        (K, index, curvature at that index).

    Raises:
        ConfigError: there are fewer than three points, or an argument is out of range.
        ImportError: SciPy is not installed.

    Example:
        >>> find_elbow_curvature([1, 2, 3, 4, 5, 6, 7], [9.0, 5.0, 2.0, 1.5, 1.3, 1.2, 1.15])[:2]
        (4, 3)
    """
    best, index, curvature = _find_elbow_curvature(k_list, inertia_list, smooth, window_length, polyorder)
    return best, index, float(curvature[index])


__all__ = [
    "ChemoDecoder",
    "ChemoEncoder",
    "ChemoMAE",
    "ChemoMAEConfig",
    "CosineKMeans",
    "EMACallback",
    "EarlyStopping",
    "Extractor",
    "ExtractorConfig",
    "LLAResult",
    "LLAWindowResult",
    "PreparedBatch",
    "RNGState",
    "SNVScaler",
    "SpectraAugmenter",
    "SpectraAugmenterConfig",
    "Tester",
    "TesterConfig",
    "Trainer",
    "TrainerConfig",
    "VMFMixture",
    "build_optimizer",
    "build_scheduler",
    "build_warmup_cosine",
    "capture_rng_state",
    "cosine_dissimilarity",
    "cosine_fps_downsample",
    "cosine_similarity",
    "elbow_ckmeans",
    "elbow_vmf",
    "enable_deterministic",
    "find_elbow_curvature",
    "l2_normalize_rows",
    "local_label_agreement",
    "make_patch_mask",
    "masked_mse",
    "masked_sse",
    "plot_elbow_ckm",
    "plot_elbow_vmf",
    "restore_rng_state",
    "set_global_seed",
    "silhouette_samples_cosine_gpu",
    "silhouette_score_cosine_gpu",
    "snv",
    "vmf_logC",
]
