"""Eight ranks stop inside an epoch: they go on to the bit, and four go on with the samples that are left."""

from __future__ import annotations

import math
import queue
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from helpers import differences
from ranks import run_on_ranks
from sharded_kit import Cut, Fit, differing, engine, tensors_of
from treadle.data import RankBatchSampler

KINDS = ["ddp", "fsdp"]
SAMPLES, CUT = 90, 4  # an epoch of eight ranks has six steps, the last with ten samples; of four it has twelve
PATIENCE = 300.0  # seconds


class Noting(Fit):
    """Notes which samples each step read, and its loss, in a queue: a list would be state of the run and be resumed."""

    def __init__(self):
        self.notes = queue.SimpleQueue()

    def step(self, model, batch, totals=None, generator=None):
        output = super().step(model, batch)
        self.notes.put((batch[1].tolist(), float(output.loss.detach())))
        return output

    def drained(self):
        return [self.notes.get() for _ in range(self.notes.qsize())]


def samples():
    rows = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(
        TensorDataset(rows, torch.arange(SAMPLES)), batch_sampler=RankBatchSampler(SAMPLES, 2, shuffle=True, seed=5)
    )


def leg(kind, folder, *, hooks=(), seed=0, epochs=2):
    """Go on from what is in a folder; return the engine, what this rank read by epoch, and its losses."""
    task = Noting()
    made = engine(kind, folder, hooks=hooks, seed=seed, task=task, interval=100)
    seen, losses = [], []
    for epoch in range(1, epochs + 1):
        made.run(samples(), epochs=epoch)
        notes = task.drained()
        seen.append([row for rows, _ in notes for row in rows])
        losses += [loss for _, loss in notes]
    return made, seen, losses


def eight(folder):
    """A run of two epochs, one that is cut, and the rest of that one; the folder of the cut run is there twice."""
    found = {}
    for kind in KINDS:
        own = Path(folder, kind)
        straight, _, _ = leg(kind, None)
        cut, before, _ = leg(kind, own, hooks=[Cut(CUT - 1)], epochs=1)  # ranks hear of it in the next step
        saved = tensors_of(cut)
        if dist.get_rank() == 0:
            shutil.copytree(own, own.with_name(f"{kind}_for_four"), symlinks=True)
        dist.barrier()
        resumed, after, losses = leg(kind, own, seed=9)
        states = straight.state_dict(), resumed.state_dict()
        apart = differences(*states) if dist.get_rank() == 0 else []
        found[kind] = {
            "cut at": cut.step, "saved": saved, "before": before[0], "after": after, "losses": losses,
            "resumed": resumed.state.resumed, "steps": resumed.step, "apart": apart,
        }  # fmt: skip
    return found


def four(folder):
    """Load what eight ranks saved, look at it, and train on to the end of the second epoch."""
    found = {}
    for kind in KINDS:
        own = Path(folder, f"{kind}_for_four")
        loaded = engine(kind, own, seed=9, interval=100)
        loaded.run(samples(), max_steps=CUT)
        tensors = tensors_of(loaded)
        made, seen, losses = leg(kind, own, seed=9)
        found[kind] = {"loaded": tensors, "at": loaded.step, "seen": seen, "losses": losses, "steps": made.step}
    return found


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight")
    return (
        run_on_ranks(eight, 8, str(folder), timeout=PATIENCE),
        run_on_ranks(four, 4, str(folder), timeout=PATIENCE),
    )


def rows_of(parts):
    return sorted(row for part in parts for row in part)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
class TestEightRanks:
    def test_the_run_that_was_cut_ends_as_the_one_that_was_not(self, ends, kind):
        found = [rank[kind] for rank in ends[0]]
        assert [(rank["cut at"], rank["resumed"], rank["steps"]) for rank in found] == [(CUT, True, 12)] * 8
        assert found[0]["apart"] == []

    def test_four_ranks_load_what_eight_saved_to_the_bit(self, ends, kind):
        eight_ranks, four_ranks = ends
        assert four_ranks[0][kind]["at"] == CUT
        assert differing(four_ranks[0][kind]["loaded"], eight_ranks[0][kind]["saved"]) == []

    def test_every_sample_is_read_once_in_each_epoch(self, ends, kind):
        eight_ranks, four_ranks = ends
        before = [rank[kind]["before"] for rank in eight_ranks]
        assert len(rows_of(before)) == 8 * 2 * CUT
        for after in ([rank[kind]["after"] for rank in eight_ranks], [rank[kind]["seen"] for rank in four_ranks]):
            assert rows_of([*before, *(rank[0] for rank in after)]) == list(range(SAMPLES))
            assert rows_of(rank[1] for rank in after) == list(range(SAMPLES))

    def test_four_ranks_train_on(self, ends, kind):
        left = math.ceil((SAMPLES - 8 * 2 * CUT) / 8)
        for rank in ends[1]:
            assert rank[kind]["steps"] == CUT + left + 12
            assert all(map(math.isfinite, rank[kind]["losses"]))
            assert len(rank[kind]["losses"]) == left + 12
