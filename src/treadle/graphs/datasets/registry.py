"""Registry of graph data sets by name."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.errors import ConfigError, nearest, refuse_unknown
from treadle.errors.arguments import checked
from treadle.graphs.datasets.base import GraphDataset, Indices, Source
from treadle.graphs.datasets.parallel import count_workers
from treadle.graphs.encoding_cache import cached_encodings
from treadle.graphs.encodings import PEConfig, RandomSignFlip, encode_graphs, parse_pe_config

if TYPE_CHECKING:
    from treadle.graphs.encodings.config import PEConfigLike

__all__ = ["dataset_names", "get_dataset", "list_available_datasets"]

_SYNTHETIC = (
    "barabasi_albert",
    "erdos_renyi",
    "grid_2d",
    "grid_3d",
    "random_geometric",
    "random_regular",
    "ring",
    "sbm",
    "tree",
    "watts_strogatz",
)
_OGB = (
    "bace", "bbbp", "clintox", "esol", "freesolv", "hiv", "lipo", "muv", "pcba", "sider", "tox21", "toxcast",
)  # fmt: skip
# Name -> module and function, imported when the data set is loaded: torch_geometric and RDKit are heavy.
_SOURCES = {
    "nci": "offline:load_nci",
    "zinc_clean_leads": "offline:load_zinc_clean_leads",
    "smiles_csv": "smiles_csv:load_smiles_csv",
    "zinc": "benchmarks:load_zinc",
    "qm9": "benchmarks:load_qm9",
    "cifar10_sp": "benchmarks:load_cifar10",
    "coco_sp": "benchmarks:load_lrgb",
    "pascalvoc_sp": "benchmarks:load_lrgb",
    "pcqm_contact": "benchmarks:load_lrgb",
    "peptides_func": "benchmarks:load_lrgb",
    "peptides_struct": "benchmarks:load_lrgb",
    **{f"ogbg_mol{name}": "ogb:load_ogb" for name in _OGB},
    **{f"synthetic_{family}": "synthetic:load_synthetic" for family in _SYNTHETIC},
}


def dataset_names() -> list[str]:
    """Return every name that :func:`get_dataset` accepts.

    Example:
        >>> "nci" in dataset_names(), "synthetic_grid_2d" in dataset_names()
        (True, True)
    """
    return sorted(_SOURCES)


def list_available_datasets() -> dict[str, list[str]]:
    """Return the names of :func:`get_dataset` by category: molecular, lrgb, ogb, superpixel, synthetic.

    Example:
        >>> {kind: names[0] for kind, names in list_available_datasets().items()}["lrgb"]
        'coco_sp'
    """
    kinds: dict[str, list[str]] = {kind: [] for kind in ("molecular", "lrgb", "ogb", "superpixel", "synthetic")}
    by_reader = {"load_lrgb": "lrgb", "load_ogb": "ogb", "load_cifar10": "superpixel", "load_synthetic": "synthetic"}
    for name in dataset_names():
        kinds[by_reader.get(_SOURCES[name].split(":")[1], "molecular")].append(name)
    return kinds


@checked
def get_dataset(
    name: str,
    root: str | os.PathLike[str] = "./data",
    pe_config: PEConfigLike = None,
    splits: str = "official",
    pe_cache_dir: str | os.PathLike[str] | None = None,
    use_preprocessed_pe: bool = True,
    *,
    num_workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **kwargs: Any,
) -> GraphDataset:
    """Load a graph data set, optionally with positional encodings.

    ``smiles_csv`` reads ``file="molecules.csv"``: a column of SMILES, and columns of targets, empty where unknown.
    ``nci`` and ``zinc_clean_leads`` are molecules bundled with the packages rdkit and molsets, ``synthetic_*`` graphs
    are generated, and the others are benchmarks: ``zinc``, ``qm9``, the long-range sets (such as ``peptides_func``) and
    those of OGB (such as ``ogbg_molhiv``), read from ``root`` or downloaded into it. Names are case-insensitive, and
    hyphens count as underscores.

    Args:
        name: one of :func:`dataset_names`.
        root: folder for downloads and processed graphs.
        pe_config: encodings, as settings or the name of a preset; None for no encodings (see `parse_pe_config`).
        splits: ``"official"``: those of the source, or 80/10/10 with a fixed seed if it has none. ``"random"``: drawn
            with ``seed`` in the same sizes; a test set defined by the source is kept.
        pe_cache_dir: folder for computed encodings; None: next to the processed graphs.
        use_preprocessed_pe: load encodings from that folder if they match the graphs and settings; False recomputes
            them.
        num_workers: processes for molecules and encodings; 0: the current one, None: one per core, at most 8. The
            result does not depend on it.
        progress: called repeatedly with the number of encoded graphs and the total.
        **kwargs: settings of the data set; the error for an unknown one lists them.

    Returns:
        Three list-like splits, and the feature widths, task and level of the data.

    Raises:
        ConfigError: a name, a setting or an encoding is unknown or invalid.
        ImportError: a package is missing; the message names what to install.
        FileNotFoundError: the data are missing and cannot be downloaded; the message names available alternatives.

    Example:
        >>> data = get_dataset("synthetic_tree", task="distance_regression", num_graphs=20, pe_config="default")
        >>> [len(split) for split in data.get_splits()], data.level, data.node_pe_dim, data.relative_pe_dim
        ([16, 2, 2], 'edge', 20, 32)
    """
    known = name.lower().replace("-", "_")
    if known not in _SOURCES:
        raise ConfigError(f"there is no data set {name!r}; {nearest(known, _SOURCES)}", argument="get_dataset")
    settings = parse_pe_config(pe_config)
    source, chosen = _split_source(known, Path(root), splits, num_workers=num_workers, options=kwargs)
    if settings.node is not None or settings.relative is not None:
        folder = Path(root) / known if pe_cache_dir is None else Path(pe_cache_dir)
        plain = [(graph.edge_index, graph.num_nodes) for graph in source.graphs]
        encode = partial(cached_encodings, folder=folder, name=f"{known}-encodings")
        source.graphs.encodings = (encode if use_preprocessed_pe else encode_graphs)(
            plain, settings, num_workers=count_workers(num_workers), progress=progress
        )
    return _described(known, source, settings, chosen)


def _split_source(
    name: str, root: Path, splits: str, *, num_workers: int | None, options: Mapping[str, Any]
) -> tuple[Source, tuple[Indices, ...]]:
    """Load a source and choose its splits, after validating every option."""
    if splits not in ("official", "random"):
        raise ConfigError(
            f" must be 'official' or 'random'; {nearest(splits, ('official', 'random'))}",
            argument="splits",
            value=splits,
        )
    load = _loader(name)
    its_own = inspect.signature(load).parameters.keys() - {"name", "root", "num_workers"}
    refuse_unknown(f"get_dataset({name!r})", options, its_own | ({"seed"} if splits == "random" else set()))
    seed = options.get("seed")
    if splits == "random" and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise ConfigError(f"='random' needs seed=<int>, and got seed={seed!r}", argument="splits")
    source = load(name, root, num_workers=num_workers, **{key: options[key] for key in options if key in its_own})
    return source, source.official if seed is None or splits == "official" else source.redrawn(seed)


def _loader(name: str) -> Callable[..., Source]:
    module, function = _SOURCES[name].split(":")
    try:
        load = getattr(importlib.import_module(f"treadle.graphs.datasets.{module}"), function)
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] == "treadle":
            raise
        raise ImportError(
            f"data set {name!r} needs {error.name.split('.')[0]}, which is not installed: pip install "
            "'treadle[graphs]'",
            name=error.name,
        ) from error
    return load  # type: ignore[no-any-return]


def _described(name: str, source: Source, settings: PEConfig, chosen: tuple[Indices, ...]) -> GraphDataset:
    train, val, test = (source.graphs[numbers] for numbers in chosen)
    if settings.node is not None and settings.node.flip_columns > 0:
        train.transform = RandomSignFlip(settings.node.flip_columns)
    return GraphDataset(
        **vars(source.described),
        name=name,
        train=train,
        val=val,
        test=test,
        node_pe_dim=settings.node_dim,
        relative_pe_dim=settings.relative_dim,
    )
