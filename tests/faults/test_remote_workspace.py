"""Run folders in an object store: whole or absent at every request, one writer, the furthest state."""

from __future__ import annotations

import sys
import uuid

import pytest

from remote_kit import Killed, Requests, contents, empty, failing, killed, process, train_to, workspace
from treadle.checkpoint.objects import ObjectStore
from treadle.checkpoint.order import StateProgress
from treadle.checkpoint.remote import furthest
from treadle.checkpoint.store import load_checkpoint
from treadle.errors import CheckpointError, ConfigError

pytest.importorskip("fsspec")


@pytest.fixture(params=["memory", pytest.param("file", marks=pytest.mark.slow)])
def url(request, tmp_path):
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/store"


def two_saves(remote, done):
    """Claim the workspace, save twice and release it, as a run does; note what was published."""
    remote.restore(lambda text: None)
    remote.begin()
    for step in (1, 2):
        train_to(remote.staging, step)
        remote.publish()
        done.append(step)
    remote.claim.release()


@pytest.mark.parametrize(
    "after", [None, pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_kill_at_every_request_leaves_a_whole_state_and_nothing_is_left_over(tmp_path, monkeypatch, url, after):
    remote, done = workspace(url + "/unharmed", tmp_path / "a", lease=60.0), []
    remote.store._files = Requests(remote.store._files)
    two_saves(remote, done)
    total = len(remote.store._files.seen)
    assert total > 20
    for at in range(1, total + 1):
        place = f"{url}/{at}"
        with process(1, monkeypatch):
            remote, done = workspace(place, empty(tmp_path / "a"), lease=60.0), []
            remote.store._files = Requests(
                remote.store._files, at, killed, after=at % 2 == 0 if after is None else after
            )
            with pytest.raises(Killed):
                two_saves(remote, done)
            remote.claim._stopped.set()
        with process(2, monkeypatch):
            other = workspace(place, empty(tmp_path / "b"), lease=60.0)
            found = other.restore(pytest.fail) and furthest(other.staging)
            assert (found.step if found else 0) >= max(done, default=0), f"killed at request {at}"
            if found:
                load_checkpoint(other.staging / "checkpoints" / "checkpoint_latest.pt")
            other.begin()
            train_to(other.staging, 3)
            other.publish()
            other.claim.release()
            assert other.leftovers() == [], f"killed at request {at}"
            third = workspace(place, empty(tmp_path / "c"))
            assert third.restore(pytest.fail)
            assert contents(third.staging) == contents(other.staging)


def test_an_error_at_every_request_is_tried_again(tmp_path, url):
    for at in range(1, 25, 4):
        remote, done = workspace(f"{url}/{at}", empty(tmp_path / "a"), lease=60.0), []
        remote.store._files = Requests(remote.store._files, at, failing, after=at % 2 == 0)
        two_saves(remote, done)
        assert done == [1, 2]
        assert remote.leftovers() == []


def test_an_error_that_stays_is_raised_and_the_old_state_stays_whole(tmp_path, url):
    remote = workspace(url, tmp_path / "a")
    two_saves(remote, [])
    remote.begin()
    train_to(remote.staging, 3)
    real = remote.store._files
    remote.store._files = Requests(real)
    remote.store._files._watched = lambda name, real: lambda *args, **kwargs: failing()
    with pytest.raises(CheckpointError, match="failed 3 times"):
        remote.publish()
    remote.store._files = real
    other = workspace(url, tmp_path / "b")
    assert other.restore(pytest.fail)
    assert furthest(other.staging) == StateProgress(2, 0)
    remote.publish()
    remote.claim.release()
    assert remote.leftovers() == []


def test_one_writer_at_a_time_and_who_was_taken_for_dead_publishes_nothing_more(tmp_path, monkeypatch, url):
    first, second = workspace(url, tmp_path / "a", lease=5.0), workspace(url, tmp_path / "b")
    first.restore()
    first.begin()
    with pytest.raises(CheckpointError, match="is used by process"):
        second.begin()
    train_to(first.staging, 1)
    first.publish()
    first.claim._stopped.set()  # it hangs
    with monkeypatch.context() as patch:
        patch.setattr("treadle.checkpoint.remote_claim.socket.gethostname", lambda: "another")
        second.restore()
        second.begin()
    train_to(second.staging, 2)
    second.publish()
    train_to(first.staging, 7)
    with pytest.raises(CheckpointError, match="claimed by another process"):
        first.publish()
    assert second.latest()[0].reach == StateProgress(2, 0)
    second.claim.release()


def test_the_furthest_state_wins_wherever_it_is(tmp_path, url):
    remote = workspace(url, tmp_path / "a")
    two_saves(remote, [])
    behind, ahead = workspace(url, tmp_path / "b"), workspace(url, tmp_path / "c")
    train_to(behind.staging, 1)
    train_to(ahead.staging, 9)
    assert behind.restore(pytest.fail)
    assert furthest(behind.staging) == StateProgress(2, 0)
    assert contents(behind.staging) == contents(remote.staging)
    assert not ahead.restore(pytest.fail)
    assert ahead.ahead()
    assert furthest(ahead.staging) == StateProgress(9, 0)


def test_a_damaged_object_is_named_and_the_rest_is_used(tmp_path, url):
    remote = workspace(url, tmp_path / "a")
    train_to(remote.staging, 5)
    two_saves(remote, [])
    hurt = next(key for key in remote.store.sizes() if "step_5" in key and key.endswith("0001"))
    remote.store.put(hurt, bytes(remote.store.sizes()[hurt]))
    said = []
    other = workspace(url, tmp_path / "b")
    assert other.restore(said.append)
    assert len(said) == 1
    assert "checkpoint_step_5.pt is damaged and skipped" in said[0]
    assert furthest(other.staging) == StateProgress(2, 0)
    for key in remote.store.sizes("objects/"):
        remote.store.put(key, b"")
    with pytest.raises(CheckpointError, match=r"no state of manifests/.* is intact"):
        workspace(url, tmp_path / "c").restore(said.append)


def test_a_damaged_manifest_is_named_and_the_one_before_it_is_used(tmp_path, url):
    remote = workspace(url, tmp_path / "a")
    two_saves(remote, [])
    remote.store.put(remote.manifest.key, b"00000000 {}")
    said = []
    other = workspace(url, tmp_path / "b")
    assert other.restore(said.append)
    assert furthest(other.staging) == StateProgress(1, 0)
    assert "fails its CRC-32 check" in said[0]


@pytest.mark.parametrize("at", range(2, 9))
def test_what_a_run_prunes_while_it_is_uploaded_is_uploaded_all_the_same(tmp_path, url, at):
    remote = workspace(url, tmp_path / "a", lease=60.0)
    remote.restore()
    remote.begin()
    train_to(remote.staging, 1)
    real = remote.store._files
    remote.store._files = Requests(real, at, lambda: train_to(remote.staging, 2), after=True)
    remote.publish()
    remote.store._files = real
    other = workspace(url, tmp_path / "b")
    assert other.restore(pytest.fail)
    states = other.staging / "checkpoints"
    assert load_checkpoint(states / "checkpoint_latest.pt")["global_step"] == furthest(other.staging).step == 1
    remote.publish()
    remote.claim.release()
    assert remote.leftovers() == []


def test_a_kill_while_the_folder_is_filled_is_made_good(tmp_path, url):
    two_saves(workspace(url, tmp_path / "a"), [])
    for at in (2, 3, 4):
        broken = workspace(url, empty(tmp_path / "b"))
        broken.store._files = Requests(broken.store._files, at, killed)
        with pytest.raises(Killed):
            broken.restore(pytest.fail)
        again = workspace(url, tmp_path / "b")
        assert again.restore(pytest.fail)
        assert contents(again.staging) == contents(tmp_path / "a")


def test_a_url_that_nothing_reads_is_refused_by_name(monkeypatch):
    with pytest.raises(ConfigError, match="url='nosuch://a'"):
        ObjectStore("nosuch://a")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for name in ("gs", "gcs"):
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, name, raising=False)
    with pytest.raises(ConfigError, match=r"url='gs://bucket/run'.*treadle\[gs\]"):
        ObjectStore("gs://bucket/run")


def test_a_claim_that_was_deleted_by_hand_does_not_end_a_later_run(tmp_path, url):
    two_saves(workspace(url, tmp_path / "a"), [])
    store = ObjectStore(url)
    store.delete(store.sizes("claims/"))
    other, done = workspace(url, tmp_path / "b"), []
    two_saves(other, done)
    assert done == [1, 2]
    assert other.manifest.claim == 2


class Refusing:
    """A file system whose every request is answered by an error."""

    def __init__(self, files, error):
        self._files, self.error = files, error

    def __getattr__(self, name):
        def refuse(*args, **kwargs):
            raise self.error

        return refuse if name in ("pipe_file", "cat_file", "find", "rm_file") else getattr(self._files, name)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError("Access Denied"), "a request was refused (Access Denied); check the credentials"),
        (NotADirectoryError("a file"), "a request was refused (a file)"),
        (FileNotFoundError("no such bucket"), "cannot be written to (no such bucket); create the bucket first"),
    ],
)
def test_a_store_that_refuses_is_named_at_once_with_what_to_look_at(tmp_path, url, error, words):
    remote = workspace(url, tmp_path / "a", tries=1000)
    remote.store._files = Refusing(remote.store._files, error)
    with pytest.raises(CheckpointError) as raised:
        two_saves(remote, [])
    assert f"{url}: {words}" in str(raised.value)
