"""Configs of unusual classes: read, or refused by name; never ignored."""

from __future__ import annotations

import configparser
import enum
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import omegaconf
import pytest

from functional_kit import loader, make
from treadle import ConfigError
from treadle.functional.settings import read_settings


class Named(str, enum.Enum):
    BF16 = "bf16"


class ByProperty:
    @property
    def max_grad_norm(self):
        return 2.0


@dataclass
class Derived:
    learning_rate: float = 0.5

    @property
    def max_grad_norm(self):
        return self.learning_rate * 4


class ByKey:
    def __init__(self, **values):
        self.__values = values

    def __getitem__(self, key):
        return self.__values[key]


class Nested:
    class training:
        max_grad_norm = 2.0


READ = {
    "property": {"training": ByProperty()},
    "property of a dataclass": {"training": Derived()},
    "named tuple": {"training": namedtuple("Training", "max_grad_norm")(2.0)},
    "keys alone": {"training": ByKey(max_grad_norm=2.0)},
    "keys alone, whole": ByKey(training={"max_grad_norm": 2.0}),
    "classes inside": Nested(),
    "a class with a class inside": Nested,
    "NumPy scalar": {"training": {"max_grad_norm": np.float32(2.0)}},
    "enum": {"training": {"max_grad_norm": enum.Enum("Norm", {"TWO": 2.0}).TWO}},
}


@pytest.mark.parametrize("config", READ.values(), ids=READ)
def test_it_is_read(config):
    found = read_settings(config).max_grad_norm
    assert found == 2.0
    assert type(found) is float


def broken():
    class Broken:
        @property
        def max_grad_norm(self):
            raise ValueError("boom")

    return {"training": Broken()}


def missing():
    return omegaconf.OmegaConf.create({"training": {"max_grad_norm": omegaconf.MISSING}})


def parsed():
    parser = configparser.ConfigParser()
    parser.read_string("[training]\nmax_grad_norm = 2.0\n")
    return parser


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (broken(), "config.training.max_grad_norm: cannot be read: ValueError: boom"),
        (missing(), "config.training.max_grad_norm: cannot be read: MissingMandatoryValue"),
        (parsed(), "config.training.max_grad_norm='2.0': must be a number"),
        ("config.yaml", "config='config.yaml': must be a dict.*load_config"),
        (3, "config=3: must be a dict"),
        ([1], r"config=\[1\]: must be a dict"),
        ({"training": "fast"}, "config.training='fast': must be a dict or an object with fields"),
        ({"training": namedtuple("Training", "max_grad_nrm")(2.0)}, "max_grad_nrm.*did you mean 'max_grad_norm'"),
        (Derived, "config: is the class Derived; pass an instance"),
        ({"training": {"lr_scheduler": ["cosine"]}}, "lr_scheduler=.*must be a string or None"),
        ({"training": {"min_lr_scale": "0"}}, "min_lr_scale='0': must be a number"),
        (SimpleNamespace(max_grad_norm=2.0), "only its part 'training' is read"),
    ],
)
def test_it_is_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        read_settings(config)


def test_other_parts_of_a_config_are_not_read():
    config = omegaconf.OmegaConf.create({"training": {"max_grad_norm": 2.0}, "data": omegaconf.MISSING})
    assert read_settings(config).max_grad_norm == 2.0


def test_an_enum_goes_into_a_checkpoint_by_its_value(tmp_path):
    trainer = make(mixed_precision=Named.BF16)
    trainer.train(loader(), 1, save_dir=tmp_path)
    assert type(trainer.settings.mixed_precision) is str
