"""Documents name tests that exist, and pages that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from treadle.cli.main import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_and_file_that_a_document_names_exists(document):
    text = document.read_text(encoding="utf-8")
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{document.name}: {name}"
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


# peft 0.21 asks a model of transformers 5.24 by the old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
# torch_geometric compiles functions with torch.jit.script when it is imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    "name", ["astro.md", "data-on-ranks.md", "distributed.md", "exchange.md", "graphs.md", "hugging-face.md"]
)
def test_the_blocks_of_a_document_run_one_after_another(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    names: dict[str, object] = {}
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for language, block in blocks:
        if language == "python":
            exec(compile(block, name, "exec"), names)
            continue
        for command in block.splitlines():
            with pytest.raises(SystemExit) as left:
                main(shlex.split(command)[1:])
            assert left.value.code == 0, command
