"""The exactness matrix: faces, loaders, workers, accumulation, schedules, precision; every stop; torch.equal.

``make test`` runs a spread of the cases, in which every two settings meet, with a few stops each; ``make matrix`` all
cases with every stop.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from helpers import MeanSquare, Snapshots, differences, small_model
from treadle import BaseTrainer, BestRule, EmaHook, Engine, EpochTrainer, LoggingHook, TensorLoader, Trainer, set_seed
from treadle.astro import AstroTrainer, CausalTransformerLM, build_vocab_spec, collate_sequences, encode_sequence
from treadle.graphs import GraphTrainer, get_optimizer
from treadle.spectra import ChemoMAE, SpectraTrainer, TrainerConfig

# torchdata 0.11 calls what torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:.*prefetch.*")

WIDTH, ROWS, EPOCHS = 8, 14, 3
FACES = ("mini", "epochs", "spectra", "functional", "functional tied", "graphs", "astro")
LOADERS = ("map", "weighted", "batch_sampler", "stateful", "tensors", "iterable")
WORKERS = ("0", "2", "2 persistent", "changed")
EXTRAS = ("lambda", "plateau", "onecycle", "step", "cosine", "fp16", "early stop")


@dataclass(frozen=True)
class Case:
    face: str
    loader: str
    workers: str
    k: int
    extra: str

    def __str__(self) -> str:
        return "-".join((self.face, self.loader, self.workers, f"k{self.k}", self.extra)).replace(" ", "_")


def all_cases():
    for face, loader, workers, k in itertools.product(FACES, LOADERS, WORKERS, (1, 3)):
        if loader == "tensors" and workers != "0":
            continue  # it has no workers
        if face in ("graphs", "astro") and loader == "tensors":
            continue  # its batches are no tuples of tensors
        if loader == "stateful" and workers == "changed":
            continue  # refused in words, see test_what_changes.py
        for extra in EXTRAS:
            yield Case(face, loader, workers, k, extra)


def pairs(case):
    """Every two settings of a case."""
    return set(itertools.combinations(vars(case).items(), 2))


def spread(cases):
    """Few cases in which every two settings meet that meet anywhere; where it is all one, those without workers."""
    cases = sorted(cases, key=lambda case: case.workers != "0")
    meeting = [pairs(case) for case in cases]
    left, chosen = set().union(*meeting), []
    while left:
        best = max(range(len(cases)), key=lambda number: len(meeting[number] & left))
        chosen.append(cases[best])
        left -= meeting[best]
    return chosen


ALL = list(all_cases())
SPREAD = spread(ALL)


class Rows(Dataset):
    """Random augmentation from three generators, unless the loader cannot repeat it in workers."""

    def __init__(self, augment=True):
        self.x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
        self.augment = augment

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        x = self.x[index]
        if self.augment:
            x = x + 0.1 * torch.rand(1) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return x, self.x[index].sum().reshape(1)


class Stream(IterableDataset):
    """Shuffled at the opening of an epoch, augmented while it runs, split over workers."""

    def __init__(self, augment=True):
        self.augment = augment

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        rows, order = Rows(self.augment), torch.randperm(ROWS).tolist()
        if info is not None:
            order = list(range(info.id, ROWS, info.num_workers))
        for index in order:
            yield rows[index]


def as_batch(rows):
    """Join rows into what the graph face reads; a module's own function, so that workers find it."""
    x, y = zip(*rows)
    return SimpleNamespace(x=torch.stack(x), y=torch.stack(y), num_graphs=len(x))


VOCAB = build_vocab_spec(64, 32, 16, ["a"], scalar_bins=16)
PARTS = ((slice(0, 4), 20.0, 64), (slice(4, 6), 6.0, 16), (slice(6, 8), 6.0, 16))


def as_sequences(items):
    """A sequence of image, scalar and spectrum tokens for each row; the augmentation changes them."""
    made = []
    for row, _ in items:
        image, scalars, spectrum = (
            (row[part] * scale + size / 2).long().clamp(0, size - 1) for part, scale, size in PARTS
        )
        made.append(encode_sequence(VOCAB, image=image, scalars=scalars.tolist(), spectra={"a": spectrum}))
    return collate_sequences(made)


COLLATE = {"graphs": as_batch, "astro": as_sequences}


def make_loader(kind, workers, resumed, collate=None):
    count = {"0": 0, "2": 2, "2 persistent": 2, "changed": 1 if resumed else 2}[workers]
    shared = {"num_workers": count, "persistent_workers": workers == "2 persistent", "collate_fn": collate}
    if kind == "map":
        return DataLoader(Rows(), batch_size=4, shuffle=True, **shared)
    if kind == "weighted":
        sampler = WeightedRandomSampler(torch.arange(1.0, ROWS + 1), ROWS, generator=torch.Generator().manual_seed(9))
        return DataLoader(Rows(), batch_size=4, sampler=sampler, **shared)
    if kind == "batch_sampler":
        sampler = BatchSampler(RandomSampler(range(ROWS), replacement=True, num_samples=ROWS), 4, drop_last=False)
        return DataLoader(Rows(), batch_sampler=sampler, **shared)
    if kind == "stateful":  # restores no random state of workers: without augmentation there
        return StatefulDataLoader(Rows(augment=count == 0), batch_size=4, shuffle=True, **shared)
    if kind == "tensors":
        rows = Rows()
        return TensorLoader(rows.x, rows.x.sum(1, keepdim=True), batch_size=4, shuffle=True)
    if workers == "changed":
        shared["num_workers"] = 2  # a stream is split over its workers: another number is other data
    # Persistent workers of a stream carry their random state from epoch to epoch, which is warned of.
    return DataLoader(Stream(augment=workers != "2 persistent"), batch_size=4, **shared)


def make_schedule(extra, optimizer):
    if extra == "plateau":
        return ReduceLROnPlateau(optimizer, patience=0, factor=0.5), "epoch"
    if extra == "onecycle":
        return OneCycleLR(optimizer, 0.05, total_steps=40), "step"
    if extra == "step":
        return StepLR(optimizer, 1, 0.7), "epoch"
    if extra == "cosine":
        return CosineAnnealingLR(optimizer, 12), "step"
    return LambdaLR(optimizer, lambda step: 1 / (1 + step)), "step"


class Mini(BaseTrainer):
    def __init__(self, case, hooks, resumed):
        self.case, self.made_hooks, self.resumed_run = case, hooks, resumed
        interval = make_schedule(case.extra, torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))[1]
        precision = "fp16" if case.extra == "fp16" else None
        super().__init__(
            EPOCHS * -(-4 // case.k), 0.5, 2, precision, case.k, device="cpu", scheduler_interval=interval
        )  # fmt: skip

    def build_data_loader(self):
        return make_loader(self.case.loader, self.case.workers, self.resumed_run)

    def build_model(self):
        return small_model(WIDTH)

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.02)

    def build_lr_scheduler(self):
        return make_schedule(self.case.extra, self.optimizer)[0]

    def build_hooks(self):
        return self.made_hooks

    def forward(self, input):
        x, y = input
        return nn.functional.mse_loss(self.model(x).float(), y), {"size": len(x)}, float(len(x))


class Tied(nn.Module):
    """Two layers with one weight between them, as the ends of a language model have."""

    def __init__(self):
        super().__init__()
        self.first, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(self.drop(self.first(x).relu())))


class OfBatch(nn.Module):
    """Reads the features of a whole batch, as graph models do."""

    def __init__(self):
        super().__init__()
        self.net = small_model(WIDTH)

    def forward(self, batch):
        return self.net(batch.x)


class Run:
    """One run of a case: its engine, and how it is trained to the end."""

    def __init__(self, case: Case, seed: int, folder, *, resumed: bool):
        set_seed(seed)
        self.snapshots = Snapshots()
        hooks = [self.snapshots, LoggingHook(4)]
        if case.face == "mini":
            self.engine = Mini(case, [*hooks, EmaHook(0.9)], resumed)
            self.train = self.engine.train
            return
        loader = make_loader(case.loader, case.workers, resumed, COLLATE.get(case.face))
        validation = DataLoader(Rows(), batch_size=7)
        if case.face == "spectra":
            self._spectra(case, hooks, loader, validation, folder)
        elif case.face.startswith("functional"):
            self._functional(case, hooks, loader, validation)
        elif case.face == "astro":
            validation = DataLoader(Rows(), batch_size=7, collate_fn=as_sequences)
            self._astro(case, [*hooks, EmaHook(0.9)], loader, validation)
        elif case.face == "graphs":
            self._graphs(case, [*hooks, EmaHook(0.9)], loader, DataLoader(Rows(), batch_size=7, collate_fn=as_batch))
        else:
            self._epochs(case, [*hooks, EmaHook(0.9, use_buffers=True)], loader, validation)

    def _epochs(self, case, hooks, loader, validation):
        model = small_model(WIDTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler, interval = make_schedule(case.extra, optimizer)
        self.engine = Engine(
            model, optimizer, MeanSquare(), scheduler=scheduler, scheduler_interval=interval, device="cpu",
            precision="fp16" if case.extra == "fp16" else None, grad_clip=0.5, accumulation_steps=case.k, hooks=hooks,
        )  # fmt: skip
        patience, delta = (1, 9.0) if case.extra == "early stop" else (None, 0.0)
        driver = EpochTrainer(self.engine, best=BestRule("val_loss", None, delta, patience))
        self.train = lambda: driver.fit(loader, validation, EPOCHS)

    def _functional(self, case, hooks, loader, validation):
        model = Tied() if case.face.endswith("tied") else small_model(WIDTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler, interval = make_schedule(case.extra, optimizer)
        stops = case.extra == "early stop"
        training = {
            "max_grad_norm": 0.5, "gradient_accumulation_steps": case.k, "scheduler_step_per_batch": interval == "step",
            "mixed_precision": "fp16" if case.extra == "fp16" else None, "ema_decay": 0.9,
            "min_delta": 9.0 if stops else 0.0,
        }  # fmt: skip
        trainer = Trainer(model, optimizer, nn.MSELoss(), {"training": training}, "cpu", scheduler, hooks=hooks)
        self.engine = trainer._engine
        patience = 1 if stops else None
        self.train = lambda: trainer.train(loader, EPOCHS, validation, early_stopping_patience=patience)

    def _graphs(self, case, hooks, loader, validation):
        model = OfBatch()
        optimizer = get_optimizer(model, lr=0.02)
        scheduler, interval = make_schedule(case.extra, optimizer)
        trainer = GraphTrainer(
            model, optimizer, scheduler, device="cpu", grad_clip=0.5, accumulation_steps=case.k, log_every=3,
            mixed_precision="fp16" if case.extra == "fp16" else False, scheduler_interval=interval, hooks=hooks,
        )  # fmt: skip
        self.engine = trainer._engine
        stop = {"early_stopping": 1, "min_delta": 9.0} if case.extra == "early stop" else {}
        self.train = lambda: trainer.fit(loader, validation, EPOCHS, "mae", **stop)

    def _spectra(self, case, hooks, loader, validation, folder):
        model = ChemoMAE(
            seq_len=WIDTH, d_model=8, nhead=2, num_layers=1, dim_feedforward=16, latent_dim=4, n_blocks=4, n_mask=2
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler, interval = make_schedule(case.extra, optimizer)
        stop = {"early_stop_patience": 1, "early_stop_min_delta": 9.0, "early_stop_start_ratio": 0.0}
        cfg = TrainerConfig(
            out_dir=folder, resume_from=None, amp=case.extra == "fp16", amp_dtype="fp16", ema_decay=0.9,
            accumulation_steps=case.k, **(stop if case.extra == "early stop" else {}),
        )  # fmt: skip
        trainer = SpectraTrainer(
            model, optimizer, loader, validation, scheduler=scheduler, cfg=cfg, device="cpu",
            scheduler_interval=interval, hooks=hooks,
        )  # fmt: skip
        self.engine = trainer._engine
        self.train = lambda: trainer.fit(EPOCHS)

    def _astro(self, case, hooks, loader, validation):
        model = CausalTransformerLM(VOCAB.vocab_size, 8, 8, 1, 2, 16, 0.1, 32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler, interval = make_schedule(case.extra, optimizer)
        if case.extra == "early stop":  # this face has none: its own optimizer and schedule in its place
            optimizer, scheduler, interval = None, None, "step"
        config = {
            "grad_clip": 0.5, "grad_accum_steps": case.k, "warmup_steps": 2, "total_steps": 12,
            "meaningful_loss": {"sample_k_per_modality": 3},
        }  # fmt: skip
        draw = torch.Generator().manual_seed(1)
        codebooks = [torch.randn(size, 2, generator=draw) for size in (64, 16)]
        trainer = AstroTrainer(
            model, VOCAB, loader, config, *codebooks, torch.randn(2, 16, generator=draw), device="cpu",
            use_amp=case.extra == "fp16", optimizer=optimizer, scheduler=scheduler, scheduler_interval=interval,
            hooks=hooks,
        )  # fmt: skip
        self.engine = trainer._engine
        self.train = lambda: trainer.train(EPOCHS, validation)

    def end(self):
        state = self.engine.state_dict()
        state.pop("config")
        state["data"].pop("num_workers")
        for record in state["history"] or []:
            record.pop("time", None)  # seconds, the one thing that no two runs share
        state["drawn after"] = [torch.rand(2), random.random(), float(np.random.rand())]
        return state


def check(case, tmp_path, *, every):
    straight = Run(case, 0, tmp_path / "straight", resumed=False)
    straight.train()
    expected = straight.end()
    steps = sorted(straight.snapshots.states)
    assert len(steps) >= (3 if case.k == 3 else 7)
    for cut in steps[::every]:
        resumed = Run(case, 1, tmp_path / f"cut{cut}", resumed=True)
        resumed.engine.load_state_dict(straight.snapshots.states[cut])
        resumed.train()
        assert differences(expected, resumed.end()) == [], f"{case}: stopped after step {cut}"


@pytest.mark.parametrize("case", SPREAD, ids=str)
def test_a_spread_of_the_matrix(case, tmp_path):
    check(case, tmp_path, every=3)  # each place in an epoch: of 4 steps with k = 1, of 2 with k = 3


def test_a_stateful_loader_with_persistent_workers_is_exact_where_an_epoch_ended(tmp_path):
    # The place "at the end" has no state of the loader: the next epoch's draws must not depend on running workers.
    check(Case("mini", "stateful", "2 persistent", 3, "step"), tmp_path, every=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_the_whole_matrix_at_every_stop(case, tmp_path):
    check(case, tmp_path, every=int(os.environ.get("TREADLE_MATRIX_EVERY", "1")))  # 4: every fourth stop, in a hurry


def test_the_matrix_names_every_combination_once():
    assert len({str(case) for case in ALL}) == len(ALL)
    assert set().union(*map(pairs, SPREAD)) == set().union(*map(pairs, ALL))
    assert len(SPREAD) < 60
    assert {case.face for case in SPREAD} == set(FACES)
    assert {case.loader for case in SPREAD} == set(LOADERS)
    assert {case.workers for case in SPREAD} == set(WORKERS)
    assert {case.extra for case in SPREAD} == set(EXTRAS)
