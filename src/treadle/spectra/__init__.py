"""Masked autoencoding of 1-D spectra: SNV, ChemoMAE, its trainer, and cosine clustering of the latent.

SNV puts every spectrum on a sphere, so all that follows is cosine geometry.
"""

from __future__ import annotations

from treadle.engine.best import EarlyStopping
from treadle.spectra.augment import SpectraAugmenter
from treadle.spectra.clustering import (
    CosineKMeans,
    VMFMixture,
    elbow_ckmeans,
    elbow_vmf,
    silhouette_samples_cosine,
    silhouette_score_cosine,
    vmf_bessel_ratio,
    vmf_log_normalizer,
)
from treadle.spectra.config import TrainerConfig
from treadle.spectra.inference import Extractor, ExtractorConfig, Tester, TesterConfig
from treadle.spectra.losses import masked_mse, masked_sse
from treadle.spectra.masks import make_band_mask, make_block_mask
from treadle.spectra.mixing import MixedSpectra
from treadle.spectra.model import ChemoMAE
from treadle.spectra.optim import build_optimizer, build_scheduler, build_warmup_cosine
from treadle.spectra.preprocessing import SNVScaler, cosine_fps_downsample
from treadle.spectra.residual import LinearGaussian, ResidualMAE, Uncertainty
from treadle.spectra.task import SpectraTask
from treadle.spectra.trainer import SpectraTrainer

Trainer = SpectraTrainer

__all__ = [
    "ChemoMAE",
    "CosineKMeans",
    "EarlyStopping",
    "Extractor",
    "ExtractorConfig",
    "LinearGaussian",
    "MixedSpectra",
    "ResidualMAE",
    "SNVScaler",
    "SpectraAugmenter",
    "SpectraTask",
    "SpectraTrainer",
    "Tester",
    "TesterConfig",
    "Trainer",
    "TrainerConfig",
    "Uncertainty",
    "VMFMixture",
    "build_optimizer",
    "build_scheduler",
    "build_warmup_cosine",
    "cosine_fps_downsample",
    "elbow_ckmeans",
    "elbow_vmf",
    "make_band_mask",
    "make_block_mask",
    "masked_mse",
    "masked_sse",
    "silhouette_samples_cosine",
    "silhouette_score_cosine",
    "vmf_bessel_ratio",
    "vmf_log_normalizer",
]
