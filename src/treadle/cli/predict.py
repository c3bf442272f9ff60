"""The command ``treadle predict``."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.cli.evaluate import Run, check_sizes, stored_run
from treadle.cli.pack_options import AsJson, BatchSize, Device
from treadle.errors import ConfigError
from treadle.runs.folder import run_folder_of

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.cli.evaluate import StoredRun
    from treadle.runs.results import Predictions

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
Smiles = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        help="Of graphs: molecules to predict, a .csv with a column smiles or a file with one SMILES a line.",
        show_default=False,
    ),
]
Member = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option(
        help="Of graphs, with --smiles: a further run of the task, such as another seed; the answer is the mean of all "
        "runs, beside their deviation. May be given several times.",
        show_default=False,
    ),
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
    smiles: Smiles = None,
    member: Member = None,
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
      treadle predict runs/a --member runs/b --member runs/c --smiles molecules.csv --out predicted.csv
      treadle predict runs/spectra --split val --out latents.csv
      treadle predict runs/text --prompt 'The "with" statement' --prompt 'A list' --greedy
      treadle predict runs/digits --device cpu --json
    """
    messages, results = message_console(), result_console()
    with errors_as_one_line(messages), log_to(messages):
        _check_suffix(out)
        check_sizes(batch_size)
        stored = stored_run(run)
        given: dict[str, Any] = {
            "split": split, "batch_size": batch_size, "prompt": prompt, "count": count, "num_tokens": num_tokens,
            "seed": seed, "greedy": greedy, "smiles": smiles, "member": member,
        }  # fmt: skip
        _refuse_idle(given, stored)
        chosen = stored.split(split)
        options = {name: value for name, value in given.items() if name in stored.pack.takes and name != "split"}
        if smiles is not None or member:
            options |= _molecules(stored, smiles, member or ())
            chosen = chosen if smiles is None else smiles.stem
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


def _molecules(stored: StoredRun, smiles: Path | None, members: Sequence[Path]) -> dict[str, Any]:
    """Returns the molecules to predict, and the further runs that do."""
    if smiles is None:
        raise ConfigError("--member: runs answer together for --smiles alone; give a file of molecules")
    others = [stored_run(path) for path in members]
    _refuse_strangers(stored, others)
    return {"smiles": read_smiles(smiles), "member": others}


def _refuse_strangers(stored: StoredRun, others: Sequence[StoredRun]) -> None:
    """Raises ConfigError for a member whose run is of another pack."""
    for other in others:
        if other.pack.name != stored.pack.name:
            raise ConfigError(
                f"a run of the face {other.pack.name}, the others are of {stored.pack.name}; give runs of one task",
                argument="--member",
                value=str(other.path),
            )


def read_smiles(path: Path) -> list[str]:
    """Returns the molecules of a file: the column ``smiles`` of a .csv, else the first word of each line.

    Raises:
        ConfigError: the file cannot be read, or has no such column or no molecules.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.csv")
        >>> _ = path.write_text("name,SMILES\\nethanol,CCO\\n")
        >>> read_smiles(path)
        ['CCO']
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", argument="--smiles", value=str(path)) from error
    if path.suffix == ".csv":
        rows = list(csv.reader(io.StringIO(text)))
        names = [name.strip().lower() for name in rows[0]] if rows else []
        if "smiles" not in names:
            columns = ", ".join(names) or "none"
            raise ConfigError(
                f"has the columns {columns}; one must be named smiles", argument="--smiles", value=str(path)
            )
        place = names.index("smiles")
        found = [row[place].strip() if place < len(row) else "" for row in rows[1:] if row]
    else:
        found = [line.split()[0] for line in text.splitlines() if line.strip()]
    if not found:
        raise ConfigError("has no molecules", argument="--smiles", value=str(path))
    return found


def _refuse_idle(given: Mapping[str, Any], stored: StoredRun) -> None:
    """Raises ConfigError for an option that has no effect on the run."""
    for name, value in given.items():
        if name not in stored.pack.takes and value is not None and value is not False and value != []:  # 0 is a seed
            why = "reads no molecules" if name in ("smiles", "member") else stored.pack.without
            raise ConfigError(f"--{name.replace('_', '-')} {value}: a run of the face {stored.pack.name} {why}")


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


def _check_suffix(out: Path | None) -> None:
    if out is not None and out.suffix not in (".npz", ".csv"):
        raise ConfigError(f"--out {out}: must end in .npz or .csv")


def write_arrays(arrays: Mapping[str, Any], path: Path) -> Path:
    """Writes named arrays as .npz, or as the columns of a .csv, the whole old file or the whole new one.

    Args:
        arrays: for a .csv equally long; what has several columns becomes ``name_0``, ``name_1``, ...
        path: its suffix selects the format.

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
