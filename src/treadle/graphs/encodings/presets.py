"""Presets of node and pair encodings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PE_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {"node": {}, "relative": {}},
    # The former default, unscaled; it performs worse than the standardised walks alone.
    "combined": {"node": {"type": "combined", "dim": 32, "rwse": {"scales": [1, 2, 4, 8, 16]}}, "relative": {}},
    "light": {
        "node": {"type": "rwse", "dim": 16, "rwse": {"scales": [1, 2, 4]}},
        "relative": {"num_buckets": 16, "max_distance": 5},
    },
    # Many scales and no padding: 20 eigenvectors, walks of 2 to 32 steps (one step never returns on a graph without
    # self-loops), heat from 0.1 to 10, and 3 role columns make 64.
    "mspe": {
        "node": {
            "type": "combined",
            "dim": 64,
            "lap": {"k": 20},
            "rwse": {"scales": list(range(2, 33))},
            "hks": {"scales": [0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0]},
        },
        "relative": {},
    },
    "none": {},
}
"""Presets, as the keys that differ from the defaults."""
