"""Streams are entered in the middle: every stop ends as the run that was not stopped, and nothing is read twice."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest
import torch

import stream_kit
from helpers import MeanSquare, differences, small_model, through_a_file
from ranks import run_on_ranks
from stream_kit import FILES, ROWS, make, reads
from treadle import Engine, parallelize, set_seed
from treadle.data import Cursor, ShardedStream, ShuffleBuffer
from treadle.errors import CheckpointError, ConfigError
from treadle.hooks import BaseHook

EPOCHS = 2
# torchdata's StatefulDataLoader calls torch.set_vital, which torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


taken = {}  # states by step; outside the hook, whose attributes are part of a state


class Taken(BaseHook):
    def on_after_step(self, trainer):
        trainer.request_write(lambda: taken.__setitem__(trainer.step, through_a_file(trainer.state_dict())))


def needs(kind):
    package = {
        "hf": "datasets",
        "hf_joined": "datasets",
        "hf_buffer": "datasets",
        "hf_in_ours": "datasets",
        "parquet": "pyarrow",
    }.get(kind, kind if kind in ("webdataset", "litdata", "streaming") else None)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def trained(kind, folder, workers, *, state=None, max_steps=None, ranks=False):
    """Return the engine and its states after each step, of a run that goes on from ``state``."""
    set_seed(1 if state else 0)
    model = small_model()
    taken.clear()
    model = parallelize(model, "ddp") if ranks else model
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=0.02), MeanSquare(), device="cpu", hooks=[Taken()])
    if state is not None:
        engine.load_state_dict(state)
    loader = make(kind, folder, workers)
    reads()
    if max_steps is None:
        engine.run(loader, epochs=EPOCHS)
    else:
        engine.run(loader, max_steps=max_steps)
    return engine, dict(taken)


def end_of(engine):
    state = engine.state_dict()
    for data in (state["data"], *state["data"].get("ranks", [])):
        data.pop("objects", None)  # of datasets, where an old place is left in the state at the end of an epoch
        (data["opening"] or {}).pop("objects", None)
    return {**state, "drawn": torch.rand(3)}


def check_every_stop(kind, folder, workers, cuts=None):
    straight, states = trained(kind, folder, workers)
    total, expected = reads(), end_of(straight)
    assert len(states) == straight.step >= 2 * EPOCHS
    for cut in sorted(states) if cuts is None else cuts(sorted(states)):
        resumed, _ = trained(kind, folder, workers, state=states[cut])
        again = reads()
        assert differences(expected, end_of(resumed)) == [], f"{kind} stopped after step {cut}"
        yield cut, again, total


def consumed_samples(kind, folder, workers):
    """Return the samples consumed after each step."""
    set_seed(0)
    cursor, sizes = Cursor(), [0]
    for _ in range(EPOCHS):
        cursor.open(make(kind, folder, workers))
        while group := cursor.take(1).batches:
            sizes.append(sizes[-1] + len(group[0][0]))
        cursor.next_epoch()
    cursor.close()
    return sizes


FAST = [("tar", 2), ("own", 0), ("buffer", 0), ("torchdata_rows", 2)]
SLOW = [  # workers and a run to the end for each stop
    ("tar", 0), ("tar", 3), ("parquet", 0), ("parquet", 2), ("own", 2), ("own", 3), ("buffer", 2), ("hf", 0), ("hf", 2),
    ("hf_in_ours", 0), ("hf_in_ours", 2), ("torchdata_rows", 3), ("torchdata_own", 0), ("torchdata_own", 2),
    ("torchdata_iterator", 2),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "workers"), [*FAST, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)])
def test_every_stop_of_two_epochs_ends_the_same_and_reads_nothing_twice(kind, workers, tmp_path, request):
    needs(kind)
    slow = request.node.get_closest_marker("slow") is not None
    spread = None if slow else lambda steps: [steps[0], steps[len(steps) // 2 + 1]]
    consumed = consumed_samples(kind, tmp_path, workers)
    buffered = 5 * max(1, workers) if kind in ("buffer", "hf_in_ours") else 0
    for cut, again, _ in check_every_stop(kind, tmp_path, workers, spread):
        twice = again - (consumed[-1] - consumed[cut])
        assert 0 <= twice <= buffered, f"{kind}: {twice} samples read twice after step {cut}"


@pytest.mark.parametrize("kind", ["late", "restarting", "hf_buffer"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stream_whose_state_is_not_its_place_is_named_before_step_1_and_replayed(kind, workers, tmp_path, caplog):
    needs(kind)
    said = []

    class First(MeanSquare):
        def step(self, *args, **kwargs):
            said.append("cannot resume inside an epoch" in caplog.text)
            return super().step(*args, **kwargs)

    set_seed(0)
    model = small_model()
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), First(), device="cpu")
    engine.run(make(kind, tmp_path, workers), max_steps=4)
    assert said == [True] * 4
    if kind == "hf_buffer":  # of the others, the stream itself moves its state while it is replayed
        for _ in check_every_stop(kind, tmp_path, workers, lambda steps: steps[2:4]):
            pass


def test_a_state_that_leads_back_to_its_place_at_first_only_is_found_later(caplog):
    cursor = Cursor()
    cursor.open(make("forgets", None, 0))
    cursor.take(1)
    assert cursor.state_dict()["loader"] is not None
    cursor.take(2)
    assert cursor.state_dict()["loader"] is None
    assert "taken after 8 samples and loaded, it does not give the next sample" in caplog.text


@pytest.mark.slow  # packs the data in a process of its own
@pytest.mark.filterwarnings("ignore")  # litdata's
@pytest.mark.parametrize("workers", [0, 2])
def test_litdata_under_torchs_loader_is_replayed_and_its_own_loader_is_refused(workers, tmp_path):
    needs("litdata")
    from litdata import StreamingDataLoader

    for _ in check_every_stop("litdata", tmp_path / "data", workers, lambda steps: steps[1::6]):
        pass
    stream = make("litdata", tmp_path / "data", workers).dataset
    with pytest.raises(ConfigError, match=r"use torch\.utils\.data\.DataLoader over the same Noisy"):
        Cursor().open(StreamingDataLoader(stream, batch_size=4, num_workers=workers))


class CountedByItsLoader(torch.utils.data.IterableDataset):
    """A stream whose state needs numbers of its own loader, as those of litdata and mosaicml-streaming do."""

    def __iter__(self):
        return iter(torch.ones(8, 4))

    def state_dict(self, num_samples, from_beginning):
        return {"num_samples": num_samples}

    def load_state_dict(self, state): ...


class ItsLoader(torch.utils.data.DataLoader):
    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


def test_loaders_that_count_for_their_streams_are_refused_before_step_1():
    with pytest.raises(ConfigError, match=r"use torch\.utils\.data\.DataLoader over the same CountedByItsLoader"):
        Cursor().open(ItsLoader(CountedByItsLoader()))
    shared = CountedByItsLoader()
    shared.next_epoch = 0
    with pytest.raises(ConfigError, match=r"counts its epochs in memory that processes share"):
        Cursor().open(torch.utils.data.DataLoader(shared))


def test_another_number_of_workers_is_refused_in_words(tmp_path):
    _, states = trained("tar", tmp_path, 1, max_steps=2)
    with pytest.raises(CheckpointError, match="num_workers=1 and cannot be loaded with num_workers=2"):
        trained("tar", tmp_path, 2, state=states[2])


def test_an_error_in_a_sample_leaves_the_place_and_the_same_batch_comes_again(tmp_path):
    broken = [9.0]

    def decode(sample):
        if float(sample["x"]) in broken:
            broken.clear()
            raise ValueError("a bad sample")
        return stream_kit.decoded(sample)

    def batches(stream, tries):
        cursor, found = Cursor(), []
        loader = torch.utils.data.DataLoader(stream, batch_size=4)
        for _ in range(tries):
            try:
                cursor.open(loader)
                while group := cursor.take(1).batches:
                    found += group
            except ValueError:
                continue
        return found

    set_seed(0)
    folder = stream_kit.tar_files(tmp_path)
    one = batches(ShardedStream(folder, decode=decode), 2)
    assert broken == []
    set_seed(0)
    two = batches(ShardedStream(folder, decode=decode), 1)
    assert len(one) == len(two) == FILES * ROWS // 4


@pytest.mark.parametrize("bad", [
    lambda folder: ShardedStream(folder / "none"), lambda folder: ShardedStream([]),
    lambda folder: ShardedStream(["a.tar", "b.parquet"]), lambda folder: ShardedStream(["a.tar"], window=0),
    lambda folder: ShuffleBuffer([1, 2], 5), lambda folder: ShuffleBuffer(stream_kit.Counting(), 1),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name(bad, tmp_path):
    with pytest.raises(ConfigError, match=r"shards|window|stream|size"):
        bad(tmp_path)


def test_fewer_files_than_readers_are_refused(tmp_path):
    loader = torch.utils.data.DataLoader(ShardedStream(stream_kit.tar_files(tmp_path), decode=stream_kit.decoded))
    loader.dataset._of_main_process = (0, FILES + 1)
    with pytest.raises(ConfigError, match="4 files for 5 readers"):
        next(iter(loader))


def stopped_on_a_rank(kind, folder, workers, cuts):
    """Return, for this rank, the stops after which a resumed run ends otherwise, and the samples read twice."""
    place = pathlib.Path(folder) / str(torch.distributed.get_rank())
    straight, states = trained(kind, place, workers, ranks=True)
    expected, found, steps = end_of(straight), {}, sorted(states)
    consumed = consumed_samples(kind, place, workers)
    reads()
    for cut in steps if cuts is None else [steps[position] for position in cuts]:
        resumed, _ = trained(kind, place, workers, state=states[cut], ranks=True)
        found[cut] = differences(expected, end_of(resumed)), reads() - (consumed[-1] - consumed[cut])
    return len(steps), found


@pytest.mark.slow  # two processes with two workers each, and a run to the end for each stop
@pytest.mark.parametrize("kind", ["tar", "parquet", "own", "buffer", "hf", "hf_in_ours", "torchdata_rows"])
def test_every_stop_on_two_ranks_with_two_workers_each_ends_the_same(kind, tmp_path):
    needs(kind)
    buffered = 10 if kind in ("buffer", "hf_in_ours") else 0
    for rank, (steps, found) in enumerate(
        run_on_ranks(stopped_on_a_rank, 2, kind, str(tmp_path), 2, None, timeout=1200.0)
    ):
        assert steps == len(found) >= 2 * EPOCHS
        for cut, (different, twice) in found.items():
            assert different == [], f"rank {rank} after step {cut}"
            assert 0 <= twice <= buffered


@pytest.mark.parametrize("generator", ["own", "of torch's sampler", None])
def test_a_sampler_without_state_in_torchdatas_nodes_goes_on_with_its_order_of_a_later_epoch(generator):
    nodes = pytest.importorskip("torchdata.nodes")

    class Mixed:
        def __init__(self):
            self.generator_of_mine = torch.Generator().manual_seed(3)

        def __iter__(self):
            return iter(torch.randperm(12, generator=self.generator_of_mine).tolist())

    def loader():
        seeded = torch.Generator().manual_seed(4) if generator else None
        sampler = Mixed() if generator == "own" else torch.utils.data.RandomSampler(range(12), generator=seeded)
        rows = torch.arange(48.0).reshape(12, 4).sin()
        items = nodes.MapStyleWrapper(map_dataset=[(row, row.sum(0, keepdim=True)) for row in rows], sampler=sampler)
        return nodes.Loader(nodes.Mapper(nodes.Batcher(items, 4), torch.utils.data.default_collate))

    def run(state=None):
        set_seed(1 if state else 0)
        model = small_model()
        taken.clear()
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), MeanSquare(), device="cpu", hooks=[Taken()])
        if state is not None:
            engine.load_state_dict(state)
        engine.run(loader(), epochs=EPOCHS)
        return model.state_dict(), dict(taken)

    straight, states = run()
    for step in (2, 4, 5):
        assert differences(straight, run(states[step])[0]) == [], step


def test_joined_streams_of_datasets_in_workers_are_replayed_since_datasets_cannot_enter_them(tmp_path, caplog):
    needs("hf_joined")
    for cut, again, total in check_every_stop("hf_joined", tmp_path, 2, lambda steps: [steps[-2]]):
        assert total / 2 - 1 <= again < total, cut
    assert "cannot load a worker's state of concatenated streams after the first epoch" in caplog.text
