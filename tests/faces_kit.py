"""Every face as a function that trains and resumes in a folder, and the comparison of two of its runs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import astro_trainer_kit
import functional_kit
import graph_kit
import language_kit
import original_kit
import population_kit
import spectra_kit
import treadle.spectra.chemomae
from helpers import Augmented, MeanSquare, small_model
from treadle import (
    BaseHook,
    BaseTrainer,
    BestRule,
    CheckpointingHook,
    EmaHook,
    Engine,
    EpochTrainer,
    LoggingHook,
    Population,
    Trainer,
    parallelize,
    set_seed,
)
from treadle.checkpoint import find_latest
from treadle.checkpoint.find_step import states_in
from treadle.checkpoint.order import is_moved_aside
from treadle.checkpoint.store import open_checkpoint
from treadle.data import RankBatchSampler


@dataclass(frozen=True)
class Face:
    """Reproducible way to train.

    Attributes:
        train: trains in a folder to a number of epochs, resuming an existing run.
        epochs: the epochs of a whole run.
        ranks: processes that train it together.
        runs: glob of the run folders inside the folder; "" for the folder itself.
    """

    train: Callable[[Path, int], Any]
    epochs: int
    ranks: int = 1
    runs: str = ""

    def __call__(self, folder: Path, epochs: int | None = None) -> None:
        self.train(folder, self.epochs if epochs is None else epochs)

    def runs_in(self, folder: Path) -> list[Path]:
        return sorted(folder.glob(self.runs)) if self.runs else [folder]


class Looks(BaseHook):
    """Hook that evaluates every few steps on the training data, as users do."""

    def __init__(self, every: int = 5):
        self.every = every

    def on_after_step(self, trainer: Engine) -> None:
        if trainer.step % self.every == 0:
            trainer.evaluate(trainer.cursor.loader)


def saving(interval: int, **settings: Any) -> CheckpointingHook:
    return CheckpointingHook(interval, exit_signals=[signal.SIGTERM], **settings)


def shared(loader: Any, *, shuffle: bool = False) -> Any:
    """Return a loader of the same batches, each shared among the ranks."""
    batches = RankBatchSampler(loader.dataset, global_batch_size=loader.batch_size, shuffle=shuffle)
    return DataLoader(loader.dataset, batch_sampler=batches, collate_fn=loader.collate_fn)


# -- one process --------------------------------------------------------------------------------------------------


class Mini(BaseTrainer):
    kind: str | None = None  # how the model is distributed over ranks

    def build_data_loader(self) -> Any:
        loader = DataLoader(Augmented(40), batch_size=4, shuffle=True)
        return loader if self.kind is None else shared(loader, shuffle=True)

    def build_model(self) -> Any:
        return small_model() if self.kind is None else parallelize(small_model(), self.kind)

    def build_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def build_hooks(self) -> Any:
        return [LoggingHook(7), Looks(), EmaHook(0.9), saving(3)]

    def forward(self, input: Any) -> Any:
        x, y = input
        return (self.model(x) - y).square().mean(), {}


class ShardedMini(Mini):
    kind = "fsdp"


class TwoOptimizers(Mini):
    """Trainer that steps a second optimizer, and its schedule, in ``forward``."""

    def build_model(self) -> Any:
        return nn.ModuleDict({"actor": small_model(), "critic": nn.Linear(4, 1)})

    def build_optimizer(self) -> Any:
        self.second = torch.optim.SGD(self.model["critic"].parameters(), lr=0.05, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.second, 5, 0.5)
        return torch.optim.AdamW(self.model["actor"].parameters(), lr=0.01)

    def forward(self, input: Any) -> Any:
        x, y = input
        guess = self.model["critic"](x)
        if self.training:
            self.second.zero_grad()
            (guess - y).square().mean().backward()
            self.second.step()
            self.schedule.step()
        return (self.model["actor"](x) - y + guess.detach()).square().mean(), {"guess": guess.detach().mean()}

    @property
    def training(self) -> bool:
        return torch.is_grad_enabled()


def mini(folder: Path, epochs: int, *, cls: type[Mini] = Mini) -> None:
    set_seed(0)
    cls(10 * epochs, workspace=folder, device="cpu", grad_clip=1.0).train()


def make_engine(folder: Path, model: nn.Module, **settings: Any) -> Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    hooks = [EmaHook(0.9, use_buffers=True), Looks(), saving(4, **settings)]
    return Engine(model, optimizer, MeanSquare(), device="cpu", accumulation_steps=2, hooks=hooks, workspace=folder)


def engine(folder: Path, epochs: int) -> None:
    set_seed(0)
    make_engine(folder, small_model()).run(DataLoader(Augmented(40), batch_size=4, shuffle=True), max_steps=5 * epochs)


def by_epochs(folder: Path, epochs: int, *, workers: int = 0, **settings: Any) -> None:
    set_seed(0)
    driver = EpochTrainer(make_engine(folder, small_model(), **settings), best=BestRule("val_loss"))
    loader = DataLoader(Augmented(40), batch_size=4, shuffle=True, num_workers=workers)
    driver.fit(loader, DataLoader(Augmented(12), batch_size=6), epochs)


def functional(folder: Path, epochs: int, *, cls: type[Trainer] = Trainer) -> None:
    trainer = functional_kit.make(cls, hooks=[Looks(), saving(7)])
    data = functional_kit.loader(shuffle=True), functional_kit.loader(seed=6)
    trainer.train(data[0], epochs, data[1], folder, 4, resume_from="auto")


class OwnLoop(Trainer):
    """Trainer that replaces the loop over an epoch."""

    def train_epoch(self, train_dataloader: Any, eval_dataloader: Any = None, epoch: int = 0) -> dict[str, Any]:
        losses = [self.train_step(batch)["loss"] for batch in train_dataloader]
        assert losses
        return {f"eval_{name}": value for name, value in self.evaluate(eval_dataloader).items()}


def text(folder: Path, epochs: int) -> None:
    """Fine-tune a GPT-2 with LoRA."""
    trainer = language_kit.trainer(
        language_kit.with_lora(language_kit.gpt2()), hooks=[Looks(), saving(3)], gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.train(language_kit.loader(24), epochs, language_kit.loader(8, shuffle=False), folder, 2, resume_from="auto")


def spectra(folder: Path, epochs: int, **settings: Any) -> None:
    hooks = [Looks(), saving(5)]
    spectra_kit.make(folder, epochs=8, hooks=hooks, background_saves=True, **settings).fit(epochs)


def chemomae(folder: Path, epochs: int) -> None:
    set_seed(0)
    original_kit.make("0.2", vars(treadle.spectra.chemomae), folder).fit(epochs)


def graphs(folder: Path, epochs: int, *, spread: str | None = None) -> None:
    data = graph_kit.graphs()
    trainer = graph_kit.make(folder, hooks=[Looks(), saving(5)], parallel=spread)
    train, held_out = graph_kit.loader(data, shuffle=True), graph_kit.loader(data)
    if spread is not None:
        train, held_out = shared(train, shuffle=True), shared(held_out)
    trainer.fit(train, held_out, epochs, resume_from="auto")


def astro(folder: Path, epochs: int, *, spread: str | None = None) -> None:
    train, held_out = astro_trainer_kit.loader(shuffle=True), astro_trainer_kit.loader()
    if spread is not None:
        train, held_out = shared(train, shuffle=True), shared(held_out)
    trainer = astro_trainer_kit.make(
        folder, hooks=[Looks(), saving(5)], total_steps=30, train=train, parallel=spread,
    )  # fmt: skip
    trainer.train(epochs, held_out, resume_from="auto")


class Member(population_kit.Fit):
    def build_hooks(self) -> Any:
        return [EmaHook(0.9), Looks(), saving(5)]


def population(folder: Path, epochs: int) -> None:
    def make(seed: int, workspace: Path) -> BaseTrainer:
        return Member(seed=seed, steps=5 * epochs, workspace=workspace)

    results = Population(make, seeds=range(3), out=folder, turn=4, progress=False).run()
    failed = [row for row in results.rows if row.status != "finished"]
    if failed:
        raise RuntimeError(f"{failed[0].name} {failed[0].status}: {failed[0].error}")


# -- several ranks ------------------------------------------------------------------------------------------------


def on_ranks(folder: Path, epochs: int, *, kind: str, **settings: Any) -> None:
    set_seed(0)
    engine = make_engine(folder, parallelize(small_model(), kind), **settings)
    loader = shared(DataLoader(Augmented(40), batch_size=4), shuffle=True)
    EpochTrainer(engine, best=BestRule("val_loss")).fit(loader, shared(DataLoader(Augmented(12), batch_size=6)), epochs)


def functional_on_ranks(folder: Path, epochs: int) -> None:
    set_seed(0)
    model = functional_kit.net()
    trainer = Trainer(
        model, torch.optim.Adam(model.parameters(), lr=0.01), nn.MSELoss(), {"training": {"log_interval": None}}, "cpu",
        hooks=[Looks(), saving(7)], parallel="ddp",
    )  # fmt: skip
    loaders = shared(functional_kit.loader(), shuffle=True), shared(functional_kit.loader(seed=6))
    trainer.train(loaders[0], epochs, loaders[1], folder, 4, resume_from="auto")


FACES: dict[str, Face] = {
    "BaseTrainer": Face(mini, 6),
    "BaseTrainer, two optimizers": Face(partial(mini, cls=TwoOptimizers), 6),
    "Engine": Face(engine, 12),
    "EpochTrainer": Face(by_epochs, 12),
    "EpochTrainer, shards": Face(partial(by_epochs, sharded=True), 12),
    "EpochTrainer, background": Face(partial(by_epochs, background=True), 12),
    "EpochTrainer, background shards": Face(partial(by_epochs, sharded=True, background=True), 12),
    "EpochTrainer, 2 workers": Face(partial(by_epochs, workers=2), 6),
    "Trainer": Face(functional, 15),
    "Trainer, own loop": Face(partial(functional, cls=OwnLoop), 15),
    "Trainer, GPT-2 with LoRA": Face(text, 6),
    "SpectraTrainer": Face(spectra, 8),
    "chemomae.Trainer": Face(chemomae, 15),
    "GraphTrainer": Face(graphs, 6),
    "AstroTrainer": Face(astro, 6),
    "Population": Face(population, 6, runs="seed=*"),
    "2 ranks, replicas": Face(partial(on_ranks, kind="ddp"), 12, ranks=2),
    "2 ranks, replicas, background": Face(partial(on_ranks, kind="ddp", background=True), 12, ranks=2),
    "2 ranks, shards": Face(partial(on_ranks, kind="fsdp"), 12, ranks=2),
    "2 ranks, shards, background": Face(partial(on_ranks, kind="fsdp", background=True), 12, ranks=2),
    "2 ranks, BaseTrainer, shards": Face(partial(mini, cls=ShardedMini), 6, ranks=2),
    "2 ranks, Trainer, replicas": Face(functional_on_ranks, 15, ranks=2),
    "2 ranks, SpectraTrainer, replicas": Face(partial(spectra, spread="ddp"), 8, ranks=2),
    "2 ranks, GraphTrainer, shards": Face(partial(graphs, spread="fsdp"), 6, ranks=2),
    "2 ranks, AstroTrainer, replicas": Face(partial(astro, spread="ddp"), 6, ranks=2),
}  # fmt: skip


# -- comparison ---------------------------------------------------------------------------------------------------


def furthest_in(run: Path) -> Any:
    """Return the path and the tree of the furthest intact state of a run, or None, without modifying anything."""
    states = (state for place in (run, run / "checkpoints") for state in states_in(place))
    return find_latest(states, load=open_checkpoint)


def furthest_step(run: Path) -> int:
    found = furthest_in(run)
    return 0 if found is None else int(found[1].get("global_step", 0))  # exported weights have none


def end_of(run: Path) -> dict[str, Any]:
    """Return the furthest state of a run, its best weights and its history, without run-specific values."""
    found = find_latest(state for place in (run, run / "checkpoints") for state in states_in(place))
    assert found is not None, run
    tree = {key: value for key, value in found[1].items() if key not in ("config", "versions")}
    best = {path.name: torch.load(path, weights_only=True) for path in run.glob("best_model*.pt")}
    for exported in best.values():
        exported.pop("versions", None)
    history = run / "history.json"
    files = {"best file": best, "history file": json.loads(history.read_text()) if history.exists() else None}
    return {**tree, "history": _timeless(tree.get("history") or []), **_timeless(files)}


def _timeless(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _timeless(value) for key, value in tree.items() if "time" not in str(key)}
    return [_timeless(value) for value in tree] if isinstance(tree, list) else tree


def litter_in(folder: Path) -> list[Path]:
    names = (".treadle-tmp", ".trial", ".old")
    return [path for path in folder.rglob(".*") if path.name.endswith(names) or is_moved_aside(path)]


def size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())
