"""Masked autoencoders on the SpeX spectra: samples per second of treadle's and chemomae's trainers, in one run.

    python benchmarks/spectra.py               # on a GPU, in bf16; writes results/spectra_gpu.md and .json
    python benchmarks/spectra.py               # on the CPU, in fp32 and smaller; writes results/spectra.md and .json
    python benchmarks/spectra.py --tiny        # a trial on the CPU, nothing is captured or written

The peer is pure Python and needs no installation: ``pip download --no-deps chemomae==0.2.4``, then
``PYTHONPATH=chemomae-0.2.4-py3-none-any.whl``. If it cannot be imported, its rows are omitted.

chemomae's model has a token for each of 16 patches, 12 of which it sees, and treadle's own has one for each channel,
192 of which it sees: about 15 times the work. So three models of width 256 and 4 layers are trained. *chemomae's* is
the peer's own object, which reads the device in each forward pass and so cannot be captured. *patches* has the same
parameters and the same function without these reads. *channels* is treadle's. All have AdamW, clipping and an
average of the weights; treadle's runs have a fused optimizer, and chemomae's what its ``build_optimizer`` makes.

An epoch has the training spectra several times over, so that its end hardly matters; nothing is evaluated or written in
it. Every round trains an epoch of every way, in a new order each time, after a warm-up epoch. The table is written
after every epoch, and a way that fails gets a row. The five rounds should take three minutes on an H200, by the peer's
rates there; fewer --rounds take less.

Eager and captured runs of a model draw the same masks, so their final validation losses should be equal; a row reports
whether they are, and whether another eager run repeats its own, which kernels with unordered additions do not. On the
CPU, where nothing is captured, the seconds are processor time, since other programs use it too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from machine import describe, write_result
from patch_mae import LATENT, LENGTH, MASKED, PATCHES, PatchMAE
from rounds import Rounds, exit_if_failed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from treadle import TensorLoader
from treadle.datasets import load_spex
from treadle.datasets.splits import object_groups, split_by_group
from treadle.spectra import ChemoMAE, SNVScaler, SpectraTrainer, TrainerConfig

RATE = 1.5e-4
PEER = "chemomae's trainer"
COLUMNS = ("batch", "model", "way", "samples/s", f"of {PEER}", "validation loss")
Key = tuple[str, str]  # model and way
Row = dict[str, str]
FAILED = "failed"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a trial, on the CPU and on a GPU: the models, and the repetitions of the spectra in an epoch."""

    device: torch.device
    width: int = 256
    num_layers: int = 4
    repeats: int = 8
    models: tuple[str, ...] = ("patches", "channels")
    modes: tuple[str, ...] = ("SpectraTrainer", "SpectraTrainer, captured")


# -- data, models, ways -------------------------------------------------------------------------------------------


def spectra() -> tuple[Tensor, Tensor]:
    """Return SNV-scaled spectra for training and validation, split by object."""
    spex = load_spex()
    scaled = np.asarray(SNVScaler().transform(spex.spectra), dtype=np.float32)
    groups = object_groups(spex.name, spex.spectra)
    train, val, _ = split_by_group(groups, val_fraction=0.15, test_fraction=0.15, seed=0)
    return torch.from_numpy(scaled[train]), torch.from_numpy(scaled[val])


def build(model: str, sizes: Sizes) -> nn.Module:
    torch.manual_seed(0)
    if model == "patches":
        return PatchMAE(sizes.width, sizes.num_layers).to(sizes.device)
    if model == "channels":
        return ChemoMAE(
            seq_len=LENGTH, d_model=sizes.width, num_layers=sizes.num_layers, dim_feedforward=4 * sizes.width,
            dropout=0.0, latent_dim=LATENT, n_blocks=PATCHES, n_mask=MASKED,
        ).to(sizes.device)  # fmt: skip
    from chemomae.models import ChemoMAE as Theirs

    return Theirs(d_model=sizes.width, num_layers=sizes.num_layers).to(sizes.device)


def ours(model: str, *, batch_size: int, folder: Path, sizes: Sizes, captured: bool) -> SpectraTrainer:
    """Return treadle's trainer; its learning rate is a tensor, also eagerly, so that both round it alike."""
    built = build(model, sizes)
    rate = torch.tensor(RATE, device=sizes.device)
    optimizer = torch.optim.AdamW(built.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    train, val = spectra()
    on_gpu = sizes.device.type == "cuda"
    return SpectraTrainer(
        built, optimizer,
        TensorLoader(
            train.repeat(sizes.repeats, 1), batch_size=batch_size, shuffle=True, drop_last=True, device=sizes.device,
            num_buffers=1,
        ),
        TensorLoader(val, batch_size=len(val), device=sizes.device),
        cfg=TrainerConfig(
            out_dir=folder, amp=on_gpu, capture=captured and (on_gpu or "auto"), resume_from=None, selection="last"
        ),
        device=sizes.device,
    )  # fmt: skip


def theirs(loader: str, batch_size: int, folder: Path, sizes: Sizes) -> Any:
    """Return chemomae's trainer."""
    from chemomae.training import Trainer, build_optimizer
    from chemomae.training import TrainerConfig as Config

    built = build("chemomae's", sizes)
    rows = spectra()[0].repeat(sizes.repeats, 1)
    on_gpu = sizes.device.type == "cuda"
    data: Any = TensorLoader(rows, batch_size=batch_size, shuffle=True, drop_last=True, device=sizes.device)
    if loader == "DataLoader":
        data = DataLoader(TensorDataset(rows), batch_size, shuffle=True, drop_last=True, pin_memory=on_gpu)
    config = Config(out_dir=folder, amp=on_gpu, progress=False, verbose=False, resume_from=None)
    return Trainer(built, build_optimizer(built, lr=RATE), data, cfg=config)


def builders(batch_size: int, folder: Path, sizes: Sizes) -> dict[Key, Callable[[], Any]]:
    """Return the factory of each trainer, by model and way."""
    found: dict[Key, Callable[[], Any]] = {}
    make = functools.partial(ours, batch_size=batch_size, sizes=sizes)
    if importlib.util.find_spec("chemomae"):
        for loader in ("DataLoader", "TensorLoader"):
            key = ("chemomae's", f"{PEER}, {loader}")
            found[key] = functools.partial(theirs, loader, batch_size, folder / loader, sizes)
        found["chemomae's", "SpectraTrainer"] = functools.partial(
            make, "chemomae's", folder=folder / "same", captured=False
        )
    for model in sizes.models:
        for way in sizes.modes:
            captured = way.endswith("captured")
            found[model, way] = functools.partial(make, model, folder=folder / f"{model}{captured}", captured=captured)
    return found


def peer_version() -> dict[str, str]:
    there = importlib.util.find_spec("chemomae")
    return {"chemomae": importlib.metadata.version("chemomae")} if there else {}


@torch.no_grad()
def alike(sizes: Sizes) -> bool:
    """Return whether *patches* equals chemomae's model with the same weights and masks, to 1e-3."""
    one, other = build("chemomae's", sizes), build("patches", sizes)
    other.load_state_dict(one.state_dict())
    x = spectra()[0][:32].to(sizes.device)
    visible_mask = other.make_visible(len(x), device=x.device)  # type: ignore[operator]
    pairs = zip(other(x, visible_mask)[:2], one(x, visible_mask)[:2], strict=True)
    return all(torch.allclose(mine, its, rtol=1e-3, atol=1e-4) for mine, its in pairs)


# -- rounds and table ---------------------------------------------------------------------------------------------


def seconds(train_one_epoch: Callable[[], object], seed: int, device: torch.device) -> float:
    """Return the seconds of an epoch, with masks from the seed alone: wall-clock, or processor time on the CPU."""
    torch.manual_seed(seed)
    if device.type == "cpu":
        start = time.process_time()
        train_one_epoch()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    train_one_epoch()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def table(batch_size: int, rates: Rounds[Key, float], losses: dict[Key, float]) -> list[Row]:
    """Return a row for each way, from its rounds so far."""
    base = rates.figures.get(("chemomae's", f"{PEER}, DataLoader"), [])
    rows = []
    for (model, way), each in rates.figures.items():
        pairs = list(zip(each, base, strict=False))  # a round may be in progress
        ratio = f"{median(a / b for a, b in pairs):.2f}" if pairs else ""
        loss = f"{losses[model, way]:.9g}" if (model, way) in losses else ""
        rate = f"{median(each):,.0f} ({min(each):,.0f} – {max(each):,.0f})"
        rows.append(dict(zip(COLUMNS, (str(batch_size), model, way, rate, ratio, loss), strict=True)))
    for (model, way), why in rates.failed.items():
        rows.append({"batch": str(batch_size), "model": model, "way": f"{way}: {FAILED}, {why[:200]}"})
    return rows


def rows_of(batch_size: int, sizes: Sizes, *, rounds: int, report: Callable[[list[Row]], None]) -> list[Row]:
    """Train all ways with one batch size and return a row for each; report partial rows after each epoch."""
    count = len(spectra()[0]) * sizes.repeats // batch_size * batch_size

    def rate(trainer: Any, number: int) -> float:
        return count / seconds(trainer.train_one_epoch, number, sizes.device)

    with tempfile.TemporaryDirectory() as name, quiet():
        rates = Rounds(builders(batch_size, Path(name), sizes), rate)
        for key, found in rates.play(rounds):
            if found is not None:
                print(f"{batch_size}, {', '.join(key)}: {found:,.0f} samples/s", flush=True)
            report(table(batch_size, rates, {}))
        trained = {key: trainer for key, trainer in rates.built.items() if key not in rates.failed}
        losses = {key: each.validate() for key, each in trained.items() if isinstance(each, SpectraTrainer)}
        again = {
            model: once_more(model, batch_size, Path(name) / f"{model} again", sizes, epochs=rounds + 1)
            for model in (sizes.models if len(sizes.modes) == 2 else ())
        }
    rows = table(batch_size, rates, losses)
    for model, loss in again.items():
        eager, captured = (losses.get((model, way)) for way in sizes.modes)
        way = f"losses equal: eager and captured {eager == captured}, two eager runs {eager == loss}"
        rows.append({"batch": str(batch_size), "model": model, "way": way})
    return rows


def once_more(model: str, batch_size: int, folder: Path, sizes: Sizes, *, epochs: int) -> float:
    """Return the validation loss of another eager run of the same epochs."""
    trainer = ours(model, batch_size=batch_size, folder=folder, sizes=sizes, captured=False)
    for number in range(epochs):
        seconds(trainer.train_one_epoch, number, sizes.device)
    return trainer.validate()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Mute treadle's messages; a second trainer of the same kind logs nothing new."""
    logger = logging.getLogger("treadle")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def write(sizes: Sizes, rows: Sequence[Row], rounds: int, partial: bool) -> None:
    on_gpu = sizes.device.type == "cuda"
    kind = "bf16 on a GPU" if on_gpu else "fp32 on the CPU, processor time"
    title = f"Training masked autoencoders of width 256 and 4 layers on the SpeX spectra, {kind}"
    machine = describe() | {"rounds": str(rounds)} | peer_version()
    write_result("spectra_gpu" if on_gpu else "spectra", title, COLUMNS, rows, machine, partial=partial)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    sizes = Sizes(torch.device("cuda"))
    if options.tiny:
        sizes = Sizes(torch.device("cpu"), width=16, num_layers=1, repeats=1)
        options.batch_sizes, options.rounds = [256], 1
    elif not torch.cuda.is_available():
        torch.set_num_threads(1)
        sizes = Sizes(torch.device("cpu"), repeats=1, models=("patches",), modes=("SpectraTrainer",))
    rows: list[Row] = []
    if importlib.util.find_spec("chemomae"):
        rows.append({"model": "patches", "way": f"computes what chemomae's does: {alike(sizes)}"})
    for size in options.batch_sizes:
        done = tuple(rows)
        rows += rows_of(
            size, sizes, rounds=options.rounds,
            report=lambda now, done=done: None if options.tiny else write(sizes, [*done, *now], options.rounds, True),
        )  # fmt: skip
    if options.tiny:
        print(*rows, sep="\n")
    else:
        write(sizes, rows, options.rounds, False)
    exit_if_failed(any(f": {FAILED}, " in row["way"] for row in rows))


if __name__ == "__main__":
    main()
