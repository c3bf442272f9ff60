"""Multimodal transformers for astronomy: image, scalar and spectrum tokens, with losses on the values behind them.

Importing this needs torch and numpy only.
"""

from __future__ import annotations

from treadle.astro.autoencoder import AutoEncoder, BaseTokenizer, CutoutTokenizer, Decoder, Encoder, ResBlock
from treadle.astro.codebook_files import load_codebook, load_npz_key, load_scalar_centers, save_codebook
from treadle.astro.codebooks import kmeans_codebook, quantile_bins
from treadle.astro.conditionals import column_probabilities, expected_vectors, hide_columns
from treadle.astro.config import (
    AstroConfig,
    AstromodalConfig,
    DataConfig,
    ImageTokenizerConfig,
    MeaningfulLossConfig,
    ModelConfig,
    PathsConfig,
    ScalarTokenizerConfig,
    SequencesConfig,
    SpectrumTokenizerConfig,
    TokenizersConfig,
    TrainingConfig,
    VocabConfig,
    from_dict,
    load_config,
    save_config,
    to_dict,
)
from treadle.astro.cross_modal import (
    CrossPrediction,
    CrossResult,
    class_scores,
    cross_predict,
    ridge_prediction,
    token_values,
    tree_predictions,
)
from treadle.astro.cutouts import SplusDataset
from treadle.astro.drawing import draw_spectra
from treadle.astro.fields import (
    discover_fields_from_datacubes,
    discover_fields_from_template,
    norm_gaia_id,
    norm_splus_id,
)
from treadle.astro.hidden_losses import combined_loss_from_hidden
from treadle.astro.initialisation import initialise_from_codebooks
from treadle.astro.joint import Answer, JointRegressor, Mixture, joint_loss
from treadle.astro.loader import build_loader
from treadle.astro.loss_inputs import Codebook, Codebooks, LossConfig, prepare_codebooks
from treadle.astro.losses import (
    combined_loss,
    cross_entropy_loss,
    image_reconstruction_loss,
    meaningful_loss,
    scalar_reconstruction_loss,
    spectrum_reconstruction_loss,
)
from treadle.astro.model import CausalTransformerLM
from treadle.astro.sampling import LossPositions, choose_positions, sample_positions
from treadle.astro.scalar_tokenizer import ScalarTokenizer
from treadle.astro.schedule import cosine_schedule_with_warmup
from treadle.astro.sequences import collate_sequences, encode_sequence, move_scalars_last
from treadle.astro.survey_files import iter_columns, read_columns, read_survey
from treadle.astro.survey_tokens import ScalarDropout, SurveyTokenizers, code_use, explained_variance, fit_tokenizers
from treadle.astro.surveys import Survey, load_surveys
from treadle.astro.token_files import MultiFieldTokenDataset
from treadle.astro.tokenizer_files import load_tokenizers, save_tokenizers
from treadle.astro.tokenizers import ImageTokenizer, SpectrumTokenizer
from treadle.astro.trainer import AstroTrainer
from treadle.astro.utilities import configure_cuda_performance, count_parameters, format_time, log_gradient_stats
from treadle.astro.vocab import VocabSpec, build_vocab_spec
from treadle.regression import KernelStack, NumberViews, mixing_shares
from treadle.seed import set_seed

Trainer = AstroTrainer

__all__ = [
    "Answer",
    "AstroConfig",
    "AstroTrainer",
    "AstromodalConfig",
    "AutoEncoder",
    "BaseTokenizer",
    "CausalTransformerLM",
    "Codebook",
    "Codebooks",
    "CrossPrediction",
    "CrossResult",
    "CutoutTokenizer",
    "DataConfig",
    "Decoder",
    "Encoder",
    "ImageTokenizer",
    "ImageTokenizerConfig",
    "JointRegressor",
    "KernelStack",
    "LossConfig",
    "LossPositions",
    "MeaningfulLossConfig",
    "Mixture",
    "ModelConfig",
    "MultiFieldTokenDataset",
    "NumberViews",
    "PathsConfig",
    "ResBlock",
    "ScalarDropout",
    "ScalarTokenizer",
    "ScalarTokenizerConfig",
    "SequencesConfig",
    "SpectrumTokenizer",
    "SpectrumTokenizerConfig",
    "SplusDataset",
    "Survey",
    "SurveyTokenizers",
    "TokenizersConfig",
    "Trainer",
    "TrainingConfig",
    "VocabConfig",
    "VocabSpec",
    "build_loader",
    "build_vocab_spec",
    "choose_positions",
    "class_scores",
    "code_use",
    "collate_sequences",
    "column_probabilities",
    "combined_loss",
    "combined_loss_from_hidden",
    "configure_cuda_performance",
    "cosine_schedule_with_warmup",
    "count_parameters",
    "cross_entropy_loss",
    "cross_predict",
    "discover_fields_from_datacubes",
    "discover_fields_from_template",
    "draw_spectra",
    "encode_sequence",
    "expected_vectors",
    "explained_variance",
    "fit_tokenizers",
    "format_time",
    "from_dict",
    "hide_columns",
    "image_reconstruction_loss",
    "initialise_from_codebooks",
    "iter_columns",
    "joint_loss",
    "kmeans_codebook",
    "load_codebook",
    "load_config",
    "load_npz_key",
    "load_scalar_centers",
    "load_surveys",
    "load_tokenizers",
    "log_gradient_stats",
    "meaningful_loss",
    "mixing_shares",
    "move_scalars_last",
    "norm_gaia_id",
    "norm_splus_id",
    "prepare_codebooks",
    "quantile_bins",
    "read_columns",
    "read_survey",
    "ridge_prediction",
    "sample_positions",
    "save_codebook",
    "save_config",
    "save_tokenizers",
    "scalar_reconstruction_loss",
    "set_seed",
    "spectrum_reconstruction_loss",
    "to_dict",
    "token_values",
    "tree_predictions",
]
