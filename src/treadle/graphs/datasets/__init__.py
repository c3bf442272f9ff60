"""Graph data sets: real molecules, generated families, and public benchmarks, with their splits.

Importing this needs torch and numpy; torch_geometric and RDKit are imported when a data set is loaded.
"""

from __future__ import annotations

from treadle.graphs.datasets.base import GraphDataset
from treadle.graphs.datasets.registry import dataset_names, get_dataset, list_available_datasets

__all__ = ["GraphDataset", "dataset_names", "get_dataset", "list_available_datasets"]
