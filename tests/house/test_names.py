"""Names of treadle used by benchmarks, examples and tests exist, also in those that no run of the suite executes."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("benchmarks", "examples", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "frozen" not in path.parts and "golden" not in path.parts
]

pytestmark = pytest.mark.filterwarnings("ignore")  # imports of optional packages warn


def exists(home: ModuleType, name: str) -> bool:
    """Return whether a module has a name; submodules count, also those that need an optional package."""
    return hasattr(home, name) or (hasattr(home, "__path__") and find_spec(f"{home.__name__}.{name}") is not None)


def missing_names(tree: ast.AST) -> Iterator[str]:
    """Yield names that are imported from a module of treadle, or read from one, and do not exist."""
    nodes = list(ast.walk(tree))
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assigned |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    modules = {}
    for node in nodes:
        if isinstance(node, ast.Import) and any(each.name == "treadle" for each in node.names):
            modules["treadle"] = importlib.import_module("treadle")
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "treadle":
            home = importlib.import_module(str(node.module))
            for each in node.names:
                if not exists(home, each.name):
                    yield f"line {node.lineno}: {home.__name__}.{each.name}"
                elif isinstance(value := getattr(home, each.name, None), ModuleType):
                    modules[each.asname or each.name] = value
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in assigned:
            home = modules.get(node.value.id)
            if home is not None and home.__name__.startswith("treadle") and not exists(home, node.attr):
                yield f"line {node.lineno}: {home.__name__}.{node.attr}"


def test_a_name_that_does_not_exist_is_found():
    tree = ast.parse(
        "from treadle import Trainer, gone\nfrom treadle import distributed\ndistributed.tell_ranks([1.0])\n"
    )
    assert list(missing_names(tree)) == ["line 1: treadle.gone", "line 3: treadle.distributed.tell_ranks"]


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tests"])
def test_every_name_of_treadle_that_is_used_exists(folder):
    files = [path for path in FILES if path.relative_to(ROOT).parts[0] == folder]
    assert files
    found = {str(path.relative_to(ROOT)): list(missing_names(ast.parse(path.read_text()))) for path in files}
    assert {path: names for path, names in found.items() if names} == {}
