"""JointRegressor: mixtures by hand, what it may read, scales of the training objects, and learning a number."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle import BaseTrainer, CheckpointingHook
from treadle.astro import JointRegressor, Mixture, Survey, joint_loss, load_surveys
from treadle.errors import ConfigError

SURVEYS = {name: survey.take(np.arange(40)) for name, survey in load_surveys().items()}
SIZES = {"d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 16, "dropout": 0.0, "parts": 2, "waves": 3}


@pytest.fixture(scope="module")
def model() -> JointRegressor:
    torch.manual_seed(0)
    made = JointRegressor(SURVEYS, **SIZES)
    made.fit(SURVEYS)
    return made.eval()


def given(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    survey = SURVEYS[name]
    data = survey.spectra if survey.images is None else survey.images.astype(np.float32) / 255
    return torch.from_numpy(survey.scalars).float(), None if data is None else torch.from_numpy(data)


def test_a_mixture_is_its_parts() -> None:
    mixture = Mixture(torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[-1.0, 3.0]]), torch.tensor([[1.0, 2.0]]))
    parts = [torch.distributions.Normal(-1.0, 1.0), torch.distributions.Normal(3.0, 2.0)]
    at = torch.tensor([0.5])
    assert mixture.mean().item() == pytest.approx(2.0)
    assert mixture.cdf(at).item() == pytest.approx(
        sum(w * p.cdf(at).item() for w, p in zip((0.25, 0.75), parts, strict=True))
    )
    density = sum(w * p.log_prob(at).exp().item() for w, p in zip((0.25, 0.75), parts, strict=True))
    assert mixture.log_prob(at).item() == pytest.approx(math.log(density))


@pytest.mark.parametrize("name", list(SURVEYS))
def test_what_is_hidden_is_not_read(model: JointRegressor, name: str) -> None:
    scalars, data = given(name)
    hide = torch.rand(scalars.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    first = model(name, scalars, hide=hide, data=data)
    second = model(name, torch.where(hide, torch.nan, scalars), hide=hide, data=data)
    assert torch.equal(first.numbers.mean(), second.numbers.mean())
    assert first.numbers.mean().shape == scalars.shape
    torch.testing.assert_close(first.numbers.log_weights.logsumexp(-1), torch.zeros(scalars.shape))
    if data is not None:
        blind = torch.ones(len(scalars), dtype=torch.bool)
        first, second = (
            model(name, scalars, hide=hide, data=part, hide_data=blind, give_back=True) for part in (data, 0 * data)
        )
        back, other = (answer.picture if name == "xdf" else answer.spectrum for answer in (first, second))
        assert torch.equal(back, other)
        assert back.shape == data.shape


def test_an_untrained_model_gives_back_the_mean_of_the_training_objects(model: JointRegressor) -> None:
    for name in ("xdf", "spex"):
        scalars, data = given(name)
        assert data is not None
        answer = model(name, scalars[:3], hide=torch.ones(1, scalars.shape[1], dtype=torch.bool), data=data[:3],
                       hide_data=torch.ones(3, dtype=torch.bool), give_back=True)  # fmt: skip
        back, mean = (answer.picture, data.mean(0)) if name == "xdf" else (answer.spectrum, torch.zeros(data.shape[1]))
        assert back is not None
        torch.testing.assert_close(back, mean.expand_as(back), atol=1e-3, rtol=0)


def test_numbers_count_in_deviations_of_the_training_objects(model: JointRegressor) -> None:
    inputs = model.survey("sdss")
    scaled = inputs.standardised(torch.from_numpy(SURVEYS["sdss"].scalars).float())
    torch.testing.assert_close(scaled.nanmean(0), torch.zeros(7), atol=1e-4, rtol=0)


def test_only_what_is_counted_has_a_gradient(model: JointRegressor) -> None:
    scalars, _ = given("sdss")
    hide = torch.zeros(scalars.shape, dtype=torch.bool)
    hide[:, -1] = True
    target = model.survey("sdss").standardised(scalars)
    loss = joint_loss(model("sdss", scalars, hide=hide), target, hide & scalars.isfinite())
    changed = torch.where(hide, target, torch.nan)
    assert torch.equal(loss, joint_loss(model("sdss", scalars, hide=hide), changed, hide & scalars.isfinite()))
    (gradient,) = torch.autograd.grad(loss, [model.heads["sdss"]])
    assert gradient[:-1].abs().sum() == 0 < gradient[-1].abs().sum()


def test_it_learns_a_number_from_another() -> None:
    torch.manual_seed(0)
    x = np.random.default_rng(0).normal(size=(256, 1))
    survey = Survey("a", ("a.x", "a.y"), np.concatenate([x, np.tanh(2 * x)], axis=1), np.arange(256))
    made = JointRegressor({"a": survey}, **{**SIZES, "d_model": 16})
    made.fit({"a": survey})
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    scalars = torch.from_numpy(survey.scalars).float()
    hide, target = torch.tensor([[False, True]]), made.survey("a").standardised(scalars)
    for _ in range(100):
        loss = joint_loss(made("a", scalars, hide=hide), target, hide.expand_as(scalars))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    answer = made("a", scalars, hide=hide).numbers
    assert (answer.mean() - target)[:, 1].square().mean() < 0.3  # the mean has 1
    inside = (answer.cdf(target)[:, 1] - 0.5).abs() < 0.45
    assert inside.float().mean() > 0.75


def test_waves_are_sines_and_cosines_of_values_and_ranks(model: JointRegressor) -> None:
    scalars, _ = given("sdss")
    inputs = model.survey("sdss")
    seen = torch.ones(scalars.shape, dtype=torch.bool)
    plain = inputs.standardised(scalars).clamp(-6, 6)
    rank = (scalars[..., None] >= inputs.quantiles).float().mean(-1).clamp(0.004, 0.996)
    both = torch.stack([plain, torch.special.ndtri(rank)], dim=-1)
    turns = torch.exp(2j * torch.pi * both[:, 2, :, None] * inputs.waves.frequencies[2])
    expected = turns.imag.flatten(1) @ inputs.waves.weight[2, [0, 1, 2, 6, 7, 8]]
    expected = expected + turns.real.flatten(1) @ inputs.waves.weight[2, [3, 4, 5, 9, 10, 11]] + inputs.waves.bias[2]
    expected = expected.relu() + both[:, 2] @ inputs.values[2] + inputs.names[2]
    torch.testing.assert_close(inputs.tokens(scalars, seen, None, None)[:, 2], expected)


def test_waves_are_state_and_a_model_without_them_has_none(model: JointRegressor) -> None:
    torch.manual_seed(1)
    other, none = JointRegressor(SURVEYS, **SIZES).eval(), JointRegressor(SURVEYS, **{**SIZES, "waves": 0})
    missing, unexpected = none.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert {name.split(".")[-2] for name in unexpected} == {"waves"}
    other.load_state_dict(model.state_dict())
    scalars, _ = given("sdss")
    hide = torch.zeros(1, scalars.shape[1], dtype=torch.bool)
    first, second = (each("sdss", scalars, hide=hide).numbers for each in (model, other))
    assert torch.equal(first.means, second.means)
    assert not torch.equal(first.means, none.eval()("sdss", scalars, hide=hide).numbers.means)
    with pytest.raises(ConfigError, match="waves=-1 must be 0 or more"):
        JointRegressor(SURVEYS, waves=-1)


def test_a_run_that_is_stopped_has_the_frequencies_of_one_that_was_not(tmp_path) -> None:
    numbers = {"sdss": SURVEYS["sdss"]}

    def train(workspace, steps: int) -> JointRegressor:
        scalars, _ = given("sdss")

        class Redshift(BaseTrainer):
            def build_data_loader(self):
                return DataLoader(TensorDataset(scalars), batch_size=8, shuffle=True)

            def build_model(self):
                treadle.set_seed(0)
                made = JointRegressor(numbers, **{**SIZES, "dropout": 0.1})
                made.fit(numbers)
                return made

            def build_optimizer(self):
                return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

            def build_hooks(self):
                return [CheckpointingHook(interval=3)]

            def forward(self, input):
                hide = torch.rand(input[0].shape) < 0.5
                target = self.model.survey("sdss").standardised(input[0])
                return joint_loss(self.model("sdss", input[0], hide=hide), target, hide), {}

        trainer = Redshift(max_steps=steps, workspace=workspace, progress=False)
        trainer.train()
        return trainer.model

    through = train(tmp_path / "a", 6).state_dict()
    train(tmp_path / "b", 3)
    resumed = train(tmp_path / "b", 6).state_dict()
    assert all(torch.equal(through[name], value) for name, value in resumed.items())
    treadle.set_seed(0)
    fresh = JointRegressor(numbers, **SIZES).state_dict()
    moved = "inputs.sdss.waves.frequencies"
    assert not torch.equal(through[moved], fresh[moved])


def test_missing_fluxes_and_numbers_are_the_mean_of_the_training_objects() -> None:
    spectra, scalars = SURVEYS["spex"].spectra.copy(), SURVEYS["sdss"].scalars.copy()
    spectra[0, 5], spectra[:, 9], scalars[0, 0], scalars[:, 1] = np.nan, np.inf, -np.inf, np.nan
    gaps = {
        "spex": dataclasses.replace(SURVEYS["spex"], spectra=spectra),
        "sdss": dataclasses.replace(SURVEYS["sdss"], scalars=scalars),
    }
    torch.manual_seed(0)
    made = JointRegressor(gaps, **SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.fit(gaps)
    inputs = made.eval().survey("spex")
    filled = spectra.astype(np.float64)
    filled[0, 5] = 0.5 * np.sinh(np.arcsinh(filled[1:, 5] / 0.5).mean())
    filled[:, 9] = 0.0
    torch.testing.assert_close(inputs.fluxes(torch.from_numpy(spectra))[0, 5], torch.tensor(0.0))
    hide = torch.ones(1, 4, dtype=torch.bool)
    first, second = (
        made("spex", torch.zeros(40, 4), hide=hide, data=torch.from_numpy(rows).float()) for rows in (spectra, filled)
    )
    torch.testing.assert_close(first.numbers.mean(), second.numbers.mean())
    assert made.survey("sdss").mean[0].item() == pytest.approx(scalars[1:, 0].mean(), rel=1e-6)
    plain = torch.from_numpy(np.where(np.isfinite(scalars), scalars, 20.0)).float()  # the unknown column is known now
    answer = made("sdss", plain, hide=torch.zeros(1, 7, dtype=torch.bool))
    assert answer.numbers.mean().isfinite().all()
