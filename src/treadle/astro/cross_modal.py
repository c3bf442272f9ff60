"""Cross-modal prediction with baselines.

Every method sees the same tokens of the same objects and is scored on the true values, not on their bins.

Shapes: N = objects, F = features of a regression, K = bins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn

from treadle.astro.conditionals import column_probabilities, hide_columns
from treadle.astro.survey_tokens import SurveyTokenizers
from treadle.astro.surveys import Survey
from treadle.errors import ConfigError, MissingExtraError
from treadle.errors.arguments import checked

Floats = NDArray[np.float64]

TREES_FROM = 200
"""Minimum number of training objects for the tree baselines; with fewer they are uninformative."""
_COMPONENTS, _TREES = 48, 100
RIDGE_ALPHAS = tuple(float(alpha) for alpha in np.logspace(-2, 6, 17))


@dataclass(frozen=True)
class CrossPrediction:
    """Prediction task: a scalar from an image, a spectrum, or other scalars.

    Attributes:
        survey: name of the survey.
        target: column to predict.
        given: ``"image"``, ``"spectrum"``, or column names; everything else of the object is hidden.
        classes: lower bounds of classes on the scale of the target, such as ``{"M": 0.0, "L": 10.0}``, ascending.
    """

    survey: str
    target: str
    given: str | tuple[str, ...]
    classes: Mapping[str, float] = field(default_factory=dict)


CROSS_PREDICTIONS = (
    CrossPrediction("spex", "spex.type", "spectrum", {"M": 0.0, "L": 10.0, "T": 20.0}),
    CrossPrediction("spex", "spex.J-Ks", "spectrum"),
    CrossPrediction("xdf", "xdf.mag", "image"),
    CrossPrediction("xdf", "xdf.blue-red", "image"),
    CrossPrediction("sdss", "sdss.redshift", ("sdss.r", "sdss.u-g", "sdss.g-r", "sdss.r-i", "sdss.i-z", "sdss.J-K")),
)
"""Questions that the bundled surveys can answer."""


@dataclass(frozen=True, eq=False)
class CrossResult:
    """True values of the test objects with the predictions of each method.

    Attributes:
        question: the prediction task.
        true: (N,) in the unit of the column.
        predicted: ``model`` (expected value), ``mean`` and ``ridge``, ``boosted trees`` and ``extra trees`` if there
            are enough training objects, and ``bins``, the centre of the true bin, the best that predictions from bins
            can achieve on average.
        classes: predicted class of each object for each method, and ``true``, if the question has classes.
    """

    question: CrossPrediction
    true: Floats
    predicted: dict[str, Floats]
    classes: dict[str, NDArray[np.str_]]

    def scores(self) -> dict[str, Any]:
        """Return ``n`` and, for each method, ``rmse``, ``mae``, ``explained`` and the class scores.

        ``explained`` is 1 - SSE(method) / SSE(mean of the training objects): 0 for that mean, negative if worse.
        """
        reference = float(np.square(self.true - self.predicted["mean"]).sum())
        scores: dict[str, Any] = {"n": len(self.true)}
        for method, predicted in self.predicted.items():
            error = self.true - predicted
            scores[method] = {
                "rmse": float(np.sqrt(np.square(error).mean())),
                "mae": float(np.abs(error).mean()),
                "explained": 1 - float(np.square(error).sum()) / reference if reference > 0 else float("nan"),
            }
            if method in self.classes:
                scores[method] |= class_scores(self.classes["true"], self.classes[method])
        return scores


@checked
def cross_predict(
    model: nn.Module,
    tokenizers: SurveyTokenizers,
    train: Mapping[str, Survey],
    test: Mapping[str, Survey],
    *,
    questions: Sequence[CrossPrediction] = CROSS_PREDICTIONS,
    scalars_last: bool = False,
    batch_size: int = 256,
) -> list[CrossResult]:
    """Evaluate a model on prediction tasks, with baselines fitted to the training objects.

    The baselines see the values behind the same tokens. Ridge regression (missing values imputed by their mean, with an
    indicator) selects its penalty by leave-one-out on the training objects; the trees, used from 200 training objects
    on, see the first 48 principal components of images. Objects without a known target are left out.

    Args:
        model: trained on the sequences of ``train``.
        tokenizers: fitted to ``train``.
        train: surveys by name.
        test: other objects of the same surveys.
        questions: the prediction tasks.
        scalars_last: move the scalars behind the spectra, for a model trained that way (`column_probabilities`).
        batch_size: rows of one forward pass.

    Raises:
        ConfigError: a question names an unknown survey, column or modality, or no object has a known target.
        ImportError: scikit-learn is not installed.
    """
    results = []
    for question in questions:
        known_train, known_test = (_known(surveys, question) for surveys in (train, test))
        features = [token_values(tokenizers, survey, question.given) for survey in (known_train, known_test)]
        y_train, y_test = known_train.column(question.target), known_test.column(question.target)
        column = tokenizers.scalar.columns.index(question.target)
        centers = tokenizers.scalar.centers[column]
        probabilities = _asked(
            model, tokenizers, known_test, question=question, scalars_last=scalars_last, batch_size=batch_size
        )
        predicted = {
            "model": probabilities @ centers,
            "mean": np.full(len(y_test), y_train.mean()),
            "ridge": ridge_prediction(features[0], y_train, features[1]),
            "bins": centers[tokenizers.bins(known_test)[:, column]],
        }
        if len(y_train) >= TREES_FROM:
            predicted |= tree_predictions(*features_of_trees(question, *features), y_train)
        classes = _classes(question, y_train, y_test, predicted, probabilities, centers) if question.classes else {}
        results.append(CrossResult(question, y_test, predicted, classes))
    return results


def token_values(tokenizers: SurveyTokenizers, survey: Survey, given: str | Sequence[str]) -> Floats:
    """Return the values behind the tokens of a modality, (N, F); NaN where a scalar is missing.

    Args:
        tokenizers: the fitted tokenizers.
        survey: the objects.
        given: ``"image"`` (pixels), ``"spectrum"`` (fluxes as arcsinh), or names of columns.

    Raises:
        ConfigError: the survey does not have the modality or column.
    """
    if given == "image" and survey.images is not None:
        pixels = tokenizers.image.decode(tokenizers.image.encode(survey.images))
        return pixels.reshape(len(survey), -1).astype(np.float64)
    if given == "spectrum" and survey.spectra is not None:
        flux = tokenizers.spectrum.decode(tokenizers.spectrum.encode(survey.spectra))
        return np.arcsinh(flux.astype(np.float64) / tokenizers.spectrum.softening)
    if isinstance(given, str):
        raise ConfigError(
            f"survey {survey.name!r} does not have it; image, spectrum, or column names", argument="given", value=given
        )
    for name in given:
        survey.column(name)
    decoded = tokenizers.scalar.decode(tokenizers.bins(survey))
    return decoded[:, [tokenizers.scalar.columns.index(name) for name in given]]


def ridge_prediction(x_train: ArrayLike, y_train: ArrayLike, x_test: ArrayLike) -> Floats:
    """Return the predictions (N,) of ridge regression on standardised features.

    Args:
        x_train: (training objects, F); NaN is missing.
        y_train: finite values.
        x_test: (N, F).

    Raises:
        ImportError: scikit-learn is not installed.

    Example:
        >>> x = np.arange(40.0)[:, None]
        >>> ridge_prediction(x, 2 * x.ravel() + 1, [[50.0]]).round(1).tolist()
        [101.0]
    """
    try:
        from sklearn.feature_selection import VarianceThreshold
        from sklearn.impute import SimpleImputer
        from sklearn.linear_model import RidgeCV
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise MissingExtraError(f"the regression needs scikit-learn ({error}): pip install 'treadle[astro]'") from error
    model = make_pipeline(
        SimpleImputer(add_indicator=True, keep_empty_features=True),
        VarianceThreshold(),
        StandardScaler(),
        RidgeCV(alphas=RIDGE_ALPHAS),
    )
    model.fit(np.asarray(x_train), np.asarray(y_train))
    return np.asarray(model.predict(np.asarray(x_test)), dtype=np.float64)


def features_of_trees(question: CrossPrediction, x_train: Floats, x_test: Floats) -> tuple[Floats, Floats]:
    """Return the features for trees: principal components of images, other values unchanged."""
    if question.given != "image":
        return x_train, x_test
    from sklearn.decomposition import PCA

    pca = PCA(min(_COMPONENTS, *x_train.shape), random_state=0).fit(x_train)
    return pca.transform(x_train), pca.transform(x_test)


def tree_predictions(x_train: ArrayLike, x_test: ArrayLike, y_train: ArrayLike) -> dict[str, Floats]:
    """Return the predictions (N,) of scikit-learn's gradient-boosted trees and extremely randomised trees.

    Args:
        x_train: (training objects, F); NaN is missing.
        x_test: (N, F).
        y_train: finite numbers.

    Raises:
        ImportError: scikit-learn is not installed.

    Example:
        >>> x = np.arange(300.0)[:, None] % 7
        >>> {name: said.round().tolist() for name, said in tree_predictions(x, [[3.0]], x.ravel() ** 2).items()}
        {'boosted trees': [9.0], 'extra trees': [9.0]}
    """
    try:
        from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor
    except ImportError as error:
        raise MissingExtraError(f"the trees need scikit-learn ({error}): pip install 'treadle[astro]'") from error
    train, test, target = (np.asarray(values, dtype=np.float64) for values in (x_train, x_test, y_train))
    boosted = HistGradientBoostingRegressor(random_state=0).fit(train, target).predict(test)
    center = np.nan_to_num(np.nanmean(train, axis=0))
    filled = [np.where(np.isnan(part), center, part) for part in (train, test)]
    extra = ExtraTreesRegressor(_TREES, random_state=0).fit(filled[0], target).predict(filled[1])
    return {"boosted trees": np.asarray(boosted, np.float64), "extra trees": np.asarray(extra, np.float64)}


def class_scores(true: ArrayLike, predicted: ArrayLike) -> dict[str, float]:
    """Return ``accuracy`` and ``balanced_accuracy``, the mean recall over the true classes.

    Example:
        >>> class_scores(["M", "M", "M", "T"], ["M", "M", "M", "M"])
        {'accuracy': 0.75, 'balanced_accuracy': 0.5}
    """
    right, names = np.asarray(true) == np.asarray(predicted), np.asarray(true)
    shares = [right[names == name].mean() for name in np.unique(names)]
    return {"accuracy": float(right.mean()), "balanced_accuracy": float(np.mean(shares))}


def _known(surveys: Mapping[str, Survey], question: CrossPrediction) -> Survey:
    if question.survey not in surveys:
        raise ConfigError(f" is not there; known: {', '.join(surveys)}", argument="survey", value=question.survey)
    survey = surveys[question.survey]
    known = np.isfinite(survey.column(question.target))
    if not known.any():
        raise ConfigError(f"{question.target}: known of none of the {len(survey)} objects")
    return survey.take(known)


def _asked(
    model: nn.Module,
    tokenizers: SurveyTokenizers,
    survey: Survey,
    *,
    question: CrossPrediction,
    scalars_last: bool,
    batch_size: int,
) -> Floats:
    """Return bin probabilities (N, K), with every token but the question's inputs replaced by MISS."""
    shown = Survey(
        name=survey.name,
        columns=survey.columns,
        scalars=survey.scalars,
        objects=survey.objects,
        images=survey.images if question.given == "image" else None,
        spectra=survey.spectra if question.given == "spectrum" else None,
    )
    given = () if isinstance(question.given, str) else question.given
    columns, vocab = tokenizers.scalar.columns, tokenizers.vocab()
    hidden = [number for number, name in enumerate(columns) if name not in given]
    sequences = hide_columns(tokenizers.encode(shown), vocab, hidden)
    target = columns.index(question.target)
    probabilities = column_probabilities(
        model, sequences, vocab, target, scalars_last=scalars_last, batch_size=batch_size
    )
    return probabilities.numpy().astype(np.float64)


def _classes(
    question: CrossPrediction,
    y_train: Floats,
    y_test: Floats,
    predicted: Mapping[str, Floats],
    probabilities: Floats,
    centers: Floats,
) -> dict[str, NDArray[np.str_]]:
    """Return classes: the model's most probable, the mean's most frequent, the others' from their predictions."""
    names, starts = np.array(list(question.classes)), np.array(list(question.classes.values()))

    def of(values: Floats) -> NDArray[np.intp]:
        return np.maximum(np.searchsorted(starts, values, side="right") - 1, 0)

    per_class = np.stack([probabilities[:, of(centers) == number].sum(axis=1) for number in range(len(names))], axis=1)
    commonest = np.bincount(of(y_train), minlength=len(names)).argmax()
    return {
        "true": names[of(y_test)],
        "model": names[per_class.argmax(axis=1)],
        "mean": np.full(len(y_test), names[commonest]),
        **{name: names[of(predicted[name])] for name in ("ridge", "boosted trees", "extra trees") if name in predicted},
        "bins": names[of(predicted["bins"])],
    }
