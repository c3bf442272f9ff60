"""A signal in an evaluation that a hook or a callback runs: the last applied step is saved, and all hooks saw it."""

from __future__ import annotations

import os
import queue
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

import astro_trainer_kit
import functional_kit
import golden_kit
import graph_kit
import spectra_kit
from helpers import differences
from ranks import run_on_ranks
from treadle import BaseHook, BestRule, CheckpointingHook, Engine, EpochTrainer, SignalHook, Trainer, set_seed
from treadle.checkpoint import find_latest, load_checkpoint
from treadle.checkpoint.find_step import states_in

FACES = ["engine", "base", "functional", "spectra", "graphs", "astro"]
EVENTS = ["on_after_step", "on_after_epoch", "on_before_step"]


TAKEN = queue.SimpleQueue()  # of a type that no checkpoint holds: an evaluation puts back what changes


class Slow:
    """A loader that gets a signal with its second batch; the batches that are taken are counted."""

    def __init__(self, loader, number):
        self.loader, self.number = loader, number
        while TAKEN.qsize():
            TAKEN.get()

    def __iter__(self):
        for batch in self.loader:
            TAKEN.put(1)
            if TAKEN.qsize() == 2 and self.number:
                os.kill(os.getpid(), self.number)
            yield batch

    @property
    def taken(self):
        return TAKEN.qsize()


class Evaluates(BaseHook):
    """Evaluates at one event of one step, and keeps what it got."""

    def __init__(self, event, step, number):
        self.step, self.number, self.at = step, number, event
        self.slow, self.seen = None, None
        self.results = []
        setattr(self, event, self.look)

    def look(self, trainer, *_, **__):
        if self.at == "on_after_epoch" or trainer.step == self.step:
            self.seen, loader = trainer.step, trainer.cursor.loader
            self.slow = Slow(loader, self.number)
            self.results.append(trainer.evaluate(self.slow))


def train(face, folder, hooks, *, seed=0):
    set_seed(seed)
    tally = golden_kit.Tally()  # after the one that evaluates: it sees the step nonetheless
    # Of faces that load nothing by hand: the hook does.
    saving = CheckpointingHook(100, path=folder / "saved", exit_signals=[signal.SIGTERM])
    run, _ = golden_kit.MAKE[face](folder, [*hooks, tally, saving])
    run()
    return golden_kit.end_of(tally.engine.state_dict())


def timeless(tree):
    records = tree.get("history") or []
    shown = {**tree, "history": [{k: v for k, v in record.items() if k != "time"} for record in records]}
    shown.pop("config")
    # An evaluation that a signal broke off is not made again, so the hook has one result less.
    shown["hooks"] = {key: state for key, state in tree["hooks"].items() if key != "Evaluates"}
    return shown


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("face", FACES)
def test_a_signal_in_an_evaluation_of_a_hook_saves_the_last_step_and_leaves(tmp_path, face, event):
    straight = train(face, tmp_path / "straight", [Evaluates(event, 4, None)])
    looks = Evaluates(event, 4, signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        train(face, tmp_path / "run", [looks])
    assert left.value.code == 143
    if not event.startswith("on_before"):  # a step that has begun is finished first
        assert looks.slow.taken == 2
        assert looks.results == []
    saved = load_checkpoint(tmp_path / "run" / "saved" / "checkpoint_latest.pt")
    assert saved["global_step"] == looks.seen > 0
    assert len(saved["hooks"]["Tally"]["losses"]) == saved["global_step"]
    again = train(face, tmp_path / "run", [Evaluates(event, 4, None)], seed=1)
    assert differences(timeless(straight), timeless(again)) == []


class Uploads(BaseHook):
    """Takes its time at the end, as an upload does, and gets a signal meanwhile."""

    def __init__(self):
        self.done = 0

    def on_close(self, trainer, error=None):
        os.kill(os.getpid(), signal.SIGTERM)
        self.done += 1


@pytest.mark.parametrize("face", FACES)
def test_a_signal_while_hooks_close_lets_them_finish_and_leaves_with_its_code(tmp_path, face):
    uploads = Uploads()
    with pytest.raises(SystemExit) as left:
        train(face, tmp_path, [uploads])
    assert (left.value.code, uploads.done) == (143, 1)


class Ends(BaseHook):
    """Stops the run inside an epoch, and sends a signal after the last occasion of the hooks to save."""

    def __init__(self, moment):
        self.moment = moment

    def on_after_step(self, trainer):
        if trainer.step == 2:
            trainer.should_stop = True

    def on_state_dict(self, trainer, state_dict):
        if self.moment == "save" and trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_close(self, trainer, error=None):
        if self.moment == "close":
            os.kill(os.getpid(), signal.SIGTERM)


def end_inside_an_epoch(face, folder, hooks):
    if face == "functional":
        data = functional_kit.loader(shuffle=True), functional_kit.loader()
        return functional_kit.make(hooks=hooks).train(data[0], 3, data[1], folder, None)
    if face == "spectra":
        return spectra_kit.make(folder, hooks=hooks).fit(3)
    if face == "graphs":
        data = graph_kit.loader(graph_kit.graphs(), shuffle=True)
        return graph_kit.make(folder, hooks=hooks).fit(data, data, 3)
    return astro_trainer_kit.make(folder, hooks=hooks).train(3)


@pytest.mark.parametrize("moment", ["close", "save"])
@pytest.mark.parametrize("face", ["functional", "spectra", "graphs", "astro"])
def test_a_signal_while_the_last_state_of_a_run_is_not_on_disk_waits_for_it(tmp_path, face, moment):
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with pytest.raises(SystemExit) as left:
            end_inside_an_epoch(face, tmp_path, [Ends(moment), SignalHook(lambda: None)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (left.value.code, received) == (143, [])
    states = [state for place in (tmp_path, tmp_path / "checkpoints") for state in states_in(place)]
    assert find_latest(states)[1]["global_step"] == 2


def test_a_short_trial_waits_for_no_signal_and_writes_nothing(tmp_path):
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    saving = CheckpointingHook(1, path=tmp_path / "steps", exit_signals=[signal.SIGTERM])
    try:
        trainer = graph_kit.make(tmp_path, hooks=[Ends("close"), saving], limits={"fast_dev_run": 2})
        trainer.fit(graph_kit.loader(graph_kit.graphs()), None, 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (received, list(tmp_path.iterdir())) == ([signal.SIGTERM], [])


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_a_signal_in_a_callback_of_the_functional_face_leaves_with_the_epoch_saved(tmp_path, call):
    def make(number):
        set_seed(0)
        slow = Slow(functional_kit.loader(), number)
        saving = CheckpointingHook(100, path=tmp_path / "steps", exit_signals=[signal.SIGTERM])
        trainer = functional_kit.make(hooks=[saving])
        return trainer, slow, lambda trainer, epoch, metrics: epoch == 1 and getattr(trainer, call)(slow)

    trainer, slow, callback = make(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        trainer.train(functional_kit.loader(), 4, save_dir=tmp_path / "run", save_freq=None, callbacks=[callback])
    assert (left.value.code, slow.taken) == (143, 2)
    saved = load_checkpoint(tmp_path / "steps" / "checkpoint_latest.pt")
    assert (saved["epoch"], saved["global_step"], len(saved["history"])) == (2, 6, 2)
    trainer, _, callback = make(None)
    history = trainer.train(functional_kit.loader(), 4, callbacks=[callback])
    assert history == functional_kit.make().train(functional_kit.loader(), 4)


class OwnEpochs(Trainer):
    """Trains each epoch through a method of its own, which evaluates after it and adds a number."""

    around = None

    def train_epoch(self, train_dataloader, eval_dataloader=None, epoch=0):
        record = super().train_epoch(train_dataloader, eval_dataloader, epoch)
        if self.around is not None and epoch == 1:
            self.evaluate(self.around)
        return {**record, "added": float(epoch)}


def own_epochs(number, where, folder):
    """Return the train call of a trainer whose second epoch is followed by an evaluation that gets a signal."""
    set_seed(0)
    slow = Slow(functional_kit.loader(), number)
    saving = CheckpointingHook(100, path=folder, exit_signals=[signal.SIGTERM])
    trainer = functional_kit.make(OwnEpochs, hooks=[saving])
    trainer.around = slow if where == "train_epoch" else None

    def callback(trainer, epoch, metrics):
        if where == "callback" and epoch == 1:
            trainer.evaluate(slow)
        if where == "plain callback" and epoch == 1 and number:
            os.kill(os.getpid(), number)

    return lambda: trainer.train(functional_kit.loader(), 4, callbacks=[callback])


@pytest.mark.parametrize("where", ["train_epoch", "callback", "plain callback"])
def test_a_signal_between_epochs_of_an_overridden_train_epoch_saves_the_whole_epoch(tmp_path, where):
    train = own_epochs(None, where, tmp_path / "straight")
    history = train()
    ended = load_checkpoint(tmp_path / "straight" / "checkpoint_latest.pt")
    assert (ended["epoch"], ended["history"][-1]["added"]) == (4, 3.0)  # what a run ended with is on disk
    train = own_epochs(signal.SIGTERM, where, tmp_path / "run")
    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == 143
    saved = load_checkpoint(tmp_path / "run" / "checkpoint_latest.pt")
    assert (saved["epoch"], saved["global_step"], saved["history"][1]["added"]) == (2, 6, 1.0)
    train = own_epochs(None, where, tmp_path / "run")
    assert train() == history
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("when", ["on_before_train", "on_after_train", "requested", "after_epoch", "log"])
def test_a_signal_in_an_evaluation_anywhere_else_leaves_with_its_code(tmp_path, when):
    data = [torch.ones(2, 4)] * 3
    slow = Slow(data, signal.SIGTERM)

    class Looks(BaseHook):
        def on_before_train(self, trainer):
            when == "on_before_train" and trainer.evaluate(slow)

        def on_after_train(self, trainer):
            when == "on_after_train" and trainer.evaluate(slow)

        def on_after_step(self, trainer):
            when == "requested" and trainer.step == 2 and trainer.request_write(lambda: trainer.evaluate(slow))
            when == "log" and trainer.step == 2 and trainer.log({})

        def on_log(self, trainer, records, dry_run=False):
            trainer.evaluate(slow)

    class Sum:
        def step(self, model, batch, totals=None, generator=None):
            return model(batch).square().mean(), {}

    model = nn.Linear(4, 1)
    saving = CheckpointingHook(100, path=tmp_path, exit_signals=[signal.SIGTERM])
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), Sum(), device="cpu", hooks=[Looks(), saving])
    driver = EpochTrainer(engine, best=BestRule("val_loss"))
    with pytest.raises(SystemExit) as left:
        driver.fit(data, data, 2, after_epoch=lambda record: when == "after_epoch" and engine.evaluate(slow))
    assert (left.value.code, slow.taken) == (143, 2)
    saved = load_checkpoint(tmp_path / "checkpoint_latest.pt")
    expected = {"on_before_train": (0, 0), "requested": (2, 0), "log": (2, 0), "after_epoch": (3, 1)}
    assert (saved["global_step"], saved["epoch"]) == expected.get(when, (6, 2))
    assert len(saved["history"]) == saved["epoch"]


def leave_by_rank_1(folder, event):
    hook = Evaluates(event, 4, signal.SIGTERM if dist.get_rank() == 1 else None)
    tally = golden_kit.Tally()
    saving = CheckpointingHook(100, path=folder, exit_signals=[signal.SIGTERM])
    torch.manual_seed(0)
    with pytest.raises(SystemExit) as left:
        golden_kit.MAKE["fsdp"](folder, [hook, tally, saving])[0]()
    return left.value.code


@pytest.mark.parametrize("event", ["on_after_step", "on_after_epoch", "on_before_optimizer_step"])
def test_a_signal_to_one_rank_in_an_evaluation_of_a_hook_saves_on_all(tmp_path, event):
    assert run_on_ranks(leave_by_rank_1, 2, tmp_path, event) == [143, 143]
    saved = load_checkpoint(tmp_path / "checkpoint_latest")
    assert saved["global_step"] == 4
    assert len(saved["hooks"]["Tally"]["losses"]) == saved["global_step"]
