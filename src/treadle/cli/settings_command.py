"""Base of commands whose settings are ``KEY=VALUE``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from treadle.cli.console import message_console
from treadle.config.grammar import repeated
from treadle.runs.report import wrapped

_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # of click, or of typer's bundled copy


class SettingsCommand(TyperCommand):
    """Command with ``KEY=VALUE`` settings; a setting written as an option is rejected with the correct form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except _USAGE_ERROR as error:
            option = getattr(error, "option_name", None)
            if option is not None and not getattr(error, "possibilities", None):
                error.message += f"; settings are KEY=VALUE: {_as_setting(option, words)}"
            raise


def warn_of_repeats(settings: Sequence[str]) -> None:
    """Print a warning for each key of the settings that is set twice to different values."""
    for sentence in repeated(settings):
        console = message_console()
        console.print(wrapped(f"warning: {sentence}", console), style="yellow", markup=False, soft_wrap=True)


def _as_setting(option: str, words: list[str]) -> str:
    """Rewrite an option as a setting.

    Example:
        >>> _as_setting("--batch-size", ["--batch-size", "8"]), _as_setting("--lr", ["--lr=0.1"])
        ('batch_size=8', 'lr=0.1')
    """
    key = option.lstrip("-").replace("-", "_")
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return f"{key}={value if equals else 'VALUE' if following.startswith('-') else following}"
    return f"{key}=VALUE"
