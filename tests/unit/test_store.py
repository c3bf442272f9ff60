from __future__ import annotations

import logging
import os
import sys
import textwrap
import types
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import differences
from processes import python
from treadle.checkpoint import store
from treadle.checkpoint.files import process_lives
from treadle.checkpoint.order import StateProgress, move_aside_beyond
from treadle.checkpoint.store import (
    Retention,
    find_latest,
    load_checkpoint,
    load_weights,
    replacing,
    save_checkpoint,
    save_tensor,
    verify_checkpoint,
    write_text,
)
from treadle.device.handover import shared_host
from treadle.errors import CheckpointError


def tree(value=1.0, **more):
    return {
        "format": {"name": "treadle", "version": 1, "face": "t", "scored": None},
        "model": {"w": torch.full((64,), value), "n": torch.tensor(3)},
        "ema": None,
        "epoch": 2,
        "history": [{"loss": 0.5}],
        **more,
    }


def files_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_what_is_saved_is_loaded(tmp_path):
    written = save_checkpoint(tree(), tmp_path / "deep" / "folder" / "a.pt")
    assert written == tmp_path / "deep" / "folder" / "a.pt"
    assert differences(load_checkpoint(written), tree()) == []
    assert differences(load_checkpoint(str(written)), tree()) == []
    assert files_in(written.parent) == ["a.pt"]


class Crash(BaseException):
    """As hard as an exception can be; no `except Exception` sees it."""


def fail_at(monkeypatch, point, error):
    """Make one call of a save raise, after it did half of its work where that is possible."""

    def half_a_file(file, *given):
        file.write(b"half of it")
        raise error

    def fail(*args, **kwargs):
        raise error

    if point == "write":
        monkeypatch.setattr(store, "write_tree", half_a_file)
    elif point == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    elif point == "verify":
        monkeypatch.setattr(store, "check_written", fail)
    else:
        monkeypatch.setattr(os, "replace", fail)


@pytest.mark.parametrize("there_was_one", [False, True])
@pytest.mark.parametrize(
    "error", [OSError("no space left"), RuntimeError("writer failed"), KeyboardInterrupt(), Crash()]
)
@pytest.mark.parametrize("point", ["write", "fsync", "verify", "rename"])
def test_a_save_that_fails_anywhere_leaves_the_old_file_and_nothing_else(
    tmp_path, monkeypatch, point, error, there_was_one
):
    target = tmp_path / "a.pt"
    if there_was_one:
        save_checkpoint(tree(1.0), target)
    with monkeypatch.context() as patch:
        fail_at(patch, point, error)
        expected = CheckpointError if isinstance(error, Exception) else type(error)
        with pytest.raises(expected):
            save_checkpoint(tree(2.0), target)
    assert files_in(tmp_path) == (["a.pt"] if there_was_one else [])
    if there_was_one:
        assert differences(load_checkpoint(target), tree(1.0)) == []
    save_checkpoint(tree(3.0), target)
    assert differences(load_checkpoint(target), tree(3.0)) == []


def test_the_file_is_on_the_disk_before_it_gets_its_name_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, o=original, n=name: calls.append(n) or o(*a))
    original_check = store.check_written
    monkeypatch.setattr(store, "check_written", lambda *given: calls.append("verify") or original_check(*given))
    save_checkpoint(tree(), tmp_path / "a.pt")
    assert calls == ["fsync", "verify", "replace", "fsync"]


@pytest.mark.parametrize("change", [lambda content: content[:-1], lambda content: content + b"0", bytes.swapcase])
def test_a_copy_that_is_not_what_was_copied_never_gets_the_name(tmp_path, monkeypatch, change):
    save_checkpoint(tree(1.0), tmp_path / "best.pt")
    save_checkpoint(tree(2.0), tmp_path / "last.pt")
    monkeypatch.setattr(store, "copy_file", lambda source, name: name.write_bytes(change(source.read_bytes())))
    with pytest.raises(CheckpointError, match=r"last\.pt was not written"):
        store.copy_checkpoint(tmp_path / "best.pt", tmp_path / "last.pt")
    assert differences(load_checkpoint(tmp_path / "last.pt"), tree(2.0)) == []
    assert files_in(tmp_path) == ["best.pt", "last.pt"]


def test_what_was_written_wrong_never_gets_the_name(tmp_path, monkeypatch):
    save_checkpoint(tree(1.0), tmp_path / "a.pt")
    original = store.write_tree

    def torn(file, *given):
        original(file, *given)
        file.truncate(file.tell() // 2)

    monkeypatch.setattr(store, "write_tree", torn)
    with pytest.raises(CheckpointError, match=r"a\.pt.*not written"):
        save_checkpoint(tree(2.0), tmp_path / "a.pt")
    assert differences(load_checkpoint(tmp_path / "a.pt"), tree(1.0)) == []
    assert files_in(tmp_path) == ["a.pt"]


def test_files_a_killed_process_left_are_removed_at_the_next_save(tmp_path):
    leftover = tmp_path / ".a.pt.999999999.treadle-tmp"  # no system gives such a number, to this process or a later one
    foreign = tmp_path / ".a.pt.note"
    alive = tmp_path / f".a.pt.{os.getppid()}.treadle-tmp"
    for path in (leftover, foreign, alive):
        path.write_bytes(b"half")
    save_checkpoint(tree(), tmp_path / "a.pt")
    assert files_in(tmp_path) == sorted([foreign.name, alive.name, "a.pt"])


def test_a_folder_whose_name_is_a_pattern_is_no_pattern(tmp_path):
    folder = tmp_path / "run [1]"
    folder.mkdir()
    leftover = folder / ".a[0].pt.999999999.treadle-tmp"
    leftover.write_bytes(b"half")
    save_checkpoint(tree(), folder / "a[0].pt")
    assert files_in(folder) == ["a[0].pt"]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return save_checkpoint(tree(), tmp_path_factory.mktemp("good") / "a.pt").read_bytes()


def test_no_flipped_byte_changes_what_is_loaded(tmp_path, good):
    path, original, found = tmp_path / "a.pt", tree(), 0
    offsets = range(0, len(good), max(1, len(good) // 400))
    for offset in offsets:
        data = bytearray(good)
        data[offset] ^= 0xFF
        path.write_bytes(data)
        problems = verify_checkpoint(path)
        try:
            loaded = load_checkpoint(path)
        except CheckpointError:
            found += 1
        else:  # padding and dates of the archive hold nothing
            assert problems == []
            assert differences(loaded, original) == []
    assert found > len(offsets) / 3


def test_every_flipped_bit_inside_a_record_is_found(tmp_path, good):
    path = tmp_path / "a.pt"
    path.write_bytes(good)
    with zipfile.ZipFile(path) as archive:
        spans = []
        for info in archive.infolist():
            with archive.open(info) as record:
                spans.append((info.filename, record._orig_compress_start, info.file_size))
    for name, start, size in spans:
        for offset in {start, start + size // 2, start + size - 1}:
            data = bytearray(good)
            data[offset] ^= 1
            path.write_bytes(data)
            assert any(name in problem for problem in verify_checkpoint(path)), name
            with pytest.raises(CheckpointError, match="CRC-32"):
                load_checkpoint(path)


def test_every_truncation_is_found(tmp_path, good):
    path = tmp_path / "a.pt"
    for length in [*range(0, len(good) - 1, max(1, len(good) // 60)), len(good) - 1]:
        path.write_bytes(good[:length])
        assert verify_checkpoint(path) != []
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", b"\x80\x02}q\x00."])
def test_what_is_no_archive_is_a_checkpoint_error_naming_the_file(tmp_path, content):
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        load_checkpoint(path)


def test_a_missing_file_and_a_folder_are_checkpoint_errors(tmp_path):
    for path in (tmp_path / "none.pt", tmp_path):
        with pytest.raises(CheckpointError, match=path.name):
            load_checkpoint(path)


def test_an_archive_that_is_no_checkpoint_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("hello.txt", "x")
    with pytest.raises(CheckpointError, match=r"data\.pkl"):
        load_checkpoint(tmp_path / "a.pt")


class Code:
    def __reduce__(self):
        return os.system, ("touch was_executed",)


def test_pickled_code_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "x": Code()}, tmp_path / "a.pt")
    assert "system" in verify_checkpoint(tmp_path / "a.pt")[0]
    with pytest.raises(CheckpointError, match="refused"):
        load_checkpoint(tmp_path / "a.pt")
    assert not (tmp_path / "was_executed").exists()


@pytest.mark.parametrize("value", [[1, 2], 3, torch.zeros(2)])
def test_a_file_that_holds_no_dict_is_refused(tmp_path, value):
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="dict"):
        load_checkpoint(tmp_path / "a.pt")


def test_files_are_loaded_to_the_cpu_with_weights_only(tmp_path, monkeypatch):
    save_checkpoint(tree(), tmp_path / "a.pt")
    seen = {}
    original = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: seen.update(k) or original(*a, **k))
    load_checkpoint(tmp_path / "a.pt")
    assert seen == {"map_location": "cpu", "weights_only": True}


def write_many(folder, steps):
    paths = []
    for i, step in enumerate(steps):
        path = save_checkpoint(tree(float(step)), folder / f"checkpoint_step_{step}.pt")
        os.utime(path, ns=(10**9 * (i + 1), 10**9 * (i + 1)))
        paths.append(path)
    return paths


def test_the_furthest_is_found_whenever_it_was_written(tmp_path):
    write_many(tmp_path, [9, 3, 10, 4])
    path, loaded = find_latest(tmp_path.iterdir())
    assert path.name == "checkpoint_step_10.pt"
    assert loaded["model"]["w"][0] == 10


def test_the_step_inside_decides_where_the_name_has_none(tmp_path):
    for name, step, epoch in (("best", 30, 3), ("last", 40, 3), ("ckpt_epoch_009", 40, 4), ("a", 9, 9)):
        save_checkpoint(tree(float(step), global_step=step, epoch=epoch), tmp_path / f"{name}.pt")
        os.utime(tmp_path / f"{name}.pt", ns=(10**9 - step, 10**9 - step))
    assert find_latest(tmp_path.iterdir())[0].name == "ckpt_epoch_009.pt"
    (tmp_path / "ckpt_epoch_009.pt").unlink()
    assert find_latest(tmp_path.iterdir())[0].name == "last.pt"


def test_what_a_run_goes_on_before_is_renamed_and_never_deleted(tmp_path, caplog):
    paths = write_many(tmp_path, [2, 10, 20])
    (tmp_path / "checkpoint_latest.pt").symlink_to("checkpoint_step_20.pt")
    beyond = move_aside_beyond([*paths, tmp_path / "checkpoint_latest.pt"], StateProgress(10, 2))
    assert [path.name for path in beyond] == ["checkpoint_step_20.superseded.pt"]
    assert "this run began at step 10, epoch 2" in caplog.text
    assert files_in(tmp_path) == ["checkpoint_step_10.pt", "checkpoint_step_2.pt", "checkpoint_step_20.superseded.pt"]
    write_many(tmp_path, [20])
    assert move_aside_beyond(tmp_path.iterdir(), StateProgress(10, 2))[0].name == "checkpoint_step_20.superseded-2.pt"
    assert find_latest(tmp_path.iterdir())[0].name == "checkpoint_step_10.pt"


def test_equal_write_times_are_decided_by_number(tmp_path):
    for path in write_many(tmp_path, [9, 10, 2]):
        os.utime(path, ns=(5, 5))
    assert find_latest(tmp_path.iterdir())[0].name == "checkpoint_step_10.pt"


def test_a_damaged_file_is_named_and_the_one_before_is_taken(tmp_path, caplog):
    paths = write_many(tmp_path, [1, 2, 3])
    paths[2].write_bytes(paths[2].read_bytes()[:-30])
    paths[1].write_bytes(b"")
    for number, path in enumerate(paths, start=1):
        os.utime(path, ns=(10**9 * number, 10**9 * number))
    with caplog.at_level(logging.WARNING, "treadle"):
        path, _ = find_latest(tmp_path.iterdir())
    assert path == paths[0]
    assert [r.getMessage().count("checkpoint_step_3.pt") > 0 for r in caplog.records] == [True, False]
    assert "checkpoint_step_2.pt" in caplog.records[1].getMessage()


def test_the_preferred_file_is_tried_first_and_falls_back(tmp_path):
    paths = write_many(tmp_path, [1, 2, 3])
    assert find_latest(tmp_path.iterdir(), prefer=paths[0])[0] == paths[0]
    paths[0].write_bytes(b"torn")
    assert find_latest(tmp_path.iterdir(), prefer=paths[0])[0] == paths[2]
    assert find_latest(tmp_path.iterdir(), prefer=tmp_path / "none.pt")[0] == paths[2]


def test_no_file_is_a_fresh_start_and_none_intact_is_an_error(tmp_path):
    assert find_latest([]) is None
    assert find_latest([tmp_path / "none.pt"]) is None
    (tmp_path / "checkpoint_step_1.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"checkpoint_step_1\.pt"):
        find_latest(tmp_path.iterdir())


def test_a_state_that_was_put_aside_is_never_resumed_from(tmp_path):
    paths = write_many(tmp_path, [1])
    aside = save_checkpoint(tree(float("nan")), tmp_path / "checkpoint_step_2.pt")
    assert aside.name == "checkpoint_step_2.nonfinite.pt"
    assert find_latest(tmp_path.iterdir())[0] == paths[0]
    paths[0].unlink()
    with pytest.raises(CheckpointError, match=r"those named \.nonfinite hold states that are not finite"):
        find_latest(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["model", "ema"])
def test_a_state_that_is_not_finite_goes_aside_with_a_warning(tmp_path, caplog, where):
    target = save_checkpoint(tree(1.0), tmp_path / "last.pt")
    bad = {"w": torch.tensor([float("inf")])}
    poisoned = tree(1.0, model=bad) if where == "model" else tree(1.0, ema={"ema": {"shadow": bad}})
    with caplog.at_level(logging.WARNING, "treadle"):
        written = save_checkpoint(poisoned, target)
    assert written == tmp_path / "last.nonfinite.pt"
    assert "last.nonfinite.pt" in caplog.text
    assert differences(load_checkpoint(target), tree(1.0)) == []
    assert differences(load_checkpoint(written), poisoned) == []


def test_the_newest_and_the_kept_for_ever_stay(tmp_path):
    retention = Retention(keep_previous=2, keep_interval=3)
    for step in (2, 3, 4, 6, 8, 9):
        (path,) = write_many(tmp_path, [step])
        os.utime(path, ns=(step, step))
        retention.prune(tmp_path, r"checkpoint_step_(\d+)\.pt")
    assert files_in(tmp_path) == [f"checkpoint_step_{n}.pt" for n in (3, 6, 8, 9)]


def test_files_of_other_names_are_never_deleted(tmp_path):
    write_many(tmp_path, [1, 2, 3])
    others = ["checkpoint_step_1.nonfinite.pt", "best.pt", "checkpoint_step_x.pt", "my_checkpoint_step_1.pt", "a.txt"]
    for name in others:
        (tmp_path / name).write_bytes(b"x")
    Retention(keep_previous=1).prune(tmp_path, r"checkpoint_step_(\d+)\.pt")
    assert files_in(tmp_path) == sorted([*others, "checkpoint_step_3.pt"])


def test_the_furthest_stay_whenever_they_were_written(tmp_path):
    write_many(tmp_path, [8, 9, 10, 4, 5])
    Retention(keep_previous=2).prune(tmp_path, r"checkpoint_step_(\d+)\.pt")
    assert files_in(tmp_path) == ["checkpoint_step_10.pt", "checkpoint_step_9.pt"]


def test_a_protected_file_stays_and_none_keeps_all(tmp_path):
    paths = write_many(tmp_path, [1, 2, 3])
    assert Retention(None, 5).prune(tmp_path, r"checkpoint_step_(\d+)\.pt") == []
    deleted = Retention(1).prune(tmp_path, r"checkpoint_step_(\d+)\.pt", protect=[paths[0]])
    assert deleted == [paths[1]]
    assert files_in(tmp_path) == ["checkpoint_step_1.pt", "checkpoint_step_3.pt"]


def test_a_file_that_cannot_be_deleted_is_logged_and_no_error(tmp_path, monkeypatch, caplog):
    paths = write_many(tmp_path, [1, 2])

    def refuse(path):
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "unlink", refuse)
    with caplog.at_level(logging.WARNING, "treadle"):
        assert Retention(1).prune(tmp_path, r"checkpoint_step_(\d+)\.pt") == []
    assert str(paths[0]) in caplog.text


def test_the_weights_that_were_scored_are_returned(tmp_path):
    shadow = {"w": torch.full((64,), 9.0), "n": torch.tensor(3)}
    averaged = tree(1.0, ema={"ema": {"shadow": shadow, "decay": 0.9}})
    averaged["model"]["w"] = averaged["model"]["w"].bfloat16()
    for scored, expected in [(None, 1.0), ("model", 1.0), ("ema", 9.0)]:
        averaged["format"] = {**averaged["format"], "scored": scored}
        weights = load_weights(save_checkpoint(averaged, tmp_path / "a.pt"))
        assert weights["w"][0] == expected
        assert weights["w"].dtype == torch.bfloat16
    assert set(weights) == {"w", "n"}


def test_a_weights_only_export_is_returned_as_it_is(tmp_path):
    model = nn.Linear(2, 2)
    weights = load_weights(save_checkpoint(model.state_dict(), tmp_path / "best_model.pt"))
    model.load_state_dict(weights)
    with pytest.raises(CheckpointError, match="no weights"):
        load_weights(save_checkpoint({"epoch": 1}, tmp_path / "b.pt"))


class Counts(nn.Linear):
    """Keeps more than tensors in its state dict."""

    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_weights_of_a_module_with_a_state_of_its_own_are_returned(tmp_path):
    model = Counts(2, 2)
    averaged = tree(1.0, model=model.state_dict(), ema={"ema": {"shadow": model.state_dict(), "decay": 0.9}})
    averaged["format"] = {**averaged["format"], "scored": "ema"}
    weights = load_weights(save_checkpoint(averaged, tmp_path / "a.pt"))
    again = load_weights(save_checkpoint(weights, tmp_path / "weights.pt"))
    model.load_state_dict(again)
    assert model.calls == 3


def test_small_files_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    write_text("old", tmp_path / "h.json")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(CheckpointError, match=r"h\.json"):
            write_text("new", tmp_path / "h.json")
    assert (tmp_path / "h.json").read_text(encoding="utf-8") == "old"
    assert files_in(tmp_path) == ["h.json"]
    save_tensor(torch.ones(2), tmp_path / "t.pt")
    assert torch.load(tmp_path / "t.pt").tolist() == [1, 1]


def test_a_block_that_writes_nothing_replaces_nothing(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError, match="a"), replacing(tmp_path / "a"):
        pass
    assert (tmp_path / "a").read_text() == "old"


def test_a_target_that_cannot_be_written_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file"):
        save_checkpoint(tree(), tmp_path / "file" / "a.pt")


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are POSIX")
@pytest.mark.parametrize("limit", [1, 5_000, 100_000])
def test_a_full_disk_leaves_the_old_file_and_a_clear_message(tmp_path, limit):
    script = f"""
        import resource, signal, torch
        from treadle.checkpoint import load_checkpoint, save_checkpoint
        from treadle.errors import CheckpointError
        path = {str(tmp_path / "a.pt")!r}
        save_checkpoint({{"model": {{"w": torch.ones(200_000)}}}}, path)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, hard))
        try:
            save_checkpoint({{"model": {{"w": torch.zeros(200_000)}}}}, path)
        except CheckpointError as error:
            message = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert load_checkpoint(path)["model"]["w"].sum() == 200_000
        save_checkpoint({{"model": {{"w": torch.zeros(200_000)}}}}, path)
        print(message)
    """
    done = python("-c", textwrap.dedent(script), timeout=120)
    assert done.returncode == 0, done.stderr
    assert "a.pt" in done.stdout
    assert "intact" in done.stdout
    assert files_in(tmp_path) == ["a.pt"]


@pytest.mark.parametrize(("tensor", "together"), [(torch.ones(8), 1), (torch.ones(1 << 15), 2)])
def test_other_runs_wait_while_python_writes_small_tensors_and_no_longer(tmp_path, tensor, together):
    works = []

    class Others:
        def run_off_turn(self, work):
            works.append(work)
            return work()

    with shared_host(Others()):
        save_checkpoint({"model": {"a": tensor, "b": tensor + 1}}, tmp_path / "a.pt")
    assert len(works) == together  # large ones are checked, then written without a copy in memory
    assert torch.equal(load_checkpoint(tmp_path / "a.pt")["model"]["b"], tensor + 1)


def test_a_process_is_looked_up_on_windows_without_a_signal(monkeypatch):
    kernel = types.SimpleNamespace(
        OpenProcess=lambda access, inherits, pid: 7 if pid == 1 else 0, CloseHandle=lambda handle: handle == 7
    )
    monkeypatch.setattr("treadle.checkpoint.files.sys.platform", "win32")
    monkeypatch.setattr("treadle.checkpoint.files.ctypes.windll", types.SimpleNamespace(kernel32=kernel), raising=False)
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail("Windows takes the signal 0 for Ctrl-C"))
    assert process_lives(1)
    assert not process_lives(2)
