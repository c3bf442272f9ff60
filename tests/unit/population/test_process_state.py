"""Generators of NumPy that members exchange as a whole, and the kept draw that only a use may change."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from treadle.population.process_state import MT19937, NumpyState
from treadle.seed import forked_rng

DRAWS = {
    "beta": (1, 1), "binomial": (5, 0.5), "bytes": (3,), "chisquare": (1,), "choice": (5,), "dirichlet": ([1, 1],),
    "exponential": (), "f": (1, 1), "gamma": (2,), "geometric": (0.5,), "gumbel": (), "hypergeometric": (2, 2, 2),
    "laplace": (), "logistic": (), "lognormal": (), "logseries": (0.5,), "multinomial": (2, [0.5, 0.5]),
    "multivariate_normal": ([0], [[1]]), "negative_binomial": (1, 0.5), "noncentral_chisquare": (1, 1),
    "noncentral_f": (1, 1, 1), "normal": (), "pareto": (1,), "permutation": (3,), "poisson": (), "power": (1,),
    "rand": (), "randint": (3,), "randn": (), "random": (), "random_sample": (), "rayleigh": (), "seed": (3,),
    "shuffle": ([1, 2],), "standard_cauchy": (), "standard_exponential": (), "standard_gamma": (1,),
    "standard_normal": (), "standard_t": (1,), "triangular": (0, 1, 2), "uniform": (), "vonmises": (0, 1),
    "wald": (1, 1), "weibull": (1,), "zipf": (2,),
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_generator():
    before = NumpyState.capture()
    with forked_rng(0):
        np.random.seed(0)
        NumpyState.capture().cloned().restore()
        yield
    before.restore()


def test_two_members_draw_what_each_draws_alone_also_between_the_numbers_of_a_pair():
    expected = [np.random.RandomState(seed).randn(7).tolist() for seed in (1, 2)]
    states, drawn = [], [[], []]
    for seed in (1, 2):
        state = NumpyState.capture().cloned()
        state.restore()
        np.random.seed(seed)
        states.append(NumpyState.capture(state))
    for turn in range(14):
        states[turn % 2].restore()
        drawn[turn % 2].append(np.random.randn())
        states[turn % 2] = NumpyState.capture(states[turn % 2])
        states[turn % 2].restore()  # a turn in which nothing is drawn
        states[turn % 2] = NumpyState.capture(states[turn % 2])
    assert drawn == expected


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("kept", [False, True])
def test_after_any_use_the_next_draws_are_those_of_a_member_alone(name, kept):
    alone = np.random.RandomState(5)
    np.random.seed(5)
    for one in (alone, np.random) if kept else ():
        one.randn()
    state = NumpyState.capture()
    state.restore()
    for one in (alone, np.random):
        getattr(one, name)(*copy.deepcopy(DRAWS[name]))
    after = NumpyState.capture(state)
    NumpyState.capture().cloned().restore()
    np.random.randn(3)
    after.restore()
    assert np.random.randn(3).tolist() == alone.randn(3).tolist()


def test_a_state_that_a_run_puts_back_is_noticed():
    np.random.randn()
    put_back = np.random.get_state()
    expected = np.random.randn()  # takes the kept draw and moves no word
    state = NumpyState.capture()
    state.restore()
    np.random.set_state(put_back)
    after = NumpyState.capture(state)
    NumpyState.capture().cloned().restore()
    after.restore()
    assert np.random.randn() == expected


def test_a_clone_shares_no_state():
    other = NumpyState.capture().cloned()
    expected = np.random.rand()
    np.random.rand()
    other.restore()
    assert np.random.rand() == expected


def test_states_and_copies_are_those_of_numpy():
    assert np.random.get_state()[0] == "MT19937"
    expected = np.random.RandomState(0).randn(3).tolist()
    for made in (copy.deepcopy(np.random.mtrand._rand), pickle.loads(pickle.dumps(np.random.mtrand._rand))):
        assert made.randn(3).tolist() == expected
    assert isinstance(np.random.get_bit_generator(), MT19937)
