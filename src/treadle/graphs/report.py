"""Report of a graph run: settings at the start, test metrics against baselines, and a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.checkpoint.store import write_text
from treadle.data import steps_per_epoch
from treadle.errors import number_of
from treadle.graphs import GraphDataset, GraphTrainer, get_metrics, parse_pe_config
from treadle.graphs.baselines import mean_baseline, ridge_baseline, ridge_predictions, tabulate
from treadle.graphs.calibration import FILE, HeldOut
from treadle.graphs.datasets.molecules import ATOM_COLUMNS
from treadle.graphs.page import draw
from treadle.graphs.run_build import loader
from treadle.graphs.run_config import GraphsConfig
from treadle.graphs.smiles_runs import SMILES_SETS
from treadle.hooks.files import to_json
from treadle.runs.report import Report, Table
from treadle.runs.results import Results

_MOST_NAMED = 6
"""Targets that are named in a line or have a column of the table."""
_ELEMENTS = sum(name.startswith("element ") for name in ATOM_COLUMNS)

# -- the block at the start ---------------------------------------------------------------------------------------


def decisions(config: GraphsConfig, data: GraphDataset, trainer: GraphTrainer) -> dict[str, str]:
    """Return the decisions and their reasons, as name -> string."""
    precision = f"{config.training.mixed_precision} autocast" if config.training.mixed_precision else "fp32"
    return {"precision": precision, **_decisions(config, data, trainer), **_speed_line(config)}


def _speed_line(config: GraphsConfig) -> dict[str, str]:
    """Describe the number of padded shapes and whether steps are captured; empty without either."""
    training = config.training
    if training.num_buckets is None:
        return {}
    steps = {True: "each step is one CUDA graph", "auto": "each step is one CUDA graph where that is possible"}
    captured = f"; {steps[training.capture]}" if training.capture is not False else ""
    return {"shapes": f"training batches are padded into at most {training.num_buckets}{captured}"}


def _decisions(config: GraphsConfig, data: GraphDataset, trainer: GraphTrainer) -> dict[str, str]:
    training, model, optimizer = config.training, trainer.model, trainer.optimizer
    parts = zip(data.get_splits(), ("train", "validate", "test"), strict=True)
    steps = steps_per_epoch(loader(data.train, training.batch_size, shuffle=True), training.accumulation_steps)
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    rate = optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"])
    return {
        "data": f"{shown_name(config.dataset)}, {sum(map(len, data.get_splits())):,} graphs; {_task_line(data)}",
        "split": ", ".join(f"{len(part):,} {name}" for part, name in parts),
        "encodings": _encodings_line(config),
        "model": f"{config.model['name']}, {weights:,} parameters, {number_of(config.model['num_layers'], 'layer')} of "
        f"width {config.model['hidden_dim']}",
        "loss": f"{getattr(trainer.loss_fn, 'loss_type', trainer.loss_fn)}; the epoch of the best validation "
        f"{training.metric_for_best} is kept",
        "schedule": f"{number_of(training.epochs, 'epoch')} of {number_of(steps, 'step')}, batches of "
        f"{training.batch_size}, {type(optimizer).__name__}, learning rate {rate:g}, "
        f"{config.training.scheduler['type']}, seed {config.seed}",
    }  # fmt: skip


def shown_name(section: Mapping[str, Any]) -> str:
    """Return the name of a data set for people: that of the user's file, if it is one."""
    file = section.get("file")
    return Path(file).name if file else str(section["name"])


def _task_line(data: GraphDataset) -> str:
    level = "pair of nodes" if data.level == "edge" else data.level
    names = data.target_names
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    of = f" of {', '.join(names[:_MOST_NAMED])}{more}" if names else ""
    return f"{data.task_type}{of}, for each {level}" if of else f"{data.task_type} of each {level}"


def _encodings_line(config: GraphsConfig) -> str:
    pe = parse_pe_config(config.encodings)
    nodes = "none" if pe.node is None else f"{' + '.join(pe.node.blocks)} in {pe.node.width} columns"
    pairs = "none" if pe.relative is None else f"{pe.relative.type} in {pe.relative.dim} columns"
    return f"of nodes {nodes}; of pairs {pairs}"


# -- the end ------------------------------------------------------------------------------------------------------


def finish_run(config: GraphsConfig, data: GraphDataset, trainer: GraphTrainer, out: Path) -> Results:
    """Test the weights of the trainer's model, compare them with baselines, and draw the plots.

    Args:
        config: the settings of the run.
        data: the data set.
        trainer: its model has the best weights.
        out: run folder, for ``test_results.json``, for the regression of molecules ``held_out.npz``, and ``pictures/``.
    """
    test = trainer.eval_epoch(loader(data.test, config.training.batch_size), mask="test_mask")
    found = to_json({
        "test_metrics": test,
        "best_epoch": trainer.best_epoch,
        "best_val_metric": trainer.best_metric,
        "seed": config.seed,
    })  # fmt: skip
    write_text(_as_text(found), out / "test_results.json")
    if data.name in SMILES_SETS and data.task_type == "regression":
        _held_out(config, data, trainer).write(out / FILE, trainer.best_epoch or trainer.epoch)
    metrics: dict[str, Any] = to_json({
        "epochs": trainer.epoch,
        "best_epoch": trainer.best_epoch,
        "metric_for_best": config.training.metric_for_best,
        "best_val_metric": trainer.best_metric,
        "test": test,
        "baselines": _baselines(data),
        **_by_target(data, trainer.predict(loader(data.test, config.training.batch_size))),
        "graphs": {name: len(part) for name, part in zip(("train", "val", "test"), data.get_splits(), strict=True)},
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
    })  # fmt: skip
    return Results(metrics, draw(config, data, trainer, out / "pictures"))


def _held_out(config: GraphsConfig, data: GraphDataset, trainer: GraphTrainer) -> HeldOut:
    arrays = []
    for part in (data.val, data.test):
        arrays.append(trainer.predict(loader(part, config.training.batch_size)).double().cpu().numpy())
        arrays.append(torch.stack([graph.y.double().flatten() for graph in part]).numpy())
    return HeldOut(*arrays)


def _as_text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def _baselines(data: GraphDataset) -> dict[str, dict[str, float]]:
    """Return test metrics of baselines without graph structure; none for edge prediction.

    A constant, which is the mean of the training targets or the frequency of each label, and for targets of graphs
    ridge regression on summed node features. Molecules have two of these: on atom counts by element, and on all atom
    features, such as hybridisation and hydrogens. A ridge needs two known training values of each target.
    """
    if data.task_type == "edge_prediction":
        return {}
    labels = data.task_type != "regression"
    if data.level == "graph":
        tables = [tabulate(part, data.num_features) for part in data.get_splits()]
        targets = [table.targets_GT for table in tables]
    else:
        tables = []
        targets = [torch.cat([graph.y.flatten() for graph in part])[:, None].double() for part in data.get_splits()]
    if data.task_type == "classification":
        targets = [_one_hot(part, max(2, data.num_classes)) for part in targets]
    if labels:
        constant = targets[0].nanmean(0).expand_as(targets[2])
        found = {"frequencies": _label_metrics(data, constant, targets[2])}
    else:
        found = {"mean": mean_baseline(targets[0], targets[2])}
    known = [int((~part.isnan()).sum(0).min()) for part in targets]
    if not tables or min(known) < 2:
        return found
    for name, features in _features([table.sums_GF for table in tables]).items():
        if labels:
            found[name] = _label_metrics(data, ridge_predictions(features, targets).predicted_GT, targets[2])
        else:
            found[name] = ridge_baseline(features, targets)
    return found


def _by_target(data: GraphDataset, predicted: Tensor) -> dict[str, dict[str, dict[str, float]]]:
    """Return the test error of each of several regression targets, or the roc_auc of each of several labels.

    Each is of the model and of the baselines. Targets may have different units, in which a mean over all of them is
    one of the largest.
    """
    labels = data.task_type == "multilabel"
    if not (labels or data.task_type == "regression") or data.level != "graph" or len(data.target_names) < 2:
        return {}
    tables = [tabulate(part, data.num_features) for part in data.get_splits()]
    targets = [table.targets_GT for table in tables]
    constant = targets[0].nanmean(0).expand_as(targets[2])
    guesses = {"model": predicted.double(), "frequencies" if labels else "mean": constant}
    if min(int((~part.isnan()).sum(0).min()) for part in targets) >= 2:
        for name, features in _features([table.sums_GF for table in tables]).items():
            columns = [[part[:, [target]] for part in targets] for target in range(len(data.target_names))]
            guesses[name] = torch.cat([ridge_predictions(features, each).predicted_GT for each in columns], 1)
    found: dict[str, dict[str, float]] = {}
    for name, guess in guesses.items():
        if labels:
            values = [_label_auc(guess[:, [label]], targets[2][:, [label]]) for label in range(guess.shape[1])]
        else:
            values = (guess - targets[2]).abs().nanmean(0).tolist()
        found[name] = dict(zip(data.target_names, values, strict=True))
    return {"target_roc_auc" if labels else "target_mae": found}


def _label_auc(score_G1: Tensor, target_G1: Tensor) -> float:
    metrics = get_metrics("multilabel", from_logits=False)
    metrics.update(score_G1, target_G1)
    return metrics.compute()["roc_auc"]


def _features(sums: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
    """Return the features of each ridge, of the training, validation and test graphs."""
    if sums[0].shape[1] != len(ATOM_COLUMNS):
        return {"ridge_node_features": sums}
    return {"ridge_atom_counts": [part[:, :_ELEMENTS] for part in sums], "ridge_atom_features": sums}


def _one_hot(labels_G1: Tensor, num_classes: int) -> Tensor:
    """Return a column of 0 and 1 for each class; a row of NaN where the label is unknown."""
    columns_GC = (labels_G1 == torch.arange(num_classes)).double()
    return torch.where(labels_G1.isnan(), torch.nan, columns_GC)


def _label_metrics(data: GraphDataset, score_GT: Tensor, target_GT: Tensor) -> dict[str, float]:
    metrics = get_metrics(data.task_type, max(2, data.num_classes), from_logits=False)
    if data.task_type == "classification":
        known_G = ~target_GT.isnan().any(1)
        score_GT, target_GT = score_GT[known_G], target_GT[known_G].argmax(1)
    metrics.update(score_GT, target_GT)
    return metrics.compute()


# -- the table ----------------------------------------------------------------------------------------------------

_LOWER_IS_BETTER = ("mae", "rmse")
_BY_TARGET = {
    "target_mae": ("Mean absolute error of each target, in its unit", min),
    "target_roc_auc": ("roc_auc of each label", max),
}
_NAMES = {
    "mean": "mean of the training targets",
    "frequencies": "frequencies of the training labels",
    "ridge_atom_counts": "ridge on atom counts",
    "ridge_atom_features": "ridge on all atom features",
    "ridge_node_features": "ridge on summed node features",
}


def results(metrics: Mapping[str, Any], out: Path) -> Report:
    """Return the table of a run from the contents of ``metrics.json``."""
    columns, rows = _test_rows(metrics)
    pictures = sorted(path.name for path in (out / "pictures").glob("*.png"))
    config, count = metrics["config"], metrics["graphs"]["test"]
    title = f"Test, {count:,} graphs{', over all targets' if 'target_mae' in metrics else ''}"
    tables = [Table(columns, rows, title=title, width=36, notes=_notes(metrics, columns[1:]))]
    tables += [_target_table(metrics, key) for key in _BY_TARGET if key in metrics]
    return Report(
        title=f"{config['model']['name']} on {shown_name(config['dataset'])}",
        lead=f"Tested on {count:,} held-out graphs. The weights are those of epoch "
        f"{metrics['best_epoch']} of {metrics['epochs']}, the best by validation {metrics['metric_for_best']}.",
        tables=tables,
        files=[
            "  checkpoints/ (best.pt, last.pt, history.json)  metrics.json  test_results.json  run.json  config.yaml  "
            f"steps.jsonl{f'  {FILE}' if (out / FILE).exists() else ''}",
            f"  page.html (results and plots)  pictures/  {'  '.join(pictures)}",
        ],
    )  # fmt: skip


def _target_table(metrics: Mapping[str, Any], key: str) -> Table:
    """Return the test scores of the first targets, each in its unit."""
    title, best = _BY_TARGET[key]
    scores = metrics[key]
    names = list(scores["model"])[:_MOST_NAMED]
    rows = [
        [f"{metrics['config']['model']['name']}, epoch {metrics['best_epoch']}", *_short(scores["model"], names)],
        *([_NAMES[name], *_short(scores[name], names)] for name in reversed(scores) if name != "model"),
    ]
    known = {name: [row[name] for row in scores.values() if row[name] is not None] for name in names}
    ahead = sum(scores["model"][name] is not None and scores["model"][name] == best(known[name]) for name in names)
    left = len(scores["model"]) - len(names)
    notes = [f"The model is ahead of every baseline in {ahead} of these {len(names)}."]
    notes += [f"{left} more are in metrics.json."] if left else []
    return Table(["", *names], rows, title=title, width=36, notes=notes)


def _short(values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return ["undefined" if values[name] is None else f"{values[name]:.3g}" for name in names]


def _test_rows(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the table of test metrics, with the model first and then the baselines."""
    test, baselines = metrics["test"], metrics["baselines"]
    names = [name for name in test if all(name in values for values in baselines.values())]
    rows = {f"{metrics['config']['model']['name']}, epoch {metrics['best_epoch']}": test}
    rows |= {_NAMES[baseline]: errors for baseline, errors in reversed(baselines.items())}
    return ["", *names], [[row, *_cells(values, names)] for row, values in rows.items()]


def _notes(metrics: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return sentences that compare the model with the best baseline in each metric."""
    won: list[str] = []
    lost: dict[str, list[str]] = {}
    for name in names:
        sign = 1 if name in _LOWER_IS_BETTER else -1
        known = {key: sign * values[name] for key, values in metrics["baselines"].items() if values[name] is not None}
        if not known or metrics["test"][name] is None:
            continue
        best = min(known, key=lambda key: known[key])
        if sign * metrics["test"][name] < known[best]:
            won.append(name)
        else:
            lost.setdefault(_NAMES[best], []).append(name)
    notes = [f"The model is ahead of every baseline in {_listed(won)}."] if won else []
    return notes + [f"The model is not ahead of {baseline} in {_listed(found)}." for baseline, found in lost.items()]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _cells(values: Mapping[str, Any], names: list[str]) -> list[str]:
    # An undefined metric is null in the file.
    return ["undefined" if values[name] is None else f"{values[name]:.4f}" for name in names]
