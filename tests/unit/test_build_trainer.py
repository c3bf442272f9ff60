"""A trainer from one configuration: its parts arrive, and what nothing would use is refused with what would be."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from treadle import BaseTrainer
from treadle.builder import Registry, build_from_cfg, build_trainer
from treadle.errors import ConfigError

registry = Registry()


class Middle(BaseTrainer):
    def __init__(self, model_cfg, **kwargs):
        super().__init__(**kwargs)
        self.model_cfg = model_cfg


@registry.register()
class Fit(Middle):
    def __init__(self, data_cfg, optimizer_cfg=None, **kwargs):
        super().__init__(**kwargs)
        self.data_cfg, self.optimizer_cfg = data_cfg, optimizer_cfg
        self.draw = torch.rand(1)


@registry.register()
def anything(**kwargs):
    return kwargs


@registry.register()
class Broken:
    def __init__(self, model_cfg):
        len(5)


def config(**changes):
    made = {
        "trainer": {"type": "Fit", "max_steps": 3, "device": "cpu"},
        "data": {"size": 4},
        "model": {"type": "torch.nn.Linear", "*": [2, 3]},
        **changes,
    }
    return {key: value for key, value in made.items() if value is not None}


@pytest.fixture(autouse=True)
def importing_leaves_nothing(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


def test_the_parts_arrive_as_in_the_call_by_hand():
    cfg = config(optimizer={"lr": 0.1})
    trainer = build_trainer(cfg, registry)
    by_hand = build_from_cfg(
        cfg["trainer"], registry, data_cfg=cfg["data"], model_cfg=cfg["model"], optimizer_cfg=cfg["optimizer"]
    )
    for name in ("data_cfg", "model_cfg", "optimizer_cfg", "max_steps", "device"):
        assert getattr(trainer, name) == getattr(by_hand, name)
    assert trainer.step == 0


def test_the_configuration_is_not_shared_with_the_trainer():
    cfg = config()
    trainer = build_trainer(cfg, registry)
    trainer.model_cfg["*"].append(9)
    assert cfg == config()


def test_a_part_need_not_be_a_dict_and_an_optional_one_may_be_left_out():
    assert build_trainer(config(data=[1, 2]), registry).data_cfg == [1, 2]
    assert build_trainer(config(), registry).optimizer_cfg is None


def test_a_constructor_that_takes_anything_gets_every_part():
    made = build_trainer({"trainer": {"type": "anything", "a": 1}, "model": 2, "other": 3}, registry)
    assert made == {"a": 1, "model_cfg": 2, "other_cfg": 3}


REFUSED = {
    "unknown part": (
        config(optimzer={}), r"optimzer: .*takes no optimzer_cfg.*parts are data, optimizer, model; did you mean 'optim"
    ),
    "argument at the top": (config(grad_clip=1.0), r"grad_clip: .*write it as trainer.grad_clip"),
    "missing part": (config(data=None), r"no part 'data', which 'Fit' takes as data_cfg; its parts are data, opt"),
    "unknown argument": (
        config(trainer={"type": "Fit", "max_step": 3}), r"trainer.max_step: .*did you mean 'max_steps'\?"
    ),
    "missing argument": (config(trainer={"type": "Fit"}), r"trainer: 'Fit' refuses its arguments: .*'max_steps'"),
    "missing part of a class above": (config(model=None), r"'Fit' refuses its arguments: Middle.*'model_cfg'"),
    "given twice": (
        config(trainer={"type": "Fit", "max_steps": 3, "data_cfg": 1}), "data: given twice, .*trainer.data_cfg"
    ),
    "no trainer": ({"trianer": {}}, r"no section 'trainer'.*did you mean 'trianer'\?"),
    "empty": ({}, "no section 'trainer'.*there are no keys"),
    "no dict": ([], "must be a dict, not a list"),
    "no type": (config(trainer={"max_steps": 3}), "trainer: must be a dict with the key 'type'"),
    "unknown type": (config(trainer={"type": "Fid"}), "trainer.type: 'Fid' is not registered; nearest: 'Fit'"),
    "seed": (config(seed="1"), "seed='1': must be a whole number"),
    "imports": (config(imports=5), "imports=5: must be a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_used_or_is_missing_is_refused(case):
    cfg, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        build_trainer(cfg, registry)


def test_a_wrong_value_is_the_trainers_own_error():
    with pytest.raises(ConfigError, match="max_steps=-1: must be a whole number"):
        build_trainer(config(trainer={"type": "Fit", "max_steps": -1}), registry)


def test_an_error_inside_the_constructor_leaves_unchanged():
    with pytest.raises(TypeError, match="has no len"):
        build_trainer({"trainer": {"type": "Broken"}, "model": 1}, registry)


def test_the_seed_is_set_before_anything_is_built_and_nothing_without_one():
    torch.manual_seed(9)
    first = build_trainer(config(seed=5), registry).draw
    assert torch.equal(first, build_trainer(config(seed=5), registry).draw)
    assert not torch.equal(first, build_trainer(config(seed=6), registry).draw)
    torch.manual_seed(9)
    expected = torch.rand(1)
    torch.manual_seed(9)
    assert torch.equal(build_trainer(config(), registry).draw, expected)


# imports


def write(path, text="VALUE = 1\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_files_and_modules_beside_the_configuration_are_imported_once(tmp_path):
    write(tmp_path / "own_file_a.py", "import builtins\nbuiltins.runs = getattr(builtins, 'runs', 0) + 1\n")
    write(tmp_path / "below" / "own_file_b.py")
    write(tmp_path / "own_package" / "inner.py")
    names = ["own_file_a.py", "below/own_file_b.py", "own_package.inner", "own_file_a"]
    build_trainer(config(imports=names), registry, folder=tmp_path)
    import builtins

    assert builtins.runs == 1
    del builtins.runs
    assert {"own_file_a", "own_file_b", "own_package.inner"} <= set(sys.modules)


def test_a_single_import_may_be_a_string(tmp_path):
    write(tmp_path / "own_file_c.py")
    build_trainer(config(imports="own_file_c.py"), registry, folder=tmp_path)
    assert "own_file_c" in sys.modules


def test_a_dotted_type_is_found_in_the_folder(tmp_path):
    write(tmp_path / "own_file_d.py", "class Own:\n    def __init__(self, width):\n        self.width = width\n")
    made = build_trainer({"trainer": {"type": "own_file_d.Own", "width": 3}}, registry, folder=tmp_path)
    assert made.width == 3


def test_the_script_that_is_running_is_not_imported_again(tmp_path, monkeypatch):
    script = write(tmp_path / "own_file_e.py", "raise AssertionError('imported')")
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    build_trainer(config(imports=["own_file_e.py"]), registry, folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("own_file.py", ConfigError, "own_file.py: no such file; did you mean 'own_files.py'"),
        ("no_such_module", ConfigError, "no module 'no_such_module'; .* such as 'no_such_module.py'"),
        ("json.py", ConfigError, "the name 'json' belongs to another module .* rename the file"),
        ("asks_for_more.py", ModuleNotFoundError, "no_such_package"),
        ("fails.py", ZeroDivisionError, "division"),
    ],
)
def test_an_import_that_fails_says_why(tmp_path, name, error, words):
    write(tmp_path / "own_files.py")
    write(tmp_path / "json.py")
    write(tmp_path / "asks_for_more.py", "import no_such_package")
    write(tmp_path / "fails.py", "1 / 0")
    with pytest.raises(error, match=words):
        build_trainer(config(imports=[name]), registry, folder=tmp_path)
