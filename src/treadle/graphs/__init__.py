"""Graph transformers with positional encodings of nodes and pairs, on molecules and synthetic graphs.

Importing this needs torch and numpy only; torch_geometric, rdkit and Hydra are imported where they are used.
"""

from __future__ import annotations

from treadle.graphs.buckets import PadBucket, plan_buckets
from treadle.graphs.model import GraphTransformer, get_model
from treadle.graphs.model_options import ModelOptions
from treadle.graphs.padded import PaddedGraphBatch, PaddingCollater, pad_batch

__all__ = [
    "GraphTransformer",
    "ModelOptions",
    "PadBucket",
    "PaddedGraphBatch",
    "PaddingCollater",
    "get_model",
    "pad_batch",
    "plan_buckets",
]
