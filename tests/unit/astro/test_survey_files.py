"""Columns of Parquet, HDF5 and FITS files that the tests write: the same numbers in each, block by block."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from treadle.astro import fit_tokenizers, iter_columns, load_surveys, read_columns, read_survey
from treadle.astro.tokenizers import SpectrumTokenizer
from treadle.errors import CheckpointError, ConfigError

ROWS = 10
ENDINGS = ["parquet", "h5", "fits", "fits.gz"]
IDS = np.array(["a", "b", "b", "c", "d", "é", "f", "g", "h", "a"])
MAG = np.where(np.arange(ROWS) == 4, np.nan, 17.5 + np.arange(ROWS))
COUNT = np.arange(ROWS, dtype=np.int32) - 3
FLUX = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)


def write(folder, ending):
    path = folder / f"stars.{ending}"
    if ending == "parquet":
        import pyarrow
        import pyarrow.parquet

        columns = {"id": IDS, "mag": pyarrow.array(MAG, from_pandas=True), "count": COUNT, "flux": list(FLUX)}
        pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=4)
    elif ending == "h5":
        import h5py

        with h5py.File(path, "w") as file:
            for name, values in {"id": IDS.astype(object), "mag": MAG, "count": COUNT, "flux": FLUX}.items():
                file[name] = values
    else:
        from astropy.io import fits

        ids = np.char.encode(IDS, "utf-8")
        columns = [("id", "2A", ids), ("mag", "D", MAG), ("count", "J", COUNT), ("flux", "4E", FLUX)]
        fits.BinTableHDU.from_columns(
            [fits.Column(name=name, format=kind, array=values) for name, kind, values in columns], name="STARS"
        ).writeto(path)
    return path


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_format_gives_the_same_columns(tmp_path, ending):
    read = read_columns(write(tmp_path, ending))
    assert set(read) == {"id", "mag", "count", "flux"}
    np.testing.assert_array_equal(read["id"], IDS)
    np.testing.assert_array_equal(read["mag"], MAG)
    np.testing.assert_array_equal(read["count"], COUNT)
    np.testing.assert_array_equal(read["flux"], FLUX)
    assert read["flux"].dtype == np.dtype("=f4")
    assert all(values.dtype.isnative and values.flags.writeable for values in read.values())


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_block_has_no_more_rows_than_asked_and_only_the_columns_asked(tmp_path, ending):
    blocks = list(iter_columns(write(tmp_path, ending), ["flux", "mag"], block_rows=4))
    assert all(list(block) == ["flux", "mag"] for block in blocks)
    assert max(len(block["mag"]) for block in blocks) <= 4
    np.testing.assert_array_equal(np.concatenate([block["mag"] for block in blocks]), MAG)
    np.testing.assert_array_equal(np.concatenate([block["flux"] for block in blocks]), FLUX)


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_first_rows_alone_can_be_read(tmp_path, ending):
    path = write(tmp_path, ending)
    assert read_columns(path, ["count"], max_rows=5)["count"].tolist() == COUNT[:5].tolist()
    assert len(read_columns(path, ["count"], max_rows=99)["count"]) == ROWS


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_becomes_a_survey(tmp_path, ending):
    survey = read_survey(
        write(tmp_path, ending),
        "gaia",
        scalars=["mag", "count"],
        spectrum="flux",
        image="flux",
        image_shape=(1, 2, 2),
        object_id="id",
    )
    assert survey.columns == ("gaia.mag", "gaia.count")
    np.testing.assert_array_equal(survey.scalars, np.stack([MAG, COUNT], axis=1))
    assert survey.objects[0] == survey.objects[9]
    assert survey.objects[1] == survey.objects[2]
    assert len(np.unique(survey.objects)) == 8
    np.testing.assert_array_equal(survey.spectra, FLUX)
    np.testing.assert_array_equal(survey.images, FLUX.reshape(-1, 1, 2, 2))


def test_a_survey_from_a_file_is_tokenized_like_one_of_the_package(tmp_path):
    import h5py

    spex = load_surveys()["spex"].take(np.arange(120))
    with h5py.File(tmp_path / "spex.h5", "w") as file:
        file["X"] = spex.spectra
        file["J-Ks"] = spex.column("spex.J-Ks")
    survey = read_survey(tmp_path / "spex.h5", "spex", scalars=["J-Ks"], spectrum="X")
    others = [part.take(np.arange(60)) for name, part in load_surveys().items() if name != "spex"]
    tokenizers = fit_tokenizers([survey, *others], v_image=8, scalar_bins=4, v_spectra=8, patch_size=8)
    expected = tokenizers.spectrum.encode(spex.spectra)
    found = tokenizers.spectrum.encode(survey.spectra)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_parquet_nulls_of_integers_and_flags_are_nan_and_nested_lists_are_pictures(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "nulls.parquet"
    picture = [[[1.0, 2.0], [3.0, None]], [[5.0, 6.0], [7.0, 8.0]]]
    columns = {"n": [1, None], "flag": [True, None], "picture": picture}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    read = read_columns(path)
    np.testing.assert_array_equal(read["n"], [1.0, np.nan])
    np.testing.assert_array_equal(read["flag"], [1.0, np.nan])
    np.testing.assert_array_equal(read["picture"], [[[1, 2], [3, np.nan]], [[5, 6], [7, 8]]])


def test_fits_markers_of_missing_integers_are_nan_also_in_scaled_columns(tmp_path):
    from astropy.io import fits

    stored = {"n": [1, -99, 3], "scaled": [2, -99, 4]}
    columns = [fits.Column(name=name, format="I", null=-99, array=np.array(n)) for name, n in stored.items()]
    path = tmp_path / "markers.fits"
    fits.BinTableHDU.from_columns(columns).writeto(path)
    for key, value in (("TSCAL2", 0.5), ("TZERO2", 10.0)):
        fits.setval(path, key, value=value, ext=1)
    read = read_columns(path)
    np.testing.assert_array_equal(read["n"], [1, np.nan, 3])
    np.testing.assert_array_equal(read["scaled"], [11, np.nan, 12])


def test_tables_inside_a_file_are_chosen_by_name(tmp_path):
    import h5py
    from astropy.io import fits

    with h5py.File(tmp_path / "groups.h5", "w") as file:
        file["photometry/r"] = [1.0, 2.0]
        file["table"] = np.array([(1, 0.5), (2, 0.25)], dtype=[("id", "i4"), ("z", "f8")])
    assert read_columns(tmp_path / "groups.h5", ["r"], table="photometry")["r"].tolist() == [1.0, 2.0]
    assert read_columns(tmp_path / "groups.h5", ["photometry/r"])["photometry/r"].tolist() == [1.0, 2.0]
    assert read_columns(tmp_path / "groups.h5", ["z"], table="table")["z"].tolist() == [0.5, 0.25]
    units = [
        fits.BinTableHDU.from_columns([fits.Column(name="z", format="D", array=np.array([value]))], name=name)
        for name, value in (("FIRST", 1.0), ("SECOND", 2.0))
    ]
    fits.HDUList([fits.PrimaryHDU(), *units]).writeto(tmp_path / "two.fits")
    for table, value in ((None, 1.0), ("SECOND", 2.0), (2, 2.0), (1, 1.0)):
        assert read_columns(tmp_path / "two.fits", table=table)["z"].tolist() == [value]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_unknown_column_names_the_nearest(tmp_path, ending):
    with pytest.raises(ConfigError, match="no column 'magg'; did you mean 'mag'"):
        read_columns(write(tmp_path, ending), ["magg"])


@pytest.mark.parametrize("ending", ["parquet", "h5", "fits"])
def test_a_damaged_file_is_named(tmp_path, ending):
    path = tmp_path / f"damaged.{ending}"
    path.write_bytes(b"this is no survey " * 200)
    with pytest.raises(CheckpointError, match="damaged"):
        read_columns(path)


def test_vectors_of_different_length_are_refused_also_across_blocks(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "ragged.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"flux": [[1.0], [1.0, 2.0]]}), path)
    with pytest.raises(ConfigError, match=r"'flux' has vectors of the lengths \[1, 2\]"):
        read_columns(path)


def test_text_numbers_and_vectors_are_not_taken_for_each_other(tmp_path):
    path = write(tmp_path, "parquet")
    for arguments, message in [
        ({"scalars": ["id"]}, "one number for each row"),
        ({"scalars": ["flux"]}, "one number for each row"),
        ({"scalars": [], "spectrum": "mag"}, "one vector of numbers"),
        ({"scalars": [], "image": "flux"}, "an image"),
        ({"scalars": [], "image": "flux", "image_shape": (1, 3, 3)}, "have 4 numbers each"),
        ({"scalars": []}, "name at least one column"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_survey(path, "gaia", **arguments)


def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        read_columns(tmp_path / "absent.parquet")
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(ConfigError, match=r"survey files end in \.parquet"):
        read_columns(tmp_path / "table.csv")
    with pytest.raises(ConfigError, match="a Parquet file is one table"):
        read_columns(write(tmp_path, "parquet"), table="STARS")
    with pytest.raises(ConfigError, match="no such group"):
        read_columns(write(tmp_path, "h5"), table="STARS")
    with pytest.raises(ConfigError, match="no such binary table; it has"):
        read_columns(write(tmp_path, "fits"), table="GALAXIES")
    with pytest.raises(ConfigError, match="max_rows=0"):
        read_columns(tmp_path / "stars.parquet", max_rows=0)


@pytest.mark.parametrize(("ending", "package"), [("parquet", "pyarrow"), ("h5", "h5py"), ("fits", "astropy.io")])
def test_without_its_package_the_extra_is_named(tmp_path, monkeypatch, ending, package):
    path = write(tmp_path, ending)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"treadle\[survey\]"):
        read_columns(path)


def parquet(folder, **columns):
    import pyarrow
    import pyarrow.parquet

    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("ids", [["a", None, "b"], [1, None, 2], [1.5, 2.5, 2.5]])
def test_rows_without_an_id_are_not_taken_for_one_object(tmp_path, ids):
    path = parquet(tmp_path, id=ids, g=[1.0, 2.0, 3.0])
    with pytest.raises(ConfigError, match=r"'id'.*one string or integer for each row"):
        read_survey(path, "s", scalars=["g"], object_id="id")


def test_large_whole_numbers_with_a_gap_are_not_rounded(tmp_path):
    path = parquet(tmp_path, id=[2**60 + 1, 2**60 + 2, None], g=[1.0, 2.0, 3.0])
    with pytest.raises(ConfigError, match=r"'id'.*missing.*2\*\*53"):
        read_columns(path, ["id"])
    assert read_columns(path, ["g"])["g"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.filterwarnings("ignore:File may have been truncated")
@pytest.mark.parametrize("ending", ["parquet", "h5", "fits"])
def test_a_file_that_ends_early_is_named(tmp_path, ending):
    path = write(tmp_path, ending)
    path.write_bytes(path.read_bytes()[: 6000 if ending == "fits" else 400])
    with pytest.raises(CheckpointError, match=f"stars.{ending} cannot be read"):
        read_columns(path)


@pytest.mark.parametrize("marker", [-99, -9999, 999])
def test_a_number_in_place_of_a_missing_one_is_named(tmp_path, marker, caplog):
    from astropy.table import Table

    magnitude = np.where(np.arange(ROWS) < 3, float(marker), 17.5 + np.arange(ROWS))
    Table({"mag": magnitude, "near": np.linspace(-150, 150, ROWS), "all": np.full(ROWS, 99)}).write(tmp_path / "a.fits")
    read_survey(tmp_path / "a.fits", "mine", scalars=["mag", "near", "all"])
    assert caplog.text.count("far from all others") == 1
    assert f"'mag' is {marker} in 3 of 10 rows" in caplog.text


def test_fluxes_beyond_float32_and_gaps_are_named_with_their_row(tmp_path):
    from astropy.table import Table

    flux = FLUX.astype(np.float64)
    flux[2, 1] = 1e45
    Table({"flux": flux}).write(tmp_path / "a.fits")
    with pytest.raises(ConfigError, match=r"'flux' has 1e\+45 in row 2, beyond float32"):
        read_survey(tmp_path / "a.fits", "mine", scalars=[], spectrum="flux")
    flux[2, 1] = np.nan
    with pytest.raises(ConfigError, match="1 of 10 rows are not, first row 2, which is nan at point 1"):
        SpectrumTokenizer.fit(flux, ["a"], 2, segment=4)
