"""A population in one process: every member has the bits, the log and the files of the run alone."""

from __future__ import annotations

import functools
import os
import random
import signal

import pytest
import torch

from population_kit import Fit, alone, make, same_folder
from treadle import BaseHook, ConfigError, TreadleError
from treadle.data.sharing import deduplicated
from treadle.population import Population
from treadle.population.results import read_rows


def population(make, tmp_path, **options):
    return Population(make, out=tmp_path / "all", progress=False, **options)


@pytest.mark.parametrize("turn", [1, 3])
def test_members_are_the_same_as_their_runs_alone(tmp_path, turn):
    before = random.getstate(), torch.get_rng_state()
    results = population(make, tmp_path, seeds=range(3), turn=turn).run()
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert [(row.name, row.status, row.step) for row in results.rows] == [
        ("seed=0", "finished", 14), ("seed=1", "finished", 14), ("seed=2", "finished", 14),
    ]  # fmt: skip
    for seed in range(3):
        trainer = alone(tmp_path / f"alone{seed}", seed=seed)
        same_folder(tmp_path / "all" / f"seed={seed}", tmp_path / f"alone{seed}")
        assert results.rows[seed].metrics["loss"] == trainer.train_means()["loss"]


def test_a_member_that_fails_ends_alone(tmp_path):
    settings = [{"seed": 0}, {"seed": 1, "bad": True}, {"seed": 2, "steps": 6}]
    results = population(make, tmp_path, settings=settings, turn=1).run()
    assert [row.status for row in results.rows] == ["finished", "failed", "finished"]
    assert results.rows[1].error.startswith("NonFiniteError: the gradient of step 1")
    assert [row.name for row in results.failed] == ["seed=1,bad=True"]
    for row in (results.rows[0], results.rows[2]):
        alone(tmp_path / row.name, **row.settings)
        same_folder(tmp_path / "all" / row.name, tmp_path / row.name)
    assert "seed=1,bad=True failed" in results.lines()[-1]


def only_the_end(folder):
    """The step log and the last checkpoint of a run, which do not depend on where it stopped on the way."""
    folder = folder / "checkpoints"
    return (folder.parent / "steps.jsonl").read_text(), torch.load(folder / "checkpoint_step_14.pt")["model"]


class Stopping(functools.partial):
    """The factory, whose member with seed 1 gets SIGTERM sent to this process in its sixth step, once."""

    sent = False

    def __call__(self, **settings):
        trainer = self.func(exit_signals=signal.SIGTERM if settings["seed"] < 2 else None, **settings)
        if settings["seed"] == 1:
            forward = trainer.forward

            def kill(input):
                if trainer.step == 6 and not Stopping.sent:
                    Stopping.sent = True
                    os.kill(os.getpid(), signal.SIGTERM)
                return forward(input)

            trainer.forward = kill
        return trainer


def test_a_signal_stops_all_members_and_the_same_call_goes_on(tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    Stopping.sent = False
    with pytest.raises(SystemExit) as left:
        population(Stopping(make), tmp_path, seeds=range(4), turn=2, together=3).run()
    assert left.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is handler
    rows = {row.name: row for row in read_rows(tmp_path / "all" / "population.json")}
    assert {name: row.status for name, row in rows.items()} == dict.fromkeys(["seed=0", "seed=1", "seed=2"], "stopped")
    assert rows["seed=1"].step == 6
    results = population(make, tmp_path, seeds=range(4), turn=5).run()
    assert [row.status for row in results.rows] == ["finished"] * 4
    for seed in range(4):
        alone(tmp_path / f"alone{seed}", seed=seed)
        log, weights = only_the_end(tmp_path / "all" / f"seed={seed}")
        expected_log, expected = only_the_end(tmp_path / f"alone{seed}")
        assert log == expected_log
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_member_goes_on_alone_and_a_finished_one_trains_nothing(tmp_path):
    alone(tmp_path / "all" / "seed=1", seed=1, steps=7)
    alone(tmp_path / "alone", seed=1, steps=7)
    results = population(make, tmp_path, seeds=[1]).run()
    alone(tmp_path / "alone", seed=1)
    same_folder(tmp_path / "all" / "seed=1", tmp_path / "alone")
    again = population(make, tmp_path, seeds=[1]).run()
    same_folder(tmp_path / "all" / "seed=1", tmp_path / "alone")
    assert again.rows[0].metrics == results.rows[0].metrics


def test_members_that_all_fail_are_one_error(tmp_path):
    with pytest.raises(TreadleError, match=r"every member failed; seed=0,bad=True: NonFiniteError"):
        population(make, tmp_path, settings=[{"seed": 0, "bad": True}]).run()


def test_an_interrupt_ends_all_members(tmp_path):
    closed = []

    class Interrupt(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step == 5 and trainer.seed == 0:  # the other has begun, a round later
                signal.raise_signal(signal.SIGINT)

        def on_close(self, trainer, error=None):
            closed.append((trainer.seed, type(error).__name__))

    def with_hook(seed, workspace):
        return Fit(seed=seed, workspace=workspace, hooks=[Interrupt()])

    with pytest.raises(KeyboardInterrupt):
        population(with_hook, tmp_path, seeds=range(2), turn=2).run()
    assert sorted(closed) == [(0, "KeyboardInterrupt"), (1, "KeyboardInterrupt")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seeds": [1, 1]}, r"settings: two members are seed=1; give each member different settings"),
        ({"seeds": [0], "workers": -1}, r"workers=-1: must be a whole number >= 0"),
        ({"seeds": [0], "turn": 0}, r"turn=0: must be a whole number >= 1"),
        ({"seeds": [0], "together": 33}, r"together=33: must be from 1 to 32"),
        ({"seeds": [0], "settings": [{"seed": 1}]}, r"seeds: settings .* have a seed already"),
        ({"seeds": [0], "workers": 1}, r"make: cannot be sent to another process"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, arguments, words):
    with pytest.raises(ConfigError, match=words):
        population(lambda seed: None, tmp_path, **arguments)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda seed: 3, r"make: returned a int for member seed=0; return a trainer"),
        (lambda width: None, r"make: takes no argument 'seed', which is a setting of member seed=0"),
        (lambda seed: BaseHook(), r"make: returned a BaseHook"),
    ],
)
def test_a_factory_that_makes_nothing_is_named(tmp_path, factory, words):
    with pytest.raises(TreadleError, match=words):
        population(factory, tmp_path, seeds=[0]).run()


def test_no_members_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there are no members"):
        population(make, tmp_path).run()


def test_a_population_is_held_by_one_process_and_shares_equal_tensors(tmp_path):
    loaders = []

    def keeping(seed, workspace):
        trainer = Fit(seed=seed, workspace=workspace, steps=2)
        build = trainer.build_data_loader
        trainer.build_data_loader = lambda: loaders.append(build()) or loaders[-1]
        return trainer

    population(keeping, tmp_path, seeds=range(2)).run()
    one, two = loaders
    assert [a is b for a, b in zip(one.tensors, two.tensors, strict=True)] == [True, True]
    assert deduplicated(torch.ones(2)) is not deduplicated(torch.ones(2))
