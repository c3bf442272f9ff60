"""What a graph run shows and leaves: decisions at the start, test metrics beside baselines, pictures, a short table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from treadle.checkpoint.store import write_text
from treadle.cli.graphs_build import loader
from treadle.cli.graphs_config import GraphsConfig
from treadle.cli.graphs_pictures import plot_encodings, plot_molecules, plot_predictions
from treadle.cli.start_block import device_line, print_block
from treadle.data import steps_per_epoch
from treadle.graphs import GraphDataset, GraphTrainer, parse_pe_config
from treadle.graphs.baselines import GraphTable, mean_baseline, ridge_baseline, tabulate
from treadle.graphs.datasets.molecules import ATOM_COLUMNS
from treadle.hooks.files import to_json
from treadle.spectra.pictures import plot_training_curves

_ELEMENTS = sum(name.startswith("element ") for name in ATOM_COLUMNS)
_MOLECULE_SIZES = range(18, 27)  # of the molecule whose encodings are drawn: large enough to show, small enough to read

# -- the block at the start ---------------------------------------------------------------------------------------


def print_start(
    config: GraphsConfig, data: GraphDataset, trainer: GraphTrainer, *, start: str, explicit: bool, console: Console
) -> None:
    """Prints what was decided and why, a line each."""
    training, model, optimizer = config.training, trainer.model, trainer.optimizer
    parts = zip(data.get_splits(), ("train", "validate", "test"), strict=True)
    steps = steps_per_epoch(loader(data.train, training.batch_size, shuffle=True), training.accumulation_steps)
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    rate = optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"])
    lines = {
        "device": device_line(trainer.device, explicit=explicit),
        "precision": f"{training.mixed_precision} autocast" if training.mixed_precision else "fp32",
        "data": f"{data.name}, {sum(map(len, data.get_splits())):,} graphs; {data.task_type} of each "
        f"{'pair of nodes' if data.level == 'edge' else data.level}",
        "split": ", ".join(f"{len(part):,} {name}" for part, name in parts),
        "encodings": _encodings_line(config),
        "model": f"{config.model['name']}, {weights:,} parameters, {config.model['num_layers']} layers of width "
        f"{config.model['hidden_dim']}",
        "loss": f"{getattr(trainer.loss_fn, 'loss_type', trainer.loss_fn)}; the epoch of the best validation "
        f"{training.metric_for_best} is kept",
        "schedule": f"{training.epochs} epochs of {steps} steps, batches of {training.batch_size}, "
        f"{type(optimizer).__name__}, learning rate {rate:g}, {config.training.scheduler['type']}, "
        f"seed {config.seed}",
        "start": start,
    }  # fmt: skip
    print_block(lines, console)


def _encodings_line(config: GraphsConfig) -> str:
    pe = parse_pe_config(config.pe)
    nodes = "none" if pe.node is None else f"{' + '.join(pe.node.blocks)} in {pe.node.dim} columns"
    pairs = "none" if pe.relative is None else f"{pe.relative.type} in {pe.relative.dim} columns"
    return f"of nodes {nodes}; of pairs {pairs}"


# -- the end ------------------------------------------------------------------------------------------------------


def finish_run(config: GraphsConfig, data: GraphDataset, trainer: GraphTrainer, out: Path) -> dict[str, Any]:
    """Tests the weights that the trainer's model has, compares with baselines, draws, and writes the results.

    Args:
        config: the settings of the run.
        data: the data set.
        trainer: its model has the best weights.
        out: gets ``test_results.json``, ``pictures/``, and ``metrics.json`` last of all.

    Returns:
        What was written to ``metrics.json``.
    """
    test = trainer.eval_epoch(loader(data.test, config.training.batch_size))
    results = {
        "test_metrics": test,
        "best_epoch": trainer.best_epoch,
        "best_val_metric": trainer.best_metric,
        "seed": config.seed,
    }
    write_text(_as_json(results), out / "test_results.json")
    plot_training_curves(_curves(trainer), out / "pictures" / "training_curves.png")
    metrics = {
        "treadle": version("treadle"),
        "epochs": trainer.epoch,
        "best_epoch": trainer.best_epoch,
        "metric_for_best": config.training.metric_for_best,
        "best_val_metric": trainer.best_metric,
        "test": test,
        "baselines": _compare(config, data, trainer, out / "pictures") if data.task_type == "regression" else {},
        "graphs": {name: len(part) for name, part in zip(("train", "val", "test"), data.get_splits(), strict=True)},
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "device": str(trainer.device),
        "config": config.to_dict(),
    }
    # The last file of a run: where it is and has these settings, nothing is left to do.
    write_text(_as_json(metrics), out / "metrics.json")
    return metrics


def _as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(to_json(values), indent=2, allow_nan=False) + "\n"


def _curves(trainer: GraphTrainer) -> list[dict[str, Any]]:
    train, val = trainer.history["train"], trainer.history["val"]
    return [
        {"epoch": t["epoch"], "train_loss": t["loss"], "val_loss": v["loss"], "lr": t["lr"]}
        for t, v in zip(train, val, strict=True)
    ]


def _compare(config: GraphsConfig, data: GraphDataset, trainer: GraphTrainer, pictures: Path) -> dict[str, Any]:
    """Returns the errors of the baselines of a regression; where a target is that of a graph, draws the predictions."""
    if data.level != "graph":
        train, test = (torch.cat([graph.y.flatten() for graph in part])[:, None] for part in (data.train, data.test))
        return {"mean": mean_baseline(train, test)}
    tables = [tabulate(part, data.num_features) for part in data.get_splits()]
    predicted = trainer.predict(loader(data.test, config.training.batch_size))
    _draw(data, predicted, tables[2], config, pictures)
    return _baselines(tables)


def _baselines(tables: list[GraphTable]) -> dict[str, dict[str, float]]:
    """Errors on the test set of what needs no graphs: the mean, and ridges on the node features summed up.

    Molecules have two ridges: on the counts of their atoms by element, and on all that is said of the atoms, such as
    hybridisation and hydrogens.
    """
    targets = [table.targets_GT for table in tables]
    found = {"mean": mean_baseline(targets[0], targets[2])}
    if not all(bool(part.isfinite().all()) for part in targets):
        return found
    sums = [table.sums_GF for table in tables]
    if sums[0].shape[1] == len(ATOM_COLUMNS):
        found["ridge_atom_counts"] = ridge_baseline([part[:, :_ELEMENTS] for part in sums], targets)
        found["ridge_atom_features"] = ridge_baseline(sums, targets)
    else:
        found["ridge_node_features"] = ridge_baseline(sums, targets)
    return found


def _draw(data: GraphDataset, predicted: torch.Tensor, table: GraphTable, config: GraphsConfig, folder: Path) -> None:
    if table.targets_GT.shape[1] != 1:
        return  # one axis is for one target
    true, guessed = table.targets_GT[:, 0].numpy(), predicted[:, 0].double().numpy()
    first, sizes = data.test[0], table.num_nodes_G.numpy()
    molecules = "smiles" in first
    what = "penalised logP" if molecules else "target"
    plot_predictions(true, guessed, sizes, folder / "predictions.png", what=what)
    if not molecules:
        return
    plot_molecules([graph.smiles for graph in data.test], true, guessed, folder / "molecules.png")
    pe = parse_pe_config(config.pe)
    if pe.node is not None or pe.relative is not None:
        plot_encodings(_shown_molecule(data), pe, folder / "encodings.png")


def _shown_molecule(data: GraphDataset) -> Any:
    """The test molecule with most rings among those of a size that can be read, none picked by hand."""
    graphs = list(data.test)
    fitting = [graph for graph in graphs if graph.num_nodes in _MOLECULE_SIZES] or graphs
    return max(fitting, key=lambda graph: graph.num_edges - 2 * graph.num_nodes)


# -- the table ----------------------------------------------------------------------------------------------------

_NAMES = {
    "mean": "guess: mean of the training targets",
    "ridge_atom_counts": "ridge on the counts of atoms",
    "ridge_atom_features": "ridge on all features of the atoms",
    "ridge_node_features": "ridge on the summed node features",
}


def print_results(metrics: Mapping[str, Any], out: Path, console: Console) -> None:
    """Prints the short table of a run from what ``metrics.json`` holds."""
    test, baselines = metrics["test"], metrics["baselines"]
    names = [name for name in test if not baselines or name in ("mae", "rmse")]
    table = Table(title=f"Test, {metrics['graphs']['test']:,} graphs", title_justify="left", box=None, pad_edge=False)
    table.add_column("", min_width=36)
    for name in names:
        table.add_column(name, justify="right")
    table.add_row(f"{metrics['config']['model']['name']}, epoch {metrics['best_epoch']}", *_cells(test, names))
    for baseline, errors in reversed(baselines.items()):
        table.add_row(_NAMES[baseline], *_cells(errors, names))
    console.print()
    console.print(table)
    console.print(f"\nFiles in {out}:", soft_wrap=True)
    pictures = sorted(path.name for path in (out / "pictures").glob("*.png"))
    for line in (
        "  checkpoints/ (best.pt, last.pt, history.json)  metrics.json  test_results.json  config.yaml  steps.jsonl",
        f"  pictures/  {'  '.join(pictures)}",
    ):
        console.print(line, soft_wrap=True, markup=False)


def _cells(values: Mapping[str, Any], names: list[str]) -> list[str]:
    # An undefined metric is null in the file.
    return ["undefined" if values[name] is None else f"{values[name]:.4f}" for name in names]
