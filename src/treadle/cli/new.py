"""The command ``treadle new``."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Optional

import typer

from treadle.cli.console import errors_as_one_line, message_console, result_console
from treadle.errors import ConfigError, nearest

FACES = {
    "mini": "a trainer class of your own",
    "functional": "ready parts: model, optimizer, loss function",
    "spectra": "a masked autoencoder on spectra",
    "graphs": "a graph transformer",
    "astro": "tokens of pictures, spectra and catalogues",
    "text": "a small language model",
    "config": "a trainer class, and everything else in a configuration",
}
_SCRIPT, _CONFIG = "train.py", "run.yaml"


def new(
    face: Annotated[str, typer.Argument(metavar="FACE", help=f"{', '.join(FACES)}.")],
    folder: Annotated[
        Optional[Path],  # noqa: UP045  (typer on Python 3.10 reads this form)
        typer.Argument(metavar="FOLDER", help="Where to write.  [default: a folder named after the face]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write a small commented script to start from, train.py, and its configuration, run.yaml, if the face has one.

    The script runs as it is, on data that comes with treadle or its extras; replace it with your own.

    \b
    Examples:
      treadle new mini
      treadle new config my-project
      treadle new graphs . --force
    """
    with errors_as_one_line(message_console()):
        target = Path(face) if folder is None else folder
        written = write_start(face, target, force=force)
        results = result_console()
        for path in written:
            results.print(str(path), markup=False, soft_wrap=True)
        first = f"treadle train {_CONFIG}" if face == "config" else f"python {_SCRIPT}"
        message_console().print(f"{FACES[face]}; start with: cd {target} && {first}", markup=False, soft_wrap=True)


def write_start(face: str, folder: Path, *, force: bool = False) -> list[Path]:
    """Write the files of a face into a folder.

    Args:
        face: one of :data:`FACES`.
        folder: created if missing.
        force: replace existing files.

    Returns:
        The files that were written.

    Raises:
        ConfigError: there is no such face, a file exists already, or the folder cannot be written.

    Example:
        >>> import tempfile
        >>> [path.name for path in write_start("config", Path(tempfile.mkdtemp(), "mine"))]
        ['train.py', 'run.yaml']
    """
    if face not in FACES:
        raise ConfigError(f"there is no such face; {nearest(face, FACES)}", argument="FACE", value=face)
    templates = resources.files("treadle.cli") / "templates"
    found = {folder / _SCRIPT: templates / f"{face}.py.txt", folder / _CONFIG: templates / f"{face}.yaml"}
    texts = {path: source.read_text(encoding="utf-8") for path, source in found.items() if source.is_file()}
    there = [str(path) for path in texts if path.exists()]
    if there and not force:
        raise ConfigError(
            f"would overwrite {' and '.join(there)}; choose another folder, or pass --force",
            argument="FOLDER",
            value=str(folder),
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot be written ({error.strerror}); choose another", argument="FOLDER", value=str(folder)
        ) from error
    return list(texts)
