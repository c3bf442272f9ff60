"""A folder that holds a run of another kind is refused, and stays as it is."""

from __future__ import annotations

import pytest
from rich.console import Console

from treadle.errors import ConfigError
from treadle.runs.folder import refuse_other_run
from treadle.runs.packs import PACKS, find_pack

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


@pytest.mark.parametrize("face", PACKS)
@pytest.mark.parametrize("what", HOLDS)
def test_a_folder_of_another_run_is_refused(tmp_path, what, face):
    name, content, own = HOLDS[what]
    (tmp_path / name).write_text(content)
    if face == own:
        refuse_other_run(tmp_path, face)
        return
    with pytest.raises(ConfigError, match=f"holds a run {what}; give another folder with --out"):
        find_pack(face).train([], out=tmp_path, device="cpu", resume=False, messages=Console(quiet=True))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_of_another_program_is_no_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for face in PACKS:
        refuse_other_run(tmp_path, face)


def test_a_run_of_a_script_is_named(tmp_path, caplog):
    refuse_other_run(tmp_path, "text")
    assert not caplog.text
    (tmp_path / "settings.json").write_text('{"face": "functional"}')
    refuse_other_run(tmp_path, "text")
    assert "holds a run of a script, whose files are set aside" in caplog.text
