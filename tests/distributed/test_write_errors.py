"""A checkpoint that rank 0 cannot write is an error on every rank, at the same point and with rank 0's reason."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks import run_on_ranks
from step_kit import Counting, engine_of, share
from treadle import CheckpointingHook
from treadle.astro.files import AstroFolder
from treadle.astro.vocab import VocabSpec
from treadle.checkpoint.rank_writer import RankWriter
from treadle.checkpoint.store import save_checkpoint
from treadle.engine.hook import BaseHook
from treadle.engine.stopping import Target
from treadle.errors import CheckpointError
from treadle.functional.files import HistoryFile
from treadle.functional.folder import NumberedFolder
from treadle.graphs.trainer import BestAndLast
from treadle.hooks import checkpointing
from treadle.hooks.saving import BackgroundErrorHook

STEPS = 6


class Landed(BaseHook):
    """Sees to it that what rank 0 writes has ended before the next step, and notes the steps that were seen."""

    def __init__(self, writer):
        self.writer = writer
        self.steps = 0

    def on_before_step(self, trainer):
        for flight in self.writer._running:
            flight.thread.join()

    def on_after_step(self, trainer):
        self.steps = trainer.step


def in_the_way(folder, name):
    """A folder where a file is to be: nobody can rename a file to it, also not the superuser."""
    Path(folder, name).mkdir(parents=True, exist_ok=True)
    Path(folder, name, "occupied").touch()
    return Path(folder)


def error_of(work):
    try:
        work()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return None


def training(folder, **settings):
    """Return the error of a run whose second checkpoint cannot be written, and the step it is raised at."""
    folder = in_the_way(folder, "checkpoint_step_2.pt")
    hook = CheckpointingHook(2, path=folder, load=None, **settings)
    landed = Landed(hook._writer)
    engine = engine_of("ddp", hooks=[landed, hook])
    error = error_of(lambda: engine.run(share(dist.get_rank(), 2, [(3, 3)] * STEPS), max_steps=STEPS))
    return error, landed.steps


def last_write(folder):
    """Run :func:`training` so that only the end of the run can report it."""
    folder = in_the_way(folder, "checkpoint_step_2.pt")
    engine = engine_of("ddp", hooks=[CheckpointingHook(2, path=folder, load=None, background=True)])
    return error_of(lambda: engine.run(share(dist.get_rank(), 2, [(3, 3)] * 2), max_steps=2)), engine.step


def leaving(folder):
    """The write under way fails, and a signal makes all save the same step once more."""
    original, fails = checkpointing.save_checkpoint, [dist.get_rank() == 0]

    def fail_once(tree, path):
        if fails.pop() if fails else False:
            raise CheckpointError("the disk was full")
        return original(tree, path)

    checkpointing.save_checkpoint = fail_once
    hook = CheckpointingHook(1, path=folder, load=None, background=True, exit_signals=15)
    engine = engine_of("ddp", hooks=[hook])
    said = []
    engine.logger = type("Said", (), {"error": lambda self, text, *values: said.append(text % values)})()
    engine.step_group(share(dist.get_rank(), 2, [(3, 3)]))
    hook.exit_plan(engine).write()
    checkpointing.save_checkpoint = original
    return said, hook._saved.step, sorted(path.name for path in Path(folder).glob("*.pt"))


def talk_of_steps(folder):
    """Return the ranks' messages in a step before, during and after the write of a file."""
    original, go_on = checkpointing.save_checkpoint, threading.Event()

    def wait(tree, path):
        assert go_on.wait(120)
        return original(tree, path)

    checkpointing.save_checkpoint = wait
    hook = CheckpointingHook(100, path=folder, load=None, background=True)
    engine = engine_of("ddp", hooks=[hook])
    engine.target = Target(max_steps=100)  # no step is the last one, which would be saved
    rows, counts = share(dist.get_rank(), 2, [(3, 3)]), []
    engine.step_group(rows)
    for moment in ("nothing", "under way", "ended"):
        if moment == "under way":
            hook.save(engine)
        if moment == "ended":
            go_on.set()
            Landed(hook._writer).on_before_step(engine)
        with Counting() as counting:
            engine.step_group(rows)
        counts.append(dict(counting.calls))
    checkpointing.save_checkpoint = original
    return counts


def faces(folder):
    """The error of what each face with epochs writes."""
    engine = engine_of("ddp")
    vocab = VocabSpec(2, 4, 2, ("a",), 2)
    astro, graphs = AstroFolder(engine, vocab), BestAndLast(engine, "checkpoint_dir")
    functional = NumberedFolder(engine, lambda *_: None, HistoryFile(list))
    names = ("ckpt_epoch_000.pt", "last.pt", "best_model.pt", "any.pt")
    for each in (astro, graphs):
        each.use(folder)
    for name in names:
        in_the_way(folder, name)
    return {
        "astro, epoch": error_of(lambda: astro.write_epoch(improved=False)),
        "astro": error_of(lambda: astro.write(Path(folder, "any.pt"))),
        "graphs": error_of(lambda: graphs.write_epoch(improved=False)),
        "functional": error_of(lambda: functional.write(Path(folder, "any.pt"), None)),
    }


def spectra(folder):
    """A writer as the spectra trainer uses it: rank 0 writes, a hook tells the others, the end of the run waits."""
    told = []
    for ends_at_once in (False, True):
        writer = RankWriter()
        engine = engine_of("ddp", hooks=[Landed(writer), BackgroundErrorHook(writer)])
        target = Path(in_the_way(folder, "last.pt"), "last.pt")

        def train(writer=writer, engine=engine, target=target, steps=0 if ends_at_once else 3):
            with writer:
                writer.save_file(
                    lambda buffers: engine.state_dict(buffers=buffers), lambda tree: save_checkpoint(tree, target),
                    background=True,
                )  # fmt: skip
                engine.run(share(dist.get_rank(), 2, [(3, 3)] * 3), max_steps=steps)

        told.append((error_of(train), engine.step))
    return told


def every_case(folder):
    folder = Path(folder)
    return {
        "foreground": training(folder / "foreground"),
        "background": training(folder / "background", background=True),
        "last": last_write(folder / "last"),
        "leaving": leaving(folder / "leaving"),
        "talk": talk_of_steps(folder / "talk"),
        "faces": faces(folder / "faces"),
        "spectra": spectra(folder / "spectra"),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_on_ranks(every_case, 2, str(tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize(("kind", "step"), [("foreground", 2), ("background", 3), ("last", 2)])
def test_every_rank_raises_after_the_same_step_and_names_rank_0(found, kind, step):
    assert found[0][kind] == found[1][kind]
    error, at = found[0][kind]
    assert error.startswith("CheckpointError: rank 0: ")
    assert "checkpoint_step_2.pt" in error
    assert at == step


def test_a_signal_after_a_failed_write_saves_once_more_on_all_ranks(found):
    assert found[0]["leaving"] == found[1]["leaving"]
    said, step, files = found[0]["leaving"]
    assert said == ["rank 0: the disk was full"]
    assert step == 1
    assert files == ["checkpoint_latest.pt", "checkpoint_step_1.pt"]


def test_a_step_during_a_write_exchanges_no_more_than_any_other(found):
    for nothing, under_way, ended in (rank["talk"] for rank in found):
        assert under_way == nothing
        assert ended == {**nothing, "all_gather_object": 1}


@pytest.mark.parametrize("face", ["astro, epoch", "astro", "graphs", "functional"])
def test_files_of_the_faces_fail_on_all_ranks_too(found, face):
    error = found[0]["faces"][face]
    assert error.startswith("CheckpointError: rank 0: ")
    assert error == found[1]["faces"][face]


def test_a_background_write_of_the_spectra_trainer_fails_on_all_ranks(found):
    assert found[0]["spectra"] == found[1]["spectra"]
    (in_training, step), (at_the_end, none) = found[0]["spectra"]
    assert (step, none) == (1, 0)
    assert "CheckpointError: rank 0: " in in_training
    assert "CheckpointError: rank 0: " in at_the_end
