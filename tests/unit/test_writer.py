from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import spectra_kit as kit
from helpers import Augmented, MeanSquare, Snapshots, differences, scalar_engine, small_model
from processes import python
from treadle import CheckpointingHook, Engine, set_seed
from treadle.checkpoint import load_checkpoint, save_checkpoint
from treadle.checkpoint.buffers import HostBuffers, LiveTensors
from treadle.checkpoint.rank_writer import RankWriter
from treadle.checkpoint.schema import non_finite_names, to_plain
from treadle.checkpoint.writer import CheckpointWriter
from treadle.errors import CheckpointError
from treadle.hooks import BaseHook, EmaHook


class Gate:
    """Stands for a slow disk: a write waits until it is opened."""

    def __init__(self):
        self.opened = threading.Event()
        self.began = threading.Event()
        self.error: BaseException | None = None
        self.trees = []

    def write(self, tree):
        self.began.set()
        assert self.opened.wait(20)
        if self.error is not None:
            raise self.error
        self.trees.append({key: value.clone() for key, value in tree.items()})


def copy_of(live):
    return lambda buffers: to_plain(live, buffers=buffers)


def test_the_copy_is_taken_at_once_and_written_later():
    live, gate, writer = {"w": torch.zeros(3)}, Gate(), CheckpointWriter()
    writer.save(copy_of(live), gate.write)
    assert writer.writing
    live["w"].fill_(7.0)
    assert gate.began.wait(20)
    assert gate.trees == []
    gate.opened.set()
    writer.wait()
    assert torch.equal(gate.trees[0]["w"], torch.zeros(3))


def test_a_second_request_waits_for_the_first_before_it_copies():
    live, gate, writer = {"w": torch.zeros(3)}, Gate(), CheckpointWriter()
    order = []
    writer.save(copy_of(live), lambda tree: (gate.write(tree), order.append("written")))
    threading.Timer(0.2, gate.opened.set).start()

    def collect(buffers):
        order.append("copied")
        return to_plain({"w": torch.ones(3)}, buffers=buffers)

    writer.save(collect, gate.write)
    writer.close()
    assert order == ["written", "copied"]
    assert [tree["w"][0].item() for tree in gate.trees] == [0.0, 1.0]


def test_in_the_foreground_it_is_written_when_the_call_returns_and_nothing_is_copied():
    live, seen, writer = {"w": nn.Parameter(torch.ones(4)), "part": torch.ones(4)[:2]}, [], CheckpointWriter()
    writer.save(copy_of(live), seen.append, background=False)
    assert seen[0]["w"].data_ptr() == live["w"].data_ptr()
    assert not seen[0]["w"].requires_grad
    assert seen[0]["part"].data_ptr() != live["part"].data_ptr()
    assert writer._buffers._in_use == []


@pytest.mark.parametrize("error", [CheckpointError("disk full"), ValueError("a bug\nwith lines"), MemoryError("none")])
def test_an_error_of_the_thread_is_raised_once_as_a_checkpoint_error(error):
    gate, writer = Gate(), CheckpointWriter()
    gate.error = error
    gate.opened.set()
    writer.save(copy_of({"w": torch.ones(2)}), gate.write)
    with pytest.raises(CheckpointError) as caught:
        writer.wait()
    assert str(caught.value).splitlines() == [str(caught.value)]
    assert str(error).splitlines()[0] in str(caught.value)
    writer.wait()
    gate.error = None
    writer.save(copy_of({"w": torch.ones(2)}), gate.write)
    writer.close()


def test_closing_raises_unless_training_failed_already(caplog):
    for failure in (None, RuntimeError("earlier")):
        gate, writer = Gate(), CheckpointWriter()
        gate.error = CheckpointError("disk full")
        gate.opened.set()
        writer.save(copy_of({"w": torch.ones(2)}), gate.write)
        if failure is None:
            with pytest.raises(CheckpointError, match="disk full"):
                writer.close()
        else:
            writer.close(failure)
            assert "disk full" in caplog.text


def test_a_next_save_raises_the_error_of_the_one_before_and_copies_nothing():
    gate, writer = Gate(), CheckpointWriter()
    gate.error = CheckpointError("disk full")
    gate.opened.set()
    writer.save(copy_of({"w": torch.ones(2)}), gate.write)
    with pytest.raises(CheckpointError, match="disk full"):
        writer.save(lambda buffers: pytest.fail("copied"), gate.write)


def test_without_a_thread_to_be_had_it_is_written_in_the_foreground(monkeypatch, caplog):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    gate, writer = Gate(), CheckpointWriter()
    gate.opened.set()
    writer.save(copy_of({"w": torch.ones(2)}), gate.write)
    assert len(gate.trees) == 1
    assert "foreground" in caplog.text
    assert logging.getLogger("treadle.checkpoint").filters == []


def test_what_the_thread_says_is_said_by_the_thread_that_waits(tmp_path, caplog):
    said_in = []

    class Where(logging.Handler):
        def emit(self, record):
            said_in.append(threading.current_thread())

    logger, handler = logging.getLogger("treadle"), Where()
    logger.addHandler(handler)
    try:
        writer = CheckpointWriter()
        live = {"model": {"w": torch.tensor([float("nan")])}}
        writer.save(copy_of(live), lambda tree: save_checkpoint(tree, tmp_path / "a.pt"))
        writer._running[0].thread.join()
        assert caplog.text == ""
        writer.wait()
    finally:
        logger.removeHandler(handler)
    assert "not finite" in caplog.text
    assert said_in == [threading.main_thread()]
    assert logging.getLogger("treadle.checkpoint").filters == []


def test_an_error_that_nobody_waited_for_is_logged_when_the_interpreter_ends(tmp_path):
    script = (
        "import logging, torch; logging.basicConfig()\n"
        "from treadle.checkpoint.schema import to_plain\n"
        "from treadle.checkpoint.store import save_checkpoint\n"
        "from treadle.checkpoint.writer import CheckpointWriter\n"
        "import sys; writer = CheckpointWriter()\n"
        "writer.save(lambda b: to_plain({'w': torch.ones(9)}, buffers=b), lambda t: save_checkpoint(t, sys.argv[1]))\n"
    )
    start = [sys.executable, "-c", script]
    bad = subprocess.run([*start, "/dev/null/no/a.pt"], capture_output=True, text=True)
    for done, said in [(python(*start[1:], str(tmp_path / "a.pt")), ""), (bad, "was not written")]:
        assert done.returncode == 0
        assert (said in done.stderr) if said else done.stderr == ""
        assert "Traceback" not in done.stderr
    assert torch.equal(load_checkpoint(tmp_path / "a.pt")["w"], torch.ones(9))


# -- the copy -----------------------------------------------------------------------------------------------------

ODD = {
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(2.5),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "expanded": torch.ones(1, 3).expand(4, 3),
    "sliced": torch.arange(10)[2:8:2],
    "complex": torch.tensor([1 + 2j]).conj(),
    "channels_last": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "sparse": torch.eye(3).to_sparse(),
    "parameter": nn.Parameter(torch.ones(2)),
}


def test_a_copy_into_buffers_is_what_a_fresh_copy_is_the_first_time_and_later(tmp_path):
    buffers = HostBuffers()
    for _ in range(3):
        plain, reused = to_plain(ODD), to_plain(ODD, buffers=buffers)
        for name, value in plain.items():
            other = reused[name]
            assert type(other) is torch.Tensor
            if name == "sparse":
                value, other = value.to_dense(), other.to_dense()
            assert torch.equal(value, other), name
            assert (value.dtype, value.stride(), value.is_conj()) == (other.dtype, other.stride(), other.is_conj())
            assert not other.requires_grad
        torch.save(plain, tmp_path / "a.pt")
        torch.save(reused, tmp_path / "b.pt")
        assert len((tmp_path / "a.pt").read_bytes()) == len((tmp_path / "b.pt").read_bytes())
        buffers.ready()
        buffers.reclaim()


def test_live_tensors_are_written_as_their_copies_are(tmp_path):
    save_checkpoint(to_plain(ODD), tmp_path / "a.pt")
    save_checkpoint(to_plain(ODD, buffers=LiveTensors()), tmp_path / "b.pt")
    a, b = load_checkpoint(tmp_path / "a.pt"), load_checkpoint(tmp_path / "b.pt")
    assert torch.equal(a.pop("sparse").to_dense(), b.pop("sparse").to_dense())
    assert differences(a, b) == []
    assert [value.stride() for value in a.values()] == [value.stride() for value in b.values()]
    assert (tmp_path / "a.pt").stat().st_size == (tmp_path / "b.pt").stat().st_size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_from_a_gpu_lies_in_page_locked_memory_and_is_complete_when_the_next_kernel_runs():
    live, writer, seen = {"w": torch.zeros(1 << 24, device="cuda")}, CheckpointWriter(), []
    for step in range(5):
        live["w"].fill_(step)
        writer.save(
            copy_of(live),
            lambda tree: seen.append((tree["w"].is_pinned(), tree["w"].data_ptr(), tree["w"].unique().tolist())),
        )
        live["w"].fill_(-1.0)
    writer.close()
    assert [(pinned, values) for pinned, _, values in seen] == [(True, [float(step)]) for step in range(5)]
    assert len({pointer for _, pointer, _ in seen}) == 1


def test_tied_weights_share_their_buffer_and_different_ones_do_not():
    w = torch.ones(3)
    buffers = HostBuffers()
    tree = to_plain({"a": w, "b": w, "c": torch.ones(3)}, buffers=buffers)
    assert tree["a"] is tree["b"]
    assert tree["c"].data_ptr() != tree["a"].data_ptr()


def test_memory_is_used_again_and_what_is_needed_no_more_is_let_go():
    buffers, big = HostBuffers(), torch.ones(1000)
    first = weakref.ref(buffers.copy(big))
    buffers.ready()
    buffers.reclaim()
    assert buffers.copy(big + 1) is first()
    buffers.ready()
    buffers.reclaim()
    buffers.copy(torch.ones(3))
    buffers.ready()
    assert first() is None


def test_however_many_saves_there_is_one_copy_of_the_state():
    size = 4321
    live, writer, peak = {"a": torch.zeros(size), "b": torch.zeros(size)}, CheckpointWriter(), []

    def count():
        gc.collect()
        return sum(type(o) is torch.Tensor and o.shape == (size,) for o in gc.get_objects()) - len(live)

    for step in range(5):
        live["a"] += 1
        writer.save(copy_of(live), lambda tree: peak.append(count()))
        writer.wait()
        peak.append(count())
    writer.close()
    assert set(peak) == {2}
    assert count() == 0
    assert step == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("size", [41, 40_001])  # large ones are searched by NumPy
def test_one_bad_value_anywhere_is_found(dtype, bad, size):
    for position in (0, 17, size - 1):
        weights = torch.ones(size, dtype=dtype)
        assert non_finite_names({"w": weights, "n": torch.tensor(3), "none": torch.zeros(0)}) == []
        weights[position] = bad
        assert non_finite_names({"w": weights}) == ["w"]
        assert non_finite_names({"w": weights.real.to_sparse()}) == ["w"]


# -- the hook -----------------------------------------------------------------------------------------------------


def train(folder, steps, *, background, hooks=(), workers=0, **settings):
    set_seed(0)
    model = small_model()
    loader = torch.utils.data.DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers)
    hook = CheckpointingHook(
        **{"interval": 1, "keep_previous": None, "path": folder, **settings}, background=background
    )
    engine = Engine(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), MeanSquare(), device="cpu",
        hooks=[EmaHook(0.9), *hooks, hook],
    )  # fmt: skip
    engine.run(loader, max_steps=steps)
    return engine


def test_the_files_are_those_of_a_foreground_save_and_hold_the_state_of_their_step(tmp_path):
    snapshots = Snapshots()
    train(tmp_path / "a", 12, background=False, keep_previous=3, keep_interval=4)
    train(tmp_path / "b", 12, background=True, keep_previous=3, keep_interval=4, hooks=[snapshots])
    names = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in "ab"]
    assert names[0] == names[1]
    for name in names[0]:
        a, b = tmp_path / "a" / name, tmp_path / "b" / name
        tree = load_checkpoint(b)
        assert differences(load_checkpoint(a), tree) == []
        assert a.stat().st_size == b.stat().st_size
        assert differences(snapshots.states[tree["global_step"]], tree) == []
    assert (tmp_path / "b" / "checkpoint_latest.pt").readlink().name == "checkpoint_step_12.pt"


def test_the_bytes_are_those_of_a_foreground_save(tmp_path):
    tree = {"model": {"w": torch.arange(1000.0)}, "global_step": 3, "history": [{"loss": 0.5}]}
    writer = CheckpointWriter()
    for _ in range(2):
        writer.save(copy_of(tree), lambda copy: save_checkpoint(copy, tmp_path / "b" / "state.pt"))
    writer.close()
    save_checkpoint(to_plain(tree), tmp_path / "a" / "state.pt")
    assert (tmp_path / "a" / "state.pt").read_bytes() == (tmp_path / "b" / "state.pt").read_bytes()


def test_stopped_at_any_step_and_rerun(tmp_path):
    train(tmp_path / "straight", 12, background=False)
    expected = load_checkpoint(tmp_path / "straight" / "checkpoint_step_12.pt")
    for step in range(1, 12):
        folder = tmp_path / str(step)
        train(folder, step, background=True)
        train(folder, 12, background=True)
        assert differences(expected, load_checkpoint(folder / "checkpoint_latest.pt")) == [], step


def test_when_the_run_is_over_nothing_is_being_written_and_no_memory_is_kept(tmp_path):
    engine = train(tmp_path, 3, background=True)
    writer = engine.hooks[-1]._writer
    assert (writer._running, writer._buffers._in_use, writer._buffers._free) == ([], [], {})
    assert not any(thread.name == "treadle-checkpoint" for thread in threading.enumerate())


def test_one_write_at_a_time_in_the_order_of_the_steps(tmp_path, monkeypatch):
    from treadle.hooks import checkpointing

    original, active, written = checkpointing.save_checkpoint, [], []

    def slow(tree, path):
        assert threading.current_thread() is not threading.main_thread()
        active.append(path)
        assert len(active) == 1
        threading.Event().wait(0.02)
        original(tree, path)
        written.append(tree["global_step"])
        active.remove(path)
        return path

    monkeypatch.setattr(checkpointing, "save_checkpoint", slow)
    train(tmp_path, 5, background=True)
    assert written == [1, 2, 3, 4, 5]


def failing(monkeypatch, at):
    from treadle.hooks import checkpointing

    original = checkpointing.save_checkpoint

    def fail(tree, path):
        if tree["global_step"] == at:
            raise CheckpointError("disk full")
        return original(tree, path)

    monkeypatch.setattr(checkpointing, "save_checkpoint", fail)


class Joins(BaseHook):
    """Sees to it that a write has ended before the next step."""

    def __init__(self):
        self.hook = None
        self.steps = 0

    def on_before_step(self, trainer):
        for flight in self.hook._writer._running:
            flight.thread.join()

    def on_after_step(self, trainer):
        self.steps = trainer.step


@pytest.mark.parametrize("order", [1, -1])
def test_an_error_is_raised_at_the_next_step_and_the_next_run_goes_on(tmp_path, monkeypatch, order):
    failing(monkeypatch, at=4)
    hook, joins = CheckpointingHook(2, path=tmp_path, background=True), Joins()
    joins.hook = hook
    engine = scalar_engine(hooks=[joins, hook][::order])
    with pytest.raises(CheckpointError, match="disk full"):
        engine.run([1.0], max_steps=50)
    assert engine.step == joins.steps == 5
    assert load_checkpoint(tmp_path / "checkpoint_latest.pt")["global_step"] == 2
    monkeypatch.undo()
    again = scalar_engine(hooks=[CheckpointingHook(2, path=tmp_path, background=True)])
    again.run([1.0], max_steps=8)
    assert load_checkpoint(tmp_path / "checkpoint_latest.pt")["model"]["weight"] == -8.0


def test_an_error_of_the_last_write_is_raised_at_the_end_and_can_be_made_good(tmp_path, monkeypatch):
    failing(monkeypatch, at=4)
    hook = CheckpointingHook(2, path=tmp_path, background=True)
    engine = scalar_engine(hooks=[hook])
    with pytest.raises(CheckpointError, match="disk full"):
        engine.run([1.0], max_steps=4)
    monkeypatch.undo()
    hook.save(engine)
    hook.on_close(engine)
    assert load_checkpoint(tmp_path / "checkpoint_latest.pt")["global_step"] == 4


def test_an_error_of_training_hides_none_of_the_write(tmp_path, monkeypatch, caplog):
    failing(monkeypatch, at=2)

    class Raises(BaseHook):
        def on_before_step(self, trainer):
            if trainer.step == 3:
                raise RuntimeError("user code")

    engine = scalar_engine(hooks=[Raises(), CheckpointingHook(2, path=tmp_path, background=True)])
    with pytest.raises(RuntimeError, match="user code"):
        engine.run([1.0], max_steps=4)
    assert "disk full" in caplog.text


# -- the spectra trainer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"selection": "last"}, {"use_ema": False}, {"amp": True, "val": False}])
def test_the_spectra_trainer_writes_the_same_files_in_the_background(tmp_path, settings):
    for name, background in (("a", False), ("b", True)):
        kit.make(tmp_path / name, background_saves=background, **settings).fit(4)
    files = [sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*") if p.is_file()) for n in "ab"]
    assert files[0] == files[1]
    for path in files[0]:
        if path.suffix == ".pt":
            a, b = (load_checkpoint(tmp_path / name / path) for name in "ab")
            a.pop("config", None), b.pop("config", None)
            assert differences(a, b) == [], path
    assert not any(thread.name == "treadle-checkpoint" for thread in threading.enumerate())


def test_the_spectra_trainer_raises_at_the_next_step_and_repeats_the_epoch(tmp_path, monkeypatch):
    from treadle.faces import folder as run_folder

    kit.make(tmp_path / "straight").fit(3)
    original = run_folder.save_checkpoint

    def fail(tree, path):
        if path.name == "best.pt" and tree["epoch"] == 2:
            raise CheckpointError("disk full")
        return original(tree, path)

    monkeypatch.setattr(run_folder, "save_checkpoint", fail)
    trainer = kit.make(tmp_path / "cut", background_saves=True)
    with pytest.raises(CheckpointError, match="disk full"):
        trainer.fit(3)
    assert load_checkpoint(tmp_path / "cut" / "checkpoints" / "last.pt")["epoch"] == 1
    monkeypatch.undo()
    kit.make(tmp_path / "cut", background_saves=True, seed=5).fit(3)
    for name in ("last", "best"):
        a, b = (load_checkpoint(tmp_path / run / "checkpoints" / f"{name}.pt") for run in ("straight", "cut"))
        a.pop("config"), b.pop("config")
        assert differences(a, b) == []


@pytest.mark.parametrize("background", [True, False])
def test_a_rank_that_writes_no_file_copies_nothing(monkeypatch, background):
    monkeypatch.setattr("treadle.distributed.rank", lambda: 1)
    live, seen = {"w": torch.ones(3)}, []

    def collect(buffers):
        seen.append(to_plain(live, buffers=buffers)["w"])
        return {}

    RankWriter().save_file(collect, lambda tree: pytest.fail("only rank 0 writes"), background=background)
    assert [tensor.device.type for tensor in seen] == ["meta"]


def test_folders_in_the_background_cost_no_full_collection_of_what_was_there_before(monkeypatch):
    def write(writer, background=True):
        writer.save_folder(lambda buffers: {"a": 1}, lambda tree: None, background=background)

    usual = gc.get_freeze_count()  # Python 3.12 leaves some out from its start
    with RankWriter() as writer:
        write(writer, background=False)
        assert gc.get_freeze_count() == usual
        write(writer)
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() <= usual
    with RankWriter() as writer, monkeypatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 10**9)  # the user's program has done it
        patch.setattr(gc, "freeze", lambda: pytest.fail("it is done"))
        patch.setattr(gc, "unfreeze", lambda: pytest.fail("it is not ours"))
        write(writer)
        writer.close()
