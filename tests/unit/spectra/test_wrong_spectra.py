"""Batches that are no spectra of unit scale are named in the first step."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from spectra_kit import make, spectra
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
