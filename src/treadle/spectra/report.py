"""Report of ``treadle train spectra``: test loss, probes, clusters, plots and tables."""

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
from treadle.datasets.spectral_types import spectral_type_number
from treadle.engine.evaluation import evaluation_mode
from treadle.runs.report import Picture, Report, Table
from treadle.runs.results import Results
from treadle.spectra.clustering import CosineKMeans, elbow_ckmeans, silhouette_score_cosine
from treadle.spectra.few_labels import HEADLINE, FewLabels, difference, few_labels, few_labels_regression
from treadle.spectra.fills import choose_fills, masked_error
from treadle.spectra.inference import Extractor, ExtractorConfig, Tester, TesterConfig
from treadle.spectra.pictures import (
    plot_cluster_map,
    plot_few_labels,
    plot_latent_map,
    plot_reconstructions,
    plot_training_curves,
)
from treadle.spectra.probes import compare_probes, pca_features
from treadle.spectra.run_config import SpectraConfig
from treadle.spectra.run_data import SpectraData
from treadle.spectra.trainer import SpectraTrainer

_log = logging.getLogger("treadle.cli")

_MOST_CLUSTERS = 16
_PANELS = 8
_COMPONENTS = (8, 16, 64)


def finish_run(
    config: SpectraConfig, data: SpectraData, trainer: SpectraTrainer, untrained: nn.Module, out: Path
) -> Results:
    """Test and probe the best weights, and draw the plots.

    Args:
        config: the settings of the run.
        data: the spectra and their split.
        trainer: after ``fit``; its model receives the best weights.
        untrained: the model with its initial weights.
        out: the run folder; plots go to ``pictures/``.
    """
    model = trainer.model
    exported = "best_model.pt" if trainer.cfg.selection == "best" else "ema_last_model.pt"
    if not (out / exported).exists():
        exported = "last_model.pt"
    model.load_state_dict(load_weights(out / exported))
    _log.info("  latents and clusters")
    latent = _latents(model, data, config, trainer.device)
    baseline = _latents(untrained, data, config, trainer.device)
    cluster, clusters = _cluster(latent)
    val_loss, val_visible = _loss(model, data, data.val, config, trainer.device)
    test_loss, test_visible = _loss(model, data, data.test, config, trainer.device)
    metrics = {
        "epochs": trainer.epoch,
        "best_epoch": trainer.best["epoch"],
        "weights": exported,
        "val_loss": val_loss,
        "test_loss": test_loss,
        "baselines": _baselines(data, val_visible, test_visible),
        "few_labels": _few_labels(latent, baseline, data, config),
        "probe": _probe(latent, baseline, data, config),
        "clusters": clusters,
        "rows": {"all": len(data.x), "train": len(data.train), "val": len(data.val), "test": len(data.test)},
        "objects": data.num_groups,
    }
    _log.info("  plots")
    curve = _draw_few_labels(out / "pictures", metrics["few_labels"])
    return Results(metrics, [*curve, *_draw(out / "pictures", data, trainer, latent, cluster)])


def _latents(
    model: nn.Module, data: SpectraData, config: SpectraConfig, device: torch.device
) -> npt.NDArray[np.float32]:
    cfg = ExtractorConfig(
        device=str(device), amp=config.trainer.amp, amp_dtype=config.trainer.amp_dtype, return_numpy=True
    )
    return np.asarray(Extractor(model, cfg)(data.loader(np.arange(len(data.x)), 256)), dtype=np.float32)


def _loss(
    model: nn.Module, data: SpectraData, rows: npt.NDArray[np.intp], config: SpectraConfig, device: torch.device
) -> tuple[float, npt.NDArray[np.bool_]]:
    """Return the loss of some rows, and the masks (N, L) used, True = visible."""
    trainer = config.trainer
    cfg = TesterConfig(
        device=str(device), amp=trainer.amp, amp_dtype=trainer.amp_dtype, loss_type=trainer.loss_type,
        reduction=trainer.reduction, log_history=False, eval_seed=trainer.eval_seed,
    )  # fmt: skip
    masks: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda module, given, output: masks.append(output[2]))
    try:
        loss = Tester(model, cfg)(data.loader(rows, 256))
    finally:
        handle.remove()
    return loss, torch.cat(masks).cpu().numpy()


def _baselines(
    data: SpectraData, val_visible: npt.NDArray[np.bool_], test_visible: npt.NDArray[np.bool_]
) -> dict[str, float]:
    """Return masked squared errors of baselines without a network, under the masks used to test the model.

    ``row_mean``: the mean of the spectrum itself, 0 after SNV, so (L - 1) / L. ``mean_spectrum``: the mean of all
        training spectra, per channel. ``gaussian``: the conditional mean from the covariance of the training spectra.
        ``pca``: least squares in their first principal components. ``nearest``: the training spectra nearest in the
        visible channels. The settings of the last three have the lowest error on the validation spectra.
    """
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    _log.info("  baselines without a network")
    length = data.x.shape[1]
    train, val, test = (data.x[rows] for rows in (data.train, data.val, data.test))
    guess = train.mean(axis=0)
    found = {
        "row_mean": (length - 1) / length,
        "mean_spectrum_val": masked_error(np.broadcast_to(guess, val.shape), val, val_visible),
        "mean_spectrum_test": masked_error(np.broadcast_to(guess, test.shape), test, test_visible),
    }
    with threadpool_limits(1):
        for name, chosen in choose_fills(train, val, val_visible).items():
            found[f"{name}_val"] = chosen.error
            found[f"{name}_test"] = masked_error(chosen.fill(test, test_visible), test, test_visible)
            found[f"{name}_setting"] = chosen.setting
    return found


def _few_labels(
    latent: npt.NDArray[np.float32], untrained: npt.NDArray[np.float32], data: SpectraData, config: SpectraConfig
) -> dict[str, Any]:
    """Predict sub-types of test spectra, unseen in training and unlabelled, from a few labelled training spectra."""
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    _log.info("  sub-types from few labels")
    features = {_OURS[config.model.residual]: latent}
    train = data.x[data.train]
    for size in _COMPONENTS:
        if size <= min(train.shape):
            features[f"pca{size}"] = pca_features(train, data.x, size)
    features |= {"raw": data.x, "untrained": untrained}
    target, held_out = spectral_type_number(data.spt), np.sort(np.concatenate([data.val, data.test]))
    try:
        curves = few_labels(features, target, data.train, held_out, seed=config.seed)
        with threadpool_limits(1):
            curves["regression"] = few_labels_regression(data.x, target, data.train, held_out, seed=config.seed)
        return dict(curves)
    except ValueError as error:
        _log.warning("skipping the sub-types from few labels: %s", error)
        return {}


def _probe(
    latent: npt.NDArray[np.float32], untrained: npt.NDArray[np.float32], data: SpectraData, config: SpectraConfig
) -> dict[str, Any]:
    """Fit linear probes to the latent, to as many principal components, and to the untrained encoder's latent."""
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    _log.info("  linear probes")
    size = latent.shape[1]
    try:
        features = {
            _OURS[config.model.residual]: latent,
            f"pca{size}": pca_features(data.x[data.train], data.x, size),
            "untrained": untrained,
        }
        # On matrices this small, BLAS threads spend more time waiting for each other than computing.
        with threadpool_limits(1):
            return dict(
                compare_probes(features, data.j_minus_k, data.spectral_class, groups=data.groups, seed=config.seed)
            )
    except ValueError as error:
        _log.warning("skipping the probes: %s", error)
        return {}


def _cluster(latent: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], dict[str, Any]]:
    """Cluster the latent by angle, with the number of clusters at the elbow of the inertia."""
    _, _, count, _, _ = elbow_ckmeans(CosineKMeans, latent, device="cpu", k_max=min(_MOST_CLUSTERS, len(latent)))
    fitted = CosineKMeans(n_components=count, device="cpu")
    labels = np.asarray(fitted.fit_predict(latent)).astype(np.int64)
    score = silhouette_score_cosine(latent, labels) if len(np.unique(labels)) > 1 else None
    return labels, {"k": count, "inertia": fitted.inertia_, "silhouette": score}


# -- plots --------------------------------------------------------------------------------------------------------


def _draw_few_labels(folder: Path, curves: Mapping[str, FewLabels]) -> list[Picture]:
    if not curves:
        return []
    named = {_LABELLED.get(name, name): curve for name, curve in curves.items()}
    drawn = plot_few_labels(named, folder / "few_labels.png", unit="sub-types")
    words = (
        "Error of the spectral type of held-out dwarfs by the number of labelled ones; bars: standard error over draws."
    )
    return [Picture(drawn, "Few labels", words)]


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
            "Test spectra from the earliest to the latest type. Shaded: hidden from the model and reconstructed.",
        ),
        Picture(
            latent_map, "The latent", "One dot per spectrum, in the first two principal components of the latent, "
            "coloured by spectral type, which the model has never seen.",
        ),
        Picture(cluster_map, "Clusters", "The latent, clustered by angle, and the mean spectrum of each cluster."),
        Picture(curves, "Training", "Loss by epoch, with the best epoch marked; below, the learning rate."),
    ]  # fmt: skip


def _of_all_types(data: SpectraData) -> npt.NDArray[np.intp]:
    """Return test spectra from the earliest to the latest type, evenly spaced in type order, none picked by hand."""
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
    """Return the tables of a run from the contents of ``metrics.json``."""
    tables = [_reconstruction_table(metrics)]
    if metrics.get("few_labels"):
        tables.insert(0, _few_labels_table(metrics["few_labels"]))
    if metrics["probe"]:
        tables.append(_probe_table(metrics["probe"]))
    return Report(
        title="A masked autoencoder on spectra",
        lead="Near-infrared spectra of cool dwarfs (SpeX), most of each hidden from the model and reconstructed by it. "
        "Types and losses are those of held-out objects.",
        tables=tables,
        note=f"{metrics['clusters']['k']} clusters of the latent, see the cluster map.",
        files=[
            f"  page.html  {metrics['weights']}  metrics.json  run.json  config.json  training_history.json  "
            "checkpoints/",
            "  pictures/  few_labels.png  training_curves.png  reconstructions.png  latent_map.png  cluster_map.png",
        ],
    )  # fmt: skip


def _few_labels_table(curves: Mapping[str, FewLabels]) -> Table:
    ours = next(iter(curves.values()))
    sizes = ours["labels"]
    rows = []
    for name, curve in curves.items():
        scores = zip(curve["labels"], curve["mae"], curve["standard_error"], strict=True)
        cells = {labels: f"{mae:.3f} ± {error:.3f}" if error else f"{mae:.3f}" for labels, mae, error in scores}
        rows.append([_LABELLED[name], *(cells.get(labels, "") for labels in sizes)])
    outcomes = {labels: _outcome(curves, labels) for labels in sizes}
    by_outcome = {word: [str(n) for n in sizes if outcomes[n] == word] for word in ("ahead", "level", "behind")}
    spoken = "; ".join(f"{word} with {', '.join(found)} labels" for word, found in by_outcome.items() if found)
    nearest = min(sizes, key=lambda labels: abs(labels - HEADLINE))
    strongest = _strongest(curves, nearest)
    headline = (
        f"With {nearest} labelled dwarfs the type of the others is predicted to within {_error_at(ours, nearest):.2f} "
        f"sub-types; {_error_at(curves[strongest], nearest):.2f} with the best baseline ({_LABELLED[strongest]})."
    )
    return Table(
        ["labelled dwarfs", *map(str, sizes)], rows, width=30,
        title="Error of the spectral type in sub-types, by nearest neighbours among the labelled dwarfs or by "
        "regression; mean of the draws ± standard error",
        notes=[headline, f"The latent compared with the best baseline: {spoken}."],
    )  # fmt: skip


def _strongest(curves: Mapping[str, FewLabels], labels: int) -> str:
    others = [name for name in list(curves)[1:] if labels in curves[name]["labels"]]
    return min(others, key=lambda name: _error_at(curves[name], labels))


def _error_at(curve: FewLabels, labels: int) -> float:
    return curve["mae"][curve["labels"].index(labels)]


def _outcome(curves: Mapping[str, FewLabels], labels: int) -> str:
    """Return ahead, level or behind, by two standard errors of the difference, or 0.02 sub-types with one draw."""
    mean, error = difference(next(iter(curves.values())), curves[_strongest(curves, labels)], labels)
    if abs(mean) <= (2 * error or 0.02):
        return "level"
    return "ahead" if mean < 0 else "behind"


def _reconstruction_table(metrics: Mapping[str, Any]) -> Table:
    base, epoch = metrics["baselines"], metrics["best_epoch"]
    kind = _LABELLED[next(iter(metrics.get("few_labels") or metrics["probe"] or [_OURS[False]]))].removesuffix(
        " latent"
    )
    name = f"{kind}, epoch {epoch if epoch > 0 else metrics['epochs']}"
    losses = {name: (metrics["val_loss"], metrics["test_loss"])}
    for key, words in _FILLS.items():
        if f"{key}_test" in base:
            setting = base.get(f"{key}_setting", 0)
            losses[words.format(setting=setting)] = (base[f"{key}_val"], base[f"{key}_test"])
    losses["mean of the row"] = (base["row_mean"], base["row_mean"])
    rows = [[name, *(f"{loss:.4f}" for loss in pair)] for name, pair in losses.items()]
    best = min((pair[1], words) for words, pair in losses.items() if words != name)
    won = metrics["test_loss"] < best[0]
    note = f"The model is {'ahead of' if won else 'behind'} the best baseline on test spectra ({best[1]})."
    return Table(["", "validation", "test"], rows, title="Masked reconstruction, squared error", width=30, notes=[note])


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
        notes=_probe_notes(probe),
    )  # fmt: skip


def _probe_notes(probe: Mapping[str, Any]) -> list[str]:
    first, *others = probe.values()
    if not others:
        return []
    ahead = []
    for key, words in (("j_minus_k_r2", "colour"), ("spectral_class_balanced_accuracy", "class")):
        scores = [scored[key] for scored in others]
        best = max(scores, key=lambda score: float(score["mean"]))
        mine = first[key]
        ahead.append(f"{words} {'yes' if mine['mean'] - best['mean'] > max(mine['std'], best['std']) else 'no'}")
    return [
        f"Better than the others by more than the spread over folds: {', '.join(ahead)}. Almost any features predict "
        "these well."
    ]


_OURS = {False: "chemomae", True: "residual"}
"""Name of the model's latent in the metrics, by whether it is a ``ResidualMAE``; it comes first."""
_PROBE_NAMES = {"chemomae": "ChemoMAE latent", "residual": "ResidualMAE latent", "untrained": "untrained encoder"}
_LABELLED = {
    "chemomae": "ChemoMAE latent",
    "residual": "ResidualMAE latent",
    **{f"pca{size}": f"PCA, {size} components" for size in _COMPONENTS},
    "raw": "raw spectra",
    "regression": "kernel regression of the spectra",
    "untrained": "untrained encoder",
}
_FILLS = {
    "gaussian": "Gaussian conditional mean",
    "pca": "PCA of the visible channels, {setting:.0f} components",
    "nearest": "{setting:.0f} nearest training spectra",
    "mean_spectrum": "mean training spectrum",
}
