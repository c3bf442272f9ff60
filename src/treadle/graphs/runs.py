"""Runs of ``treadle train graphs`` and of ``scripts/train.py``, which has different defaults.

Modules that need torch_geometric are imported where they are used, since the command's help does not need it.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.checkpoint.store import find_latest, load_weights
from treadle.distributed.state_names import load_model_state
from treadle.engine.screens import work_bar
from treadle.errors import ConfigError
from treadle.graphs.run_config import FREE, RENAMED, GraphsConfig, read_settings
from treadle.hooks.files import to_json
from treadle.runs.folder import read_record, run_folder_of, split_of, stored_json, write_changed
from treadle.runs.pack import Evaluation, Opened, Pack, Predictions, Results, Run, Show, load_newest
from treadle.runs.packs import SUMMARIES
from treadle.runs.ranks import by_rank_0, rank_0_first
from treadle.runs.replay import checkpoints_of
from treadle.runs.report import Report
from treadle.runs.setting_names import settings_named
from treadle.runs.settings import flat

if TYPE_CHECKING:
    from treadle.graphs import GraphDataset, GraphTrainer
    from treadle.graphs.masks import MaskName

    GraphsOpened = Opened[GraphsConfig, GraphDataset, GraphTrainer]


_FILE_DIGEST = "file_digest"  # key in run.json
_log = logging.getLogger("treadle.cli")


class GraphsPack(Pack[GraphsConfig, "GraphDataset", "GraphTrainer"]):
    """Pack of ``treadle train graphs`` and of ``scripts/train.py``."""

    name = "graphs"
    summary = SUMMARIES["graphs"]
    help = """
    Train a graph transformer with positional encodings on 4,990 real molecules and show what it learned.

    The molecules come with rdkit; nothing is downloaded unless dataset names a benchmark. A run that was stopped at any
    moment, by any cause, resumes when the same command is run again; a finished one shows its results. Ctrl-C saves
    before exiting.

    A setting without a dot chooses from a group: dataset, model, pe (encodings) or train; the others set one value.

    The run folder holds config.yaml, steps.jsonl, checkpoints/ with best.pt, last.pt and history.json,
    test_results.json, held_out.npz, metrics.json, pictures/, and page.html, which shows what it learned in any browser.

    \b
    Examples:
      treadle train graphs
      treadle train graphs pe=none training.epochs=20 --out runs/without
      treadle train graphs dataset=zinc_clean_leads model=gps --device cuda --out runs/zinc
      treadle train graphs dataset=synthetic/tree dataset.task=distance_regression --out runs/hops
      torchrun --nproc_per_node 2 -m treadle train graphs
      treadle train graphs --show-settings
    """
    config = GraphsConfig
    example = "pe=none training.epochs=20"
    free = FREE
    needed = ("checkpoints/best.pt",)
    results = ("metrics.json", "test_results.json", "held_out.npz")
    loads_in_processes = True
    takes = ("split", "batch_size", "smiles", "smiles_column")

    # -- settings -------------------------------------------------------------------------------------------------

    def read_settings(self, settings: Sequence[str], device: str | None = None) -> GraphsConfig:
        """Return the settings, composed from the config groups of the pack as by Hydra."""
        return read_settings(settings, device)

    def values(self, config: GraphsConfig) -> dict[str, Any]:
        """Return the settings as nested plain values."""
        return config.to_dict()

    def from_values(self, values: Mapping[str, Any]) -> GraphsConfig:
        """Build settings from nested plain values."""
        return GraphsConfig.from_values(values)

    def shown(self, config: GraphsConfig) -> Iterable[tuple[str, Any]]:
        """Yield every setting as a dotted key and its value in Hydra's syntax."""
        return ((key, "null" if value is None else value) for key, value in flat(config.to_dict()).items())

    def parallel(self, config: GraphsConfig) -> str | None:
        """Return the setting that distributes the model over ranks."""
        return config.training.parallel

    def environment(self, config: GraphsConfig) -> AbstractContextManager[None]:
        """Return a context in which errors name the settings."""
        return settings_named(flat(config.to_dict()), RENAMED)

    # -- a run ----------------------------------------------------------------------------------------------------

    def run(self, run: Run[GraphsConfig], show: Show) -> dict[str, Any] | None:
        """Train, using the run folder's settings for defaults that have changed since the run started."""
        by_rank_0(lambda: _refuse_changed_file(run, run.out if run.resume else None))
        config = by_rank_0(lambda: _as_started(run))
        return super().run(dataclasses.replace(run, config=config), show)

    def prepare(self, run: Run[GraphsConfig]) -> GraphDataset:
        """Load the data set with its encodings; rank 0 downloads and encodes first, then the other ranks read."""
        from treadle.graphs import run_build

        by_rank_0(lambda: _refuse_changed_file(run, run.home))
        if run.trains:
            run_build.refuse_wrong(run.config)  # before the data are loaded
        with work_bar("encodings", "graphs", run.messages) as progress:
            return rank_0_first(lambda: run_build.prepare_data(run.config, progress))

    def build(self, run: Run[GraphsConfig], data: GraphDataset) -> GraphTrainer:
        """Seed, and return the trainer with a new model, its optimizer and its schedule."""
        from treadle.graphs import idle_settings, run_build

        trainer = run_build.build_trainer(
            run.config,
            data,
            device=run.device,
            name=run.out.name if run.trains else self.name,
            checkpoint_dir=run.checkpoints if run.trains else None,
            hooks=run.hooks(
                status=lambda: _status(trainer, run.config.training.metric_for_best),
                save=lambda: trainer.save_checkpoint("last.pt"),
            )
            if run.trains
            else (),
            parallel=run.parallel,
            measure=run.trains,
        )
        # Invalid values are rejected before ineffective ones.
        idle_settings.refuse_idle_settings(run.given, run.config, level=data.level, task_type=data.task_type)
        if run.weights is not None and run.home is None:
            trainer.load_checkpoint(run.weights, load_optimizer=False)
        return trainer

    def resume(self, run: Run[GraphsConfig], trainer: GraphTrainer) -> str:
        """Load ``last.pt``, or ``best.pt`` if it is damaged."""
        return load_newest(run, trainer, epochs=run.config.training.epochs, step=lambda: trainer.global_step)

    def fit(self, run: Run[GraphsConfig], data: GraphDataset, trainer: GraphTrainer) -> None:
        """Train up to the number of epochs, or until the validation metric stops improving."""
        from treadle.graphs.run_build import loader, train_loader

        training = run.config.training
        trainer.fit(
            train_loader(run.config, data),
            loader(data.val, training.batch_size, num_workers=training.num_workers),
            training.epochs,
            training.metric_for_best,
            training.minimize_metric,
            training.early_stopping,
        )

    def identity(self, data: GraphDataset) -> dict[str, Any]:
        """Return the hash of the contents of the files that the graphs are made from."""
        return {} if data.file_digest is None else {_FILE_DIGEST: data.file_digest}

    def keep(self, run: Run[GraphsConfig], data: GraphDataset) -> None:
        """Write the settings in Hydra's format."""
        from omegaconf import OmegaConf

        write_changed(OmegaConf.to_yaml(OmegaConf.create(run.config.to_dict())), run.out / "config.yaml")

    def describe(self, run: Run[GraphsConfig], data: GraphDataset, trainer: GraphTrainer) -> dict[str, str]:
        """Return the decisions about precision, data, encodings, model, loss and schedule."""
        from treadle.graphs import report

        return report.decisions(run.config, data, trainer)

    def finish(self, run: Run[GraphsConfig], data: GraphDataset, trainer: GraphTrainer) -> Results:
        """Test the best weights, compare them with baselines, and draw the plots."""
        from treadle.graphs import report

        load_model_state(trainer.model, load_weights(run.checkpoints / "best.pt"))
        return report.finish_run(run.config, data, trainer, run.out)

    def report(self, metrics: Mapping[str, Any], out: Path) -> Report:
        """Return the table of test metrics."""
        from treadle.graphs import report

        return report.results(metrics, out)

    # -- stored runs ----------------------------------------------------------------------------------------------

    def stored(self, home: Path, path: Path | None, tree: Mapping[str, Any] | None) -> tuple[GraphsConfig, int | None]:
        """Return the settings of a checkpoint's run and its number of threads, which affects the order of summation.

        Raises:
            ConfigError: the checkpoint is not from such a run.
            CheckpointError: no checkpoint is intact.
        """
        if path is None or tree is None:
            checkpoints = checkpoints_of(home)
            latest = find_latest([path for path in checkpoints.glob("*.pt") if path.name in ("best.pt", "last.pt")])
            if latest is None:
                raise ConfigError(f"has no checkpoint in {checkpoints}", argument="RUN", value=str(home))
            path, tree = latest
        stored = tree.get("config", {}).get("run")
        if stored is None:
            raise ConfigError(
                f"{path}: does not record how its data and model were built, since it is not a checkpoint of "
                "`treadle train graphs` or scripts/train.py; load it with your own GraphTrainer and call eval_epoch"
            )
        return GraphsConfig.from_values(stored), int(tree["config"]["threads"])

    def evaluate(self, opened: GraphsOpened, split: str, *, batch_size: int | None, num_workers: int) -> Evaluation:
        """Return the test metrics on a split."""
        from treadle.graphs.run_build import loader

        trainer, graphs = opened.trainer, _graphs_of(opened.data, split)
        batches = loader(graphs, batch_size or opened.run.config.training.batch_size, num_workers=num_workers)
        masks: dict[str, MaskName] = {"train": "train_mask", "val": "val_mask", "test": "test_mask"}
        metrics = to_json(trainer.eval_epoch(batches, mask=masks[split]))
        file, compared = opened.home / "test_results.json", None
        stored: Any = stored_json(file)
        reported = split == "test" and opened.path.name == "best.pt" and stored is not None
        if reported and stored["best_epoch"] == opened.tree["epoch"]:
            compared = (file, stored["test_metrics"] == metrics)
        return Evaluation(
            metrics,
            counts={"graphs": len(graphs)},
            about={"data": opened.data.name},
            device=str(trainer.device),
            compared=compared,
        )

    def predict(self, opened: GraphsOpened, split: str, *, batch_size: int | None, **options: Any) -> Predictions:
        """Return the model's outputs for a split, and the targets if each output has one."""
        import torch

        from treadle.graphs.run_build import loader

        graphs = _graphs_of(opened.data, split)
        outputs = opened.trainer.predict(loader(graphs, batch_size or opened.run.config.training.batch_size))
        prediction = outputs.float().numpy()
        target = torch.cat([graph.y.reshape(1) if graph.y.dim() == 0 else graph.y for graph in graphs]).numpy()
        return Predictions({"prediction": prediction, **({"target": target} if len(target) == len(prediction) else {})})

    def predict_smiles(
        self,
        stored: Sequence[tuple[Path, Mapping[str, Any]]],
        file: Path,
        *,
        column: str | None,
        batch_size: int | None,
        device: str | None,
    ) -> Predictions:
        """Return the mean over runs for the molecules of a file, with a calibrated deviation as uncertainty."""
        from treadle.graphs.smiles_runs import load_stored_model, predict_file

        models = []
        for path, tree in stored:
            config, _ = self.stored(run_folder_of(path), path, tree)
            with self.environment(config):
                models.append(load_stored_model(config, path, tree))
        return predict_file(models, file, column=column, batch_size=batch_size, device=device)


def _refuse_changed_file(run: Run[GraphsConfig], home: Path | None) -> None:
    """Raise if the molecules' file has changed since the run started, before it is read; None for a fresh start.

    Raises:
        ConfigError: its contents differ.
    """
    from treadle.graphs.datasets.files import digest

    file = flat(run.config.to_dict()).get("dataset.file")
    record = None if home is None else read_record(home)
    if file is None or record is None or not Path(file).is_file():
        return
    before = record.identity.get(_FILE_DIGEST)
    if before is not None and digest(Path(file)) != before:
        instead = "or predict its molecules with treadle predict RUN --smiles FILE"
        if run.trains:
            instead = "pass another folder with --out, or --no-resume to start over in this one"
        raise ConfigError(
            f"its contents have changed since the run in {home} started. Restore the file, {instead}",
            argument="dataset.file",
            value=str(file),
        )


def _as_started(run: Run[GraphsConfig]) -> GraphsConfig:
    if not run.resume:
        return run.config
    try:
        record = read_record(run.out)
        if record is None or record.face != "graphs":
            return run.config
        by_hand = {text.partition("=")[0].strip().lstrip("+") for text in run.given}
        started = run.config.as_started(record.config, set_by_hand=by_hand)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return run.config  # errors in the record are reported where the folder is opened
    before, now = flat(started.to_dict()), flat(run.config.to_dict())
    kept = [f"{key}={before.get(key)}" for key in now if before.get(key) != now[key]]
    if kept:
        _log.info("%s keeps the settings it was started with: %s", run.out, ", ".join(kept))
    return started


def _graphs_of(data: GraphDataset, split: str) -> Sequence[Any]:
    graphs = copy.copy(split_of(data, split))
    graphs.transform = None  # of the training set: random signs are for training only
    return graphs  # type: ignore[no-any-return]


def _status(trainer: GraphTrainer, metric: str) -> str:
    records = trainer.history["val"]
    if not records or trainer.best_metric is None:
        return ""
    return f"val {metric} {records[-1][metric]:.4f} (best {trainer.best_metric:.4f})"


PACK = GraphsPack()
