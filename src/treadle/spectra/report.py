"""What a run of ``treadle train spectra`` ends with: test loss, honest probes, clusters, pictures, a short table."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from treadle.checkpoint.store import load_weights, write_text
from treadle.engine.evaluation import evaluation_mode
from treadle.hooks.history import to_json
from treadle.runs.tables import print_table
from treadle.spectra.clustering import CosineKMeans, elbow_ckmeans, silhouette_score_cosine
from treadle.spectra.inference import Extractor, ExtractorConfig, Tester, TesterConfig
from treadle.spectra.pictures import plot_cluster_map, plot_latent_map, plot_reconstructions, plot_training_curves
from treadle.spectra.probes import compare_probes, pca_features
from treadle.spectra.run_config import SpectraConfig
from treadle.spectra.run_data import SpectraData
from treadle.spectra.trainer import SpectraTrainer

_log = logging.getLogger("treadle.cli")

_MOST_CLUSTERS = 16
_PANELS = 8


def evaluate_run(
    config: SpectraConfig, data: SpectraData, trainer: SpectraTrainer, untrained: nn.Module, out: Path
) -> dict[str, Any]:
    """Tests the best weights, probes and draws them, and writes ``metrics.json`` last of all.

    Args:
        config: the settings of the run.
        data: the spectra and their split.
        trainer: after ``fit``; its model gets the best weights.
        untrained: the model with the weights it started from.
        out: the run folder.

    Returns:
        What was written to ``metrics.json``.
    """
    model = trainer.model
    exported = "best_model.pt" if trainer.cfg.selection == "best" else "ema_last_model.pt"
    if not (out / exported).exists():
        exported = "last_model.pt"
    model.load_state_dict(load_weights(out / exported))
    latent = _latents(model, data, config, trainer.device)
    baseline = _latents(untrained, data, config, trainer.device)
    cluster, clusters = _cluster(latent)
    metrics = {
        "treadle": version("treadle"),
        "epochs": trainer.epoch,
        "best_epoch": trainer.best["epoch"],
        "weights": exported,
        "val_loss": _loss(model, data, data.val, config, trainer.device),
        "test_loss": _loss(model, data, data.test, config, trainer.device),
        "baselines": _baselines(data),
        "probe": _probe(latent, baseline, data, config),
        "clusters": clusters,
        "rows": {"all": len(data.x), "train": len(data.train), "val": len(data.val), "test": len(data.test)},
        "objects": data.num_groups,
        "device": str(trainer.device),
        "config": config.to_dict(),
    }
    _draw(out / "pictures", data, trainer, latent, cluster)
    # The last file of a run: where it is and has these settings, nothing is left to do.
    write_text(json.dumps(to_json(metrics), indent=2, allow_nan=False) + "\n", out / "metrics.json")
    return metrics


def _latents(
    model: nn.Module, data: SpectraData, config: SpectraConfig, device: torch.device
) -> npt.NDArray[np.float32]:
    cfg = ExtractorConfig(
        device=str(device), amp=config.trainer.amp, amp_dtype=config.trainer.amp_dtype, return_numpy=True
    )
    return np.asarray(Extractor(model, cfg)(data.loader(np.arange(len(data.x)), 256)), dtype=np.float32)


def _loss(
    model: nn.Module, data: SpectraData, rows: npt.NDArray[np.intp], config: SpectraConfig, device: torch.device
) -> float:
    trainer = config.trainer
    cfg = TesterConfig(
        device=str(device), amp=trainer.amp, amp_dtype=trainer.amp_dtype, loss_type=trainer.loss_type,
        reduction=trainer.reduction, log_history=False, eval_seed=trainer.eval_seed,
    )  # fmt: skip
    return Tester(model, cfg)(data.loader(rows, 256))


def _baselines(data: SpectraData) -> dict[str, float]:
    """Mean squared errors of two guesses that need no model.

    ``row_mean``: the mean of the spectrum itself, 0 after SNV, so (L - 1) / L. ``mean_spectrum``: the mean of all
    training spectra, channel by channel.
    """
    length = data.x.shape[1]
    guess = data.x[data.train].mean(axis=0)
    return {
        "row_mean": (length - 1) / length,
        "mean_spectrum_val": float(np.mean((data.x[data.val] - guess) ** 2)),
        "mean_spectrum_test": float(np.mean((data.x[data.test] - guess) ** 2)),
    }


def _probe(
    latent: npt.NDArray[np.float32], untrained: npt.NDArray[np.float32], data: SpectraData, config: SpectraConfig
) -> dict[str, Any]:
    """Linear probes of the latent, of as many principal components, and of the encoder before training."""
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    size = latent.shape[1]
    try:
        features = {
            "chemomae": latent,
            f"pca{size}": pca_features(data.x[data.train], data.x, size),
            "untrained": untrained,
        }
        # On matrices this small, threads of BLAS wait for each other longer than they compute.
        with threadpool_limits(1):
            return dict(
                compare_probes(features, data.j_minus_k, data.spectral_class, groups=data.groups, seed=config.seed)
            )
    except ValueError as error:
        _log.warning("no probes: %s", error)
        return {}


def _cluster(latent: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], dict[str, Any]]:
    """Clusters the latent by angle; the number of clusters is where the inertia has its elbow."""
    _, _, count, _, _ = elbow_ckmeans(CosineKMeans, latent, device="cpu", k_max=min(_MOST_CLUSTERS, len(latent)))
    fitted = CosineKMeans(n_components=count, device="cpu")
    labels = np.asarray(fitted.fit_predict(latent)).astype(np.int64)
    score = silhouette_score_cosine(latent, labels) if len(np.unique(labels)) > 1 else None
    return labels, {"k": count, "inertia": fitted.inertia_, "silhouette": score}


# -- pictures -----------------------------------------------------------------------------------------------------


def _draw(
    folder: Path,
    data: SpectraData,
    trainer: SpectraTrainer,
    latent: npt.NDArray[np.float32],
    cluster: npt.NDArray[np.int64],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plot_training_curves(trainer.history, folder / "training_curves.png")
    rows = _of_all_types(data)
    recon, visible = _reconstruct(trainer.model, data.x[rows], trainer.device)
    titles = [f"{data.name[row]}, {data.spt[row] or 'type unknown'}" for row in rows]
    plot_reconstructions(
        data.wavelengths, data.x[rows], recon, visible, titles, folder / "reconstructions.png",
        wavelength_unit=data.wavelength_unit,
    )  # fmt: skip
    plot_latent_map(latent, data.spt, folder / "latent_map.png")
    plot_cluster_map(
        latent, cluster, data.x, data.wavelengths, folder / "cluster_map.png",
        labels=data.spt, wavelength_unit=data.wavelength_unit,
    )  # fmt: skip


def _of_all_types(data: SpectraData) -> npt.NDArray[np.intp]:
    """Test spectra from the earliest to the latest type, evenly spaced in the order of types, none picked by hand."""
    from treadle.datasets.spectral_types import spectral_type_number

    numbers = spectral_type_number(data.spt[data.test])
    order = data.test[np.argsort(numbers, kind="stable")]  # unknown types, NaN, come last
    order = order[: max(int(np.isfinite(numbers).sum()), min(_PANELS, len(order)))]
    places = np.unique(np.linspace(0, len(order) - 1, _PANELS).round().astype(np.intp))
    return np.asarray(order[places], dtype=np.intp)


def _reconstruct(
    model: nn.Module, x: npt.NDArray[np.float32], device: torch.device
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    with evaluation_mode(model):
        generator = torch.Generator().manual_seed(0)
        recon, _, visible = model(torch.from_numpy(x).to(device), generator=generator)
    return recon.float().cpu().numpy(), visible.cpu().numpy()


# -- the table ----------------------------------------------------------------------------------------------------


def print_results(metrics: Mapping[str, Any], out: Path, console: Console) -> None:
    """Prints the short table of a run from what ``metrics.json`` holds."""
    base = metrics["baselines"]
    losses = Table(title="Masked reconstruction", title_justify="left", box=None, pad_edge=False)
    losses.add_column("", min_width=30)
    losses.add_column("validation", justify="right")
    losses.add_column("test", justify="right")
    epoch = metrics["best_epoch"]
    name = f"ChemoMAE, epoch {epoch}" if epoch > 0 else f"ChemoMAE, epoch {metrics['epochs']}"
    losses.add_row(name, f"{metrics['val_loss']:.4f}", f"{metrics['test_loss']:.4f}")
    mean_val, mean_test = base["mean_spectrum_val"], base["mean_spectrum_test"]
    losses.add_row("guess: mean training spectrum", f"{mean_val:.4f}", f"{mean_test:.4f}")
    losses.add_row("guess: mean of the row", f"{base['row_mean']:.4f}", f"{base['row_mean']:.4f}")
    console.print()
    print_table(losses, console)
    if metrics["probe"]:
        console.print()
        print_table(_probe_table(metrics["probe"]), console)
    clusters = metrics["clusters"]
    console.print(f"\n{clusters['k']} clusters of the latent, see the cluster map. Files in {out}:", soft_wrap=True)
    for line in (
        f"  {metrics['weights']}  metrics.json  config.json  training_history.json  checkpoints/",
        "  pictures/  training_curves.png  reconstructions.png  latent_map.png  cluster_map.png",
    ):
        console.print(line, soft_wrap=True, markup=False)


def _probe_table(probe: Mapping[str, Any]) -> Table:
    folds = next(iter(probe.values()))["num_folds"]
    table = Table(
        title=f"Linear probes, {folds} folds by object, ± over folds", title_justify="left", box=None, pad_edge=False
    )
    table.add_column("", min_width=30)
    table.add_column("J-K, R²", justify="right")
    table.add_column("M/L/T, balanced accuracy", justify="right")
    for name, scores in probe.items():
        cells = [scores["j_minus_k_r2"], scores["spectral_class_balanced_accuracy"]]
        row = [f"{cell['mean']:.3f} ± {cell['std']:.3f}" for cell in cells]
        table.add_row(f"{_PROBE_NAMES.get(name, 'PCA')}, {scores['num_features']} numbers", *row)
    return table


_PROBE_NAMES = {"chemomae": "ChemoMAE latent", "untrained": "untrained encoder"}
