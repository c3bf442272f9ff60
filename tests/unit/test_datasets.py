from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from treadle.datasets import _files, load_sdss, load_spex, load_tecator, load_xdf

LOADERS = (load_sdss, load_spex, load_tecator, load_xdf)


def test_spex_has_the_shapes_units_and_counts_of_its_description():
    spex = load_spex()
    assert spex.spectra.shape == (1939, 256)
    assert spex.spectra.dtype == np.float32
    assert np.isfinite(spex.spectra).all()
    assert spex.wavelengths.shape == (256,)
    assert spex.wavelengths[[0, -1]].tolist() == pytest.approx([0.9, 2.4])
    assert np.allclose(np.diff(spex.wavelengths), 1.5 / 255, atol=1e-6)
    assert spex.wavelength_unit == "µm"
    assert spex.jhk_columns == ("J", "H", "Ks")
    assert len(set(spex.name.tolist())) == 1755
    assert all(spex.bibcode)
    # The flux is relative to its median there, up to the grid and float16.
    near = (spex.wavelengths > 1.2) & (spex.wavelengths < 1.3)
    assert np.allclose(np.median(spex.spectra[:, near], axis=1), 1, atol=0.1)


def test_spex_labels_are_counted_with_the_unknown_ones():
    spex = load_spex()
    assert Counter(spex.spectral_class.tolist()) == {"M": 822, "L": 842, "T": 136, "": 139}
    assert (spex.spt == "").sum() == 139
    assert spex.j_minus_k.dtype == np.float32
    assert np.isnan(spex.j_minus_k).sum() == 29
    assert np.nanmax(spex.j_minus_k) == pytest.approx(6.049, abs=1e-3)


def test_tecator_is_in_per_cent_and_nanometres():
    tecator = load_tecator()
    assert tecator.spectra.shape == (215, 100)
    assert tecator.wavelengths[[0, -1]].tolist() == [850, 1050]
    assert tecator.composition[0].tolist() == pytest.approx([60.5, 22.5, 16.7])
    assert tecator.composition_columns == ("water", "fat", "protein")
    assert "as long as this permission note is attached" in tecator.licence


def test_sdss_missing_infrared_magnitudes_are_nan_and_not_zero():
    sdss = load_sdss()
    assert sdss.table.shape == (9988, 10)
    assert len(sdss.units) == len(sdss.columns) == 10
    missing = dict(zip(sdss.columns, np.isnan(sdss.table).sum(axis=0).tolist(), strict=True))
    assert {name for name, count in missing.items() if count} == {"J", "K"}
    assert not (sdss.table[:, -2:] == 0).any()


def test_xdf_holds_bytes_and_named_scalars():
    xdf = load_xdf()
    assert (xdf.images.shape, xdf.images.dtype) == ((986, 3, 32, 32), np.uint8)
    assert xdf.scalars.shape == (986, len(xdf.scalar_columns)) == (986, len(xdf.scalar_units))


@pytest.mark.parametrize("load", LOADERS)
def test_arrays_are_fresh_writable_and_cited(load):
    first, second = load(), load()
    for field in dataclasses.fields(first):
        value = getattr(first, field.name)
        if isinstance(value, np.ndarray):
            before = getattr(second, field.name).copy()
            value[...] = "changed" if value.dtype.kind == "U" else 1
            assert np.array_equal(getattr(second, field.name), before, equal_nan=value.dtype.kind == "f")
    assert first.citation
    assert first.licence
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.citation = "mine"


@pytest.mark.parametrize("load", LOADERS)
def test_the_named_licence_file_is_in_the_package(load):
    licence = load().licence
    folder = Path(_files.__file__).parent
    assert (folder / "PROVENANCE.md").is_file()
    if "(licenses/" in licence:
        assert (folder / licence.split("(")[1].split(")")[0]).is_file()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder that stands for the package's, whose files a test may damage."""
    monkeypatch.setattr(_files.resources, "files", lambda name: tmp_path)
    return tmp_path


def read(shapes):
    return _files.read_arrays("x.npz", shapes)


def test_half_precision_is_widened(package):
    np.savez(package / "x.npz", a=np.arange(3, dtype=np.float16))
    assert read({"a": (3,)})["a"].dtype == np.float32


def test_a_missing_file_is_named(package):
    with pytest.raises(FileNotFoundError, match=r"'x\.npz'.*reinstall"):
        read({"a": (3,)})


@pytest.mark.parametrize("damage", ["cut", "flip", "garbage", "empty", "absent array"])
def test_a_damaged_file_is_named_with_the_cause(package, damage):
    target = package / "x.npz"
    np.savez_compressed(target, **{"b" if damage == "absent array" else "a": np.random.rand(500)})
    content = bytearray(target.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[len(content) // 2] ^= 0xFF
    elif damage in ("garbage", "empty"):
        content = b"not an archive" if damage == "garbage" else b""
    target.write_bytes(content)
    with pytest.raises(ValueError, match=r"'x\.npz'.*damaged.*reinstall"):
        read({"a": (500,)})


def test_an_array_of_objects_is_refused(package):
    np.savez(package / "x.npz", a=np.array([{}, None], dtype=object))
    with pytest.raises(ValueError, match="damaged"):
        read({"a": (2,)})


def test_another_shape_is_refused(package):
    np.savez(package / "x.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match=r"shape \(3,\), but must have \(4,\)"):
        read({"a": (4,)})


def test_importing_the_data_sets_loads_nothing_heavy_and_opens_no_file():
    code = (
        "import sys\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(args[0]) if event == 'open' else None)\n"
        "import treadle.datasets\n"
        "assert not {'matplotlib', 'sklearn', 'pandas', 'scipy'} & set(sys.modules), sorted(sys.modules)\n"
        "assert not [name for name in opened if str(name).endswith('.npz')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
