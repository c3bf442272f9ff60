"""Codebooks in files: what is read, what is refused, and that nothing in a file runs unasked."""

from __future__ import annotations

import pickle

import joblib
import numpy as np
import pytest
import torch

from treadle.astro import load_codebook, load_npz_key, load_scalar_centers, save_codebook
from treadle.errors import CheckpointError, ConfigError

CODEBOOK = np.arange(6, dtype=np.float64).reshape(3, 2)


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
@pytest.mark.parametrize("make", [np.asarray, torch.tensor, lambda values: values.tolist()])
def test_what_is_saved_is_loaded_in_float32(tmp_path, ending, make):
    file = save_codebook(tmp_path / "new" / f"book{ending}", make(CODEBOOK))
    loaded = load_codebook(file)
    assert loaded.dtype == np.float32
    assert np.array_equal(loaded, CODEBOOK)


def test_a_plain_array_file_is_the_codebook(tmp_path):
    np.save(tmp_path / "book.npy", CODEBOOK)
    assert np.array_equal(load_codebook(tmp_path / "book.npy"), CODEBOOK)


def test_half_precision_in_safetensors_is_widened(tmp_path):
    from safetensors.torch import save_file

    save_file({"codebook": torch.tensor([[0.5, 1.5]], dtype=torch.bfloat16)}, tmp_path / "half.safetensors")
    assert load_codebook(tmp_path / "half.safetensors").tolist() == [[0.5, 1.5]]


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_the_first_candidate_that_is_there_is_read(tmp_path, ending):
    file = tmp_path / f"book{ending}"
    values = {"other": CODEBOOK, "centers": CODEBOOK + 1, "codebook": CODEBOOK + 2}
    if ending == ".npz":
        np.savez(file, **values)
    else:
        from safetensors.numpy import save_file

        save_file(values, file)
    assert np.array_equal(load_codebook(file), CODEBOOK + 2)
    assert np.array_equal(load_npz_key(file, ("missing", "other", "codebook")), CODEBOOK)
    assert np.array_equal(load_npz_key(file, "centers"), CODEBOOK + 1)
    with pytest.raises(KeyError, match=r"none of the keys missing; it has .*codebook"):
        load_npz_key(file, ("missing",))


def test_a_key_is_returned_as_it_stands_in_the_file(tmp_path):
    np.savez(tmp_path / "book.npz", counts=np.array([[[1, 2]]], dtype=np.int16))
    found = load_npz_key(tmp_path / "book.npz", ("counts",))
    assert found.dtype == np.int16
    assert found.shape == (1, 1, 2)


def test_centres_of_columns_are_laid_out_as_the_ids_are(tmp_path):
    file = save_codebook(tmp_path / "scalars.npz", [[1.0, 3.0], [10.0, 30.0]], key="bin_centers")
    assert load_scalar_centers(file).tolist() == [1.0, 3.0, 10.0, 30.0]
    np.save(tmp_path / "flat.npy", np.array([1.0, 2.0]))
    assert load_scalar_centers(tmp_path / "flat.npy").tolist() == [1.0, 2.0]
    np.save(tmp_path / "deep.npy", np.zeros((1, 2, 3)))
    with pytest.raises(ConfigError, match=r"shape \(1, 2, 3\)"):
        load_scalar_centers(tmp_path / "deep.npy")


class KMeansLike:
    """What a fitted clustering looks like after unpickling."""

    def __init__(self):
        self.n_clusters = 3
        self.cluster_centers_ = CODEBOOK


class Bomb:
    """Pickled, it leaves a file behind when somebody unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("ending", [".joblib", ".pkl", ".pickle"])
@pytest.mark.parametrize("content", [CODEBOOK, {"centroids": CODEBOOK}, KMeansLike()])
def test_pickles_are_read_when_they_are_trusted(tmp_path, ending, content):
    file = tmp_path / f"book{ending}"
    if ending == ".joblib":
        joblib.dump(content, file)
    else:
        file.write_bytes(pickle.dumps(content))
    assert np.array_equal(load_codebook(file, allow_pickle=True), CODEBOOK)


@pytest.mark.parametrize("ending", [".joblib", ".pkl", ".pickle"])
def test_pickles_are_refused_unasked_with_the_way_to_convert_them(tmp_path, ending):
    file = tmp_path / f"book{ending}"
    file.write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(ConfigError, match=r"runs code .* allow_pickle=True.*save_codebook\('book.npz', load_codebook"):
        load_codebook(file)
    with pytest.raises(ConfigError, match="allow_pickle=True reads it"):
        load_npz_key(file, ("centroids",))
    assert not (tmp_path / "ran").exists()


def test_objects_in_numpy_files_are_never_unpickled(tmp_path):
    objects = np.array([Bomb(tmp_path / "ran")], dtype=object)
    np.save(tmp_path / "book.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "book.npz", centroids=objects)
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(objects))
    for name in ("book.npy", "book.npz", "pickle.npz"):
        with pytest.raises(ConfigError, match="does not hold plain numbers"):
            load_codebook(tmp_path / name, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_pickled_arrays_next_to_a_codebook_are_not_read(tmp_path):
    """As in the tokenizer files of astromodal."""
    bands = np.array([Bomb(tmp_path / "ran")], dtype=object)
    np.savez(tmp_path / "image.npz", bands=bands, codebook=CODEBOOK, bin_centers=CODEBOOK[0])
    assert np.array_equal(load_codebook(tmp_path / "image.npz"), CODEBOOK)
    assert np.array_equal(load_npz_key(tmp_path / "image.npz", ("centers", "codebook")), CODEBOOK)
    assert np.array_equal(load_scalar_centers(tmp_path / "image.npz"), CODEBOOK[0])
    with pytest.raises(KeyError, match="it has bands, codebook, bin_centers"):
        load_codebook(tmp_path / "image.npz", ("clusters",))
    with pytest.raises(ConfigError, match="does not hold plain numbers"):
        load_npz_key(tmp_path / "image.npz", ("bands",))
    assert not (tmp_path / "ran").exists()


def test_a_pickled_object_without_a_codebook_lists_what_it_has(tmp_path):
    file = tmp_path / "book.pkl"
    file.write_bytes(pickle.dumps(KMeansLike()))
    with pytest.raises(KeyError, match=r"none of the keys codes; it has n_clusters, cluster_centers_"):
        load_codebook(file, ("codes",), allow_pickle=True)


@pytest.mark.parametrize("load", [load_codebook, load_scalar_centers, lambda path: load_npz_key(path, ("a",))])
def test_a_missing_file_and_another_kind_of_file_are_named(tmp_path, load):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere.npz")
    (tmp_path / "book.csv").write_text("1,2")
    with pytest.raises(ConfigError, match="must end in"):
        load(tmp_path / "book.csv")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(3), r"shape \(3,\); it must be \(entries, dimensions\)"),
        (np.array([[0.0, np.nan]]), "1 numbers are not finite in float32"),
        (np.array([[0.0, 1e39]]), "1 numbers are not finite in float32"),
        (np.array([["a"]]), "must hold real numbers"),
    ],
)
def test_a_file_that_holds_no_codebook_is_refused(tmp_path, values, message):
    np.savez(tmp_path / "book.npz", centroids=values)
    with pytest.raises(ValueError, match=message):
        load_codebook(tmp_path / "book.npz")


@pytest.mark.parametrize("ending", [".npz", ".npy", ".safetensors"])
def test_a_damaged_file_is_named(tmp_path, ending):
    file = tmp_path / f"book{ending}"
    if ending == ".npy":
        np.save(file, CODEBOOK)
    else:
        save_codebook(file, CODEBOOK)
    whole = file.read_bytes()
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises((CheckpointError, ConfigError), match="book"):
            load_codebook(file)


def test_a_flipped_byte_in_the_numbers_is_found(tmp_path):
    file = save_codebook(tmp_path / "book.npz", CODEBOOK)
    whole = bytearray(file.read_bytes())
    whole[whole.index(np.float32(5).tobytes())] ^= 1
    file.write_bytes(whole)
    with pytest.raises(CheckpointError, match="CRC"):
        load_codebook(file)


def test_what_cannot_be_saved_is_refused_and_the_old_file_stays(tmp_path):
    file = save_codebook(tmp_path / "book.npz", CODEBOOK)
    with pytest.raises(ConfigError, match="not finite"):
        save_codebook(file, [[float("inf")]])
    with pytest.raises(ConfigError, match=r"written as \.npz or \.safetensors"):
        save_codebook(tmp_path / "book.npy", CODEBOOK)
    assert np.array_equal(load_codebook(file), CODEBOOK)
    assert [path.name for path in tmp_path.iterdir()] == ["book.npz"]


def test_without_joblib_the_extra_is_named(tmp_path, monkeypatch):
    import sys

    (tmp_path / "book.pkl").write_bytes(pickle.dumps(CODEBOOK))
    monkeypatch.setitem(sys.modules, "joblib", None)
    with pytest.raises(ImportError, match=r"treadle\[astro\]"):
        load_codebook(tmp_path / "book.pkl", allow_pickle=True)
