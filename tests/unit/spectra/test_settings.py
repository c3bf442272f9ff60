"""Settings of the spectra face that are no settings are refused before any work; spellings of one value are equal."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest
import torch

from spectra_kit import make
from treadle import ConfigError, ParallelConfig
from treadle.checkpoint.schema import to_plain
from treadle.faces.parallel import as_parallel
from treadle.spectra import ExtractorConfig, TesterConfig, TrainerConfig

MAY_BE_NONE = {
    TrainerConfig: {
        "device", "grad_clip", "early_stop_patience", "resume_from", "max_non_finite_grad_retries", "parallel",
    },
    TesterConfig: {"device", "fixed_visible"},
    ExtractorConfig: {"device", "save_path"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "field"), [(settings, field.name) for settings in MAY_BE_NONE for field in fields(settings)]
)
def test_none_is_refused_where_it_has_no_meaning(settings, field):
    if field in MAY_BE_NONE[settings]:
        assert getattr(settings(**{field: None}), field) is None
    else:
        with pytest.raises(ConfigError, match=f"{field}=None"):
            settings(**{field: None})


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (TrainerConfig, "out_dir"), (TesterConfig, "out_dir"), (TesterConfig, "history_filename"),
        (ExtractorConfig, "save_path"),
    ],
)  # fmt: skip
def test_what_is_no_path_is_refused_when_it_is_given(settings, field):
    with pytest.raises(ConfigError, match=f"^{field}=3: must be a path"):
        settings(**{field: 3})


@pytest.mark.parametrize("settings", [TrainerConfig, TesterConfig])
def test_a_seed_that_torch_has_not_is_refused_before_training(settings):
    with pytest.raises(ConfigError, match=f"^eval_seed={2**64}: must be from"):
        settings(eval_seed=2**64)
    assert settings(eval_seed=-1).eval_seed == -1


def test_a_device_object_and_numbers_of_numpy_are_as_good_as_plain_ones(tmp_path):
    plain = make(tmp_path / "plain", device="cpu", eval_seed=3).fit(1)
    other = make(tmp_path / "other", device=torch.device("cpu"), eval_seed=np.int64(3))
    assert other.fit(1) == plain
    config = torch.load(tmp_path / "other" / "checkpoints" / "last.pt", weights_only=True)["config"]
    assert (config["device"], config["eval_seed"]) == ("cpu", 3)
    assert TrainerConfig.from_dict(config) == TrainerConfig.from_dict(other.cfg.to_dict())


def test_settings_come_back_equal_from_plain_values(tmp_path):
    settings = TrainerConfig(out_dir=tmp_path, device="cpu", resume_from=tmp_path / "last.pt", reduction="sum")
    values = settings.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert TrainerConfig.from_dict(values) == settings
    assert TrainerConfig.from_dict({**values, "grad_clip": 2.0}) != settings
    assert settings != values


@pytest.mark.parametrize(
    "parallel",
    [
        "fsdp",
        {"kind": "fsdp", "replicas": 2},
        ParallelConfig("fsdp", param_dtype=torch.bfloat16, reduce_dtype="fp32"),
        ParallelConfig("ddp", blocks=[torch.nn.Linear, torch.nn.LayerNorm(2)]),
    ],
)
def test_every_way_to_spread_a_model_goes_into_a_checkpoint_and_back(parallel):
    values = TrainerConfig(parallel=parallel).to_dict()
    assert to_plain(values, "config") == values
    assert TrainerConfig.from_dict(values).to_dict() == values
    assert as_parallel(values["parallel"]).kind == as_parallel(parallel).kind


def test_a_setting_that_another_one_switches_off_is_named(tmp_path, caplog):
    make(tmp_path, ema_decay=0.9, use_ema=True)
    assert "has no effect" not in caplog.text
    make(tmp_path, ema_decay=0.9, use_ema=False)
    assert "cfg.ema_decay=0.9 has no effect, as use_ema is False" in caplog.text


@pytest.mark.parametrize("changed", [{"eval_seed": 4}, {"selection": "last"}, {"early_stop_min_delta": 0.1}])
def test_a_resumed_run_names_a_setting_that_nothing_else_compares(tmp_path, caplog, changed):
    make(tmp_path).fit(1)
    make(tmp_path, **changed).fit(2)
    assert f"{next(iter(changed))}=" in caplog.text
    assert "from here on the run differs" in caplog.text
