"""Settings written as options, and settings written twice."""

from __future__ import annotations

import pytest

from treadle.cli.main import main


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("train spectra --epochs 3", "settings are KEY=VALUE: epochs=3"),
        ("train graphs --batch-size=4", "settings are KEY=VALUE: batch_size=4"),
        ("train run.yaml --max-steps", "settings are KEY=VALUE: max_steps=VALUE"),
        ("train spectra --epochs --device cpu", "settings are KEY=VALUE: epochs=VALUE"),
        ("train spectra --devic cpu", "(Possible options: --device)"),
    ],
)
def test_an_unknown_option_of_train_is_shown_as_a_setting(words, hint, capsys):
    with pytest.raises(SystemExit) as left:
        main(words.split())
    assert left.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("Error: No such option: --")
    assert hint in last
    assert ("KEY=VALUE" in last) == ("KEY=VALUE" in hint)


def shown(words: str, capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(words.split())
    return left.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "line", "warning"),
    [
        ("spectra epochs=1 epochs=2", "epochs=2", "epochs is set twice, to 1 and to 2; 2 counts"),
        ("spectra epochs=1 epochs=2 +epochs=3", "epochs=3", "set 3 times, to 1 and to 2 and to 3; 3 counts"),
        ("spectra optimizer.lr=1e-3 optimizer.lr=0.001", "optimizer.lr=0.001", None),
        ("FILE trainer.max_steps=5 trainer.max_steps=7", '"max_steps": 7', "trainer.max_steps is set twice, to 5 and"),
        ("FILE trainer.max_steps=5", '"max_steps": 5', None),
    ],
)
def test_a_setting_given_twice_has_its_last_value_and_is_named(words, line, warning, capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {type: treadle.BaseTrainer, max_steps: 3}\n")
    code, out, err = shown(f"train {words.replace('FILE', str(file))} --show-settings", capsys)
    assert code == 0
    assert line in out
    assert (warning is None and "set twice" not in err) or warning in err


def test_a_setting_given_twice_and_to_several_values_is_refused(capsys):
    for words in ("epochs=1,2 epochs=3", "epochs=3 epochs=1,2", "epochs=1,2 epochs=3,4"):
        code, _, err = shown(f"train spectra {words} --show-settings", capsys)
        assert code == 2
        assert "the key is set twice, and to several values" in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("spectra --out a --out=b", "--out is given 2 times, as a and as b; b counts"),
        ("spectra --resume epochs=3 --no-resume", "--resume and --no-resume are both given; the last one counts"),
        ("spectra --out a --out a", None),
        ("spectra epochs=3 --resume --out a", None),
    ],
)
def test_an_option_given_twice_is_named(words, named, capsys):
    code, _, err = shown(f"train {words} --show-settings", capsys)
    assert code == 0
    assert (named is None and "given" not in err) or f"warning: {named}\n" in err
