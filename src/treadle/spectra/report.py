"""The results of ``treadle train spectra``: test loss, honest probes, clusters, pictures, tables."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from treadle.checkpoint.store import load_weights
from treadle.engine.evaluation import evaluation_mode
from treadle.runs.report import Picture, Report, Table
from treadle.runs.results import Results
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


def finish_run(
    config: SpectraConfig, data: SpectraData, trainer: SpectraTrainer, untrained: nn.Module, out: Path
) -> Results:
    """Tests the best weights, probes and draws them.

    Args:
        config: the settings of the run.
        data: the spectra and their split.
        trainer: after ``fit``; its model gets the best weights.
        untrained: the model with the weights it started from.
        out: the run folder; gets ``pictures/``.
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
    }
    return Results(metrics, _draw(out / "pictures", data, trainer, latent, cluster))


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
) -> list[Picture]:
    folder.mkdir(parents=True, exist_ok=True)
    curves = plot_training_curves(trainer.history, folder / "training_curves.png")
    rows = _of_all_types(data)
    recon, visible = _reconstruct(trainer.model, data.x[rows], trainer.device)
    titles = [f"{data.name[row]}, {data.spt[row] or 'type unknown'}" for row in rows]
    reconstructions = plot_reconstructions(
        data.wavelengths, data.x[rows], recon, visible, titles, folder / "reconstructions.png",
        wavelength_unit=data.wavelength_unit,
    )  # fmt: skip
    latent_map = plot_latent_map(latent, data.spt, folder / "latent_map.png")
    cluster_map = plot_cluster_map(
        latent, cluster, data.x, data.wavelengths, folder / "cluster_map.png",
        labels=data.spt, wavelength_unit=data.wavelength_unit,
    )  # fmt: skip
    return [
        Picture(
            reconstructions, "Reconstructions",
            "Test spectra from the earliest to the latest type. Shaded: hidden from the model, which filled it in.",
        ),
        Picture(
            latent_map, "The latent", "A dot for each spectrum, by the first two principal components of the latent, "
            "coloured by spectral type, which the model was never given.",
        ),
        Picture(cluster_map, "Clusters", "The latent, clustered by angle, beside the mean spectrum of each cluster."),
        Picture(curves, "Training", "The loss by epoch; the best epoch is marked. Below, the learning rate."),
    ]  # fmt: skip


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


# -- the tables ---------------------------------------------------------------------------------------------------


def results(metrics: Mapping[str, Any]) -> Report:
    """Returns the tables of a run from the content of ``metrics.json``."""
    base, epoch = metrics["baselines"], metrics["best_epoch"]
    name = f"ChemoMAE, epoch {epoch}" if epoch > 0 else f"ChemoMAE, epoch {metrics['epochs']}"
    losses = {
        name: (metrics["val_loss"], metrics["test_loss"]),
        "guess: mean training spectrum": (base["mean_spectrum_val"], base["mean_spectrum_test"]),
        "guess: mean of the row": (base["row_mean"], base["row_mean"]),
    }
    rows = [[name, *(f"{loss:.4f}" for loss in pair)] for name, pair in losses.items()]
    tables = [Table(["", "validation", "test"], rows, title="Masked reconstruction", width=30)]
    return Report(
        title="A masked autoencoder on spectra",
        lead="Near-infrared spectra of cool dwarfs (SpeX), most of each hidden from the model, which fills it in. The "
        "losses are those of the hidden parts, of objects kept out of training.",
        tables=[*tables, *([_probe_table(metrics["probe"])] if metrics["probe"] else [])],
        note=f"{metrics['clusters']['k']} clusters of the latent, see the cluster map.",
        files=[
            f"  page.html  {metrics['weights']}  metrics.json  run.json  config.json  training_history.json  "
            "checkpoints/",
            "  pictures/  training_curves.png  reconstructions.png  latent_map.png  cluster_map.png",
        ],
    )  # fmt: skip


def _probe_table(probe: Mapping[str, Any]) -> Table:
    folds = next(iter(probe.values()))["num_folds"]
    rows = []
    for name, scores in probe.items():
        cells = [scores["j_minus_k_r2"], scores["spectral_class_balanced_accuracy"]]
        row = [f"{cell['mean']:.3f} ± {cell['std']:.3f}" for cell in cells]
        rows.append([f"{_PROBE_NAMES.get(name, 'PCA')}, {scores['num_features']} numbers", *row])
    return Table(
        ["", "J-K, R²", "M/L/T, balanced accuracy"], rows, width=30,
        title=f"Linear probes, {folds} folds by object, ± over folds",
    )  # fmt: skip


_PROBE_NAMES = {"chemomae": "ChemoMAE latent", "untrained": "untrained encoder"}
