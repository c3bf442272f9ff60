"""An astronomy run that was cut after any step ends as one that was not, to the bit."""

from __future__ import annotations

import pytest

from astro_trainer_kit import OverflowAt, loader, make, sequences
from helpers import Snapshots, differences
from treadle.hooks import EmaHook, LoggingHook

STEPS = 13  # 9 micro-batches an epoch are 3 steps of three: cuts inside and at the end of epochs, up to the fifth


def run(seed, *, state=None, **settings):
    """Positions are drawn, there is dropout, and the data is shuffled."""
    snapshots = Snapshots()
    hooks = [snapshots, EmaHook(0.9), LoggingHook(4)]
    if settings.get("use_amp"):
        hooks.append(OverflowAt(5))
    trainer = make(
        seed=seed, train=loader(sequences(17), 2, shuffle=True), grad_accum_steps=3, sample_k=2, total_steps=STEPS,
        hooks=hooks, **settings,
    )  # fmt: skip
    if state is not None:
        trainer._engine.load_state_dict(state)
    trainer.train(5, loader(sequences(5, seed=1)))
    return trainer, snapshots.states


HALF, NO_CE = {"use_amp": True, "amp_dtype": "fp16"}, {"use_ce": False}


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        ({}, 1), (HALF, 2), (NO_CE, 4),
        pytest.param(HALF, 1, marks=pytest.mark.slow), pytest.param(NO_CE, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_cut_after_any_of_thirteen_steps(settings, every):
    straight, states = run(0, **settings)
    assert straight.global_step >= STEPS
    expected = straight._engine.state_dict()
    if settings.get("amp_dtype") == "fp16":
        assert straight.applied_steps == straight.global_step - 1
        assert expected["scaler"]["scale"] == 32768.0
    for cut in range(1, STEPS + 1, every):
        resumed, _ = run(cut, state=states[cut], **settings)
        assert differences(expected, resumed._engine.state_dict()) == [], f"cut after step {cut}"
