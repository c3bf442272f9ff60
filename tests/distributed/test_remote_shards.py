"""RemoteShardsHook: every rank writes its part to an object store and reads it back, to the bit, on any ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from helpers import differences
from ranks import run_on_ranks
from sharded_kit import engine, loader
from treadle.checkpoint.objects import ObjectStore
from treadle.checkpoint.remote_shards import RemoteShards
from treadle.errors import CheckpointError, ConfigError
from treadle.hooks import RemoteShardsHook

pytest.importorskip("fsspec")
MISSING = [name for name in ("moto", "s3fs", "flask") if importlib.util.find_spec(name) is None]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(kind, url, steps, *, options=None, seed=0, **settings):
    hooks = [] if url is None else [RemoteShardsHook(url, 1, options=options, **settings)]
    made = engine(kind, hooks=hooks, seed=seed)
    made.run(loader(), max_steps=steps)
    return made


def two_starts(kinds, url, options):
    """Run of two starts beside one that nothing happens to."""
    found = {}
    for kind in kinds:
        straight = run(kind, None, 6).state_dict()
        run(kind, f"{url}/{kind}", 4, options=options)
        second = run(kind, f"{url}/{kind}", 6, options=options, seed=9, background=False)
        tree = second.state_dict()
        found[kind] = (second.state.source, differences(straight, tree) if dist.get_rank() == 0 else [])
    return found


def check(found, url, options=None):
    for kind, (source, different) in found.items():
        assert source.startswith(f"{url}/{kind}/00000004-000000-"), source
        assert different == []
        store = ObjectStore(f"{url}/{kind}", options=options)
        names = RemoteShards(store).whole()
        assert [RemoteShards.reach(name).step for name in names] == [6, 5]
        files = {key for key in store.sizes() if key.startswith(names[0])}
        assert {f"{names[0]}/__{rank}_0.distcp" for rank in range(2)} <= files
        assert {key.partition("/")[0] for key in store.sizes()} == {*names, "claim"}  # nothing is left over


def test_ranks_resume_from_parts_that_each_wrote_to_the_store(tmp_path):
    url = f"file://{tmp_path}/store"
    check(run_on_ranks(two_starts, 2, ["fsdp"], url, None)[0], url)
    assert run(None, f"{url}/fsdp", 6, seed=9).step == 6  # on one process too


@pytest.mark.slow  # starts a server
@pytest.mark.skipif(bool(MISSING), reason=f"needs moto[server] and s3fs; missing: {', '.join(MISSING)}")
def test_ranks_resume_from_parts_on_an_s3_server(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from remote_kills import s3_server

    with s3_server(tmp_path) as port:
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "a", "secret": "b"}
        check(run_on_ranks(two_starts, 2, ["fsdp", "ddp"], "s3://runs/7", options)[0], "s3://runs/7", options)
    sys.modules.pop("remote_kills")


def test_a_checkpoint_that_is_damaged_or_unfinished_is_passed_over_with_a_warning(tmp_path, caplog):
    url = f"file://{tmp_path}/store"
    run(None, url, 3, keep_previous=None)
    store = ObjectStore(url)
    third, second, _ = RemoteShards(store).whole()
    key = f"{third}/__0_0.distcp"
    store.put(key, bytes(store.sizes()[key]))
    resumed = run(None, url, 2)
    assert resumed.state.source == f"{url}/{second}"
    assert "__0_0.distcp fails its CRC-32 check; looking for an older one" in caplog.text
    store.put(f"{second}/__0_0.distcp", b"")
    store.delete(key for key in store.sizes() if key.endswith("WHOLE.json") and not key.startswith(second))
    with pytest.raises(CheckpointError, match=r"no checkpoint below .* is intact: .*has 0 bytes instead of"):
        run(None, url, 3)


def test_bad_settings_and_a_second_writer_are_refused_by_name(tmp_path):
    for setting in ({"interval": 0}, {"keep_previous": 0}, {"lease": 0.0}):
        name, value = next(iter(setting.items()))
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            RemoteShardsHook(f"file://{tmp_path}", **{"interval": 1, **setting})
    first = RemoteShardsHook(f"file://{tmp_path}", 1)
    with first.claim(None), pytest.raises(CheckpointError, match="is used by process"):
        run(None, f"file://{tmp_path}", 1)
