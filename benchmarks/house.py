"""Structure of the source as a Markdown table: rooms, arrows, and writes to the engine.

    python benchmarks/house.py                 # the source next to this folder
    python benchmarks/house.py --root OTHER    # that of another checkout

It only reads the source. A room is a top-level module or package of ``treadle``. An arrow is a pair of rooms of which
one imports the other, at run time (also inside functions) or only under TYPE_CHECKING. An engine attribute is a name
that ``Engine`` or its base declares with a type, or that their methods assign on ``self``; properties do not count. An
outside write is an assignment to an attribute of ``engine``, ``trainer``, ``self.engine``, ``self._engine`` or
``self.trainer`` outside the engine's file or folder.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ENGINE_NAMES = ("engine", "trainer")
Arrow = tuple[str, str]


class House:
    """The syntax trees of a checkout, and counts over them."""

    def __init__(self, root: Path):
        self.package = root / "src" / "treadle"
        self.trees: dict[Path, ast.Module] = {}
        self.lines: dict[Path, int] = {}
        for path in sorted(self.package.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            relative = path.relative_to(self.package)
            self.trees[relative], self.lines[relative] = ast.parse(text), len(text.splitlines())
        self.modules = [p for p in self.trees if len(p.parts) == 1 and p.stem not in ("__init__", "__main__")]
        self.rooms = sorted({room_of(path) for path in self.trees} - {"__init__", "__main__"})

    def lines_by_room(self) -> Counter[str]:
        """Return the lines of each room, the largest first."""
        counts: Counter[str] = Counter()
        for path, lines in self.lines.items():
            counts[room_of(path)] += lines
        return counts

    def arrows(self) -> tuple[set[Arrow], set[Arrow]]:
        """Return the arrows at run time, and those under TYPE_CHECKING that are not there at run time."""
        found: dict[bool, set[Arrow]] = {False: set(), True: set()}
        for path, tree in self.trees.items():
            if room_of(path) in self.rooms:
                hidden = for_types_only(tree)
                for node in ast.walk(tree):
                    for target in imported(node, path):
                        if target in self.rooms and target != room_of(path):
                            found[id(node) in hidden].add((room_of(path), target))
        return found[False], found[True] - found[False]

    def _engine_place(self) -> tuple[Path, ast.ClassDef]:
        for path, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and node.name == "Engine":
                    return path, node
        raise SystemExit("no class Engine in the source")

    def engine_attributes(self) -> set[str]:
        """Return the names that Engine and its base declare with a type, or assign on ``self``."""
        place, engine = self._engine_place()
        bases = {base.id for base in engine.bases if isinstance(base, ast.Name)}
        beside = [tree for path, tree in self.trees.items() if len(place.parts) > 1 and path.parent == place.parent]
        based = [node for tree in beside for node in tree.body if isinstance(node, ast.ClassDef) and node.name in bases]
        names = set()
        for kind in [engine, *based]:
            names |= {node.target.id for node in kind.body if isinstance(node, ast.AnnAssign)}
            names |= {
                target.attr
                for node in ast.walk(kind)
                for target in targets(node)
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            }
            names -= {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
        return names

    def outside_writes(self) -> list[tuple[str, str]]:
        """Return the file and the attribute of each write to an engine from outside."""
        place, _ = self._engine_place()
        return [
            (path.as_posix(), target.attr)
            for path, tree in self.trees.items()
            if path != place and (len(place.parts) == 1 or room_of(path) != room_of(place))
            for node in ast.walk(tree)
            for target in targets(node)
            if isinstance(target, ast.Attribute) and is_engine(target.value)
        ]

    def engine_first(self) -> int:
        """Count functions whose first parameter, after ``self``, is an engine or a trainer."""
        count = 0
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    names = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]
                    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
                    count += names[:1] != [] and names[0] in ENGINE_NAMES
        return count

    def functions_of_engines(self) -> int:
        """Count those of them at the top of a module."""
        return sum(
            isinstance(node, ast.FunctionDef) and bool(node.args.args) and node.args.args[0].arg in ENGINE_NAMES
            for tree in self.trees.values()
            for node in tree.body
        )


def room_of(path: Path) -> str:
    """Return the name of a file's room."""
    return path.parts[0] if len(path.parts) > 1 else path.stem


def for_types_only(tree: ast.Module) -> set[int]:
    """Return the ids of the nodes below ``if TYPE_CHECKING``."""
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }


def imported(node: ast.AST, path: Path) -> Iterator[str]:
    """Yield the rooms that an import statement of a file names."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.startswith("treadle."):
                yield alias.name.split(".")[1]
    elif isinstance(node, ast.ImportFrom):
        parts = (node.module or "").split(".")
        if node.level:
            parts = ["treadle", *path.parts[: len(path.parts) - node.level], *(parts if node.module else [])]
        if parts[0] == "treadle":
            yield from parts[1:2] or [alias.name for alias in node.names]


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the targets of a statement, with tuples unpacked."""
    if isinstance(node, ast.Assign):
        waiting = list(node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
        waiting = [node.target]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and len(node.args) > 1:
        name = node.args[1]
        literal = isinstance(name, ast.Constant) and isinstance(name.value, str)
        waiting = [ast.Attribute(node.args[0], name.value, ast.Store())] if literal else []
    else:
        waiting = []
    while waiting:
        target = waiting.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            waiting.extend(target.elts)
        else:
            yield target.value if isinstance(target, ast.Starred) else target


def is_engine(value: ast.expr) -> bool:
    """Return whether an expression is named like an engine."""
    text = ast.unparse(value)
    return text in ENGINE_NAMES or text in ("self.engine", "self._engine", "self.trainer")


def table(house: House) -> str:
    """Return the counts as a Markdown table, and the lines of each room below it."""
    runtime, types_only = house.arrows()
    writes = house.outside_writes()
    rows = {
        "lines": sum(house.lines.values()),
        "files": len(house.trees),
        "top-level modules": len(house.modules),
        "rooms": len(house.rooms),
        "arrows between rooms": len(runtime | types_only),
        "of them at run time": len(runtime),
        "of them under TYPE_CHECKING only": len(types_only),
        "pairs of rooms that import each other": sum((b, a) in runtime | types_only for a, b in runtime | types_only)
        // 2,
        "engine attributes": len(house.engine_attributes()),
        "outside writes to an engine": len(writes),
        "attributes written from outside": len({attribute for _, attribute in writes}),
        "files that write to an engine": len({file for file, _ in writes}),
        "functions that take engine or trainer first": house.engine_first(),
        "of them at the top of a module": house.functions_of_engines(),
    }
    text = "| count | number |\n| --- | --- |\n" + "\n".join(f"| {name} | {number} |" for name, number in rows.items())
    by_room = "\n".join(f"| {room} | {lines} |" for room, lines in house.lines_by_room().most_common())
    return f"{text}\n\n| room | lines |\n| --- | --- |\n{by_room}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="a checkout of treadle")
    print(table(House(parser.parse_args().root)))


if __name__ == "__main__":
    main()
