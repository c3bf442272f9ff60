"""The command ``treadle report``."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from treadle.cli.console import errors_as_one_line, message_console, result_console

if TYPE_CHECKING:
    from treadle.cli.runpage.records import RunRecords

_AFTERWARDS = 180.0  # seconds from the end of training to the end of its process, in which results are written


def report(
    targets: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, or a folder of runs.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045  (typer on Python 3.10 reads this form)
        typer.Option(
            help="The HTML file.  [default: report.html, in the run folder if there is one RUN, else here]",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Rewrite the page while a run trains; an open page reloads.")
    ] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="With --watch: time between updates.")] = 10.0,
) -> None:
    """Write a page about one run, or several side by side, as one HTML file that loads nothing else.

    Shows curves with zoom and smoothing over steps, epochs and time, skipped and retried steps, the best epoch,
    checkpoints with sizes, settings and their differences, environment, sessions, results, pictures and samples. Works
    for runs of any face, finished, stopped or running, and shows whatever they recorded. With --watch it ends once no
    run is training and the plots that a pack draws after training are written.

    \b
    Examples:
      treadle report runs/spectra
      treadle report runs/spectra runs/short --out compare.html
      treadle report runs/spectra --watch
    """
    messages = message_console()
    with errors_as_one_line(messages):
        from treadle.errors import ConfigError

        if not interval >= 1:
            raise ConfigError(f"--interval {interval:g}: must be at least 1 second")
        if out is not None and out.is_dir():
            raise ConfigError(f"--out {out}: is a folder; give a file, such as {out / 'report.html'}")
        path = out or (targets[0] if len(targets) == 1 else Path()) / "report.html"
        runs = _read(targets)
        if watch and _any_trains(runs):
            messages.print(f"{path} is written every {interval:g} s; Ctrl-C ends this", markup=False, soft_wrap=True)
            runs = _follow(targets, runs, path, interval)
            for run in runs:
                messages.print(f"{run.name}: {_status(run)}", markup=False, soft_wrap=True)
        _write(runs, path)
        result_console().print(str(path), markup=False, soft_wrap=True)


def _follow(targets: Sequence[Path], runs: list[RunRecords], path: Path, interval: float) -> list[RunRecords]:
    """Rewrite the page until no run is training or until Ctrl-C; return the records read last.

    A process whose training is finished may still write results and plots; it is followed until it ends, or for a
    limited time if it moves on to something else.
    """
    processes: set[int] = set()
    ended = time.monotonic()
    try:
        while (trains := _any_trains(runs)) or (time.monotonic() < ended + _AFTERWARDS and _goes_on(runs, processes)):
            if trains:
                processes, ended = _processes(runs), time.monotonic()
            _write(runs, path, reload=interval)
            time.sleep(interval)
            runs = _read(targets)
    except KeyboardInterrupt:
        return _read(targets)
    return runs


def _processes(runs: Sequence[RunRecords]) -> set[int]:
    """Return the processes on this machine that train in the run folders."""
    holders = [run.holder or {} for run in runs]
    return {int(one["pid"]) for one in holders if "pid" in one and one.get("host") == socket.gethostname()}


def _goes_on(runs: Sequence[RunRecords], processes: set[int]) -> bool:
    """Return whether one of the processes is still alive after its training finished."""
    from treadle.checkpoint.files import process_lives
    from treadle.cli.runpage.summary import FINISHED

    return any(_status(run) == FINISHED for run in runs) and any(map(process_lives, processes))


def _write(runs: Sequence[RunRecords], path: Path, *, reload: float | None = None) -> None:
    from treadle.checkpoint.store import write_text
    from treadle.cli.runpage.page import run_page
    from treadle.runs.folder import writable

    with _readable():
        text = run_page(runs, reload=reload)
    with writable(path):
        write_text(text, path)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    from treadle.errors import ConfigError

    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror})", argument="RUN") from error


def _any_trains(runs: Sequence[RunRecords]) -> bool:
    from treadle.cli.runpage.summary import RUNNING

    return any(_status(run) == RUNNING for run in runs)


def _status(run: RunRecords) -> str:
    from treadle.cli.runpage.summary import summarize

    return summarize(run).status


def _read(targets: Sequence[Path]) -> list[RunRecords]:
    """Read the runs in the folders, including those inside another run, such as its fine-tuning, each once."""
    from treadle.cli.runpage.files import runs_below
    from treadle.cli.runpage.records import read_run
    from treadle.cli.runpage.sweep import natural

    found = [path for target in targets for path in ([*runs_below(target)] or [target])]
    folders = sorted({path.resolve(): path for path in found}.values(), key=lambda path: natural(str(path)))
    with _readable():
        return [read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest unique endings of the paths; a run inside another one shows both."""
    parts = [folder.resolve().parts for folder in folders]
    depths = [len(one) - min(len(other) for other in parts if one[: len(other)] == other) for one in parts]
    length = 1
    while True:
        names = ["/".join(one[-(length + depth) :]) for one, depth in zip(parts, depths, strict=True)]
        if len(set(names)) == len(names):
            return names
        length += 1
