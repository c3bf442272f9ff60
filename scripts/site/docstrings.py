"""Reads the docstrings of treadle for the reference pages; griffe loads this, see `extensions` in mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|mod|exc|data):`~?([^`]+)`")


class TreadleDocstrings(griffe.Extension):
    """Turns what Sphinx and readers of source know into what griffe knows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring: `Example:` holds doctests, a role is code, `::` opens a block that is indented."""
        if obj.docstring is not None:
            text = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            if obj.is_class:  # griffe looks for the type of what a function yields
                text = re.sub(r"^(\s*)Yields:$", r"\1What it yields:", text, flags=re.MULTILINE)
            text = ROLE.sub(r"`\1`", text)
            obj.docstring.value = re.sub(r"(\w)::$", r"\1:", text, flags=re.MULTILINE)
