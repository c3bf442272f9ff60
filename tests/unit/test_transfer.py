"""TransferLoader: the same batches in the same order and an exact resume; on a GPU no host wait and no memory reused.

Without a GPU the copies are played by :class:`Played`, which tells when each was begun.
"""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from helpers import Augmented, MeanSquare, Snapshots, differences, small_model, through_a_file
from treadle.data import Cursor, MappedLoader, RankBatchSampler, TensorLoader, TransferLoader, open_source
from treadle.data.graph_sizes import count_sizes
from treadle.data.host_copies import host_of, note_host_copies, tensors_by_name
from treadle.data.transfer import GpuCopies, InOrder
from treadle.engine import Engine
from treadle.errors import ConfigError
from treadle.functional.losses import loss_weight
from treadle.hooks.flight import ids_as_plain
from treadle.seed import set_seed

# torchdata's StatefulDataLoader calls torch.set_vital, which torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Played:
    """Copies that are none: notes what was begun and handed out."""

    def __init__(self):
        self.events = []

    def send(self, batch):
        self.events.append("begun")
        return copy.copy(batch)

    def receive(self, sent):
        self.events.append("given")
        return sent


def played(loader):
    wrapper = TransferLoader(loader, "cpu")
    wrapper.copies = Played()
    return wrapper


class Graphs:
    """A batch that pins, moves and records itself, as those of torch_geometric do."""

    num_graphs = 3

    def __init__(self, batch):
        self.batch = batch

    def pin_memory(self):
        return self

    def to(self, device, non_blocking=False):
        self.batch = self.batch.to(device, non_blocking=non_blocking)
        return self

    def record_stream(self, stream):
        pass


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(30.0).view(10, 3))


def loaders(workers=1):
    """One loader of each kind, made anew; all give ten batches."""
    x = torch.arange(30.0).view(10, 3)
    return {
        "in this process": lambda: DataLoader(Augmented(10), batch_size=1, shuffle=True),
        "workers": lambda: DataLoader(Augmented(10), batch_size=1, shuffle=True, num_workers=workers),
        "a stream in workers": lambda: DataLoader(Stream(), batch_size=None, num_workers=workers),
        "ranks": lambda: DataLoader(x, batch_sampler=RankBatchSampler(x, 1, shuffle=True)),
        "tensors": lambda: TensorLoader(x, batch_size=1, shuffle=True),
        "mapped": lambda: MappedLoader(x, batch_size=1, chunk_rows=3, window_chunks=2, shuffle=True),
        "torchdata": lambda: StatefulDataLoader(Augmented(10), batch_size=1, shuffle=True),
        "a list": lambda: list(x),
    }


# -- without a GPU ----------------------------------------------------------------------------------------------------


class Copied(GpuCopies):
    """Copies to a device that is none; page-locked memory needs a GPU."""

    def __init__(self):
        super().__init__(torch.device("meta"))


@pytest.fixture
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.Mock())
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)


@pytest.mark.parametrize("records_itself", [True, False])
def test_what_is_counted_in_graphs_is_counted_in_the_copy_on_the_host(monkeypatch, without_a_gpu, records_itself):
    """Those that record themselves are moved on the stream of the copies, others on the one that uses them."""
    if not records_itself:
        monkeypatch.delattr(Graphs, "record_stream")
    copies, given = Copied(), Graphs(torch.tensor([0, 0, 2]))
    sent = copies._copied_object(given)
    assert (sent is given) == (not records_itself)
    moved = copies.receive((sent, None))
    assert moved.batch.device.type == "meta"
    assert host_of(moved.batch).tolist() == [0, 0, 2]
    assert count_sizes(moved) == (2, 0, 1)


def test_graphs_of_torch_geometric_keep_their_copies():
    data = pytest.importorskip("torch_geometric.data")
    batch = data.Batch.from_data_list([data.Data(x=torch.ones(n, 2), y=torch.tensor([n])) for n in (2, 3)])
    assert {"x", "y", "batch", "ptr"} <= set(tensors_by_name(batch))
    copies = tensors_by_name(batch)
    moved = note_host_copies(batch.to("meta"), copies)
    assert moved.y.device.type == "meta"
    assert host_of(moved.y).tolist() == [2, 3]
    assert count_sizes(moved) == (2, 3)


def test_a_copy_is_known_until_somebody_writes_and_goes_into_no_file(without_a_gpu):
    moved = Copied()._copied(torch.tensor([1, -100]))
    assert host_of(moved).tolist() == [1, -100]
    assert not vars(moved), "torch.save would write it"
    assert host_of(moved[:1]).device.type == "meta", "a part is another tensor"
    copy_of_it = host_of(moved)
    copy_of_it[0] = 5
    assert host_of(moved) is moved
    again = Copied()._copied(torch.tensor([1, -100]))
    again += 1
    assert host_of(again) is again
    kept = weakref.ref(host_of(Copied()._copied(torch.tensor([1]))))
    assert kept() is None


def test_what_was_on_the_device_already_is_no_copy_of_itself(without_a_gpu, monkeypatch):
    monkeypatch.delattr(Graphs, "record_stream")
    graphs = Graphs(torch.zeros(3, dtype=torch.long, device="meta"))
    moved = Copied().receive((graphs, None))
    held = weakref.ref(moved.batch)
    assert host_of(moved.batch) is moved.batch
    del moved, graphs
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("own_loss", [True, False])
def test_labels_of_transferred_batches_are_counted_on_the_host(without_a_gpu, own_loss):
    labels = torch.tensor([[0, 1, -100], [-100, 2, -100]])
    moved = Copied()._copied(labels)
    if own_loss:
        given = {"inputs": {"labels": moved}, "outputs": {"loss": 0.0}, "targets": None}
    else:
        given = {"inputs": None, "outputs": None, "targets": moved}
    assert loss_weight(torch.nn.ReLU(), torch.nn.CrossEntropyLoss(), **given) == 3.0


def test_without_a_gpu_batches_pass_as_they_are_and_a_warning_says_so(caplog):
    batches = [{"x": torch.ones(2)}, {"x": torch.zeros(2)}]
    with caplog.at_level(logging.WARNING, logger="treadle.data"):
        loader = TransferLoader(batches, "cpu")
    assert "no copy to overlap" in caplog.text
    assert all(given is batch for given, batch in zip(loader, batches, strict=True))
    assert len(loader) == 2


@pytest.mark.parametrize("kind", loaders())
def test_the_cursor_sees_the_wrapped_loader_and_a_run_goes_on_with_or_without_the_wrapper(kind):
    make = loaders()[kind]

    def run(wrap, state=None, count=99):
        set_seed(5)  # torchdata's samplers draw when they are made
        loader, cursor = (played if wrap else lambda loader: loader)(make()), Cursor()
        if state is not None:
            cursor.load_state_dict(state)
        cursor.open(loader)
        group = cursor.take(count)
        state = through_a_file(cursor.state_dict())
        cursor.close()
        return group.batches, group.sample_ids, state

    expected, ids, at_end = run(False)
    batches, ids_too, end_too = run(True)
    assert len(expected) == 10
    assert differences(batches, expected) == []
    assert differences(ids_as_plain(ids_too), ids_as_plain(ids)) == []
    assert differences(end_too, at_end) == []
    for first, second in [(True, True), (True, False), (False, True)]:
        before, _, state = run(first, count=4)
        after, _, _ = run(second, state)
        if kind in ("in this process", "torchdata"):  # their items draw from this process's generator, seeded anew here
            before, after = ([y for _, y in batches] for batches in (before, after))
            assert differences(before + after, [y for _, y in expected]) == []
        else:
            assert differences(before + after, expected) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_training_through_it_stops_and_goes_on_to_the_bit(workers):
    """Dropout draws from the generator that items are augmented from: reading ahead in this process would show."""

    def engine(*hooks):
        set_seed(0)
        model = small_model()
        return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), MeanSquare(), device="cpu", hooks=hooks)

    def loader(wrap=played):
        return wrap(DataLoader(Augmented(12), batch_size=2, shuffle=True, num_workers=workers))

    snapshots = Snapshots()
    engine(snapshots).run(loader(), max_steps=8)
    plain = engine()
    plain.run(loader(lambda loader: loader), max_steps=8)
    assert differences(through_a_file(plain.state_dict())["model"], snapshots.states[8]["model"]) == []
    resumed = engine()
    resumed.load_state_dict(snapshots.states[2])
    resumed.run(loader(), max_steps=8)
    assert differences(through_a_file(resumed.state_dict())["model"], snapshots.states[8]["model"]) == []


@pytest.mark.parametrize("kind", loaders())
def test_it_runs_ahead_only_where_workers_read(kind):
    loader = played(loaders()[kind]())
    cursor = Cursor()
    cursor.open(loader)
    cursor.take(1)
    ahead = "workers" in kind
    assert loader.copies.events == (["begun", "begun", "given"] if ahead else ["begun", "given"])
    cursor.take(1)
    assert loader.copies.events[-2:] == ["begun", "given"]
    cursor.close()
    batches = iter(played(loaders()[kind]()))
    next(batches)


def test_errors_come_after_the_batches_before_them_and_are_not_swallowed():
    def broken():
        yield 1
        yield 2
        raise OSError("the third is broken")

    batches = InOrder(broken(), Played(), ahead=1)
    assert [next(batches), next(batches)] == [1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="the third"):
            next(batches)


def test_a_stop_iteration_inside_the_data_set_is_no_end():
    class Broken(Augmented):
        def __getitem__(self, index):
            if index == 3:
                raise StopIteration
            return super().__getitem__(index)

    cursor = Cursor()
    cursor.open(played(DataLoader(Broken(8), batch_size=1)))
    assert len(cursor.take(3).batches) == 3
    with pytest.raises(RuntimeError, match="before the end"):
        cursor.take(1)


def test_what_is_asked_of_it_is_answered_by_the_wrapped_loader():
    inner = DataLoader(Augmented(10), sampler=RandomSampler(range(10), generator=torch.Generator()), batch_size=5)
    loader = TransferLoader(inner, "cpu")
    assert loader.dataset is inner.dataset
    assert loader.batch_sampler is inner.batch_sampler
    assert len(loader) == 2
    assert copy.copy(loader).loader is inner
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = loader.no_such_thing
    with pytest.raises(TypeError):
        len(TransferLoader(iter([1]), "cpu"))
    tensors = TransferLoader(TensorLoader(torch.arange(10), batch_size=3, shuffle=True), "cpu")
    tensors.set_epoch(1)
    assert tensors.loader.epoch == 1
    assert open_source(tensors).kind == "stateful"


def test_a_loader_that_writes_over_its_batches_is_refused():
    with pytest.raises(ConfigError, match="num_buffers=2 would overwrite"):
        TransferLoader(TensorLoader(torch.arange(10), batch_size=3, num_buffers=2), "cpu")


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    x: torch.Tensor
    name: str


class OnStreams:
    """A batch that pins, moves and records itself, and notes on which stream."""

    def __init__(self, x):
        self.x, self.streams = x, []

    def pin_memory(self):
        return OnStreams(self.x.pin_memory())

    def to(self, device, non_blocking=False):
        moved = OnStreams(self.x.to(device, non_blocking=non_blocking))
        moved.streams.append(torch.cuda.current_stream(device))
        return moved

    def record_stream(self, stream):
        self.streams.append(stream)
        self.x.record_stream(stream)


class OnlyMoves:
    """A batch that can only be moved."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return OnlyMoves(self.x.to(device))


class TestOnAGpu:
    pytestmark = on_a_gpu

    def test_every_kind_of_batch_arrives_whole_and_the_callers_own_is_left_alone(self):
        x = torch.arange(6.0)
        batch = {
            "tuple": (x, [x + 1]), "pair": Pair(x, "a"), "pinned": (x + 2).pin_memory(), "number": 3,
            "packed": pack_sequence([x, x[:2]]), "object": OnStreams(x + 3), "moves": OnlyMoves(x + 4),
            "sparse": x.to_sparse(), "there": (x + 5).cuda(),
        }  # fmt: skip
        (given,) = TransferLoader([batch], "cuda")
        assert torch.equal(given["tuple"][0].cpu(), x)
        assert torch.equal(given["tuple"][1][0].cpu(), x + 1)
        assert given["pair"] == Pair(given["pair"].x, "a")
        assert isinstance(given["packed"], PackedSequence)
        assert torch.equal(given["packed"].data.cpu(), batch["packed"].data)
        assert torch.equal(given["sparse"].to_dense().cpu(), x)
        assert given["there"] is batch["there"]
        assert given["number"] == 3
        for tensor in (given["tuple"][0], given["tuple"][1][0], given["pair"].x, given["pinned"], given["packed"].data,
                       given["object"].x, given["moves"].x, given["sparse"]):  # fmt: skip
            assert tensor.is_cuda
        for tensor in (batch["tuple"][0], batch["pair"].x, batch["pinned"], batch["packed"].data, batch["object"].x):
            assert not tensor.is_cuda
        side, main = given["object"].streams
        assert main == torch.cuda.current_stream()
        assert side != main

    def test_graphs_arrive(self):
        data = pytest.importorskip("torch_geometric.data")
        from torch_geometric.loader import DataLoader as GraphLoader

        graphs = [data.Data(x=torch.full((n + 1, 2), float(n)), edge_index=torch.zeros(2, n).long()) for n in range(6)]
        for given, expected in zip(TransferLoader(GraphLoader(graphs, 2), "cuda"), GraphLoader(graphs, 2), strict=True):
            assert given.x.is_cuda
            assert torch.equal(given.x.cpu(), expected.x)
            assert torch.equal(given.batch.cpu(), expected.batch)
            assert not expected.x.is_cuda

    def test_the_host_does_not_wait(self):
        batches = [torch.full((64, 64), float(n)) for n in range(8)]
        loader, weight = TransferLoader(batches, "cuda"), torch.eye(64, device="cuda")
        total = torch.zeros((), device="cuda")
        for batch in loader:  # what is made once is made
            total += (batch @ weight).mean()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in loader:
                total += (batch @ weight).mean()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert total.item() == 2 * sum(range(8))

    def test_a_batch_is_not_read_before_it_is_there_and_its_memory_not_reused_before_it_was_read(self):
        size = 2**22
        sums = []
        for number, batch in enumerate(TransferLoader([torch.full((size,), float(n)) for n in range(12)], "cuda")):
            if number % 3 == 0:
                torch.cuda._sleep(20_000_000)  # the host is far ahead of the GPU now
            sums.append(batch.double().sum())
            del batch
        assert [one.item() for one in sums] == [float(n) * size for n in range(12)]

    def test_a_batch_whose_copy_is_late_is_waited_for_by_the_gpu(self):
        loader, size = TransferLoader([torch.ones(2**20)], "cuda"), 2**20
        loader.copies._stream = torch.cuda.Stream()
        with torch.cuda.stream(loader.copies._stream):
            garbage = torch.full((size,), float("nan"), device="cuda")  # the memory that the batch will be given
            del garbage
            torch.cuda._sleep(50_000_000)
        (total,) = [batch.sum() for batch in loader]
        assert total.item() == size

    @pytest.mark.parametrize("workers", [0, 2])
    def test_training_equals_that_without_it_and_resumes_to_the_bit(self, workers):
        def engine(*hooks):
            set_seed(0)
            model = small_model().cuda()
            return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), Moving(), device="cuda", hooks=hooks)

        def loader(wrap=lambda loader: TransferLoader(loader, "cuda")):
            return wrap(DataLoader(Augmented(12), batch_size=2, shuffle=True, num_workers=workers, pin_memory=True))

        snapshots = Snapshots()
        engine(snapshots).run(loader(), max_steps=10)
        plain = engine()
        plain.run(loader(lambda loader: loader), max_steps=10)
        assert differences(through_a_file(plain.state_dict())["model"], snapshots.states[10]["model"]) == []
        for cut in (2, 6):
            resumed = engine()
            resumed.load_state_dict(snapshots.states[cut])
            resumed.run(loader(), max_steps=10)
            assert differences(through_a_file(resumed.state_dict())["model"], snapshots.states[10]["model"]) == []

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_windows_on_the_gpu_give_the_batches_of_the_cpu(self, shuffle):
        rows = torch.arange(5000 * 16.0).view(5000, 16)
        settings = {"batch_size": 70, "chunk_rows": 100, "window_chunks": 4, "shuffle": shuffle}
        given = []
        for batch in MappedLoader(rows, device="cuda", **settings):
            torch.cuda._sleep(1_000_000)  # the host is ahead: windows are given up before the GPU has read them
            given.append(batch + 0)
        assert all(batch.is_cuda for batch in given)
        expected = list(MappedLoader(rows, **settings))
        assert [torch.equal(a.cpu(), b) for a, b in zip(given, expected, strict=True)] == [True] * len(expected)

    def test_buffers_on_the_gpu_are_fixed_and_filled_without_a_host_wait_or_new_memory(self):
        rows = torch.arange(512 * 8.0, device="cuda").view(512, 8)
        loader = TensorLoader(rows, batch_size=64, shuffle=True, num_buffers=1)
        expected = TensorLoader(rows.cpu(), batch_size=64, shuffle=True)
        assert [torch.equal(a.cpu(), b) for a, b in zip(loader, expected, strict=True)] == [True] * 8
        batches, places = iter(loader), set()
        next(batches)
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            places = {batch.data_ptr() for batch in batches}
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(places) == 1
        assert torch.cuda.memory_allocated() <= before


class Moving(MeanSquare):
    """Moves what is not on the GPU yet, as the packs do."""

    def step(self, model, batch, totals=None, generator=None):
        device = next(model.parameters()).device
        return super().step(model, [tensor.to(device, non_blocking=True) for tensor in batch], totals, generator)
