"""Cost and gain of compiling: the first step with an empty and a full cache, and the steps after it.

    python benchmarks/compile.py           # writes results/compile.md and .json; some minutes on two cores
    python benchmarks/compile.py --tiny    # a trial without a compiler, writes nothing

Two models of the packs are trained by an engine: the masked autoencoder of ``treadle train spectra`` and a GPT-2 as in
``treadle train text``, with more layers. Each way runs in two new processes that share a cache folder: in the first it
is empty (cold), in the second it has the files of the first (warm), as when a stopped run resumes. torch keeps the
cache in the folder that TORCHINDUCTOR_CACHE_DIR names, else in the folder for temporary files.

The first step includes compiling; the loss of step 20 shows whether training follows the uncompiled run. The table is
written after every process. On a GPU the results are compile_gpu.md and .json; how long that takes is not known.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import describe, write_result
from torch import nn

from treadle import BaseHook, Engine, StepOutput, compile_model, set_seed
from treadle.spectra import ChemoMAE
from treadle.spectra.task import SpectraTask
from treadle.text.model import build_gpt2

WAYS = ("plain", "model", "blocks")
COLUMNS = ("model", "way", "cache", "first step, s", "ms a step", "loss of the last step")
STEPS = 20


class GptTask:
    """Task with the model's own loss."""

    def step(self, model: nn.Module, batch: Any, totals: Any = None, generator: Any = None) -> StepOutput:
        """Return the loss of a batch of token ids (B, L)."""
        return StepOutput(model(input_ids=batch, labels=batch).loss)


class Clock(BaseHook):
    """Hook that measures the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_before_step(self, trainer: Engine) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_after_step(self, trainer: Engine) -> None:
        """Wait for the step to finish and stop the clock."""
        self.loss = float(trainer.step_info["loss"][0])
        self.seconds.append(time.perf_counter() - self.started)


def spectra_parts(device: torch.device, *, tiny: bool) -> tuple[nn.Module, Any, Any]:
    """Return model, task and batch of the spectra."""
    model = ChemoMAE(
        seq_len=64 if tiny else 256, d_model=64, nhead=4, num_layers=2, dim_feedforward=128, latent_dim=64,
        use_learnable_pos=False, dropout=0.0, n_blocks=32, n_mask=24,
    )  # fmt: skip
    return model, SpectraTask(device, loss_type="mse", reduction="mean"), torch.randn(32, 64 if tiny else 256)


def text_parts(device: torch.device, *, tiny: bool) -> tuple[nn.Module, Any, Any]:
    """Return model, task and batch of the text, without dropout, so that losses can be compared."""
    layers, length = (2, 8) if tiny else (6, 64)
    model = build_gpt2(512, n_positions=length, n_layer=layers, dropout=0.0)
    return model, GptTask(), torch.randint(512, (8, length), device=device)


PARTS = {"spectra": spectra_parts, "text": text_parts}


def measure(name: str, way: str, *, tiny: bool) -> dict[str, Any]:
    """Train some steps in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() and not tiny else "cpu")
    set_seed(0)
    model, task, batch = PARTS[name](device, tiny=tiny)
    model.to(device)
    backend = "eager" if tiny else "inductor"
    if way != "plain":
        compile_model(model, True if way == "model" else "blocks", backend=backend)
    clock = Clock()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    steps = 3 if tiny else STEPS
    Engine(model, optimizer, task, device=device, grad_clip=1.0, hooks=[clock]).run([batch] * steps, epochs=1)
    return {"first": clock.seconds[0], "step": median(clock.seconds[steps // 2 :]), "loss": clock.loss}


def in_new_process(name: str, way: str, cache: str) -> dict[str, Any]:
    """Return the result of :func:`measure` in a new interpreter that compiles into a cache folder."""
    command = [sys.executable, str(Path(__file__)), "--one", name, way]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def row(name: str, way: str, cache: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the table."""
    values = (name, way, cache, f"{found['first']:.1f}", f"{found['step'] * 1e3:.1f}", f"{found['loss']:.5f}")
    return dict(zip(COLUMNS, values, strict=True))


def write(rows: Sequence[Mapping[str, Any]], *, partial: bool) -> None:
    """Write the table."""
    name = "compile_gpu" if torch.cuda.is_available() else "compile"
    write_result(name, "Compiling: first step and steps", COLUMNS, rows, describe(), partial=partial)


def main() -> None:
    """Run all ways and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one, tiny=False)))
        return
    rows = []
    for name in PARTS:
        for way in WAYS:
            if arguments.tiny:
                print(row(name, way, "", measure(name, way, tiny=True)))
                continue
            with tempfile.TemporaryDirectory() as cache:
                for state in ("",) if way == "plain" else ("cold", "warm"):
                    rows.append(row(name, way, state, in_new_process(name, way, cache)))
                    print(rows[-1], flush=True)
                    write(rows, partial=True)
    if not arguments.tiny:
        write(rows, partial=False)


if __name__ == "__main__":
    main()
