"""The command ``treadle export``."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.cli.pack_options import AsJson
from treadle.errors import ConfigError

if TYPE_CHECKING:
    from treadle.exchange import Exported

_WHICH = {
    "ema": "the averaged weights that were validated,",
    "model": "the raw weights",
    "stored": "the weights",
}


class Form(str, Enum):
    """Values of ``--to``."""

    safetensors = "safetensors"
    torch = "torch"
    hf = "hf"
    checkpoint = "checkpoint"
    shards = "shards"


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, a checkpoint, or another framework's checkpoint.")
    ],
    to: Annotated[Form, typer.Option(help="Format of the weights; or checkpoint or shards, for the whole state.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045  (typer on Python 3.10 reads this form)
        typer.Option(help="Output file, or folder for hf.  [default: in a folder 'export' there]", show_default=False),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the raw weights even if averages were validated.")] = False,
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="For hf: a folder with config.json.  [default: the run's 'pretrained']", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export the weights of a run or of any checkpoint for other programs.

    From a run, takes the best checkpoint, or the newest if none is marked best; from a checkpoint, the weights that
    were validated. Also reads files of plain PyTorch, safetensors and Lightning, and folders of Accelerate and of the
    Hugging Face Trainer, without executing anything in them.

    With --to checkpoint or shards, writes the whole training state, as one file or as a folder of shards, from either
    form; a run resumes from both.

    \b
    Examples:
      treadle export runs/spectra --to safetensors
      treadle export runs/text --to hf --out my-model
      treadle export epoch=3-step=400.ckpt --to torch --out weights.pt
      treadle export run/checkpoints/checkpoint_step_1000 --to checkpoint
    """
    messages, results = message_console(), result_console()
    with errors_as_one_line(messages), log_to(messages):
        if to in (Form.checkpoint, Form.shards):
            from treadle.checkpoint.convert import convert_checkpoint

            if raw or config is not None:
                raise ConfigError(f"--raw and --config are for weights, and --to {to.value} writes the whole state")
            path = convert_checkpoint(source, "file" if to is Form.checkpoint else "folder", out=out, force=force)
            results.print(json.dumps({"path": str(path)}) if as_json else str(path), markup=False, soft_wrap=True)
            return
        from treadle.exchange import export_weights

        done = export_weights(source, to.value, out=out, raw=raw, config=config, force=force)
        text = json.dumps(_described(done), indent=1) if as_json else _sentence(done)
        results.print(text, markup=False, soft_wrap=True)


def _described(done: Exported) -> dict[str, Any]:
    source = done.source
    return {
        "path": str(done.path), "source": str(source.path), "kind": source.kind, "weights": source.which,
        "adapters_only": source.adapters_only, "face": source.face, "step": source.step, "epoch": source.epoch,
        "tensors": done.tensors, "bytes": done.nbytes, "tied": dict(done.tied), "left_out": source.left_out,
    }  # fmt: skip


def _sentence(done: Exported) -> str:
    source = done.source
    at = [f"{name} {value:,}" for name, value in (("step", source.step), ("epoch", source.epoch)) if value is not None]
    origin = ", ".join([source.kind if source.face is None else f"{source.kind}, {source.face}", *at])
    lines = [
        str(done.path),
        f"  {done.tensors:,} tensors, {done.nbytes:,} bytes: {_WHICH[source.which]} of {source.path} ({origin})",
    ]
    if source.adapters_only:
        lines.append("  adapters only: the frozen base model is not in the checkpoint")
    if source.not_validated:
        lines.append(f"  not exported: the average {', '.join(source.not_validated)}, which was not validated")
    if done.tied:
        lines.append(f"  tied: {', '.join(f'{name} is {first}' for name, first in done.tied.items())}")
    if source.left_out:
        lines.append(f"  left out: {', '.join(source.left_out)}")
    return "\n".join(lines)
