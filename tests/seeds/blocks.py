"""Takes the Python blocks out of a seed document and rewrites their import lines, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path


def python_blocks(name: str) -> list[str]:
    """Return the ```python blocks of ``tests/seeds/<name>.md``, dedented."""
    text = (Path(__file__).parent / f"{name}.md").read_text(encoding="utf-8")
    found = []
    for indent, body in re.findall(r"^([ ]*)```python\n(.*?)^[ ]*```", text, flags=re.MULTILINE | re.DOTALL):
        found.append("\n".join(line.removeprefix(indent) for line in body.splitlines()))
    return found


def rewrite_imports(block: str, roots: dict[str, str]) -> str:
    """Replace the module of each ``from X import`` whose X starts with a key of ``roots``."""
    lines = []
    for line in block.splitlines():
        match = re.match(r"from ([\w.]+) import (.*)", line)
        root = next((roots[key] for key in roots if match and match.group(1).startswith(key)), None)
        lines.append(f"from {root} import {match.group(2)}" if match and root else line)
    return "\n".join(lines)
