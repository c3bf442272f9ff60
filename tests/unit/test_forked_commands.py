"""The helper that forks commands: what comes out is what a new interpreter would give."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch

from processes import Forked, python

CODE = """
    import atexit, logging, os, random, signal, sys, threading, warnings
    import torch
    atexit.register(print, "at exit")
    last = threading.Event()
    threading.Thread(target=lambda: (last.wait(), threading.Event().wait(0.05), print("a thread"))).start()
    print(sys.argv, os.getcwd(), os.environ.get("MINE"), __name__, torch.initial_seed(), torch.get_num_threads())
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, logging.root.handlers, logging.root.level)
    logging.basicConfig(format="%(levelname)s %(message)s")
    logging.getLogger("treadle").warning("said")
    warnings.warn("a warning", UserWarning)
    last.set()
    sys.exit({leave!r})
"""


@pytest.mark.parametrize(("leave", "code"), [(0, 0), (None, 0), (7, 7), ("in words", 1)])
def test_streams_arguments_folder_and_end_are_those_of_an_interpreter(tmp_path, leave, code, monkeypatch):
    monkeypatch.setattr(logging.root, "level", logging.ERROR)
    before = torch.get_rng_state()
    done = python(
        "-c", textwrap.dedent(CODE).replace("{leave!r}", repr(leave)), "a", "b", cwd=tmp_path,
        env={**os.environ, "MINE": "yes", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == [
        f"['-c', 'a', 'b'] {tmp_path} yes __main__ 67280421310721 1", "True [] 30", "a thread", "at exit",
    ]  # fmt: skip
    assert done.stderr.splitlines()[0] == "WARNING said"
    assert "UserWarning: a warning" in done.stderr
    assert ("in words" in done.stderr) == (leave == "in words")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_traceback_and_a_signal_end_it_as_they_end_an_interpreter(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import beside\nraise ValueError(beside.WORD)\n")
    (tmp_path / "beside.py").write_text("WORD = 'beside the script'\n")
    done = python(str(script))
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: beside the script")
    assert python("-c", "import os; os.kill(os.getpid(), 15)").returncode == -signal.SIGTERM
    assert python("-m", "this").stdout.startswith("The Zen")


def test_one_that_takes_too_long_is_killed_and_no_other_command_is_taken():
    with pytest.raises(subprocess.TimeoutExpired):
        python("-c", "import time; time.sleep(60)", timeout=0.2)
    with pytest.raises(AssertionError, match="ls"):
        Forked(["ls"])
    process = Forked([sys.executable, "-c", "print(input())"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.communicate("a line\n") == ("a line\n", None)


def test_two_processes_draw_different_numbers_and_this_one_hears_of_none():
    random.seed(0)
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    with warnings.catch_warnings(record=True) as heard:
        said = {python("-c", f"import warnings; warnings.warn('x'); {code}").stdout for _ in range(2)}
    assert len(said) == 2
    assert heard == []
