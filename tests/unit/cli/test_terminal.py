"""What the commands print on narrow terminals, in files, and where the locale lacks characters."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from command_kit import treadle
from run_page_kit import make_run
from treadle.cli.console import print_named, print_table, show_loading, show_report, show_table
from treadle.cli.main import write_in_any_locale
from treadle.cli.verify.report import print_report
from treadle.engine.screens import open_screen
from treadle.runs import report
from treadle.runs.start_block import print_block
from treadle.runs.verify.runs import Verification
from treadle.spectra.report import results

SCORE = {"mean": 0.723, "std": 0.122}
PROBE = {"num_folds": 5, "num_features": 64, "j_minus_k_r2": SCORE, "spectral_class_balanced_accuracy": SCORE}
METRICS = {
    "baselines": {"mean_spectrum_val": 0.4, "mean_spectrum_test": 0.3, "row_mean": 1.0}, "best_epoch": 2, "epochs": 2,
    "val_loss": 0.1, "test_loss": 0.2, "probe": {"chemomae": PROBE}, "clusters": {"k": 4}, "weights": "best_model.pt",
}  # fmt: skip


def printed(width, *, encoding="utf-8"):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        write_in_any_locale()
    show_report(results(METRICS), "runs/a", Console(file=stream, width=width))
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_table_loses_nothing_on_a_narrow_terminal(width):
    assert "                                      J-K, R²  M/L/T, balanced accuracy" in printed(width).splitlines()
    assert [line.rstrip() for line in printed(width).splitlines()] == [
        line.rstrip() for line in printed(200).splitlines()
    ]


def test_a_narrow_terminal_gets_the_columns_of_a_table_in_parts():
    rows = [[f"model {row}", *(f"{row}.{column} ± 0.038" for column in range(6))] for row in range(2)]
    table = report.Table(["labels", *map(str, range(6))], rows, title="Errors", width=12)
    shown = {}
    for width in (40, 200):
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        show_table(table, console)
        shown[width] = console.file.getvalue()
    assert max(len(line.rstrip()) for line in shown[40].splitlines()) <= 40
    assert sorted(shown[40].split()) == sorted([*shown[200].split(), *2 * ["labels", "model", "0", "model", "1"]])
    assert shown[40].count("Errors") == 1


def test_a_table_that_fits_is_as_wide_as_its_columns():
    table = Table("a", "b", box=None, pad_edge=False)
    table.add_row("1", "2")
    console = Console(file=io.StringIO(), width=80)
    print_table(table, console)
    assert console.file.getvalue() == "a  b\n1  2\n"


def test_characters_that_the_locale_lacks_are_written_in_other_words():
    assert "J-K, R2" in printed(80, encoding="ascii")
    assert "0.723 +- 0.122" in printed(80, encoding="ascii")
    assert "0.723 ± 0.122" in printed(80, encoding="latin-1")
    assert "0.723 ± 0.122" in printed(80)


def test_a_name_that_no_words_are_known_for_does_not_end_a_command(tmp_path, monkeypatch):
    make_run(tmp_path / "Läufe…", steps=20)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert treadle("runs", tmp_path) == 0
    stream.flush()
    written = stream.buffer.getvalue()
    assert b"L?ufe..." in written
    assert b"\x1b" not in written  # no colours where it is no terminal


LONG = {
    "model": "a transformer of 4 layers with 180,729 parameters in all",
    "files": "/a/path/" + "that-stays-whole/" * 4,
}


@pytest.mark.parametrize("width", [40, 60, 200])
def test_a_terminal_breaks_lines_between_words_and_a_file_gets_them_whole(width):
    shown = {}
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
        print_block(LONG, console)
        print_named("likely cause: ", LONG["model"], console)
        shown[terminal] = console.file.getvalue()
    lines = shown[True].splitlines()
    assert all(len(line) <= width or line.split()[-1] == LONG["files"] for line in lines)
    assert " ".join(shown[True].split()) == " ".join(shown[False].split())
    assert len(shown[False].splitlines()) == 3
    assert all(line.startswith(" " * 10) for line in lines[1:2] if width == 40)


def test_a_line_above_the_bar_is_broken_between_words():
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    bar = open_screen(console, "starting")
    bar.print_above(f"warning: {LONG['model']} {LONG['files']}")
    bar.stop()
    written = console.file.getvalue()
    assert LONG["files"] in written
    assert "180,729" in written


def test_loading_is_shown_on_a_terminal_alone(monkeypatch):
    for terminal, expected in ((True, "loading graphs\n"), (False, "")):
        console = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)
        monkeypatch.setattr("treadle.cli.console.message_console", lambda console=console: console)
        show_loading("graphs")
        assert console.file.getvalue() == expected


def test_units_in_brackets_are_no_markup():
    table = report.Table(["[x]", "weight [g/mol]"], [["[a]", "[b]"]], title="Errors [c]", notes=["in [g/mol]"])
    console = Console(file=io.StringIO(), width=80)
    show_table(table, console)
    shown = console.file.getvalue().split()
    assert shown == ["Errors", "[c]", "[x]", "weight", "[g/mol]", "[a]", "[b]", "in", "[g/mol]"]


def test_a_verdict_breaks_between_words():
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    print_report(Verification("train.py", [], 0, Path("runs"), "EXACT", last_step=24, records=33), console)
    lines = console.file.getvalue().splitlines()
    verdict = lines[[line.startswith("EXACT: ") for line in lines].index(True) :]
    assert len(verdict) > 1
    assert max(map(len, verdict)) <= 40
    assert " ".join(line.strip() for line in verdict).endswith("equal the uninterrupted run's to the bit (0 s)")
