"""Graph transformers with positional encodings of nodes and pairs, on molecules and synthetic graphs.

Importing this needs torch and numpy only; torch_geometric, rdkit and Hydra are imported where they are used.
"""

from __future__ import annotations

from treadle.graphs.buckets import PadBucket, plan_buckets
from treadle.graphs.datasets import GraphDataset, dataset_names, get_dataset
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
from treadle.graphs.model import GraphTransformer, get_model
from treadle.graphs.model_options import ModelOptions
from treadle.graphs.padded import PaddedGraphBatch, PaddingCollater, pad_batch

__all__ = [
    "AddPositionalEncodings",
    "EncodedGraphs",
    "GraphDataset",
    "GraphEncoding",
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
    "RoleConfig",
    "bfs_pe",
    "cached_encodings",
    "compute_node_pe",
    "compute_relative_pe",
    "core_numbers",
    "dataset_names",
    "diffusion_pe",
    "encode_graphs",
    "get_dataset",
    "get_model",
    "hks_pe",
    "hop_distances",
    "landmark_pe",
    "lap_pe",
    "pad_batch",
    "parse_pe_config",
    "plan_buckets",
    "resistance_pe",
    "role_pe",
    "rwse_pe",
    "spd_pe",
]
