"""The estimators survive scikit-learn's clone, set_params, GridSearchCV and pipelines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treadle.errors import ConfigError
from treadle.spectra import CosineKMeans, SNVScaler, VMFMixture

base = pytest.importorskip("sklearn.base")

MADE = {
    "kmeans": lambda: CosineKMeans(3, tol=1e-3, max_iter=7, device="cpu", random_state=5),
    "mixture": lambda: VMFMixture(3, d=4, device="cpu", random_state=5, init="random"),
    "scaler": lambda: SNVScaler(eps=1e-6, transform_stats=True),
}


def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(30, 4)) + np.eye(4)[np.arange(30) % 3] * 4


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_clone_has_the_same_settings_and_nothing_fitted(make):
    made = make()
    clone = base.clone(made)
    assert clone.get_params() == made.get_params()
    assert type(clone) is type(made)
    assert clone is not made


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_an_unknown_setting_is_refused_and_changes_nothing(make):
    made = make()
    before = made.get_params()
    with pytest.raises(ConfigError, match="unknown setting"):
        made.set_params(n_clusters=4)
    assert made.get_params() == before


def test_a_setting_is_checked_as_in_the_constructor():
    with pytest.raises(ConfigError, match="n_components"):
        MADE["kmeans"]().set_params(n_components=0)
    assert MADE["kmeans"]().set_params(n_components=5).n_components == 5


def test_a_grid_search_finds_the_number_of_clusters():
    search = pytest.importorskip("sklearn.model_selection").GridSearchCV
    for make in (MADE["kmeans"], MADE["mixture"]):
        found = search(make(), {"n_components": [1, 3]}, cv=3).fit(rows())
        assert found.best_params_ == {"n_components": 3}


def test_a_pipeline_ends_in_the_clusters_of_its_parts():
    pipeline = pytest.importorskip("sklearn.pipeline").make_pipeline(SNVScaler(), MADE["kmeans"]())
    labels = base.clone(pipeline).fit(rows()).predict(rows())
    alone = MADE["kmeans"]().fit_predict(SNVScaler().transform(rows()))
    assert torch.equal(torch.as_tensor(labels), torch.as_tensor(alone))


@pytest.mark.parametrize("name", MADE)
def test_a_table_gives_what_its_array_gives(name):
    table = pytest.importorskip("pandas").DataFrame(rows(), columns=list("abcd"))
    results = [
        MADE[name]().fit_transform(X) if name == "scaler" else MADE[name]().fit(X).predict(X) for X in (table, rows())
    ]
    first, second = (result[0] if name == "scaler" else result for result in results)
    assert torch.equal(torch.as_tensor(first), torch.as_tensor(second))


@pytest.mark.parametrize("name", ["kmeans", "mixture"])
def test_targets_are_not_used(name):
    scores = pytest.importorskip("sklearn.model_selection").cross_val_score
    labels = np.array(["a", "b", "c"])[np.arange(30) % 3]
    assert np.array_equal(scores(MADE[name](), rows(), labels, cv=2), scores(MADE[name](), rows(), cv=2))
    assert torch.equal(MADE[name]().fit_predict(rows(), labels), MADE[name]().fit(rows()).predict(rows()))


def test_scikit_learn_sees_what_is_fitted():
    check = pytest.importorskip("sklearn.utils.validation").check_is_fitted
    for name in ("kmeans", "mixture"):
        with pytest.raises(pytest.importorskip("sklearn.exceptions").NotFittedError):
            check(MADE[name]())
        check(MADE[name]().fit(rows()))
    check(MADE["scaler"]())  # learns nothing


def test_a_random_state_of_numpy_gives_the_seed_and_another_object_is_refused():
    made = CosineKMeans(3, random_state=np.random.RandomState(0), device="cpu").fit(rows())
    again = CosineKMeans(3, random_state=np.random.RandomState(0), device="cpu").fit(rows())
    assert torch.equal(made.centroids, again.centroids)
    with pytest.raises(ConfigError, match="random_state='x' must be a whole number"):
        CosineKMeans(3, random_state="x", device="cpu").fit(rows())


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_what_holds_no_numbers_is_refused_by_name(make):
    sparse = pytest.importorskip("scipy.sparse").csr_matrix(rows())
    for X, words in ((sparse, "X is sparse"), (np.array([["a", "b", "c", "d"]] * 9), "must hold real numbers")):
        with pytest.raises((TypeError, ValueError), match=words):
            getattr(make().fit(X), "transform", lambda X: None)(X)


def test_an_estimator_shows_its_settings():
    assert repr(MADE["scaler"]()) == "SNVScaler(eps=1e-06, copy=True, transform_stats=True)"


@pytest.mark.parametrize(("kind", "setting"), [(CosineKMeans, "tol"), (VMFMixture, "tol"), (SNVScaler, "eps")])
def test_a_text_for_a_number_is_named(kind, setting):
    given = {"n_components": 2} if kind is VMFMixture else {}
    with pytest.raises(ConfigError, match=f"^{setting}='x': must be a number"):
        kind(**given, **{setting: "x"}).fit(rows())


def test_a_mixture_keeps_its_settings_when_it_is_fitted_and_is_fitted_anew_to_other_rows():
    wide = np.random.default_rng(1).normal(size=(30, 6))
    narrow = wide[:, :4]
    mixture = VMFMixture(n_components=2, random_state=0)
    before = mixture.get_params()
    assert mixture.fit(wide).get_params() == before
    assert base.clone(mixture).fit(narrow).predict(narrow).shape == (len(wide),)
    assert mixture.fit(narrow).mus.shape == (2, 4)
    with pytest.raises(ValueError, match="X has 6 features, but VMFMixture is expecting 4"):
        mixture.predict(wide)
    with pytest.raises(ValueError, match="X has D=4 columns, but d=6"):
        VMFMixture(n_components=2, d=6).fit(narrow)
