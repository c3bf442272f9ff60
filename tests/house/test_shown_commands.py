"""The README runs, and every command that a document shows is one that the program understands.

- A ``python`` block of README.md is run exactly as it is pasted, by a process and in a folder that have nothing else;
  the first one in a pipe and on a terminal, where it is stopped by Ctrl-C and resumed to the bit.
- Each line of a shell block (``sh``, ``bash``) of any document is parsed by the real command line and not run, and the
  settings of a pack, or of a file that is in ``examples/config``, are checked. Lines of other programs name a target
  of the Makefile or a file that exists.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import signal
import sys
from pathlib import Path

import pytest
import typer

from helpers import differences
from processes import Forked, python
from treadle.checkpoint.store import load_checkpoint
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


@pytest.fixture
def paste(tmp_path, monkeypatch):
    """Write a block into a folder that has nothing else, and return what runs Python there."""
    monkeypatch.setenv("TREADLE_PROGRESS", "")

    def paste(number):
        (tmp_path / "pasted.py").write_text(python_blocks()[number], encoding="utf-8")

        def run(*words):
            done = python(*words, cwd=tmp_path, env={**os.environ}, timeout=600)
            assert done.returncode == 0, done.stderr
            return done.stderr.splitlines()

        return run

    return paste


@pytest.mark.parametrize("number", range(len(python_blocks())))
def test_a_block_of_the_readme_runs_as_it_is_pasted_shows_itself_and_makes_a_page(number, paste, tmp_path):
    run = paste(number)
    shown = run("pasted.py")
    assert shown[0].startswith("training starts on ")
    assert shown[-1].startswith("done at step 600")
    assert run("pasted.py")[-1].startswith("nothing to do")
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"runs/{folder.name}" in README.replace(python_blocks()[number], "")  # the commands below name it
    run("-m", "treadle", "report", str(folder))
    page = (folder / "report.html").read_text(encoding="utf-8")
    for chart in ("Loss", "Gradient norm", "Learning rate", "optimizer.class", "finished"):
        assert chart in page
    if number == 1:
        run("-m", "treadle", "replay", str(folder), "--step", "120", "--script", "pasted.py")
    if number == 0:
        folder.rename(tmp_path / "straight")
        _stop_and_resume_on_a_terminal(tmp_path)
        for name in ("best_model.pt", "checkpoint_epoch_100.pt"):
            straight, stopped = (load_checkpoint(where / name) for where in (tmp_path / "straight", folder))
            for part in ("model", "optimizer", "history"):
                assert differences(straight[part], stopped[part]) == []


def _stop_and_resume_on_a_terminal(cwd):
    """Stop the pasted block by Ctrl-C in the middle and give the same command again."""
    shown, code = _on_a_terminal(cwd, interrupt_at=40)
    assert code == 128 + signal.SIGINT
    assert shown.startswith("training starts on cpu, to epoch 100")
    assert re.search(r"\r\S.*epoch \d+/100 step \d+/600 loss \S+ lr 0.01", shown)  # the live line
    saved = re.search(r"saved (runs/fat/\S+) at step (\d+), epoch \d+; run again with resume_from='auto'", shown)
    assert 40 <= int(saved[2]) < 600
    assert "Traceback" not in shown
    shown, code = _on_a_terminal(cwd)
    assert code == 0
    assert shown.startswith(f"training resumes at step {saved[2]}, epoch ")
    assert saved[1] in shown.splitlines()[0]
    assert re.search(r"done at step 600, epoch 100; .*; best eval_loss \S+ at epoch \d+", shown)


def _on_a_terminal(cwd, interrupt_at=None):
    """Return the output of the pasted block on a terminal of 100 columns, and its exit code; a step sends SIGINT."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    streams = {"stdin": slave, "stdout": slave, "stderr": slave}
    shown = b""
    with Forked([sys.executable, "pasted.py"], cwd=cwd, env=environment, **streams) as process:
        os.close(slave)
        while True:
            ready, _, _ = select.select([master], [], [], 120)
            try:
                part = os.read(master, 1 << 16) if ready else b""
            except OSError:  # nobody has the other end any more
                part = b""
            if not part:
                break
            shown += part
            steps = [int(step) for step in re.findall(rb"step (\d+)/600", shown)]
            if interrupt_at is not None and steps and steps[-1] >= interrupt_at:
                process.send_signal(signal.SIGINT)
                interrupt_at = None
        os.close(master)
    return re.sub(r"\x1b\[[\d?;]*\w", "", shown.decode()), process.returncode


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
    """Parse a line as the program that it starts would, without running it."""
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
    """Return the name of a command of treadle and what its arguments mean, as the command would get them."""
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
