from __future__ import annotations

import copy
import functools
from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.builder import REGISTRY, Registry, build_from_cfg
from treadle.config import load_config
from treadle.errors import ConfigError


class Thing:
    """Keeps what it was called with."""

    def __init__(self, *args, **kwargs):
        self.args = args
        self.kwargs = kwargs


class Net:
    def __init__(self, width, depth=2):
        self.width = width
        self.depth = depth


@pytest.fixture
def registry():
    registry = Registry()
    registry.register()(Thing)
    registry.register()(Net)
    return registry


# Registry


def test_register_returns_the_class_or_function_unchanged(registry):
    def make():
        return 1

    assert registry.register()(make) is make
    assert registry.get("make") is make
    assert registry.get("Net") is Net


def test_a_given_name_is_used_instead_of_the_own_name(registry):
    registry.register("small")(Net)
    assert registry.get("small") is Net
    assert registry.names() == ["Net", "Thing", "small"]


def test_get_of_an_unknown_name_is_none(registry):
    assert registry.get("Nett") is None


def test_the_same_name_for_another_object_is_refused_and_the_first_one_stays(registry):
    with pytest.raises(ConfigError, match=r"'Net' is registered already"):
        registry.register("Net")(Thing)
    assert registry.get("Net") is Net


def test_registering_one_object_twice_does_nothing(registry):
    assert registry.register()(Net) is Net


@pytest.mark.parametrize("name", ["", "partial:Net"])
def test_a_name_that_a_configuration_could_not_say_is_refused(registry, name):
    with pytest.raises(ConfigError, match="plain name"):
        registry.register(name)(Thing)


def test_what_cannot_be_called_is_not_registered(registry):
    with pytest.raises(ConfigError, match="only classes and functions"):
        registry.register("three")(3)


def test_register_without_parentheses_is_refused_with_the_fix(registry):
    with pytest.raises(ConfigError, match=r"register\(\) with parentheses"):
        registry.register(Net)


def test_an_object_without_a_name_needs_one(registry):
    with pytest.raises(ConfigError, match="plain name"):
        registry.register()(functools.partial(Net, 3))


def test_registries_share_nothing():
    first, second = Registry(), Registry()
    first.register()(Net)
    assert second.get("Net") is None


def test_the_shared_registry_is_the_default():
    name = "a net of these tests"
    REGISTRY.register(name)(Net)
    assert build_from_cfg({"type": name, "width": 3}).width == 3


# Building


def test_a_registered_name_is_called_with_the_other_entries(registry):
    net = build_from_cfg({"type": "Net", "width": 3, "depth": 4}, registry)
    assert (type(net), net.width, net.depth) == (Net, 3, 4)


def test_a_dotted_path_is_imported(registry):
    layer = build_from_cfg({"type": "torch.nn.Linear", "in_features": 3, "out_features": 2}, registry)
    assert isinstance(layer, torch.nn.Linear)


def test_a_dotted_path_may_lead_through_a_class_and_through_modules_not_imported_yet():
    assert build_from_cfg({"type": "builtins.dict.fromkeys", "*": [["a"], 1]}) == {"a": 1}
    assert build_from_cfg({"type": "xml.dom.minidom.parseString", "*": ["<a/>"]}).documentElement.tagName == "a"


def test_a_registered_name_wins_over_a_dotted_path(registry):
    registry.register("torch.nn.Linear")(Thing)
    assert type(build_from_cfg({"type": "torch.nn.Linear"}, registry)) is Thing


def test_the_star_holds_positional_arguments(registry):
    thing = build_from_cfg({"type": "Thing", "*": [1, "b"], "c": 3}, registry)
    assert (thing.args, thing.kwargs) == ((1, "b"), {"c": 3})


def test_the_star_takes_a_tuple_too(registry):
    assert build_from_cfg({"type": "Thing", "*": (1, 2)}, registry).args == (1, 2)


def test_a_star_that_is_no_list_is_refused_with_its_place(registry):
    with pytest.raises(ConfigError, match=r"^model\.\*: positional arguments must be a list, not 'ab'"):
        build_from_cfg({"model": {"type": "Thing", "*": "ab"}}, registry, recursive=True)


def test_the_prefix_partial_gives_a_functools_partial(registry):
    make = build_from_cfg({"type": "partial:Net", "depth": 5}, registry)
    assert isinstance(make, functools.partial)
    assert make.func is Net
    assert make(3).depth == 5


def test_a_partial_takes_dotted_paths_positional_arguments_and_kwargs():
    make = build_from_cfg({"type": "partial:torch.nn.Linear", "*": [3]}, bias=False)
    assert (make.args, make.keywords) == ((3,), {"bias": False})
    assert make(2).weight.shape == (2, 3)


def test_kwargs_are_passed_as_they_are(registry):
    inner = {"type": "Net", "width": 1}
    thing = build_from_cfg({"type": "Thing"}, registry, recursive=True, inner=inner)
    assert thing.kwargs["inner"] is inner


def test_kwargs_win_over_the_configuration(registry):
    assert build_from_cfg({"type": "Net", "width": 3}, registry, width=4).width == 4


def test_an_entry_that_kwargs_replace_is_not_built(registry):
    thing = build_from_cfg({"type": "Thing", "net": {"type": "no such"}}, registry, recursive=True, net=1)
    assert thing.kwargs == {"net": 1}


def test_an_optimizer_gets_the_parameters_of_the_model():
    model = torch.nn.Linear(2, 2)
    optimizer = build_from_cfg({"type": "torch.optim.AdamW", "lr": 3e-4}, params=model.parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_recursive_builds_nested_dicts_in_dicts_lists_and_tuples(registry):
    net = {"type": "Net", "width": 1}
    thing = build_from_cfg({"type": "Thing", "a": {"b": net}, "c": [net, (net, 2)], "*": [net]}, registry, True)
    assert type(thing.args[0]) is Net
    assert type(thing.kwargs["a"]["b"]) is Net
    first, (second, two) = thing.kwargs["c"]
    assert (type(first), type(second), two) == (Net, Net, 2)
    assert type(thing.kwargs["c"][1]) is tuple


def test_recursive_builds_inside_what_it_builds(registry):
    cfg = {"type": "torch.nn.Sequential", "*": [{"type": "torch.nn.Linear", "*": [2, 3]}, {"type": "torch.nn.ReLU"}]}
    assert build_from_cfg(cfg, registry, recursive=True)(torch.zeros(1, 2)).shape == (1, 3)


def test_recursive_on_a_dict_without_type_gives_a_plain_dict_with_its_contents_built(registry):
    built = build_from_cfg({"model": {"type": "Net", "width": 1}, "epochs": 3}, registry, recursive=True)
    assert type(built) is dict
    assert type(built["model"]) is Net
    assert built["epochs"] == 3


def test_recursive_on_a_list_builds_its_entries_and_named_tuples_stay(registry):
    pair = namedtuple("pair", "net rest")
    built = build_from_cfg([pair({"type": "Net", "width": 1}, 2)], registry, recursive=True)
    assert type(built[0]) is pair
    assert type(built[0].net) is Net


def test_without_recursive_nested_dicts_are_passed_as_dicts(registry):
    inner = {"type": "Net", "width": [1]}
    assert build_from_cfg({"type": "Thing", "inner": inner}, registry).kwargs == {"inner": inner}


@pytest.mark.parametrize("recursive", [False, True])
def test_the_configuration_is_not_changed_even_by_a_constructor_that_changes_its_arguments(registry, recursive):
    @registry.register()
    def greedy(*args, **kwargs):
        kwargs["options"].clear()
        args[0].append("more")
        kwargs["nested"][0]["x"].append(1)

    cfg = {"type": "greedy", "*": [[1]], "options": {"a": 1}, "nested": ({"x": []},)}
    before = copy.deepcopy(cfg)
    build_from_cfg(cfg, registry, recursive)
    assert cfg == before


def test_each_build_gives_a_new_object(registry):
    cfg = {"type": "Thing", "sizes": [1]}
    first, second = build_from_cfg(cfg, registry), build_from_cfg(cfg, registry)
    assert first is not second
    assert first.kwargs["sizes"] is not second.kwargs["sizes"]


def test_leaves_are_passed_themselves_and_not_copied(registry):
    tensor = torch.zeros(1)
    assert build_from_cfg({"type": "Thing", "x": [tensor]}, registry).kwargs["x"][0] is tensor


# What is refused


def test_without_recursive_a_dict_without_type_is_refused(registry):
    with pytest.raises(
        ConfigError, match=r"must be a dict with the key 'type', but it is a dict with the keys \['x'\]"
    ):
        build_from_cfg({"x": 1}, registry)


@pytest.mark.parametrize("cfg", [[{"type": "Net"}], None, "Net", 3])
def test_without_recursive_what_is_no_dict_is_refused(registry, cfg):
    with pytest.raises(ConfigError, match="must be a dict with the key 'type'"):
        build_from_cfg(cfg, registry)


def test_kwargs_that_nothing_would_take_are_refused(registry):
    with pytest.raises(ConfigError, match=r"nothing takes the arguments \['lr'\]"):
        build_from_cfg({"model": {"type": "Net", "width": 1}}, registry, recursive=True, lr=1)


def test_an_unknown_name_lists_the_nearest_registered_ones_and_its_place(registry):
    registry.register("Nets")(Thing)
    cfg = {"model": {"layers": [{"type": "Net", "width": 1}, 2, {"type": "Nett"}]}}
    with pytest.raises(
        ConfigError, match=r"^model\.layers\[2\]\.type: 'Nett' is not registered; nearest: 'Net.?', 'Net"
    ):
        build_from_cfg(cfg, registry, recursive=True)


def test_an_unknown_name_near_to_nothing_lists_all(registry):
    with pytest.raises(ConfigError, match=r"^type: 'zzz' is not registered; known: 'Net', 'Thing'"):
        build_from_cfg({"type": "zzz"}, registry)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.nn.Linear", "there is no module 'no_such_package'"),
        ("torch.no_such_part.Linear", "'torch' has no 'no_such_part'"),
        ("torch.nn.Liner", "'torch.nn' has no 'Liner', did you mean 'Linear'"),
        ("torch.nn.Linear.no_such", "'torch.nn.Linear' has no 'no_such'"),
        ("keyword.no_such", "'keyword' has no 'no_such'"),
        ("torch..Linear", "is not a dotted path"),
        (".Linear", "is not a dotted path"),
        ("torch.nn.", "is not a dotted path"),
    ],
)
def test_a_path_that_cannot_be_imported_says_which_part_is_missing(path, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_from_cfg({"a": [{"type": path}]}, recursive=True)
    assert str(caught.value).startswith(f"a[0].type: {path!r}")


def test_an_error_inside_an_imported_module_leaves_unchanged(tmp_path, monkeypatch):
    (tmp_path / "module_that_lacks_another.py").write_text("import another_that_is_not_there")
    (tmp_path / "module_that_fails.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="another_that_is_not_there"):
        build_from_cfg({"type": "module_that_lacks_another.Net"})
    with pytest.raises(ZeroDivisionError):
        build_from_cfg({"type": "module_that_fails.Net"})


@pytest.mark.parametrize("kind", [Net, 3, None, ["Net"]])
def test_a_type_that_is_no_string_is_refused(kind):
    with pytest.raises(ConfigError, match=r"^type: .* is not a name; write a registered name or a dotted path"):
        build_from_cfg({"type": kind})


def test_a_path_to_what_cannot_be_called_is_refused():
    with pytest.raises(ConfigError, match=r"'math.pi' is a float and cannot be called"):
        build_from_cfg({"type": "math.pi"})


def test_a_key_that_is_no_string_is_refused(registry):
    with pytest.raises(ConfigError, match=r"^a\[3\]: the key 3 is not an argument of 'Thing'"):
        build_from_cfg({"a": {"type": "Thing", 3: 4}}, registry, recursive=True)


def test_an_unexpected_argument_is_named_with_its_place_the_nearest_one_and_the_signature(registry):
    with pytest.raises(ConfigError) as caught:
        build_from_cfg({"model": {"layers": [{"type": "Net", "widht": 1}]}}, registry, recursive=True)
    message = str(caught.value)
    assert message.startswith("model.layers[0].type: 'Net' refuses its arguments: ")
    assert "it has no argument for model.layers[0].widht, did you mean 'width'?" in message
    assert message.endswith("its signature is Net(width, depth=2)")
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_missing_argument_is_named(registry):
    with pytest.raises(ConfigError, match=r"'Net' refuses its arguments: .*'width'.*; its signature is Net\(width"):
        build_from_cfg({"type": "Net"}, registry)


def test_an_argument_given_twice_is_refused(registry):
    with pytest.raises(ConfigError, match="multiple values for argument 'width'"):
        build_from_cfg({"type": "Net", "*": [1]}, registry, width=2)


def test_a_partial_refuses_an_unexpected_argument_at_once_but_not_a_missing_one(registry):
    with pytest.raises(ConfigError, match=r"^a\.type: 'partial:Net' refuses its arguments: .*did you mean 'width'"):
        build_from_cfg({"a": {"type": "partial:Net", "widht": 1}}, registry, recursive=True)
    assert build_from_cfg({"type": "partial:Net"}, registry)(3).width == 3


def test_a_function_written_in_c_that_refuses_its_arguments_is_named(registry):
    with pytest.raises(ConfigError, match=r"'builtins.int' refuses its arguments"):
        build_from_cfg({"type": "builtins.int", "*": [[]]}, registry)


def test_a_refusal_behind_a_wrapper_is_a_refusal(registry):
    @registry.register()
    @torch.no_grad()
    def made(width):
        return width

    with pytest.raises(ConfigError, match=r"'made' refuses its arguments: .*; its signature is made\(width\)"):
        build_from_cfg({"type": "made", "widht": 1}, registry)


def test_a_wrapper_that_adds_arguments_is_no_refusal(registry):
    def add(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, secret=1, **kwargs)

        return wrapper

    @registry.register()
    @add
    def made(width, secret):
        return width + secret + (None if width == 0 else 0)

    assert build_from_cfg({"type": "made", "width": 2}, registry) == 3
    assert build_from_cfg({"type": "partial:made", "width": 2}, registry)() == 3
    with pytest.raises(TypeError, match="unsupported operand"):
        build_from_cfg({"type": "made", "width": 0}, registry)


def test_a_type_error_raised_inside_a_constructor_leaves_unchanged(registry):
    @registry.register()
    class Broken:
        def __init__(self, width):
            Net()

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'width'") as caught:
        build_from_cfg({"a": {"type": "Broken", "width": 1}}, registry, recursive=True)
    assert not isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("bad"), TypeError("bad"), ConfigError("bad")])
def test_any_error_raised_inside_a_constructor_leaves_as_the_same_object(registry, error):
    @registry.register()
    def fail(nested=None):
        raise error

    for cfg in (
        {"type": "fail"},
        {"type": "fail", "nested": {"type": "Thing"}},
        {"type": "Thing", "x": {"type": "fail"}},
    ):
        with pytest.raises(type(error)) as caught:
            build_from_cfg(cfg, registry, recursive=True)
        assert caught.value is error


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text().filter(lambda key: key != "type"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(trees)
def test_a_tree_without_types_is_built_into_an_equal_tree(tree):
    built = build_from_cfg({"tree": tree}, Registry(), recursive=True)["tree"]
    assert built == tree
    assert type(built) is type(tree)


def test_the_integration_example_builds_a_trainer_from_its_file(tmp_path, registry):
    (tmp_path / "train.py").write_text(
        """config = {
    "trainer": {"type": "MyTrainer", "max_steps": 10_000, "grad_clip": 1.0, "workspace": "./runs/experiment_1"},
    "data": {"batch_size": 32, "num_workers": 4},
    "model": {"type": "torch.nn.Linear", "in_features": 4, "out_features": 2},
    "optimizer": {"type": "torch.optim.AdamW", "lr": 3e-4},
}
"""
    )

    @registry.register()
    class MyTrainer:
        def __init__(self, data_cfg, model_cfg, optimizer_cfg, **kwargs):
            self.data_cfg, self.model_cfg, self.optimizer_cfg, self.kwargs = data_cfg, model_cfg, optimizer_cfg, kwargs
            self.model = build_from_cfg(model_cfg, recursive=True)
            self.optimizer = build_from_cfg(optimizer_cfg, params=self.model.parameters())

    cfg = load_config(tmp_path / "train.py")
    trainer = build_from_cfg(
        cfg["trainer"], registry, data_cfg=cfg["data"], model_cfg=cfg["model"], optimizer_cfg=cfg["optimizer"]
    )
    assert trainer.kwargs == {"max_steps": 10_000, "grad_clip": 1.0, "workspace": "./runs/experiment_1"}
    assert trainer.data_cfg is cfg["data"]
    assert trainer.optimizer.param_groups[0]["lr"] == 3e-4


def test_without_a_registry_only_dotted_paths_are_names():
    assert build_from_cfg({"type": "torch.nn.ReLU"}, None).__class__ is torch.nn.ReLU
    REGISTRY.register("only_by_name")(dict)
    with pytest.raises(ConfigError, match="'only_by_name' is not registered"):
        build_from_cfg({"type": "only_by_name"}, registry=None)
    with pytest.raises(ConfigError):
        build_from_cfg([{"type": "only_by_name"}], registry=None, recursive=True)
