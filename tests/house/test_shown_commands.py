"""The README runs, and every command that a document shows is one that the program understands.

- A ``python`` block of README.md is run exactly as it is pasted, by a process and in a folder that have nothing else.
- Each line of a shell block (``sh``, ``bash``) of any document is parsed by the real command line and not run, and the
  settings of a pack, or of a file that is in ``examples/config``, are checked. Lines of other programs name a target
  of the Makefile or a file that exists.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from treadle.cli.app import app
from treadle.errors import ConfigError
from treadle.runs.packs import PACKS
from treadle.runs.target import checked_target, read_target

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)

# -- the README ---------------------------------------------------------------------------------------------------


def python_blocks():
    return [body for _, language, body in BLOCK.findall(README) if language == "python"]


@pytest.mark.parametrize("number", range(len(python_blocks())))
def test_a_block_of_the_readme_runs_as_it_is_pasted_shows_itself_and_makes_a_page(number, tmp_path):
    script, environment = tmp_path / "pasted.py", {**os.environ, "TREADLE_PROGRESS": ""}
    script.write_text(python_blocks()[number], encoding="utf-8")

    def run(*words):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done

    shown = run("pasted.py").stderr.splitlines()
    assert shown[0].startswith("training starts on ")
    assert shown[-1].startswith("done at step 600")
    assert run("pasted.py").stderr.splitlines()[-1].startswith("nothing to do")
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"runs/{folder.name}" in README.replace(python_blocks()[number], "")  # the commands below name it
    run("-m", "treadle", "report", str(folder))
    page = (folder / "report.html").read_text(encoding="utf-8")
    for chart in ("Loss", "Gradient norm", "Learning rate", "optimizer.class", "finished"):
        assert chart in page


def test_the_readme_is_short():
    assert len(README.split()) < 1150


def test_no_block_of_the_readme_is_without_a_language():
    assert "" not in [language for _, language, _ in BLOCK.findall(README)]


# -- lines of a shell ---------------------------------------------------------------------------------------------


def shown():
    """Every line of a shell block with its document."""
    for path in DOCUMENTS:
        for _, language, body in BLOCK.findall(path.read_text(encoding="utf-8")):
            for line in body.splitlines() if language in ("sh", "bash") else ():
                if words := shlex.split(line, comments=True):
                    yield pytest.param(line.strip(), id=f"{path.relative_to(ROOT)}: {shlex.join(words)}")


def understood(line):
    """Parses a line as the program that it starts would, without running it."""
    program, *words = shlex.split(line, comments=True)
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        launched = get_args_parser().parse_args(words)
        assert launched.module, line
        assert launched.training_script == "treadle", line
        program, words = "treadle", launched.training_script_args
    if program == "treadle":
        check_settings(*parsed(words))
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{re.escape(words[0])}:", makefile, flags=re.MULTILINE), line
    else:
        assert program in ("python", "sbatch"), f"{line}: which program is this?"
        file = next(word for word in words if not word.startswith("-"))
        assert (ROOT / file).exists() or file in written_by_pages(), line


def parsed(words):
    """Returns the name of a command of treadle and what its arguments mean, as the command would get them."""
    command, name, context = typer.main.get_command(app), "treadle", None
    while True:
        context = command.make_context(name, list(words), parent=context)
        if not hasattr(command, "resolve_command"):
            return context.command_path.removeprefix("treadle "), context.params
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])


def check_settings(command, given):
    target = command.removeprefix("train ") if command.startswith("train ") else given.get("target")
    settings = given.get("settings") or given.get("arguments") or []
    example = ROOT / "examples" / "config" / str(given.get("file", target))
    if target in PACKS:
        checked_target(target, settings)
    elif example.suffix == ".yaml" and example.is_file():
        read_target(example, settings)


def written_by_pages():
    """Names of the files that blocks of the documents write or are, by their titles and first lines."""
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    return {*re.findall(r'title="([\w/]+\.\w+)"', text), *re.findall(r"^# (\w+\.py)$", text, flags=re.MULTILINE)}


# torch_geometric compiles functions with torch.jit.script when it is imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("line", list(shown()))
def test_a_command_that_is_shown_is_understood(line):
    understood(line)


@pytest.mark.parametrize(
    "line",
    [
        "treadle trian spectra", "treadle train spectra --outt runs/a", "treadle report", "make cake", "cargo build",
        "treadle export runs/a --to pt", "torchrun --nproc=2 -m treadle trian spectra", "python examples/no_such.py",
        "treadle verify text lora.rank=3", "treadle train digits.yaml model.widht=8",
    ],
)  # fmt: skip
def test_a_command_that_does_not_exist_is_noticed(line):
    usage_error = typer.BadParameter.__mro__[1]
    with pytest.raises((AssertionError, ConfigError, SystemExit, usage_error)):
        understood(line)
