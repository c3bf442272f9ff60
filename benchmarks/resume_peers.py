"""Resuming within an epoch with treadle and its peers: how far the weights are from those of a run without a stop.

    python benchmarks/resume_peers.py                  # writes results/resume_peers.md and .json

Each trains a small network on the CPU for 12 steps, with 8 batches in an epoch, then another time up to a stop and,
with new objects and the same seed, from its own checkpoint to step 12. Accelerate uses its seedable sampler,
``set_epoch`` and ``skip_first_batches``, as its documentation advises. Stateful loaders are those of torchdata.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from typing import Any

import torch
from machine import describe, write_result
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import treadle

STEPS, BATCHES = 12, 8
CASES = {
    "step 3, no shuffling": {"stop": 3, "shuffle": False},
    "step 3, no shuffling, stateful loader": {"stop": 3, "shuffle": False, "stateful": True},
    "end of an epoch": {"stop": 8},
    "step 3": {"stop": 3},
    "step 3, dropout": {"stop": 3, "dropout": 0.3},
    "step 3, dropout, stateful loader": {"stop": 3, "dropout": 0.3, "stateful": True},
    "step 3, stateful loader": {"stop": 3, "stateful": True},
    "step 3, augmentation": {"stop": 3, "augmented": True},
    "step 3, augmentation in 2 workers": {"stop": 3, "augmented": True, "workers": 2},
}


class Rows(Dataset[Any]):
    """32 rows, with random noise if augmented."""

    def __init__(self, augmented: bool):
        self.augmented = augmented

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return row + 0.1 * torch.rand(1) if self.augmented else row, row.sum().reshape(1)


class Setting:
    """One case: its objects are made anew for each run."""

    def __init__(
        self, stop: int, *, dropout: float = 0.0, augmented: bool = False, workers: int = 0, stateful: bool = False,
        shuffle: bool = True,
    ):  # fmt: skip
        self.stop, self.dropout, self.workers, self.stateful, self.shuffle = stop, dropout, workers, stateful, shuffle
        self.rows = Rows(augmented)
        self.folder = tempfile.mkdtemp()

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(8, 1))

    def loader(self, stateful: bool | None = None) -> Any:
        kind = StatefulDataLoader if (self.stateful if stateful is None else stateful) else DataLoader
        return kind(self.rows, 4, shuffle=self.shuffle, num_workers=self.workers)


def with_treadle(case: Setting, steps: int, *, resume: bool) -> nn.Module:
    treadle.set_seed(int(resume))
    model = case.net()

    class Fit:
        def step(self, model: Any, batch: Any, totals: Any = None, generator: Any = None) -> Any:
            return treadle.StepOutput(nn.functional.mse_loss(model(batch[0]), batch[1]), weight=4)

    hook = treadle.CheckpointingHook(case.stop, path=case.folder, load="latest" if resume else None)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    engine = treadle.Engine(model, optimizer, Fit(), device="cpu", hooks=[hook])
    engine.run(case.loader(), max_steps=steps)
    return model


def with_lightning(case: Setting, steps: int, *, resume: bool) -> nn.Module:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = case.net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

    lightning.seed_everything(0, verbose=False)
    module = Module()
    saves = ModelCheckpoint(case.folder, "{step}", every_n_train_steps=case.stop, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, callbacks=[saves], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, case.loader(), ckpt_path=f"{case.folder}/step={case.stop}.ckpt" if resume else None)
    return module.net


def with_transformers(case: Setting, steps: int, *, resume: bool) -> nn.Module:
    from transformers import Trainer, TrainingArguments, set_seed

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = case.net()

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.mse_loss(self.net(x), y)}

    def collated(rows: Any) -> dict[str, Tensor]:
        return {name: torch.stack(column) for name, column in zip("xy", zip(*rows, strict=True), strict=True)}

    if case.stateful or not case.shuffle:
        raise NotImplementedError  # its Trainer makes the loader
    set_seed(0)
    model = Model()
    arguments = TrainingArguments(
        output_dir=case.folder, max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        lr_scheduler_type="constant", save_strategy="steps", save_steps=case.stop, use_cpu=True, disable_tqdm=True,
        dataloader_num_workers=case.workers, remove_unused_columns=False, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=case.rows, data_collator=collated)
    trainer.train(resume_from_checkpoint=f"{case.folder}/checkpoint-{case.stop}" if resume else None)
    return model.net


def with_accelerate(case: Setting, steps: int, *, resume: bool) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    how = DataLoaderConfiguration(use_stateful_dataloader=case.stateful, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=how)
    model = case.net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, case.loader(stateful=False))
    step = case.stop if resume else 0
    if resume:
        accelerator.load_state(case.folder)
    while step < steps:
        loader.set_epoch(step // BATCHES)
        skips = step % BATCHES > 0 and not case.stateful
        for inputs, targets in accelerator.skip_first_batches(loader, step % BATCHES) if skips else loader:
            accelerator.backward(nn.functional.mse_loss(prepared(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == steps:
                break
    accelerator.save_state(case.folder)
    return model


WAYS = {
    "treadle": with_treadle, "Lightning": with_lightning, "HF Trainer": with_transformers, "Accelerate": with_accelerate
}  # fmt: skip


def distance(way: Any, settings: dict[str, Any]) -> str:
    """Return the largest difference of a weight, as text."""
    try:
        straight = way(Setting(**settings), STEPS, resume=False)
        case = Setting(**settings)
        way(case, case.stop, resume=False)
        resumed = way(case, STEPS, resume=True)
    except NotImplementedError:
        return ""
    pairs = zip(straight.parameters(), resumed.parameters(), strict=True)
    furthest = max(float((one - other).detach().abs().max()) for one, other in pairs)
    return "equal" if furthest == 0 else f"{furthest:.1e}"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["TREADLE_PROGRESS"] = "0"
    rows = [{"stopped after": name, **{way: distance(WAYS[way], case) for way in WAYS}} for name, case in CASES.items()]
    notes = [
        "Largest difference of a weight from the run without a stop; equal means all bits. Lightning 2.6, transformers "
        "5.24, Accelerate 1.15 with its seedable sampler, torchdata 0.11. Empty: the Trainer of transformers makes its "
        "own loader."
    ]
    title = "Resuming within an epoch, next to other trainers"
    write_result("resume_peers", title, ["stopped after", *WAYS], rows, describe(), notes=notes)


if __name__ == "__main__":
    main()
