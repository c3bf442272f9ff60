"""Who may import whom: the floors of the table in CONTRIBUTING.md, read from there.

A room is a top-level module or a folder of `src/treadle`. It imports from its own floor or a lower one, also for types.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from helpers import OPTIONAL_PACKAGES

REPOSITORY = Path(__file__).parents[2]
ROOT = REPOSITORY / "src"
PACKS = ("spectra", "graphs", "astro", "text")

# Imports that point up: (importing module, imported module). Captured steps replay those of the engine, which loads
# them where they are asked for.
EXCEPTIONS = {("engine.loop", "capture.steps")}
# A hook may build on these, which are no hooks themselves.
SHARED_BY_HOOKS = {
    "averaging",
    "base",
    "flight",
    "thread_activity",
    "reporting",
    "tracking",
    "values",
    "files",
    "saving",
}
# The parts of a pack that must be usable without any trainer: torch, numpy and their own pack, of the core the errors,
# and what a loader noted at a tensor.
STANDALONE = {
    "model", "encoder", "losses", "metrics", "masks", "vocab", "codebooks", "tokenizers", "layers", "encodings",
    "clustering", "arrays", "augment", "preprocessing", "attention", "buckets", "heads", "inputs", "model_options",
    "padded", "corpus", "ngrams", "tokenizer", "task_types",
    "scalar_tokenizer", "sequences", "sampling", "loss_inputs", "loss_terms", "nll_kernel", "hidden_losses",
}  # fmt: skip


@cache
def modules():
    """Every module of the library by its name below `treadle`, with its syntax tree."""
    found = {}
    for path in sorted((ROOT / "treadle").rglob("*.py")):
        parts = list(path.relative_to(ROOT / "treadle").with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = (ast.parse(path.read_text(encoding="utf-8")), parts[-1] == "__init__")
    return found


def floors():
    """The floor of every room, from the table in CONTRIBUTING.md."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \|([^|]+)\|", text, flags=re.MULTILINE)
    return {room.removesuffix("/"): int(floor) for floor, names in rows for room in re.findall(r"`(\w+/?)`", names)}


FLOORS = floors()


def for_types_only(tree):
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }


@cache
def imports_of(name, *, types=False):
    """The modules below `treadle` that a module imports when it runs, also inside functions; with types, all."""
    tree, is_package = modules()[name]
    skipped, found = set() if types else for_types_only(tree), set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("treadle").lstrip(".") for alias in node.names if top(alias.name) == "treadle"
            }
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = name.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
                base = ".".join(["treadle", *above, *([node.module] if node.module else [])])
            if top(base) != "treadle":
                continue
            inside = base.removeprefix("treadle").lstrip(".")
            for alias in node.names:
                full = f"{inside}.{alias.name}".lstrip(".")
                found.add(full if full in modules() else inside)
    return found - {name}


def top(dotted):
    return dotted.split(".")[0]


NAMES = [name for name in modules() if name]


def test_the_table_names_every_room_and_no_other():
    assert set(FLOORS) == {top(name) for name in NAMES}


def test_few_modules_stand_at_the_top():
    assert len(list((ROOT / "treadle").glob("*.py"))) <= 10


def test_no_import_points_up_but_the_exceptions():
    pairs = ((name, other) for name in NAMES for other in imports_of(name, types=True) if other)
    assert {(name, other) for name, other in pairs if FLOORS[top(other)] > FLOORS[top(name)]} == EXCEPTIONS


def test_no_module_imports_the_root_of_the_library():
    assert [name for name in NAMES if "" in imports_of(name)] == []


def test_imports_make_no_circle():
    done, path = set(), []

    def visit(name):
        assert name not in path, f"circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name in done:
            return
        path.append(name)
        for other in imports_of(name):
            # A package's own modules may be imported by it, and import each other; only what runs first matters.
            if other in modules() and not other.startswith(f"{name}.") and not name.startswith(f"{other}."):
                visit(other)
        path.pop()
        done.add(name)

    for name in NAMES:
        visit(name)


def test_the_core_imports_no_pack_and_no_pack_another():
    for name in NAMES:
        if top(name) in ("cli", "__main__"):
            continue
        packs = {top(other) for other in imports_of(name)} & set(PACKS)
        assert packs <= {top(name)}, name


def imported_packages(name):
    """The packages beside treadle that a module imports, also inside functions and for types."""
    tree, _ = modules()[name]
    found = {top(alias.name) for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return found | {top(node.module) for node in froms}


def test_no_pack_draws_on_a_terminal():
    assert [name for name in NAMES if top(name) in PACKS and imported_packages(name) & {"rich", "typer"}] == []


def test_the_commands_import_no_pack_but_for_the_scripts_of_graphs():
    commands = [name for name in NAMES if top(name) == "cli"]
    importing = {name for name in commands if {top(other) for other in imports_of(name)} & set(PACKS)}
    assert importing == {"cli.scripts"}


def test_nothing_imports_the_command_line():
    users = {name for name in NAMES if any(top(other) == "cli" for other in imports_of(name))}
    assert {name for name in users if top(name) not in ("cli", "__main__")} == set()


def test_no_hook_imports_another():
    for name in NAMES:
        if name.startswith("hooks.") and name != "hooks.trackers":  # makes hooks from their names
            others = {other.split(".")[1] for other in imports_of(name) if other.startswith("hooks.")}
            assert others <= SHARED_BY_HOOKS, name


@pytest.mark.parametrize("name", [n for n in NAMES if top(n) in PACKS and len(set(n.split(".")) & STANDALONE) > 0])
def test_models_losses_and_the_like_need_nothing_of_the_core(name):
    others = {other for other in imports_of(name) if top(other) != top(name)}
    assert others <= {"errors", "errors.arguments", "data.graph_sizes", "device.host_transfer", "device.one_piece"}


SCRIPT = """
import json, os, random, signal, sys
import numpy, torch

def state():
    return {
        "python": repr(random.getstate()), "numpy": repr(numpy.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "dtype": str(torch.get_default_dtype()),
        "cudnn": [torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32],
        "tf32": torch.backends.cuda.matmul.allow_tf32, "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "signals": [repr(signal.getsignal(n)) for n in (1, 2, 10, 12, 15)], "environment": dict(os.environ),
        "files": os.listdir("."), "handlers": repr(__import__("logging").getLogger("treadle").handlers),
    }

def report(module):
    before = state()
    __import__(module)
    after = state()
    print(json.dumps({
        "changed": [key for key in before if before[key] != after[key]],
        "all": sorted({name.split(".")[0] for name in sys.modules}),
    }), flush=True)

for module in sys.argv[1:]:  # each in a process that knows torch and numpy only
    if (child := os.fork()) == 0:
        report(module)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
"""
IMPORTED = ["treadle", *(f"treadle.{pack}" for pack in PACKS)]


@cache
def after_imports(folder):
    """Return the changes made by importing the library or a pack, by module."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *IMPORTED], capture_output=True, text=True, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(IMPORTED, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cwd")


@pytest.mark.parametrize("module", IMPORTED)
def test_importing_loads_nothing_heavy(module, folder):
    assert [name for name in sorted(OPTIONAL_PACKAGES) if name in after_imports(folder)[module]["all"]] == []


@pytest.mark.parametrize("module", IMPORTED)
def test_importing_touches_no_generator_flag_handler_or_file(module, folder):
    assert after_imports(folder)[module]["changed"] == []
