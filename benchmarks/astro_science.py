"""One kind of data of an object from another: JointRegressor beside ridge, trees and kernel regression.

    python benchmarks/astro_science.py --device cuda --capture --jobs 4    # about three minutes of an H200
    python benchmarks/astro_science.py --budget-minutes 20                 # in pieces: the same command resumes
    python benchmarks/astro_science.py --tiny                              # a trial, writes nothing

The surveys, split and questions of `treadle train astro`. One model answers all five; with each seed three members are
trained, and their mixtures are averaged. The answers are mixed with the numbers of the nearest training objects in
the latents. The stack mixes in a third part, the Gaussian of a kernel regression of the same inputs. The shares are
chosen on validation objects. Each peer learns one question; it gets the values of the tokens and the values as they are
(pictures also by 48 principal components and sums, spectra for the kernels also over their mean), and the better of
them on validation objects counts, as do kernel, width and noise. Three seeds of trees, also averaged. All scores are
of test objects.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, write_result
from scipy.linalg import solve_triangular as solved
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import treadle
from treadle import BaseTrainer, CheckpointingHook, EmaHook
from treadle.astro import fit_tokenizers
from treadle.astro.cross_modal import CROSS_PREDICTIONS, CrossPrediction, ridge_prediction, token_values
from treadle.astro.joint import JointRegressor, Mixture, joint_loss
from treadle.astro.run_config import AstroRunConfig
from treadle.astro.run_data import split_surveys
from treadle.astro.surveys import Survey
from treadle.optim.adamw import build_optimizer, build_warmup_cosine

Array = np.ndarray[Any, Any]
Surveys = Mapping[str, Survey]
MEMBERS, STEPS = 3, 2000
BATCHES = {"xdf": 64, "spex": 128, "sdss": 512}
SHARES = [(near / 5, kernel / 5) for near in range(6) for kernel in range(6 - near)]  # the network has the rest
NEAREST = 10
MOST = 2000  # training objects that the settings of a kernel regression are tried with
KERNELS: Mapping[str, Callable[[Any], Any]] = {  # of half the squared distance
    "Gaussian": lambda far: np.exp(-far),
    "Matern 3/2": lambda far: (1 + np.sqrt(3 * far)) * np.exp(-np.sqrt(3 * far)),
    "exponential": lambda far: np.exp(-np.sqrt(far)),
}
WIDTHS, NOISES = (0.1, 0.3, 1.0, 3.0), (0.01, 0.03, 0.1, 0.3, 1.0)
METHODS = ("ridge", "boosted trees", "extra trees")


def load(options: argparse.Namespace) -> tuple[Surveys, Surveys, Surveys]:
    config = AstroRunConfig()
    config.data.max_rows = options.max_rows
    return split_surveys(config.data)


def given(survey: Survey) -> Array | None:
    """Returns pictures from 0 to 1, or spectra, or None."""
    if survey.images is not None:
        return np.asarray(survey.images, dtype=np.float32) / 255
    return None if survey.spectra is None else np.asarray(survey.spectra, dtype=np.float32)


# -- the model ----------------------------------------------------------------------------------------------------


class Joint(BaseTrainer):
    """Draws objects, and hides and changes parts of them, on the device; a batch of the loader is a number."""

    def __init__(self, train: Surveys, seed: int, options: argparse.Namespace, workspace: Path):
        device = options.device
        super().__init__(
            max_steps=options.steps, grad_clip=1.0, workspace=workspace, device=device, progress=False,
            capture=options.capture,
        )  # fmt: skip
        self.train_surveys, self.seed, self.options = train, seed, options
        self.tables = {name: torch.from_numpy(survey.scalars).float().to(device) for name, survey in train.items()}
        self.data = {
            name: None if (data := given(survey)) is None else torch.from_numpy(data).to(device)
            for name, survey in train.items()
        }

    def build_data_loader(self) -> Any:
        return DataLoader(torch.arange(self.max_steps), batch_size=1)

    def build_model(self) -> nn.Module:
        treadle.set_seed(self.seed)
        model = JointRegressor(self.train_surveys, **self.options.model)
        model.fit(self.train_surveys)
        return model.to(self.device)

    def build_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, lr=1e-3, weight_decay=0.05)

    def build_lr_scheduler(self) -> Any:
        warm = min(200, self.max_steps // 4)
        return build_warmup_cosine(self.optimizer, warmup_steps=warm, total_steps=self.max_steps, min_lr_scale=0.01)

    def build_hooks(self) -> list[Any]:
        self.average = EmaHook(0.998 if self.max_steps > 500 else 0.9)
        return [self.average, CheckpointingHook(interval=max(1, self.max_steps // 4))]

    def forward(self, input: Any) -> Any:
        loss = torch.zeros((), device=self.device)
        for name, table in self.tables.items():
            loss = loss + self._of_survey(name, table)
        return loss, {}

    def _of_survey(self, name: str, table: Tensor) -> Tensor:
        count, device = min(BATCHES[name], len(table)), self.device
        rows = torch.randint(0, len(table), (count,), device=device)
        scalars, data = table.index_select(0, rows), self.data[name]
        draw = torch.rand(count, 3, device=device)
        asked = torch.ones(scalars.shape[1], dtype=torch.bool, device=device)
        if data is None:  # the redshift, which comes last
            asked[:-1] = False
        usual = draw[:, :1] < (0.7 if data is None else 0.85)
        hide = torch.where(usual, asked, torch.rand(scalars.shape, device=device) < draw[:, 1:2])
        hide_data = None if data is None else ~usual[:, 0] & (draw[:, 2] < 0.7)
        shown = None if data is None else changed(name, data.index_select(0, rows))
        model: Any = self.model
        answer = model(name, scalars, hide=hide, data=shown, hide_data=hide_data, give_back=data is not None)
        inputs = self.unwrapped_model.survey(name)
        target = inputs.standardised(scalars)
        loss = joint_loss(answer, target, hide & scalars.isfinite())
        if shown is not None and hide_data is not None:
            back, wanted = (answer.picture, shown) if name == "xdf" else (answer.spectrum, inputs.fluxes(shown))
            off = (back - wanted).square().flatten(1).mean(1)
            loss = loss + (10.0 if name == "xdf" else 0.3) * (off * hide_data).sum() / hide_data.sum().clamp(min=1)
        return loss


def changed(name: str, data: Tensor) -> Tensor:
    """Returns turned and mirrored pictures and noisier spectra."""
    count, device = len(data), data.device
    if name == "xdf":
        for turn in (lambda x: x.flip(-1), lambda x: x.flip(-2), lambda x: x.mT):
            data = torch.where(torch.rand(count, 1, 1, 1, device=device) < 0.5, turn(data), data)
        return data + 0.01 * torch.rand(count, 1, 1, 1, device=device) * torch.randn_like(data)
    return data + 0.05 * torch.rand(count, 1, device=device).square() * torch.randn_like(data)


def train_member(seed: int, member: int, options: argparse.Namespace) -> Path | None:
    """Trains one member as far as the time allows; returns its answers, None if it is not finished."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    folder = options.runs / f"joint-{seed}-{member}-{options.steps}"
    file: Path = folder / "answers.pt"
    if file.exists():
        return file
    if time.time() > options.deadline:
        return None
    start = time.time()
    train, val, test = load(options)
    trainer = Joint(train, 100 * seed + member, options, folder)
    trainer.train()
    model: Any = trainer.average.ema_model.module
    model.eval()
    parts = {"train": train, "val": val, "test": test}
    answers = {name: ask_all(model, surveys, options.device) for name, surveys in parts.items()}
    torch.save({part: with_neighbours(answers[part], answers["train"], train) for part in ("val", "test")}, file)
    print(f"seed {seed}, member {member}: {time.time() - start:.0f} s", flush=True)
    return file


@torch.no_grad()
def ask_all(model: JointRegressor, surveys: Surveys, device: str) -> dict[str, Any]:
    """Returns mixtures and latents for each question, and pictures and spectra from the numbers of an object."""
    found: dict[str, Any] = {}
    for question in CROSS_PREDICTIONS:
        survey = surveys[question.survey]
        column = survey.columns.index(question.target)
        hide = torch.tensor([name not in question.given or isinstance(question.given, str) for name in survey.columns])
        turns = TURNS if question.given == "image" else TURNS[:1]
        each = [asked(model, survey, hide, turn, device) for turn in turns]
        mixtures = [answer.numbers for answer in each]
        found[question.target] = {
            "log_weights": torch.cat([m.log_weights[:, column] for m in mixtures], dim=1) - np.log(len(each)),
            "means": torch.cat([m.means[:, column] for m in mixtures], dim=1),
            "scales": torch.cat([m.scales[:, column] for m in mixtures], dim=1),
            "latent": torch.stack([answer.latent[:, column] for answer in each]).mean(0).half(),
        }
    for name, kind in (("xdf", "picture"), ("spex", "spectrum")):
        survey = surveys[name]
        answer = asked(model, survey, torch.zeros(len(survey.columns), dtype=torch.bool), TURNS[0], device, blind=True)
        found[kind] = getattr(answer, kind)
    return {key: value if isinstance(value, Tensor) else dict(value) for key, value in found.items()}


def with_neighbours(answers: dict[str, Any], of_train: Mapping[str, Any], train: Surveys) -> dict[str, Any]:
    """Replaces the latents by the distances and numbers of the nearest training objects, which take less room."""
    for question in CROSS_PREDICTIONS:
        known = torch.from_numpy(np.isfinite(train[question.survey].column(question.target)))
        found = answers[question.target]
        far = torch.cdist(found.pop("latent").float(), of_train[question.target]["latent"][known].float())
        found["distance"], found["row"] = far.topk(NEAREST, largest=False)
    return answers


TURNS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x, lambda x: x.flip(-1), lambda x: x.flip(-2), lambda x: x.flip(-1).flip(-2),
    lambda x: x.mT, lambda x: x.flip(-1).mT, lambda x: x.flip(-2).mT, lambda x: x.flip(-1).flip(-2).mT,
)  # fmt: skip


def asked(
    model: JointRegressor, survey: Survey, hide: Tensor, turn: Callable[[Tensor], Tensor], device: str, *,
    blind: bool = False,
) -> Any:  # fmt: skip
    from treadle.astro.joint import Answer

    data, parts = given(survey), []
    for start in range(0, len(survey), 512):
        rows = slice(start, start + 512)
        scalars = torch.from_numpy(survey.scalars[rows]).float().to(device)
        shown = None if data is None else turn(torch.from_numpy(data[rows]).to(device))
        parts.append(model(
            survey.name, scalars, hide=hide[None].to(device), data=shown, give_back=blind,
            hide_data=torch.ones(len(scalars), dtype=torch.bool, device=device) if blind else None,
        ))  # fmt: skip
    joined = [
        torch.cat([getattr(part.numbers, key) for part in parts]).cpu() for key in ("log_weights", "means", "scales")
    ]
    back = {key: torch.cat([getattr(part, key) for part in parts]).cpu() for key in ("picture", "spectrum")
            if getattr(parts[0], key) is not None}  # fmt: skip
    return Answer(Mixture(*joined), torch.cat([part.latent for part in parts]).cpu(), **back)


# -- the answers of a seed ----------------------------------------------------------------------------------------


def standard(train: Survey, survey: Survey, target: str) -> tuple[Tensor, float, float]:
    """Returns the true numbers in deviations, the mean and the deviation."""
    known = train.column(target)
    mean, deviation = float(np.nanmean(known)), float(np.nanstd(known))
    return torch.from_numpy((survey.column(target) - mean) / deviation), mean, deviation


def mixed(
    members: Sequence[Mapping[str, Any]], question: CrossPrediction, part: str, y_train: Tensor,
    kernel: Mapping[str, Any], shares: tuple[float, float],
) -> Mixture:  # fmt: skip
    """Returns the mixture of all members, of the nearest training objects in each latent and of the kernel regression.

    Args:
        members: their answers.
        question: of the survey.
        part: validation or test objects.
        y_train: the true numbers of the training objects in deviations.
        kernel: mean and deviation of that part.
        shares: of the nearest objects and of the kernel regression.
    """
    near, other = shares
    own = max(0.0, 1 - near - other)
    weights, means, scales = [], [], []
    for member in members:
        found, known = member[part][question.target], y_train.isfinite()
        if own > 0:
            weights.append(found["log_weights"] + np.log(own))
            means.append(found["means"])
            scales.append(found["scales"])
        if near > 0:
            weight = 1 / found["distance"].clamp(min=1e-6)
            weights.append((weight / weight.sum(1, keepdim=True)).log() + np.log(near))
            means.append(y_train[known][found["row"]].float())
            scale = (found["log_weights"].exp() * found["scales"]).sum(1, keepdim=True)
            scales.append(scale.expand_as(weight))
    weights = [weight - np.log(len(members)) for weight in weights]
    if other > 0:
        weights.append(torch.full((len(kernel[part]["mean"]), 1), float(np.log(other))))
        means.append(kernel[part]["mean"].float()[:, None])
        scales.append(kernel[part]["deviation"].float()[:, None])
    return Mixture(torch.cat(weights, 1), torch.cat(means, 1), torch.cat(scales, 1))


def explained(predicted: Array, true: Array, reference: float) -> float:
    return 1 - float(((predicted - true) ** 2).sum() / ((true - reference) ** 2).sum())


def answers_of(
    seed_files: Sequence[Path], parts: Mapping[str, Surveys], kernels: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the scores of a seed for each question: of the network with its neighbours, and of the stack."""
    members = [torch.load(file, weights_only=True) for file in seed_files]
    found: dict[str, Any] = {}
    for question, kernel in zip(CROSS_PREDICTIONS, kernels, strict=True):
        name, target = question.survey, question.target
        y = {part: standard(parts["train"][name], surveys[name], target)[0] for part, surveys in parts.items()}

        def error(
            shares: tuple[float, float], question: CrossPrediction = question, y: Any = y, kernel: Any = kernel
        ) -> float:
            mean = mixed(members, question, "val", y["train"], kernel, shares).mean()
            return float(((mean - y["val"])[y["val"].isfinite()] ** 2).mean())

        alone = members[0]["test"][target]
        single = (alone["log_weights"].exp() * alone["means"]).sum(1)
        known = y["test"].isfinite()
        found[target] = {
            "one member": explained(single[known].double().numpy(), y["test"][known].numpy(), 0.0),
            "network": scores_of(
                members, question, y, kernel, min([each for each in SHARES if each[1] == 0], key=error)
            ),
            "stack": scores_of(members, question, y, kernel, min(SHARES, key=error)),
        }
    for kind in ("picture", "spectrum"):
        found[kind] = torch.stack([member["test"][kind] for member in members]).mean(0)
    return found


def scores_of(
    members: Sequence[Mapping[str, Any]], question: CrossPrediction, y: Mapping[str, Tensor], kernel: Mapping[str, Any],
    shares: tuple[float, float],
) -> dict[str, Any]:  # fmt: skip
    """Returns how good the answers and distributions with some shares are."""
    known = y["test"].isfinite()
    mixture, true = mixed(members, question, "test", y["train"], kernel, shares), torch.nan_to_num(y["test"])
    pit, likelihood = (said[known].numpy() for said in (mixture.cdf(true), mixture.log_prob(true)))
    return {
        "explained": explained(mixture.mean()[known].double().numpy(), true[known].numpy(), 0.0), "shares": shares,
        "pit": np.histogram(pit, 10, (0, 1))[0].tolist(), "log_likelihood": float(likelihood.mean()),
        "covered": {"50%": float(np.mean(abs(pit - 0.5) < 0.25)), "90%": float(np.mean(abs(pit - 0.5) < 0.45))},
    }  # fmt: skip


# -- the peers ----------------------------------------------------------------------------------------------------


def features(tokenizers: Any, train: Survey, surveys: Sequence[Survey], question: CrossPrediction) -> dict[str, Any]:
    """Returns inputs by name, for each of the surveys."""
    from sklearn.decomposition import PCA

    def plain(survey: Survey) -> Array:
        if question.given == "image":
            return np.asarray(survey.images, dtype=np.float64).reshape(len(survey), -1)
        if question.given == "spectrum":
            assert survey.spectra is not None
            return np.arcsinh(survey.spectra.astype(np.float64) / tokenizers.spectrum.softening)
        return survey.scalars[:, [survey.columns.index(name) for name in question.given]]

    sources = {"tokens": lambda survey: token_values(tokenizers, survey, question.given), "values": plain}
    found = {}
    for name, take in sources.items():
        parts = [take(survey) for survey in surveys]
        if question.given == "image":
            pca = PCA(min(48, len(train) - 1), random_state=0).fit(parts[0])
            found[f"{name}, components"] = [pca.transform(part) for part in parts]
            if name == "values":
                sums = [np.log(part.reshape(len(part), 3, -1).sum(axis=2) + 1) for part in parts]
                found[f"{name}, components and sums"] = [
                    np.concatenate([pca.transform(part), total], axis=1)
                    for part, total in zip(parts, sums, strict=True)
                ]
        else:
            found[name] = parts
    return found


def ask_peers(number: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the scores of all peers on one question."""
    from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor

    question = CROSS_PREDICTIONS[number]
    file = options.runs / f"peers-{question.target}.json"
    if file.exists():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    if time.time() > options.deadline:
        return None
    train, val, test = load(options)
    tokenizers = fit_tokenizers(list(train.values()), **options.tokens, seed=0)
    surveys = []
    for part in (train, val, test):
        survey = part[question.survey]
        surveys.append(survey.take(np.isfinite(survey.column(question.target))))
    y_train, y_val, y_test = (survey.column(question.target) for survey in surveys)

    def trees(kind: str, x: Sequence[Array], seed: int) -> list[Array]:
        if kind == "ridge":
            return [ridge_prediction(x[0], y_train, part) for part in x[1:]]
        if kind == "boosted trees":
            # Without randomness the seeds would be one.
            model: Any = HistGradientBoostingRegressor(random_state=seed, max_features=0.5)
            return [model.fit(x[0], y_train).predict(part) for part in x[1:]]
        model = ExtraTreesRegressor(options.trees, random_state=seed, n_jobs=2)
        filled = [np.nan_to_num(part) for part in x]
        return [model.fit(filled[0], y_train).predict(part) for part in filled[1:]]

    result: dict[str, Any] = {"n": len(y_test)}
    with threadpool_limits(1):  # on a busy machine two threads wait for each other
        for kind in METHODS:
            for name, x in features(tokenizers, surveys[0], surveys, question).items():
                said = [trees(kind, x, seed) for seed in ([0] if kind == "ridge" else range(3))]
                chosen = explained(np.mean([val for val, _ in said], axis=0), y_val, y_train.mean())
                together = np.mean([test for _, test in said], axis=0)
                scores = {
                    "input": name, "validation": chosen,
                    "explained": [explained(test, y_test, y_train.mean()) for _, test in said],
                    "together": explained(together, y_test, y_train.mean()),
                    "deviation": float(np.std(np.mean([val for val, _ in said], axis=0) - y_val)),
                }  # fmt: skip
                off, deviation = (together - y_test) / y_train.std(), scores["deviation"] / y_train.std()
                scores["log_likelihood"] = float(
                    np.mean(-0.5 * (off / deviation) ** 2 - np.log(deviation) - 0.5 * np.log(2 * np.pi))
                )
                scores["covered"] = {"50%": float(np.mean(abs(off) < 0.67449 * deviation)),
                                     "90%": float(np.mean(abs(off) < 1.64485 * deviation))}  # fmt: skip
                result.setdefault(kind, []).append(scores)
    options.runs.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result), encoding="utf-8")
    print(f"peers, {question.target}", flush=True)
    return result


class KernelRegression:
    """Means and deviations of a Gaussian process, in deviations of the training numbers.

    Args:
        x: (N, F) inputs, standardised.
        y: (N,).
        kernel: name in KERNELS.
        width: what squared distances, a mean over the inputs, are multiplied by.
        noise: variance of the noise over that of the process.
    """

    def __init__(self, x: Array, y: Array, kernel: str, width: float, noise: float):
        self.x, self.kernel, self.width, self.noise = x, kernel, width, noise
        self.lower = np.linalg.cholesky(self.among(x) + noise * np.eye(len(x)))
        half = solved(self.lower, y, lower=True)
        self.weights = solved(self.lower, half, lower=True, trans="T")
        self.variance = float(half @ half) / len(y)

    def among(self, x: Array) -> Array:
        squared = (x**2).sum(axis=1)[:, None] + (self.x**2).sum(axis=1) - 2 * x @ self.x.T
        return np.asarray(KERNELS[self.kernel](self.width * np.maximum(squared, 0) / (2 * x.shape[1])))

    def mean(self, x: Array) -> Array:
        return np.asarray(self.among(x) @ self.weights)

    def deviation(self, x: Array) -> Array:
        gain = solved(self.lower, self.among(x).T, lower=True)
        return np.asarray(np.sqrt(self.variance * (1 + self.noise - (gain**2).sum(axis=0))))


def ask_kernel(number: int, options: argparse.Namespace) -> Path | None:
    """Fits a kernel regression, its settings chosen on validation objects; returns its answers."""
    question = CROSS_PREDICTIONS[number]
    file: Path = options.runs / f"kernel-{question.target}.pt"
    if file.exists():
        return file
    if time.time() > options.deadline:
        return None
    loaded = load(options)
    tokenizers = fit_tokenizers(list(loaded[0].values()), **options.tokens, seed=0)
    surveys = [part[question.survey] for part in loaded]
    train, val, _ = surveys
    y_train, y_val = (standard(train, survey, question.target)[0].numpy() for survey in (train, val))
    known, asked = np.isfinite(y_train), np.isfinite(y_val)
    least, best = np.inf, None
    with threadpool_limits(1):
        inputs = features(tokenizers, train, surveys, question)
        if question.given == "spectrum":
            spectra = [np.asarray(part.spectra) for part in surveys]
            inputs["over their mean"] = [np.arcsinh(x / np.abs(x).mean(axis=1, keepdims=True)) for x in spectra]
        for name, parts in inputs.items():
            center, scale = np.nanmean(parts[0], axis=0), np.nanstd(parts[0], axis=0) + 1e-9
            x = [np.clip(np.nan_to_num((part - center) / scale), -5, 5) for part in parts]
            some = np.flatnonzero(known)[:MOST]
            for kernel, width, noise in itertools.product(KERNELS, WIDTHS, NOISES):
                tried = KernelRegression(x[0][some], y_train[some], kernel, width, noise)
                error = float(np.mean((tried.mean(x[1][asked]) - y_val[asked]) ** 2))
                if error < least:
                    least, best = error, (name, x, kernel, width, noise)
        assert best is not None
        name, x, *settings = best
        fitted = KernelRegression(x[0][known], y_train[known], *settings)
        found: dict[str, Any] = {"settings": ", ".join(map(str, (name, *settings)))}
        for part, values in (("val", x[1]), ("test", x[2])):
            mean, deviation = torch.from_numpy(fitted.mean(values)), torch.from_numpy(fitted.deviation(values))
            found[part] = {"mean": mean, "deviation": deviation}
    options.runs.mkdir(parents=True, exist_ok=True)
    torch.save(found, file)
    print(f"kernel regression, {question.target}: {found['settings']}", flush=True)
    return file


def drawn(parts: Mapping[str, Surveys], seeds: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Scores predictions of pictures and spectra from an object's numbers, beside ridge and neighbours."""
    from sklearn.ensemble import ExtraTreesRegressor

    table = []
    for name, kind in (("xdf", "picture"), ("spex", "spectrum")):
        train, test = parts["train"][name], parts["test"][name]
        y = {}
        for part, survey in (("train", train), ("test", test)):
            data = given(survey)
            assert data is not None
            flat = data.reshape(len(data), -1).astype(np.float64)
            y[part] = flat if kind == "picture" else np.arcsinh(flat / 0.5)
        mean, deviation = y["train"].mean(axis=0), y["train"].std(axis=0) + 1e-12
        center, scale = np.nanmean(train.scalars, axis=0), np.nanstd(train.scalars, axis=0)
        x = {
            part: np.nan_to_num((survey.scalars - center) / scale)
            for part, survey in (("train", train), ("test", test))
        }
        if kind == "spectrum":
            y = {part: np.clip((values - mean) / deviation, -5, 5) for part, values in y.items()}
        true = y["test"]
        far = ((x["test"][:, None] - x["train"][None]) ** 2).sum(axis=2)
        nearest = np.argsort(far, axis=1)[:, :NEAREST]
        design = np.c_[x["train"], x["train"] ** 2, np.ones(len(x["train"]))]
        weights = np.linalg.solve(design.T @ design + np.eye(design.shape[1]), design.T @ y["train"])
        forest = ExtraTreesRegressor(200, random_state=0, n_jobs=-1, min_samples_leaf=3).fit(x["train"], y["train"])
        peers = {
            "ridge": np.c_[x["test"], x["test"] ** 2, np.ones(len(x["test"]))] @ weights,
            "nearest": y["train"][nearest].mean(axis=1),
            "extra trees": forest.predict(x["test"]),
        }
        base = ((true - y["train"].mean(axis=0)) ** 2).sum()
        row = {"from its numbers": kind, "objects": str(len(true))}
        ours = [1 - float(((seed[kind].numpy().reshape(len(true), -1) - true) ** 2).sum() / base) for seed in seeds]
        row["JointRegressor"] = spread(ours)
        row |= {peer: f"{1 - ((said - true) ** 2).sum() / base:.3f}" for peer, said in peers.items()}
        table.append(row)
    return table


# -- the tables ---------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 3) -> str:
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def name_of(question: CrossPrediction) -> str:
    source = question.given if isinstance(question.given, str) else "photometry"
    return f"{question.target} from {source}"


def best_input(scores: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(scores, key=lambda found: found["validation"])


def kernel_scores(parts: Mapping[str, Surveys], question: CrossPrediction, kernel: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scores of the kernel regression alone."""
    y = {part: standard(parts["train"][question.survey], surveys[question.survey], question.target)[0]
         for part, surveys in parts.items()}  # fmt: skip
    return scores_of([], question, y, kernel, (0.0, 1.0))


def at_or_above(ours: Sequence[float], best: float) -> str:
    return "each seed" if min(ours) >= best else "mean" if statistics.mean(ours) >= best else "no"


def score_table(
    seeds: Sequence[Mapping[str, Any]], peers: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    table = []
    for question, theirs, kernel in zip(CROSS_PREDICTIONS, peers, kernels, strict=True):
        network, stack = ([seed[question.target][way]["explained"] for seed in seeds] for way in ("network", "stack"))
        chosen = {kind: best_input(theirs[kind]) for kind in METHODS}
        trees = max(float(found["together"]) for kind, found in chosen.items() if kind != "ridge")
        most = max(*(float(found["together"]) for found in chosen.values()), kernel["explained"])
        row = {
            "variance explained": name_of(question), "objects": str(theirs["n"]), "stack": spread(stack),
            "JointRegressor": spread(network),
            "one member": spread([seed[question.target]["one member"] for seed in seeds]),
            "kernel regression": f"{kernel['explained']:.3f} ({kernel['settings']})",
            **{kind: f"{found['together']:.3f} ({found['input']})" for kind, found in chosen.items()},
            **{f"{kind}, tokens": f"{theirs[kind][0]['together']:.3f}" for kind in METHODS},
            "JointRegressor at or above the trees": at_or_above(network, trees),
            "stack at or above the trees": at_or_above(stack, trees),
            "stack at or above all": at_or_above(stack, most),
        }  # fmt: skip
        shares = [seed[question.target]["stack"]["shares"] for seed in seeds]
        row["shares of nearest and kernel"] = ", ".join(f"{near:g} and {other:g}" for near, other in shares)
        table.append(row)
    return table


def calibration_table(
    seeds: Sequence[Mapping[str, Any]], peers: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    table = []
    for question, theirs, kernel in zip(CROSS_PREDICTIONS, peers, kernels, strict=True):
        peer = max((best_input(theirs[kind]) for kind in METHODS), key=lambda scores: scores["validation"])
        ways = {
            "JointRegressor": [seed[question.target]["network"] for seed in seeds],
            "stack": [seed[question.target]["stack"] for seed in seeds],
            "kernel regression": [kernel],
            "best of ridge and trees, one Gaussian": [peer],
        }
        for way, found in ways.items():
            row = {"distributions": name_of(question), "of": way}
            for level in ("50%", "90%"):
                row[f"inside {level}"] = f"{statistics.mean(each['covered'][level] for each in found):.0%}"
            row["log likelihood"] = f"{statistics.mean(each['log_likelihood'] for each in found):.3f}"
            if "pit" in found[0]:
                pit = np.mean([np.array(each["pit"]) / sum(each["pit"]) for each in found], axis=0)
                row["PIT in tenths, %"] = " ".join(f"{100 * share:.0f}" for share in pit)
            table.append(row)
    return table


def as_markdown(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(rows[0])
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    return f"**{title}**\n\n{head}" + "\n".join(
        f"| {' | '.join(str(row.get(c, '')) for c in columns)} |" for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--members", type=int, default=MEMBERS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--capture", action="store_const", const="auto", default=False, help="replay steps as CUDA graphs"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--budget-minutes", type=float, default=float("inf"))
    parser.add_argument("--runs", type=Path, default=Path("runs/astro_science"))
    parser.add_argument("--trained-on", help="the machine of runs that were brought here, for the notes")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.model, options.tokens, options.max_rows, options.trees = {}, vars(AstroRunConfig().tokens), None, 300
    if options.tiny:
        options.runs, options.seeds, options.members, options.steps = Path(tempfile.mkdtemp()), [0, 1], 2, 8
        options.model, options.max_rows, options.trees = {"d_model": 16, "n_layers": 1, "d_ff": 16}, 150, 5
        options.tokens = {"v_image": 4, "scalar_bins": 4, "v_spectra": 4}
    options.deadline = time.time() + 60 * options.budget_minutes
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        runs = {
            seed: [pool.submit(train_member, seed, member, options) for member in range(options.members)]
            for seed in options.seeds
        }
        others = [pool.submit(ask_peers, number, options) for number in range(len(CROSS_PREDICTIONS))]
        regressions = [pool.submit(ask_kernel, number, options) for number in range(len(CROSS_PREDICTIONS))]
        files = {seed: [each.result() for each in members] for seed, members in runs.items()}
        peers = [each.result() for each in others]
        fitted = [each.result() for each in regressions]
    if any(file is None for members in files.values() for file in members) or None in peers or None in fitted:
        print("not finished: the same command resumes")
        return
    parts = dict(zip(("train", "val", "test"), load(options), strict=True))
    answers = [torch.load(file, weights_only=True) for file in fitted if file is not None]
    kernels = [
        each | kernel_scores(parts, question, each) for question, each in zip(CROSS_PREDICTIONS, answers, strict=True)
    ]
    seeds = [answers_of([file for file in members if file], parts, kernels) for members in files.values()]
    found = [peer for peer in peers if peer is not None]
    first = score_table(seeds, found, kernels)
    notes = [
        as_markdown(
            "Predictive distributions: intervals, log likelihood in deviations, PIT",
            calibration_table(seeds, found, kernels),
        ),
        as_markdown("Pictures and spectra from the numbers of an object: variance explained", drawn(parts, seeds)),
    ]
    notes += [f"Trained on {options.trained_on}."] if options.trained_on else []
    if options.tiny:
        print(first, *notes, sep="\n\n")
        return
    title = "One kind of data of an object from another: variance explained, test objects, ± over seeds"
    write_result("astro_science", title, list(first[0]), first, describe(), notes=notes)


if __name__ == "__main__":
    main()
