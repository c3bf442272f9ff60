"""Stop after any step and go on in new objects: everything equals the uninterrupted run, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from helpers import Augmented, MeanSquare, Snapshots, differences, small_model
from treadle import BestRule, EmaHook, Engine, EpochTrainer, LoggingHook, set_seed
from treadle.hooks import ProgressHook

EPOCHS = 3


def make_loader(kind: str, workers: int, persistent: bool, batch_size: int = 4):
    data = Augmented(18)
    sampler = None
    if kind == "generator":
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
    elif kind == "weighted":
        sampler = WeightedRandomSampler(torch.arange(1.0, 19.0), 18)
    loader = DataLoader(
        data, batch_size=batch_size, shuffle=sampler is None, sampler=sampler, num_workers=workers,
        persistent_workers=persistent and workers > 0,
    )  # fmt: skip
    return data, loader


def make_scheduler(kind: str, optimizer):
    if kind == "lambda":
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return {"plateau": ReduceLROnPlateau(optimizer, patience=0, factor=0.5), "step": StepLR(optimizer, 1, 0.7)}[kind]


class Run:
    def __init__(self, seed, *, kind="random", workers=0, persistent=False, k=1, scheduler="lambda", precision=None):
        set_seed(seed)
        self.model = small_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.snapshots = Snapshots()
        interval = "epoch" if scheduler == "step" else "step"
        self.engine = Engine(
            self.model, self.optimizer, MeanSquare(), scheduler=make_scheduler(scheduler, self.optimizer),
            scheduler_interval=interval, device="cpu", grad_clip=0.5, accumulation_steps=k, precision=precision,
            hooks=[self.snapshots, EmaHook(0.9, use_buffers=True), LoggingHook(4), ProgressHook(3)],
        )  # fmt: skip
        self.logged = []
        self.engine.log = lambda records, dry_run=False: self.logged.append((self.engine.step, without_times(records)))
        self.driver = EpochTrainer(self.engine, best=BestRule("val_loss", patience=2))
        self.data, self.loader = make_loader(kind, workers, persistent)
        _, self.val_loader = make_loader("random", workers, persistent, batch_size=7)

    def fit(self):
        self.driver.fit(self.loader, self.val_loader, EPOCHS)
        return self

    def end(self):
        state = self.engine.state_dict()
        state["ended_rng"] = torch.rand(3)
        return state


def without_times(records):
    return {key: value for key, value in records["train"].items() if not key.endswith("_time")}


MATRIX = [
    {},
    {"k": 3},
    {"kind": "generator", "scheduler": "plateau"},
    {"kind": "weighted", "scheduler": "step", "k": 3},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"workers": 2},
    {"workers": 2, "persistent": True, "kind": "generator", "k": 3},
]


@pytest.mark.parametrize("settings", MATRIX, ids=lambda settings: "-".join(f"{k}={v}" for k, v in settings.items()))
def test_stopping_after_any_step_changes_nothing(settings):
    straight = Run(0, **settings).fit()
    expected = straight.end()
    steps = sorted(straight.snapshots.states)
    assert len(steps) == straight.engine.step >= 6
    cuts = steps if settings.get("workers", 0) == 0 else steps[:: max(1, len(steps) // 4)]
    for cut in cuts:
        resumed = Run(1, **settings)
        resumed.engine.load_state_dict(straight.snapshots.states[cut])
        resumed.fit()
        assert differences(expected, resumed.end()) == [], f"stopped after step {cut}"
        assert differences([entry for entry in straight.logged if entry[0] > cut], resumed.logged) == []


def test_a_second_and_third_stop_inside_one_epoch_change_nothing():
    straight = Run(0).fit()
    expected = straight.end()
    run = Run(1)
    run.engine.load_state_dict(straight.snapshots.states[6])
    for cut in (7, 9):
        run.engine.run(run.loader, max_steps=cut)
        again = Run(2)
        again.engine.load_state_dict(run.snapshots.states[cut])
        run = again
    assert differences(expected, run.fit().end()) == []


def test_the_same_object_goes_on_where_it_stands():
    expected = Run(0).fit().end()
    run = Run(0)
    for target in (2, 3, 4):
        run.engine.run(run.loader, max_steps=target)
    assert differences(expected, run.fit().end()) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_reads_at_most_the_prefetch(workers):
    straight = Run(0, workers=0).fit()
    resumed = Run(1)
    resumed.engine.load_state_dict(straight.snapshots.states[9])  # 4 of 5 batches of epoch 2 are consumed
    resumed.engine.run(resumed.loader, max_steps=10)
    assert len(resumed.data.reads) == 2  # the last, short batch; nothing before it


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_number_of_workers_does_not_matter():
    ends = [
        Run(0, workers=2).fit().end(),
        Run(0, workers=3).fit().end(),
        Run(0, workers=2, persistent=True).fit().end(),
    ]
    for other in ends[1:]:
        assert [d for d in differences(ends[0], other) if "num_workers" not in d] == []


def test_early_stop_comes_at_the_same_epoch_after_a_resume():
    class Flat(MeanSquare):
        def step(self, model, batch, totals=None, generator=None):
            output = super().step(model, batch)
            return output if model.training else type(output)(output.loss * 0 + 1.0, weight=1.0)

    def run(seed):
        made = Run(seed)
        made.engine.task = Flat()
        return made

    straight = run(0)
    straight.driver.fit(straight.loader, straight.val_loader, 9)
    expected = straight.end()
    assert straight.engine.epoch == 3  # epoch 1 is the best, 2 and 3 are not better
    resumed = run(1)
    resumed.engine.load_state_dict(straight.snapshots.states[7])
    resumed.driver.fit(resumed.loader, resumed.val_loader, 9)
    assert differences(expected, resumed.end()) == []
    again = run(2)
    again.engine.load_state_dict(straight.engine.state_dict())
    again.driver.fit(again.loader, again.val_loader, 9)
    assert again.engine.step == straight.engine.step
