"""A wrong value of a setting: its whole name, the value, the rule, the line of its file, before anything is done."""

from __future__ import annotations

import pytest

from command_kit import treadle
from treadle.errors import ConfigError
from treadle.runs.packs import find_pack
from treadle.runs.setting_names import setting_of, settings_in_file, settings_named, settings_placed

# torch_geometric compiles functions with torch.jit.script when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
WRONG = {
    "spectra": [
        ("optimizer.lr=abc", "optimizer.lr=abc: must be float"),
        ("optimizer.lr=-1", "optimizer.lr=-1.0: must be above 0"),
        ("optimizer.lr=1e400", "optimizer.lr=1e400: must be a finite number"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1.0: must be at least 0"),
        ("model.dropout=2", "model.dropout=2.0: must lie in [0, 1]"),
        ("schedule.min_lr_scale=2", "schedule.min_lr_scale=2.0: must lie in [0, 1]"),
        ("schedule.warmup_epochs=-1", "schedule.warmup_epochs=-1: must be at least 0"),
        ("trainer.amp_dtype=int8", "trainer.amp_dtype=int8: must be 'bf16' or 'fp16'"),
        ("trainer.capture=1", "trainer.capture='1': use True"),
        ("trainer.parallel=all", "trainer.parallel='all': must be"),
        ("seed=-1", "seed=-1: must be a whole number from 0"),
        (f"data.split_seed={2**70}", f"data.split_seed={2**70}: must be a whole number from 0"),
        ("data.path=a.csv", "unknown setting 'data.path'; the data comes with the pack; for your own, adapt"),
        ("learning_rate=1", "unknown setting 'learning_rate'; did you mean 'optimizer.lr'?"),
    ],
    "text": [
        ("optimizer.lr=-1", "optimizer.lr=-1.0: must be above 0"),
        ("training.mixed_precision=int8", "training.mixed_precision='int8': must be none, bf16 or fp16"),
        ("training.grad_clip=-1", "training.grad_clip=-1.0: must be at least 0"),
        ("training.capture=x", "training.capture='x': use True"),
        ("lora.alpha=-1", "lora.alpha=-1.0: must be above 0"),
        ("samples.seed=-1", "samples.seed=-1: must be a whole number from 0"),
    ],
    "astro": [
        ("seed=-1", "seed=-1: must be a whole number from 0"),
        ("model.d_model=63", "model.n_heads=4: must divide model.d_model=63"),
        ("model.n_heads=0", "model.n_heads=0: must be at least 1"),
        ("training.parallel=x", "training.parallel='x': must be"),
        ("training.meaningful_loss.sample_k_per_modality=0", "training.meaningful_loss.sample_k_per_modality=0: "),
        ("lr=1", "unknown setting 'lr'; did you mean 'training.learning_rate'?"),
        ("training.lr=1", "unknown setting 'training.lr'; did you mean 'training.learning_rate'?"),
    ],
    "graphs": [
        ("training.optimizer.lr=abc", "training.optimizer.lr=abc: must be float or None"),
        ("training.optimizer.lr=-1", "training.optimizer.lr=-1.0: must be at least 0"),
        ("training.optimizer.betas=[2,3]", "training.optimizer.betas=[2, 3]: must be two numbers"),
        ("training.early_stopping=0", "training.early_stopping=0: must be at least 1"),
        ("model.hidden_dim=abc", "override 'model.hidden_dim=abc': model.hidden_dim is 56, a number"),
        ("model.dropout=x", "model.dropout=x: must be float"),
        ("model.use_local=3", "model.use_local=3: must be bool"),
        ("model.mpnn_type=foo", "model.mpnn_type='foo' is unknown; known: gat"),
        ("dataset.file=a.csv", "unknown setting 'dataset.file'; dataset=smiles_csv dataset.file=FILE reads molecules"),
        ("dataset.num_workers=-1", "dataset.num_workers=-1: must be at least 0"),
        ("seed=-1", "seed=-1: must be a whole number from 0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("pack", "setting", "words"), [(pack, *case) for pack, cases in WRONG.items() for case in cases]
)
def test_a_wrong_value_is_refused_by_the_settings_alone(pack, setting, words):
    read = find_pack(pack).read_settings
    with pytest.raises(ConfigError) as caught:
        read([setting], "cpu")
    assert str(caught.value).startswith(words)


def test_settings_of_a_section_are_checked_together():
    from treadle.spectra.runs import PACK

    # One after the other, the first would leave nothing to train on beside the default of the second.
    data = PACK.read_settings(["data.val_fraction=0.94", "data.test_fraction=0.05"], "cpu").data
    assert (data.val_fraction, data.test_fraction) == (0.94, 0.05)


@pytest.mark.parametrize("setting", ["type=foo", "warmup_epochs=-1", "min_lr=-1"])
def test_a_schedule_is_refused_before_the_data_are_loaded(setting, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("treadle.graphs.run_build.prepare_data", lambda *_: pytest.fail("the data were loaded"))
    assert treadle("train", "graphs", f"training.scheduler.{setting}", "--device", "cpu") == 2
    assert f"error: training.scheduler.{setting.partition('=')[0]}=" in capsys.readouterr().err


FILES = {
    "lr.yaml": ("face: spectra\nepochs: 1\noptimizer:\n  lr: abc\n", "optimizer.lr='abc': must be float", 4),
    "key.yaml": ("face: spectra\nmodle:\n  d_model: 16\n", "did you mean 'model.d_model'?", 3),
    "nested.yaml": ("face: spectra\nmodel: 3\n", "model: is a section", 2),
    "face.yaml": ("face: spectre\n", "did you mean 'spectra'?", 1),
    "device.yaml": ("face: text\ndevice: gpu\n", "device='gpu' is not a device name", 2),
    "lr.py": ("config = {\n  'face': 'astro',\n  'training': {'learning_rate': -1},\n}\n", "must be above 0", 3),
    "width.yaml": ("face: graphs\nmodel:\n  num_layers: 1\n  hidden_dim: 6\n", "model.hidden_dim=6 must be", 4),
}


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_value_of_a_file_is_named_with_its_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, words, line = FILES[name]
    (tmp_path / name).write_text(text)
    assert treadle("train", name) == 2
    (error,) = [said for said in capsys.readouterr().err.splitlines() if said.startswith("error: ")]
    assert words in error
    assert error.endswith(f"({name}, line {line})")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_value_of_the_command_line_is_not_looked_up_in_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("face: spectra\noptimizer:\n  lr: 0.1\n")
    assert treadle("train", "run.yaml", "optimizer.lr=abc") == 2
    assert capsys.readouterr().err.endswith("error: optimizer.lr=abc: must be float, but this is the str 'abc'\n")


def test_entries_of_lists_and_functions_have_lines(tmp_path):
    (tmp_path / "a.yaml").write_text("hooks:\n  - {type: A}\n  - type: B\n    every: 3\n")
    assert settings_in_file(tmp_path / "a.yaml")["hooks[1].every"].line == 4
    (tmp_path / "a.py").write_text(
        "def config(lr=1):\n    return {\n        'lr': lr,\n        'parts': ['x'],\n    }\n"
    )
    assert {key: entry.line for key, entry in settings_in_file(tmp_path / "a.py").items()} == {
        "lr": 3,
        "parts": 4,
        "parts[0]": 4,
    }
    (tmp_path / "b.yaml").write_text("a: [1\n")
    assert settings_in_file(tmp_path / "b.yaml") == settings_in_file(tmp_path / "none.yaml") == {}


@pytest.mark.parametrize(
    ("argument", "setting"),
    [
        ("dim", "dim"),  # two settings end with it
        ("TrainerConfig.clip", "trainer.clip"),
        ("k", "pe.lap.k"),
        ("[0].every", "hooks[0].every"),
        ("pe.dim", "pe.dim"),
        ("patience", "trainer.stop"),
        (None, None),
    ],
)
def test_an_argument_is_found_among_the_settings(argument, setting):
    known = ["pe.dim", "model.dim", "pe.lap.k", "trainer.clip", "trainer.stop", "hooks[0].every"]
    assert setting_of(argument, known, {"patience": "trainer.stop"}) == setting


def test_an_error_that_names_no_setting_leaves_as_it_is():
    given = ConfigError("nothing to train on")
    with pytest.raises(ConfigError) as caught, settings_named(["a.b"]):
        raise given
    assert caught.value is given


@pytest.mark.parametrize(
    ("wrong", "overrides", "said"),
    [
        ("torch.optim.Adm", [], "optimizer.type: 'torch.optim.Adm' is unknown ({file}, line 2)"),
        ("torch.optim.Adam", ["optimizer.type=torch.optim.Adam"], "optimizer.type: 'torch.optim.Adam' is unknown"),
        ("app.net", ["model.type='app.net'"], "model.type: 'app.net' is unknown"),
        ("app.Net", [], "type: 'app.Net' is unknown"),
    ],
)
def test_of_several_types_the_one_with_the_wrong_value_is_named(tmp_path, wrong, overrides, said):
    file = tmp_path / "run.yaml"
    file.write_text("model: {type: app.Net}\noptimizer: {type: torch.optim.Adm}\nhooks: [{type: app.Net}]\n")
    with pytest.raises(ConfigError) as caught, settings_placed(file, overrides):
        raise ConfigError(f"'{wrong}' is unknown", argument="type").about("type", wrong)
    assert str(caught.value) == said.format(file=file)
