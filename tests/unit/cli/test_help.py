"""The help of every command, and the exit codes it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

import help_kit
from command_kit import treadle
from treadle.cli.app import EXIT_CODES, app

COMMANDS = [info.callback.__name__ for info in app.registered_commands]
DOCUMENTED = Path(__file__).parents[3] / "docs" / "command-line.md"


@pytest.mark.parametrize("command", [*COMMANDS, "train", "train spectra", "train text", "train graphs", "train astro"])
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


def parameters():
    """Every option and argument of every command, with the name of its command."""

    def below(command, name):
        yield from ((name, parameter) for parameter in command.params)
        for part, inner in help_kit.commands_of(command, None):
            yield from below(inner, f"{name} {part}")

    return list(below(typer.main.get_command(app), "treadle"))


def test_every_option_has_a_text_and_those_of_one_name_the_same_one():
    texts: dict[str, set[str]] = {}
    for name, parameter in parameters():
        assert parameter.help, f"{name}: {parameter.opts}"
        if parameter.opts[0] in ("--json", "--force", "--batch-size", "--trackers", "--show-settings"):
            texts.setdefault(parameter.opts[0], set()).add(parameter.help)
        if parameter.param_type_name == "argument":
            assert parameter.metavar, f"{name}: {parameter.name}"
            assert parameter.metavar == parameter.metavar.upper()
    assert set(map(len, texts.values())) == {1}


def test_numbers_out_of_range_and_folders_in_place_of_files_are_refused(tmp_path, capsys):
    assert treadle("predict", tmp_path, "--batch-size", 0) == 2
    assert "batch_size=0: must be a whole number >= 1" in capsys.readouterr().err
    assert treadle("report", tmp_path, "--out", tmp_path) == 2
    assert f"--out {tmp_path}: is a folder; give a file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "train"])
def test_the_list_of_commands_is_whole_on_a_narrow_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert treadle(*command.split(), "--help") == 0
    listed = capsys.readouterr().out.partition("\nCommands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) > 4
    assert [line for line in listed if not line.endswith(".")] == []
    assert [line for line in listed if line.endswith("...")] == []


def test_the_help_of_the_program_has_the_exit_codes_and_completion(capsys):
    assert treadle("--help") == 0
    text = capsys.readouterr().out
    assert "  3      replay or verify found a difference" in text
    assert "--install-completion" in text
    assert isinstance(app, typer.Typer)


HELPS = help_kit.helps()


def test_every_help_text_is_kept_and_no_other():
    assert {help_kit.file_of(name) for name in HELPS} == set(help_kit.FOLDER.glob("*.txt")), help_kit.REFRESH


@pytest.mark.parametrize("name", HELPS)
def test_a_help_text_is_the_one_that_is_kept(name):
    kept = help_kit.file_of(name).read_text(encoding="utf-8")
    assert help_kit.normalised(HELPS[name]) == help_kit.normalised(kept), f"if this is meant: {help_kit.REFRESH}"


@pytest.mark.parametrize("name", [name for name in HELPS if name != "treadle"])  # its completion options are not kept
@pytest.mark.parametrize("columns", ["60", "200"])
def test_a_terminal_shows_the_text_that_is_kept(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm-256color")
    words = ["train", "run.yaml"] if name.endswith(" FILE") else name.split()[1:]
    assert treadle(*words, "--help") == 0
    kept = help_kit.file_of(name).read_text(encoding="utf-8")
    assert help_kit.normalised(capsys.readouterr().out) == help_kit.normalised(kept)


def test_texts_that_differ_by_the_terminal_only_are_the_same():
    plain = "Options:\n  --out <path>  A folder, made by a well-known rule.\n"
    boxed = "╭─ \x1b[1mOptions:\x1b[0m ─╮\n│ --out PATH A folder, made by a well- │\n│ known rule. │\n╰─────╯"
    assert help_kit.normalised(plain) == help_kit.normalised(boxed)
    assert help_kit.normalised(plain) != help_kit.normalised(plain.replace("made", "found"))
