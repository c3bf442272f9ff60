"""``treadle verify FILE``: a configuration is checked as a script is, and its faults are named."""

from __future__ import annotations

import json

import pytest

from config_kit import write_project
from treadle.cli.main import main
from treadle.errors import ConfigError
from treadle.runs.verify.describe import describe_difference
from treadle.runs.verify.runs import Verifier, two_servers


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with two_servers("fit.yaml", 0, tmp_path_factory.mktemp("servers") / "server.log") as both:
            yield both


@pytest.fixture
def verify(servers, tmp_path):
    def run(*arguments, **changes):
        file = write_project(tmp_path, **changes)
        settings = {"steps": 12, "kills": 2, "seed": 0, "folder": tmp_path / "runs", "log_progress": lambda text: None}
        return Verifier(str(file), arguments, **settings).run(servers)

    return run


def test_a_configuration_that_resumes_exactly_is_called_exact(verify, tmp_path):
    result = verify("model.width=5", "+model.dropout=0.5")
    assert result.verdict == "EXACT", describe_difference(result.difference)
    assert {kill.signal for kill in result.kills} == {"SIGKILL", "SIGTERM"}
    assert any(step > 0 for step in result.resumed_from)
    assert result.records > 12
    assert not (tmp_path / "run").exists()
    assert result.arranged == ["a checkpoint every 3 steps instead of every 4"]


FAULTS = {
    "unseeded_numpy_in_the_data": (
        {"item": "x = x + np.random.default_rng().normal()"}, "unseeded_data", "batch content", "default_rng([seed"
    ),
    "value_kept_in_a_module_of_the_project": (
        {"step": "COUNTS.put(1); x = x * (1 + 0.01 * COUNTS.qsize())"},  # a queue: of no kind that is carried
        "unregistered_buffer", "loss", "",
    ),
    "no_seed": ({"seed": ""}, "unseeded_script", "sample ids", "in a configuration, write seed: 0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(verify, fault):
    changes, cause, part, words = FAULTS[fault]
    result = verify(**changes)
    assert result.verdict == "NOT EXACT"
    assert (result.cause.name, result.difference.part) == (cause, part)
    assert words in " ".join([describe_difference(result.difference), result.cause.rule, result.cause.fix])


def test_what_the_trainer_does_not_take_is_a_wrong_setting(verify):
    with pytest.raises(ConfigError, match="its parts are data, model, optimizer, hooks"):
        verify("+modle.width=3")


def test_a_face_is_verified_as_its_command(tmp_path, monkeypatch, capsys):
    file = tmp_path / "tiny.yaml"
    file.write_text(
        "face: spectra\ndevice: cpu\nbatch_size: 16\ndata: {max_rows: 80}\n"
        "model: {d_model: 16, nhead: 2, num_layers: 1, dropout: 0.1}\n"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(SystemExit) as left:
        main(["verify", str(file), "--steps", "10", "--kills", "2", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (left.value.code, result["verdict"]) == (0, "EXACT")
    assert max(result["resumed_from"]) > 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("fit.yaml", ["model.widht=3"], "no key 'model.widht'; did you mean 'model.width'?"),
        ("fit.yml", [], "did you mean 'fit.yaml'?"),
        ("notes.txt", [], "must be a script that exists, such as train.py, a configuration, or "),
        ("face.yaml", ["epoch=3"], "did you mean 'epochs'?"),
    ],
)
def test_a_wrong_setting_is_one_line_before_anything_is_started(tmp_path, capsys, name, settings, words):
    write_project(tmp_path)
    (tmp_path / "face.yaml").write_text("face: spectra")
    (tmp_path / "notes.txt").write_text("config = {}")
    with pytest.raises(SystemExit) as left:
        main(["verify", str(tmp_path / name), *settings])
    assert left.value.code == 2
    assert words in capsys.readouterr().err
