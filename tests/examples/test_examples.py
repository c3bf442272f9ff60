"""Every example runs from the command line, reaches its figure, and goes on where it was stopped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from processes import python

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments):
    done = python(str(EXAMPLES / name), *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_digits_are_recognised_and_a_second_call_goes_on(tmp_path):
    out, _ = run("mini_digits.py", "--workspace", tmp_path, "--max-steps", 300, "--device", "cpu")
    assert float(re.search(r"accuracy after 300 steps: ([\d.]+)", out).group(1)) > 0.95
    _, err = run("mini_digits.py", "--workspace", tmp_path, "--max-steps", 320, "--device", "cpu")
    assert "checkpoint_step_300.pt" in err


def test_fat_is_read_from_the_latent_of_meat_spectra(tmp_path):
    out, _ = run("spectra_tecator.py", "--out", tmp_path, "--epochs", 40)
    assert float(re.search(r"R² ([-\d.]+)", out).group(1)) > 0.8


def test_fat_is_read_from_meat_spectra_and_a_second_call_goes_on(tmp_path):
    out, _ = run("functional_tecator.py", "--out", tmp_path, "--epochs", 50)
    assert float(re.search(r"R² ([-\d.]+)", out).group(1)) > 0.8
    again, err = run("functional_tecator.py", "--out", tmp_path, "--epochs", 50)
    assert again == out
    assert "checkpoint_epoch_50.pt" in err


def test_lora_lowers_the_loss_on_statements_and_a_second_call_shows_the_same(tmp_path):
    settings = ("text_lora.py", "--out", tmp_path, "--epochs", 1, "--lora-epochs", 1)
    out, _ = run(*settings)
    before, after = map(float, re.search(r"([\d.]+) before LoRA, ([\d.]+) after", out).groups())
    assert after < before < 5.5  # 6.2 nats is a guess among 512 tokens
    again, err = run(*settings)
    assert again == out
    assert "resumed from" in err


def test_three_surveys_are_trained_on_and_a_second_call_goes_on(tmp_path):
    settings = ("train_with_meaningful_loss.py", "--out", tmp_path, "--rows", 150)
    first, _ = run(*settings, "--epochs", 1)
    out, err = run(*settings, "--epochs", 2)
    before, after = (float(re.search(r"cross-entropy ([\d.]+)", text).group(1)) for text in (first, out))
    assert after < before < 7.2  # a guess among 1,349 ids costs 7.21 nats
    assert "ckpt_epoch_001.pt" in err
    assert "after 2 epochs" in out
    assert out.count("variance explained model") == 5


def test_own_molecules_are_learned_and_a_second_call_shows_the_same(tmp_path):
    settings = ("graphs_own_molecules.py", "--out", tmp_path, "--count", 300, "--epochs", 10)
    out, _ = run(*settings)
    error, guess = map(float, re.search(r"absolute error ([\d.]+), of the mean ([\d.]+)", out).groups())
    assert error < 0.75 * guess
    again, err = run(*settings)
    assert again == out
    assert "resumed from" in err


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_under_80_lines_and_has_a_test(example):
    assert len(example.read_text(encoding="utf-8").splitlines()) < 80
    assert example.name in Path(__file__).read_text(encoding="utf-8")


SHORT = {
    "functional_tecator.py": ["--epochs", "1"],
    "graphs_own_molecules.py": ["--epochs", "1", "--count", "60"],
    "mini_digits.py": ["--max-steps", "2", "--device", "cpu"],
    "spectra_tecator.py": ["--epochs", "1"],
    "text_lora.py": ["--epochs", "1", "--lora-epochs", "1"],
    "train_with_meaningful_loss.py": ["--epochs", "1", "--rows", "30"],
}


@pytest.mark.slow  # a new interpreter for each; the tests above fork this one, which has imported much
@pytest.mark.parametrize("name", SHORT)
def test_an_example_imports_what_it_needs(name, tmp_path):
    where = ["--workspace" if name == "mini_digits.py" else "--out", str(tmp_path)]
    command = [sys.executable, str(EXAMPLES / name), *SHORT[name], *where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
