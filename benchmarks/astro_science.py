"""Cross-modal prediction in astronomy: JointRegressor and KernelStack compared with ridge and trees.

    python benchmarks/astro_science.py --device cuda --capture --jobs 20   # an H200 and 16 cores, see below
    python benchmarks/astro_science.py --budget-minutes 20                 # in pieces: the same command resumes
    python benchmarks/astro_science.py --tiny                              # a trial, writes nothing

The surveys, split and questions are those of `treadle train astro`. One model answers all five; for each seed three
members are trained, and their mixtures are averaged. The answers are mixed with the numbers of the nearest training
objects in latent space. The stack adds a third part, the Gaussian of kernel regressions on the same inputs. It also
generates images and spectra from the numbers of an object, as a mixture of the members and of kernel regressions. All
shares are chosen on validation objects, and so are views, kernels, widths and noises of the regressions, from the whole
grid of `treadle.regression`. Each baseline learns one question; it gets the values of the tokens and the raw values
(images also as 48 principal components and sums), and the better of the two on validation objects counts, as do the
settings of the generating baselines. Three seeds of trees are averaged too. All scores are on test objects.

There the command took 156 s from an empty folder: the members 120 s each, in parallel, and the trees on spectra for
J-Ks, which start last, 30 s more. Results stored below --runs are not recomputed, whichever machine made them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, write_result
from science import add_training, as_markdown, kept, options_of, parsed, pool_of, spread
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
from treadle.regression import KernelStack, NumberViews, mixing_shares

Array = np.ndarray[Any, Any]
Surveys = Mapping[str, Survey]
MEMBERS, STEPS = 3, 2000
BATCHES = {"xdf": 64, "spex": 128, "sdss": 512}
BLIND = 0.5  # share of rows in a batch whose image or spectrum is predicted from the numbers
BACK = {"xdf": 200.0, "spex": 6.0}  # weights of the squared error of pictures and spectra
NEAREST, COMPONENTS = 10, 64
DRAWN = {"picture": "xdf", "spectrum": "spex"}  # the survey of each
METHODS = {"ridge": (0,), "boosted trees": (0, 1, 2), "extra trees": (0, 1, 2)}  # seeds of each


def load(options: argparse.Namespace) -> tuple[Surveys, Surveys, Surveys]:
    config = AstroRunConfig()
    config.data.max_rows = options.max_rows
    return split_surveys(config.data)


def given(survey: Survey) -> Array | None:
    """Return images in [0, 1], or spectra, or None."""
    if survey.images is not None:
        return np.asarray(survey.images, dtype=np.float32) / 255
    return None if survey.spectra is None else np.asarray(survey.spectra, dtype=np.float32)


# -- the model ----------------------------------------------------------------------------------------------------


class Joint(BaseTrainer):
    """Sampling, masking and augmentation of objects on the device; a batch of the loader is a number."""

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
        data, device = self.data[name], self.device
        count = min(BATCHES[name], len(table))
        blind = 0 if data is None else int(BLIND * count)
        rows = torch.randint(0, len(table), (count + blind,), device=device)
        scalars = table.index_select(0, rows)
        draw = torch.rand(count + blind, 4, device=device)
        asked = torch.ones(scalars.shape[1], dtype=torch.bool, device=device)
        if data is None:  # the redshift, which comes last
            asked[:-1] = False
        from_numbers = torch.arange(count + blind, device=device) >= count
        usual = (draw[:, :1] < (0.7 if data is None else 0.85)) & ~from_numbers[:, None]
        most = torch.where(from_numbers & (draw[:, 3] < 0.5), 0.0, draw[:, 1])  # half of these show all numbers
        hide = torch.where(usual, asked, torch.rand(scalars.shape, device=device) < most[:, None])
        hide_data = None if data is None else ~usual[:, 0] & ((draw[:, 2] < 0.7) | from_numbers)
        shown = None if data is None else changed(name, data.index_select(0, rows))
        model: Any = self.model
        inputs = self.unwrapped_model.survey(name)
        target = inputs.standardised(scalars)
        answer = model(name, scalars, hide=hide, data=shown, hide_data=hide_data, give_back=data is not None)
        loss = joint_loss(answer, target, hide & scalars.isfinite())
        if shown is not None and hide_data is not None:
            back, wanted = (answer.picture, shown) if name == "xdf" else (answer.spectrum, inputs.fluxes(shown))
            off = (back - wanted).square().flatten(1).mean(1)
            loss = loss + BACK[name] * (off * hide_data).sum() / hide_data.sum().clamp(min=1)
        return loss


def changed(name: str, data: Tensor) -> Tensor:
    """Return rotated and mirrored images and noisier spectra."""
    count, device = len(data), data.device
    if name == "xdf":
        for turn in (lambda x: x.flip(-1), lambda x: x.flip(-2), lambda x: x.mT):
            data = torch.where(torch.rand(count, 1, 1, 1, device=device) < 0.5, turn(data), data)
        return data + 0.01 * torch.rand(count, 1, 1, 1, device=device) * torch.randn_like(data)
    return data + 0.05 * torch.rand(count, 1, device=device).square() * torch.randn_like(data)


def train_member(seed: int, member: int, options: argparse.Namespace) -> Path | None:
    """Train one member as far as the time allows; return its answers, or None if it is not finished."""
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
    found = {part: with_neighbours(answers[part], answers["train"], train) for part in ("val", "test")}
    kept(file, lambda path: torch.save(found, path))
    print(f"seed {seed}, member {member}: {time.time() - start:.0f} s", flush=True)
    return file


@torch.no_grad()
def ask_all(model: JointRegressor, surveys: Surveys, device: str) -> dict[str, Any]:
    """Return mixtures and latents for each question, and images and spectra generated from an object's numbers."""
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
    for kind, name in DRAWN.items():
        survey = surveys[name]
        answer = asked(model, survey, torch.zeros(len(survey.columns), dtype=torch.bool), TURNS[0], device, blind=True)
        back = getattr(answer, kind)
        if kind == "picture":  # the numbers do not determine the orientation of an object
            back = torch.stack([turn(back) for turn in TURNS]).mean(0)
        found[kind] = back.flatten(1).half()
    return {key: value if isinstance(value, Tensor) else dict(value) for key, value in found.items()}


def with_neighbours(answers: dict[str, Any], of_train: Mapping[str, Any], train: Surveys) -> dict[str, Any]:
    """Replace the latents by the distances and numbers of the nearest training objects, which need less space."""
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
    """Return the standardized targets, their mean and their standard deviation."""
    known = train.column(target)
    mean, deviation = float(np.nanmean(known)), float(np.nanstd(known))
    return torch.from_numpy((survey.column(target) - mean) / deviation), mean, deviation


def mixed(
    members: Sequence[Mapping[str, Any]], question: CrossPrediction, part: str, y_train: Tensor,
    kernel: Mapping[str, Any], shares: Sequence[float],
) -> Mixture:  # fmt: skip
    """Return the mixture of all members, of the nearest training objects in each latent and of the kernel regression.

    Args:
        members: their answers.
        question: of the survey.
        part: validation or test objects.
        y_train: the standardized targets of the training objects.
        kernel: mean and standard deviation for that part.
        shares: of the members, of the nearest objects and of the kernel regression.
    """
    own, near, other = shares
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


def explained(predicted: Array, true: Array, reference: float | Array) -> float:
    return 1 - float(((predicted - true) ** 2).sum() / ((true - reference) ** 2).sum())


def answers_of(
    seed_files: Sequence[Path], parts: Mapping[str, Surveys], kernels: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the scores of a seed for each question, for the network with its neighbours and for the stack."""
    members = [torch.load(file, weights_only=True) for file in seed_files]
    found: dict[str, Any] = {}
    for question, kernel in zip(CROSS_PREDICTIONS, kernels, strict=True):
        name, target = question.survey, question.target
        y = {part: standard(parts["train"][name], surveys[name], target)[0] for part, surveys in parts.items()}

        alone = members[0]["test"][target]
        single = (alone["log_weights"].exp() * alone["means"]).sum(1)
        known = y["test"].isfinite()
        found[target] = {
            "one member": explained(single[known].double().numpy(), y["test"][known].numpy(), 0.0),
            "network": scores_of(members, question, y, kernel, shares_of(members, question, y, kernel, 2)),
            "stack": scores_of(members, question, y, kernel, shares_of(members, question, y, kernel, 3)),
        }
    for kind in DRAWN:
        found[kind] = {
            part: np.mean([member[part][kind].double().numpy() for member in members], axis=0)
            for part in ("val", "test")
        }
    return found


def shares_of(
    members: Sequence[Mapping[str, Any]], question: CrossPrediction, y: Mapping[str, Tensor], kernel: Mapping[str, Any],
    count: int,
) -> list[float]:  # fmt: skip
    """Return shares, chosen on validation objects, of the first so many of members, nearest objects and kernel."""
    known = y["val"].isfinite()
    means = [mixed(members, question, "val", y["train"], kernel, pure).mean() for pure in np.eye(3)[:count]]
    errors = np.stack([(mean - y["val"])[known].numpy() for mean in means])
    return [*mixing_shares(errors).tolist(), *[0.0] * (3 - count)]


def scores_of(
    members: Sequence[Mapping[str, Any]], question: CrossPrediction, y: Mapping[str, Tensor], kernel: Mapping[str, Any],
    shares: Sequence[float],
) -> dict[str, Any]:  # fmt: skip
    """Return the scores of the answers and distributions for given shares."""
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
    """Return the inputs of each survey, by name."""
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


def ask_peer(number: int, kind: str, seed: int, options: argparse.Namespace) -> Path | None:
    """Fit one kind of baseline to one question, once with each of its inputs; return its predictions."""
    from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor

    question = CROSS_PREDICTIONS[number]
    file: Path = options.runs / f"peer-{question.target}-{kind.replace(' ', '-')}-{seed}.pt"
    if file.exists():
        return file
    if time.time() > options.deadline:
        return None
    train, val, test = load(options)
    tokenizers = fit_tokenizers(list(train.values()), **options.tokens, seed=0)
    surveys = with_target((train, val, test), question)
    y_train = surveys[0].column(question.target)

    def fitted(x: Sequence[Array]) -> list[Array]:
        if kind == "ridge":
            return [ridge_prediction(x[0], y_train, part) for part in x[1:]]
        if kind == "boosted trees":
            # Without randomness, all seeds would be equal.
            model: Any = HistGradientBoostingRegressor(random_state=seed, max_features=0.5)
        else:
            model, x = ExtraTreesRegressor(options.trees, random_state=seed), [np.nan_to_num(part) for part in x]
        return [model.fit(x[0], y_train).predict(part) for part in x[1:]]

    found: dict[str, dict[str, Tensor]] = {}
    with threadpool_limits(1):  # on a busy machine two threads wait for each other
        for name, x in features(tokenizers, surveys[0], surveys, question).items():
            found[name] = dict(zip(("val", "test"), map(torch.from_numpy, fitted(x)), strict=True))
    kept(file, lambda path: torch.save(found, path))
    print(f"{kind}, {question.target}, seed {seed}", flush=True)
    return file


def with_target(parts: Sequence[Surveys], question: CrossPrediction) -> list[Survey]:
    """Return the objects of each part whose number is known."""
    surveys = [part[question.survey] for part in parts]
    return [survey.take(np.isfinite(survey.column(question.target))) for survey in surveys]


def peer_scores(
    files: Mapping[str, Sequence[Path]], parts: Mapping[str, Surveys], question: CrossPrediction
) -> dict[str, Any]:
    """Return the scores of all baselines on one question, for each of their inputs."""
    surveys = with_target(list(parts.values()), question)
    y_train, y_val, y_test = (survey.column(question.target) for survey in surveys)
    result: dict[str, Any] = {"n": len(y_test)}
    for kind, seeds in files.items():
        answers = [torch.load(file, weights_only=True) for file in seeds]
        for name in answers[0]:
            said = [tuple(answer[name][part].numpy() for part in ("val", "test")) for answer in answers]
            together_val, together = (np.mean(part, axis=0) for part in zip(*said, strict=True))
            deviation = float(np.std(together_val - y_val))
            off = abs(together - y_test) / deviation
            likelihood = -0.5 * off**2 - np.log(deviation / y_train.std()) - 0.5 * np.log(2 * np.pi)
            result.setdefault(kind, []).append({
                "input": name, "validation": explained(together_val, y_val, y_train.mean()),
                "together": explained(together, y_test, y_train.mean()), "log_likelihood": float(likelihood.mean()),
                "covered": {"50%": float(np.mean(off < 0.67449)), "90%": float(np.mean(off < 1.64485))},
            })  # fmt: skip
    return result


def views_of(tokenizers: Any, surveys: Sequence[Survey], question: CrossPrediction) -> list[dict[str, Array]]:
    """Return the views of the inputs for the kernel regressions, for training and other objects."""
    inputs = features(tokenizers, surveys[0], surveys, question)
    if question.given == "spectrum":
        spectra = [np.asarray(survey.spectra) for survey in surveys]
        inputs["over their mean"] = [np.arcsinh(x / np.abs(x).mean(axis=1, keepdims=True)) for x in spectra]
    parts = [{name: x[number] for name, x in inputs.items()} for number in range(len(surveys))]
    if not isinstance(question.given, str):
        numbers = NumberViews(inputs["values"][0])
        parts = [part | numbers(part["values"]) for part in parts]
    return parts


def ask_kernel(number: int, options: argparse.Namespace) -> Path | None:
    """Fit kernel regressions with settings chosen on validation objects; return their answers."""
    question = CROSS_PREDICTIONS[number]
    file: Path = options.runs / f"kernels-{question.target}.pt"
    if file.exists():
        return file
    if time.time() > options.deadline:
        return None
    torch.set_num_threads(1)
    loaded = load(options)
    tokenizers = fit_tokenizers(list(loaded[0].values()), **options.tokens, seed=0)
    surveys = [part[question.survey] for part in loaded]
    y_train, y_val = (standard(surveys[0], survey, question.target)[0].numpy() for survey in surveys[:2])
    with threadpool_limits(1):
        train, val, test = views_of(tokenizers, surveys, question)
    fitted = KernelStack(
        rows_of(train, np.isfinite(y_train)), y_train[np.isfinite(y_train)], device=options.device,
        held_out=(rows_of(val, np.isfinite(y_val)), y_val[np.isfinite(y_val)]), **options.kernels,
    )  # fmt: skip
    found: dict[str, Any] = {"settings": described(fitted)}
    for part, views in (("val", val), ("test", test)):
        mean, deviation = fitted(views)
        found[part] = {"mean": torch.from_numpy(mean), "deviation": torch.from_numpy(deviation)}
    kept(file, lambda path: torch.save(found, path))
    print(f"kernel regressions, {question.target}: {found['settings']}", flush=True)
    return file


def rows_of(views: Mapping[str, Array], rows: Array) -> dict[str, Array]:
    return {name: x[rows] for name, x in views.items()}


def described(stack: KernelStack) -> str:
    """Describe the shares and settings of the regressions with a nonzero share."""
    return "; ".join(
        f"{stack.shares[name]:.2f} {name}: {kernel}, {width:.1g}, {noise:.1g}"
        for name, (kernel, width, noise) in stack.settings.items() if stack.shares[name] > 0.005
    )  # fmt: skip


# -- pictures and spectra from numbers ----------------------------------------------------------------------------


def plain_data(train: Survey, survey: Survey) -> Array:
    """Return images (N, pixels) in [0, 1], or arcsinh fluxes (N, L) standardized by the training objects."""
    known, asked = (given(each) for each in (train, survey))
    assert known is not None
    assert asked is not None
    if survey.images is not None:
        return asked.reshape(len(asked), -1).astype(np.float64)
    fluxes = [np.arcsinh(flux.astype(np.float64) / 0.5) for flux in (known, asked)]
    return np.asarray(np.clip((fluxes[1] - fluxes[0].mean(axis=0)) / (fluxes[0].std(axis=0) + 1e-12), -5, 5))


def draw_others(kind: str, options: argparse.Namespace) -> Path | None:
    """Return generated data for validation and test objects, by tuned kernel regressions and baselines."""
    file: Path = options.runs / f"drawn-{kind}.pt"
    if file.exists():
        return file
    if time.time() > options.deadline:
        return None
    torch.set_num_threads(1)
    surveys = dict(zip(("train", "val", "test"), (part[DRAWN[kind]] for part in load(options)), strict=True))
    y = {part: plain_data(surveys["train"], survey) for part, survey in surveys.items()}
    views = {part: NumberViews(surveys["train"].scalars)(survey.scalars) for part, survey in surveys.items()}
    with threadpool_limits(1):
        found = drawn_by_peers(surveys, y, options)
        wanted = y["train"]
        if kind == "picture":  # as for the members
            shape = np.shape(surveys["train"].images)
            pictures = torch.from_numpy(wanted).view(shape)
            wanted = torch.stack([turn(pictures) for turn in TURNS]).mean(0).flatten(1).numpy()
        back, (scores, held) = components(wanted, [wanted, y["val"]])
    fitted = KernelStack(
        views["train"], scores, held_out=(views["val"], held), device=options.device, **options.kernels
    )  # fmt: skip
    found["kernel regressions"] = {part: back(fitted(views[part]).mean) for part in ("val", "test")}
    found["settings"] = described(fitted)
    kept(file, lambda path: torch.save(found, path, pickle_protocol=4))
    print(f"{kind} from numbers: {found['settings']}", flush=True)
    return file


def components(train: Array, tables: Sequence[Array]) -> tuple[Callable[[Array], Array], list[Array]]:
    """Return the inverse transform of the first principal components, and the component scores of tables."""
    mean = train.mean(axis=0)
    vectors = np.linalg.svd(train - mean, full_matrices=False)[2][:COMPONENTS]
    return lambda scores: np.asarray(mean + scores @ vectors, dtype=np.float32), [
        (table - mean) @ vectors.T for table in tables
    ]


def drawn_by_peers(
    surveys: Mapping[str, Survey], y: Mapping[str, Array], options: argparse.Namespace
) -> dict[str, Any]:
    """Return data generated by ridge, nearest objects and extra trees, each tuned on validation objects."""
    from sklearn.ensemble import ExtraTreesRegressor

    known = surveys["train"].scalars
    center, scale = np.nanmean(known, axis=0), np.nanstd(known, axis=0)
    x = {part: np.nan_to_num((survey.scalars - center) / scale) for part, survey in surveys.items()}
    design = {part: np.c_[table, table**2, np.ones(len(table))] for part, table in x.items()}
    back, (scores,) = components(y["train"], [y["train"]])
    asked = ("val", "test")

    def ridge(penalty: float) -> dict[str, Array]:
        among = design["train"].T @ design["train"] + penalty * np.eye(design["train"].shape[1])
        weights = np.linalg.solve(among, design["train"].T @ y["train"])
        return {part: np.asarray(design[part] @ weights, dtype=np.float32) for part in asked}

    def nearest(count: int) -> dict[str, Array]:
        far = {part: ((x[part][:, None] - x["train"][None]) ** 2).sum(axis=2) for part in asked}
        found = {part: y["train"][np.argsort(far[part], axis=1)[:, :count]].mean(axis=1) for part in asked}
        return {part: np.asarray(values, dtype=np.float32) for part, values in found.items()}

    def trees(leaf: int) -> dict[str, Array]:
        forest = ExtraTreesRegressor(options.trees, random_state=0, min_samples_leaf=leaf).fit(x["train"], scores)
        return {part: back(forest.predict(x[part])) for part in asked}

    found: dict[str, Any] = {}
    for name, ask, settings in (
        ("ridge", ridge, (0.1, 1.0, 10.0, 100.0)), ("nearest", nearest, (3, 5, 10, 20, 40)),
        ("extra trees", trees, (1, 2, 3, 5, 8)),
    ):  # fmt: skip
        tried = [ask(setting) for setting in settings]  # type: ignore[operator]
        found[name] = min(tried, key=lambda answer: float(((answer["val"] - y["val"]) ** 2).mean()))
    return found


def drawing_table(
    parts: Mapping[str, Surveys], seeds: Sequence[Mapping[str, Any]], others: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, str]]:
    """Score data generated from numbers: each seed's members alone, and mixed with the kernel regressions."""
    table = []
    for kind, name in DRAWN.items():
        y = {part: plain_data(parts["train"][name], surveys[name]) for part, surveys in parts.items()}
        reference, theirs = y["train"].mean(axis=0), others[kind]
        kernels = theirs["kernel regressions"]
        ours, stacks, shares = [], [], []
        for seed in seeds:
            own = seed[kind]
            chosen = mixing_shares(np.stack([own["val"] - y["val"], kernels["val"] - y["val"]]))
            ours.append(explained(own["test"], y["test"], reference))
            stacks.append(explained(chosen[0] * own["test"] + chosen[1] * kernels["test"], y["test"], reference))
            shares.append(f"{chosen[1]:.2f}")
        peers = {
            peer: explained(theirs[peer]["test"], y["test"], reference) for peer in ("ridge", "nearest", "extra trees")
        }
        alone = explained(kernels["test"], y["test"], reference)
        table.append({
            "from its numbers": kind, "objects": str(len(y["test"])), "stack": spread(stacks, 3),
            "JointRegressor": spread(ours, 3), "kernel regressions": f"{alone:.3f} ({theirs['settings']})",
            **{peer: f"{score:.3f}" for peer, score in peers.items()},
            "JointRegressor at or above the peers": at_or_above(ours, max(peers.values())),
            "stack at or above the peers": at_or_above(stacks, max(peers.values())),
            "stack at or above all": at_or_above(stacks, max(*peers.values(), alone)),
            "share of the kernel regressions": ", ".join(shares),
        })  # fmt: skip
    return table


# -- the tables ---------------------------------------------------------------------------------------------------


def name_of(question: CrossPrediction) -> str:
    source = question.given if isinstance(question.given, str) else "photometry"
    return f"{question.target} from {source}"


def best_input(scores: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(scores, key=lambda found: found["validation"])


def kernel_scores(parts: Mapping[str, Surveys], question: CrossPrediction, kernel: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of the kernel regression alone."""
    y = {part: standard(parts["train"][question.survey], surveys[question.survey], question.target)[0]
         for part, surveys in parts.items()}  # fmt: skip
    return scores_of([], question, y, kernel, (0.0, 0.0, 1.0))


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
            "variance explained": name_of(question), "objects": str(theirs["n"]), "stack": spread(stack, 3),
            "JointRegressor": spread(network, 3),
            "one member": spread([seed[question.target]["one member"] for seed in seeds], 3),
            "kernel regressions": f"{kernel['explained']:.3f} ({kernel['settings']})",
            **{kind: f"{found['together']:.3f} ({found['input']})" for kind, found in chosen.items()},
            **{f"{kind}, tokens": f"{theirs[kind][0]['together']:.3f}" for kind in METHODS},
            "JointRegressor at or above the trees": at_or_above(network, trees),
            "stack at or above the trees": at_or_above(stack, trees),
            "stack at or above all": at_or_above(stack, most),
        }  # fmt: skip
        shares = [seed[question.target]["stack"]["shares"] for seed in seeds]
        row["shares of nearest and kernels"] = ", ".join(f"{near:.2f} and {other:.2f}" for _, near, other in shares)
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
            "kernel regressions": [kernel],
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


def main() -> None:
    parser = options_of("astro_science", __doc__)
    add_training(parser)
    parser.add_argument("--members", type=int, default=MEMBERS)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parsed(parser)
    options.model, options.tokens, options.max_rows, options.trees = {}, vars(AstroRunConfig().tokens), None, 300
    options.kernels = {"most": 1400}  # all dwarfs
    if options.tiny:
        options.seeds, options.members, options.steps = [0, 1], 2, 8
        options.model, options.max_rows, options.trees = {"d_model": 16, "n_layers": 1, "d_ff": 16}, 150, 5
        options.tokens = {"v_image": 4, "scalar_bins": 4, "v_spectra": 4}
        options.kernels = {"widths": (0.1, 1.0), "noises": (0.1,)}
    with pool_of(options.jobs) as pool:
        runs = {
            seed: [pool.submit(train_member, seed, member, options) for member in range(options.members)]
            for seed in options.seeds
        }
        drawings = {kind: pool.submit(draw_others, kind, options) for kind in DRAWN}
        regressions = [pool.submit(ask_kernel, number, options) for number in range(len(CROSS_PREDICTIONS))]
        others = [
            {kind: [pool.submit(ask_peer, number, kind, seed, options) for seed in seeds]
             for kind, seeds in METHODS.items()}
            for number in range(len(CROSS_PREDICTIONS))
        ]  # fmt: skip
        files = {seed: [each.result() for each in members] for seed, members in runs.items()}
        peers = [{kind: [each.result() for each in seeds] for kind, seeds in kinds.items()} for kinds in others]
        fitted = [each.result() for each in regressions]
        drawn = {kind: each.result() for kind, each in drawings.items()}
    asked = [*files.values(), *(found for kinds in peers for found in kinds.values()), fitted, drawn.values()]
    if None in chain.from_iterable(asked):
        print("not finished: the same command resumes")
        return
    parts = dict(zip(("train", "val", "test"), load(options), strict=True))
    answers = [torch.load(file, weights_only=True) for file in fitted if file is not None]
    kernels = [
        each | kernel_scores(parts, question, each) for question, each in zip(CROSS_PREDICTIONS, answers, strict=True)
    ]
    seeds = [answers_of([file for file in members if file], parts, kernels) for members in files.values()]
    found = [
        peer_scores({kind: [file for file in seeds if file] for kind, seeds in kinds.items()}, parts, question)
        for question, kinds in zip(CROSS_PREDICTIONS, peers, strict=True)
    ]
    others = {kind: torch.load(file, weights_only=False) for kind, file in drawn.items() if file is not None}
    first = score_table(seeds, found, kernels)
    notes = [
        as_markdown(
            "Predictive distributions: intervals, log likelihood in deviations, PIT",
            calibration_table(seeds, found, kernels),
        ),
        as_markdown(
            "Pictures and spectra from the numbers of an object: variance explained",
            drawing_table(parts, seeds, others),
        ),
    ]
    notes += [f"Trained on {options.trained_on}."] if options.trained_on else []
    if options.tiny:
        print(first, *notes, sep="\n\n")
        return
    title = "One kind of data of an object from another: variance explained, test objects, ± over seeds"
    write_result("astro_science", title, list(first[0]), first, describe(), notes=notes)


if __name__ == "__main__":
    main()
