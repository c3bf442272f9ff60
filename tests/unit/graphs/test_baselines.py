"""The baselines against closed forms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from treadle.errors import ConfigError
from treadle.graphs.baselines import mean_baseline, ridge_baseline, ridge_predictions, tabulate


def table(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 9, (count, 3), generator=generator).double()
    return x, (x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)) + 7


def test_node_features_are_summed_and_types_counted():
    floats = SimpleNamespace(x=torch.tensor([[1.0, 0.0], [1.0, 1.0]]), y=torch.tensor([[2.0]]))
    types = SimpleNamespace(x=torch.tensor([[0], [2], [2]]), y=torch.tensor([3.0]))
    assert tabulate([floats], num_features=2).sums_GF.tolist() == [[2.0, 1.0]]
    found = tabulate([types, types], num_features=4)
    assert found.sums_GF.tolist() == [[1.0, 0.0, 2.0, 0.0]] * 2
    assert found.num_nodes_G.tolist() == [3, 3]
    assert found.targets_GT.tolist() == [[3.0], [3.0]]


def test_the_mean_baseline_leaves_unknown_targets_out():
    train = torch.tensor([[1.0, 10.0], [3.0, torch.nan]])
    test = torch.tensor([[2.0, torch.nan], [4.0, 11.0]])
    assert mean_baseline(train, test) == {"mae": 1.0, "rmse": pytest.approx((5 / 3) ** 0.5)}


def test_an_unpenalised_ridge_is_exact_on_a_linear_target_also_where_columns_depend_on_each_other():
    parts = [table(count, seed) for seed, count in enumerate((40, 10, 10))]
    features = [torch.cat([x, x.sum(1, keepdim=True), torch.ones(len(x), 1)], 1) for x, _ in parts]
    found = ridge_baseline(features, [y for _, y in parts], alphas=[0.0])
    assert found["mae"] < 1e-9
    assert found["num_features"] == 4  # the constant column is none


def test_the_ridge_is_that_of_scikit_learn_and_chosen_by_validation():
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import StandardScaler

    noise = torch.Generator().manual_seed(9)
    parts = [table(count, seed) for seed, count in enumerate((30, 20, 20))]
    x = [part for part, _ in parts]
    y = [part + torch.randn(part.shape, generator=noise, dtype=torch.float64) for _, part in parts]
    scaler = StandardScaler().fit(x[0])
    errors = {}
    for alpha in (1e-3, 0.1, 10.0):
        # Its penalty is not divided by the number of rows, and its deviation by n, not n - 1.
        scaled = [torch.from_numpy(scaler.transform(part)) * (29 / 30) ** 0.5 for part in x]
        fitted = Ridge(alpha=alpha * 30).fit(scaled[0], y[0])
        predicted = [torch.from_numpy(fitted.predict(part)).view(-1, 1) for part in scaled]
        errors[alpha] = [float((a - b).abs().mean()) for a, b in zip(predicted, y, strict=True)]
    best = min(errors, key=lambda alpha: errors[alpha][1])
    found = ridge_baseline(x, y, alphas=list(errors))
    assert found["alpha"] == best
    assert found["mae"] == pytest.approx(errors[best][2], rel=1e-9)


def test_a_ridge_leaves_unknown_targets_out_of_the_regression_of_their_target_alone():
    parts = [table(count, seed) for seed, count in enumerate((40, 12, 12))]
    x, y = [part for part, _ in parts], [torch.cat([part, part.square()], 1) for _, part in parts]
    gaps = [part.clone() for part in y]
    for part in gaps:
        part[::3, 0] = torch.nan
    found = ridge_predictions(x, gaps, alphas=[0.1]).predicted_GT
    known = [~part[:, 0].isnan() for part in gaps]
    alone = (
        [part[rows] for part, rows in zip(x, known, strict=True)],
        [part[rows] for part, rows in zip(y, known, strict=True)],
    )
    first = ridge_predictions(*alone, alphas=[0.1]).predicted_GT[:, 0]
    torch.testing.assert_close(found[known[2], 0], first)
    torch.testing.assert_close(found[:, 1], ridge_predictions(x, y, alphas=[0.1]).predicted_GT[:, 1])


def test_a_ridge_of_constant_features_is_the_mean():
    y = torch.tensor([[1.0], [3.0]])
    assert ridge_baseline([torch.ones(2, 3)] * 3, [y] * 3)["mae"] == 1.0


@pytest.mark.parametrize(("part", "rows"), [(0, slice(1, None)), (1, slice(None))])
def test_a_ridge_refuses_targets_with_too_few_known_values(part, rows):
    x, y = table(12, 0)
    targets = [y.clone() for _ in range(3)]
    targets[part][rows] = torch.nan
    with pytest.raises(ConfigError, match="a ridge needs two"):
        ridge_baseline((x, x, x), targets)
