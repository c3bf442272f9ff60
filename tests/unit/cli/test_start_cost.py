"""Help, version and the table of runs load no torch; names of the package are loaded when they are asked for."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import treadle
import treadle.checkpoint
import treadle.config
from treadle.checkpoint.safe.claims import _DTYPES

HEAVY = {"torch", "numpy", "scipy", "sklearn", "matplotlib", "plotly", "transformers", "torch_geometric"}
LOOK = """
import atexit, json, sys, time
atexit.register(lambda: print("\\n" + json.dumps([time.process_time(), sorted(sys.modules)])))
sys.argv[0] = "treadle"
from treadle.cli.main import main
main()
"""


def started(*words, cwd):
    """Processor time and modules of a command."""
    done = subprocess.run([sys.executable, "-c", LOOK, *words], capture_output=True, text=True, cwd=cwd, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["replay", "--help"], ["report", "--help"], ["train", "--help"], ["runs"]],
    ids=" ".join,
)  # fmt: skip
def test_what_trains_nothing_loads_nothing_heavy(words, tmp_path):
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "steps.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    (run / "sessions.jsonl").write_text('{"event": "start", "step": 0, "epoch": 0, "time": 1.0}\n')
    torch.save({"model": {"w": torch.ones(2)}, "step": 1, "epoch": 0}, run / "last.pt")
    seconds, modules = started(*words, cwd=tmp_path)
    assert HEAVY & {name.split(".")[0] for name in modules} == set()
    assert len(modules) < 480
    assert seconds < 2.0  # about 0.4 on an idle machine; a busy one counts more


def test_importing_the_package_loads_no_torch():
    code = "import sys, treadle; print('torch' in sys.modules, treadle.__version__)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False", importlib.metadata.version("treadle")]


@pytest.mark.parametrize("package", [treadle, treadle.checkpoint, treadle.config])
def test_every_public_name_is_found_and_is_the_one_that_type_checkers_see(package):
    source = Path(package.__file__).read_text(encoding="utf-8")
    typed = {
        alias.asname or alias.name: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("treadle.") and node.module != "treadle.lazy"
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }
    assert {*typed, "__version__"} == {*package.__all__, "__version__"}
    for name, module in typed.items():
        assert getattr(package, name) is getattr(importlib.import_module(module), name)
        assert name in dir(package)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = package.no_such_name


def test_the_error_of_memory_is_one_class_and_one_of_torch():
    from treadle.errors import OutOfMemoryError

    assert treadle.OutOfMemoryError is OutOfMemoryError
    assert issubclass(OutOfMemoryError, torch.OutOfMemoryError)
    assert (OutOfMemoryError.__module__, OutOfMemoryError.__qualname__) == ("treadle.errors", "OutOfMemoryError")


def test_the_table_of_element_types_has_those_of_torch():
    ours = {name.removeprefix("torch."): width for name, width in _DTYPES.items()}
    of_torch = {name: value.itemsize for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    assert {name: ours.get(name) for name in of_torch} == of_torch
