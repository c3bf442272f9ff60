"""An object's attributes are assigned in the file that defines its class, or by the function that created it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "treadle"
FILES = sorted(SOURCE.rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

OF_OTHER_LIBRARIES = {
    # of torch, PyTorch Geometric, rich and the standard library, whose attributes share a name with one of treadle's
    "module", "parameter", "scheduler", "loader", "generator", "ctx", "torch.backends.cudnn", "graph", "data",
    "console", "held", "memo[identity]",
}  # fmt: skip
OPEN_TO_ALL = {"hooks", "workspace", "should_stop"}  # attributes of an engine that users assign too
ALLOWED = {
    # the functions beside the engine are its methods, in files by topic
    ("engine/attempt.py", "engine.attempt"), ("engine/block.py", "engine.attempt"),
    ("engine/epoch_end.py", "engine.target"), ("engine/parts.py", "engine.settings"),
    ("engine/preflight.py", "engine.stray_parameters"),
    # a command arranges the hooks of a user's run before it starts
    ("runs/replay.py", "hook.checkpoints"), ("runs/replay.py", "hook.path"), ("runs/replay.py", "hook.foreign_states"),
    ("runs/script.py", "hook.path"), ("runs/tracking.py", "hook.held"), ("runs/verify/child.py", "hook.interval"),
    # records without behaviour, filled in by the code that measures or reads them
    ("cli/bench/session.py", "result"), ("cli/bench/session.py", "self.result"),
    ("cli/bench/target.py", "self.hook.result"), ("checkpoint/safe/pickled.py", "target.state"),
    ("graphs/datasets/registry.py", "source.graphs.encodings"),
}  # fmt: skip


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(node):
    """Return a name or an attribute of a name as text, which is faster than ast.unparse, else None."""
    if isinstance(node, ast.Name):
        return node.id
    known = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return f"{node.value.id}.{node.attr}" if known else None


def stores(node):
    """Yield the attributes that a statement assigns."""
    if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.With)):
        return
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    targets += [item.optional_vars for item in getattr(node, "items", ()) if isinstance(node, ast.With)]
    for target in targets:
        for inner in ast.walk(target) if isinstance(target, ast.expr) else ():
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                yield inner


def created(scope):
    """Return the names, and attributes of self, to which a function or class assigns the result of a call."""
    return {
        name
        for node in ast.walk(scope)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if (name := dotted(target)) is not None
    }


@cache
def declared(tree):
    """Return the attributes that the classes of a file declare or assign to self."""
    found = set()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        found |= {node.target.id for node in kind.body if isinstance(node, ast.AnnAssign)}
        assigned = [node for node in kind.body if isinstance(node, ast.Assign)]
        found |= {name.id for node in assigned for name in ast.walk(node) if isinstance(name, ast.Name)}
        found |= {each.attr for node in ast.walk(kind) for each in stores(node) if dotted(each.value) == "self"}
    return found


def foreign(tree):
    """Yield the assignments to attributes of objects that the function did not create and the file does not define."""
    here = declared(tree)

    def visit(node, own):
        if isinstance(node, ast.ClassDef):
            own = {name for name in created(node) if name.startswith("self.")}
        elif isinstance(node, FUNCTIONS):
            own = own | {"self", "cls"} | {name for name in created(node) if "." not in name}
        yield from (each for each in stores(node) if each.attr not in here and ast.unparse(each.value) not in own)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                yield from visit(child, own)

    return visit(tree, frozenset())


def test_attributes_are_assigned_by_their_owners():
    ours = set().union(*(declared(tree_of(path)) for path in FILES))
    found, used = [], set()
    for path in FILES:
        place = path.relative_to(SOURCE).as_posix()
        for attribute in foreign(tree_of(path)):
            owner, name = ast.unparse(attribute.value), ast.unparse(attribute)
            if attribute.attr not in ours or attribute.attr in OPEN_TO_ALL or owner in OF_OTHER_LIBRARIES:
                continue
            allowed = {(place, owner), (place, name)} & ALLOWED
            used |= allowed
            if not allowed:
                found.append(f"{place}:{attribute.lineno} {name}")
    assert found == [], "give each to a method of its class"
    assert used == ALLOWED, "an exception that nothing needs"


def test_a_foreign_assignment_is_seen():
    text = """
class Owner:
    def own(self, other):
        made = Owner()
        self.a, other.b = 1, 2
        made.c = self.parts.d = 3
        for other.e in ():
            other.a += 1
def outside():
    local = Owner()
    local.b = engine.events.f = 4
"""
    assert [ast.unparse(each) for each in foreign(ast.parse(text))] == [
        "other.b", "self.parts.d", "other.e", "engine.events.f",
    ]  # fmt: skip
