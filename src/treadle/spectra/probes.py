"""Linear probes of representations.

To avoid leakage, everything fitted (standardisation, penalty, weights) is fitted on the training part of each fold;
rows of one object stay in one fold; rows without a label are left out and counted; every representation is scored on
the same folds by the same procedure. The representation itself may have been trained on the same spectra, as long as it
never saw the labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from treadle.errors import MissingExtraError

_Float = npt.NDArray[np.float64]
_Split = tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]

RIDGE_ALPHAS = tuple(float(alpha) for alpha in np.logspace(-3, 5, 17))
"""Penalties tried by the ridge probe; the best by leave-one-out error on the training fold is used."""
LOGISTIC_CS = (0.01, 0.1, 1.0, 10.0)
"""Inverse penalties tried by the class probe; the best by 3 inner folds of the training fold is used."""
_INNER_FOLDS = 3


class ProbeScore(TypedDict):
    """Score of a probe: mean and standard deviation (ddof 0) over the folds, and the number of rows used."""

    mean: float
    std: float
    folds: list[float]
    num_rows: int
    num_left_out: int


class ProbeResult(TypedDict):
    """Result of `probe_features`, as plain JSON-compatible numbers."""

    j_minus_k_r2: ProbeScore
    spectral_class_balanced_accuracy: ProbeScore
    num_features: int
    num_folds: int
    seed: int


def probe_features(
    features: npt.ArrayLike,
    j_minus_k: npt.ArrayLike,
    spectral_class: npt.ArrayLike,
    *,
    groups: npt.ArrayLike | None = None,
    num_folds: int = 5,
    seed: int = 0,
) -> ProbeResult:
    """Score a representation with two linear probes, one for the J-K colour and one for the spectral class.

    The colour probe is ridge regression on standardised features; its penalty is selected from `RIDGE_ALPHAS` by
    leave-one-out error on the training fold. The class probe is multinomial logistic regression on standardised
    features with balanced class weights; its inverse penalty is selected from `LOGISTIC_CS` by balanced accuracy over 3
    inner folds of the training fold. Outer folds are shuffled by `seed`; those of the class probe are stratified.

    Args:
        features: (N, D) finite numbers.
        j_minus_k: (N,) magnitudes, NaN where unknown.
        spectral_class: (N,) strings such as "M", "L", "T"; empty where unknown.
        groups: (N,), such as object names; rows of one group share a fold. None: each row is its own group.
        num_folds: at least 2.
        seed: seed of the folds; the same seed, labels and groups give the same folds for any features.

    Returns:
        R² of J-K and balanced accuracy of the class (chance is 1 over the number of classes), each as mean, std and
        list over folds with the numbers of rows used and left out.

    Raises:
        ValueError: shapes disagree, features are not finite, or there are too few labelled rows or groups.
        ImportError: scikit-learn is not installed.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(60, 3))
        >>> result = probe_features(x, x[:, 0], np.where(x[:, 1] > 0, "M", "L"))
        >>> result["j_minus_k_r2"]["mean"] > 0.99
        True
    """
    x = _matrix("features", features)
    colour = np.asarray(j_minus_k, dtype=np.float64)
    classes = np.asarray(spectral_class).astype(str)
    group_ids = _group_ids(groups, len(x))
    for name, labels in (("j_minus_k", colour), ("spectral_class", classes)):
        if labels.shape != (len(x),):
            raise ValueError(
                f"{name} has shape {labels.shape}, but must be ({len(x)},): give one label per row of features"
            )
    if num_folds < 2:
        raise ValueError(f"num_folds is {num_folds}, but must be at least 2: the default is 5")
    known, typed = np.isfinite(colour), classes != ""
    r2 = _colour_scores(x[known], colour[known], group_ids[known], num_folds=num_folds, seed=seed)
    accuracy = _class_scores(x[typed], classes[typed], group_ids[typed], num_folds=num_folds, seed=seed)
    return ProbeResult(
        j_minus_k_r2=_score(r2, known),
        spectral_class_balanced_accuracy=_score(accuracy, typed),
        num_features=x.shape[1],
        num_folds=num_folds,
        seed=seed,
    )


def compare_probes(
    features: Mapping[str, npt.ArrayLike],
    j_minus_k: npt.ArrayLike,
    spectral_class: npt.ArrayLike,
    *,
    groups: npt.ArrayLike | None = None,
    num_folds: int = 5,
    seed: int = 0,
) -> dict[str, ProbeResult]:
    """Score several representations of the same rows on the same folds.

    Args:
        features: name -> (N, D) array; D may differ, N may not.
        j_minus_k: (N,) as in `probe_features`, like the other arguments.
        spectral_class: (N,) strings, empty where unknown.
        groups: (N,) or None; rows of one group share a fold.
        num_folds: at least 2.
        seed: seed of the folds.

    Returns:
        name -> result of `probe_features`, in the order given.

    Raises:
        ValueError: `features` is empty, or as in `probe_features`, naming the representation.
        ImportError: scikit-learn is not installed.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(60, 3))
        >>> table = compare_probes({"all": x, "one": x[:, :1]}, x[:, 1], np.where(x[:, 1] > 0, "M", "L"))
        >>> table["all"]["j_minus_k_r2"]["mean"] > table["one"]["j_minus_k_r2"]["mean"]
        True
    """
    if not features:
        raise ValueError("features is empty, it must name at least one array: for example {'latent': z}")
    results: dict[str, ProbeResult] = {}
    for name, array in features.items():
        try:
            results[name] = probe_features(
                array, j_minus_k, spectral_class, groups=groups, num_folds=num_folds, seed=seed
            )
        except ValueError as error:
            raise ValueError(f"features[{name!r}]: {error}") from error
    return results


def pca_features(train: npt.ArrayLike, x: npt.ArrayLike, num_components: int) -> npt.NDArray[np.float32]:
    """Project spectra on principal components, a baseline that any learned representation should beat.

    Mean and components come only from `train`, by an exact (full) singular value decomposition; pass the rows that the
    model was trained on, so that both have seen the same spectra. Components are not whitened, since the probes
    standardise every feature anyway.

    Args:
        train: (M, L) finite rows to fit on.
        x: (N, L) finite rows to project.
        num_components: 1 to min(M, L).

    Returns:
        (N, num_components) float32, in order of decreasing variance.

    Raises:
        ValueError: shapes disagree, numbers are not finite or `num_components` is out of range.
        ImportError: scikit-learn is not installed.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(50, 8))
        >>> pca_features(rows[:40], rows, 3).shape
        (50, 3)
    """
    fit_rows, rows = _matrix("train", train), _matrix("x", x)
    if fit_rows.shape[1] != rows.shape[1]:
        raise ValueError(
            f"x has {rows.shape[1]} columns and train has {fit_rows.shape[1]}, they must be equal: "
            "give spectra on the same channels"
        )
    if not 1 <= num_components <= min(fit_rows.shape):
        raise ValueError(
            f"num_components is {num_components}, but must be 1 to {min(fit_rows.shape)}, the smaller side of train"
        )
    try:
        from sklearn.decomposition import PCA
    except ImportError as error:
        raise _missing(error) from error
    pca = PCA(n_components=num_components, svd_solver="full").fit(fit_rows)
    return np.asarray(pca.transform(rows), dtype=np.float32)


def _colour_scores(x: _Float, y: _Float, groups: npt.NDArray[np.intp], *, num_folds: int, seed: int) -> list[float]:
    try:
        from sklearn.linear_model import RidgeCV
        from sklearn.metrics import r2_score
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise _missing(error) from error
    scores = []
    for train, test in _group_folds(groups, num_folds=num_folds, seed=seed):
        probe = make_pipeline(StandardScaler(), RidgeCV(alphas=RIDGE_ALPHAS)).fit(x[train], y[train])
        scores.append(float(r2_score(y[test], probe.predict(x[test]))))
    return scores


def _class_scores(
    x: _Float, y: npt.NDArray[np.str_], groups: npt.NDArray[np.intp], *, num_folds: int, seed: int
) -> list[float]:
    try:
        from sklearn.metrics import balanced_accuracy_score
    except ImportError as error:
        raise _missing(error) from error
    names = np.unique(y)
    counts = np.array([len(np.unique(groups[y == name])) for name in names])
    if len(names) < 2 or counts.min() < num_folds * 2:
        found = {str(name): int(count) for name, count in zip(names, counts, strict=True)}
        raise ValueError(
            f"spectral_class holds {found} (class: different groups), it must hold at least 2 classes of "
            f"{num_folds * 2} objects each: give more rows, or lower num_folds"
        )
    scores = []
    for train, test in _stratified_folds(y, groups, num_folds=num_folds, seed=seed):
        probe = _class_probe(x[train], y[train], groups[train], seed=seed)
        scores.append(float(balanced_accuracy_score(y[test], probe.predict(x[test]))))
    return scores


def _class_probe(x: _Float, y: npt.NDArray[np.str_], groups: npt.NDArray[np.intp], *, seed: int) -> Any:
    """Fit the class probe to all rows, with its penalty selected by inner folds."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=500))
    inner = _stratified_folds(y, groups, num_folds=_INNER_FOLDS, seed=seed)
    search = GridSearchCV(model, {"logisticregression__C": LOGISTIC_CS}, scoring="balanced_accuracy", cv=inner)
    with warnings.catch_warnings():
        # With a weak penalty and separable classes there is no finite optimum: 500 steps are enough.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return search.fit(x, y)


def _group_folds(groups: npt.NDArray[np.intp], *, num_folds: int, seed: int) -> list[_Split]:
    """Return shuffled folds over groups, not rows, so that no group is split."""
    names = np.unique(groups)
    if len(names) < num_folds * 2:
        raise ValueError(
            f"j_minus_k is known for {len(names)} different groups, there must be at least {num_folds * 2}: "
            "give more rows, or lower num_folds"
        )
    parts = np.array_split(np.random.default_rng(seed).permutation(names), num_folds)
    inside = [np.isin(groups, part) for part in parts]
    return [(np.flatnonzero(~test), np.flatnonzero(test)) for test in inside]


def _stratified_folds(
    y: npt.NDArray[np.str_], groups: npt.NDArray[np.intp], *, num_folds: int, seed: int
) -> list[_Split]:
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    if len(np.unique(groups)) == len(groups):
        plain = StratifiedKFold(num_folds, shuffle=True, random_state=seed)
        return list(plain.split(y, y))
    grouped = StratifiedGroupKFold(num_folds, shuffle=True, random_state=seed)
    return list(grouped.split(y, y, groups))


def _group_ids(groups: npt.ArrayLike | None, num_rows: int) -> npt.NDArray[np.intp]:
    if groups is None:
        return np.arange(num_rows, dtype=np.intp)
    names = np.asarray(groups)
    if names.shape != (num_rows,):
        raise ValueError(
            f"groups has shape {names.shape}, but must be ({num_rows},): give one group per row of features"
        )
    return np.unique(names, return_inverse=True)[1].astype(np.intp)


def _matrix(name: str, array: npt.ArrayLike) -> _Float:
    matrix = np.asarray(array, dtype=np.float64)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(f"{name} has shape {matrix.shape}, but must be (rows, columns) and not empty")
    if not np.isfinite(matrix).all():
        bad = int(np.flatnonzero(~np.isfinite(matrix).all(axis=1))[0])
        raise ValueError(f"{name} is not finite in row {bad}: leave such rows out before the probe")
    return matrix


def _score(folds: list[float], used: npt.NDArray[np.bool_]) -> ProbeScore:
    return ProbeScore(
        mean=float(np.mean(folds)),
        std=float(np.std(folds)),
        folds=folds,
        num_rows=int(used.sum()),
        num_left_out=int((~used).sum()),
    )


def _missing(error: ImportError) -> MissingExtraError:
    return MissingExtraError(f"the probes need scikit-learn ({error}): pip install 'treadle[cli]'")
