"""Who may import whom. The numbers are those of the design: a module imports from its own level or a lower one."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from helpers import OPTIONAL_PACKAGES

ROOT = Path(__file__).parents[2] / "src"
PACKS = ("spectra", "graphs", "astro", "text")

# A module is found under its own name or that of the nearest package above it.
LEVELS = {
    # Values and errors: the standard library, torch and numpy. The means are here since they are sums of nested values.
    # Copies on the host and sizes of graphs are noted at tensors, and read by tasks and models.
    0: ["errors", "nested", "means", "seed", "requirements", "host_copies", "graph_sizes"],
    # One concern each, on level 0. A task says what a step gives, the weights how steps are shared; neither knows a
    # loop. The best rule and the schedules are pure numbers, a signal listener pure handlers.
    1: ["distributed", "device", "precision", "schedules", "signals", "best", "naming", "optim", "ema", "data", "task",
        "weights", "failure", "whereabouts", "guard", "gradients", "gradient_exchange", "parallel",
        "frozen", "fitting", "state_options", "predictions", "shards", "packing", "cuda_graph", "compiling"],
    # What goes round a run and into files. session, state, target and evaluation know the engine by its type only, so
    # the engine can be read without them and they without the engine. Configuration and data sets stand alone.
    2: ["checkpoint", "hooks.base", "session", "state", "changed", "rank_state", "target", "evaluation", "startup",
        "observers", "flight", "out_of_memory", "config", "builder", "datasets", "pretrained", "exchange"],
    # The loop, its step, and the functions that were cut out of it for length.
    3: ["engine", "events", "bookkeeping", "epoch_end", "capture", "captured_step", "capture_check"],
    # Hooks see the engine as an argument and never import it.
    4: ["hooks"],
    5: ["trainer", "epochs", "selection", "run_folder", "trackers"],
    6: ["functional", *PACKS],
    7: ["cli", "__main__"],
}  # fmt: skip
# A hook may build on these, which are no hooks themselves.
SHARED_BY_HOOKS = {"base", "reporting", "tracking", "values", "files"}
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


def for_types_only(tree):
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }


@cache
def imports_of(name):
    """The modules below `treadle` that a module imports when it runs, also inside functions."""
    tree, is_package = modules()[name]
    skipped, found = for_types_only(tree), set()
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


def level_of(name):
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        for level, names in LEVELS.items():
            if ".".join(parts[:end]) in names:
                return level
    return None


NAMES = [name for name in modules() if name]


@pytest.mark.parametrize("name", NAMES)
def test_every_module_has_a_level_and_imports_from_no_higher_one(name):
    own = level_of(name)
    assert own is not None, f"give {name} a level in LEVELS, with the reason"
    higher = {other for other in imports_of(name) if other and (level_of(other) or 0) > own}
    assert not higher


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


def test_nothing_imports_the_command_line():
    users = {name for name in NAMES if any(top(other) == "cli" for other in imports_of(name))}
    assert {name for name in users if top(name) not in ("cli", "__main__")} == set()


def test_no_hook_imports_another():
    for name in NAMES:
        if name.startswith("hooks."):
            others = {other.split(".")[1] for other in imports_of(name) if other.startswith("hooks.")}
            assert others <= SHARED_BY_HOOKS, name


@pytest.mark.parametrize("name", [n for n in NAMES if top(n) in PACKS and len(set(n.split(".")) & STANDALONE) > 0])
def test_models_losses_and_the_like_need_nothing_of_the_core(name):
    assert {other for other in imports_of(name) if top(other) != top(name)} <= {"errors", "graph_sizes"}


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
    """What importing the library or a pack changes, by module."""
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
