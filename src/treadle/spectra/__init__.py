"""Masked autoencoding of 1-D spectra: SNV, ChemoMAE, its trainer, and cosine clustering of the latent.

SNV maps every spectrum to a sphere, so everything after it uses cosine geometry.
"""

from __future__ import annotations

from treadle.engine.best import EarlyStopping
from treadle.regression import KernelStack, mixing_shares
from treadle.spectra.agreement import LLAResult, LLAWindowResult, local_label_agreement
from treadle.spectra.augment import SpectraAugmenter
from treadle.spectra.chemomae.clusters import (
    find_elbow_curvature,
    plot_elbow_ckm,
    plot_elbow_vmf,
    silhouette_samples_cosine_gpu,
    silhouette_score_cosine_gpu,
)
from treadle.spectra.chemomae.helpers import EMACallback, sinusoidal_positional_encoding
from treadle.spectra.chemomae.rng import enable_deterministic, set_global_seed
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
from treadle.spectra.encoder import SpectrumDecoder as ChemoDecoderLP
from treadle.spectra.encoder import SpectrumEncoder as ChemoEncoder
from treadle.spectra.inference import Extractor, ExtractorConfig, Tester, TesterConfig
from treadle.spectra.losses import masked_mse, masked_sse
from treadle.spectra.masks import make_band_mask, make_block_mask, make_patch_mask
from treadle.spectra.mixing import MixedSpectra
from treadle.spectra.model import ChemoMAE
from treadle.spectra.optim import build_optimizer, build_scheduler, build_warmup_cosine
from treadle.spectra.patches import PatchMAE, PatchMAEConfig
from treadle.spectra.preprocessing import SNVScaler, cosine_fps_downsample, pretreatments, snv
from treadle.spectra.residual import LinearGaussian, ResidualMAE, Uncertainty
from treadle.spectra.task import SpectraTask
from treadle.spectra.trainer import SpectraTrainer

Trainer = SpectraTrainer

__all__ = [
    "ChemoDecoderLP",
    "ChemoEncoder",
    "ChemoMAE",
    "CosineKMeans",
    "EMACallback",
    "EarlyStopping",
    "Extractor",
    "ExtractorConfig",
    "KernelStack",
    "LLAResult",
    "LLAWindowResult",
    "LinearGaussian",
    "MixedSpectra",
    "PatchMAE",
    "PatchMAEConfig",
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
    "enable_deterministic",
    "find_elbow_curvature",
    "local_label_agreement",
    "make_band_mask",
    "make_block_mask",
    "make_patch_mask",
    "masked_mse",
    "masked_sse",
    "mixing_shares",
    "plot_elbow_ckm",
    "plot_elbow_vmf",
    "pretreatments",
    "set_global_seed",
    "silhouette_samples_cosine",
    "silhouette_samples_cosine_gpu",
    "silhouette_score_cosine",
    "silhouette_score_cosine_gpu",
    "sinusoidal_positional_encoding",
    "snv",
    "vmf_bessel_ratio",
    "vmf_log_normalizer",
]
