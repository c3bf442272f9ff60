"""MappedLoader: every row once, mixed in windows, two windows in memory, a thread that ends and errors that arrive."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from treadle import ConfigError
from treadle.data import Cursor, MappedLoader, TensorLoader, window_reader
from treadle.data.windows import WindowedOrder, Windows

ROWS = 103
X = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)
SMALL = {"batch_size": 7, "chunk_rows": 10, "window_chunks": 3}


def rows(loader):
    return [[int(row[0]) // 3 for row in batch] for batch in loader]


def flat(batches):
    return [row for batch in batches for row in batch]


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("treadle-rows")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert threads() == []


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 45, 200])  # below a chunk, across chunks, across windows, more than all
def test_every_row_comes_once_in_batches_of_the_right_size(batch_size, shuffle, drop_last):
    settings = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
    given = rows(loader := MappedLoader(X, **{**SMALL, **settings}))
    assert [len(batch) for batch in given] == [len(batch) for batch in TensorLoader(torch.arange(ROWS), **settings)]
    assert len(given) == len(loader)
    if not shuffle:
        assert flat(given) == list(range(len(flat(given))))
    elif drop_last:
        assert len(set(flat(given))) == len(flat(given))
    else:
        assert sorted(flat(given)) == list(range(ROWS))


def test_the_order_depends_on_seed_and_epoch_alone_and_is_the_one_it_tells():
    state = torch.get_rng_state()
    loader = MappedLoader(X, shuffle=True, seed=3, **SMALL)
    first, second = flat(rows(loader)), flat(rows(loader))
    assert first != second
    assert torch.equal(state, torch.get_rng_state())
    assert [first, second] == [loader.order.rows(epoch).tolist() for epoch in range(2)]
    assert flat(rows(MappedLoader(X, shuffle=True, seed=4, **SMALL))) != first
    again = MappedLoader(X, shuffle=True, seed=3, **{**SMALL, "batch_size": 45})
    assert flat(rows(again)) == first, "the batch size does not matter"


def test_rows_are_mixed_within_windows_and_chunks_come_in_a_new_order():
    windows = Windows(ROWS, chunk_rows=10, window_chunks=3, shuffle=True, seed=0, epoch=0)
    for number in range(4):
        given = windows.rows(number).tolist()
        assert sorted(given) == sorted(row for chunk in windows.chunks(number) for row in chunk)
        assert given != sorted(given)
    firsts = [chunk.start for number in range(4) for chunk in windows.chunks(number)]
    assert firsts != sorted(firsts)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_state_taken_after_any_batch_goes_on_with_the_next_one(shuffle):
    expected = rows(straight := MappedLoader(X, shuffle=shuffle, **SMALL)) + rows(straight)
    loader = MappedLoader(X, shuffle=shuffle, **SMALL)
    for number, _ in enumerate(loader):
        resumed = MappedLoader(X, shuffle=shuffle, **SMALL)
        resumed.load_state_dict(loader.state_dict())
        assert rows(resumed) + rows(resumed) == expected[number + 1 :]


class Watched:
    """An array that knows which slices were read, where and when."""

    shape = (ROWS, 3)

    def __init__(self):
        self.slices, self.threads, self.fail_at = [], set(), None
        self.began, self.opened = threading.Event(), threading.Event()
        self.opened.set()

    def __getitem__(self, rows):
        self.threads.add(threading.current_thread().name)
        self.began.set()
        assert self.opened.wait(60)
        if rows.start == self.fail_at:
            raise OSError("the disk is gone")
        self.slices.append((rows.start, rows.stop))
        return X[rows]


def test_a_resume_reads_its_window_and_none_before():
    state = MappedLoader(X, shuffle=False, **SMALL).state_dict() | {"position": 9}  # row 63, in the third window
    array = Watched()
    loader = MappedLoader(array, **SMALL)
    array.slices.clear()
    loader.load_state_dict(state)
    assert rows(loader)[0][0] == 63
    assert array.slices[0] == (60, 70)
    assert min(array.slices) == (60, 70)


def test_it_reads_one_window_ahead_in_a_thread_and_no_further():
    array = Watched()
    loader = MappedLoader(array, **SMALL)
    array.slices.clear()
    array.threads.clear()
    batches = iter(loader)
    next(batches)
    deadline = time.monotonic() + 60
    while len(array.slices) < 6 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)
    assert array.slices == [(10 * n, 10 * n + 10) for n in range(6)], "two windows of three chunks"
    assert all(name.startswith("treadle-rows") for name in array.threads)
    batches.close()


def test_never_more_than_two_windows_are_in_memory(monkeypatch):
    living, most, allocate = set(), [0], window_reader._allocate

    def counted(shape, dtype, *, pinned):
        tensor = allocate(shape, dtype, pinned=pinned)
        key, size = object(), tensor.numel() * tensor.element_size()
        living.add((key, size))
        weakref.finalize(tensor, living.discard, (key, size))
        most[0] = max(most[0], sum(size for _, size in living))
        return tensor

    monkeypatch.setattr(window_reader, "_allocate", counted)
    kept = list(MappedLoader(X, shuffle=True, **SMALL))  # batches hold no window, and no other may write over them
    assert sorted(flat(rows(kept))) == list(range(ROWS))
    assert most[0] == 2 * 30 * 3 * 4
    assert not living
    assert len(kept) == 15


def test_an_error_in_the_thread_is_raised_at_the_batch_that_needs_the_rows():
    array = Watched()
    loader = MappedLoader(array, **SMALL)
    array.fail_at = 40  # the second chunk of the second window
    batches, given = iter(loader), []
    with pytest.raises(OSError, match="the disk is gone"):
        given.extend(batches)
    assert len(given) == 4  # 28 rows; the next batch would have 28 to 34
    array.fail_at = None
    assert rows(loader)[0][0] == 28, "the position stayed at what was given"


def test_the_cursor_goes_on_behind_an_error_and_ends_the_thread():
    array = Watched()
    loader, cursor = MappedLoader(array, **SMALL), Cursor()
    array.fail_at = 40
    cursor.open(loader)
    seen = cursor.take(3).batches
    with pytest.raises(OSError, match="gone"):
        cursor.take(3)  # the fifth batch fails, so the fourth is given again
    array.fail_at = None
    cursor.open(loader)
    seen += cursor.take(2).batches
    assert flat(rows([*seen])) == list(range(35))
    cursor.close()
    assert threads() == []
    cursor.open(loader)
    seen += cursor.take(99).batches
    assert flat(rows([*seen])) == list(range(ROWS))


def test_rows_that_are_missing_are_no_silent_copies():
    array = Watched()
    loader = MappedLoader(array, **SMALL)
    array.__class__ = type("CutOff", (Watched,), {"__getitem__": lambda self, rows: X[rows][:1]})
    with pytest.raises(OSError, match="rows 0 to 9 were requested and 1 returned"):
        next(iter(loader))


def test_leaving_a_pass_ends_its_thread_and_so_does_close():
    loader = MappedLoader(X, **SMALL)
    for _ in loader:
        assert len(threads()) == 1
        break
    assert threads() == []
    running = iter(loader)
    next(running)
    loader.close()
    assert threads() == []
    with pytest.raises(RuntimeError, match="this iterator is no longer valid"):
        next(running)
    assert rows(loader)[0][0] == 14, "two batches were given"


def test_close_does_not_wait_for_a_whole_window(monkeypatch):
    array = Watched()
    loader = MappedLoader(array, **{**SMALL, "window_chunks": 11})
    batches = loader._reading(loader.order, iter([range(7)]))
    array.slices.clear()
    array.began.clear()
    array.opened.clear()
    shutdown = ThreadPoolExecutor.shutdown

    def opens(pool, **settings):
        array.opened.set()  # the first chunk comes when the reader is being closed, and not before
        shutdown(pool, **settings)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", opens)
    with batches as read:
        asked = threading.Thread(target=pytest.raises, args=(BaseException, read, range(7)))
        asked.start()
        assert array.began.wait(60)
    asked.join()
    assert array.slices == [(0, 10)]


@pytest.mark.parametrize("kind", ["memmap", "from_file", "slice", "numpy slice", "bfloat16", "big-endian", "fortran"])
def test_arrays_of_every_kind_give_their_rows(kind, tmp_path):
    X.tofile(tmp_path / "x.bin")
    save_file({"x": torch.from_numpy(X)}, tmp_path / "x.safetensors")
    expected = torch.from_numpy(X)
    if kind == "memmap":
        array = np.memmap(tmp_path / "x.bin", dtype=np.float32, mode="r", shape=X.shape)
    elif kind == "from_file":
        array = torch.from_file(str(tmp_path / "x.bin"), size=X.size).view(ROWS, 3)
    elif "slice" in kind:
        array = safe_open(tmp_path / "x.safetensors", "np" if "numpy" in kind else "pt").get_slice("x")
    elif kind == "bfloat16":
        array = expected = expected.bfloat16()
    else:
        array = X.astype(">f4") if kind == "big-endian" else np.asfortranarray(X)
    assert torch.equal(torch.cat(list(MappedLoader(array, **SMALL))), expected)


def test_several_arrays_and_names():
    y = np.arange(ROWS)
    for x_B3, y_B in MappedLoader(X, y, shuffle=True, **SMALL):
        assert torch.equal(x_B3[:, 0], 3.0 * y_B)
        assert y_B.dtype == torch.int64
    loader = MappedLoader({"y": y}, shuffle=True, **SMALL)
    for batch in loader:
        assert torch.equal(batch["y"], loader.last_rows)


@pytest.mark.parametrize("batch_size", [7, 45])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_order_of_one_process(ranks, batch_size):
    settings = {**SMALL, "batch_size": None, "global_batch_size": batch_size, "shuffle": True}
    parts = [rows(MappedLoader(X, rank=rank, num_replicas=ranks, **settings)) for rank in range(ranks)]
    assert flat([flat(batch) for batch in zip(*parts, strict=True)]) == flat(rows(MappedLoader(X, **settings)))


def test_another_number_of_ranks_goes_on_in_the_same_order():
    state, seen = None, []
    for ranks, count in [(2, 3), (1, 2), (3, 100)]:
        cursors = [Cursor() for _ in range(ranks)]
        taken = []
        for rank, cursor in enumerate(cursors):
            if state is not None:
                cursor.load_state_dict(state)
            cursor.open(MappedLoader(X, shuffle=True, rank=rank, num_replicas=ranks, **SMALL))
            taken.append(rows(cursor.take(count).batches))
        seen += flat([flat(batch) for batch in zip(*taken, strict=True)])
        state = cursors[0].state_dict()
        for cursor in cursors:
            cursor.close()
    assert seen == WindowedOrder(ROWS, 7, shuffle=True, chunk_rows=10, window_chunks=3).rows(0).tolist()


def test_other_windows_are_another_order_and_a_position_in_them_is_refused():
    loader = MappedLoader(X, shuffle=True, **SMALL)
    order = loader.order
    for other in ({"chunk_rows": 11}, {"window_chunks": 2}):
        changed = MappedLoader(X, shuffle=True, **{**SMALL, **other})
        assert not changed.order.same_samples(order.describe())
        with pytest.raises(ConfigError, match=f"{next(iter(other))} was"):
            changed.load_state_dict(loader.state_dict())
    whole = TensorLoader(torch.from_numpy(X), batch_size=7, shuffle=True)
    assert not whole.order.same_samples(order.describe())
    assert not order.same_samples(whole.order.describe())
    plain = MappedLoader(X, **SMALL)
    assert TensorLoader(torch.from_numpy(X), batch_size=7).order.same_samples(plain.order.describe())


@pytest.mark.parametrize(
    ("arrays", "settings", "words"),
    [
        ((), {}, "at least one"),
        ((X, X[:5]), {}, r"\[103, 5\] rows"),
        ((X,), {"chunk_rows": 0}, "chunk_rows=0"),
        ((X,), {"window_chunks": 0}, "window_chunks=0"),
        ((X,), {"batch_size": 0}, "batch_size=0"),
        ((np.array(["a"]),), {}, "dtype <U1"),
        ((5,), {}, "a int without rows"),
    ],
)
def test_what_makes_no_sense_is_refused_when_it_is_made(arrays, settings, words):
    with pytest.raises(ConfigError, match=words):
        MappedLoader(*arrays, **{**SMALL, **settings})


def test_chunks_of_about_a_mebibyte_unless_told():
    assert MappedLoader(np.zeros((3, 256), np.float32), batch_size=1).chunk_rows == 1024
    assert MappedLoader(np.zeros((3, 2**19), np.float32), batch_size=1).chunk_rows == 1
