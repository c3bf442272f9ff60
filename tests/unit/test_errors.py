from __future__ import annotations

import pickle

import pytest

from treadle.errors import (
    MISSING,
    CheckpointError,
    ConfigError,
    DataExhaustedError,
    NonFiniteError,
    TreadleError,
    nearest,
    refuse_unknown,
)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (CheckpointError, RuntimeError),
        (DataExhaustedError, RuntimeError),
        (NonFiniteError, RuntimeError),
    ],
)
def test_every_error_is_a_treadle_error_and_the_builtin_that_a_caller_expects(kind, builtin):
    assert issubclass(kind, TreadleError)
    assert issubclass(kind, builtin)


def test_a_config_error_is_no_runtime_error_and_a_checkpoint_error_no_value_error():
    assert not issubclass(ConfigError, RuntimeError)
    assert not issubclass(CheckpointError, ValueError)


@pytest.mark.parametrize(
    ("text", "about", "message"),
    [
        ("must be at least 1", {"argument": "width", "value": 0}, "width=0: must be at least 1"),
        ("has no parameter", {"argument": "model"}, "model: has no parameter"),
        (" is not known", {"argument": "device", "value": "x"}, "device='x' is not known"),
        ("=0.5 and b=1: give one", {"argument": "a"}, "a=0.5 and b=1: give one"),
        ("must be given", {"argument": "seed", "value": None}, "seed=None: must be given"),
        ("there are no graphs", {}, "there are no graphs"),
    ],
)
def test_a_config_error_composes_its_text_and_keeps_what_it_is_about(text, about, message):
    error = ConfigError(text, **about)
    copy = pickle.loads(pickle.dumps(error))
    for each in (error, copy):
        assert str(each) == message
        assert (each.argument, each.value) == (about.get("argument"), about.get("value", MISSING))
        assert str(each.renamed("a.b")) == f"a.b{message.removeprefix(about.get('argument', ''))}" or not about
        assert each.renamed("a.b").value == each.value
    assert str(error.extended(" (file, line 3)").renamed("a.b")).endswith(" (file, line 3)")


def test_an_error_that_names_its_argument_in_other_words_is_not_renamed():
    error = ConfigError("unknown setting 'lr'").about("lr")
    assert error.renamed("optimizer.lr") is error
    assert str(ConfigError("there are no graphs").renamed("dataset")) == "dataset: there are no graphs"


def test_a_value_that_cannot_be_pickled_stays_behind():
    copy = pickle.loads(pickle.dumps(ConfigError("cannot be called", argument="f", value=lambda: 1)))
    assert copy.argument == "f"
    assert copy.value is MISSING


def make_non_finite():
    return NonFiniteError("bad", step=7, norm=float("inf"), epoch=2, batch_index=5, tries=3)


def test_a_non_finite_error_says_where_it_happened():
    error = make_non_finite()
    assert (error.step, error.norm, error.epoch, error.batch_index, error.tries) == (7, float("inf"), 2, 5, 3)
    assert str(error) == "bad"


def test_a_non_finite_error_survives_the_way_between_processes():
    copy = pickle.loads(pickle.dumps(make_non_finite()))
    assert (str(copy), copy.step, copy.tries) == ("bad", 7, 3)


def test_the_nearest_known_key_is_named():
    assert nearest("patince", ["patience", "seed"]) == "did you mean 'patience'?"


def test_all_known_keys_are_named_when_none_is_near():
    assert nearest("zzz", ["b", "a"]) == "known: a, b"


def test_an_unknown_key_is_refused_with_owner_key_and_nearest():
    with pytest.raises(ConfigError, match=r"Cfg: unknown key 'ampp'; did you mean 'amp'"):
        refuse_unknown("Cfg", ["amp", "ampp"], ["amp", "device"])
