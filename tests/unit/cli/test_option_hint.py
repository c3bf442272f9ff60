"""A setting that is written as an option is answered with how to write it."""

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
