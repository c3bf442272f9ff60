from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from treadle.spectra import probes
from treadle.spectra.probes import compare_probes, pca_features, probe_features


def planted(num_rows=300, num_features=6, seed=0):
    """Features, a colour and a class that are linear in them, with some labels unknown."""
    x = np.random.default_rng(seed).normal(size=(num_rows, num_features))
    colour = 2 * x[:, 0] - x[:, 1]
    classes = np.array(["M", "L", "T"])[np.digitize(x[:, 2], [-0.4, 0.4])]
    colour[:7] = np.nan
    classes[5:16] = ""
    return x, colour, classes


def test_a_planted_linear_signal_is_found_and_rows_are_counted():
    result = probe_features(*planted())
    colour, classes = result["j_minus_k_r2"], result["spectral_class_balanced_accuracy"]
    assert colour["mean"] > 0.999
    assert classes["mean"] > 0.9
    assert (colour["num_rows"], colour["num_left_out"]) == (293, 7)
    assert (classes["num_rows"], classes["num_left_out"]) == (289, 11)
    assert len(colour["folds"]) == len(classes["folds"]) == result["num_folds"] == 5
    assert colour["mean"] == pytest.approx(np.mean(colour["folds"]))
    assert classes["std"] == pytest.approx(np.std(classes["folds"]))


def test_nothing_is_found_in_noise():
    _, colour, classes = planted()
    noise = np.random.default_rng(9).normal(size=(300, 64))
    result = probe_features(noise, colour, classes)
    assert -0.15 < result["j_minus_k_r2"]["mean"] < 0.05
    assert abs(result["spectral_class_balanced_accuracy"]["mean"] - 1 / 3) < 0.08


def test_shuffled_labels_give_nothing_so_folds_do_not_leak():
    x, colour, classes = planted()
    order = np.random.default_rng(3).permutation(len(x))
    result = probe_features(x, colour[order], classes[order])
    assert -0.15 < result["j_minus_k_r2"]["mean"] < 0.05
    assert abs(result["spectral_class_balanced_accuracy"]["mean"] - 1 / 3) < 0.1


def test_rows_of_one_object_never_help_each_other():
    # Each object has two equal rows and a label that nothing explains: with more features than objects a
    # probe can learn the objects by heart, and only folds that cut objects reward that.
    rng = np.random.default_rng(0)
    half = rng.normal(size=(60, 150))
    x = np.concatenate([half, half])
    colour = np.tile(rng.normal(size=60), 2)
    classes = np.tile(np.where(rng.normal(size=60) > 0, "M", "L"), 2)
    names = np.tile([f"object {i}" for i in range(60)], 2)
    leaking = probe_features(x, colour, classes)
    honest = probe_features(x, colour, classes, groups=names)
    assert leaking["j_minus_k_r2"]["mean"] > 0.3
    assert leaking["spectral_class_balanced_accuracy"]["mean"] > 0.7
    assert honest["j_minus_k_r2"]["mean"] < 0.05
    assert honest["spectral_class_balanced_accuracy"]["mean"] < 0.65


@pytest.mark.parametrize("num_groups", [300, 90])
def test_folds_part_the_rows_and_keep_groups_whole(num_groups):
    groups = np.arange(300) % num_groups
    y = np.array(["M", "L", "T"])[np.random.default_rng(0).integers(0, 3, size=300)]
    for folds in (
        probes._group_folds(groups, num_folds=5, seed=1),
        probes._stratified_folds(y, groups, num_folds=5, seed=1),
    ):
        assert sorted(np.concatenate([test for _, test in folds])) == list(range(300))
        for train, test in folds:
            assert not set(groups[train]) & set(groups[test])
            assert len(train) + len(test) == 300


def test_the_standardisation_is_fitted_inside_the_folds(monkeypatch):
    from sklearn.preprocessing import StandardScaler

    seen = []
    fit = StandardScaler.fit

    def watched(self, x, *args, **kwargs):
        seen.append(len(x))
        return fit(self, x, *args, **kwargs)

    monkeypatch.setattr(StandardScaler, "fit", watched)
    probe_features(*planted())
    assert seen
    assert max(seen) <= 0.81 * 300


def test_the_same_seed_gives_the_same_figures_and_json_takes_them():
    first, second = probe_features(*planted()), probe_features(*planted())
    assert json.loads(json.dumps(first)) == second
    assert probe_features(*planted(), seed=1)["j_minus_k_r2"]["folds"] != first["j_minus_k_r2"]["folds"]


def test_scale_and_shift_of_the_features_do_not_matter():
    x, colour, classes = planted()
    first = probe_features(x, colour, classes)["spectral_class_balanced_accuracy"]["folds"]
    second = probe_features(1000 * x - 7, colour, classes)["spectral_class_balanced_accuracy"]["folds"]
    assert first == pytest.approx(second)


def test_compared_representations_share_their_folds():
    x, colour, classes = planted()
    table = compare_probes({"latent": x, "again": x, "one": x[:, :1]}, colour, classes)
    assert list(table) == ["latent", "again", "one"]
    assert table["latent"] == table["again"] == probe_features(x, colour, classes)
    assert table["one"]["j_minus_k_r2"]["mean"] < table["latent"]["j_minus_k_r2"]["mean"]


def test_pca_knows_only_the_training_rows():
    x = np.random.default_rng(0).normal(size=(80, 10)) * np.arange(10, 0, -1)
    far = x.copy()
    far[60:] += 100
    first, second = pca_features(x[:60], x, 4), pca_features(far[:60], far, 4)
    assert first.dtype == np.float32
    assert np.array_equal(first[:60], second[:60])
    assert np.allclose(first[:60].mean(axis=0), 0, atol=1e-5)
    assert (np.diff(first[:60].std(axis=0)) < 0).all()


def test_a_class_of_one_object_cannot_be_both_learned_and_tested():
    x, colour, _ = planted()
    classes = np.array(["M"] * 150 + ["L"] * 120 + ["T"] * 30)
    names = np.array([f"object {i}" for i in range(270)] + ["one dwarf"] * 30)
    with pytest.raises(ValueError, match=r"'T': 1.*classes of 10 objects each"):
        probe_features(x, colour, classes, groups=names)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"features": np.zeros(5)}, r"features has shape \(5,\)"),
        ({"features": np.full((300, 6), np.nan)}, "features is not finite in row 0"),
        ({"j_minus_k": np.zeros(4)}, r"j_minus_k has shape \(4,\), but must be \(300,\)"),
        ({"spectral_class": np.array(["M"])}, "spectral_class has shape"),
        ({"spectral_class": np.full(300, "M")}, "at least 2 classes"),
        ({"spectral_class": np.array(["M"] * 297 + ["T"] * 3)}, "'T': 3"),
        ({"j_minus_k": np.full(300, np.nan)}, "known for 0 different groups"),
        ({"groups": np.zeros(3)}, "groups has shape"),
        ({"num_folds": 1}, "num_folds is 1"),
    ],
)
def test_what_cannot_be_probed_is_refused_in_words(change, words):
    x, colour, classes = planted()
    arguments = {"features": x, "j_minus_k": colour, "spectral_class": classes, **change}
    with pytest.raises(ValueError, match=words):
        probe_features(**arguments)


def test_comparison_and_pca_name_what_is_wrong():
    x, colour, classes = planted()
    with pytest.raises(ValueError, match="features is empty"):
        compare_probes({}, colour, classes)
    with pytest.raises(ValueError, match=r"features\['short'\]"):
        compare_probes({"short": x[:9]}, colour, classes)
    with pytest.raises(ValueError, match="num_components is 7, but must be 1 to 6"):
        pca_features(x, x, 7)
    with pytest.raises(ValueError, match="x has 3 columns and train has 6"):
        pca_features(x, x[:, :3], 2)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    for module in ("sklearn.decomposition", "sklearn.linear_model"):
        monkeypatch.setitem(sys.modules, module, None)
    x, colour, classes = planted()
    with pytest.raises(ImportError, match=r"pip install 'treadle\[cli\]'"):
        pca_features(x, x, 2)
    with pytest.raises(ImportError, match=r"pip install 'treadle\[cli\]'"):
        probe_features(x, colour, classes)
