"""The command ``treadle predict``."""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.cli.evaluate import AsJson, BatchSize, Run, Split, checkpoint_of, run_folder_of
from treadle.cli.pack_options import Device
from treadle.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]

_OF_FACES = {
    "graphs": "graphs_evaluate:predict_graphs",
    "spectra": "spectra_stored:predict_spectra",
    "astro": "astro_predict:predict_astro",
    "mini": "config_stored:predict_config",
}
"""Face of a checkpoint -> who predicts, a module of this package and a function."""
_INSTEAD = {
    "hf": "load RUN/pretrained with from_pretrained, or draw text: treadle train text samples.prompt=...",
    "functional": "call predict() of the treadle.Trainer that made it",
}


def predict(
    run: Run,
    split: Split = "test",
    out: Annotated[
        Optional[Path],  # noqa: UP045  (typer on Python 3.10 reads this form)
        typer.Option(help="A file .npz or .csv.  [default: predictions_SPLIT.npz in the run folder]"),
    ] = None,
    batch_size: BatchSize = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Write what the best weights of a run say about a split, beside what is true where that is known.

    Graphs: predictions and targets. Spectra: the latent of each spectrum and the row of the data set. Astro: each
    question of one modality from others. A run of a configuration file: what the trainer's predict_step(input) returns
    for the batches of its build_predict_data_loader(); --split has no meaning there.

    \b
    Examples:
      treadle predict runs/graphs
      treadle predict runs/spectra --split val --out latents.csv
      treadle predict runs/digits --device cpu --json
    """
    messages, results = message_console(), result_console()
    with errors_as_one_line(messages), log_to(messages):
        _check_suffix(out)
        path, tree, face = checkpoint_of(run)
        arrays = _function(face, run, path)(
            path, tree, split=split, batch_size=batch_size, device=device, messages=messages
        )
        target = run_folder_of(path) / f"predictions_{split}.npz" if out is None else out
        write_arrays(arrays, target)
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        if as_json:
            found = {"path": str(target), "checkpoint": str(path), "split": split, "arrays": shapes}
            results.print(json.dumps(found), markup=False, soft_wrap=True)
            return
        for name, shape in shapes.items():
            results.print(f"{name:<24}{' x '.join(f'{size:,}' for size in shape)}", markup=False, soft_wrap=True)
        results.print(str(target), markup=False, soft_wrap=True)


def _function(face: str, run: Path, path: Path) -> Callable[..., Arrays]:
    if face not in _OF_FACES:
        instead = _INSTEAD.get(face, f"known: {', '.join(_OF_FACES)}")
        raise ConfigError(
            f"RUN={str(run)!r}: {path.name} is of the face {face}, which has no predictions here; {instead}"
        )
    module, function = _OF_FACES[face].split(":")
    found: Callable[..., Arrays] = getattr(importlib.import_module(f"treadle.cli.{module}"), function)
    return found


def _check_suffix(out: Path | None) -> None:
    if out is not None and out.suffix not in (".npz", ".csv"):
        raise ConfigError(f"--out {out}: must end in .npz or .csv")


def write_arrays(arrays: Mapping[str, Any], path: Path) -> Path:
    """Writes named arrays as .npz, or as the columns of a .csv, the whole old file or the whole new one.

    Args:
        arrays: for a .csv equally long; what has several columns becomes ``name_0``, ``name_1``, ...
        path: its suffix says which.

    Raises:
        ConfigError: the arrays are of several lengths and the file is a .csv.
        CheckpointError: the file cannot be written.

    Example:
        >>> import tempfile, numpy as np
        >>> write_arrays({"y": np.zeros((2, 2))}, Path(tempfile.mkdtemp(), "y.csv")).read_text()
        'y_0,y_1\\n0.0,0.0\\n0.0,0.0\\n'
    """
    import numpy as np

    from treadle.checkpoint.store import write_bytes, write_text

    if path.suffix == ".npz":
        return write_bytes(lambda file: np.savez(file, **arrays), path)
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"--out {path}: the arrays have {lengths} rows, which are no table; use .npz")
    columns: dict[str, Any] = {}
    for name, array in arrays.items():
        wide = array.reshape(len(array), -1)
        columns.update({name if array.ndim == 1 else f"{name}_{k}": wide[:, k] for k in range(wide.shape[1])})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    return write_text(text.getvalue(), path)
