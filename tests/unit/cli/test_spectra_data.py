"""The split: by object, complete, and the same again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treadle.datasets.splits import object_groups, split_by_group
from treadle.errors import ConfigError
from treadle.runs.split import DataConfig
from treadle.spectra.run_data import prepare_data


def test_no_object_and_no_copy_is_in_two_parts() -> None:
    data = prepare_data(DataConfig())
    parts = [data.train, data.val, data.test]
    assert sorted(np.concatenate(parts).tolist()) == list(range(1939))
    for index, part in enumerate(parts):
        for other in parts[index + 1 :]:
            assert not set(data.name[part]) & set(data.name[other])
            assert not {row.tobytes() for row in data.x[part]} & {row.tobytes() for row in data.x[other]}


def test_spectra_are_snv_scaled() -> None:
    data = prepare_data(DataConfig(max_rows=50))
    assert len(data.x) == 50
    assert data.x.dtype == np.float32
    np.testing.assert_allclose(data.x.mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(data.x, axis=1), np.sqrt(255), rtol=1e-5)


def test_the_order_of_training_is_that_of_the_seed_whatever_else_was_drawn() -> None:
    data, orders = prepare_data(DataConfig(max_rows=60)), []
    for seed, drawn in ((3, 0), (3, 1), (4, 0)):
        torch.manual_seed(drawn)
        loader = data.loader(data.train, 32, shuffle=True, seed=seed)
        orders.append(torch.cat(list(loader)))
        assert len(orders[-1]) == len(data.train)
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


def test_groups_join_over_names_and_copies() -> None:
    names = np.array(["a", "b", "c", "a", "d"])
    spectra = np.array([[1.0], [2.0], [3.0], [2.0], [4.0]], dtype=np.float32)
    assert object_groups(names, spectra).tolist() == [0, 0, 1, 0, 2]


def test_the_seed_decides_the_split() -> None:
    groups = np.arange(100)
    first, again = (split_by_group(groups, seed=3) for _ in range(2))
    other = split_by_group(groups, seed=4)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[1], other[1])


@pytest.mark.parametrize(
    "values",
    [{"val_fraction": 0.0}, {"test_fraction": 1.0}, {"val_fraction": 0.6, "test_fraction": 0.5}, {"max_rows": 3}],
)
def test_fractions_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"data\."):
        DataConfig(**values)  # type: ignore[arg-type]


def test_too_few_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave none to train on"):
        split_by_group(np.zeros(10, dtype=np.intp))
