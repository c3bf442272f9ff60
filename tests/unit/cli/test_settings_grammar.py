"""One grammar of ``key=value`` for every command that takes settings: the same text means the same everywhere."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

import graph_data_kit  # noqa: F401  (lets the warnings of torch_geometric's import through)
from treadle.errors import ConfigError
from treadle.graphs.run_config import read_settings
from treadle.graphs.runs import PACK
from treadle.runs.packs import find_pack
from treadle.runs.settings import flat
from treadle.runs.target import PackRun, read_target

SCRIPT = Path(__file__).parents[3] / "scripts" / "train.py"
FILE = {"trainer": {"flag": True, "limit": 1.0, "rate": 0.1, "folder": "runs"}}
# Of each entry: a bool, a setting that may be None, a number and a text.
KEYS = {
    "file": ("trainer.flag", "trainer.limit", "trainer.rate", "trainer.folder"),
    "spectra": ("model.use_learnable_pos", "trainer.grad_clip", "optimizer.lr", None),
    "text": ("training.capture", "training.grad_clip", "optimizer.lr", "samples.prompt"),
    "astro": ("use_ce", "training.grad_clip", "training.learning_rate", None),
    "graphs": ("deterministic", "training.grad_clip", "training.optimizer.lr", "dataset.root"),
    "scripts/train.py": ("deterministic", "training.grad_clip", "training.optimizer.lr", "dataset.root"),
    "file of a pack": ("deterministic", "training.grad_clip", "training.optimizer.lr", "dataset.root"),
}
YES, NO = ("true", "yes", "on", "True", "YES", "On"), ("false", "no", "off", "False", "NO")
NONE = ("none", "null", "None")


@pytest.fixture
def settings(tmp_path, monkeypatch, capsys):
    """Read settings as an entry does; what it refuses is a ConfigError."""

    def of_script(texts):
        found = []
        monkeypatch.setattr(PACK, "run", lambda run, show: found.append(run.config.to_dict()))
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *texts])
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit:
            raise ConfigError("".join(capsys.readouterr())) from None
        return found[0]

    def read(entry, texts):
        monkeypatch.chdir(tmp_path)
        if entry == "scripts/train.py":
            return flat(of_script(texts))
        if entry == "file":
            (tmp_path / "run.py").write_text(f"config = {FILE!r}\n")
            return flat(read_target(Path("run.py"), texts))
        if entry == "file of a pack":
            (tmp_path / "run.yaml").write_text("face: graphs\nmodel: light\n")
            run = read_target(Path("run.yaml"), texts)
            assert isinstance(run, PackRun)
            return flat(read_settings(run.settings).to_dict())
        pack = find_pack(entry)
        return flat(json.loads(json.dumps(pack.values(pack.read_settings(texts, "cpu")), default=str)))

    return read


entries = pytest.mark.parametrize("entry", KEYS)


@entries
@pytest.mark.parametrize("plus", ["", "+"])
def test_words_for_bools_and_none_mean_one_thing(entry, plus, settings):
    flag, limit, rate, _ = KEYS[entry]
    words = [*((word, True) for word in YES), *((word, False) for word in NO)]
    for word, meant in words if entry != "scripts/train.py" else [("Yes", True), ("off", False)]:
        assert settings(entry, [f"{plus}{flag}={word}"])[flag] is meant, word
    for word in NONE if entry != "scripts/train.py" else ["None"]:
        assert settings(entry, [f"{plus}{limit}={word}"])[limit] is None, word
    found = settings(entry, [f"{limit}=2", f"{plus}{rate}=1e-3"])
    assert (found[limit], found[rate]) == (2, 1e-3)


@entries
def test_a_number_stands_for_a_text_and_quotes_make_one(entry, settings):
    text = KEYS[entry][3]
    if text is None:
        pytest.skip("has no setting that is any text")
    assert settings(entry, [f"{text}=2024"])[text] == "2024"
    assert settings(entry, [f"{text}='off'"])[text] == "off"
    assert settings(entry, [f'{text}="none"'])[text] == "none"


@entries
@pytest.mark.parametrize(("which", "value"), [(0, "maybe"), (0, "3"), (2, "fast"), (2, "yes")])
def test_a_value_of_another_kind_is_refused_by_name(entry, which, value, settings):
    key = KEYS[entry][which]
    if entry == "text" and which == 0:
        pytest.skip("capture may be a word")
    with pytest.raises(ConfigError) as caught:
        settings(entry, [f"{key}={value}"])
    assert key in str(caught.value)
    assert value in str(caught.value)


@pytest.mark.parametrize("entry", ["graphs", "scripts/train.py", "file of a pack"])
def test_lists_and_dicts_need_no_quotes(entry, settings):
    found = settings(
        entry, ["dataset=synthetic/tree", "pe.relative.reduce=[min, max]", "+dataset.graph_params.num_nodes=[5,9]"]
    )
    assert found["pe.relative.reduce"] == ["min", "max"]
    assert found["dataset.graph_params.num_nodes"] == [5, 9]
