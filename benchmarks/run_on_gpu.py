"""Everything that needs a GPU: the tests marked gpu, file by file, and the benchmarks, each with a time limit.

    python benchmarks/run_on_gpu.py results --data molecules.pt     # everything, most important first
    python benchmarks/run_on_gpu.py results --only spectra tokens   # the pieces with one of these in their name
    python benchmarks/run_on_gpu.py results --rounds 2              # fewer rounds than the benchmarks' own
    python benchmarks/run_on_gpu.py results --minutes 25            # the limit of each piece
    python benchmarks/run_on_gpu.py results --list                  # the pieces and their limits, without running them
    python benchmarks/run_on_gpu.py results --tiny                  # a trial on any machine

The folder gets the tables, a log of each piece, and summary.md, which is rewritten after each piece. ``--data`` is
made by ``molecules.py``. The peers are those that can be imported; see ``spectra.py`` for chemomae. All pieces together
should need about half an hour on an H200, by older figures and estimates; they have not been run there together.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = (
    "test_capture_on_a_gpu", "test_no_face_waits_on_a_gpu", "resume/test_on_a_gpu", "test_trainer_on_a_gpu",
    "test_bench_on_a_gpu", "test_compiling_on_a_gpu",
)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A command.

    Attributes:
        name: the name in the summary and of its log.
        command: runs in the root of the repository.
        limit: seconds, after which it is killed.
    """

    name: str
    command: tuple[str, ...]
    limit: int


@dataclass(frozen=True)
class Outcome:
    """How a piece ended.

    Attributes:
        name: the name of the piece.
        how: passed, failed, timed out or not begun.
        seconds: its duration.
        last: the last line of its log.
    """

    name: str
    how: str
    seconds: float = 0.0
    last: str = ""


# -- the pieces ---------------------------------------------------------------------------------------------------


def pieces(data: Path | None, *, tiny: bool, rounds: int | None = None) -> Iterator[Piece]:
    """Yield all pieces, most important first."""
    fewer = ("--rounds", str(rounds)) if rounds else ()
    tests = test_files()
    first = [path for name in FIRST for path in tests if name in path]
    molecules = ("--data", str(data.resolve())) if data and not tiny else ()
    yield from (of_tests(path) for path in first)
    yield of_script("spectra", tiny, *fewer, limit=420)
    yield of_script("graphs_gpu", tiny, *molecules, *fewer, limit=540)
    yield of_script("tokens", tiny, *fewer, limit=540)
    for target in ("spectra", "graphs", "astro", "text"):
        compiled = ("--compile",) if target == "text" and not tiny else ()
        yield Piece(f"bench-{target}", (sys.executable, "-m", "treadle", "bench", target, *compiled), 240)
    yield from (of_tests(path) for path in tests if path not in first)
    yield of_script("loader", tiny, *fewer, limit=420)
    for workload in ("mlp", "d128", "d256"):
        chosen = () if tiny else ("--workloads", workload)
        yield of_script("overhead_gpu", tiny, *chosen, *fewer, limit=360, name=f"overhead_gpu-{workload}")
    halves = ("--halves", "--workloads", "mlp", *(() if tiny else ("d128",)))
    yield of_script("overhead_gpu", tiny, *halves, *fewer, limit=120, name="overhead_gpu-halves")
    yield of_script("eager_gpu", tiny, limit=120)
    yield of_script("compile", tiny, limit=540)
    yield of_script("token_losses", tiny, *(("--dry", "--repeats", "1") if tiny else ()), limit=180)
    yield of_script("causal_attention", tiny, limit=180)


def test_files() -> list[str]:
    """Return the files with tests marked gpu, below the root."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found if "mark.gpu" in path.read_text(encoding="utf-8")]


def of_tests(path: str) -> Piece:
    command = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--durations=5", path)
    return Piece(path.removesuffix(".py").replace("/", "-"), command, 300)


def of_script(script: str, tiny: bool, *arguments: str, limit: int, name: str = "") -> Piece:
    command = (sys.executable, f"benchmarks/{script}.py", *(("--tiny",) if tiny else ()), *arguments)
    return Piece(name or script, command, limit)


# -- running them -------------------------------------------------------------------------------------------------


def run(piece: Piece, folder: Path, limit: float) -> Outcome:
    """Run a piece, and kill its processes when it has ended, or at its limit."""
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    environment = {
        **os.environ, "PYTHONPATH": source, "PYTHONUNBUFFERED": "1", "BENCHMARK_RESULTS": str(folder.resolve()),
    }  # fmt: skip
    start, log = time.monotonic(), folder / "logs" / f"{piece.name}.log"
    with log.open("w", encoding="utf-8") as stream:
        child = subprocess.Popen(
            piece.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=stream,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            how = "passed" if child.wait(limit) == 0 else f"failed, status {child.returncode}"
        except subprocess.TimeoutExpired:
            how = f"timed out after {limit:.0f} s"
        finally:
            kill_group(child)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return Outcome(piece.name, how, time.monotonic() - start, lines[-1] if lines else "")


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and its descendants, such as workers that outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def write_summary(folder: Path, outcomes: Sequence[Outcome]) -> str:
    """Write the summary and return it."""
    lines = ["| piece | outcome | s | last line of its log |", "|---|---|---|---|"]
    lines += [f"| {o.name} | {o.how} | {o.seconds:.0f} | {o.last[:120].replace('|', '/')} |" for o in outcomes]
    text = "\n".join(lines) + "\n"
    (folder / "summary.md").write_text(text, encoding="utf-8")
    return text


def run_all(chosen: Sequence[Piece], folder: Path, minutes: float) -> list[Outcome]:
    """Run the pieces one after another, as long as there is time."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    end, outcomes = time.monotonic() + 60 * minutes, list[Outcome]()
    for piece in chosen:
        limit = min(piece.limit, end - time.monotonic())
        outcomes.append(run(piece, folder, limit) if limit > 0 else Outcome(piece.name, "not begun"))
        write_summary(folder, outcomes)
        print(f"{piece.name}: {outcomes[-1].how}, {outcomes[-1].seconds:.0f} s; {outcomes[-1].last[:120]}", flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the results")
    parser.add_argument("--only", nargs="+", metavar="PART", help="pieces that have one of these in their name")
    parser.add_argument("--data", type=Path, help="molecules, made by molecules.py; else made-up graphs")
    parser.add_argument("--rounds", type=int, help="of the benchmarks that have rounds; else their own numbers")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all pieces together")
    parser.add_argument("--list", action="store_true", help="name the pieces, run nothing")
    parser.add_argument("--tiny", action="store_true", help="the trial form of each benchmark")
    options = parser.parse_args()
    chosen = [
        piece
        for piece in pieces(options.data, tiny=options.tiny, rounds=options.rounds)
        if not options.only or any(part in piece.name for part in options.only)
    ]
    if options.list:
        print(*(f"{piece.name}, at most {piece.limit} s" for piece in chosen), sep="\n")
        return
    outcomes = run_all(chosen, options.folder, options.minutes)
    print("\n" + write_summary(options.folder, outcomes))
    if any(outcome.how != "passed" for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
