"""Configuration files in Python or YAML: loading as plain dicts, merging, command-line overrides and writing.

Python configuration files are **code**: loading one runs it with all of your permissions. Load only files that you
trust. YAML files are data and run no code.
"""

from __future__ import annotations

import typing as _typing

from treadle.lazy import lazy_names as _lazy_names

if _typing.TYPE_CHECKING:
    from treadle.config.files import load_config
    from treadle.config.overrides import apply_overrides
    from treadle.config.tree import DELETE, REPLACE, merge_configs
    from treadle.config.writing import format_config, save_config

__all__ = [
    "DELETE",
    "REPLACE",
    "apply_overrides",
    "format_config",
    "load_config",
    "merge_configs",
    "save_config",
]

_HOMES = {
    "files": ["load_config"],
    "tree": ["DELETE", "REPLACE", "merge_configs"],
    "overrides": ["apply_overrides"],
    "writing": ["format_config", "save_config"],
}
if not _typing.TYPE_CHECKING:
    __getattr__, __dir__ = _lazy_names(globals(), _HOMES)
