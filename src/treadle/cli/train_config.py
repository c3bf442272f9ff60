"""The command ``treadle train FILE``, for configuration files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand, TyperGroup

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console, show_loading
from treadle.cli.pack_options import Halving, Seeds, Trackers, Workers
from treadle.cli.settings_command import SettingsCommand
from treadle.runs.launch import TIMEOUT, launched, process_group
from treadle.runs.report import wrapped

NAME = "FILE"
_WITHOUT_WORK = {"--help", "--show-settings"}


class TrainGroup(TyperGroup):
    """Command group ``treadle train``: one command for each pack, and one for a file."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the packs and of the command for files."""
        from treadle.runs.packs import pack_names

        return [*pack_names(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command; for that of a pack, import the pack."""
        from treadle.runs.packs import pack_names

        if name not in pack_names():
            return super().get_command(ctx, name)
        from treadle.cli.train_pack import pack_command

        return pack_command(name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands without importing treadle's own packs; packs of other packages are imported."""
        from treadle.runs.packs import SUMMARIES

        listed = {
            name: TyperCommand(name, short_help=SUMMARIES[name]) if name in SUMMARIES else self.get_command(ctx, name)
            for name in self.list_commands(ctx)
        }
        TyperGroup(commands=listed).format_commands(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the command from the first argument."""
        from treadle.runs.target import is_named_like_config

        file = bool(args) and is_named_like_config(args[0])
        if args and not file and args[0] not in self.list_commands(ctx):
            # Candidates for the nearest name.
            self.commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        if args and not ctx.resilient_parsing and _WITHOUT_WORK.isdisjoint(args):
            show_loading(f"{args[0]} and its data")
        return super().resolve_command(ctx, [NAME, *args] if file else args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, under torchrun inside its process group, and record the run's sessions."""
        timeout, console = ctx.params["rank_timeout"], message_console()
        if timeout != TIMEOUT and not launched():
            sentence = f"warning: --rank-timeout {timeout:g} has no effect, as torchrun did not launch this process"
            console.print(wrapped(sentence, console), style="yellow", markup=False, soft_wrap=True)
        with errors_as_one_line(console), process_group(timeout):
            from treadle.engine.observers import observing
            from treadle.runs.record_hooks import SessionKeeper

            with observing(SessionKeeper()):
                return super().invoke(ctx)


def on_ranks(
    rank_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Under torchrun: how long a rank waits for another before it fails."),
    ] = TIMEOUT,
) -> None:
    """Declare the options shared by all commands below ``treadle train``; the group itself handles them."""


class FileCommand(SettingsCommand):
    """Command that takes a file, which its name in a usage line already stands for."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line after the command name."""
        return [piece for piece in super().collect_usage_pieces(ctx) if NAME not in piece]


def config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A configuration: .yaml, .yml or .py.")],
    settings: Annotated[
        Optional[list[str]],  # noqa: UP045  (typer on Python 3.10 reads this form)
        typer.Argument(
            metavar="KEY=VALUE",
            show_default=False,
            help="Settings, such as optimizer.lr=1e-3; +KEY=VALUE for new keys.",
        ),
    ] = None,
    trackers: Trackers = None,
    seeds: Seeds = None,
    workers: Workers = None,
    halving: Halving = None,
    show: Annotated[bool, typer.Option("--show-settings", help="Show every setting with its value, and exit.")] = False,
) -> None:
    """Train from a configuration file: your own trainer, or a run of a pack.

    The file has a section `trainer` with its `type` and arguments, a section for each part that the trainer takes, and
    `imports` for your own files or modules; or `face: spectra` (any pack) and settings of that command. A file can run
    code: only use files that you trust.

    A run that was stopped resumes when the same command is run again, if its trainer has a CheckpointingHook. Its
    workspace gets a run.json, from which `treadle replay` rebuilds it.

    \b
    Examples:
      treadle train digits.yaml
      treadle train digits.yaml optimizer.lr=1e-3 +trainer.device=cpu
      torchrun --nproc_per_node 4 -m treadle train digits.yaml
      treadle train digits.yaml --seeds 0..7 optimizer.lr=1e-3,3e-3
      treadle train digits.yaml --show-settings
    """
    messages = message_console()
    with errors_as_one_line(messages), log_to(messages, start_block=True):
        from treadle.cli.config_run import run_config, run_several, show_config

        if show:
            show_config(file, settings or [], seeds, result_console())
        elif not run_several(file, settings or [], seeds, workers=workers, halving=halving, trackers=trackers):
            run_config(file, settings or [], trackers=trackers, messages=messages)
