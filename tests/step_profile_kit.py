"""Profile of one plain training step of each face: the functions and files entered, and the moves between files.

Definition, for step 4 of a run of 6 on the CPU, with the hooks and settings that the face has by default:

- The profile starts when the data set is asked for the first item of batch 4 and stops at that of batch 5, so it covers
  one whole round: the rest of the fetch, the step, the events around it and the request for the next batch.
- Only calls of Python functions of the library count, in the order in which they happen (a resumed generator is a
  call). Returns do not count, nor do comprehensions and generator expressions, whose calls depend on Python's version.
- ``files``: distinct source files among the calls; ``functions``: distinct functions; ``calls``: all of them.
- ``moves``: calls whose file differs from that of the call before; the first call is a move.
- ``back``: moves into a file that was entered before, which is ``moves - files``.

At commit 28957d7 this gives 18 files, 66 functions, 44 moves and 26 back for ``BaseTrainer`` and 26 files, 74 moves and
48 back for ``Trainer``. An earlier measurement without a written definition gave 18, 66, 45, 27 and 26, 75, 49.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import treadle

PACKAGE = str(Path(treadle.__file__).parent) + os.sep
EXPRESSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
BATCH_SIZE, STEPS, PROFILED = 4, 6, 4


@dataclass
class StepProfile:
    """Calls of library functions in one step, in order."""

    codes: list[CodeType] = field(default_factory=list)

    @property
    def visited(self) -> list[str]:
        """The file of each call, relative to the package."""
        return [code.co_filename.removeprefix(PACKAGE) for code in self.codes]

    @property
    def files(self) -> int:
        return len(set(self.visited))

    @property
    def functions(self) -> int:
        # Code objects of different files can be equal.
        return len({(code.co_filename, code.co_firstlineno, code.co_name) for code in self.codes})

    @property
    def calls(self) -> int:
        return len(self.codes)

    @property
    def moves(self) -> int:
        return sum(before != now for before, now in zip([None, *self.visited], self.visited, strict=False))

    @property
    def back(self) -> int:
        return self.moves - self.files

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call; for ``sys.setprofile``."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in EXPRESSIONS:
            self.codes.append(code)


@contextlib.contextmanager
def step_profile() -> Iterator[tuple[StepProfile, Callable[[Any], Dataset[Any]]]]:
    """Yield a profile and a wrapper for the items of a data set that fills it; restore the profiler at the end."""
    profile, before, collects = StepProfile(), sys.getprofile(), gc.isenabled()

    class Watched(Dataset):  # type: ignore[type-arg]
        def __init__(self, items: Any):
            self.items = items

        def __len__(self) -> int:
            return len(self.items)

        def __getitem__(self, index: int) -> Any:
            if index == (PROFILED - 1) * BATCH_SIZE:
                sys.setprofile(profile.note)
            elif index == PROFILED * BATCH_SIZE:
                sys.setprofile(before)
            return self.items[index]

    gc.disable()  # a collection would count finalizers
    try:
        yield profile, Watched
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


def base_trainer(watched: Callable[[Any], Dataset[Any]]) -> None:
    class Fit(treadle.BaseTrainer):
        def build_data_loader(self):
            return DataLoader(watched(torch.ones(STEPS * BATCH_SIZE, 4)), BATCH_SIZE)

        def build_model(self):
            return torch.nn.Linear(4, 1)

        def build_optimizer(self):
            return torch.optim.AdamW(self.model.parameters())

        def build_lr_scheduler(self):
            return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

        def forward(self, input):
            out = self.model(input)
            return out.square().mean(), {"mean": out.mean()}

    Fit(STEPS, grad_clip=1.0, device="cpu").train()


def functional(watched: Callable[[Any], Dataset[Any]]) -> None:
    model, x = torch.nn.Linear(4, 1), torch.ones(STEPS * BATCH_SIZE, 4)
    data = DataLoader(watched(TensorDataset(x, x.sum(1, keepdim=True))), BATCH_SIZE)
    optimizer = torch.optim.AdamW(model.parameters())
    treadle.Trainer(model, optimizer, torch.nn.MSELoss(), device="cpu").train(data, num_epochs=1)


def spectra(watched: Callable[[Any], Dataset[Any]]) -> None:
    import spectra_kit as kit
    from treadle.spectra import ChemoMAE, SpectraTrainer, TrainerConfig, build_optimizer

    treadle.set_seed(0)
    model = ChemoMAE(
        seq_len=32, d_model=16, nhead=2, num_layers=1, dim_feedforward=32, latent_dim=8, n_blocks=8, n_mask=4
    )
    with tempfile.TemporaryDirectory() as folder:
        config = TrainerConfig(out_dir=folder, amp=False, device="cpu")
        data = DataLoader(watched(TensorDataset(kit.spectra(STEPS * BATCH_SIZE))), BATCH_SIZE)
        SpectraTrainer(model, build_optimizer(model, lr=3e-3), data, None, cfg=config).fit(1)


def graphs(watched: Callable[[Any], Dataset[Any]]) -> None:
    import graph_kit as kit

    data = kit.loader(watched(kit.graphs(STEPS * BATCH_SIZE)), BATCH_SIZE)
    kit.make(log_every=50).fit(data, epochs=1)


def astro(watched: Callable[[Any], Dataset[Any]]) -> None:
    import astro_trainer_kit as kit

    data = kit.loader(watched(kit.sequences(STEPS * BATCH_SIZE)), BATCH_SIZE)
    kit.make(train=data, epochs=1, log_every=50).train()


FACES = {"BaseTrainer": base_trainer, "Trainer": functional, "spectra": spectra, "graphs": graphs, "astro": astro}
COLUMNS = ("files", "functions", "calls", "moves", "back")


def profile_of(face: str) -> StepProfile:
    """Train a small model with a face and return the profile of one step."""
    with step_profile() as (profile, watched):
        FACES[face](watched)
    assert profile.calls > 0, f"{face}: nothing was profiled"
    return profile


def table(faces: Sequence[str] = tuple(FACES)) -> str:
    """Return the numbers of some faces as a Markdown table."""
    profiles = [(face, profile_of(face)) for face in faces]
    rows = [[face, *(str(getattr(profile, column)) for column in COLUMNS)] for face, profile in profiles]
    lines = [["face", *COLUMNS], ["---"] * (1 + len(COLUMNS)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
