"""The help of every command, and the exit codes it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from command_kit import treadle
from treadle.cli.app import EXIT_CODES, app

COMMANDS = [info.callback.__name__ for info in app.registered_commands]
DOCUMENTED = Path(__file__).parents[3] / "docs" / "command-line.md"


@pytest.mark.parametrize("command", [*COMMANDS, "train spectra", "train text", "train graphs", "train astro"])
def test_every_command_has_examples_in_its_help(command, capsys):
    assert treadle(*command.split(), "--help") == 0
    text = capsys.readouterr().out
    assert "Examples:" in text
    assert f"treadle {command}" in text.split("Examples:")[1]


def test_the_page_of_the_command_line_names_every_command_and_the_same_exit_codes():
    page = DOCUMENTED.read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"`{name}" not in page] == []
    promised = dict(re.findall(r"^  (\S+)\s+(.+)$", EXIT_CODES, flags=re.MULTILINE))
    listed = dict(re.findall(r"^\| ([\d n+]+) \| (.+) \|$", page, flags=re.MULTILINE))
    assert {code.replace(" ", ""): text.replace("`", "") for code, text in listed.items()} == promised


def test_the_help_of_the_program_has_the_exit_codes_and_completion(capsys):
    assert treadle("--help") == 0
    text = capsys.readouterr().out
    assert "  3      replay or verify: not equal" in text
    assert "--install-completion" in text
    assert isinstance(app, typer.Typer)
