"""What every face has under the same name."""

from __future__ import annotations

import inspect

import pytest

import treadle
from treadle.astro import AstroTrainer
from treadle.graphs import GraphTrainer
from treadle.spectra import SpectraTrainer


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("face", [treadle.Trainer, SpectraTrainer, GraphTrainer, AstroTrainer])
def test_every_face_counts_attempted_steps_as_step(face):  # a BaseTrainer has it as an attribute
    assert isinstance(inspect.getattr_static(face, "step"), property)


@pytest.mark.parametrize("face", [GraphTrainer, AstroTrainer])
def test_the_older_name_is_the_same_count(face):
    assert isinstance(inspect.getattr_static(face, "global_step"), property)
