"""scikit-learn's own checks of an estimator; those that fail, and why, are a list that must stay true."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from treadle.spectra import CosineKMeans, SNVScaler, VMFMixture

checks = pytest.importorskip("sklearn.utils.estimator_checks")

IN_THE_CONSTRUCTOR = {"check_do_not_raise_errors_in_init_or_set_params": "a wrong setting is refused where it is made"}
ROWS = {
    "check_estimators_dtypes": "has a row of zeros, which has no direction",
    "check_fit_idempotent": "asks numpy for the dtype of labels, which are a tensor on the device of X",
}
EXPECTED = {
    SNVScaler: IN_THE_CONSTRUCTOR,
    CosineKMeans: {
        **IN_THE_CONSTRUCTOR,
        **ROWS,
        "check_fit_score_takes_y": "chunk is the second argument of fit, as in chemomae; targets there are not used",
    },
    VMFMixture: {**IN_THE_CONSTRUCTOR, **ROWS},
}


@pytest.mark.parametrize("made", [SNVScaler(), CosineKMeans(2, device="cpu"), VMFMixture(2, device="cpu")], ids=repr)
@pytest.mark.filterwarnings("ignore")
def test_the_checks_of_scikit_learn(made):
    expected = EXPECTED[type(made)]
    results = checks.check_estimator(made, on_fail=None, on_skip=None)
    failed = {result["check_name"]: repr(result["exception"]) for result in results if result["status"] == "failed"}
    assert {name: text for name, text in failed.items() if name not in expected} == {}
    assert set(failed) == set(expected)


@pytest.mark.parametrize("made", [CosineKMeans(2, device="cpu"), VMFMixture(2, device="cpu")], ids=repr)
def test_an_estimator_that_is_not_fitted_raises_scikit_learns_error_also_across_processes(made):
    exceptions = pytest.importorskip("sklearn.exceptions")
    with pytest.raises(exceptions.NotFittedError, match="call fit") as raised:
        made.predict(np.eye(3))
    copied = pickle.loads(pickle.dumps(raised.value))
    assert isinstance(copied, exceptions.NotFittedError)
    assert str(copied) == str(raised.value)


@pytest.mark.parametrize("made", [CosineKMeans(2), VMFMixture(2)], ids=repr)
def test_a_device_is_kept_as_it_was_given(made):
    assert made.get_params()["device"] is None
    assert made.set_params(device="cpu").get_params()["device"] == "cpu"
    assert made.device.type == "cpu"
