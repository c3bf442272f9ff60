"""``key=value`` on a tree of dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from treadle.config.sections import from_nested, with_nested
from treadle.errors import ConfigError
from treadle.runs.settings import apply_overrides, leaves
from treadle.spectra.run_config import FLAGS, SpectraConfig


@dataclass
class Inner:
    width: int = 8
    rate: float = 0.5
    name: str = "a"
    limit: float | None = 1.0
    on: bool = True


@dataclass
class Outer:
    seed: int = 0
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("inner.width=16", 16),
        ("inner.rate=2", 2.0),
        ("inner.rate=1e-3", 1e-3),
        ("inner.name=b", "b"),
        ("inner.name=2024", "2024"),
        ("inner.limit=none", None),
        ("inner.limit=None", None),
        ("inner.on=false", False),
        ("inner.on = False", False),
    ],
)
def test_values_are_read_as_the_fields_type(text: str, value: object) -> None:
    config = Outer()
    changed = apply_overrides(config, [text])
    key = text.partition("=")[0].strip().split(".")[1]
    assert getattr(changed.inner, key) == value
    assert type(getattr(changed.inner, key)) is type(value)
    assert config == Outer()  # the caller's tree is not changed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("inner.width=wide", ["inner.width=wide", "must be int", "str"]),
        ("inner.width=1.5", ["must be int", "float"]),
        ("inner.width=true", ["must be int", "bool"]),
        ("inner.on=1", ["must be bool", "int"]),
        ("inner.limit=x", ["must be float or None"]),
        ("inner.widht=1", ["unknown setting 'inner.widht'", "'inner.width'"]),
        ("width=1", ["unknown setting 'width'", "'inner.width'"]),
        ("sead=1", ["unknown setting 'sead'", "'seed'"]),
        ("inner=1", ["is a section", "inner.width"]),
        ("seed.x=1", ["unknown setting"]),
        ("seed", ["key=value"]),
        ("=3", ["key=value"]),
    ],
)
def test_bad_assignments_say_what_is_wrong(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(Outer(), [text])
    for word in words:
        assert word in str(caught.value)


def test_the_later_assignment_counts() -> None:
    assert apply_overrides(Outer(), ["seed=1", "seed=2"]).seed == 2


def test_options_of_the_command_are_not_settings() -> None:
    with pytest.raises(ConfigError, match="--device"):
        apply_overrides(SpectraConfig(), ["trainer.device=cpu"], elsewhere=FLAGS)


def test_a_dataclass_may_refuse_a_value() -> None:
    with pytest.raises(ConfigError, match="loss_type"):
        apply_overrides(SpectraConfig(), ["trainer.loss_type=mae"])


def test_every_setting_has_a_text_that_sets_it() -> None:
    config = SpectraConfig()
    texts = [f"{key}={value}" for key, value in leaves(config) if key not in FLAGS]
    assert apply_overrides(config, texts, elsewhere=FLAGS) == config


@pytest.mark.parametrize("text", ["+inner.width=16", "++inner.width=16", "inner.width = 16"])
def test_a_plus_changes_nothing_where_no_field_can_be_added(text: str) -> None:
    assert apply_overrides(Outer(), [text]).inner.width == 16


@pytest.mark.parametrize("text", ["inner.name+=b", "inner.name-=b", "inner.name!="])
def test_forms_that_change_a_part_are_refused_for_a_field(text: str) -> None:
    with pytest.raises(ConfigError, match=r"replaced as a whole, for example inner\.name=a"):
        apply_overrides(Outer(), [text])


def test_stored_values_are_of_their_fields_types() -> None:
    assert with_nested(Outer(), {"inner": {"rate": 1, "name": "b"}}) == Outer(inner=Inner(rate=1.0, name="b"))
    with pytest.raises(ConfigError, match=r"inner\.width='x': must be int"):
        with_nested(Outer(), {"inner": {"width": "x"}})
    with pytest.raises(ConfigError, match=r"inner: unknown key 'widht'; did you mean 'width'"):
        with_nested(Outer(), {"inner": {"widht": 1}})
    with pytest.raises(ConfigError, match=r"inner\.name=None: must be str, but this is None"):
        with_nested(Outer(), {"inner": {"name": None}})


@dataclass
class Betas:
    betas: tuple[float, float] = (0.9, 0.99)


def test_a_list_stands_for_a_tuple() -> None:
    assert from_nested(Betas, {"betas": [0.5, 0.6]}) == Betas((0.5, 0.6))
    assert apply_overrides(Betas(), ["betas=[0.5, 0.6]"]) == Betas((0.5, 0.6))
