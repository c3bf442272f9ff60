"""Exact positional encodings of nodes and node pairs on plain graphs.

Needs torch only. One function per encoding; :func:`encode_graphs` for a whole data set; :class:`AddPositionalEncodings`
as a transform.
"""

from __future__ import annotations

from treadle.graphs.encodings.compute import (
    AddPositionalEncodings,
    GraphEncoding,
    RandomSignFlip,
    compute_node_pe,
    compute_relative_pe,
)
from treadle.graphs.encodings.config import (
    HKSConfig,
    LapConfig,
    NodePEConfig,
    PEConfig,
    RelativePEConfig,
    RoleConfig,
    RWSEConfig,
    parse_pe_config,
)
from treadle.graphs.encodings.graphs import core_numbers, hop_distances
from treadle.graphs.encodings.many import EncodedGraphs, encode_graphs
from treadle.graphs.encodings.node import hks_pe, lap_pe, role_pe, rwse_pe
from treadle.graphs.encodings.presets import PE_PRESETS
from treadle.graphs.encodings.relative import bfs_pe, diffusion_pe, landmark_pe, resistance_pe, spd_pe

__all__ = [
    "PE_PRESETS",
    "AddPositionalEncodings",
    "EncodedGraphs",
    "GraphEncoding",
    "HKSConfig",
    "LapConfig",
    "NodePEConfig",
    "PEConfig",
    "RWSEConfig",
    "RandomSignFlip",
    "RelativePEConfig",
    "RoleConfig",
    "bfs_pe",
    "compute_node_pe",
    "compute_relative_pe",
    "core_numbers",
    "diffusion_pe",
    "encode_graphs",
    "hks_pe",
    "hop_distances",
    "landmark_pe",
    "lap_pe",
    "parse_pe_config",
    "resistance_pe",
    "role_pe",
    "rwse_pe",
    "spd_pe",
]
