from __future__ import annotations

import math
import struct
import subprocess
import sys

import numpy as np
import pytest

from treadle.datasets.spectral_types import spectral_class_letter, spectral_type_number
from treadle.runs import figures
from treadle.spectra.pictures import (
    plot_cluster_map,
    plot_latent_map,
    plot_reconstructions,
    plot_training_curves,
)

RNG = np.random.default_rng(0)
GRID = np.linspace(0.9, 2.4, 32)


def history(num_epochs=4, val=lambda epoch: 1 / epoch):
    return [{"epoch": e, "train_loss": 1 / e, "val_loss": val(e), "lr": 1e-3 / e} for e in range(1, num_epochs + 1)]


def draw_curves(path):
    return plot_training_curves(history(), path)


def draw_page(path, num_rows=3):
    x = RNG.normal(size=(num_rows, 32))
    seen = np.repeat(RNG.random((num_rows, 8)) > 0.5, 4, axis=1)
    return plot_reconstructions(GRID, x, x + 0.1, seen, [f"row {i}" for i in range(num_rows)], path)


def draw_latent(path):
    return plot_latent_map(RNG.normal(size=(5, 8)), ["M8.0", "L5.0", "T2.0", "", "M alph"], path)


def draw_clusters(path, **options):
    z, x = RNG.normal(size=(12, 2)), RNG.normal(size=(12, 32))
    return plot_cluster_map(z, np.arange(12) % 4, x, GRID, path, **options)


def png_size(path):
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize("draw", [draw_curves, draw_page, draw_latent, draw_clusters])
def test_a_picture_is_one_complete_png_of_sensible_size_and_leaves_rcparams(draw, tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    target = draw(tmp_path / "new" / "picture.png")
    assert target == tmp_path / "new" / "picture.png"
    width, height = png_size(target)
    assert 600 <= width <= 2000
    assert 300 <= height <= 1600
    assert [file.name for file in target.parent.iterdir()] == ["picture.png"]
    assert target.stat().st_mode & 0o777 == 0o644
    assert dict(matplotlib.rcParams) == before


def test_neither_import_nor_drawing_loads_pyplot():
    code = (
        "import sys, tempfile, pathlib\n"
        "from treadle.spectra import pictures, probes\n"
        "assert not {'matplotlib', 'sklearn', 'pandas'} & set(sys.modules)\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    record = {'epoch': 1, 'train_loss': 1.0, 'val_loss': None, 'lr': 1e-3}\n"
        "    pictures.plot_training_curves([record], pathlib.Path(folder) / 'a.png')\n"
        "assert 'matplotlib.figure' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    "records",
    [
        history(1),
        history(30),
        history(val=lambda epoch: None),
        history(val=lambda epoch: math.nan),
        history(val=lambda epoch: math.inf if epoch == 1 else -1.0),
        history(val=lambda epoch: None if epoch % 2 else 0.0),
        [{"epoch": 1, "train_loss": None, "val_loss": None, "lr": 0.0}],
    ],
)
def test_curves_take_every_kind_of_history(records, tmp_path):
    png_size(plot_training_curves(records, tmp_path / "curves.png"))


def test_the_best_epoch_is_the_lowest_finite_validation_loss(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr("treadle.runs.curves.save_figure", lambda figure, path: kept.append(figure))
    values = {1: 3.0, 2: -math.inf, 3: 0.5, 4: math.nan, 5: 0.6}
    plot_training_curves(history(5, val=values.get), tmp_path / "curves.png")
    texts = [text.get_text() for text in kept[0].axes[0].get_legend().get_texts()]
    assert "best: epoch 3, validation 0.5" in texts


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_a_page_takes_any_number_of_spectra(num_rows, tmp_path):
    png_size(draw_page(tmp_path / "page.png", num_rows))


def test_hidden_regions_are_shaded_where_the_mask_says(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr("treadle.spectra.pictures.save_figure", lambda figure, path: kept.append(figure))
    seen = np.ones((1, 10), dtype=bool)
    seen[0, [0, 1, 2, 7, 8]] = False
    x = np.zeros((1, 10))
    plot_reconstructions(np.arange(10.0), x, x + 2, seen, ["one"], tmp_path / "page.png")
    axes = kept[0].axes[0]
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches]
    assert spans == [(-0.5, 2.5), (6.5, 8.5)]
    assert axes.get_title(loc="right") == "hidden MSE 4.000"


@pytest.mark.parametrize("labels", [["", "", "", "", ""], np.arange(5.0), np.full(5, np.nan), [1, 2, 3, 4, 5]])
def test_a_latent_map_takes_unknown_labels_and_numbers(labels, tmp_path):
    png_size(plot_latent_map(RNG.normal(size=(5, 3)), labels, tmp_path / "map.png", label_name="fat (%)"))


@pytest.mark.parametrize("labels", [None, ["M8.0"] * 6 + [""] * 6])
def test_a_cluster_map_goes_with_and_without_classes(labels, tmp_path):
    png_size(draw_clusters(tmp_path / "clusters.png", labels=labels))


def test_one_cluster_of_equal_points_is_drawn(tmp_path):
    z, x = np.zeros((3, 2)), np.zeros((3, 32))
    png_size(plot_cluster_map(z, np.zeros(3, dtype=int), x, GRID, tmp_path / "one.png"))


def test_numbers_of_clusters_are_pushed_apart_and_far_ones_stay():
    places = np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    moved = figures.spread_apart(places)
    assert np.hypot(*(moved[0] - moved[1])) >= 0.0699
    assert moved[2].tolist() == [1, 1]
    assert places[0].tolist() == [0, 0]


def test_the_projection_is_pca_with_fixed_signs():
    rows = RNG.normal(size=(50, 5)) * [5, 3, 1, 1, 1]
    xy, shares = figures.project_to_2d(rows)
    again, _ = figures.project_to_2d(rows[::-1])
    assert np.allclose(xy, again[::-1])
    assert np.allclose(xy.var(axis=0) / rows.var(axis=0).sum(), shares)
    assert shares[0] > shares[1]
    assert figures.project_to_2d(rows[:, :2])[1] is None


def test_spectral_types_become_numbers_and_letters():
    texts = ["M0.0", "M7.0:", "L5", "T8.5", "", "M alph", " L2.0 ", "G2", "M10"]
    numbers = spectral_type_number(texts)
    assert numbers.dtype == np.float32
    assert np.array_equal(numbers, [0, 7, 15, 28.5, np.nan, np.nan, 12, np.nan, np.nan], equal_nan=True)
    assert spectral_class_letter(texts).tolist() == ["M", "M", "L", "T", "", "M", "L", "", "M"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda path: plot_training_curves([], path), "history is empty"),
        (lambda path: plot_training_curves([{"epoch": 1}], path), r"history\[0\].*'train_loss'"),
        (lambda path: plot_latent_map(np.zeros((3, 1)), ["", "", ""], path), "latent has 1 column"),
        (lambda path: plot_latent_map(np.full((3, 2), np.nan), ["", "", ""], path), "latent holds NaN"),
        (lambda path: plot_latent_map(np.zeros((3, 2)), ["", ""], path), r"labels has shape \(2,\)"),
        (
            lambda path: plot_cluster_map(np.zeros((3, 2)), np.zeros(3), np.zeros((3, 32)), GRID, path),
            "whole numbers",
        ),
        (
            lambda path: plot_reconstructions(
                GRID, np.zeros((1, 32)), np.zeros((1, 32)), np.ones((1, 32)), ["a"], path
            ),
            "float64 do not fit",
        ),
        (
            lambda path: plot_reconstructions(
                GRID, np.zeros((1, 32)), np.zeros((1, 32)), np.ones((1, 32), bool), [], path
            ),
            "titles has 0 strings",
        ),
        (lambda path: plot_training_curves(history(), path.with_suffix(".pdf")), r"must end in '\.png'"),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_nothing_is_written(call, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        call(tmp_path / "picture.png")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_picture_and_leaves_no_temporary(tmp_path, monkeypatch):
    target = draw_curves(tmp_path / "curves.png")
    before = target.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        draw_curves(target)
    assert target.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'treadle\[cli\]'"):
        draw_curves(tmp_path / "curves.png")
