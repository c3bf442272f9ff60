"""Sweeps, successive halving and studies; each goes on after a kill with the decisions that it made before."""

from __future__ import annotations

import json
import math

import pytest

from treadle import CheckpointError, ConfigError
from treadle.population import Population, SuccessiveHalving, Uniform, draws, grid
from treadle.population.member import Member, Outcome, member_name
from treadle.population.search import StudySource


def members(count, folder):
    return [Member(f"seed={seed}", {"seed": seed}, folder / f"seed={seed}") for seed in range(count)]


def value(member):
    """A number that falls with the rung, whose order among members is that of the seeds from the last to the first."""
    reached = 9 if member.until is None else member.until.count
    return 10.0 - member.settings["seed"] + 1 / reached


def play(source, *, until=None):
    """Run members of a source one at a time, at most so many; return what ran."""
    ran = []
    while (until is None or len(ran) < until) and (member := source.next()) is not None:
        ran.append((member.name, None if member.until is None else member.until.count))
        status = "finished" if member.until is None else "paused"
        source.tell(member, Outcome(status, metrics={"loss": value(member)}))
    return ran


def halving(folder, **options):
    rule = SuccessiveHalving("loss", rungs=[1, 3], eta=2, **options)
    return rule.source(members(5, folder), folder, record=lambda member, outcome: None)


def test_of_runs_that_reach_a_rung_the_best_part_trains_on(tmp_path):
    ran = play(halving(tmp_path))
    assert ran == [
        ("seed=0", 1), ("seed=1", 1), ("seed=1", 3), ("seed=2", 1), ("seed=2", 3), ("seed=2", None), ("seed=3", 1),
        ("seed=3", 3), ("seed=3", None), ("seed=4", 1), ("seed=4", 3), ("seed=4", None),
    ]  # fmt: skip


@pytest.mark.parametrize("cut", range(1, 12))
def test_halving_goes_on_where_a_kill_left_it(tmp_path, cut):
    expected = play(halving(tmp_path / "whole"))
    ran = play(halving(tmp_path / "cut"), until=cut)
    source = halving(tmp_path / "cut")
    running = source.next()  # started when the process was killed
    again = halving(tmp_path / "cut")
    rest = play(again)
    assert ran + rest == expected
    assert rest[0][0] == running.name


def test_an_unfinished_line_of_a_journal_is_cut(tmp_path):
    expected = play(halving(tmp_path / "whole"))
    ran = play(halving(tmp_path / "cut"), until=3)
    with open(tmp_path / "cut" / "halving.jsonl", "a") as file:
        file.write('{"event": "sta')
    assert ran + play(halving(tmp_path / "cut")) == expected


def test_failed_and_infinite_members_are_never_promoted(tmp_path):
    source = halving(tmp_path)
    for outcome in (Outcome("failed"), Outcome("paused", metrics={"loss": math.nan}), Outcome("failed")):
        source.tell(source.next(), outcome)
    assert play(source) == [("seed=3", 1), ("seed=3", 3), ("seed=4", 1), ("seed=4", 3), ("seed=4", None)]


def test_a_journal_of_another_search_and_a_metric_that_is_not_there_are_refused(tmp_path):
    play(halving(tmp_path), until=1)
    with pytest.raises(ConfigError, match="is of a search with different mode; choose another out="):
        halving(tmp_path, mode="max")
    source = halving(tmp_path)
    with pytest.raises(ConfigError, match="metric='loss': is not among the numbers of member seed=1: accuracy"):
        source.tell(source.next(), Outcome("paused", metrics={"accuracy": 1.0}))


def test_a_population_stops_members_at_rungs_and_resumes_the_best(tmp_path):
    from population_kit import alone, make, same_folder

    rule = SuccessiveHalving("loss", rungs=[4], eta=2, unit="steps")
    population = Population(
        make, seeds=range(2), out=tmp_path / "all", halving=rule, together=1, turn=3, progress=False
    )
    results = population.run()
    assert sorted((row.status, row.step) for row in results.rows) == [("finished", 14), ("paused", 4)]
    best = next(row for row in results.rows if row.status == "finished")
    journal = [json.loads(line) for line in (tmp_path / "all" / "halving.jsonl").read_text().splitlines()[1:]]
    loss = {row["member"]: row["value"] for row in journal if row["event"] == "reached" and row["rung"] == 0}
    assert loss[best.name] == min(loss.values())
    alone(tmp_path / "alone", seed=best.settings["seed"])
    mine, theirs = tmp_path / "all" / best.name, tmp_path / "alone"
    assert (mine / "steps.jsonl").read_text() == (theirs / "steps.jsonl").read_text()
    for path in mine.rglob("checkpoint_step_4.pt"):
        path.unlink()  # of the pause
    same_folder(mine, theirs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rungs": []}, r"rungs=\[\]: must be rising"), ({"rungs": [3, 1]}, "must be rising"),
        ({"rungs": [1], "eta": 1}, "eta=1: must be a whole number >= 2"),
        ({"rungs": [1], "mode": "best"}, "mode='best': must be 'min' or 'max'"),
    ],
)  # fmt: skip
def test_bad_rules_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        SuccessiveHalving("loss", **arguments)


# -- settings -------------------------------------------------------------------------------------------------------


def test_draws_are_the_same_for_a_seed_and_inside_their_bounds():
    space = {"lr": Uniform(1e-4, 1e-1, log=True), "width": Uniform(1, 3, whole=True), "kind": ["a", "b"]}
    found = draws(50, draw_seed=3, **space)
    assert found == draws(50, draw_seed=3, **space)
    assert found[:7] == draws(7, draw_seed=3, **space)
    assert found != draws(50, draw_seed=4, **space)
    assert {row["width"] for row in found} == {1, 2, 3}
    assert all(1e-4 <= row["lr"] <= 1e-1 for row in found)
    assert {row["kind"] for row in found} == {"a", "b"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: grid(lr=[]), r"lr=\[\]: has no values"), (lambda: grid(lr=0.1), r"lr=0.1: must be a list"),
        (lambda: grid(kind="ab"), r"kind='ab': must be a list"), (lambda: draws(0, lr=[1]), "count=0"),
        (lambda: draws(1, lr=[]), "must be a Uniform or a list"), (lambda: Uniform(2, 1), "low=2: must be below high"),
        (lambda: Uniform(0, 1, log=True), "must be above 0 with log=True"),
    ],
)  # fmt: skip
def test_bad_spaces_are_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_long_names_are_cut_and_stay_apart():
    one, two = ({f"setting{n}": "x" * 20 for n in range(9)} | {"last": last} for last in (1, 2))
    assert len(member_name(one)) == len(member_name(two)) == 120
    assert member_name(one) != member_name(two)


# -- studies --------------------------------------------------------------------------------------------------------


class Study:
    """What a population needs of an Optuna study; asks for numbers that depend on what it was told."""

    class direction:
        name = "MINIMIZE"

    sampler = None

    def __init__(self):
        self.told, self.asked = [], 0

    def ask(self):
        trial = type("Trial", (), {"number": self.asked, "lr": 1 + self.asked * 10 + sum(map(float, self.told))})()
        self.asked += 1
        return trial

    def tell(self, trial, value=None, state=None):
        self.told.append(-1.0 if value is None else value)


def study(folder, study, **options):
    def place(settings):
        return Member(member_name(settings), settings, folder / member_name(settings))

    return StudySource(
        study, lambda trial: {"lr": trial.lr}, trials=4, metric="loss", folder=folder, place=place,
        record=lambda member, outcome: None,
    )  # fmt: skip


def play_study(source, until=9):
    ran = []
    while len(ran) < until and (member := source.next()) is not None:
        ran.append(member.name)
        source.tell(member, Outcome("finished", metrics={"loss": 0.5 * member.settings["lr"]}))
    return ran


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_study_goes_on_with_the_same_questions(tmp_path, cut):
    expected = play_study(study(tmp_path / "whole", Study()))
    ran = play_study(study(tmp_path / "cut", Study()), until=cut)
    running = study(tmp_path / "cut", Study()).next().name  # when the process was killed
    again = Study()
    rest = play_study(study(tmp_path / "cut", again))
    assert ran + rest == expected
    assert rest[0] == running
    assert again.asked == len(again.told) == 4


def test_a_study_that_asks_for_something_else_is_refused(tmp_path):
    play_study(study(tmp_path, Study()), until=2)
    other = Study()
    other.asked = 3
    with pytest.raises(CheckpointError, match=r"the study proposed lr=1\S* then and lr=31\S* now"):
        study(tmp_path, other)


def test_an_optuna_study_searches(tmp_path):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def searched(folder, trials):
        sampler = optuna.samplers.RandomSampler(seed=1)
        population = Population.of_study(
            lambda lr: lambda: {"loss": (lr - 0.3) ** 2}, optuna.create_study(sampler=sampler),
            lambda trial: {"lr": trial.suggest_float("lr", 0, 1)}, trials=trials, metric="loss", out=folder,
            progress=False,
        )  # fmt: skip
        return [row.name for row in population.run().rows]

    whole = searched(tmp_path / "whole", 4)
    assert searched(tmp_path / "cut", 2) == whole[:2]
    assert searched(tmp_path / "cut", 4) == whole
