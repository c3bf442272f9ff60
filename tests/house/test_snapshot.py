"""The public names and their signatures are those of ``surface.txt``."""

from __future__ import annotations

import pytest

from surface_kit import REFRESH, changes, losses, stored, surface


# torch_geometric compiles functions with torch.jit.script when it is imported, which torch calls deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_no_public_name_or_parameter_is_lost_and_the_list_is_complete():
    before, now = stored(), surface()
    assert losses(before, now) == [], f"a user's code may break; if this is meant: {REFRESH} --breaking"
    assert changes(before, now) == [], f"the list is not up to date: {REFRESH}"


def test_the_list_is_sorted():
    assert list(stored()) == sorted(stored())


BEFORE = {
    "t.f": "function (a: int, b: int = 1, *, c: str = 'x', **rest: Any) -> int",
    "t.Base": "class ()",
    "t.Base.run": "method (a: int) -> None",
    "t.One": "class (x: int) bases t.Base, Module",
    "t.One.go": "method () -> None",
    "t.One.size": "attribute: int",
    "t.two.One": "is t.One",
}
LOST = {
    "a name": ({"t.f": None}, "t.f is gone"),
    "a method": ({"t.One.go": None}, "t.One.go is gone"),
    "a base": ({"t.One": "class (x: int) bases t.Base"}, "t.One: base Module is gone"),
    "an alias": ({"t.two.One": "class (x: int)"}, "t.two.One is t.One no longer"),
    "a parameter": ({"t.f": "function (a, *, c = 'x', **rest)"}, "t.f: parameter b is gone"),
    "keywords": ({"t.f": "function (a, b = 1, *, c = 'x')"}, "t.f: parameter **rest is gone"),
    "a name of a parameter": ({"t.Base.run": "method (b) -> None"}, "t.Base.run: parameter a is gone"),
    "an order": ({"t.f": "function (b, a = 1, *, c = 'x', **rest)"}, "by position were (a, b), are (b, a)"),
    "a place": ({"t.f": "function (n = 0, a = 1, b = 1, *, c = 'x', **rest)"}, "were (a, b), are (n, a, b)"),
    "by position": ({"t.f": "function (a, *, b = 1, c = 'x', **rest)"}, "by position were (a, b), are (a)"),
    "by name": ({"t.Base.run": "method (a, /) -> None"}, "parameter a can no longer be given by name"),
    "a default": ({"t.f": "function (a, b, *, c = 'x', **rest)"}, "parameter b has no default any more"),
    "a call": ({"t.f": "function (a, b = 1, *, c = 'x', d, **rest)"}, "new parameter d has no default"),
    "a kind": ({"t.One.size": "method () -> int"}, "t.One.size: was 'attribute: int', is 'method () -> int'"),
}  # fmt: skip
KEPT = {
    "nothing": {},
    "a new name": {"t.g": "function ()"},
    "a new parameter": {"t.f": "function (a: int, b: int = 1, *, c: str = 'x', d: int = 0, **rest: Any) -> int"},
    "another annotation and default": {"t.f": "function (a, b = 2, *, c = 'y', **rest) -> float"},
    "a method of a base": {"t.One.go": None, "t.Base.go": "method () -> None"},
    "a property": {"t.One.size": "property -> int"},
    "another first name": {
        "t.One": "is s.One", "t.One.go": None, "t.One.size": None, "t.two.One": "is s.One",
        "s.One": "class (x: int) bases t.Base, Module", "s.One.go": "method () -> None", "s.One.size": "attribute: int",
    },
}  # fmt: skip


def after(changed):
    return {name: line for name, line in {**BEFORE, **changed}.items() if line is not None}


@pytest.mark.parametrize("case", LOST)
def test_what_breaks_a_users_code_is_named(case):
    changed, text = LOST[case]
    found = losses(BEFORE, after(changed))
    assert [line for line in found if text in line] != [], found


@pytest.mark.parametrize("case", KEPT)
def test_what_breaks_no_code_only_needs_a_new_list(case):
    now = after(KEPT[case])
    assert losses(BEFORE, now) == []
    assert bool(changes(BEFORE, now)) == (case != "nothing")
