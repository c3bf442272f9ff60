"""Static analysis of a checkpoint's pickle by walking its opcodes; nothing is imported, called or allocated."""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from treadle.checkpoint.safe.claims import (
    CALLABLE,
    DATA,
    REBUILDS,
    Made,
    Named,
    PickleError,
    TensorEntry,
    dtype_name,
    shortened,
    sizes_of,
    storage_of,
    tensor_of,
)

_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_RENAMED = {"torch.tensor._rebuild_from_type_v2": "torch._tensor._rebuild_from_type_v2"}


@dataclass
class Walk:
    """Result of the analysis.

    Attributes:
        value: the tree, with :class:`TensorEntry` for tensors; None if the pickle is damaged.
        globals: names that an unpickler would import.
        refused: why the pickle must not be loaded; empty if it may.
    """

    value: Any = None
    globals: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)

    @property
    def foreign(self) -> list[str]:
        """Names other than those of tensors and plain values, which could run code."""
        return sorted(name for name in self.globals if name not in CALLABLE and name not in DATA)


def walk_pickle(pickle: bytes, storages: Mapping[str, int]) -> Walk:
    """Walk a pickle's opcodes and return what it would build and, if applicable, why it must be refused.

    Args:
        pickle: content of ``data.pkl`` in an archive of ``torch.save``.
        storages: bytes of each storage's record, by its key.

    Example:
        >>> walk_pickle(b"cos\\nsystem\\n.", {}).refused
        ['it holds pickled objects (os.system), neither tensors nor plain values, which could run code']
    """
    walk = Walk()
    machine = _Machine(walk, storages)
    try:
        walk.value, end = machine.follow(pickle)
        if end != len(pickle):
            walk.refused.append("it has data after the end of its pickle")
    except PickleError as error:
        walk.refused.append(str(error))
    except Exception as error:  # noqa: BLE001  (whatever a mangled stream does to the stack)
        walk.refused.append(f"its pickle is damaged ({type(error).__name__})")
    foreign = walk.foreign
    if foreign:
        named = ", ".join(shortened(name) for name in foreign[:3]) + (" and more" if len(foreign) > 3 else "")
        walk.refused.insert(
            0, f"it holds pickled objects ({named}), neither tensors nor plain values, which could run code"
        )
    return walk


class _Machine:
    """Pickle machine that records calls without making them."""

    def __init__(self, walk: Walk, storages: Mapping[str, int]):
        self.walk = walk
        self.storages = storages
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def follow(self, pickle: bytes) -> tuple[Any, int]:
        """Run to the end and return the tree and the end position of the pickle."""
        rest = io.BytesIO(pickle)
        position, memo, unpack = 0, self.memo, struct.unpack_from
        while True:
            code = pickle[position]
            position += 1
            if code == _BINPUT:
                memo[pickle[position]] = self.stack[-1]
                position += 1
            elif code == _LONG_BINPUT:
                memo[unpack("<I", pickle, position)[0]] = self.stack[-1]
                position += 4
            elif code == _BINGET:
                self.stack.append(memo[pickle[position]])
                position += 1
            elif code == _LONG_BINGET:
                self.stack.append(memo[unpack("<I", pickle, position)[0]])
                position += 4
            elif code == _BININT1:
                self.stack.append(pickle[position])
                position += 1
            elif code == _BINFLOAT:
                self.stack.append(unpack(">d", pickle, position)[0])
                position += 8
            elif code in _ACTIONS:
                _ACTIONS[code](self)
            elif code == _STOP:
                return self.stack.pop(), position
            else:
                rest.seek(position)
                self.run(chr(code), rest)
                position = rest.tell()

    def run(self, code: str, rest: BinaryIO) -> None:
        """Run one of the rare opcodes, or one with an argument of variable length."""
        opcode = _OPCODES.get(code)
        if opcode is None:
            raise PickleError("its pickle is damaged (an unknown opcode)")
        argument = None if opcode.arg is None else opcode.arg.reader(rest)
        if opcode.name == "GLOBAL":
            self.stack.append(self.named(*str(argument).split(" ", 1)))
        elif opcode.name in _PUSHES:
            self.stack.append(argument)
        elif opcode.name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif opcode.name not in ("PROTO", "FRAME"):
            raise PickleError(f"its pickle uses {opcode.name}, which torch.save never does")

    def named(self, module: str, attribute: str) -> Named:
        name = f"{_PYTHON_2.get(module, module)}.{attribute}"
        name = _RENAMED.get(name, name)
        self.walk.globals.add(name)
        return Named(name)

    def items(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise PickleError("its pickle is damaged (a tuple of nothing)")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def extend(self, items: Sequence[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Made):
            raise PickleError("its pickle appends to something that is not a list")

    def set_items(self, items: Sequence[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Made) and target.function == "collections.OrderedDict":
            target.state = target.state if isinstance(target.state, dict) else {}
            target = target.state
        if isinstance(target, dict):
            target.update(zip(items[::2], items[1::2], strict=True))
        elif not isinstance(target, Made):
            raise PickleError("its pickle sets items of something that is not a dict")

    def set_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Named) or not isinstance(arguments, tuple):
            raise PickleError("its pickle calls something that is not a function")
        self.stack.append(self.call(function.name, arguments))

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name not in CALLABLE:
            if name in DATA:
                self.walk.refused.append(f"its pickle calls {shortened(name)}, which could allocate without bound")
            return Made(name, arguments)
        short = name.rpartition(".")[2]
        if short in REBUILDS:
            return tensor_of(short, arguments)
        if short.startswith("_rebuild_parameter"):
            return arguments[0]
        if short == "_rebuild_meta_tensor_no_storage":
            return TensorEntry(sizes_of(arguments[1]), f"{dtype_name(arguments[0])} (no memory)", 0)
        if short == "_rebuild_from_type_v2" and isinstance(arguments[0], Named):
            return self.call(arguments[0].name, arguments[2])
        if name == "_codecs.encode" and (len(arguments) != 2 or arguments[1] != "latin1"):
            raise PickleError("its pickle encodes bytes as torch.save never does")
        return Made(name, arguments)

    def make(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        named = shortened(kind.name) if isinstance(kind, Named) else "something that is not a class"
        self.walk.refused.append(f"its pickle makes an object of {named}")
        self.stack.append(Made(named, arguments))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Made) and target.function == "collections.OrderedDict" and isinstance(state, dict):
            return  # versions of a module's state dict
        self.walk.refused.append("its pickle sets the state of an object")

    def stack_global(self) -> None:
        attribute, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self.named(str(module), str(attribute)))

    def persistent(self) -> None:
        self.stack.append(storage_of(self.stack.pop(), self.storages))


_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
_BINPUT, _LONG_BINPUT, _BINGET, _LONG_BINGET, _BININT1, _BINFLOAT, _STOP = b"qrhjKG."
_PUSHES = {
    "BININT", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINSTRING", "SHORT_BINBYTES", "BINBYTES",
}  # fmt: skip
_ACTIONS: dict[int, Callable[[_Machine], Any]] = {
    ord(code): action
    for code, action in (
        ("(", _Machine.mark),
        ("t", lambda m: _replace(m, tuple)),
        ("\x85", lambda m: m.tuple_of(1)),
        ("\x86", lambda m: m.tuple_of(2)),
        ("\x87", lambda m: m.tuple_of(3)),
        ("N", lambda m: m.stack.append(None)),
        ("\x88", lambda m: m.stack.append(True)),
        ("\x89", lambda m: m.stack.append(False)),
        (")", lambda m: m.stack.append(())),
        ("]", lambda m: m.stack.append([])),
        ("}", lambda m: m.stack.append({})),
        ("\x8f", lambda m: m.stack.append(Made("builtins.set", ()))),
        ("a", lambda m: m.extend([m.stack.pop()])),
        ("e", lambda m: m.extend(m.items())),
        ("s", _Machine.set_one),
        ("u", lambda m: m.set_items(m.items())),
        ("R", _Machine.reduce),
        ("\x81", _Machine.make),
        ("b", _Machine.build),
        ("\x93", _Machine.stack_global),
        ("Q", _Machine.persistent),
    )
}


def _replace(machine: _Machine, container: Callable[[list[Any]], Any]) -> None:
    items = machine.items()
    machine.stack.append(container(items))
