"""Rules for every source file."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted((REPOSITORY / "src").rglob("*.py"))
OWN = sorted([*SOURCES, *(REPOSITORY / "tests").rglob("*.py")])
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def short(path):
    return path.relative_to(REPOSITORY).as_posix()


def inside(path):
    """Return the parts of a path below the repository, whose own folders may have any name."""
    return path.relative_to(REPOSITORY).parts


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path):
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def where(path, node):
    return f"{short(path)}:{node.lineno}"


def test_there_are_sources_to_look_at():
    assert len(SOURCES) > 30


def test_the_first_statement_is_the_future_import():
    for path in OWN:
        body = [
            node
            for node in tree_of(path).body
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        ]
        assert body, f"{short(path)}: an empty file has no reason to be"
        assert ast.unparse(body[0]) == "from __future__ import annotations", short(path)


def test_no_function_is_longer_than_a_screen():
    long = [where(p, f) for p in SOURCES for f in functions(p) if f.end_lineno - f.lineno + 1 > 60]
    assert long == []


def test_nothing_prints_outside_the_command_line():
    calls = [
        where(path, node)
        for path in SOURCES
        if "cli" not in inside(path)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert calls == []


def test_no_file_is_read_with_weights_only_off():
    off = [
        where(path, node.value)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.keyword) and node.arg == "weights_only" and ast.unparse(node.value) != "True"
    ]
    assert off == []


def test_every_load_of_torch_says_weights_only_and_the_cpu():
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("weights_only") == "True", where(path, node)
                assert "cpu" in given.get("map_location", ""), where(path, node)


def test_no_error_is_swallowed():
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{where(path, node)}: a bare except"
                broad = ast.unparse(node.type) in ("Exception", "BaseException")
                silent = all(isinstance(inner, (ast.Pass, ast.Continue)) for inner in node.body)
                assert not (broad and silent), f"{where(path, node)}: swallows everything"
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                caught = {ast.unparse(argument) for argument in node.args}
                assert not caught & {"Exception", "BaseException"}, where(path, node)


def test_no_return_in_a_finally_hides_an_error():
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Try):
                for statement in node.finalbody:
                    hidden = [inner for inner in ast.walk(statement) if isinstance(inner, (ast.Return, ast.Break))]
                    assert not hidden, where(path, node)


def test_no_default_is_shared_between_calls():
    for path in SOURCES:
        for function in functions(path):
            defaults = [*function.args.defaults, *function.args.kw_defaults]
            assert not any(isinstance(default, MUTABLE) for default in defaults), where(path, function)


def code_without_texts(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


FACES = [p for p in SOURCES if p.name in ("trainer.py", "epochs.py") or "faces" in inside(p)]


@pytest.mark.parametrize("path", FACES, ids=short)
def test_a_face_has_no_loop_of_its_own(path):
    code = code_without_texts(path)
    for word in ("for batch in", ".backward(", "optimizer.step", "autocast", "torch.save"):
        assert word not in code, word


def test_there_are_faces_to_look_at():
    assert {short(path) for path in FACES} >= {"src/treadle/faces/step.py", "src/treadle/spectra/trainer.py"}


def test_only_the_engine_runs_backward_and_the_optimizer():
    # The guard steps the optimizer for the engine: it alone knows whether the optimizer skips on the device.
    # The flight recorder runs a refused backward pass once more, to see where it went wrong; it changes no weight.
    # The loops of graphs are functions for scripts that own their loop, which they took from mspe; no face uses them.
    allowed = {
        "src/treadle/engine/loop.py", "src/treadle/optim/nonfinite.py", "src/treadle/optim/late_flags.py",
        "src/treadle/hooks/flight.py", "src/treadle/graphs/loops.py",
    }  # fmt: skip
    for word in (".backward(", "optimizer.step("):
        users = {short(path) for path in SOURCES if word in code_without_texts(path)}
        assert users, word
        assert users <= allowed, word


def documented_by_bases(tree, node):
    """The methods that base classes document, in the same file or in one of ours that it imports them from."""
    classes = {other.name: other for other in tree.body if isinstance(other, ast.ClassDef)}
    for other in tree.body:
        path = REPOSITORY / "src" / f"{(getattr(other, 'module', None) or '').replace('.', '/')}.py"
        if isinstance(other, ast.ImportFrom) and not other.level and path.is_file():
            names = {alias.name for alias in other.names}
            classes |= {c.name: c for c in tree_of(path).body if isinstance(c, ast.ClassDef) and c.name in names}
    bases = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
    return {
        method.name
        for base in bases
        for method in base.body
        if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
    }


def test_everything_public_says_what_it_does():
    silent = []
    for path in SOURCES:
        if any(part.startswith("_") and part != "__init__.py" for part in inside(path)):
            continue
        tree = tree_of(path)
        assert ast.get_docstring(tree), f"{short(path)} has no docstring"
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                silent += [] if ast.get_docstring(node) else [where(path, node)]
                inherited = documented_by_bases(tree, node) if isinstance(node, ast.ClassDef) else set()
                for inner in node.body if isinstance(node, ast.ClassDef) else ():
                    public = isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_")
                    if public and not inner.decorator_list and inner.name not in inherited:
                        silent += [] if ast.get_docstring(inner) else [where(path, inner)]
    assert silent == []


THIRD_PERSON = re.compile(
    r"(Adds|Appends|Asks|Begins|Builds|Calls|Collects|Computes|Decides|Does|Emits|Evaluates|Extracts|Finds|Follows|Gathers"
    r"|Gives|Hands|Holds|Keeps|Knows|Lets|Loads|Makes|Measures|Observes|Opens|Owns|Packs|Puts|Raises|Reads|Replays|Returns"
    r"|Says|Seeds|Sends|Shows|Shuffles|Stands|Takes|Tells|Trains|Tries|Turns|Wraps|Writes|Yields)\b"
)


def test_docstrings_are_imperative_and_those_of_classes_are_noun_phrases():
    found = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
                found += [f"{where(path, node)} {text[:20]}"] if THIRD_PERSON.match(text) else []
    assert found == []


@cache
def tracked():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [REPOSITORY / name for name in done.stdout.split("\0") if name]


def test_no_tracked_file_names_a_path_of_one_machine():
    folders = "|".join(["home", "work", "Users", "root", "mnt"])
    pattern = re.compile(rf"(?<![\w.}}/*-])/(?:{folders})/\w")
    found = []
    for path in tracked():
        if not path.is_file() or "seeds" in inside(path):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{short(path)}:{n}" for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    assert found == []


def test_no_test_folder_is_a_package():
    assert [short(path) for path in OWN if path.name == "__init__.py" and "tests" in inside(path)] == []


# Texts of errors of other packages that are looked into, since these packages give no other sign.
FOREIGN_TEXTS = {
    "config/trainers.py": "Python's own TypeError names the constructor that refuses its arguments",
    "config/yaml_files.py": "PyYAML and OmegaConf put the place into the text",
    "engine/out_of_memory.py": "memory of the host runs out as a RuntimeError of torch",
}
_READERS = {"startswith", "endswith", "match", "search", "fullmatch", "sub", "findall", "replace", "removeprefix"}


def _is_text_of_an_error(node):
    """Return whether an expression is `str(error)` or an f-string of it."""
    call = (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and len(node.args) == 1
    )
    return call and isinstance(node.args[0], ast.Name) and node.args[0].id in ("error", "err", "exc", "exception")


def _reads_a_text(node):
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return any(_is_text_of_an_error(right) for right in node.comparators)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READERS):
        return False
    return any(_is_text_of_an_error(part) for outer in (node.func.value, *node.args) for part in ast.walk(outer))


def test_no_code_reads_the_text_of_our_own_errors():
    found = {
        path.relative_to(REPOSITORY / "src" / "treadle").as_posix()
        for path in SOURCES
        if any(_reads_a_text(node) for node in ast.walk(tree_of(path)))
    }
    assert found == set(FOREIGN_TEXTS)


def test_the_argument_of_an_error_is_data():
    """A message that begins with `name=` names an argument: it belongs into `argument=`."""
    found = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ConfigError"):
                continue
            first = node.args[0] if node.args and not node.keywords else None
            text = first.values[0] if isinstance(first, ast.JoinedStr) else first
            if isinstance(text, ast.Constant) and re.match(r"[A-Za-z_][\w.]*=", str(text.value)):
                found.append(where(path, node))
    assert found == []
