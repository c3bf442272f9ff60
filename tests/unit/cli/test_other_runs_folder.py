"""A folder that holds a run of another kind is refused, and stays as it is."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from treadle.errors import ConfigError
from treadle.runs.folder import refuse_other_run

# torch_geometric compiles functions with torch.jit.script when it is imported, which torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

SPECTRA = '{"epochs": 1, "data": {}, "model": {}}'
HOLDS = {
    "of a configuration file": ("run.json", "[]", None),
    "of 'treadle train graphs'": ("config.yaml", "", "graphs"),
    "of 'treadle train spectra'": ("config.json", SPECTRA, "spectra"),
    "of 'treadle train astro'": ("config.json", '{"face": "astro"}', "astro"),
    "of 'treadle train text'": ("config.json", '{"face": "text"}', "text"),
}
OPENS = {
    "spectra": lambda command, out: command._look_into(out, {}, resume=False),
    "graphs": lambda command, out: command._stored_states(SimpleNamespace(out=out, checkpoints=out / "checkpoints")),
    "astro": lambda command, out: command._goes_on(
        SimpleNamespace(out=out, checkpoints=out / "checkpoints"), resume=False
    ),
    "text": lambda command, out: command._run(SimpleNamespace(out=out), resume=False, explicit=False),
}


@pytest.mark.parametrize("face", OPENS)
@pytest.mark.parametrize("what", HOLDS)
def test_a_folder_of_another_run_is_refused(tmp_path, what, face):
    name, content, own = HOLDS[what]
    (tmp_path / name).write_text(content)
    if face == own:
        refuse_other_run(tmp_path, face)
        return
    with pytest.raises(ConfigError, match=f"holds a run {what}; give another folder with --out"):
        OPENS[face](importlib.import_module(f"treadle.{face}.runs"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_of_another_program_is_no_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for face in OPENS:
        refuse_other_run(tmp_path, face)
