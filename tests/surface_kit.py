"""List of every public name of the library with its signature, and comparison of two such lists.

    python tests/surface_kit.py              # writes tests/house/surface.txt; refuses to drop or change what is there
    python tests/surface_kit.py --breaking   # also if names or parameters are lost

One name a line: the name, its kind, its signature. Module prefixes are left out of annotations and defaults, so a line
does not depend on where something is defined, nor on the version of Python or torch. A second name of the same object
is listed as ``is`` and the first name. A member inherited from a listed base has a line only where it differs from the
base's. Attributes of instances are those that a class documents under "Attributes:", and all public ones of an
``Engine``.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
STORED = ROOT / "tests" / "house" / "surface.txt"
REFRESH = "python tests/surface_kit.py"

# Modules whose `__all__` is public, the root first: it has the canonical names.
MODULES = (
    "treadle", "treadle.hooks", "treadle.checkpoint", "treadle.data", "treadle.config", "treadle.builder",
    "treadle.exchange", "treadle.datasets", "treadle.functional", "treadle.spectra", "treadle.spectra.clustering",
    "treadle.spectra.chemomae",
    "treadle.graphs", "treadle.graphs.encodings", "treadle.graphs.datasets", "treadle.astro", "treadle.text",
)  # fmt: skip
# Names outside any `__all__` that the documentation uses.
NAMES = (
    "treadle.engine.Engine",
    "treadle.hooks.base.BaseHook", "treadle.hooks.base.EVENTS", "treadle.hooks.base.STEP_EVENTS",
    "treadle.hooks.base.listeners", "treadle.hooks.base.looks_only", "treadle.hooks.base.read_only",
    "treadle.hooks.base.reaches_hooks",
    "treadle.functional.settings.TrainingSettings", "treadle.functional.settings.read_settings",
    "treadle.functional.losses.loss_weight",
    "treadle.distributed.control_group",
    "treadle.runs.pack.Pack", "treadle.runs.pack.Run", "treadle.runs.pack.Opened", "treadle.runs.pack.Results",
    "treadle.runs.pack.Evaluation", "treadle.runs.pack.Predictions",
    "treadle.runs.report.Report", "treadle.runs.report.Table", "treadle.runs.report.Picture",
    "treadle.datasets.splits.split_by_group",
    "treadle.graphs.datasets.molecules.graph_from_smiles",
)  # fmt: skip
PROTOCOLS = (
    "__call__", "__len__", "__iter__", "__next__", "__getitem__", "__contains__", "__enter__", "__exit__", "__add__",
    "__eq__",
)  # fmt: skip


# -- the list ---------------------------------------------------------------------------------------------------------


def surface() -> dict[str, str]:
    """Return kind and signature of every public name, sorted by name."""
    found = dict(_public())
    known: dict[int, str] = {}
    for name, value in found.items():
        if isinstance(value, (type, types.FunctionType)):
            known.setdefault(id(value), name)
    lines: dict[str, str] = {}
    for name, value in found.items():
        first = known.get(id(value), name)
        if first != name:
            lines[name] = f"is {first}"
        elif isinstance(value, type):
            lines |= _lines_of_class(name, value, known)
        else:
            lines[name] = _described(value)
    for name in loggers():
        lines[f"logger {name}"] = "logger"
    return dict(sorted(lines.items()))


def _public() -> Iterator[tuple[str, Any]]:
    for module in MODULES:
        loaded = _module(module)
        if loaded is not None:
            yield module, loaded
            yield from ((f"{module}.{name}", getattr(loaded, name)) for name in loaded.__all__ if hasattr(loaded, name))
    for full in NAMES:
        module, _, name = full.rpartition(".")
        loaded = _module(module)
        if hasattr(loaded, name):
            yield full, getattr(loaded, name)


def _module(name: str) -> Any:
    """Return a module, or None if it is gone; the comparison then lists its former names."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("treadle"):
            raise
        return None


def loggers() -> list[str]:
    """Return the names of the library's loggers, given as a literal or as the name of a module."""
    found = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger") and node.args:
                name = ast.unparse(node.args[0])
                found.add(module if name == "__name__" else name.strip("'\""))
    return sorted(name for name in found if re.fullmatch(r"treadle[\w.]*", name))


def _described(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return "module"
    if isinstance(value, (types.FunctionType, functools.partial)):
        return f"function {_signature(value)}"
    if isinstance(value, typing.TypeVar) or typing.get_origin(value) is not None or isinstance(value, types.UnionType):
        return "type alias"
    if isinstance(value, (bool, int, float, str)) or _is_plain_tuple(value):
        return f"constant = {value!r}"
    if callable(value) and not _is_ours(type(value)):
        return f"function {_signature(value)}"
    return f"constant: {type(value).__name__}"


def _is_plain_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, (bool, int, float, str)) for item in value)


# -- classes ----------------------------------------------------------------------------------------------------------


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "treadle"


def _lines_of_class(name: str, kind: type, known: Mapping[int, str]) -> dict[str, str]:
    listed = [base for base in kind.__mro__[1:] if id(base) in known]
    lines = {name: _class_line(kind, listed, known)}
    for member in _members(kind):
        line = _member(kind, member)
        if not any(member in _members(base) and _member(base, member) == line for base in listed):
            lines[f"{name}.{member}"] = line
    for member in _of_instances(kind):
        lines.setdefault(f"{name}.{member}", "attribute")
    return lines


def _of_instances(kind: type) -> set[str]:
    documented = re.search(r"^Attributes:\n(.*?)(?=^\S|\Z)", inspect.getdoc(kind) or "", flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^    ([\w, `]+):", documented[1] if documented else "", flags=re.MULTILINE)
    names = {name.strip("` ") for line in lines for name in line.split(",")}
    if kind.__name__ == "Engine":
        model = torch.nn.Linear(1, 1)
        engine = kind(model, torch.optim.SGD(model.parameters()), types.SimpleNamespace(step=print), device="cpu")
        names |= {name for name in vars(engine) if not name.startswith("_")}
    return names


def _class_line(kind: type, listed: list[type], known: Mapping[int, str]) -> str:
    others = {
        base.__name__
        for ours in kind.__mro__
        if _is_ours(ours)
        for base in ours.__bases__
        if not _is_ours(base) and base.__module__ not in ("builtins", "typing", "abc", "typing_extensions")
    }
    others |= {base.__name__ for base in kind.__mro__ if issubclass(base, Exception) and base.__module__ == "builtins"}
    bases = [*(known[id(base)] for base in listed), *sorted(others - {"Exception", "BaseException"})]
    return f"class {_constructor(kind)}" + (f" bases {', '.join(bases)}" if bases else "")


def _constructor(kind: type) -> str:
    if issubclass(kind, enum.Enum):
        return "(enum)"
    for base in kind.__mro__:
        for name in ("__init__", "__new__"):
            made = vars(base).get(name)
            made = made.__func__ if isinstance(made, staticmethod) else made
            if _is_ours(base) and isinstance(made, types.FunctionType) and "_no_init" not in made.__name__:
                return _signature(made, bound=True, returns=False)
    return "(inherited)"


@functools.cache
def _members(kind: type) -> tuple[str, ...]:
    """Return the public members that the library's classes define, fields without a default included."""
    found: set[str] = set()
    for base in kind.__mro__:
        if _is_ours(base):
            found |= {name for name in {*vars(base), *vars(base).get("__annotations__", {})} if _is_public(name, base)}
    return tuple(sorted(found))


def _is_public(name: str, base: type) -> bool:
    if name in PROTOCOLS:
        member = vars(base).get(name)
        return isinstance(member, types.FunctionType) and member.__code__.co_filename.endswith(".py")
    return not name.startswith("_")


def _member(kind: type, name: str) -> str:
    base = next(b for b in kind.__mro__ if _is_ours(b) and (name in vars(b) or name in _annotations(b)))
    value = vars(base).get(name)
    if isinstance(value, (staticmethod, classmethod)):
        bound = isinstance(value, classmethod)
        return f"{type(value).__name__} {_signature(value.__func__, bound=bound)}"
    if isinstance(value, types.FunctionType):
        return f"method {_signature(value, bound=True)}"
    if isinstance(value, (property, functools.cached_property)):
        getter = value.fget if isinstance(value, property) else value.func
        settable = isinstance(value, property) and value.fset is not None
        return f"{'settable ' if settable else ''}property {_signature(getter, bound=True)[2:].strip()}".strip()
    annotation = next((_annotations(b)[name] for b in kind.__mro__ if name in _annotations(b)), None)
    return "attribute" if annotation is None else f"attribute: {_annotation(annotation)}"


def _annotations(kind: type) -> Mapping[str, Any]:
    return vars(kind).get("__annotations__", {})


# -- signatures -------------------------------------------------------------------------------------------------------


def _signature(function: Callable[..., Any], *, bound: bool = False, returns: bool = True) -> str:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[bound:]
    parts, star = [], False
    for number, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
        star |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        parts.append(_parameter(parameter))
        after = parameters[number + 1 : number + 2]
        if parameter.kind is parameter.POSITIONAL_ONLY and not (after and after[0].kind is parameter.kind):
            parts.append("/")
    text = f"({', '.join(parts)})"
    if returns and signature.return_annotation is not signature.empty:
        text += f" -> {_annotation(signature.return_annotation)}"
    return text


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {_default(parameter.default)}"
    return text


class _Unqualified(ast.NodeTransformer):
    """Transformer of ``torch.nn.Module`` into ``Module``."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Name(node.attr, node.ctx)


def _annotation(annotation: Any) -> str:
    if annotation is None or annotation is type(None):
        return "None"
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    text = annotation if isinstance(annotation, str) else repr(annotation)
    try:
        return ast.unparse(_Unqualified().visit(ast.parse(text, mode="eval")))
    except SyntaxError:
        return "Any"


def _default(value: Any) -> str:
    """Return a default as an expression; ``...`` if there is no short and stable one."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_default, value))}{',' * (len(value) == 1)})"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"float({str(value)!r})"
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, (type, types.FunctionType)):
        return value.__name__ if value.__name__.isidentifier() else "..."
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value).rpartition(".")[2] if type(value).__name__ == "dtype" else f"device({str(value)!r})"
    return "..."


# -- the comparison ---------------------------------------------------------------------------------------------------


def stored() -> dict[str, str]:
    """Return the list stored in the file."""
    lines = STORED.read_text(encoding="utf-8").splitlines() if STORED.exists() else []
    return dict(line.split(" | ", 1) for line in lines)


def losses(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a line for each lost name or parameter that user code may need."""
    found = []
    for name, line in before.items():
        present = _found(now, name)
        if present is None:
            found.append(f"{name} is gone; it was: {line}")
        elif line.startswith("is "):
            same = _canonical(now, name) == _canonical(now, line[len("is ") :])
            found += [] if same else [f"{name} {line} no longer"]
        else:
            found += [f"{name}: {text}" for text in _losses_of_line(line, present)]
    return found


def _canonical(lines: Mapping[str, str], name: str) -> str:
    line = lines.get(name, "")
    return _canonical(lines, line[len("is ") :]) if line.startswith("is ") else name


def _found(lines: Mapping[str, str], name: str) -> str | None:
    """Return the line of a name, which may be an alias or a member inherited from a base."""
    name = _canonical(lines, name)
    if name in lines:
        return lines[name]
    owner, _, member = name.rpartition(".")
    owner = _canonical(lines, owner)
    bases = lines.get(owner, "").partition(" bases ")[2].split(", ")
    places = [f"{place}.{member}" for place in (owner, *bases)]
    return next((lines[place] for place in places if place in lines), None)


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a line for each difference of two lists."""
    added = [f"+ {name} | {line}" for name, line in now.items() if name not in before]
    gone = [f"- {name} | {line}" for name, line in before.items() if name not in now]
    both = [f"~ {name} | {line}  ->  {now[name]}" for name, line in before.items() if now.get(name, line) != line]
    return [*gone, *both, *added]


def _losses_of_line(before: str, now: str) -> list[str]:
    if before == now:
        return []
    old, new = _parsed(before), _parsed(now)
    if old is None or new is None or old.kind != new.kind:
        kinds = before.split()[0].rstrip(":"), now.split()[0].rstrip(":")
        readable = kinds[0] in ("attribute", "property") and kinds[1] in ("attribute", "property", "settable")
        fine = readable or (kinds[0] == kinds[1] and not (before + now).startswith("class"))
        return [] if fine else [f"was {before!r}, is {now!r}"]
    found = [f"base {base} is gone" for base in sorted(_short(old.bases) - _short(new.bases))]
    missing = [name for name in old.all_names if name not in new.all_names]
    found += [f"parameter {name} is gone" for name in missing]
    kept = [name for name in old.positional if name not in missing]
    if [name for name in new.positional if name in kept] != kept or new.positional[: len(kept)] != kept:
        found.append(f"parameters by position were ({', '.join(old.positional)}), are ({', '.join(new.positional)})")
    found += [f"parameter {name} can no longer be given by name" for name in old.named - new.named - set(missing)]
    found += [f"parameter {name} has no default any more" for name in sorted(old.optional & new.required)]
    found += [f"new parameter {name} has no default" for name in sorted(new.required - set(old.all_names))]
    return found


class _Parsed:
    """Parameters in one line of the list."""

    def __init__(self, kind: str, arguments: ast.arguments, bases: list[str]):
        self.kind, self.bases = kind, bases
        by_position = [*arguments.posonlyargs, *arguments.args]
        by_name = [argument.arg for argument in arguments.kwonlyargs]
        self.positional = [argument.arg for argument in by_position]
        self.named = {argument.arg for argument in arguments.args} | set(by_name)
        self.all_names = [*self.positional, *by_name]
        self.all_names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
        self.all_names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
        self.required = set(self.positional[: len(self.positional) - len(arguments.defaults)])
        self.required |= {name for name, default in zip(by_name, arguments.kw_defaults, strict=True) if default is None}
        self.optional = {name for name in [*self.positional, *by_name] if name not in self.required}


def _short(bases: list[str]) -> set[str]:
    return {base.rpartition(".")[2] for base in bases}


def _parsed(line: str) -> _Parsed | None:
    line, _, bases = line.partition(" bases ")
    found = re.fullmatch(r"(\w+) (\(.*\)(?: -> .+)?)", line)
    if found is None or found[2] in ("(inherited)", "(enum)"):
        return None
    function = ast.parse(f"def f{found[2]}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return _Parsed(found[1], function.args, bases.split(", ") if bases else [])


def main() -> None:
    """Write the list."""
    now = surface()
    lost = losses(stored(), now)
    if lost and "--breaking" not in sys.argv[1:]:
        sys.exit("\n".join([*lost, f"not written; if this is meant: {REFRESH} --breaking"]))
    print("\n".join(changes(stored(), now)) or "no change")
    STORED.write_text("".join(f"{name} | {line}\n" for name, line in now.items()), encoding="utf-8")


if __name__ == "__main__":
    main()
