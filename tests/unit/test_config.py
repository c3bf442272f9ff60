from __future__ import annotations

import copy
import logging
import math
import os
import pickle
import subprocess
import sys
from collections import OrderedDict, namedtuple
from enum import IntEnum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.config import (
    DELETE,
    REPLACE,
    apply_overrides,
    format_config,
    load_config,
    merge_configs,
    save_config,
)
from treadle.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    """Write a file of the test's folder and return its path."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


# Python files


def test_a_file_gives_its_dict(write):
    assert load_config(write("a.py", "config = {'lr': 0.1, 'layers': [1, (2, 3)]}")) == {
        "lr": 0.1,
        "layers": [1, (2, 3)],
    }


def test_a_path_may_be_a_string(write):
    assert load_config(str(write("a.py", "config = {'lr': 0.1}"))) == {"lr": 0.1}


def test_the_defaults_of_a_callable_are_parameters(write):
    path = write("a.py", "def config(lr=0.1, *, depth=2):\n    return {'lr': lr, 'width': 8 * depth}")
    assert load_config(path) == {"lr": 0.1, "width": 16}
    assert load_config(path, {"depth": 3}) == {"lr": 0.1, "width": 24}
    assert load_config(path, params={"lr": 0.5, "depth": 1}) == {"lr": 0.5, "width": 8}


def test_a_parameter_goes_to_every_callable_that_has_it(write):
    write("base.py", "def config(width=1, only=0): return {'base': width, 'only': only}")
    child = write("a.py", "parents = 'base.py'\ndef config(width=2): return {'child': width}")
    assert load_config(child) == {"base": 2, "only": 0, "child": 2}
    assert load_config(child, {"width": 5, "only": 6}) == {"base": 5, "only": 6, "child": 5}


def test_an_unknown_parameter_names_the_file_and_the_nearest_one(write):
    path = write("a.py", "def config(depth=1): return {1: 1 / 0}")
    with pytest.raises(ConfigError, match=r"a\.py: unknown parameter 'detph'; did you mean 'depth'\?"):
        load_config(path, {"detph": 2})


def test_parameters_for_files_without_any_are_refused(write):
    with pytest.raises(ConfigError, match=r"unknown parameter 'lr'; none of the files takes parameters"):
        load_config(write("a.py", "config = {'lr': 1}"), {"lr": 2})


def test_a_parameter_without_a_default_must_be_given(write):
    path = write("a.py", "def config(lr): return {'lr': lr}")
    with pytest.raises(ConfigError, match=r"a\.py: the parameter 'lr' of config has no default"):
        load_config(path)
    assert load_config(path, {"lr": 1}) == {"lr": 1}


def test_a_positional_only_parameter_is_refused(write):
    with pytest.raises(ConfigError, match=r"'lr' of config is positional-only"):
        load_config(write("a.py", "def config(lr=1, /): return {}"))


def test_star_arguments_are_no_parameters(write):
    path = write("a.py", "def config(*args, **kwargs): return {'n': len(args) + len(kwargs)}")
    assert load_config(path) == {"n": 0}
    with pytest.raises(ConfigError, match="unknown parameter 'x'"):
        load_config(path, {"x": 1})


def test_the_default_of_a_file_replaces_its_parents_and_a_parameter_without_one_takes_theirs(write):
    write("far.py", "def config(steps, warmup=100, **rest): return {'far': steps, 'rest': rest}")
    write("near.py", "parents = 'far.py'\ndef config(steps=1000, extra=False): return {'near': [steps, extra]}")
    child = write("a.py", "parents = 'near.py'\ndef config(steps=5000, *, warmup): return {'a': steps + warmup}")
    heir = write("b.py", "parents = 'near.py'\ndef config(steps, warmup): return {'b': steps // 10 + warmup}")
    assert load_config(child) == {"far": 5000, "rest": {"extra": False}, "near": [5000, False], "a": 5100}
    assert load_config(heir) == {"far": 1000, "rest": {"extra": False}, "near": [1000, False], "b": 200}
    found = load_config(heir, {"steps": 7, "extra": True})
    assert found == {"far": 7, "rest": {"extra": True}, "near": [7, True], "b": 100}
    assert load_config([heir, write("c.py", "def config(steps=3): return {}")])["near"] == [3, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = 1", "defines neither config nor parents"),
        ("parents = []", "defines neither config nor parents"),
        ("config = [1]", r"config must be a dict or a callable that returns one, not \[1\]"),
        ("config = None", "config must be a dict or a callable"),
        ("def config(): return [1]", "config returned a list; it must return a dict"),
        ("parents = 3", "parents must be a file name or a list of them, not 3"),
        ("parents = ['a', 3]", "parents must be a file name or a list of them"),
    ],
)
def test_a_file_that_gives_no_configuration_is_refused_by_name(write, text, message):
    with pytest.raises(ConfigError, match=rf"wrong\.py: .*{message}"):
        load_config(write("wrong.py", text))


def test_a_missing_file_is_refused_and_the_nearest_named(write):
    path = write("train.py", "config = {}")
    with pytest.raises(ConfigError, match=r"trian\.py: no such configuration file; did you mean 'train.py'\?"):
        load_config(path.with_name("trian.py"))


@pytest.mark.parametrize("name", ["a.json", "a", "folder.d"])
def test_another_kind_of_file_is_refused(write, name):
    with pytest.raises(ConfigError, match=r"ends in \.py, \.yaml or \.yml"):
        load_config(write(name, "{}"))


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such configuration file; its folder has no configuration files"):
        load_config(tmp_path)


def test_an_empty_sequence_of_files_is_refused():
    with pytest.raises(ConfigError, match="sequence of files is empty"):
        load_config([])


@pytest.mark.parametrize(
    ("text", "error"),
    [("1 / 0", ZeroDivisionError), ("def config(): raise KeyError('x')", KeyError), ("(", SyntaxError)],
)
def test_what_a_file_raises_leaves_unchanged(write, text, error):
    before = set(sys.modules)
    with pytest.raises(error):
        load_config(write("a.py", text))
    assert not [name for name in set(sys.modules) - before if "config" in name]


# Parents and sequences


def test_parents_are_merged_before_the_file_farthest_first(write):
    write("far.py", "config = {'a': 'far', 'b': 'far', 'c': 'far', 'd': {'far': 1}}")
    write("near.py", "config = {'b': 'near', 'c': 'near', 'd': {'near': 1}}")
    child = write("child.py", "parents = ['far.py', 'near.py']\nconfig = {'c': 'child', 'd': {'child': 1}}")
    assert load_config(child) == {"a": "far", "b": "near", "c": "child", "d": {"far": 1, "near": 1, "child": 1}}


def test_a_file_with_parents_alone_is_enough(write):
    write("base.py", "config = {'a': 1}")
    assert load_config(write("child.py", "parents = 'base.py'")) == {"a": 1}


def test_parents_are_relative_to_their_file_and_have_parents_themselves(write, monkeypatch, tmp_path):
    write("deep/er/root.py", "config = {'x': 1, 'y': 1}")
    write("deep/base.py", "parents = ('er/root.py',)\nconfig = {'y': 2}")
    write("deep/exp/child.py", "from pathlib import Path\nparents = Path('../base.py')\nconfig = {'z': 3}")
    monkeypatch.chdir(tmp_path)
    assert load_config("deep/exp/child.py") == {"x": 1, "y": 2, "z": 3}


def test_a_parent_may_be_named_without_its_suffix(write):
    write("base.v2.py", "config = {'a': 1}")
    assert load_config(write("child.py", "parents = 'base.v2'")) == {"a": 1}


def test_a_missing_parent_is_refused_by_name(write):
    write("base.py", "config = {}")
    with pytest.raises(ConfigError, match=r"bsae\.py: no such configuration file; did you mean 'base.py'"):
        load_config(write("child.py", "parents = 'bsae.py'"))


def test_a_cycle_of_parents_is_refused_and_shown(write):
    write("a.py", "parents = 'b.py'")
    write("b.py", "parents = 'c.py'")
    write("c.py", "parents = './b.py'")
    with pytest.raises(ConfigError, match=r"cycle: \S*b\.py -> \S*c\.py -> \S*b\.py"):
        load_config(write("a.py", "parents = 'b.py'"))


def test_a_file_that_is_its_own_parent_is_a_cycle(write):
    with pytest.raises(ConfigError, match="cycle"):
        load_config(write("a.py", "parents = 'a.py'\nconfig = {}"))


def test_a_parent_that_two_parents_share_is_merged_once_and_undoes_nothing(write):
    write("root.py", "config = {'x': 'root', 'y': 'root'}")
    write("left.py", "parents = 'root.py'\nconfig = {'x': 'left'}")
    write("right.py", "parents = 'root.py'\nconfig = {'z': 'right'}")
    child = write("child.py", "parents = ['left.py', 'right.py']")
    assert load_config(child) == {"x": "left", "y": "root", "z": "right"}


def test_later_files_of_a_sequence_override_earlier_ones(write):
    first = write("a.py", "config = {'x': {'a': 1, 'b': 1}}")
    second = write("b.py", "config = {'x': {'b': 2}}")
    assert load_config([first, second]) == {"x": {"a": 1, "b": 2}}
    assert load_config((second, first)) == {"x": {"a": 1, "b": 1}}


def test_a_file_of_a_sequence_deletes_keys_of_an_earlier_one_even_if_it_has_parents(write):
    first = write("a.py", "config = {'x': 1, 'y': 1}")
    write("base.py", "config = {'z': 1}")
    second = write("b.py", "from treadle.config import DELETE\nparents = 'base.py'\nconfig = {'x': DELETE}")
    assert load_config([first, second]) == {"y": 1, "z": 1}


# Loading leaves no trace


def test_loading_leaves_nothing_in_modules_path_or_folder(write, tmp_path):
    path = write("json.py", "def config(): return {'name': __name__, 'file': __file__}")
    modules, search = dict(sys.modules), list(sys.path)
    loaded = load_config(path)
    assert loaded["file"] == str(path)
    assert loaded["name"] not in sys.modules
    assert (sys.modules, sys.path) == (modules, search)
    assert [entry.name for entry in tmp_path.iterdir()] == ["json.py"]


def test_two_files_of_one_name_do_not_mix(write):
    first = write("one/base.py", "config = {'a': 1}")
    second = write("two/base.py", "config = {'b': 2}")
    child = write("child.py", "parents = ['one/base.py', 'two/base.py']")
    assert load_config([first, second]) == load_config(child) == {"a": 1, "b": 2}


def test_a_changed_file_is_read_again(write):
    assert load_config(write("a.py", "config = {'a': 1}")) == {"a": 1}
    assert load_config(write("a.py", "config = {'a': 2}")) == {"a": 2}


def test_a_file_may_define_dataclasses_and_load_other_files(write):
    write("inner.py", "config = {'inner': 1}")
    path = write(
        "a.py",
        "from __future__ import annotations\n"
        "from dataclasses import asdict, dataclass\nfrom pathlib import Path\nfrom treadle.config import load_config\n"
        "@dataclass\nclass A:\n    x: int = 1\n"
        "def config():\n    @dataclass\n    class B:\n        y: int = 2\n"
        "    return {**asdict(A()), **asdict(B()), **load_config(Path(__file__).with_name('inner.py'))}",
    )
    assert load_config(path) == {"x": 1, "y": 2, "inner": 1}


def test_the_future_imports_of_the_library_do_not_reach_a_file(write):
    path = write("a.py", "def f(x: 1 + 1): pass\nconfig = {'note': f.__annotations__['x']}")
    assert load_config(path) == {"note": 2}


def test_defaults_and_parameters_are_not_shared_with_what_was_loaded(write):
    path = write("a.py", "def config(sizes=[1], more=None): return {'a': sizes, 'b': sizes, 'more': more}")
    mine = {"deep": [1]}
    loaded = load_config(path, {"more": mine})
    loaded["a"].append(2)
    loaded["more"]["deep"].append(2)
    assert loaded["b"] == [1]
    assert mine == {"deep": [1]}
    assert load_config(path)["a"] == [1]


def test_the_library_and_its_config_load_without_omegaconf_and_yaml():
    code = (
        "import sys, treadle, treadle.config, treadle.builder; "
        "assert not {'omegaconf', 'yaml', 'hydra'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


# Merging


def test_dicts_merge_deeply_and_all_else_is_replaced():
    base = {"a": {"b": {"c": 1, "d": [1, 2]}}, "e": 1, "f": {"g": 1}}
    over = {"a": {"b": {"d": [3]}}, "e": {"x": 1}, "f": 2}
    assert merge_configs(base, over) == {"a": {"b": {"c": 1, "d": [3]}}, "e": {"x": 1}, "f": 2}


def test_none_is_a_value_and_deletes_nothing():
    assert merge_configs({"a": {"b": 1}}, {"a": None}) == {"a": None}


def test_delete_removes_the_key():
    assert merge_configs({"a": {"b": 1, "c": 2}, "d": 1}, {"a": {"b": DELETE}, "d": DELETE}) == {"a": {"c": 2}}


def test_delete_of_an_absent_key_does_nothing_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, "treadle.config"):
        merged = merge_configs(
            {"model": {"depth": 1}}, {"model": {"detph": DELETE}, "new": {"x": DELETE}}, where="a.py"
        )
    assert merged == {"model": {"depth": 1}, "new": {}}
    assert "a.py: model.detph: DELETE of a key that no earlier configuration has" in caplog.messages[0]
    assert "did you mean 'depth'?" in caplog.messages[0]
    assert "new.x" in caplog.messages[1]


def test_delete_in_a_list_is_refused_with_its_place(write):
    path = write("a.py", "from treadle.config import DELETE\nconfig = {'a': {'l': [1, DELETE]}}")
    with pytest.raises(ConfigError, match=r"a\.py: a\.l\[1\]: DELETE removes the key of a dict"):
        load_config(path)


def test_replace_takes_the_place_of_a_dict_instead_of_merging():
    assert merge_configs({"a": {"b": 1}}, {"a": REPLACE({"c": 2})}) == {"a": {"c": 2}}
    assert merge_configs({"a": {"b": 1}}, {"a": REPLACE(3), "n": REPLACE({"x": REPLACE(1)})}) == {"a": 3, "n": {"x": 1}}


def test_the_markers_work_from_files(write):
    write("base.py", "config = {'model': {'type': 'A', 'depth': 3}, 'seed': 1}")
    child = write(
        "a.py",
        "from treadle.config import DELETE, REPLACE\nparents = 'base'\n"
        "config = {'model': REPLACE({'type': 'B'}), 'seed': DELETE}",
    )
    assert load_config(child) == {"model": {"type": "B"}}


def test_delete_stays_itself_when_copied_and_pickled():
    assert copy.deepcopy(DELETE) is copy.copy(DELETE) is pickle.loads(pickle.dumps(DELETE)) is DELETE
    assert repr(DELETE) == "DELETE"


def test_merging_changes_no_input_and_shares_no_container():
    base = {"a": {"b": [1, {"c": 1}]}, "t": ([1],)}
    over = {"a": {"n": {"x": [1]}}, "r": REPLACE({"y": [1]}), "a2": DELETE}
    base["a2"] = {"z": 1}
    before = copy.deepcopy((base, over))
    merged = merge_configs(base, over)
    merged["a"]["b"][1]["c"] = merged["a"]["n"]["x"][0] = merged["r"]["y"][0] = merged["t"][0][0] = 9
    assert (base, over) == before


def test_named_tuples_stay_and_mappings_become_dicts():
    pair = namedtuple("pair", "x y")
    merged = merge_configs({}, {"p": pair(1, [2]), "o": OrderedDict(a=1)})
    assert type(merged["p"]) is pair
    assert type(merged["o"]) is dict


keys = st.text(max_size=3)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(
        ["${a}", "\\${b}", "\\\\${", "'", '"""', "a\nb", "\r\n", "\\", "1e3", "yes", "null", "~", "0x1", "{"]
    )
)


def trees(leaf, *, tuples=True):
    def grow(inner):
        grown = st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)
        return grown | st.lists(inner, max_size=3).map(tuple) if tuples else grown

    return st.dictionaries(keys, st.recursive(leaf, grow, max_leaves=12), max_size=5)


def same(a, b):
    """Equal in value and type, NaN equal to NaN, dicts in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@given(trees(leaves))
def test_merging_with_nothing_and_with_itself_changes_nothing(config):
    assert same(merge_configs(config, {}), config)
    assert same(merge_configs({}, config), config)
    assert same(merge_configs(config, config), config)


# Which names are dicts and which are values is fixed: where two files disagree on that, no grouping can be right.
alike = st.recursive(
    st.dictionaries(st.sampled_from("xyz"), st.integers()),
    lambda inner: st.builds(
        lambda values, dicts: {**values, **dicts},
        st.dictionaries(st.sampled_from("xyz"), st.integers()),
        st.dictionaries(st.sampled_from("abc"), inner),
    ),
    max_leaves=6,
)


@given(alike, alike, alike)
def test_merging_is_associative_where_dicts_meet_dicts(a, b, c):
    assert merge_configs(merge_configs(a, b), c) == merge_configs(a, merge_configs(b, c))


# Overrides


def config():
    return {
        "a": {"b": 1, "c": {"d": 2}},
        "l": [1, {"type": "x"}, "y"],
        "betas": (0.9, 0.99),
        "lr": 0.1,
        "flag": True,
        3: "int",
    }


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("a.b=2", ["a", "b"], 2),
        ("a.c.d=3e-4", ["a", "c", "d"], 3e-4),
        ("a.c=None", ["a", "c"], None),
        ("a.c={'x': [1]}", ["a", "c"], {"x": [1]}),
        ("+a.b=word", ["a", "b"], "word"),
        ("+a.b='3'", ["a", "b"], "3"),
        ("+a.b=", ["a", "b"], ""),
        ("+a.b=x=y", ["a", "b"], "x=y"),
        ("+a.b=a!=b", ["a", "b"], "a!=b"),
        ("+a.b=/data/run-1", ["a", "b"], "/data/run-1"),
        ("+a.b=-=", ["a", "b"], "-="),
        ("+a.b=two\nlines", ["a", "b"], "two\nlines"),
        ("+a.b='\\d'", ["a", "b"], "\\d"),
        ("a.b = 5", ["a", "b"], 5),
        ("+a.b=(1,)", ["a", "b"], (1,)),
        ("+a.b={[]: 1}", ["a", "b"], "{[]: 1}"),
        ("l[0]=x", ["l", 0], "x"),
        ("l[-1]=9", ["l", -1], 9),
        ("l[1].type=z", ["l", 1, "type"], "z"),
        ("betas[0]=0.8", ["betas"], (0.8, 0.99)),
        ("l+=x", ["l"], [1, {"type": "x"}, "y", "x"]),
        ("l+=[1]", ["l"], [1, {"type": "x"}, "y", [1]]),
        ("colours+=x", ["colours"], ["x"]),
        ("a.names+=x", ["a", "names"], ["x"]),
        ("p.q+=x", ["p"], {"q": ["x"]}),
        ("+l[4]=z", ["l"], [1, {"type": "x"}, "y", None, "z"]),
        ("+p.q[1].r=1", ["p"], {"q": [None, {"r": 1}]}),
        ("l-=y", ["l"], [1, {"type": "x"}]),
        ("l-={'type': 'x'}", ["l"], [1, "y"]),
        ("betas+=1", ["betas"], (0.9, 0.99, 1)),
        ("betas-=0.9", ["betas"], (0.99,)),
        ("a.b!=", ["a"], {"c": {"d": 2}}),
        ("l[0]!=", ["l"], [{"type": "x"}, "y"]),
        ("betas[1]!=", ["betas"], (0.9,)),
        ("+a.new=1", ["a", "new"], 1),
        ("+p.q.r=1", ["p"], {"q": {"r": 1}}),
        ("+l[1].lr=1", ["l", 1], {"type": "x", "lr": 1}),
        ("+a.b=7", ["a", "b"], 7),
        ("+a['x.y']=1", ["a", "x.y"], 1),
        ("+[3]=1", [3], 1),
        ("['lr']=1", ["lr"], 1),
    ],
)
def test_each_form_of_override_changes_just_its_place_in_place(override, path, value):
    changed = config()
    inner = changed["a"]
    assert apply_overrides(changed, [override]) is changed
    assert changed["a"] is inner
    found = changed
    for key in path:
        found = found[key]
    assert same(found, value)
    rest, untouched = changed, config()
    rest.pop(path[0]), untouched.pop(path[0], None)
    assert rest == untouched


def test_overrides_are_applied_in_order():
    assert apply_overrides({"l": []}, ["l+=1", "l+=2", "l-=1", "+n={}", "+n.x=1", "n.x=2"]) == {"l": [2], "n": {"x": 2}}


def test_a_single_string_is_one_override():
    assert apply_overrides({"a": 1}, "a=2") == {"a": 2}


def test_a_value_is_not_shared_when_the_same_overrides_are_applied_again():
    overrides = ("+a=[1]",)
    first = apply_overrides({}, overrides)
    first["a"].append(2)
    assert apply_overrides({}, overrides) == {"a": [1]}


def test_removing_takes_the_first_equal_entry_of_the_same_type():
    assert apply_overrides({"l": [1, True, 1]}, ["l-=True"]) == {"l": [1, 1]}
    assert apply_overrides({"l": [2, 1, 3, 1]}, ["l-=1"]) == {"l": [2, 3, 1]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a.bb=1", r"no key 'a\.bb'; did you mean 'a\.b'\?; a new key needs the form '\+a\.bb=1'"),
        ("lrr=1", r"no key 'lrr'; did you mean 'lr'\?"),
        ("aa.c.d=1", r"no key 'aa'; did you mean 'a'\?"),
        ("a.x.y=1", r"no key 'a\.x'; known: b, c"),
        ("a.cc!=", r"no key 'a\.cc'; did you mean 'a\.c'\?$"),
        ("ll+=1", r"no key 'll'; did you mean 'l'\?; a new list needs the form '\+ll=\[1\]'"),
        ("['a.b']=1", r"no key '\['a\.b'\]'|no key \"\['a\.b'\]\""),
        ("[[]]=1", "not a path"),
        ("l[3]=1", r"l has 3 entries and no \[3\]; append with 'l\+=…'"),
        ("+l[-4]=1", r"l has 3 entries"),
        ("l[-4]!=", r"l has 3 entries"),
        ("l.x=1", r"l is a list and takes an index such as \[0\], not 'x'"),
        ("l[True]=1", r"\[True\] is neither an index nor a key"),
        ("[{}]=1", r"\[\{\}\] is neither an index nor a key"),
        ("lr.x=1", r"lr is 0\.1, which has no keys"),
        ("+lr.x=1", r"lr is 0\.1, which has no keys"),
        ("l-=yy", r"l has no entry 'yy'; did you mean 'y'\?"),
        ("lr+=1", r"lr is 0\.1, not a list"),
        ("a-=b", r"not a list; '\+=' and '-=' change lists"),
        ("a.b", "has no '='; the forms are"),
        ("=1", "has no key"),
        ("+=1", "has no key"),
        ("a..b=1", "not a path; write it like 'model"),
        ("a.=1", "not a path"),
        (".a=1", "not a path"),
        ("l[0=1", "not a path"),
        ("l[]=1", "not a path"),
        ("l[0]x=1", "not a path"),
        ("a.b!=1", "'!=' deletes and takes no value"),
        ("+l+=1", r"'\+' before a path goes with '=' only"),
        ("+l!=", r"'\+' before a path goes with '=' only"),
        (3, "has no '='"),
    ],
)
def test_an_override_that_cannot_be_meant_is_refused_and_changes_nothing(override, message):
    changed = config()
    with pytest.raises(ConfigError, match=message) as caught:
        apply_overrides(changed, [override])
    assert str(caught.value).startswith(f"override {override!r}")
    assert changed == config()


def test_all_overrides_are_read_before_the_first_is_applied():
    changed = config()
    with pytest.raises(ConfigError, match="has no '='"):
        apply_overrides(changed, ["lr=1", "nonsense"])
    assert changed == config()


def test_only_a_dict_can_be_overridden():
    with pytest.raises(ConfigError, match=r"config=\[1\]: must be a dict"):
        apply_overrides([1], ["[0]=1"])


@pytest.mark.parametrize("word", ["true", "yes", "on", "True", "YES", "false", "no", "off", "OFF"])
def test_a_word_for_a_bool_is_a_bool_wherever_a_bool_is(word):
    meant = word.lower() in ("true", "yes", "on")
    assert apply_overrides({"flag": not meant}, [f"flag={word}"])["flag"] is meant


@pytest.mark.parametrize(
    ("override", "before", "after"),
    [
        ("x=none", 1.0, None),
        ("x=NULL", {"a": 1}, None),
        ("x=0.5", None, 0.5),
        ("x=auto", None, "auto"),
        ("x=0.5", 1, 0.5),
        ("x=1", 0.5, 1),
        ("x=2024", "runs", "2024"),
        ("x='on'", "off", "on"),
        ('x="none"', "a", "none"),
        ("x=[1, on, b]", [3], [1, True, "b"]),
        ("x=[0.8, 0.9]", (0.9, 0.99), (0.8, 0.9)),
        ("x={a: [none], b: 'no'}", {}, {"a": [None], "b": "no"}),
        ("+x=auto", False, "auto"),
        ("++x=3", "a", 3),
    ],
)
def test_a_value_keeps_its_kind_unless_the_form_says_otherwise(override, before, after):
    assert same(apply_overrides({"x": before}, [override])["x"], after)


@pytest.mark.parametrize(
    ("override", "before", "words"),
    [
        ("x=maybe", True, ["x is True, a bool", "'maybe' is a string", "x=true or x=false", "+x=maybe"]),
        ("x=1", True, ["x is True, a bool", "1 is a number"]),
        ("x=off", "auto", ["x is 'auto', a string", "False is a bool", "x='off'"]),
        ("x=fast", 0.1, ["x is 0.1, a number", "'fast' is a string", "x=0.1"]),
        ("x=yes", 3, ["x is 3, a number", "True is a bool"]),
        ("x=3", {"a": 1}, ["a section", "set its keys"]),
        ("x=3", [1], ["x is [1], a list", "x+="]),
        ("x=[1]", 1, ["x is 1, a number", "[1] is a list"]),
    ],
)
def test_a_value_of_another_kind_is_refused_with_the_way_to_write_it(override, before, words):
    changed = {"x": before}
    with pytest.raises(ConfigError) as caught:
        apply_overrides(changed, [override])
    for word in words:
        assert word in str(caught.value)
    assert caught.value.argument == "x"
    assert changed == {"x": before}


names = st.text(st.characters(exclude_characters=".[]=", exclude_categories=["Cs"]), min_size=1).filter(
    lambda name: name == name.strip() and name[-1] not in "!+-" and name[0] != "+"
)


@given(st.lists(names, min_size=1, max_size=4), leaves | st.lists(leaves) | st.dictionaries(keys, leaves))
def test_a_value_set_by_its_literal_is_that_value_at_any_path(path, value):
    finite = not any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in flat(value))
    changed = apply_overrides({}, [f"+{'.'.join(path)}={value!r}"])
    for name in path:
        changed = changed[name]
    if finite:
        assert same(changed, value)
    elif isinstance(value, float):
        assert changed == repr(value)


def flat(value):
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flat(item)]
    return flat(list(value.values())) if isinstance(value, dict) else [value]


@given(st.text())
def test_any_text_is_either_an_override_or_refused_as_a_config_error(text):
    try:
        apply_overrides(config(), [text])
    except ConfigError as error:
        message = str(error)
    else:
        return
    assert repr(text) in message


# Writing


@given(trees(leaves))
def test_a_saved_python_file_is_read_back_equal(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("saved") / "run.py"
    before = copy.deepcopy(config)
    save_config(config, path)
    assert same(load_config(path), config)
    assert same(config, before)


@given(trees(leaves, tuples=False))
def test_a_saved_yaml_file_is_read_back_equal(tmp_path_factory, config):
    config.pop("parents", None)
    path = tmp_path_factory.mktemp("saved") / "run.yaml"
    refusal = ""
    try:
        save_config(config, path)
    except ConfigError as error:  # rare texts that YAML would change: refused, and nothing is written
        refusal = str(error)
    if refusal:
        assert "YAML cannot hold this configuration unchanged" in refusal
        assert not path.exists()
    else:
        assert same(load_config(path), config)


@given(trees(leaves))
def test_the_formatted_text_is_an_expression_of_the_same_value(config):
    assert same(eval(format_config(config), {"__builtins__": {"float": float}}), config)


def test_short_configurations_stay_on_one_line_and_long_ones_have_a_key_a_line():
    assert format_config({"lr": 0.1}) == '{"lr": 0.1}'
    long = {"model": {"type": "torch.nn.Linear", "widths": list(range(11))}, "name": "x" * 60, "one": (1,), "none": {}}
    assert format_config(long) == (
        "{\n"
        '    "model": {"type": "torch.nn.Linear", "widths": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]},\n'
        f'    "name": "{"x" * 60}",\n'
        '    "one": (1,),\n'
        '    "none": {},\n'
        "}"
    )
    nested = format_config({"a": {"b": list(range(100, 130))}}).splitlines()
    assert nested[:4] == ["{", '    "a": {', '        "b": [', "            100,"]
    assert max(map(len, nested)) <= 88


def test_texts_stand_in_double_quotes_unless_they_have_some(tmp_path):
    assert format_config({"a": "it's", "b": 'say "x"', "c": b"x", "d": ["\n"]}) == (
        """{"a": "it's", "b": 'say "x"', "c": b"x", "d": ["\\n"]}"""
    )
    save_config({"lr": 0.1}, tmp_path / "run.py")
    assert (tmp_path / "run.py").read_text() == '# fmt: off\n# Auto-generated config snapshot\nconfig = {"lr": 0.1}\n'


def test_formatting_shows_objects_by_their_repr_but_saving_refuses_them(tmp_path):
    config = {"model": {"layers": [1, 2, {"type": Path}]}}
    assert "<class" in format_config(config)
    with pytest.raises(ConfigError, match=r"run\.py: model\.layers\[2\]\.type: a value of type type cannot be saved"):
        save_config(config, tmp_path / "run.py")
    assert list(tmp_path.iterdir()) == []


def test_values_of_subclasses_are_saved_as_the_plain_values_that_they_equal(tmp_path):
    level = IntEnum("level", "LOW HIGH")
    pair = namedtuple("pair", "x y")
    import numpy as np

    config = {
        "level": level.HIGH,
        "pair": pair(1, 2),
        "o": OrderedDict(a=np.float64(0.5)),
        1: b"\0",
        None: {(1, "a"): 2},
    }
    save_config(config, tmp_path / "run.py")
    assert load_config(tmp_path / "run.py") == config


@pytest.mark.parametrize("key", [frozenset({1}), Path("x"), (1, Path("x"))])
def test_a_key_that_cannot_be_saved_is_refused(tmp_path, key):
    with pytest.raises(ConfigError, match="cannot be saved"):
        save_config({"a": {key: 1}}, tmp_path / "run.py")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"a": {"t": (1, 2)}}, r"a\.t: YAML has no tuple; use a list or string, or a \.py file"),
        ({"a": b"x"}, "a: YAML has no bytes"),
        ({"parents": "x"}, "parents: this key names parent files"),
        ({"a": ["???"]}, r"a\[0\]: '\?\?\?' means a missing value"),
        ({"a": {None: 1}}, "a key of type NoneType cannot be saved"),
        ({"a": Path("x")}, "cannot be saved"),
    ],
)
def test_what_yaml_cannot_hold_is_refused_and_no_file_is_written(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        save_config(config, tmp_path / "run.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_nested_key_called_parents_is_a_key_like_any_other(tmp_path):
    for name in ("run.yaml", "run.py"):
        save_config({"a": {"parents": ["x"]}}, tmp_path / name)
        assert load_config(tmp_path / name) == {"a": {"parents": ["x"]}}


def test_saving_makes_the_folder_and_replaces_the_file(tmp_path):
    path = tmp_path / "new" / "run.py"
    save_config({"a": 1}, path)
    save_config({"a": 2}, str(path))
    assert load_config(path) == {"a": 2}
    assert [entry.name for entry in path.parent.iterdir()] == ["run.py"]


@pytest.mark.parametrize("name", ["run.json", "run"])
def test_saving_to_another_kind_of_file_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"ends in \.py, \.yaml or \.yml"):
        save_config({}, tmp_path / name)


def test_only_a_dict_can_be_saved(tmp_path):
    with pytest.raises(ConfigError, match=r"config=\[1\]: must be a dict"):
        save_config([1], tmp_path / "run.py")


# YAML files


def test_a_yaml_file_is_a_plain_dict_of_plain_lists(write):
    loaded = load_config(write("a.yaml", "lr: 1e-3\nmodel:\n  widths: [1, {x: null}]\n3: yes\n"))
    assert loaded == {"lr": 0.001, "model": {"widths": [1, {"x": None}]}, 3: True}
    assert type(loaded["model"]) is dict
    assert type(loaded["model"]["widths"]) is list
    assert type(loaded["model"]["widths"][1]) is dict


def test_interpolations_are_resolved(write, monkeypatch):
    monkeypatch.setenv("TREADLE_TEST_ROOT", "/data")
    text = (
        "size: 8\nmodel: {width: '${size}', layers: ['${model.width}', '${.0}']}\n"
        "copy: ${model}\nname: run_${size}\nroot: ${oc.env:TREADLE_TEST_ROOT}\nplain: '\\${size}'\n"
    )
    assert load_config(write("a.yml", text)) == {
        "size": 8,
        "model": {"width": 8, "layers": [8, 8]},
        "copy": {"width": 8, "layers": [8, 8]},
        "name": "run_8",
        "root": "/data",
        "plain": "${size}",
    }


def test_strings_of_the_result_are_plain_strings(write):
    loaded = load_config(write("a.yaml", "a: x\nb: ${a}y\n"))
    assert [type(value) for value in loaded.values()] == [str, str]


def test_what_an_interpolation_copies_is_not_shared(write):
    loaded = load_config(write("a.yaml", "a: {x: [1]}\nb: ${a}\nc: ${a}\n"))
    loaded["b"]["x"].append(2)
    assert loaded["a"] == loaded["c"] == {"x": [1]}


def test_yaml_and_python_files_are_parents_of_each_other(write):
    write("base.yaml", "size: 8\nmodel: {type: A, width: '${size}'}\n")
    write("mid.py", "parents = 'base'\nconfig = {'model': {'depth': 2}, 'literal': '${size}', 'where': object}")
    child = write("child.yaml", "parents: [mid.py]\nsize: 16\nagain: ${where}\nliteral2: ${literal}\n")
    assert load_config(child) == {
        "size": 16,
        "model": {"type": "A", "width": 16, "depth": 2},
        "literal": "${size}",
        "where": object,
        "again": object,
        "literal2": "${size}",
    }


def test_an_interpolation_may_reach_into_values_of_python_files(write):
    base = write("a.py", "config = {'betas': (0.9, 0.99), (1, 2): 'odd key'}")
    loaded = load_config([base, write("b.yaml", "first: ${betas.0}\nboth: ${betas}\n")])
    assert (loaded["first"], loaded["betas"], list(loaded["both"])) == (0.9, (0.9, 0.99), [0.9, 0.99])


def test_an_interpolation_that_refers_to_nothing_is_refused_with_file_and_place(write):
    path = write("a.yaml", "model: {layers: [1, {type: '${no.such}'}]}\n")
    with pytest.raises(
        ConfigError, match=r"a\.yaml: model\.layers\[1\]\.type: '\$\{no\.such\}' cannot be resolved: .*no"
    ):
        load_config(path)


@pytest.mark.parametrize("text", ["a: ${a}\n", "a: ${b}\nb: ${a}\n", "a: ${\n", "a: ${nothing:1}\n"])
def test_interpolations_that_make_no_sense_are_config_errors(write, text):
    with pytest.raises(ConfigError, match=r"a\.yaml"):
        load_config(write("a.yaml", text))


def test_a_mandatory_value_must_be_given_by_a_later_file(write):
    base = write("base.yaml", "model: {width: '???'}\n")
    with pytest.raises(ConfigError, match=r"base\.yaml: model\.width: '\?\?\?' marks a mandatory value"):
        load_config(base)
    assert load_config([base, write("b.yaml", "model: {width: 3}\n")]) == {"model": {"width": 3}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; a YAML configuration is a mapping"),
        ("# nothing\n\n", "is empty"),
        ("- a\n", "holds a list"),
        ("3\n", "not a YAML configuration"),
        ("a: [\n", "not a YAML configuration"),
        ("a: 1\na: 2\n", "duplicate key"),
        ("a: !!python/object/apply:os.getcwd []\n", "not a YAML configuration"),
        ("parents: 3\n", "parents must be a file name"),
    ],
)
def test_a_yaml_file_that_is_no_mapping_is_refused_by_name(write, text, message):
    with pytest.raises(ConfigError, match=rf"wrong\.yaml: (?s:.*){message}"):
        load_config(write("wrong.yaml", text))


def test_a_yaml_file_that_is_no_text_is_refused_by_name(tmp_path):
    (tmp_path / "wrong.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match=r"wrong\.yaml: not a YAML configuration"):
        load_config(tmp_path / "wrong.yaml")


def test_without_omegaconf_yaml_files_name_the_extra_and_python_files_work(write, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    with pytest.raises(ImportError, match=r"a\.yaml: YAML files need OmegaConf .*pip install 'treadle\[config\]'"):
        load_config(write("a.yaml", "a: 1\n"))
    with pytest.raises(ImportError, match=r"treadle\[config\]"):
        save_config({"a": 1}, tmp_path / "b.yaml")
    assert load_config(write("a.py", "config = {'a': '${b}'}")) == {"a": "${b}"}
