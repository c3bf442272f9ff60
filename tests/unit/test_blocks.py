"""Blocks of captured steps leave what the same steps leave one by one; the graph runs its work anew, on the CPU."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from capture_kit import Rerun, capture_on_the_cpu, refuse_on_the_device
from helpers import differences
from treadle import (
    BaseHook,
    CheckpointingHook,
    EmaHook,
    Engine,
    NonFiniteError,
    ProgressBarHook,
    StepLogHook,
    StepOutput,
    TensorLoader,
    ThroughputHook,
    ValidationHook,
)
from treadle.engine import block
from treadle.faces.run_files import RunFilesHook
from treadle.hooks.bar import RunProgress
from treadle.hooks.reporting import IntervalHook


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    capture_on_the_cpu(monkeypatch)
    refuse_on_the_device(monkeypatch)


class Fit:
    def __init__(self, records):
        self.records = records

    def step(self, model, batch, totals=None, generator=None):
        x, y = batch
        records = {"three": 3} if self.records else {}
        return StepOutput((model(x) - y).square().mean(), records, weight=float(len(x)))


class Looks(BaseHook):
    """Sees every step by itself, so that there are no blocks."""

    def on_after_step(self, trainer):
        pass


class Counts(BaseHook):
    """Counts the blocks, and sees every step that a hook of its kind sees."""

    def __init__(self, due=None):
        self.blocks, self.seen, self.due = [], [], due

    def steps_ahead(self, trainer):
        return None if self.due is None else self.due - trainer.step % self.due

    def on_after_step(self, trainer):
        self.seen.append(trainer.step)

    def on_after_steps(self, trainer, block):
        self.blocks.append(len(block))
        self.seen.append(trainer.step)


def train(folder, *hooks, max_steps=60, records=False, bad=False, epochs=None, batches=20, ema=True, left_over=5):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    count = 8 * batches - (8 - left_over if left_over else 0)
    x, y = torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator)
    if bad:
        x[100] = float("nan")
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    own = [EmaHook(0.9)] if ema else []
    engine = Engine(
        model, optimizer, Fit(records), scheduler=schedule, scheduler_interval="epoch", device="cpu", grad_clip=1.0,
        hooks=[*own, RunFilesHook(), *hooks], capture=True, workspace=folder,
    )  # fmt: skip
    loader = TensorLoader(x, y, batch_size=8, shuffle=True, seed=3, num_buffers=1)
    engine.run(loader, **({"epochs": epochs} if epochs else {"max_steps": max_steps}))
    return engine


@pytest.mark.parametrize("records", [False, True])
def test_the_state_and_the_log_are_those_of_single_steps(tmp_path, records):
    counts = Counts()
    one = train(tmp_path / "blocks", counts, records=records)
    two = train(tmp_path / "single", Looks(), records=records)
    assert sum(counts.blocks) > 40
    states = [{**each.state_dict(), "hooks": None} for each in (one, two)]
    assert differences(*states) == []
    assert one.train_means() == two.train_means()
    log, expected = ((tmp_path / name / "steps.jsonl").read_text() for name in ("blocks", "single"))
    assert log == expected
    assert [json.loads(line)["step"] for line in log.splitlines()] == list(range(1, 61))
    info, other = dict(one.step_info), dict(two.step_info)
    for each in (info, other):
        each.pop("step_time"), each.pop("data_time")
    assert differences(info, other) == []


@pytest.mark.parametrize("took", [0.0, 1.0])
def test_steps_that_are_short_are_launched_several_at_a_time(tmp_path, monkeypatch, took):
    replays = []
    replay = Rerun.replay

    def counted(graph):
        replays.append(graph.left is None)
        replay(graph)

    monkeypatch.setattr(Rerun, "replay", counted)
    monkeypatch.setattr(Rerun, "took", took)
    one = train(tmp_path / "blocks", batches=40)
    two = train(tmp_path / "single", Looks(), batches=40)
    assert any(replays) == (took == 0.0)
    assert differences(*({**each.state_dict(), "hooks": None} for each in (one, two))) == []
    assert (tmp_path / "blocks" / "steps.jsonl").read_text() == (tmp_path / "single" / "steps.jsonl").read_text()


def test_several_steps_at_a_time_that_give_other_bits_are_left_out(tmp_path, monkeypatch):
    replay, several = Rerun.replay, []

    def wrong(graph):
        replay(graph)
        if graph.left is None:
            several.append(graph)
            graph.step._engine.model[0].bias.data.add_(1e-6)

    monkeypatch.setattr(Rerun, "replay", wrong)
    one = train(tmp_path / "blocks", batches=40)
    assert len(several) == 1  # the trial
    assert one.steps._latest_step.runs_ahead
    two = train(tmp_path / "single", Looks(), batches=40)
    assert differences(*({**each.state_dict(), "hooks": None} for each in (one, two))) == []


@pytest.mark.parametrize("batches", [2, 3, 17])
def test_a_step_that_is_captured_at_the_end_of_an_epoch_is_tried_without_leaving_the_data(tmp_path, batches):
    one = train(tmp_path / "blocks", epochs=4, batches=batches, left_over=0)
    two = train(tmp_path / "single", Looks(), epochs=4, batches=batches, left_over=0)
    assert one.steps._steps
    assert differences(*({**each.state_dict(), "hooks": None} for each in (one, two))) == []


def test_no_block_crosses_a_save_the_end_of_an_epoch_or_the_target(tmp_path):
    counts = Counts()
    one = train(tmp_path / "blocks", counts, CheckpointingHook(7, keep_previous=None), epochs=3)
    train(tmp_path / "single", Looks(), CheckpointingHook(7, keep_previous=None), epochs=3)
    assert counts.blocks
    assert max(counts.blocks) <= 7
    assert one.step == 60
    for path in sorted((tmp_path / "single" / "checkpoints").glob("checkpoint_step_*.pt")):
        mine = torch.load(tmp_path / "blocks" / "checkpoints" / path.name)
        theirs = torch.load(path)
        mine.pop("hooks", None), theirs.pop("hooks", None)
        assert differences(mine, theirs) == [], path.name
    assert (tmp_path / "blocks" / "steps.jsonl").read_text() == (tmp_path / "single" / "steps.jsonl").read_text()


def test_no_block_crosses_a_step_that_is_kept(tmp_path):
    counts = Counts()
    train(tmp_path, counts, CheckpointingHook(50, keep_steps=[13, 31]))
    assert {13, 31, 50, 60} <= set(counts.seen)
    assert {"checkpoint_step_13.pt", "checkpoint_step_31.pt"} <= {
        path.name for path in (tmp_path / "checkpoints").iterdir()
    }


def test_a_hook_sees_the_steps_that_it_asks_for(tmp_path):
    counts = Counts(due=5)
    train(tmp_path, counts, max_steps=33)
    assert {5, 10, 15, 20, 25, 30, 33} <= set(counts.seen)
    assert len(counts.seen) < 33


def test_a_hook_of_a_step_log_writes_at_its_interval(tmp_path):
    train(tmp_path / "blocks", StepLogHook("own.jsonl", interval=10))
    train(tmp_path / "single", StepLogHook("own.jsonl", interval=10), Looks())
    assert (tmp_path / "blocks" / "own.jsonl").read_text() == (tmp_path / "single" / "own.jsonl").read_text()


class Reports(IntervalHook):
    """Keeps what it would show, but for times."""

    def __init__(self, interval):
        super().__init__(interval, sync=False)
        self.seen = []

    def report(self, trainer, means):
        self.seen.append((trainer.step, {name: value for name, value in means.items() if "time" not in name}))


@pytest.mark.parametrize("records", [False, True])
def test_reports_over_blocks_are_those_of_single_steps(tmp_path, records):
    mine, theirs, counts = Reports(13), Reports(13), Counts()
    one = train(tmp_path / "blocks", mine, counts, records=records)
    other = train(tmp_path / "single", theirs, Looks(), records=records)
    assert max(counts.blocks) > 6
    assert [step for step, _ in mine.seen] == [13, 26, 39, 52, 60]
    assert mine.seen == theirs.seen
    states = [each.state_dict()["hooks"]["Reports"] for each in (one, other)]
    assert differences(*states) == []


def test_usual_hooks_allow_blocks_up_to_the_step_that_they_need(tmp_path):
    class Emitted(BaseHook):
        def __init__(self):
            self.seen = []

        def on_log(self, trainer, records, dry_run=False):
            self.seen.append((trainer.step, *records))

    counts, emitted = Counts(), Emitted()
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    validation = ValidationHook([(rows, rows[:, :1])], interval=20, best=None)
    train(tmp_path, counts, ThroughputHook(15), validation, RunProgress(), ProgressBarHook(), emitted, ema=False)
    assert [step for step, name in emitted.seen if name == "throughput"] == [15, 30, 45, 60]
    assert [step for step, name in emitted.seen if name == "val"] == [20, 40, 60]
    assert sum(counts.blocks) > 30


@pytest.mark.parametrize("most", [4, 64])
def test_a_gradient_that_is_not_finite_inside_a_block_is_named_by_its_step(tmp_path, monkeypatch, most):
    with pytest.raises(NonFiniteError) as single:
        train(tmp_path / "single", Looks(), bad=True)
    monkeypatch.setattr(block, "MOST", most)
    with pytest.raises(NonFiniteError) as found:
        train(tmp_path / "blocks", bad=True)
    assert (found.value.step, found.value.batch_index) == (single.value.step, single.value.batch_index)
    assert str(found.value) == str(single.value)


def test_a_schedule_of_steps_allows_no_block(tmp_path, monkeypatch):
    counts = Counts()
    monkeypatch.setattr(Engine, "scheduler_interval", "step")
    train(tmp_path, counts, max_steps=12)
    assert counts.blocks == []
