"""One kind of data of an object from another: JointRegressor beside ridge, boosted trees and extra trees.

    python benchmarks/astro_science.py --device cuda --capture --jobs 4    # about three minutes of an H200
    python benchmarks/astro_science.py --budget-minutes 20                 # in pieces: the same command resumes
    python benchmarks/astro_science.py --tiny                              # a trial, writes nothing

The surveys, split and questions of `treadle train astro`. One model answers all five; with each seed three members are
trained, and their mixtures are averaged. The answers are mixed with the numbers of the nearest training objects in
the latents; the share of these is chosen on validation objects. Each peer learns one question; it gets the values of
the tokens and the values as they are (pictures also by 48 principal components and sums), and the better of them on
validation objects counts. Three seeds of a peer, also averaged. All scores are of test objects.
"""

from __future__ import annotations

import argparse
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
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the nearest objects
NEAREST = 10
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
    for kind in ("picture", "spectrum"):
        del answers["train"][kind]
    torch.save(answers, file)
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


def with_nearest(
    members: Sequence[Mapping[str, Any]], question: CrossPrediction, part: str, y_train: Tensor, share: float
) -> Mixture:
    """Returns the mixture of all members, of which the nearest training objects in each latent have a share."""
    weights, means, scales = [], [], []
    for member in members:
        found, known = member[part][question.target], y_train.isfinite()
        if share < 1:
            weights.append(found["log_weights"] + np.log1p(-share))
            means.append(found["means"])
            scales.append(found["scales"])
        if share > 0:
            far = torch.cdist(found["latent"].float(), member["train"][question.target]["latent"][known].float())
            near, rows = far.topk(NEAREST, largest=False)
            weight = 1 / near.clamp(min=1e-6)
            weights.append((weight / weight.sum(1, keepdim=True)).log() + np.log(share))
            means.append(y_train[known][rows].float())
            own = (found["log_weights"].exp() * found["scales"]).sum(1, keepdim=True)
            scales.append(own.expand_as(near))
    return Mixture(torch.cat(weights, 1) - np.log(len(members)), torch.cat(means, 1), torch.cat(scales, 1))


def explained(predicted: Array, true: Array, reference: float) -> float:
    return 1 - float(((predicted - true) ** 2).sum() / ((true - reference) ** 2).sum())


def answers_of(seed_files: Sequence[Path], parts: Mapping[str, Surveys]) -> dict[str, Any]:
    """Returns the scores of a seed for each question."""
    members = [torch.load(file, weights_only=True) for file in seed_files]
    found: dict[str, Any] = {}
    for question in CROSS_PREDICTIONS:
        name, target = question.survey, question.target
        y = {part: standard(parts["train"][name], surveys[name], target)[0] for part, surveys in parts.items()}
        errors = {}
        for share in SHARES:
            mean = with_nearest(members, question, "val", y["train"], share).mean()
            errors[share] = float(((mean - y["val"])[y["val"].isfinite()] ** 2).mean())
        share = min(errors, key=lambda share: errors[share])
        mixture, known = with_nearest(members, question, "test", y["train"], share), y["test"].isfinite()
        mean, true = mixture.mean()[known].double().numpy(), y["test"][known].numpy()
        alone = members[0]["test"][target]
        single = (alone["log_weights"].exp() * alone["means"]).sum(1)[known].double().numpy()
        pit = mixture.cdf(torch.nan_to_num(y["test"]))[known].numpy()
        likelihood = mixture.log_prob(torch.nan_to_num(y["test"]))[known].numpy()
        found[target] = {
            "explained": explained(mean, true, 0.0), "one member": explained(single, true, 0.0), "share": share,
            "validation": 1 - errors[share] / float((y["val"][y["val"].isfinite()] ** 2).mean()),
            "pit": np.histogram(pit, 10, (0, 1))[0].tolist(), "log_likelihood": float(likelihood.mean()),
            "covered": {"50%": float(np.mean(abs(pit - 0.5) < 0.25)), "90%": float(np.mean(abs(pit - 0.5) < 0.45))},
            "n": len(true),
        }  # fmt: skip
    for kind in ("picture", "spectrum"):
        found[kind] = torch.stack([member["test"][kind] for member in members]).mean(0)
    return found


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
    from threadpoolctl import threadpool_limits

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
    with threadpool_limits(2):
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


def score_table(seeds: Sequence[Mapping[str, Any]], peers: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    table = []
    for question, theirs in zip(CROSS_PREDICTIONS, peers, strict=True):
        ours = [seed[question.target]["explained"] for seed in seeds]
        chosen = {kind: best_input(theirs[kind]) for kind in METHODS}
        most = max(float(found["together"]) for found in chosen.values())
        row = {
            "variance explained": name_of(question), "objects": str(theirs["n"]), "JointRegressor": spread(ours),
            "one member": spread([seed[question.target]["one member"] for seed in seeds]),
            **{kind: f"{found['together']:.3f} ({found['input']})" for kind, found in chosen.items()},
            **{f"{kind}, tokens": f"{theirs[kind][0]['together']:.3f}" for kind in METHODS},
        }  # fmt: skip
        row["at or above the best"] = (
            "each seed" if min(ours) >= most else "mean" if statistics.mean(ours) >= most else "no"
        )
        row["share of nearest"] = ", ".join(f"{seed[question.target]['share']:g}" for seed in seeds)
        table.append(row)
    return table


def calibration_table(seeds: Sequence[Mapping[str, Any]], peers: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    table = []
    for question, theirs in zip(CROSS_PREDICTIONS, peers, strict=True):
        found = [seed[question.target] for seed in seeds]
        peer = max((best_input(theirs[kind]) for kind in METHODS), key=lambda scores: scores["validation"])
        pit = np.mean([np.array(each["pit"]) / sum(each["pit"]) for each in found], axis=0)
        row = {"distributions": name_of(question)}
        for level in ("50%", "90%"):
            row[f"inside {level}"] = f"{statistics.mean(each['covered'][level] for each in found):.0%}"
            row[f"best peer, inside {level}"] = f"{peer['covered'][level]:.0%}"
        row["log likelihood"] = f"{statistics.mean(each['log_likelihood'] for each in found):.3f}"
        row["of the best peer"] = f"{peer['log_likelihood']:.3f}"
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
        files = {seed: [each.result() for each in members] for seed, members in runs.items()}
        peers = [each.result() for each in others]
    if any(file is None for members in files.values() for file in members) or None in peers:
        print("not finished: the same command resumes")
        return
    parts = dict(zip(("train", "val", "test"), load(options), strict=True))
    seeds = [answers_of([file for file in members if file], parts) for members in files.values()]
    found = [peer for peer in peers if peer is not None]
    first = score_table(seeds, found)
    notes = [
        as_markdown(
            "Predictive distributions: intervals, log likelihood in deviations, PIT", calibration_table(seeds, found)
        ),
        as_markdown("Pictures and spectra from the numbers of an object: variance explained", drawn(parts, seeds)),
    ]
    if options.tiny:
        print(first, *notes, sep="\n\n")
        return
    title = "One kind of data of an object from another: variance explained, test objects, ± over seeds"
    write_result("astro_science", title, list(first[0]), first, describe(), notes=notes)


if __name__ == "__main__":
    main()
