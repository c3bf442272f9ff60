"""Help of every command of ``treadle``, rendered 100 columns wide, without colour.

python tests/help_kit.py     # writes tests/unit/cli/help/*.txt
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from treadle.cli.app import app

FOLDER = Path(__file__).parent / "unit" / "cli" / "help"
REFRESH = "python tests/help_kit.py"
WIDTH = 100
OF_TYPER = ("install_completion", "show_completion")  # options whose texts depend on typer and the shell


def helps() -> dict[str, str]:
    """Return the help of each command by its full name, such as ``treadle train spectra``."""
    return dict(_below(typer.main.get_command(app), "treadle", None))


def _below(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    command.params = [parameter for parameter in command.params if parameter.name not in OF_TYPER]
    words = {"info_name": name.rpartition(" ")[2], "parent": parent}
    context = command.context_class(command, terminal_width=WIDTH, max_content_width=WIDTH, **words)
    lines = [line.rstrip() for line in command.get_help(context).splitlines()]
    yield name, "\n".join(lines).strip() + "\n"
    for part, inner in commands_of(command, context):
        yield from _below(inner, f"{name} {part}", context)


def commands_of(command: Any, context: Any) -> list[tuple[str, Any]]:
    """Return the commands of a group by name; empty for a command."""
    names = sorted(command.list_commands(context)) if hasattr(command, "list_commands") else []
    return [(name, command.get_command(context, name)) for name in names]


def file_of(name: str) -> Path:
    """Return the file that holds the help of a command."""
    return FOLDER / (re.sub(r"\W+", "-", name).strip("-").lower() + ".txt")


def normalised(text: str) -> list[str]:
    """Return the words of a help text, independent of width, terminal and versions of typer and rich.

    Removed are colours, frames, line breaks (also at a hyphen inside a word), type names and braces of arguments.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub("[\u2500-\u257f]", " ", text)
    text = re.sub(r"(?<=\w)-\s*\n\s*(?=\w)", "-", text)
    return re.sub(r"<[a-z]+(\[\w+\]| range)?>|\b(TEXT|PATH|(INTEGER|FLOAT)( RANGE)?)\b|[{}]", " ", text).split()


def main() -> None:
    """Write the help texts, and remove those of deleted commands."""
    texts = {file_of(name): text for name, text in helps().items()}
    FOLDER.mkdir(exist_ok=True)
    for path in set(FOLDER.glob("*.txt")) - set(texts):
        path.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
