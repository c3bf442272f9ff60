"""Graph transformers with node and pair positional encodings, on molecules and synthetic graphs.

Importing this needs torch and numpy only; torch_geometric, rdkit and Hydra are imported where they are used.
"""

from __future__ import annotations

from treadle.device import get_device
from treadle.engine.best import EarlyStopping
from treadle.graphs.buckets import PadBucket, plan_buckets
from treadle.graphs.contributions import atom_contributions
from treadle.graphs.datasets import GraphDataset, dataset_names, get_dataset, list_available_datasets
from treadle.graphs.encoding_cache import cached_encodings
from treadle.graphs.encodings import (
    AddPositionalEncodings,
    EncodedGraphs,
    GraphEncoding,
    HKSConfig,
    LapConfig,
    NodePEConfig,
    PEConfig,
    RandomSignFlip,
    RelativePEConfig,
    RoleConfig,
    RWSEConfig,
    bfs_pe,
    compute_node_pe,
    compute_relative_pe,
    core_numbers,
    diffusion_pe,
    encode_graphs,
    hks_pe,
    hop_distances,
    landmark_pe,
    lap_pe,
    parse_pe_config,
    resistance_pe,
    role_pe,
    rwse_pe,
    spd_pe,
)
from treadle.graphs.ensemble import SmilesPrediction, predict_smiles
from treadle.graphs.losses import GraphLoss, get_loss_fn
from treadle.graphs.metrics import GraphMetrics, get_metrics
from treadle.graphs.model import GraphTransformer, get_model
from treadle.graphs.model_options import ModelOptions
from treadle.graphs.optimizer import get_optimizer, get_optimizer_from_config
from treadle.graphs.padded import PaddedGraphBatch, PaddingCollater, pad_batch
from treadle.graphs.scheduler import get_scheduler, get_scheduler_from_config
from treadle.graphs.statistics import GraphStatistics, graph_statistics
from treadle.graphs.task import GraphTask
from treadle.graphs.trainer import GraphTrainer
from treadle.graphs.utilities import GradientAccumulator, count_parameters, log_model_info
from treadle.seed import ReproducibilityContext, set_seed

Trainer = GraphTrainer

__all__ = [
    "AddPositionalEncodings",
    "EarlyStopping",
    "EncodedGraphs",
    "GradientAccumulator",
    "GraphDataset",
    "GraphEncoding",
    "GraphLoss",
    "GraphMetrics",
    "GraphStatistics",
    "GraphTask",
    "GraphTrainer",
    "GraphTransformer",
    "HKSConfig",
    "LapConfig",
    "ModelOptions",
    "NodePEConfig",
    "PEConfig",
    "PadBucket",
    "PaddedGraphBatch",
    "PaddingCollater",
    "RWSEConfig",
    "RandomSignFlip",
    "RelativePEConfig",
    "ReproducibilityContext",
    "RoleConfig",
    "SmilesPrediction",
    "Trainer",
    "atom_contributions",
    "bfs_pe",
    "cached_encodings",
    "compute_node_pe",
    "compute_relative_pe",
    "core_numbers",
    "count_parameters",
    "dataset_names",
    "diffusion_pe",
    "encode_graphs",
    "get_dataset",
    "get_device",
    "get_loss_fn",
    "get_metrics",
    "get_model",
    "get_optimizer",
    "get_optimizer_from_config",
    "get_scheduler",
    "get_scheduler_from_config",
    "graph_statistics",
    "hks_pe",
    "hop_distances",
    "landmark_pe",
    "lap_pe",
    "list_available_datasets",
    "log_model_info",
    "pad_batch",
    "parse_pe_config",
    "plan_buckets",
    "predict_smiles",
    "resistance_pe",
    "role_pe",
    "rwse_pe",
    "set_seed",
    "spd_pe",
]
