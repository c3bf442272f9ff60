"""Spectra models against simpler methods: reconstruction, few labels, uncertainty, anomalies, and meat.

    python benchmarks/spectra_science.py --device cuda --jobs 18 --capture    # two minutes of an H200 and 16 cores
    python benchmarks/spectra_science.py --budget-minutes 20       # in pieces: the same command resumes
    python benchmarks/spectra_science.py --tiny                    # a trial, writes nothing

SpeX dwarfs, split by object; everything is chosen on validation objects and reported on test objects.

    ResidualMAE    the linear conditional mean, and a network that predicts its residual and its uncertainty
    Gaussian       conditional mean and variance, covariance of the training spectra; shrinkage chosen
    PCA            least squares of the visible channels in the first components; their number chosen
    nearest        mean of the nearest training spectra in the visible channels; their number chosen
    ... + nearest  a weighted mean of the Gaussian's answer and the nearest, shares chosen
    ... + kernels  the Gaussian's answer and a kernel regression of its residual; kernel, width and noise chosen
    mixture        a weighted mean of the model's answer and all of these, shares chosen
    ChemoMAE       `treadle train spectra` unchanged, for few labels

Each model is trained with each seed; the baselines have none. Every run has a folder below --runs and resumes there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, write_result
from science import add_training, as_markdown, kept, options_of, parsed, pool_of, spread
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle.datasets import load_tecator
from treadle.datasets.spectral_types import spectral_type_number
from treadle.regression import NOISES, KernelStack, Setting, mixing_shares
from treadle.runs.split import DataConfig
from treadle.spectra import (
    MixedSpectra,
    ResidualMAE,
    SNVScaler,
    SpectraTrainer,
    TrainerConfig,
    build_optimizer,
    build_scheduler,
    make_block_mask,
    pretreatments,
)
from treadle.spectra.few_labels import SIZES, few_labels
from treadle.spectra.fills import GaussianFill, KernelFill, choose_fills, masked_error
from treadle.spectra.run_data import SpectraData, prepare_data

BATCH, EPOCHS, REPEATS = 256, 50, 16
MODEL: dict[str, Any] = {}  # the defaults of ResidualMAE
COUNTS = {f"{count} of 32 blocks": count for count in (24, 16)}
BANDS: dict[str, tuple[list[tuple[float, float]], bool]] = {
    "two telluric bands": ([(1.35, 1.45), (1.80, 1.95)], False),
    "H band": ([(1.45, 1.80)], False),
    "K band": ([(2.0, 2.4)], False),
    "all but J": ([(1.10, 1.35)], True),
}
KINKED = ("exponential", "Matern 3/2", "Matern 5/2")
FILLS = ("gaussian", "pca", "nearest", "kernels")
MIXTURES = {"mixtures": ("gaussian", "nearest", "kernels"), "without kernels": ("gaussian", "nearest")}
QUANTILES = {0.5: 0.674490, 0.9: 1.644854, 0.99: 2.575829}

Array = np.ndarray[Any, Any]


def masks(data: SpectraData, rows: Array) -> dict[str, Array]:
    """Return the visible channels of each row by mask name; the same in every run."""
    generator = torch.Generator().manual_seed(0)
    length = data.x.shape[1]
    found = {
        name: ~make_block_mask(len(rows), length, 32, n, generator=generator).numpy() for name, n in COUNTS.items()
    }
    for name, (bands, inverted) in BANDS.items():
        inside = np.any([(data.wavelengths >= low) & (data.wavelengths <= high) for low, high in bands], axis=0)
        found[name] = np.tile(inside if inverted else ~inside, (len(rows), 1))
    return found


# -- training -----------------------------------------------------------------------------------------------------


def train_residual(seed: int, options: argparse.Namespace) -> Path | None:
    """Train a ResidualMAE as far as the time allows; return its weights, or None if it is not finished."""
    torch.set_num_threads(1)
    data = prepare_data(DataConfig(max_rows=options.max_rows))
    folder = options.runs / f"residual-{seed}-{options.epochs}"
    done = folder / "done"
    if done.exists() or (options.finish and (folder / "best_model.pt").exists()):
        return folder / "best_model.pt"
    if time.time() > options.deadline:
        return None
    treadle.set_seed(seed)
    train, val = (torch.from_numpy(data.x[rows]) for rows in (data.train, data.val))
    model = ResidualMAE(seq_len=data.x.shape[1], **{**MODEL, **options.model})
    model.fit(train)
    batch = min(BATCH, len(train))
    loader = DataLoader(MixedSpectra(train, repeats=options.repeats), batch, shuffle=True, drop_last=True)
    optimizer = build_optimizer(model.to(options.device), lr=1e-3, weight_decay=0.05)
    scheduler = build_scheduler(
        optimizer, steps_per_epoch=len(loader), epochs=options.epochs, warmup_epochs=min(2, options.epochs - 1),
        min_lr_scale=0.01,
    )  # fmt: skip
    cfg = TrainerConfig(
        out_dir=folder, device=options.device, amp=False, enable_tf32=True, ema_decay=0.998, early_stop_patience=None,
        capture=options.capture,
    )  # fmt: skip
    trainer = SpectraTrainer(
        model, optimizer, loader, DataLoader(TensorDataset(val.repeat(8, 1)), 512), scheduler=scheduler, cfg=cfg,
        progress=False,
    )  # fmt: skip
    start = time.time()
    for epoch in [options.epochs] if options.deadline == float("inf") else range(1, options.epochs + 1):
        trainer.fit(epoch)
        if time.time() > options.deadline and epoch < options.epochs:
            return None
    print(f"ResidualMAE, seed {seed}: {trainer.best}, {time.time() - start:.0f} s", flush=True)
    seconds = time.time() - start
    kept(done, lambda path: path.write_text(json.dumps({"seconds": seconds, **trainer.best}), encoding="utf-8"))
    return folder / "best_model.pt"


def train_chemomae(seed: int, options: argparse.Namespace) -> Path | None:
    """Run ``treadle train spectra``; return its metrics, or None if there is no time left."""
    folder = options.runs / f"chemomae-{seed}"
    if not (folder / "metrics.json").exists():
        if time.time() > options.deadline:
            return None
        command = [sys.executable, "-m", "treadle", "train", "spectra", f"seed={seed}", "--out", str(folder)]
        command += ["--device", options.device, *options.chemomae]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} returned {ended.returncode}:\n{ended.stderr[-4000:]}")
        print(f"ChemoMAE, seed {seed}", flush=True)
    return folder / "metrics.json"


# -- filling in, and how sure -------------------------------------------------------------------------------------


def answers(model: ResidualMAE, x: Array, visible: Array) -> tuple[Array, Array]:
    """Return the reconstruction and the variance (N, L) of each channel."""
    device = next(model.parameters()).device
    with torch.no_grad():
        given = torch.from_numpy(x).to(device), torch.from_numpy(visible).to(device)
        x_recon, _, _, unsure = model(*given, with_uncertainty=True)
    return x_recon.cpu().double().numpy(), unsure.log_variance.exp().cpu().double().numpy()


def linear(model: ResidualMAE, x: Array, visible: Array) -> tuple[Array, Array]:
    """Return the same for its linear part."""
    device = next(model.parameters()).device
    mean, variance = model.encoder.gaussian(torch.from_numpy(x).to(device), torch.from_numpy(visible).to(device))
    return mean.cpu().double().numpy(), variance.cpu().double().numpy()


def median_error(filled: Array, x: Array, visible: Array) -> float:
    """Return the median over objects of their mean squared error, which is robust to a few noisy objects."""
    error = np.where(visible, 0.0, (filled - x) ** 2).sum(axis=1) / (~visible).sum(axis=1)
    return float(np.median(error))


def fill_in(name: str, options: argparse.Namespace) -> Path | None:
    """Fill in validation and test spectra by the baselines, tuned on the former; return the answers."""
    file: Path = options.runs / f"fills-{name.replace(' ', '-')}.npz"
    if file.exists():
        return file
    if time.time() > options.deadline:
        return None
    data = prepare_data(DataConfig(max_rows=options.max_rows))
    train, val, test = (data.x[rows].astype(np.float64) for rows in (data.train, data.val, data.test))
    visible = {"val": masks(data, data.val)[name], "test": masks(data, data.test)[name]}
    ways = {key: each.fill for key, each in choose_fills(train, val, visible["val"]).items()}
    gaussian = ways["gaussian"]
    assert isinstance(gaussian, GaussianFill)
    same = (visible["val"] == visible["val"][0]).all()  # else each row needs its own regression
    tried = slice(None if same else options.rows_tried)
    errors = {}
    for setting in options.settings:
        fill = KernelFill(train, gaussian, setting, device=options.device)
        shown = visible["val"][tried]
        errors[setting] = masked_error(fill(val[tried], shown), val[tried], shown)
    setting = min(errors, key=lambda each: errors[each])
    ways["kernels"] = KernelFill(train, gaussian, setting, device=options.device)
    found = {
        f"{part} {key}": fill(x, visible[part])
        for key, fill in ways.items()
        for part, x in (("val", val), ("test", test))
    }

    def write(path: Path) -> None:
        with path.open("wb") as opened:
            np.savez(opened, **found)

    kept(file, write)
    print(f"{name} hidden: {setting}", flush=True)
    return file


def filling(data: SpectraData, models: Mapping[int, ResidualMAE], filled: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return a row for each mask: errors of every method on test objects."""
    train, val, test = (data.x[rows] for rows in (data.train, data.val, data.test))
    seen_val, seen_test, rows = masks(data, data.val), masks(data, data.test), []
    for name, visible in seen_test.items():
        stored = np.load(filled[name])
        on_val, fills = ({key: stored[f"{part} {key}"] for key in FILLS} for part in ("val", "test"))
        hidden = ~seen_val[name]

        def mixture(
            on_val: Sequence[Array], on_test: Sequence[Array], hidden: Array = hidden
        ) -> tuple[list[float], Array]:
            shares = mixing_shares(np.stack([(filled - val)[hidden] for filled in on_val]))
            return shares.tolist(), np.tensordot(shares, np.stack(on_test), 1)

        def of(keys: Sequence[str], found: Mapping[str, Array]) -> list[Array]:
            return [found[key] for key in keys]

        fills["mixed"] = mixture(*(of(("gaussian", "nearest"), found) for found in (on_val, fills)))[1]
        fills["mean spectrum"] = np.broadcast_to(train.mean(axis=0), test.shape)
        ours = {seed: answers(model, test, visible)[0] for seed, model in models.items()}
        row: dict[str, Any] = {"hidden": name}
        mixtures = {}
        for way, others in MIXTURES.items():
            mixtures[way] = [
                mixture([answers(model, val, seen_val[name])[0], *of(others, on_val)], [ours[seed], *of(others, fills)])
                for seed, model in models.items()
            ]
        row["shares"] = [shares for shares, _ in mixtures["mixtures"]]
        fills["together"] = np.mean(list(ours.values()), axis=0)
        for kind, score in (("mean", masked_error), ("median", median_error)):
            row[kind] = {key: score(answer, test, visible) for key, answer in fills.items()}
            row[kind]["seeds"] = [score(answer, test, visible) for answer in ours.values()]
            for way, mixed in mixtures.items():
                row[kind][way] = [score(answer, test, visible) for _, answer in mixed]
        rows.append(row)
    return rows


def coverage(data: SpectraData, models: Mapping[int, ResidualMAE]) -> list[dict[str, Any]]:
    """Return, for each mask, the share of hidden test channels inside intervals, and the log likelihood.

    The variances of a method are multiplied by one factor, chosen so that 90 % of the validation channels are covered.
    """
    val, test = data.x[data.val], data.x[data.test]
    seen_val, seen_test = masks(data, data.val), masks(data, data.test)
    rows: list[dict[str, Any]] = [{"hidden": name} for name in seen_test]
    for way, ask in (("model", answers), ("gaussian", linear)):
        for model in list(models.values())[: None if way == "model" else 1]:
            ratios = []
            for visible in seen_val.values():
                mean, variance = ask(model, val, visible)
                ratios.append((((val - mean) ** 2) / variance)[~visible])
            factor = float(np.quantile(np.concatenate(ratios), 0.9)) / QUANTILES[0.9] ** 2
            for row, visible in zip(rows, seen_test.values(), strict=True):
                mean, variance = ask(model, test, visible)
                hidden, variance = ~visible, variance * factor
                ratio = (((test - mean) ** 2) / variance)[hidden]
                found = {str(level): float(np.mean(ratio < z**2)) for level, z in QUANTILES.items()}
                likelihood = -0.5 * (ratio + np.log(2 * np.pi * variance[hidden]))
                found |= {"log_likelihood": float(likelihood.mean()), "factor": factor}
                row.setdefault(way, []).append(found)
    return rows


# -- anomalies ----------------------------------------------------------------------------------------------------


def altered(data: SpectraData, kind: str) -> Array:
    """Return the test spectra with an anomaly each, rescaled by SNV."""
    rng = np.random.default_rng(0)
    x, wave = data.x[data.test].astype(np.float64), data.wavelengths
    if kind == "three channels absorbed":
        place = rng.integers(20, x.shape[1] - 20, len(x))
        for row, start in enumerate(place):
            x[row, start : start + 3] -= 0.25
    elif kind == "K band of another type":
        numbers = spectral_type_number(data.spt)
        for row, own in enumerate(numbers[data.test]):
            far = data.test[np.abs(numbers[data.test] - (own if np.isfinite(own) else 10)) >= 3]
            x[row, wave > 1.95] = data.x[rng.choice(far)][wave > 1.95]
    elif kind == "shifted by two channels":
        x = np.roll(x, 2, axis=1)
        x[:, :2] = x[:, 2:3]
    elif kind == "tilted":
        x += 0.3 * rng.choice([-1, 1], len(x))[:, None] * np.linspace(-1, 1, x.shape[1])
    return np.asarray(SNVScaler().transform(x), dtype=np.float32)


KINDS = ("three channels absorbed", "K band of another type", "shifted by two channels", "tilted")


def surprise(ask: Callable[[Array, Array], tuple[Array, Array]], x: Array) -> Array:
    """Return (N,) the summed negative log likelihood of each eighth of a spectrum given the rest."""
    total = np.zeros(len(x))
    width = x.shape[1] // 8
    for start in range(0, x.shape[1], width):
        visible = np.ones(x.shape, dtype=bool)
        visible[:, start : start + width] = False
        mean, variance = ask(x, visible)
        total += np.where(visible, 0.0, (x - mean) ** 2 / variance + np.log(variance)).sum(axis=1)
    return total


def anomalies(data: SpectraData, models: Mapping[int, ResidualMAE]) -> list[dict[str, Any]]:
    """Return, for each kind, the area under the ROC curve of every score, altered against unaltered test spectra."""
    from sklearn.decomposition import PCA
    from sklearn.ensemble import IsolationForest
    from sklearn.metrics import roc_auc_score

    train, test = data.x[data.train], data.x[data.test]
    pca = PCA(16, random_state=0).fit(train)
    forest = IsolationForest(n_estimators=300, random_state=0).fit(pca.transform(train))
    first = next(iter(models.values()))

    def nearest(x: Array) -> Array:
        squared = (x**2).sum(1)[:, None] + (train**2).sum(1)[None] - 2 * x @ train.T
        return np.asarray(np.sort(squared, axis=1)[:, :5].mean(axis=1))

    scores: dict[str, Callable[[Array], Array]] = {
        "gaussian": lambda x: surprise(lambda *given: linear(first, *given), x),
        "pca": lambda x: ((x - pca.inverse_transform(pca.transform(x))) ** 2).sum(axis=1),
        "nearest": nearest,
        "forest": lambda x: -forest.score_samples(pca.transform(x)),
    }
    for seed, model in models.items():
        scores[f"seed {seed}"] = lambda x, model=model: surprise(lambda *given: answers(model, *given), x)
    plain = {name: score(test) for name, score in scores.items()}
    rows = []
    truth = np.r_[np.zeros(len(test)), np.ones(len(test))]
    for kind in KINDS:
        x = altered(data, kind)
        found = {name: float(roc_auc_score(truth, np.r_[plain[name], score(x)])) for name, score in scores.items()}
        ours = [found.pop(f"seed {seed}") for seed in models]
        rows.append({"anomaly": kind, **found, "seeds": ours})
    return rows


# -- few labels ---------------------------------------------------------------------------------------------------


def gaussian_process(options: argparse.Namespace) -> dict[str, list[float]] | None:
    """Return the errors of a Gaussian process on the spectra by number of labels, over 20 draws."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    file = options.runs / "process.json"
    if file.exists():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    if time.time() > options.deadline:
        return None
    data = prepare_data(DataConfig(max_rows=options.max_rows))
    y = spectral_type_number(data.spt).astype(np.float64)
    pool, asked = data.train[np.isfinite(y[data.train])], np.sort(np.r_[data.val, data.test])
    asked = asked[np.isfinite(y[asked])]
    errors: dict[str, list[float]] = {}
    rng = np.random.default_rng(0)
    for size in [size for size in SIZES if size <= options.process_labels]:
        errors[str(size)] = []
        for _ in range(options.process_draws):
            rows = rng.choice(pool, size, replace=False)
            kernel = ConstantKernel(10.0) * RBF(10.0, (1.0, 1e3)) + WhiteKernel(0.1, (1e-6, 1e1))
            process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0).fit(data.x[rows], y[rows])
            errors[str(size)].append(float(np.abs(process.predict(data.x[asked]) - y[asked]).mean()))
    kept(file, lambda path: path.write_text(json.dumps(errors), encoding="utf-8"))
    return errors


def labelled(
    data: SpectraData, models: Mapping[int, ResidualMAE], stored: Sequence[Path], process: Mapping[str, list[float]]
) -> list[dict[str, Any]]:
    """Return a row for each representation: its error by number of labels, averaged over seeds and draws."""
    curves = [json.loads(path.read_text(encoding="utf-8"))["few_labels"] for path in stored]
    with torch.no_grad():
        device = next(next(iter(models.values())).parameters()).device
        x = torch.from_numpy(data.x).to(device)
        latents = {seed: model.encoder(x, torch.ones_like(x, dtype=torch.bool)).cpu() for seed, model in models.items()}
    target, held_out = spectral_type_number(data.spt), np.sort(np.r_[data.val, data.test])
    ours = [few_labels({"z": z}, target, data.train, held_out, seed=0)["z"] for z in latents.values()]
    named = {
        "ChemoMAE latent": [curve["chemomae"] for curve in curves],
        **{name: [curve[key] for curve in curves] for key, name in (
            ("pca8", "PCA, 8 components"), ("pca16", "PCA, 16 components"), ("raw", "spectra as they are"),
            ("untrained", "untrained encoder"))},
        "ResidualMAE latent": ours,
    }  # fmt: skip
    rows = []
    for name, each in named.items():
        row: dict[str, Any] = {"neighbours in": name}
        for place, size in enumerate(each[0]["labels"]):
            means, error = [curve["mae"][place] for curve in each], [curve["standard_error"][place] for curve in each]
            row[str(size)] = f"{statistics.mean(means):.3f} ± {statistics.mean(error):.3f}"
        rows.append(row)
    row = {"neighbours in": "Gaussian process on the spectra"}
    for size, errors in process.items():
        row[size] = f"{statistics.mean(errors):.3f} ± {statistics.stdev(errors) / len(errors) ** 0.5:.3f}"
    return [*rows, row]


# -- meat ---------------------------------------------------------------------------------------------------------


class WithComposition(ResidualMAE):
    """Model of spectra with their composition appended and hidden; in half of the rows, channels are hidden too."""

    def make_visible(self, batch_size: int, **options: Any) -> torch.Tensor:
        visible = super().make_visible(batch_size, **{**options, "device": "cpu"})
        visible |= torch.rand(batch_size, 1) < 0.5
        visible[:, -10:] = False
        device = options.get("device") or self.decoder.weight.device
        return visible.to(device)


def meat(split: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return errors of water, fat and protein in Tecator for each method, on a fifth of the samples."""
    file = options.runs / f"meat-{split}.json"
    result = dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
    if all(name in result for name in CHEMISTS):
        return result
    if time.time() > options.deadline:
        return None
    torch.set_num_threads(1)
    tecator = load_tecator()
    y = tecator.composition.astype(np.float64)
    order = np.random.default_rng(split).permutation(len(y))
    train, test = order[43:], order[:43]
    center, scale = y[train].mean(axis=0), y[train].std(axis=0)
    target = (y - center) / scale
    views = {
        name: (x - x[train].mean(axis=0)) / x[train].std(axis=0)
        for name, x in pretreatments(tecator.spectra.astype(np.float64)).items()
    }
    result["columns"] = tecator.composition_columns
    for name, ask in CHEMISTS.items():
        if name not in result:
            mean, deviation = ask(views, target, train, test, split, options)
            off = (mean - target[test]) * scale
            result[name] = {"rmse": np.sqrt((off**2).mean(axis=0)).tolist()}
            if deviation is not None:
                inside = np.abs(mean - target[test]) < QUANTILES[0.9] * deviation
                result[name]["covered"] = inside.mean(axis=0).tolist()
            kept(file, lambda path: path.write_text(json.dumps(result), encoding="utf-8"))
            print(f"meat, split {split}, {name}", flush=True)
    return result


def least_squares(
    views: Mapping[str, Array], y: Array, train: Array, test: Array, seed: int, options: argparse.Namespace
) -> tuple[Array, None]:
    """Predict by PLS with the pretreatment and number of components that are best in five folds."""
    from sklearn.cross_decomposition import PLSRegression
    from sklearn.model_selection import GridSearchCV

    found = []
    for column in range(y.shape[1]):
        grid = {"n_components": list(range(2, options.most_components))}
        tried = [
            (GridSearchCV(PLSRegression(scale=False), grid, cv=5, scoring="neg_mean_squared_error"), x)
            for x in views.values()
        ]
        search, x = max(
            ((each.fit(x[train], y[train, column]), x) for each, x in tried), key=lambda t: t[0].best_score_
        )
        found.append(search.predict(x[test]).ravel())
    return np.stack(found, axis=1), None


def kernels(
    views: Mapping[str, Array], y: Array, train: Array, test: Array, seed: int, options: argparse.Namespace
) -> tuple[Array, Array]:
    """Predict by kernel regressions on all pretreatments, tuned and mixed on held-out training samples."""
    given, asked = ({name: x[rows] for name, x in views.items()} for rows in (train, test))
    found = [KernelStack(given, y[train, column], **options.kernels)(asked) for column in range(y.shape[1])]
    return np.stack([each.mean for each in found], axis=1), np.stack([each.deviation for each in found], axis=1)


def process(views: Mapping[str, Array], y: Array, train: Array, test: Array, *_: Any) -> tuple[Array, Array]:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    x, means, deviations = views["snv"], [], []
    for column in range(y.shape[1]):
        kernel = ConstantKernel(10.0, (1e-3, 1e8)) * RBF(30.0, (1.0, 1e5)) + WhiteKernel(1e-2, (1e-8, 1.0))
        model = GaussianProcessRegressor(kernel, n_restarts_optimizer=2, random_state=0)
        mean, deviation = model.fit(x[train], y[train, column]).predict(x[test], return_std=True)
        means.append(mean)
        deviations.append(deviation)
    return np.stack(means, axis=1), np.stack(deviations, axis=1)


def residual(
    views: Mapping[str, Array], y: Array, train: Array, test: Array, seed: int, options: argparse.Namespace
) -> tuple[Array, Array]:
    """Predict by the conditional mean of the composition: the linear one, corrected by the network."""
    rows = torch.from_numpy(np.concatenate([views["snv"], y, np.zeros((len(y), 7))], axis=1))
    means, variances = [], []
    for member in range(3):
        treadle.set_seed(100 * seed + member)
        model = WithComposition(
            seq_len=110, d_model=64, num_layers=2, decoder_layers=1, dim_feedforward=128, patch=10, rank=30,
            n_blocks=11, n_mask=1, latent_dim=16,
        ).double()  # fmt: skip
        model.fit(rows[train], shrinkage=1e-5)
        optimizer = build_optimizer(model, lr=2e-3, weight_decay=0.05)
        epochs = options.meat_epochs
        scheduler = build_scheduler(optimizer, steps_per_epoch=6, epochs=epochs, warmup_epochs=1, min_lr_scale=0.01)
        with tempfile.TemporaryDirectory() as folder:
            cfg = TrainerConfig(out_dir=folder, device="cpu", amp=False, ema_decay=0.98, selection="last")
            loader = DataLoader(TensorDataset(rows[train]), 32, shuffle=True)
            SpectraTrainer(model, optimizer, loader, scheduler=scheduler, cfg=cfg, progress=False).fit(epochs)
            model.load_state_dict(treadle.load_weights(Path(folder) / "ema_last_model.pt"))
        model.eval()
        visible = torch.ones(len(test), 110, dtype=torch.bool)
        visible[:, -10:] = False
        with torch.no_grad():
            mean, _, _, unsure = model(rows[test], visible, with_uncertainty=True)
        means.append(mean[:, 100:103].numpy())
        variances.append(unsure.log_variance.exp()[:, 100:103].numpy())
    mean = np.mean(means, axis=0)
    return mean, np.sqrt(np.mean(variances, axis=0) + np.var(means, axis=0))


CHEMISTS: dict[str, Any] = {
    "KernelStack, five pretreatments": kernels, "Gaussian process": process,
    "PLS, best of five pretreatments": least_squares, "ResidualMAE, three members": residual,
}  # fmt: skip

FEW = "Error of the spectral type in sub-types by the number of labelled dwarfs, ± standard error over draws"

# -- the tables ---------------------------------------------------------------------------------------------------


PEERS = {"gaussian": "Gaussian", "pca": "PCA", "nearest": "nearest", "mixed": "Gaussian + nearest"}


def won(ours: Sequence[float], best: float) -> str:
    return "each seed" if max(ours) < best else "mean" if statistics.mean(ours) < best else "no"


def filling_table(rows: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, str]]:
    table = []
    for row in rows:
        found = row[kind]
        best = min(found[key] for key in PEERS)
        table.append({
            "hidden": row["hidden"], "mixture": spread(found["mixtures"], 5),
            "mixture without kernels": spread(found["without kernels"], 5),
            "ResidualMAE": spread(found["seeds"], 5), "its seeds together": f"{found['together']:.5f}",
            **{name: f"{found[key]:.5f}" for key, name in PEERS.items()},
            "Gaussian + kernels": f"{found['kernels']:.5f}", "mean spectrum": f"{found['mean spectrum']:.3f}",
            "mixture below Gaussian to nearest": won(found["mixtures"], best),
            "mixture below the kernels": won(found["mixtures"], found["kernels"]),
            "without kernels below Gaussian to nearest": won(found["without kernels"], best),
            "ResidualMAE below these": won(found["seeds"], best),
            "shares of model, Gaussian, nearest, kernels": "; ".join(
                " ".join(f"{share:.2f}" for share in shares) for shares in row["shares"]
            ),
        })  # fmt: skip
    return table


def coverage_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    table = []
    for row in rows:
        cells = {"hidden": row["hidden"]}
        for way, name in (("model", "ResidualMAE"), ("gaussian", "Gaussian")):
            for level in QUANTILES:
                cells[f"{name}, {level:.0%}"] = f"{statistics.mean(found[str(level)] for found in row[way]):.1%}"
            cells[f"{name}, log likelihood"] = f"{statistics.mean(found['log_likelihood'] for found in row[way]):.3f}"
        table.append(cells)
    return table


def anomaly_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    names = {"gaussian": "Gaussian", "pca": "PCA-16 residual", "nearest": "5 nearest", "forest": "isolation forest"}
    table = []
    for row in rows:
        theirs = {name: f"{row[key]:.3f}" for key, name in names.items()}
        table.append({"anomaly": row["anomaly"], "ResidualMAE": spread(row["seeds"], 3), **theirs})
    return table


def meat_table(results: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    table = []
    for name in CHEMISTS:
        row = {"method": name}
        for place, column in enumerate(results[0]["columns"]):
            row[f"{column}, RMSE %"] = spread([result[name]["rmse"][place] for result in results], 2)
        covered = [value for result in results for value in result[name].get("covered", ())]
        row["90 % intervals cover"] = f"{statistics.mean(covered):.0%}" if covered else ""
        table.append(row)
    return table


def main() -> None:
    parser = options_of("spectra_science", __doc__)
    add_training(parser)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--finish", action="store_true", help="train nothing more: a table of the results so far")
    options = parsed(parser)
    options.repeats, options.max_rows, options.model, options.chemomae = REPEATS, None, {}, ["trainer.amp=false"]
    options.process_labels, options.process_draws, options.meat_epochs, splits = 200, 20, 60, 5
    options.most_components, options.kernels, options.rows_tried = 26, {}, 16
    options.settings = [Setting(*each) for each in product(KINKED, (0.03, 0.1, 0.3, 1.0, 3.0), NOISES[7:])]
    if options.tiny:
        options.seeds, options.epochs, options.repeats = [0, 1], 2, 1
        options.max_rows, options.process_labels, options.process_draws, options.meat_epochs = 300, 20, 2, 2
        options.model = {"d_model": 16, "num_layers": 1, "decoder_layers": 1, "dim_feedforward": 16, "rank": 16}
        options.chemomae = ["epochs=1", "data.max_rows=300", "model.d_model=8", "model.dim_feedforward=8",
                            "schedule.warmup_epochs=0"]  # fmt: skip
        options.settings, options.rows_tried = options.settings[:2], 1
        splits, options.most_components, options.kernels = 2, 4, {"widths": (0.01, 0.1), "noises": (1e-4,)}
    if options.finish:
        options.deadline = 0.0
    with pool_of(options.jobs) as pool:
        ours: list[Future[Path | None]] = [pool.submit(train_residual, seed, options) for seed in options.seeds]
        theirs = [pool.submit(train_chemomae, seed, options) for seed in options.seeds]
        gaussian = pool.submit(gaussian_process, options)
        peers = {name: pool.submit(fill_in, name, options) for name in [*COUNTS, *BANDS]}
        samples = [pool.submit(meat, split, options) for split in range(splits)]
        weights, stored = [each.result() for each in ours], [each.result() for each in theirs]
        labels, tested = gaussian.result(), [each.result() for each in samples]
        filled = {name: each.result() for name, each in peers.items()}
    unfinished = [name for name, each in {
        "ResidualMAE": weights, "ChemoMAE": stored, "the Gaussian process": [labels], "meat": tested,
        "the peers": list(filled.values()),
    }.items() if None in each]  # fmt: skip
    if (unfinished and not options.finish) or weights[0] is None or None in filled.values():
        print("not finished: the same command resumes")
        return
    data = prepare_data(DataConfig(max_rows=options.max_rows))
    models = {}
    for seed, path in zip(options.seeds, weights, strict=True):
        if path is not None:
            model = ResidualMAE(seq_len=data.x.shape[1], **{**MODEL, **options.model})
            model.load_state_dict(treadle.load_weights(str(path)))
            models[seed] = model.to(options.device).eval()
    found = [path for path in stored if path], labels, [each for each in tested if each]
    tables = tables_of(data, models, {name: path for name, path in filled.items() if path}, *found)
    notes = [f"{len(models)} seeds of ResidualMAE, {len([p for p in stored if p])} of ChemoMAE. " + _epochs(options)]
    notes += [f"Not finished: {', '.join(unfinished)}."] if unfinished else []
    notes += [f"Trained on {options.trained_on}."] if options.trained_on else []
    title, first = next(tables)
    for following, rows in tables:
        if not options.tiny:  # the next table may take long, so this one is saved first
            write_result("spectra_science", title, list(first[0]), first, describe(), notes=notes, partial=True)
        notes.append(as_markdown(following, rows))
    if options.tiny:
        print(first, *notes, sep="\n\n")
        return
    write_result("spectra_science", title, list(first[0]), first, describe(), notes=notes)


def tables_of(
    data: SpectraData,
    models: Mapping[int, ResidualMAE],
    peers: Mapping[str, Path],
    stored: Sequence[Path],
    labels: Any,
    tested: Sequence[Any],
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield titles and tables."""
    filled = filling(data, models, peers)
    yield "Spectra: mean squared error over hidden channels, test objects, ± over seeds", filling_table(filled, "mean")
    yield "Median over test objects of their mean squared error", filling_table(filled, "median")
    if stored:
        yield FEW, labelled(data, models, stored, labels or {})
    title = "Share of hidden test channels inside their intervals, and mean log likelihood of a channel"
    yield title, coverage_table(coverage(data, models))
    if tested:
        yield "Meat (Tecator), splits into 172 and 43 samples", meat_table(tested)
    yield "Anomalies in test spectra: area under the ROC curve", anomaly_table(anomalies(data, models))


def _epochs(options: argparse.Namespace) -> str:
    """Return the number of epochs that the trainings completed."""
    found = []
    for seed in options.seeds:
        file = options.runs / f"residual-{seed}-{options.epochs}" / "training_history.json"
        found.append(len(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else 0)
    return f"Epochs of ResidualMAE: {', '.join(map(str, found))} of {options.epochs}, the best by validation is tested."


if __name__ == "__main__":
    main()
