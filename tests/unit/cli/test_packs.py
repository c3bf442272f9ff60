"""Packs are found by name, in treadle and in other packages; a run folder says whose run it holds."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import EntryPoint

import pytest
import torch
from rich.console import Console

from command_kit import treadle
from treadle.errors import ConfigError
from treadle.runs import packs
from treadle.runs.folder import read_record, write_record
from treadle.runs.pack import Pack, Run

SETTINGS = {"epochs": 1, "data": {"max_rows": 60}, "model": {"d_model": 8}}


class Mine(Pack):
    """A pack of another package."""

    name = "mine"


MINE, OTHER, NOTHING = Mine(), Mine(), 3
OTHER.name = "others"


@pytest.fixture
def installed(monkeypatch):
    """Make names of this module entry points."""

    def install(**places):
        found = [EntryPoint(name, f"{__name__}:{place}", packs.GROUP) for name, place in places.items()]
        monkeypatch.setattr(packs, "entry_points", lambda group: found if group == packs.GROUP else [])

    return install


def test_a_pack_of_another_package_stands_behind_those_of_treadle(installed):
    installed(mine="MINE")
    assert packs.pack_names() == [*packs.PACKS, "mine"]
    assert packs.find_pack("mine").name == "mine"


def test_no_package_replaces_a_pack_of_treadle(installed):
    installed(spectra="MINE")
    assert packs.find_pack("spectra").name == "spectra"
    assert packs.pack_names() == list(packs.PACKS)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("GONE", r"cannot be loaded \(AttributeError"),
        ("NOTHING", "is a int, but must be"),
        ("OTHER", "is a pack called 'others', but must be"),
    ],
)
def test_an_entry_point_that_is_no_pack_is_refused_and_leaves_the_other_commands(installed, capsys, place, words):
    installed(mine=place)
    with pytest.raises(ConfigError, match=words):
        packs.find_pack("mine")
    assert treadle("train", "--help") == 0
    shown = capsys.readouterr().out
    assert "mine     Cannot be loaded." in shown
    assert "spectra  A masked autoencoder" in shown
    assert treadle("train", "mine", "epochs=1") == 2
    assert "the entry point" in capsys.readouterr().err


# -- what a folder says of its run ------------------------------------------------------------------------------------


def test_a_folder_of_today_says_face_version_and_settings(tmp_path):
    write_record(tmp_path, {"face": "text", "config": SETTINGS, "corpus": "abc"})
    found = read_record(tmp_path)
    assert (found.face, found.config, found.identity, found.entries) == ("text", SETTINGS, {"corpus": "abc"}, None)
    assert found.version
    written = (tmp_path / "run.json").stat().st_mtime_ns
    write_record(tmp_path, {"face": "text", "config": SETTINGS, "corpus": "abc"})
    assert (tmp_path / "run.json").stat().st_mtime_ns == written


def test_an_older_folder_of_spectra_has_settings_without_a_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    found = read_record(tmp_path)
    assert (found.face, found.config, found.version, found.file) == ("spectra", SETTINGS, None, "config.json")


def test_an_older_folder_of_graphs_has_a_yaml_file(tmp_path):
    (tmp_path / "config.yaml").write_text("training:\n  epochs: 2\n  lr: 1.0e-05\n")
    found = read_record(tmp_path)
    assert (found.face, found.config, found.file) == ("graphs", {"training": {"epochs": 2, "lr": 1e-5}}, "config.yaml")


def test_an_older_folder_of_astro_has_its_name_among_the_settings(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"face": "astro", **SETTINGS}))
    found = read_record(tmp_path)
    assert (found.face, found.config, found.identity) == ("astro", SETTINGS, {})


def test_an_older_folder_of_text_has_a_fingerprint_beside_the_settings(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"face": "text", **SETTINGS, "corpus": "abc"}))
    found = read_record(tmp_path)
    assert (found.face, found.config, found.identity) == ("text", SETTINGS, {"corpus": "abc"})


def test_an_older_folder_of_a_configuration_file_has_a_list(tmp_path):
    (tmp_path / "run.json").write_text('[{"from_step": 0}]')
    found = read_record(tmp_path)
    assert (found.face, found.entries) == ("mini", [{"from_step": 0}])
    assert packs.pack_of_folder(tmp_path) is None


def test_a_folder_of_another_program_or_a_damaged_one_says_nothing(tmp_path, caplog):
    assert read_record(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert read_record(tmp_path) is None
    (tmp_path / "run.json").write_text('{"face": ')
    assert read_record(tmp_path) is None
    assert "run.json is damaged" in caplog.text


def test_a_part_of_a_run_belongs_to_its_pack(tmp_path):
    write_record(tmp_path, {"face": "text", "config": SETTINGS})
    for name in ("lora", "other"):
        (tmp_path / name).mkdir()
    pack = packs.pack_of_folder(tmp_path / "lora")
    assert (pack.name, pack.home_of(tmp_path / "lora")) == ("text", (tmp_path, "lora"))
    assert packs.pack_of_folder(tmp_path / "other") is None


def test_the_run_of_a_pack_that_is_not_installed_names_it(tmp_path, capsys):
    write_record(tmp_path, {"face": "waves", "config": {}})
    assert treadle("replay", tmp_path, "--step", 1) == 2
    assert "face='waves': there is no such pack" in capsys.readouterr().err


# -- a run whose data has changed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("trains", [True, False])
def test_data_that_has_changed_is_refused_for_every_pack(tmp_path, trains):
    write_record(tmp_path, {"face": "mine", "config": SETTINGS, "files": "abc"})
    run = Run(None, tmp_path, torch.device("cpu"), Console(quiet=True), home=tmp_path, trains=trains)

    class Read(Mine):
        def identity(self, data):
            return {"files": data, "newer": "not in the record"}

    Read().refuse_other_data(run, "abc")
    with pytest.raises(ConfigError, match=r"files differs from that in run\.json") as error:
        Read().refuse_other_data(run, "abd")
    assert ("--no-resume" in str(error.value)) is trains
    Read().refuse_other_data(dataclasses.replace(run, home=None), "abd")  # a fresh start


# -- settings that another one switches off ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pack", "switch", "idle"),
    [
        ("spectra", "trainer.use_ema=false", "trainer.ema_decay=0.9"),
        ("spectra", "trainer.amp=false", "trainer.amp_dtype=fp16"),
        ("spectra", "trainer.early_stop_patience=none", "trainer.early_stop_start_ratio=0.1"),
        ("spectra", "trainer.selection=last", "trainer.early_stop_patience=3"),
        ("spectra", "model.residual=true", "model.use_learnable_pos=true"),
        ("astro", "training.meaningful_loss.enabled=false", "training.meaningful_loss.weight_image=0.5"),
        ("astro", "training.num_workers=0", "training.prefetch_factor=4"),
        ("text", "samples.temperature=0", "samples.top_k=3"),
    ],
)
def test_a_setting_without_effect_is_refused_and_a_default_is_not(pack, switch, idle):
    found = packs.find_pack(pack)
    found.read_settings([switch], "cpu")
    for settings in ([switch, idle], [idle, switch]):
        with pytest.raises(ConfigError, match="has no effect, as") as error:
            found.read_settings(settings, "cpu")
        assert error.value.argument == idle.partition("=")[0]


@pytest.mark.parametrize(
    ("pack", "setting"),
    [
        ("spectra", "optimizer.lr=0"), ("text", "optimizer.lr=0"), ("text", "lora.lr=0"), ("text", "lora.alpha=0"),
        ("astro", "training.learning_rate=0"), ("graphs", "training.optimizer.lr=0"),
    ],
)  # fmt: skip
def test_a_rate_that_trains_nothing_is_refused(pack, setting):
    with pytest.raises(ConfigError, match="must be above 0"):
        packs.find_pack(pack).read_settings([setting], "cpu")
