"""A rank that dies or cannot write inside a save of shards: nobody hangs, and what was there before is what resumes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from helpers import differences
from ranks import outcomes_on_ranks, run_on_ranks
from sharded_kit import engine, loader, run
from treadle.checkpoint import files as checkpoint_files
from treadle.checkpoint import load_checkpoint, shard_files, shard_manifest, sharded
from treadle.errors import CheckpointError

KILLED = 3  # the save of this step is not survived
# name: (rank that dies, module, function, whether it runs first, the step that resumes)
PLACES = {
    "before the parts": (1, sharded, "write_shard", False, 2),
    "after the parts": (1, sharded, "write_shard", True, 2),
    "parts read back": (1, sharded, "_read_back", True, 2),
    "before the marker": (0, shard_manifest, "publish", False, 2),
    "after the marker": (0, shard_manifest, "publish", True, 3),  # whole, though the link names the one before
    "after the link": (0, sharded, "_finish", True, 3),
}


def die_in_a_save(folder, place, background):
    rank, module, name, runs, _ = PLACES[place]
    original, calls = getattr(module, name), []

    def dying(*args, **kwargs):
        calls.append(args)
        if len(calls) < KILLED or dist.get_rank() != rank:
            return original(*args, **kwargs)
        if runs:
            original(*args, **kwargs)
        os._exit(9)

    setattr(module, name, dying)
    run("fsdp", Path(folder), 6, background=background)


def resume_all(folders):
    """Resume every run on two ranks and compare it with one that nothing happened to."""
    straight = run("fsdp", Path(folders[0]).with_name("straight"), 6).state_dict()
    found = {}
    for folder in map(Path, folders):
        made = run("fsdp", folder, 6, seed=9)
        tree = made.state_dict()
        found[folder.name] = differences(straight, tree) if dist.get_rank() == 0 else []
    return found


def kill(root, places):
    """Kill a rank in a save of each run; return how the ranks ended and what is there."""
    found = {}
    for number, place in enumerate(places):
        folder = root / place
        outcomes = outcomes_on_ranks(die_in_a_save, 2, str(folder), place, number % 2 == 1)
        found[place] = outcomes, sorted(path.name for path in folder.iterdir())
    return found


def check(root, places):
    for place, (outcomes, names) in kill(root, places).items():
        rank, *_, step = PLACES[place]
        assert outcomes[rank].exitcode == 9, place
        error = outcomes[1 - rank].error
        assert "LostError" in error, place
        assert "still running" not in error, place
        assert f"checkpoint_step_{KILLED}" in names, place
        assert run(None, root / place, 1).step == step, place
    resumed = run_on_ranks(resume_all, 2, [str(root / place) for place in places], timeout=120)[0]
    assert resumed == {place: [] for place in places}


SOME = ["after the parts", "before the marker"]


def test_a_killed_rank_ends_the_others_and_the_run_goes_on_from_what_is_whole(tmp_path):
    check(tmp_path, SOME)


@pytest.mark.slow
def test_a_rank_may_be_killed_at_any_place_of_a_save(tmp_path):
    check(tmp_path, [place for place in PLACES if place not in SOME])


# -- errors of the disk -------------------------------------------------------------------------------------------


def no_space(folder, background):
    """The disk of rank 1 is full in the third save: what each rank raises, and at which step."""
    original = shard_files._ChecksummedFiles.create_stream
    made = engine("fsdp", Path(folder), background=background)

    def full(self, path, mode):
        if f"checkpoint_step_{KILLED}" in str(path) and dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, path, mode)

    shard_files._ChecksummedFiles.create_stream = full
    try:
        made.run(loader(), max_steps=12)
    except CheckpointError as error:
        return str(error), made.step
    finally:
        shard_files._ChecksummedFiles.create_stream = original
    return None


def not_the_marker(folder):
    """Rank 0 cannot write the marker: every rank hears of it."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    shard_manifest.write_text = refuse
    try:
        run("fsdp", Path(folder), 2)
    except CheckpointError as error:
        return str(error)
    finally:
        shard_manifest.write_text = checkpoint_files.write_text
    return None


def disk_errors(folder):
    return (
        no_space(f"{folder}/foreground", False),
        no_space(f"{folder}/background", True),
        not_the_marker(f"{folder}/marker"),
    )


def test_what_one_rank_cannot_write_every_rank_raises_at_the_same_step(tmp_path):
    first, second = run_on_ranks(disk_errors, 2, str(tmp_path))
    assert first == second
    (message, step), (later, at), marker_message = first
    assert step == KILLED
    for told in (message, later):
        assert "rank 1" in told
        assert "__1_0.distcp" in told
        assert "No space left on device" in told
    assert at > KILLED  # in the background, at a later step, on both
    assert "rank 0" in marker_message
    assert "Read-only" in marker_message
    assert sorted(path.name for path in (tmp_path / "foreground").iterdir()) == [
        "checkpoint_latest", "checkpoint_step_1", "checkpoint_step_2",
    ]  # fmt: skip
    assert load_checkpoint(tmp_path / "foreground" / "checkpoint_latest")["global_step"] == 2
    assert list((tmp_path / "marker").iterdir()) == []
