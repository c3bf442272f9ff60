"""The commands ``treadle train PACK``, each built from its pack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console, show_report
from treadle.cli.pack_options import Device, Halving, Out, Resume, Seeds, Show, Trackers, Workers, settings_argument
from treadle.cli.population import PackMember, Several, as_texts, read_halving, refuse_idle, several, train_several
from treadle.cli.settings_command import SettingsCommand, warn_of_repeats
from treadle.errors import ConfigError
from treadle.runs.pack import Pack
from treadle.runs.packs import find_pack
from treadle.runs.tracking import tracked


def pack_command(name: str) -> Any:
    """Return the command that trains a pack; for a pack that fails to import, a command that prints the reason.

    Example:
        >>> pack_command("spectra").name
        'spectra'
    """
    try:
        pack = find_pack(name)
    except ConfigError as error:
        return _command(name, _refusing(error), summary="Cannot be loaded.", text=str(error))
    return _command(name, _training(pack), summary=pack.summary, text=pack.help or pack.summary)


def _command(name: str, function: Any, *, summary: str, text: str) -> Any:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, cls=SettingsCommand, short_help=summary, help=text)(function)
    return typer.main.get_command(app)


def _training(pack: Pack[Any, Any, Any]) -> Any:
    def train(
        settings: Any = None,
        out: Out = Path("runs", pack.name),
        device: Device = None,
        resume: Resume = True,
        trackers: Trackers = None,
        seeds: Seeds = None,
        workers: Workers = None,
        halving: Halving = None,
        show: Show = False,
    ) -> None:
        messages, given = message_console(), settings or []
        with errors_as_one_line(messages), log_to(messages):
            read_halving(halving)  # an invalid one is rejected before anything is read
            found = several(given, seeds, lambda key: dict(pack.shown(pack.read_settings([], device))).get(key))
            refuse_idle(found, workers=workers, halving=halving)
            warn_of_repeats(given if found is None else found.fixed)
            if found is not None and not show:
                make = PackMember(pack.name, tuple(found.fixed), device, resume, trackers)
                check_each(pack, found, device)
                train_several(
                    make, found, out=out, device=device, workers=workers, halving=halving, console=result_console()
                )
                return
            if show:
                first = given if found is None else [*found.fixed, *as_texts(found.members[0])]
                show_settings(pack, first, device, result_console())
                return
            with tracked(trackers, lambda: pack.values(pack.read_settings(given, device))) as tracking:
                tracking.final(
                    pack.train(given, out=out, device=device, resume=resume, messages=messages, show=show_report)
                )

    # The help of the argument shows settings of this pack.
    train.__annotations__["settings"] = Annotated[Optional[list[str]], settings_argument(pack.example)]  # noqa: UP045
    return train


def check_each(pack: Pack[Any, Any, Any], found: Several, device: str | None) -> None:
    """Parse the settings of every run, so that an invalid one is rejected before any starts.

    Raises:
        ConfigError: a setting of a run is invalid.
    """
    for member in found.members:
        pack.read_settings([*found.fixed, *as_texts(member)], device)


def _refusing(error: ConfigError) -> Any:
    def refuse(settings: Annotated[Optional[list[str]], settings_argument("none")] = None) -> None:  # noqa: UP045
        with errors_as_one_line(message_console()):
            raise error

    return refuse


def show_settings(pack: Pack[Any, Any, Any], settings: Sequence[str], device: str | None, console: Console) -> None:
    """Print every setting of a pack with its value, one ``key=value`` per line."""
    for key, value in pack.shown(pack.read_settings(settings, device)):
        console.print(f"{key}={value}", markup=False, soft_wrap=True)
