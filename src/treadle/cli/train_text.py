"""The command ``treadle train text``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

from treadle.cli.console import errors_as_one_line, log_to, message_console, result_console
from treadle.cli.pack_options import Device, Out, Resume, Show, Trackers, settings_argument
from treadle.runs.tracking import tracked


def text(
    settings: Annotated[Optional[list[str]], settings_argument("epochs=20 model.n_layer=4")] = None,  # noqa: UP045
    out: Out = Path("runs/text"),
    device: Device = None,
    resume: Resume = True,
    trackers: Trackers = None,
    show: Show = False,
) -> None:
    """Train a small GPT-2 on Python's own manual, fine-tune it with LoRA on the pages about statements, draw text.

    Weights, tokenizer and text are made on this machine; nothing is downloaded. A run that was stopped, at any moment
    and by anything, goes on when the same command is given again; one that is finished shows its results. Ctrl-C saves
    before it leaves.

    The run folder holds config.json, tokenizer.json, history.json, steps.jsonl, checkpoints/, best_model.pt,
    pretrained/ (for from_pretrained), lora/ with the same of the fine-tuning, samples.txt, metrics.json and
    pictures/loss.png.

    \b
    Examples:
      treadle train text
      treadle train text epochs=4 lora.epochs=2 --out runs/short
      treadle train text samples.prompt='The "with" statement' samples.temperature=0.5
      treadle train text model.n_embd=256 model.n_layer=6 data.block_length=256 --device cuda --out runs/large
      torchrun --nproc_per_node 2 -m treadle train text
      treadle train text --show-settings
    """
    messages = message_console()
    with errors_as_one_line(messages), log_to(messages):
        from treadle.text.runs import read_settings, run_text, show_settings

        if show:
            show_settings(settings or [], device, result_console())
            return
        given, results = settings or [], result_console()
        with tracked(trackers, lambda: read_settings(given, device).to_dict()) as tracking:
            tracking.final(run_text(given, out=out, device=device, resume=resume, results=results, messages=messages))
