"""Settings of node and pair encodings, and their widths."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from treadle.errors import ConfigError, nearest, refuse_unknown
from treadle.errors.arguments import check_whole, check_within, checked
from treadle.graphs.encodings.presets import PE_PRESETS

_NODE_ALIASES = {"lap_pe": "lap", "lappe": "lap"}
_NODE_TYPES = ("lap", "rwse", "hks", "role", "combined", "none")
_RELATIVE_TYPES = ("spd", "bfs", "diffusion", "resistance", "landmark", "none")


@checked
@dataclass(frozen=True)
class LapConfig:
    """Settings of the Laplacian eigenvectors."""

    k: int = 16
    """Columns; zero-padded for a graph with fewer eigenvectors."""
    sign_invariant: str = "abs"
    """``"abs"``, ``"square"`` (exact for repeated eigenvalues too), or ``"flip"`` (see :class:`RandomSignFlip`)."""

    def __post_init__(self) -> None:
        check_whole(1, lap__k=self.k)
        _check_word("lap.sign_invariant", self.sign_invariant, ("abs", "square", "flip"))


@checked
@dataclass(frozen=True)
class RWSEConfig:
    """Settings of random-walk return probabilities."""

    scales: Sequence[int] = tuple(range(1, 21))
    """Numbers of steps, one column each."""

    def __post_init__(self) -> None:
        _check_list("rwse.scales", self.scales)
        for scale in self.scales:
            check_whole(1, rwse__scales=scale)


@checked
@dataclass(frozen=True)
class HKSConfig:
    """Settings of the heat kernel signature."""

    scales: Sequence[float] = (0.1, 0.5, 1.0, 2.0, 5.0)
    """Diffusion times, one column each."""

    def __post_init__(self) -> None:
        _check_times("hks.scales", self.scales)


@checked
@dataclass(frozen=True)
class RoleConfig:
    """Settings of the structural role of a node."""

    features: Sequence[str] = ("degree", "clustering", "kcore")
    """One column each, in this order."""

    def __post_init__(self) -> None:
        _check_words("role.features", self.features, ("degree", "clustering", "kcore"))


@checked
@dataclass(frozen=True)
class NodePEConfig:
    """Settings of the node encodings.

    Raises:
        ConfigError: a value is out of range, or the columns do not fit into ``dim``.

    Example:
        >>> NodePEConfig().blocks
        {'rwse': 20}
        >>> NodePEConfig(type="combined", dim=64).blocks
        {'lap': 16, 'rwse': 20, 'hks': 5, 'role': 3}
    """

    type: str = "rwse"
    """``"lap"``, ``"rwse"``, ``"hks"``, ``"role"``, several of them as ``"lap+rwse"``, ``"combined"`` for all four, or
    ``"none"``."""
    dim: int | None = None
    """Width of ``node_pe``, zero-padded. None: the number of columns of the encoding."""
    lap: LapConfig = field(default_factory=LapConfig)
    rwse: RWSEConfig = field(default_factory=RWSEConfig)
    hks: HKSConfig = field(default_factory=HKSConfig)
    role: RoleConfig = field(default_factory=RoleConfig)
    normalize: str = "none"
    """``"none"``, or ``"graph"``: mean 0 and variance 1 over the nodes of each graph; a constant column becomes 0."""

    def __post_init__(self) -> None:
        several = self.type.split("+") if isinstance(self.type, str) and "+" in self.type else []
        is_known = len(several) > 1 and several == _in_order(several)
        _check_word("node.type", self.type, [self.type] if is_known else _NODE_TYPES)
        _check_word("node.normalize", self.normalize, ("none", "graph"))
        if self.dim is not None:
            check_whole(1, node__dim=self.dim)
        if self.columns > self.width:
            parts = " + ".join(f"{name} {width}" for name, width in self.blocks.items())
            raise ConfigError(
                f"={self.dim}: type {self.type!r} gives {self.columns} columns ({parts}); set dim to at least "
                f"{self.columns} or ask for fewer",
                argument="node.dim",
            )

    @property
    def blocks(self) -> dict[str, int]:
        """Concatenated encodings with their numbers of columns."""
        widths = {
            "lap": self.lap.k,
            "rwse": len(self.rwse.scales),
            "hks": len(self.hks.scales),
            "role": len(self.role.features),
        }
        wanted = {"combined": list(widths), "none": []}.get(self.type, self.type.split("+"))
        return {name: widths[name] for name in wanted}

    @property
    def columns(self) -> int:
        """Number of columns without padding."""
        return sum(self.blocks.values())

    @property
    def width(self) -> int:
        """``dim``, or its default."""
        return self.columns if self.dim is None else self.dim

    @property
    def flip_columns(self) -> int:
        """Leading columns whose signs are drawn in training; 0 unless ``lap.sign_invariant`` is ``"flip"``."""
        return self.blocks.get("lap", 0) if self.lap.sign_invariant == "flip" else 0


@checked
@dataclass(frozen=True)
class RelativePEConfig:
    """Settings of the pair encodings.

    Raises:
        ConfigError: a value is out of range.

    Example:
        >>> RelativePEConfig().dim, RelativePEConfig(type="diffusion").dim
        (32, 3)
    """

    type: str = "spd"
    """``"spd"``, ``"bfs"``, ``"diffusion"``, ``"resistance"``, ``"landmark"`` or ``"none"``."""
    num_buckets: int = 32
    """``spd``, ``bfs``: width of the one-hot code."""
    max_distance: int = 10
    """``spd``: larger distances share the last bucket. ``bfs``: pairs further apart are not listed."""
    scales: Sequence[float] = (0.1, 1.0, 10.0)
    """``diffusion``: times, one column each."""
    num_landmarks: int = 4
    """``landmark``: number of landmark nodes."""
    reduce: Sequence[str] = ("min", "max", "mean")
    """``landmark``: reductions over the landmarks, one column each."""
    seed: int = 0
    """``landmark``: seed for drawing the landmarks of each graph."""

    def __post_init__(self) -> None:
        _check_word("relative.type", self.type, _RELATIVE_TYPES)
        check_whole(2, relative__num_buckets=self.num_buckets)
        check_within("[2, 32766]", relative__num_buckets=self.num_buckets)
        check_whole(1, relative__max_distance=self.max_distance, relative__num_landmarks=self.num_landmarks)
        check_whole(0, relative__seed=self.seed)
        check_within("[0, 9223372036854775808)", relative__seed=self.seed)
        _check_times("relative.scales", self.scales)
        _check_words("relative.reduce", self.reduce, ("min", "max", "mean"))

    @property
    def dim(self) -> int:
        """Width of ``edge_pe``."""
        widths = {"diffusion": len(self.scales), "resistance": 1, "landmark": len(self.reduce)}
        return widths.get(self.type, self.num_buckets)


@checked
@dataclass(frozen=True)
class PEConfig:
    """Encodings of a data set; None or the type ``"none"`` disables node or pair encodings.

    Example:
        >>> config = parse_pe_config("default")
        >>> config.node_dim, config.relative_dim
        (20, 32)
    """

    node: NodePEConfig | None = None
    relative: RelativePEConfig | None = None

    def __post_init__(self) -> None:
        for name in ("node", "relative"):  # one representation, so that equal settings compare equal
            part = getattr(self, name)
            if part is not None and part.type == "none":
                object.__setattr__(self, name, None)

    @property
    def node_dim(self) -> int | None:
        """Width of ``node_pe``, None without it."""
        return None if self.node is None else self.node.width

    @property
    def relative_dim(self) -> int | None:
        """Width of ``edge_pe``, None without it."""
        return None if self.relative is None else self.relative.dim

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values that :func:`parse_pe_config` accepts."""
        sections = {"node": self.node, "relative": self.relative}
        return {name: {"type": "none"} if part is None else _plain(part) for name, part in sections.items()}


PEConfigLike: TypeAlias = "PEConfig | Mapping[str, Any] | str | None"


@checked
def parse_pe_config(config: PEConfigLike) -> PEConfig:
    """Parse the settings of encodings and validate every key and value.

    A section that is absent, ``enabled: false`` or ``type: none`` is disabled; a missing key in a section uses its
    default.

    Args:
        config: a mapping with the sections ``node`` and ``relative``; the name of a preset (:data:`PE_PRESETS`); None
            for no encodings; or already parsed settings.

    Raises:
        ConfigError: a key, a type or a preset is unknown (the closest match is named), or a value is out of range.

    Example:
        >>> parse_pe_config({"node": {"type": "lap_pe", "lap": {"k": 8}}, "relative": {"type": "none"}}).node.columns
        8
        >>> parse_pe_config({"node": {"type": "rswe"}})
        Traceback (most recent call last):
        treadle.errors.ConfigError: pe_config.node.type='rswe': did you mean 'rwse'?
    """
    if isinstance(config, PEConfig):
        return config
    if config is None:
        return PEConfig()
    if isinstance(config, str):
        if config not in PE_PRESETS:
            raise ConfigError(f"no such preset; {nearest(config, PE_PRESETS)}", argument="pe_config", value=config)
        config = PE_PRESETS[config]
    values = _mapping("pe_config", config)
    refuse_unknown("pe_config", values, ("node", "relative"))
    return PEConfig(parse_node_config(values.get("node")), parse_relative_config(values.get("relative")))


def parse_node_config(section: Mapping[str, Any] | None) -> NodePEConfig | None:
    """Parse the section ``node`` of the settings; None if it is disabled."""
    return _parse_section(NodePEConfig, "node", section, [*_NODE_TYPES, *_NODE_ALIASES])


def parse_relative_config(section: Mapping[str, Any] | None) -> RelativePEConfig | None:
    """Parse the section ``relative`` of the settings; None if it is disabled."""
    return _parse_section(RelativePEConfig, "relative", section, _RELATIVE_TYPES)


_Section = TypeVar("_Section", NodePEConfig, RelativePEConfig)
_PARTS = {"lap": LapConfig, "rwse": RWSEConfig, "hks": HKSConfig, "role": RoleConfig}


def _parse_section(
    kind: type[_Section], name: str, section: Mapping[str, Any] | None, types: Sequence[str]
) -> _Section | None:
    if section is None:
        return None
    where = f"pe_config.{name}"
    values = of_mspe(name, _mapping(where, section))
    refuse_unknown(where, values, ["enabled", *(entry.name for entry in dataclasses.fields(kind))])

    enabled = values.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigError("must be true or false", argument=f"{where}.enabled", value=enabled)
    chosen = values.get("type", kind().type)
    if chosen not in types and not (isinstance(chosen, str) and "+" in chosen):
        raise ConfigError(nearest(str(chosen), types), argument=f"{where}.type", value=chosen)
    values["type"] = _NODE_ALIASES.get(chosen, chosen)

    for part in values.keys() & _PARTS.keys():
        inner = _mapping(f"{where}.{part}", values[part])
        refuse_unknown(f"{where}.{part}", inner, [entry.name for entry in dataclasses.fields(_PARTS[part])])
        values[part] = _PARTS[part](**inner)
    read = kind(**values)  # even if disabled: an invalid value is an error now, not only once it is enabled
    return read if enabled else None


_MSPE_NAMES = {**_NODE_ALIASES, "shortest_path": "spd", "effective_resistance": "resistance"}


def of_mspe(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate mspe's keys in a section: ``types``, ``scales``, ``sign_invariant``.

    Args:
        name: ``"node"`` or ``"relative"``.
        values: the section; without ``types`` it is returned unchanged.

    Raises:
        ConfigError: ``type`` is also given, there are several pair encodings, or signs are to be kept.

    Example:
        >>> of_mspe("node", {"types": ["rwse"], "dim": 32, "scales": [1, 2, 4]})
        {'dim': 32, 'type': 'rwse', 'rwse': {'scales': [1, 2, 4]}}
    """
    found, where = dict(values), f"pe_config.{name}"
    if "types" not in found:
        return found
    if "type" in found:
        raise ConfigError(f"and type={found['type']!r} name the encoding twice; give one", argument=f"{where}.types")
    types = [_MSPE_NAMES.get(str(one).lower(), str(one).lower()) for one in found.pop("types") or ()]
    if name == "relative":
        if len(types) > 1:
            raise ConfigError(
                "pairs have one encoding, and mspe computes only the first of a list; name that one",
                argument=f"{where}.types", value=types,
            )  # fmt: skip
        return {**found, "type": types[0] if types else "none"}
    for one in types:
        _check_word(f"{where}.types", one, _BLOCKS)
    found["type"] = "+".join(_in_order(types)) or "none"
    _spread_scales(found, types, where)
    return found


_BLOCKS = ("lap", "rwse", "hks", "role")


def _in_order(types: Sequence[str]) -> list[str]:
    """Return the distinct node encodings in the order of their columns."""
    return [block for block in _BLOCKS if block in types]


def _spread_scales(found: dict[str, Any], types: Sequence[str], where: str) -> None:
    """Give each encoding the scales of the section, and eigenvectors the remaining columns."""
    if not found.pop("sign_invariant", True):
        raise ConfigError(
            "signs of eigenvectors are arbitrary; leave it out, or set lap.sign_invariant to 'flip'",
            argument=f"{where}.sign_invariant", value=False,
        )  # fmt: skip
    scales = found.pop("scales", None)
    for block in ("rwse", "hks"):
        if scales is not None and block in types:
            found.setdefault(block, {"scales": scales})
    if "lap" in types and isinstance(found.get("dim"), int):
        found.setdefault("lap", {"k": max(1, min(LapConfig.k, found["dim"] // len(types)))})


def _mapping(where: str, value: Any) -> dict[str, Any]:
    """Return a copy of a section with lists as tuples: settings are shared between graphs and immutable."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"must be a mapping of settings, not a {type(value).__name__}", argument=where, value=value)
    return {
        key: tuple(entry) if isinstance(entry, Sequence) and not isinstance(entry, str) else entry
        for key, entry in value.items()
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _check_word(name: str, value: Any, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ConfigError(nearest(str(value), allowed), argument=name, value=value)


def _check_list(name: str, values: Any) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) == 0:
        raise ConfigError("must be a list of at least one entry", argument=name, value=values)
    if len({repr(value) for value in values}) != len(values):
        raise ConfigError("has an entry twice; each would give the same column", argument=name, value=list(values))


def _check_words(name: str, values: Any, allowed: Sequence[str]) -> None:
    _check_list(name, values)
    for value in values:
        _check_word(name, value, allowed)


def _check_times(name: str, values: Any) -> None:
    _check_list(name, values)
    for value in values:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not (0 < value < math.inf):
            raise ConfigError("must be a number above 0", argument=name, value=value)
