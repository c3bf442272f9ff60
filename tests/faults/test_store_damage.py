"""Damaged files, odd folders and full disks: what can be found intact is found, and nothing starts afresh silently."""

from __future__ import annotations

import builtins
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from fault_points import in_child, record
from helpers import differences, scalar_engine
from treadle import CheckpointingHook
from treadle.checkpoint import files
from treadle.checkpoint.lock import RunLock
from treadle.checkpoint.store import (
    Retention,
    check_written,
    copy_checkpoint,
    find_latest,
    link_sibling,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
    write_text,
)
from treadle.errors import CheckpointError
from treadle.faces.folder import write_best_and_last

PATTERN = r"checkpoint_step_(\d+)\.pt"


def tree(value=1.0):
    return {"format": {"name": "treadle", "version": 1}, "model": {"w": torch.full((9,), value)}, "history": [{"a": 1}]}


def run(folder, steps, keep=2, **settings):
    engine = scalar_engine(hooks=[CheckpointingHook(1, keep, path=folder, **settings)])
    engine.run([1.0] * 50, max_steps=steps)
    return engine


def starts_at(folder):
    engine = scalar_engine(hooks=[CheckpointingHook(1, path=folder)])
    engine.prepare()
    found = engine.hooks[0].checkpoint_to_resume(engine)
    return None if found is None else found["global_step"]


# -- bits and lengths ---------------------------------------------------------------------------------------------


def test_every_byte_of_a_file_changed_is_found_or_harmless(tmp_path):
    good, path, found = save_checkpoint(tree(), tmp_path / "good.pt").read_bytes(), tmp_path / "a.pt", 0
    for offset in range(len(good)):
        data = bytearray(good)
        data[offset] ^= (0xFF, 1 << offset % 8)[offset % 2]
        path.write_bytes(data)
        if verify_checkpoint(path):
            found += 1
        else:  # dates, padding and attributes hold nothing that is loaded
            assert differences(load_checkpoint(path), tree()) == [], offset
    assert found > len(good) * 0.5


def test_every_bit_of_the_table_of_contents_changed_is_found_or_harmless(tmp_path):
    good, path = save_checkpoint(tree(), tmp_path / "good.pt").read_bytes(), tmp_path / "a.pt"
    start = good.index(b"PK\x01\x02")
    for offset in range(start, len(good), 5):
        for bit in range(8):
            data = bytearray(good)
            data[offset] ^= 1 << bit
            path.write_bytes(data)
            if not check_written(path):
                assert differences(load_checkpoint(path), tree()) == [], (offset, bit)


def test_a_file_cut_anywhere_is_found(tmp_path):
    good, path = save_checkpoint(tree(), tmp_path / "good.pt").read_bytes(), tmp_path / "a.pt"
    for length in range(0, len(good), 2):
        path.write_bytes(good[:length])
        assert verify_checkpoint(path) != [], length


# -- where a save puts its files ----------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a second file system")
def test_nothing_is_staged_on_another_file_system(tmp_path, monkeypatch, request):
    elsewhere = tempfile.mkdtemp(dir="/dev/shm")  # other processes use the folder above
    request.addfinalizer(lambda: shutil.rmtree(elsewhere))
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, elsewhere)
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert tempfile.gettempdir() == elsewhere
    folder = tmp_path / "run"
    folder.mkdir()

    def save():
        save_checkpoint(tree(), folder / "a.pt")
        copy_checkpoint(folder / "a.pt", folder / "b.pt")
        link_sibling(folder / "a.pt", "latest.pt")
        write_text("x", folder / "h.json")

    renamed = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: renamed.append((Path(old), Path(new))) or real(old, new))
    seen = record(tmp_path, save)
    assert [(old.parent, new.parent) for old, new in renamed] == [(folder, folder)] * 4
    assert {name for call, name in seen if call == "write"} == {
        f".a.pt.{os.getpid()}.treadle-tmp",
        f".h.json.{os.getpid()}.treadle-tmp",
    }
    assert os.listdir(elsewhere) == []


def test_data_is_durable_before_its_name_and_the_name_before_anything_is_deleted(tmp_path):
    engine = run(tmp_path / "run", 3)
    engine.progress.begin_step()
    seen = record(tmp_path, lambda: engine.hooks[0].save(engine))
    calls = [f"{call} {name}" for call, name in seen]
    temporary, link = (f".checkpoint_{n}.pt.{os.getpid()}.treadle-tmp" for n in ("step_4", "latest"))
    last_write = max(i for i, call in enumerate(calls) if call == f"write {temporary}")
    order = [
        last_write,
        calls.index(f"fsync {temporary}"),
        calls.index(f"replace {temporary}"),
        calls.index("fsync run"),
        calls.index(f"replace {link}"),
        calls.index("fsync run", calls.index(f"replace {link}")),
        calls.index("unlink checkpoint_step_2.pt"),
    ]
    assert order == sorted(order)


def test_a_new_folder_is_durable_itself(tmp_path):
    seen = record(tmp_path, lambda: save_checkpoint(tree(), tmp_path / "new" / "deep" / "a.pt"))
    calls = [f"{call} {name}" for call, name in seen if call in ("mkdir", "fsync", "replace")]
    assert calls[:4] == ["mkdir new", f"fsync {tmp_path.name}", "mkdir deep", "fsync new"]


def test_a_folder_that_cannot_be_synced_by_its_file_system_is_used_anyway(tmp_path, monkeypatch):
    real = os.fsync

    def no_folders(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(22, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", no_folders)
    assert verify_checkpoint(save_checkpoint(tree(), tmp_path / "new" / "a.pt")) == []


def test_when_the_disk_does_not_confirm_a_rename_the_message_does_not_say_that_the_old_file_is_there(
    tmp_path, monkeypatch
):
    save_checkpoint(tree(1.0), tmp_path / "a.pt")

    def fails(folder):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "sync_folder", fails)
    with pytest.raises(CheckpointError, match="was written, but"):
        save_checkpoint(tree(2.0), tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt")["model"]["w"][0] == 2


def test_copying_twice_leaves_two_files_and_nothing_else(tmp_path):
    save_checkpoint(tree(), tmp_path / "best.pt")
    for _ in range(2):
        copy_checkpoint(tmp_path / "best.pt", tmp_path / "last.pt")
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]


def test_a_copy_has_the_write_time_of_its_source_and_bytes_of_its_own(tmp_path):
    best = save_checkpoint(tree(), tmp_path / "best.pt")
    os.utime(best, ns=(10**18, 10**18))
    last = copy_checkpoint(best, tmp_path / "last.pt")
    assert last.stat().st_mtime_ns == best.stat().st_mtime_ns
    assert last.read_bytes() == best.read_bytes()
    last.write_bytes(b"written into, not replaced")
    assert load_checkpoint(best)["model"]["w"][0] == 1


def test_a_damaged_last_checkpoint_leaves_the_best_of_the_same_epoch(tmp_path):
    write_best_and_last(tree(), tmp_path, is_best=True)
    (tmp_path / "last.pt").write_bytes(b"written into, not replaced")
    path, _ = find_latest([tmp_path / "last.pt", tmp_path / "best.pt"])
    assert path.name == "best.pt"


def test_a_copy_that_the_disk_got_wrong_is_no_checkpoint(tmp_path, monkeypatch):
    best = save_checkpoint(tree(), tmp_path / "best.pt")
    monkeypatch.setattr(shutil, "copyfile", lambda source, name: Path(name).write_bytes(b"half"))
    with pytest.raises(CheckpointError, match=r"last\.pt was not written"):
        copy_checkpoint(best, tmp_path / "last.pt")
    assert os.listdir(tmp_path) == ["best.pt"]


def test_leftovers_with_odd_numbers_are_no_obstacle(tmp_path):
    for owner in ("99999999999999999999999", "0x1", "\u00b2", "-1", ""):
        (tmp_path / f".a.pt.{owner}.treadle-tmp").write_bytes(b"half")
    save_checkpoint(tree(), tmp_path / "a.pt")
    assert os.listdir(tmp_path) == ["a.pt"]


# -- full and read-only disks -------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("write", [lambda p: save_checkpoint(tree(2.0), p), lambda p: write_text("new" * 99, p)])
def test_a_full_device_is_named_as_such_and_the_old_file_stays(tmp_path, monkeypatch, write):
    save_checkpoint(tree(1.0), tmp_path / "a.pt")
    real = builtins.open
    monkeypatch.setattr(
        builtins,
        "open",
        lambda path, mode="r", *a, **k: real("/dev/full" if "w" in mode else path, mode, *a, **k),
    )
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        write(tmp_path / "a.pt")
    monkeypatch.undo()
    assert "\n" not in str(caught.value)
    assert load_checkpoint(tmp_path / "a.pt")["model"]["w"][0] == 1
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="POSIX")
def test_a_read_only_folder_can_be_read_and_refuses_to_be_written_in_one_line():
    outer = Path(tempfile.mkdtemp())
    folder = outer / "run"
    try:
        run(folder, 2)
        outer.chmod(0o755)
        folder.chmod(0o555)

        def as_nobody():
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            assert starts_at(folder) == 2
            for write in (
                lambda: save_checkpoint(tree(), folder / "a.pt"),
                lambda: copy_checkpoint(folder / "checkpoint_step_1.pt", folder / "b.pt"),
                lambda: link_sibling(folder / "checkpoint_step_1.pt", "checkpoint_latest.pt"),
                lambda: write_text("x", folder / "h.json"),
                lambda: save_checkpoint(tree(), folder / "deep" / "a.pt"),
                lambda: RunLock().take(folder),
                lambda: run(folder, 4),
            ):
                with pytest.raises(CheckpointError, match="Permission denied") as caught:
                    write()
                assert "\n" not in str(caught.value)
            assert Retention(1).prune(folder, PATTERN) == []
            assert starts_at(folder) == 2

        assert in_child(as_nobody) == 0
    finally:
        folder.chmod(0o755)
        shutil.rmtree(outer)


def test_a_file_in_place_of_a_folder_is_a_clear_error(tmp_path):
    (tmp_path / "run").write_text("x")
    for write in (lambda: save_checkpoint(tree(), tmp_path / "run" / "a.pt"), lambda: run(tmp_path / "run", 1)):
        with pytest.raises(CheckpointError, match="run"):
            write()


def test_a_folder_in_place_of_the_file_is_a_clear_error_and_stays(tmp_path):
    (tmp_path / "a.pt").mkdir()
    (tmp_path / "a.pt" / "kept").write_text("x")
    with pytest.raises(CheckpointError, match="directory"):
        save_checkpoint(tree(), tmp_path / "a.pt")
    assert "no WHOLE.json" in verify_checkpoint(tmp_path / "a.pt")[0]
    assert (tmp_path / "a.pt" / "kept").exists()
    assert os.listdir(tmp_path) == ["a.pt"]


# -- links and folders --------------------------------------------------------------------------------------------


def point_nowhere(folder):
    (folder / "checkpoint_latest.pt").symlink_to("checkpoint_step_99.pt")


def point_to_itself(folder):
    (folder / "checkpoint_latest.pt").symlink_to("checkpoint_latest.pt")


def point_round(folder):
    (folder / "checkpoint_latest.pt").symlink_to("other")
    (folder / "other").symlink_to("checkpoint_latest.pt")


def point_to_a_folder(folder):
    (folder / "half").mkdir()
    (folder / "half" / ".metadata").write_bytes(b"torn")
    (folder / "checkpoint_latest.pt").symlink_to("half")


def be_a_folder(folder):
    (folder / "checkpoint_latest.pt").mkdir()


def be_nothing(folder):
    pass


LINKS = [point_nowhere, point_to_itself, point_round, point_to_a_folder, be_a_folder, be_nothing]


@pytest.mark.parametrize("harm", LINKS)
def test_with_any_link_the_newest_intact_file_is_resumed_from(tmp_path, harm):
    run(tmp_path, 3)
    (tmp_path / "checkpoint_latest.pt").unlink()
    harm(tmp_path)
    assert starts_at(tmp_path) == 3
    if harm is be_a_folder:
        with pytest.raises(CheckpointError, match="checkpoint_latest"):
            run(tmp_path, 4)
    else:
        run(tmp_path, 4)
        assert os.readlink(tmp_path / "checkpoint_latest.pt") == "checkpoint_step_4.pt"
    assert starts_at(tmp_path) == 4


@pytest.mark.parametrize("harm", LINKS)
def test_a_link_whose_files_are_all_gone_is_never_a_fresh_start(tmp_path, harm):
    harm(tmp_path)
    if harm is be_nothing:
        assert starts_at(tmp_path) is None
        return
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        run(tmp_path, 2)


def test_the_copy_that_stands_for_a_link_is_resumed_from_when_the_others_are_damaged(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        for name in ("symlink", "link"):
            patch.setattr(os, name, lambda *args: (_ for _ in ()).throw(OSError("no links here")))
        run(tmp_path, 3)
    for path in tmp_path.glob("checkpoint_step_*.pt"):
        path.write_bytes(b"torn")
    assert starts_at(tmp_path) == 3


def test_folders_of_a_checkpoints_name_are_passed_over_and_count_for_nothing(tmp_path):
    run(tmp_path, 3)
    half = tmp_path / "checkpoint_step_9.pt"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"torn")
    (tmp_path / "checkpoint_latest.pt").unlink()
    assert starts_at(tmp_path) == 3
    run(tmp_path, 5)
    files_left = sorted(path.name for path in tmp_path.glob("checkpoint_step_*") if path.is_file())
    assert files_left == ["checkpoint_step_3.pt", "checkpoint_step_4.pt", "checkpoint_step_5.pt"]
    assert half.is_dir()
    with pytest.raises(CheckpointError, match="no intact"):
        find_latest([half])


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "a.pt")
    assert verify_checkpoint(tmp_path / "a.pt") == ["not a file"]


def test_a_file_that_vanishes_while_the_newest_is_looked_for_is_passed_over(tmp_path, monkeypatch):
    paths = [save_checkpoint(tree(float(n)), tmp_path / f"checkpoint_step_{n}.pt") for n in (1, 2)]
    real = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: real(path) and (path != paths[1] or not os.unlink(path)))
    assert find_latest(paths)[0] == paths[0]


# -- many files and a wrong clock ---------------------------------------------------------------------------------


def counting(monkeypatch, place, name):
    """The first arguments of the calls of a function from now on."""
    seen, real = [], getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args, **kwargs: (seen.append(args[0]), real(*args, **kwargs))[1])
    return seen


def test_three_thousand_old_files_are_no_burden_and_are_pruned_by_write_time(tmp_path, monkeypatch):
    run(tmp_path, 1)
    content = (tmp_path / "checkpoint_step_1.pt").read_bytes()
    for number in range(2, 3002):
        path = tmp_path / f"checkpoint_step_{number}.pt"
        path.write_bytes(content if number == 3001 else b"torn")
        os.utime(path, (number, number))
    os.unlink(tmp_path / "checkpoint_step_1.pt")
    os.unlink(tmp_path / "checkpoint_latest.pt")
    opened = counting(monkeypatch, builtins, "open")
    looked_at = [counting(monkeypatch, os, name) for name in ("stat", "lstat")]
    assert starts_at(tmp_path) == 1
    Retention(1000, 500).prune(tmp_path, PATTERN, [tmp_path / "checkpoint_step_7.pt"])
    save_checkpoint(tree(), tmp_path / "checkpoint_step_3002.pt")
    assert len(opened) < 30
    assert sum(map(len, looked_at)) < 100 * 3000  # a few times for each file and its parents, not for each pair
    left = {int(path.stem.rpartition("_")[2]) for path in tmp_path.glob("checkpoint_step_*.pt")}
    assert left == {7, 500, 1000, 1500, 2000, *range(2002, 3003)}


def test_a_clock_that_was_set_back_does_not_delete_what_was_just_written(tmp_path):
    run(tmp_path, 3, keep=1)
    os.utime(tmp_path / "checkpoint_step_3.pt", (2**33, 2**33))
    for steps in (5, 6):
        run(tmp_path, steps, keep=1)
        assert starts_at(tmp_path) == steps
