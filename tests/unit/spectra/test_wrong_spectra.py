"""Batches that are no spectra of unit scale are named in the first step."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from spectra_kit import make, spectra
from treadle import TensorLoader
from treadle.errors import ConfigError

WAVELENGTHS = torch.linspace(0.9, 2.4, 32)
NAMED = {
    "counts": (spectra() * 1e4, "root mean square of"),
    "fluxes": (spectra() * 1e-15, "root mean square of"),
    "zeros": (torch.zeros(40, 32), "root mean square of 0;"),
    "wavelengths": (WAVELENGTHS.expand(40, 32), "equal and monotonic, as wavelengths are"),
    "wavelengths that fall": (WAVELENGTHS.flip(0).expand(40, 32), "equal and monotonic"),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_first_batch_that_is_no_spectra_of_unit_scale_is_named_once(case, tmp_path, caplog):
    data, message = NAMED[case]
    make(tmp_path, data=data.clone(), val=False, epochs=1).fit(1)
    assert sum(message in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("data", [spectra(), spectra() * 20, spectra()[:1].expand(40, 32).clone()])
def test_spectra_are_not_warned_of(data, tmp_path, caplog):
    make(tmp_path, data=data, val=False, epochs=1).fit(1)
    assert "first batch" not in caplog.text


def test_complex_spectra_are_refused(tmp_path):
    trainer = make(tmp_path, val=False)
    trainer.train_loader = DataLoader(spectra().to(torch.complex64), 8)
    with pytest.raises(ConfigError, match=r"spectra of torch\.complex64"):
        trainer.fit(1)


def with_one(value, row=12, column=3):
    data = spectra().clone()
    data[row, column] = value
    return data


LOADERS = {
    "a data set of tensors": lambda data: DataLoader(TensorDataset(data), 8),
    "a tensor": lambda data: DataLoader(data, 8),
    "a subset": lambda data: DataLoader(Subset(TensorDataset(data), range(0, 40, 2)), 8),
    "a TensorLoader": lambda data: TensorLoader(data, batch_size=8),
}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", LOADERS)
def test_values_that_are_not_finite_are_refused_before_step_1_with_row_and_column(kind, value, tmp_path):
    trainer = make(tmp_path, val=False)
    trainer.train_loader = LOADERS[kind](with_one(value))
    row = 6 if kind == "a subset" else 12
    with pytest.raises(ConfigError, match=rf"the first of them in row {row}, column 3 \({value}\)"):
        trainer.fit(1)
    assert trainer.step == 0


def test_a_run_that_skips_such_steps_is_only_warned(tmp_path, caplog):
    trainer = make(tmp_path, val=False, max_non_finite_grad_retries=4)
    trainer.train_loader = DataLoader(TensorDataset(with_one(math.nan)), 8)
    trainer.fit(1)
    assert "1 of 40 rows have values that are not finite, the first of them in row 12, column 3" in caplog.text
