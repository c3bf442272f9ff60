"""The README runs, and every command that a document shows is one that the program understands.

- A ``python`` block of README.md is run in a folder of its own, with the names that its text takes for granted (the
  data, and in the second block a model) from data that are shipped. What would take minutes is shortened by
  ``SHORTER``, of which each entry must be there.
- Each line of a shell block (``sh``, ``bash``) of any document is parsed by the real command line and not run, and the
  settings of a pack, or of a file that is in ``examples/config``, are checked. Lines of other programs name a target
  of the Makefile or a file that exists.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from torch.utils.data import DataLoader, TensorDataset

from treadle.cli.app import app
from treadle.errors import ConfigError
from treadle.runs.packs import PACKS
from treadle.runs.target import checked_target, read_target

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)
SHORTER = {
    "max_steps=600": "max_steps=4",
    "num_workers=2": "num_workers=0",
    "num_epochs=100": "num_epochs=2",
    "fit(epochs=100)": "fit(epochs=1)",
    "seq_len=256,": "seq_len=256, d_model=16, nhead=2, num_layers=1, dim_feedforward=16,",
}


# -- the README ---------------------------------------------------------------------------------------------------


def digits():
    """What the step face of the README is about: its data."""
    from sklearn.datasets import load_digits

    x, y = load_digits(n_class=10, return_X_y=True)
    return {"dataset": TensorDataset(torch.tensor(x[:128], dtype=torch.float32) / 16, torch.tensor(y[:128]))}


def meat():
    """What the ready parts of the README are about: spectra, their fat, and what is handed to the trainer."""
    from treadle.datasets import load_tecator

    table = load_tecator()
    data = TensorDataset(torch.from_numpy(table.spectra).float(), torch.from_numpy(table.composition[:, :1]).float())
    model = torch.nn.Linear(table.spectra.shape[1], 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(data, batch_size=64)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    return {
        "nn": torch.nn, "model": model, "optimizer": optimizer, "scheduler": scheduler,
        "train_loader": loader, "validation_loader": loader,
    }  # fmt: skip


def stars():
    """What the spectra of the README are about."""
    from treadle.datasets import load_spex

    batches = list(torch.from_numpy(load_spex().spectra[:8]).float().split(4))
    return {"train_loader": batches[:1], "val_loader": batches[1:]}


GIVEN = [digits, meat, stars]


def python_blocks():
    return [body for _, language, body in BLOCK.findall(README) if language == "python"]


def test_what_is_shortened_is_there_and_every_block_has_its_data():
    text = "".join(python_blocks())
    assert [entry for entry in SHORTER if text.count(entry) != 1] == []
    assert len(python_blocks()) == len(GIVEN)


@pytest.mark.parametrize("number", range(len(GIVEN)), ids=[given.__name__ for given in GIVEN])
def test_a_block_of_the_readme_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = python_blocks()[number]
    for entry, shorter in SHORTER.items():
        block = block.replace(entry, shorter)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__", **GIVEN[number]()})
    assert list(tmp_path.glob("runs/*")) != []  # each block names the folder of its run


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
