"""The engine owns its state: few attributes, declared with their types, and written by nobody else."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from torch import nn

from treadle.engine import Engine
from treadle.engine.base import EngineBase

SOURCE = Path(__file__).parents[2] / "src" / "treadle"
MAY_BE_ASSIGNED = {"hooks", "workspace", "should_stop"}
ENGINES = {"engine", "trainer", "self.engine", "self._engine", "self.trainer"}
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).parts[0] != "engine"]


class Task:
    def step(self, model, batch, totals=None, generator=None):
        raise NotImplementedError


def test_the_engine_has_few_attributes_and_all_are_declared():
    model = nn.Linear(1, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), Task(), device="cpu")
    engine.prepare()
    assert set(vars(engine)) == set(EngineBase.__annotations__)
    assert len(EngineBase.__annotations__) <= 25


def written(tree):
    """The attributes of engines that a file assigns."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for inner in ast.walk(target) if isinstance(target, ast.expr) else ():
                stored = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
                if stored and ast.unparse(inner.value) in ENGINES:
                    yield inner.attr


def test_nothing_outside_assigns_an_engine_attribute():
    found = {path: set(written(ast.parse(path.read_text(encoding="utf-8")))) - MAY_BE_ASSIGNED for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


def test_an_assignment_is_seen():
    assert list(written(ast.parse("engine.step += 1; a, trainer.task = 1, 2; self._engine.hooks = []"))) == [
        "step", "task", "hooks",
    ]  # fmt: skip


def built(tree):
    """Return the lines where a file makes an engine."""
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Engine"]


def test_a_face_gets_its_engine_from_build_engine():
    found = {path: built(ast.parse(path.read_text(encoding="utf-8"))) for path in FILES}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_an_engine_that_is_made_is_seen():
    assert built(ast.parse("a = 1\nself._engine = Engine(model, optimizer, task)")) == [2]
