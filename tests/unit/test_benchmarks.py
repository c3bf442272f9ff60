"""The benchmarks' trials run, write nothing, and capture what they say is captured."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from capture_kit import Rerun, capture_on_the_cpu

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def trial(monkeypatch, tmp_path, capsys):
    """Run a benchmark with arguments; return its module and what it printed."""
    level = logging.getLogger("treadle").level
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(importlib.import_module("machine"), "RESULTS", tmp_path / "results")

    def run(name, *arguments):
        module = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        module.main()
        assert not (tmp_path / "results").exists()
        return module, capsys.readouterr().out

    yield run
    logging.getLogger("treadle").setLevel(level)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


def test_the_overhead_benchmark_has_a_row_for_each_way_and_workload(trial):
    ways = ["hand loop", "treadle Engine", "treadle BaseTrainer"]
    _, out = trial("overhead", "--tiny", "--ways", *ways)
    assert [out.count(f"'way': '{way}'") for way in ways] == [3, 3, 3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch itself
def test_the_benchmark_of_compiling_has_a_row_for_each_model_and_way(trial):
    module, out = trial("compile", "--tiny")
    assert [out.count(f"'way': '{way}'") for way in module.WAYS] == [len(module.PARTS)] * len(module.WAYS)


def test_the_overhead_benchmark_of_a_gpu_captures_what_it_says(trial, monkeypatch):
    capture_on_the_cpu(monkeypatch)
    module, out = trial("overhead_gpu", "--tiny")
    assert all(out.count(f"'way': '{way}'") == 1 for way in module.OURS)
    assert Rerun.made == sum("treadle" in way and "captured" in way for way in module.OURS)


def test_the_overhead_benchmark_of_half_precision_has_its_ways(trial):
    module, out = trial("overhead_gpu", "--tiny", "--halves", "--workloads", "mlp", "--rounds", "1")
    assert all(out.count(f"'way': '{way}'") == 1 for way in module.halves(several=False))


def test_the_benchmark_of_eager_steps_trains_as_the_loop_beside_it(trial, monkeypatch):
    module, out = trial("eager_gpu", "--tiny")
    assert "'pairs': '4'" in out
    made = []
    build = module.Workload.build
    monkeypatch.setattr(module.Workload, "build", lambda work: made.append(build(work)) or made[-1])
    module.measure(module.Workload(module.Net, (4, 64), torch.device("cpu"), fused=True), block=2, pairs=4)
    (mine, _), (its, _) = made
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), its.parameters(), strict=True))


def test_the_clock_of_a_gpu_counts_from_the_warm_up_on(trial, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("overhead_gpu")
    seconds = iter([1.0, 4.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))
    watch = module.Watch(warm_up=2, steps=5)
    for _ in range(5):
        watch.tick()
    assert watch.per_step().wall == pytest.approx(1e6)


def test_the_benchmark_of_spectra_trains_alike_eagerly_and_captured(trial, monkeypatch):
    capture_on_the_cpu(monkeypatch)
    _, out = trial("spectra", "--tiny")
    assert out.count("losses equal: eager and captured True, two eager runs True") == 2
    assert Rerun.made == 2


def test_the_benchmark_of_tokens_has_its_ways(trial, monkeypatch):
    capture_on_the_cpu(monkeypatch)
    _, out = trial("tokens", "--tiny")
    ways = ("hand loop", "hand loop, full logits", "treadle Engine", "treadle Engine, captured", "AstroTrainer")
    fused = int(hasattr(torch.nn.functional, "linear_cross_entropy"))  # without it every loop has full logits
    assert [out.count(f"'way': '{way}'") for way in ways] == [2, fused, 1, 1, 1]
    assert Rerun.made == 1


def test_the_benchmarks_of_losses_checkpoints_and_long_runs_have_trials(trial):
    assert "combined, treadle from hidden states" in trial("token_losses", "--tiny", "--dry", "--repeats", "1")[1]
    assert "900 to 1,000" in trial("scale", "--tiny")[1]
    assert "treadle, foreground" in trial("checkpoint", "--tiny")[1]


def test_a_way_that_fails_leaves_the_others_their_rounds(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    rounds = importlib.import_module("rounds")

    def measure(built, number):
        if built == "broken" and number == 2:
            raise RuntimeError("out of memory")
        return number

    found = rounds.Rounds({name: lambda name=name: name for name in ("whole", "broken", "other")}, measure)
    turns = list(found.play(3))
    assert [name for name, _ in turns[:3]] == ["whole", "broken", "other"]
    assert found.figures == {"whole": [1, 2, 3], "broken": [1], "other": [1, 2, 3]}
    assert found.failed == {"broken": "RuntimeError: out of memory"}
    assert turns.count(("broken", None)) == 1


def test_a_run_of_spectra_that_is_cut_short_leaves_a_table(trial, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("spectra")
    sizes = module.Sizes(module.torch.device("cpu"), width=16, num_layers=1, repeats=1, modes=("SpectraTrainer",))

    class Cut(BaseException):
        pass

    def report(rows):
        module.write(sizes, rows, 1, True)
        raise Cut

    with pytest.raises(Cut):
        module.rows_of(256, sizes, rounds=1, report=report)
    page = (tmp_path / "results" / "spectra.md").read_text(encoding="utf-8")
    assert page.count("| 256 |") == 1
    assert "This run was cut short." in page


def test_pieces_for_a_gpu_end_at_their_limits_and_are_summed_up(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("run_on_gpu")
    code = {"good": "print('9 passed')", "bad": "raise SystemExit(3)", "slow": "import time; time.sleep(60)"}
    limits = {"good": 50, "bad": 50, "slow": 1}
    chosen = [module.Piece(name, (sys.executable, "-S", "-c", line), limits[name]) for name, line in code.items()]
    outcomes = module.run_all(chosen, tmp_path / "new", minutes=5)
    assert [outcome.how for outcome in outcomes] == ["passed", "failed, status 3", "timed out after 1 s"]
    assert [outcome.how for outcome in module.run_all(chosen[:1], tmp_path, minutes=0)] == ["not begun"]
    assert "| good | passed |" in (tmp_path / "new" / "summary.md").read_text(encoding="utf-8")
    assert (tmp_path / "new" / "logs" / "good.log").read_text(encoding="utf-8") == "9 passed\n"


def test_every_file_with_tests_of_a_gpu_is_a_piece(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("run_on_gpu")
    names = [piece.name for piece in module.pieces(None, tiny=True)]
    assert len(set(names)) == len(names)
    assert "test_capture_on_a_gpu" in names[0]
    assert {Path(piece.command[1]).name for piece in module.pieces(None, tiny=False)} > {"spectra.py", "tokens.py"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("astro_science", "joint-*/answers.pt"),
        ("spectra_science", "residual-*/done"),
        ("graphs_science", "*/result.json"),
    ],
)
def test_a_benchmark_of_science_that_is_killed_goes_on_where_it_was(name, first, tmp_path):
    runs = tmp_path / "runs"
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--tiny", "--runs", str(runs)]
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as child:
        while not (done := list(runs.glob(first))):
            assert child.poll() is None, "it ended before its first result"
            time.sleep(0.05)
        os.killpg(child.pid, signal.SIGKILL)
    written = {file: file.stat().st_mtime_ns for file in done}
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "not finished" not in again.stdout
    assert {file: file.stat().st_mtime_ns for file in done} == written
    assert not list(runs.rglob("*.part"))


def test_a_file_of_a_benchmark_is_whole_or_not_there(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    science = importlib.import_module("science")

    def half(path):
        path.write_text("{", encoding="utf-8")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        science.kept(tmp_path / "a.json", half)
    assert not (tmp_path / "a.json").exists()
    assert science.kept(tmp_path / "a.json", lambda path: path.write_text("{}", encoding="utf-8")).read_text() == "{}"
