"""The original chemomae, if installed, and small run folders that it wrote.

    pip install --no-deps --target FOLDER chemomae==0.1.0      # and another folder with 0.2.4
    CHEMOMAE=FOLDER:OTHER python -m pytest tests/unit/spectra/test_originals.py
    CHEMOMAE=FOLDER:OTHER python tests/original_kit.py         # rewrites tests/data/chemomae

The checkpoints in `tests/data/chemomae` are after 2 of 4 epochs; `expected.json` has the original's rest.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

DATA = Path(__file__).parent / "data" / "chemomae"
LINES = ("0.1", "0.2")
SIZES = {
    "seq_len": 16, "d_model": 8, "nhead": 2, "num_layers": 2, "dim_feedforward": 16, "dropout": 0.0, "latent_dim": 4,
    "n_mask": 2,
}  # fmt: skip
UNITS = {"0.1": {"n_blocks": 4}, "0.2": {"n_patches": 4}}


def folder_of(line):
    """Return the folder with this line of chemomae, "" if it is installed, or None."""
    for folder in filter(None, os.environ.get("CHEMOMAE", "").split(os.pathsep)):
        if next(Path(folder).glob(f"chemomae-{line}.*.dist-info"), None) is not None:
            return folder
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("chemomae").startswith(f"{line}."):
            return ""
    return None


@contextlib.contextmanager
def original(line):
    """Yield the module `chemomae` of a line, with its output and warnings suppressed."""
    folder = folder_of(line)
    assert folder is not None
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "chemomae"}
    if folder:
        sys.path.insert(0, folder)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(nowhere):
                importlib.import_module("chemomae")
                for part in ("models", "training", "utils", "preprocessing", "clustering"):
                    importlib.import_module(f"chemomae.{part}")
                yield sys.modules["chemomae"]
    finally:
        if folder:
            sys.path.remove(folder)
        for name in [name for name in sys.modules if name.split(".")[0] == "chemomae"]:
            del sys.modules[name]
        sys.modules.update(before)


def spectra(count=20, length=16):
    """Return spectra generated without random numbers."""
    phase = torch.arange(count, dtype=torch.float64)[:, None]
    place = torch.linspace(0, 3, length, dtype=torch.float64)
    return (torch.sin(place * (1 + phase % 5) + phase) + 0.3 * torch.cos(7 * place - phase)).float()


def same_visible(self, batch_size, *, n_mask=None, device=None, generator=None):
    """Replace `make_visible`, hiding the middle half of every row, since the two packages draw different masks."""
    visible = torch.ones(batch_size, 16, dtype=torch.bool, device=device)
    visible[:, 4:12] = False
    return visible


def make(line, names, out_dir, *, seed=0, sizes=None, augmenter=None, val=True, **settings):
    """Return a trainer of chemomae or of this library; `names` has the classes and functions."""
    torch.manual_seed(seed)
    model = names["ChemoMAE"](**{**SIZES, **UNITS[line], **(sizes or {})})
    optimizer = names["build_optimizer"](model, lr=3e-3)
    x = spectra()
    train = DataLoader(TensorDataset(x[:16]), batch_size=8, shuffle=line == "0.2")
    scheduler = names["build_scheduler"](optimizer, steps_per_epoch=2, epochs=4)
    cfg = {"out_dir": out_dir, "device": "cpu", "amp": False, "ema_decay": 0.9, **settings}
    given = {"scheduler": scheduler, "cfg": names["TrainerConfig"](**cfg)}
    if line == "0.2":
        return names["Trainer"](model, optimizer, train, augmenter=augmenter, **given)
    return names["Trainer"](model, optimizer, train, DataLoader(TensorDataset(x[16:]), batch_size=4), **given)


def names_of(chemomae):
    """Return the names of the original, for `make`."""
    return {**vars(chemomae.models), **vars(chemomae.training)}


def latents(model):
    """Return the latents of a model of either package."""
    x = spectra()
    with torch.no_grad():
        return model.eval().encoder(x, torch.ones_like(x, dtype=torch.bool))


def write():
    """Write the checkpoints and the results that follow from them."""
    expected = {}
    for line in LINES:
        with original(line) as chemomae, tempfile.TemporaryDirectory() as folder:
            names = names_of(chemomae)
            if line == "0.1":
                names["ChemoMAE"].make_visible = same_visible
            make(line, names, folder).fit(2)
            target = DATA / line / "checkpoints"
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(folder) / "checkpoints" / "last.pt", target / "last.pt")
            after = make(line, names, folder, seed=1)
            after.fit(4)
            expected[line] = {
                "version": chemomae.__version__,
                "train_loss": [record["train_loss"] for record in after.history],
                "val_loss": [record.get("val_loss") for record in after.history],
                "best": getattr(after, "best", None),
                "latents": latents(after.model)[:2].tolist(),
            }
    (DATA / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    write()
