"""The page on configuration files: its files are those of the example, and every command on it runs."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from processes import python
from treadle.builder import REGISTRY
from treadle.cli.main import main
from treadle.config import apply_overrides, load_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "config"
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def named(name):
    return next(block for block in blocks("python") + blocks("yaml") if block.startswith(f"# {name}\n"))


COMMANDS = [line.split(" #")[0].split() for block in blocks("sh") for line in block.splitlines()]


def run(folder, command):
    program = {"treadle": ["-m", "treadle"], "python": []}[command[0]]
    done = python(*program, *command[1:], cwd=folder)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
    return done.stdout, done.stderr


@pytest.fixture
def treadle(folder, monkeypatch, capsys):
    """Run a command in this process as in a new one that has not imported ``train.py``."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))

    def give(command):
        with monkeypatch.context() as patch:
            patch.setattr(REGISTRY, "_objects", dict(REGISTRY._objects))
            patch.delitem(sys.modules, "train", raising=False)
            capsys.readouterr()
            with pytest.raises(SystemExit) as left:
                main(command[1:])
            sys.modules.pop("train", None)
        said = capsys.readouterr()
        assert left.value.code == 0, said.err
        return said.out

    return give


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("project")
    for name in ("wide.py", "by_hand.py", "short.yaml"):
        (made / name).write_text(named(name))
    for path in EXAMPLE.iterdir():
        if path.is_file():
            (made / path.name).write_text(path.read_text())
    return made


def test_the_files_of_the_page_are_those_of_the_example():
    assert blocks("yaml")[0] == (EXAMPLE / "digits.yaml").read_text()
    assert (EXAMPLE / "train.py").read_text().endswith(blocks("python")[0])


def test_the_commands_train_verify_and_replay_the_digits(folder, treadle, monkeypatch):
    assert [command[1] for command in COMMANDS[:4]] == ["train", "train", "verify", "replay"]
    _, said = run(folder, COMMANDS[0])
    assert float(re.search(r"Step 300/300: .* accuracy ([\d.]+)", said).group(1)) > 0.95
    assert eval(treadle(COMMANDS[1]))["trainer"]["max_steps"] == 300
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert treadle(COMMANDS[2]).splitlines()[-1].startswith("EXACT: 8 steps")
    assert "equal to the bit" in treadle(COMMANDS[3])


def test_the_other_commands_do_what_the_page_says(folder, treadle):
    treadle(COMMANDS[4])
    tree = torch.load(folder / "runs/wide/checkpoints/checkpoint_step_20.pt", weights_only=True)
    assert tree["model"]["0.weight"].shape == (256, 64)
    assert run(folder, COMMANDS[5])[0] == "10\n"
    shown = treadle(COMMANDS[6]).splitlines()
    assert {"epochs=1", "model.d_model=16", "optimizer.lr=0.001"} <= set(shown)
    assert len(COMMANDS) == 7


def test_a_line_of_settings_on_the_page_is_understood():
    cfg = load_config(EXAMPLE / "digits.yaml")
    words = re.findall(r"`(\S+=\S*)`", PAGE.split("Settings are")[1].split("The grammar of values")[0])
    changes = [word for word in words if word not in ("key=value", "+key=value")]
    assert len(changes) == 4
    apply_overrides(cfg, changes)
    assert cfg["hooks"][0]["interval"] == 10
    assert cfg["optimizer"] == {"type": "torch.optim.AdamW", "weight_decay": 0.1}


@pytest.mark.parametrize("path", sorted(EXAMPLE.glob("*")), ids=lambda path: path.name)
def test_a_file_of_the_example_is_short(path):
    assert not path.is_file() or len(path.read_text(encoding="utf-8").splitlines()) < 80
