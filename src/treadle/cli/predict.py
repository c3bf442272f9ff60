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
from treadle.cli.evaluate import Run, check_sizes, checkpoint_of, chosen_split
from treadle.cli.pack_options import AsJson, BatchSize, Device
from treadle.errors import ConfigError
from treadle.runs.folder import run_folder_of

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]

_OF_FACES = {
    "graphs": "graphs.stored:predict_graphs",
    "spectra": "spectra.stored:predict_spectra",
    "astro": "astro.stored:predict_astro",
    "text": "text.stored:predict_text",
    "mini": "cli.config_stored:predict_config",
}
"""Face of a checkpoint -> who predicts, a module of this package and a function."""
_INSTEAD = {"functional": "call predict() of the treadle.Trainer that made it"}

Split = Annotated[
    Optional[str],  # noqa: UP045  (typer on Python 3.10 reads this form)
    typer.Option(help="train, val or test; not of text.  [default: test]", show_default=False),
]
Out = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        help="A file .npz or .csv.  [default: predictions_SPLIT.npz in the run folder; of text continuations.csv]",
        show_default=False,
    ),
]
Prompt = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(help="Of text: what a text begins with; may be given several times.", show_default=False),
]
Count = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Of text: texts for each prompt.", min=1, show_default=False),
]
NumTokens = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Of text: at most so many tokens are added.", min=1, show_default=False),
]
Seed = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Of text: seeds the draws.", show_default=False),
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Of text: take the likeliest token each time.")]


def predict(
    run: Run,
    split: Split = None,
    out: Out = None,
    batch_size: BatchSize = None,
    prompt: Prompt = None,
    count: Count = None,
    num_tokens: NumTokens = None,
    seed: Seed = None,
    greedy: Greedy = False,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Write what the best weights of a run say about a split, beside what is true where that is known.

    Graphs: predictions and targets. Spectra: the latent of each spectrum and the row of the data set. Astro: each
    question of one modality from others. A run of a configuration file: what the trainer's predict_step(input) returns
    for the batches of its build_predict_data_loader(); --split has no meaning there.

    Text: continuations of prompts, drawn as the run drew its samples but for the options given, by the model before its
    fine-tuning, or after it where RUN is the folder lora of the run.

    \b
    Examples:
      treadle predict runs/graphs
      treadle predict runs/spectra --split val --out latents.csv
      treadle predict runs/text --prompt 'The "with" statement' --prompt 'A list' --greedy
      treadle predict runs/digits --device cpu --json
    """
    messages, results = message_console(), result_console()
    with errors_as_one_line(messages), log_to(messages):
        _check_suffix(out)
        check_sizes(batch_size)
        path, tree, face = checkpoint_of(run)
        function = _function(face, run, path)
        drawing = {"prompt": prompt, "count": count, "num_tokens": num_tokens, "seed": seed, "greedy": greedy}
        options, name = _options(face, path, {"split": split, "batch_size": batch_size}, drawing)
        arrays = function(path, tree, **options, device=device, messages=messages)
        target = write_arrays(arrays, run_folder_of(path) / name if out is None else out)
        found = {"path": str(target), "checkpoint": str(path), **{k: v for k, v in options.items() if k == "split"}}
        if as_json:
            results.print(json.dumps(found | _as_values(face, arrays)), markup=False, soft_wrap=True)
        else:
            _print(face, arrays, target, results)


def _options(face: str, path: Path, rows: dict[str, Any], drawing: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the options that a face has, of a split or of drawing texts, and the name of the file to write.

    Raises:
        ConfigError: one of the others is given, or there is no such split.
    """
    own, others = (drawing, rows) if face == "text" else (rows, drawing)
    for name, value in others.items():
        if value is not None and value is not False and value != []:  # 0 is a seed
            whose = "has no rows of a split; give --prompt" if face == "text" else "draws no texts"
            raise ConfigError(f"--{name.replace('_', '-')} {value}: a run of the face {face} {whose}")
    if face == "text":
        return own, "continuations.csv"
    split = chosen_split(rows["split"], face, path)
    return rows | {"split": split}, f"predictions_{split}.npz"


def _as_values(face: str, arrays: Arrays) -> dict[str, Any]:
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    texts = [{"prompt": str(prompt), "text": str(text)} for prompt, text in _texts(face, arrays)]
    return {"arrays": shapes, **({"texts": texts} if face == "text" else {})}


def _texts(face: str, arrays: Arrays) -> list[tuple[Any, Any]]:
    return list(zip(arrays["prompt"], arrays["text"], strict=True)) if face == "text" else []


def _print(face: str, arrays: Arrays, target: Path, results: Console) -> None:
    for number, (_, text) in enumerate(_texts(face, arrays), start=1):
        results.print(f"===== {number} of {len(arrays['text'])} =====\n\n{text}\n", markup=False, soft_wrap=True)
    for name, array in arrays.items():
        shape = " x ".join(f"{size:,}" for size in array.shape)
        results.print(f"{name:<24}{shape}", markup=False, soft_wrap=True)
    results.print(str(target), markup=False, soft_wrap=True)


def _function(face: str, run: Path, path: Path) -> Callable[..., Arrays]:
    if face not in _OF_FACES:
        instead = _INSTEAD.get(face, f"known: {', '.join(_OF_FACES)}")
        raise ConfigError(
            f"{path.name} is of the face {face}, which has no predictions here; {instead}",
            argument="RUN",
            value=str(run),
        )
    module, function = _OF_FACES[face].split(":")
    found: Callable[..., Arrays] = getattr(importlib.import_module(f"treadle.{module}"), function)
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
