"""Metrics by distance and size, and the probing tasks, against numbers that can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

import graph_data_kit  # noqa: F401  (imports torch_geometric where its warnings are let through)
from treadle.errors import ConfigError
from treadle.graphs import hop_distances
from treadle.graphs import long_range as lr
from treadle.graphs.probes import (
    DistantNodeFeatureProbe,
    NodeCountingProbe,
    PathParityProbe,
    SyntheticLongRangeTask,
    create_probing_dataset,
    probe_layers,
)


def test_buckets_cover_every_distance_once_and_sizes_evenly():
    assert lr.create_distance_buckets(5, 2) == [(0, 1), (2, 3), (4, 5), (-1, -1)]
    assert lr.create_size_buckets(list(range(10, 20)), 2) == [(10, 14), (15, 19)]
    assert lr.create_size_buckets([7] * 4, 3) == [(7, 7)]
    for wrong in ((-1, 1), (3, 0)):
        with pytest.raises(ConfigError):
            lr.create_distance_buckets(*wrong)


def test_answers_of_many_batches_are_sorted_and_masked():
    stratifier = lr.DistanceStratifier(3)
    for _ in range(2):
        distances = torch.tensor([0, 0, 1, 2, 3, 3, -1, 9])
        stratifier.update(torch.ones(8, 1), torch.zeros(8, 1), distances, mask=torch.arange(8) != 1)
    assert stratifier.get_bucket_counts() == {(0, 0): 2, (1, 1): 2, (2, 2): 2, (3, 3): 4, (-1, -1): 2}
    stratifier.reset()
    assert sum(stratifier.get_bucket_counts().values()) == 0


def test_metrics_of_each_bucket_are_those_of_the_task():
    pred, target = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[1.1], [1.9], [2.5], [4.5]])
    parts = lr.stratify_by_distance(pred, target, torch.tensor([0, 1, 2, 3]), [(0, 1), (2, 3), (4, 5)])
    found = lr.compute_metrics_per_bucket(parts)
    assert [found[bucket]["metric"] for bucket in ((0, 1), (2, 3))] == pytest.approx([0.1, 0.5])
    assert math.isnan(found[4, 5]["metric"])
    whole = {(0, 0): {"predictions": torch.tensor([[0.9], [0.1]]), "targets": torch.tensor([[1], [0]]), "count": 2}}
    assert lr.compute_metrics_per_bucket(whole, "binary", from_logits=False)[0, 0]["accuracy"] == 1.0
    assert lr.compute_metrics_per_bucket(whole, "binary")[0, 0]["metric"] == 1.0
    with pytest.raises(ConfigError, match="task_type"):
        lr.compute_metrics_per_bucket(whole, "multi")


def test_the_drop_the_area_and_the_field_follow_the_curve():
    falling = {(d, d): {"metric": 1.0 - 0.2 * d, "count": 10} for d in range(5)} | {
        (-1, -1): {"metric": 0.0, "count": 1}
    }
    drops = lr.compute_relative_performance_drop(falling)
    assert [drops[d, d] for d in range(5)] == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    assert lr.compute_area_under_distance_curve(falling, max_distance=4) == pytest.approx(0.6)
    assert lr.compute_area_under_distance_curve(falling, max_distance=4, normalize=False) == pytest.approx(2.4)
    assert lr.find_effective_receptive_field(falling) == 2
    assert lr.find_effective_receptive_field(falling, threshold=0.9, relative_to_baseline=False) == 0
    assert lr.find_effective_receptive_field({}) == -1
    assert math.isnan(lr.compute_area_under_distance_curve({}))


def test_an_error_counts_the_other_way_round():
    rising = {(d, d): {"metric": 1.0 + d, "count": 1} for d in range(4)}
    assert lr.find_effective_receptive_field(rising, higher_is_better=False) == 1
    assert lr.find_effective_receptive_field(rising, threshold=0.25, higher_is_better=False) == 3
    assert lr.compute_relative_performance_drop(rising, higher_is_better=False)[2, 2] == 2.0


def test_an_evaluator_sums_up_near_and_far():
    evaluator = lr.LongRangeEvaluator(max_distance=3)
    for _ in range(2):
        evaluator.update(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3), torch.tensor([0, 1, 3]))
    found, summary = evaluator.compute(), evaluator.get_summary()
    assert found["aggregate_metrics"][0, 3]["mae"] == 2.0
    assert found["bucket_counts"][1, 1] == 2
    assert (summary["short_range_metric"], summary["long_range_metric"], summary["performance_ratio"]) == (
        1.0,
        3.0,
        3.0,
    )
    evaluator.reset()
    assert math.isnan(evaluator.get_summary()["auc"])


def test_parities_counts_and_far_features_are_right_and_leave_the_generators_alone():
    before = torch.get_rng_state()
    path = PathParityProbe(10).generate_path_graph(seed=42)
    running = 0
    for bit, label in zip(path.x[:, 0].tolist(), path.y.tolist(), strict=True):
        running ^= int(bit)
        assert label == running
    counts, hops = NodeCountingProbe(3).generate_task(path)
    assert counts[0].tolist() == [1, 2, 3, 4]
    assert counts[5].tolist() == [1, 3, 5, 7]
    assert hops[0, 4] == -1
    sources, features, _ = DistantNodeFeatureProbe(2).generate_task(path, num_samples=3)
    assert len(sources) == 3
    for source, feature in zip(sources.tolist(), features, strict=True):
        near = [node for node in (source - 2, source + 2) if 0 <= node < 10]
        assert torch.allclose(feature, path.x[near].mean(0))
    task = SyntheticLongRangeTask(30, 4).generate(seed=3)
    at = hop_distances(task.edge_index, 30) == 4
    for node in range(30):
        expected = 0.5 if not at[node].any() else float(task.x[at[node], 0].mean() > 0)
        assert task.y[node].item() == expected
    assert torch.equal(before, torch.get_rng_state())
    assert len(create_probing_dataset("long_range", 2, graph_size=12, signal_distance=2)) == 2
    with pytest.raises(ConfigError, match="parity"):
        create_probing_dataset("pariti")


def test_a_linear_probe_reads_the_layer_that_holds_the_target():
    generator = torch.Generator().manual_seed(0)
    target, noise = torch.randn(60, generator=generator), torch.randn(60, 2, generator=generator)
    distances = torch.arange(60) % 3
    blind, seeing = probe_layers([noise, torch.stack([target, noise[:, 0]], 1)], target, distances, max_distance=2)
    assert seeing["metrics_per_bucket"][2, 2]["mae"] < 1e-4 < blind["metrics_per_bucket"][2, 2]["mae"]
