"""The table of what is expected of a trainer: each row has a test that exists, or a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from" / "expected.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\|(.+)\|$", PAGE, flags=re.MULTILINE)[2:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split(" | ")[0].strip())
def test_a_row_has_its_test_or_a_reason(row):
    cells = [cell.strip() for cell in row.split(" | ")]
    assert len(cells) == 4, row
    held = cells[3]
    if held.startswith("✗"):
        assert len(held.split()) > 8, "a reason takes a sentence"
        return
    assert held.startswith("✓")
    (path, _, name) = re.fullmatch(r"✓ `(tests/[\w/]+(?:\.py)?)(::(\w+))?`", held).groups()
    assert (ROOT / path).exists(), path
    if name:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), held


def test_the_table_names_each_of_the_four_libraries():
    sources = " ".join(row.split(" | ")[1] for row in ROWS)
    assert all(name in sources for name in ("Lightning", "HF", "Accelerate", "Composer"))
    assert len(ROWS) > 50


README = (ROOT / "README.md").read_text(encoding="utf-8")
OURS = {
    "resume in the middle of an epoch, equal to the bit": "tests/resume/test_every_step.py",
    "random state of data workers in checkpoints": "tests/resume/test_matrix.py",
    "a check that your script resumes exactly; replay of one step": "tests/unit/cli/test_verify.py",
    "non-finite gradients never reach the weights": "tests/unit/test_engine_step.py",
    "the whole step as one CUDA graph, with one argument": "tests/unit/test_capture_on_a_gpu.py",
    "live bar, best checkpoint, early stopping, trackers": "tests/unit/test_bar.py",
    "DDP and FSDP by a setting": "tests/distributed/test_step_parallelize.py",
    "several optimizers, each with its own step": "tests/unit/test_several_optimizers.py",
    "upload to the Hugging Face hub with a model card": "tests/unit/test_hub.py",
}  # what holds each ✓ of ours in the README; numbers are of docs/guide/speed.md


def test_each_feature_of_the_readme_has_a_test():
    table = re.findall(r"^\| ([^|]+) \| (✓|✗) \| [^|]+ \| [^|]+ \| [^|]+ \|$", README, flags=re.MULTILINE)
    assert len(table) > 8
    assert [feature for feature, here in table if here == "✓"] == [*OURS]
    assert [path for path in OURS.values() if "def test_" not in (ROOT / path).read_text(encoding="utf-8")] == []
