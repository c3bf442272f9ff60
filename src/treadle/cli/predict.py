"""The command ``treadle predict``."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.cli.evaluate import check_sizes, stored_run, stored_runs
from treadle.cli.pack_options import AsJson, BatchSize, Device
from treadle.errors import ConfigError
from treadle.runs.folder import run_folder_of

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.cli.evaluate import StoredRun
    from treadle.runs.results import Predictions

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        help="A run folder, or one of its checkpoints. With --smiles also several, or a folder of runs.",
    ),
]
SmilesColumn = Annotated[
    Optional[str],  # noqa: UP045  (typer on Python 3.10 reads this form)
    typer.Option(metavar="NAME", help="The column of SMILES.  [default: found by its name]", show_default=False),
]
Split = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="train, val or test; not for text.  [default: test]", show_default=False),
]
Out = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        help="A .npz or .csv file.  [default: predictions_SPLIT.npz in the run folder; for text continuations.csv, "
        "with --smiles predictions_smiles.csv]",
        show_default=False,
    ),
]
Prompt = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(help="Text: a prompt to continue; may be given several times.", show_default=False),
]
Count = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Text: continuations per prompt.", min=1, show_default=False),
]
NumTokens = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Text: maximum number of tokens to add.", min=1, show_default=False),
]
Seed = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Text: seed of the sampling.", show_default=False),
]
Smiles = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        metavar="FILE",
        help="Graphs: molecules to predict, as a .csv with a column of SMILES or a file with one SMILES per line.",
        show_default=False,
    ),
]
Member = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option(
        help="Graphs, with --smiles: another RUN; may be given several times.",
        show_default=False,
    ),
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Text: always take the most likely token.")]


def predict(
    run: Runs,
    split: Split = None,
    out: Out = None,
    batch_size: BatchSize = None,
    prompt: Prompt = None,
    count: Count = None,
    num_tokens: NumTokens = None,
    seed: Seed = None,
    greedy: Greedy = False,
    smiles: Smiles = None,
    smiles_column: SmilesColumn = None,
    member: Member = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Predict a split with the best weights of a run, and write the predictions next to the true values, if known.

    Graphs: predictions and targets. Spectra: the latent of each spectrum and its row in the data set. Astro: each
    prediction of one modality from others. A run of a configuration file: what the trainer's predict_step(input)
    returns for the batches of its build_predict_data_loader(); --split does not apply there.

    Text: continuations of prompts, sampled with the settings of the run unless an option says otherwise, by the model
    before its fine-tuning, or after it if RUN is the run's folder lora.

    With --smiles, a run on molecules predicts those of a file. The output has the columns of the file and the
    prediction of each target, or its probability if the targets are labels. For several runs that differ by seed, this
    is their mean, followed by the standard deviation, which is calibrated on their validation molecules. A SMILES that
    cannot be read keeps its row, without prediction. The training data is not needed.

    \b
    Examples:
      treadle predict runs/graphs
      treadle predict runs/seed0 runs/seed1 runs/seed2 --smiles molecules.csv --out predictions.csv
      treadle predict runs/spectra --split val --out latents.csv
      treadle predict runs/text --prompt 'The "with" statement' --prompt 'A list' --greedy
      treadle predict runs/digits --device cpu --json
    """
    messages, results = message_console(), result_console()
    with errors_as_one_line(messages), log_to(messages):
        if out is not None and out.suffix not in (".npz", ".csv"):
            raise ConfigError(f"--out {out}: must end in .npz or .csv")
        check_sizes(batch_size)
        given: dict[str, Any] = {
            "split": split, "prompt": prompt, "count": count, "num_tokens": num_tokens, "seed": seed, "greedy": greedy,
        }  # fmt: skip
        runs: list[Path] = [*run, *(member or ())]
        shown: dict[str, Any] = {"as_json": as_json, "results": results}
        if smiles is not None:
            _refuse_with_smiles(given)
            _predict_smiles(runs, smiles, smiles_column, out, batch_size=batch_size, device=device, **shown)
        else:
            stored = stored_run(_the_only(runs, smiles_column))
            _predict_split(stored, {**given, "batch_size": batch_size}, out, device=device, messages=messages, **shown)


def _predict_split(
    stored: StoredRun,
    given: Mapping[str, Any],
    out: Path | None,
    *,
    device: str | None,
    as_json: bool,
    messages: Console,
    results: Console,
) -> None:
    """Write the predictions of a run for a split or for prompts."""
    _refuse_idle(given, stored)
    chosen = stored.split(given["split"])
    options = {name: value for name, value in given.items() if name in stored.pack.takes and name != "split"}
    with stored.pack.open(stored.path, stored.tree, device=device, messages=messages) as opened:
        predicted = stored.pack.predict(opened, chosen, **{"batch_size": None, **options})
    path = run_folder_of(stored.path) / stored.pack.predictions_file(chosen) if out is None else out
    target = write_arrays(predicted.arrays, path)
    if as_json:
        about = {"split": chosen} if "split" in stored.pack.takes else {}
        found = {"path": str(target), "checkpoint": str(stored.path), **about, **_as_values(predicted)}
        results.print(json.dumps(found), markup=False, soft_wrap=True)
    else:
        _print(predicted, target, results)


def _refuse_idle(given: Mapping[str, Any], stored: StoredRun) -> None:
    """Raise ConfigError for an option that has no effect on the run."""
    for name, value in given.items():
        if name not in stored.pack.takes and value is not None and value is not False and value != []:  # 0 is a seed
            raise ConfigError(
                f"--{name.replace('_', '-')} {value}: a run of the face {stored.pack.name} {stored.pack.without}"
            )


def _the_only(runs: Sequence[Path], smiles_column: str | None) -> Path:
    """Return the run of a command without ``--smiles``, or raise ConfigError for what only ``--smiles`` allows."""
    if len(runs) > 1 or smiles_column is not None:
        idle = f"{len(runs)} runs" if len(runs) > 1 else f"--smiles-column {smiles_column}"
        raise ConfigError(f"{idle}: only allowed with --smiles FILE")
    return runs[0]


def _refuse_with_smiles(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is not None and value is not False and value != []:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: does not apply with --smiles")


def _predict_smiles(
    runs: Sequence[Path],
    file: Path,
    column: str | None,
    out: Path | None,
    *,
    batch_size: int | None,
    device: str | None,
    as_json: bool,
    results: Console,
) -> None:
    """Write the predictions of an ensemble of runs for the molecules of a file."""
    stored = [found for run in runs for found in stored_runs(run)]
    for each in stored:
        if each.pack is not stored[0].pack or "smiles" not in each.pack.takes:
            raise ConfigError(f"--smiles {file}: {each.path} is of the face {each.pack.name}; give runs of graphs")
    predicted = stored[0].pack.predict_smiles(
        [(each.path, each.tree) for each in stored], file, column=column, batch_size=batch_size, device=device
    )
    folder = runs[0] if runs[0].is_dir() else run_folder_of(runs[0])
    target = write_arrays(predicted.arrays, folder / "predictions_smiles.csv" if out is None else out, nan="")
    if as_json:
        checkpoints = [str(each.path) for each in stored]
        found = {"path": str(target), "checkpoints": checkpoints, **_as_values(predicted)}
        results.print(json.dumps(found), markup=False, soft_wrap=True)
    else:
        _print(predicted, target, results)


def _as_values(predicted: Predictions) -> dict[str, Any]:
    shapes = {name: list(array.shape) for name, array in predicted.arrays.items()}
    return {"arrays": shapes, **({"texts": list(predicted.texts)} if predicted.texts else {})}


def _print(predicted: Predictions, target: Path, results: Console) -> None:
    for number, record in enumerate(predicted.texts, start=1):
        text = list(record.values())[-1]
        results.print(f"===== {number} of {len(predicted.texts)} =====\n\n{text}\n", markup=False, soft_wrap=True)
    for name, array in predicted.arrays.items():
        shape = " x ".join(f"{size:,}" for size in array.shape)
        results.print(f"{name:<24}{shape}", markup=False, soft_wrap=True)
    results.print(str(target), markup=False, soft_wrap=True)


def write_arrays(arrays: Mapping[str, Any], path: Path, *, nan: str = "nan") -> Path:
    """Write named arrays atomically, as .npz or as the columns of a .csv.

    Args:
        arrays: of equal length for a .csv; an array with several columns becomes ``name_0``, ``name_1``, ...
        path: its suffix selects the format.
        nan: how NaN is written in a .csv.

    Raises:
        ConfigError: the arrays differ in length and the file is a .csv.
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
        raise ConfigError(f"--out {path}: the arrays differ in length ({lengths} rows); use .npz")
    columns: dict[str, Any] = {}
    for name, array in arrays.items():
        wide = array.reshape(len(array), -1)
        columns.update({name if array.ndim == 1 else f"{name}_{k}": wide[:, k] for k in range(wide.shape[1])})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    shown = ([_cell(value, nan) for value in column.tolist()] for column in columns.values())
    writer.writerows(zip(*shown, strict=True))
    return write_text(text.getvalue(), path)


def _cell(value: Any, nan: str) -> Any:
    return nan if isinstance(value, float) and math.isnan(value) else value
