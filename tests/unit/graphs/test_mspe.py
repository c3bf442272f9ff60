"""What the project mspe has around its document: loops, class names, lists of encodings, names of settings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graph_data_kit import Data, DataLoader
from treadle.errors import ConfigError
from treadle.graphs import (
    get_dataset,
    get_loss_fn,
    get_metrics,
    get_optimizer,
    get_scheduler_from_config,
    lap_pe,
    list_available_datasets,
    mspe,
    parse_pe_config,
    set_seed,
)
from treadle.graphs.loops import eval_step, run_eval_loop, run_inference, run_training_loop, train_step

PATH = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch):
        return self.layers(batch.x).view(-1, 3, 1).mean(1)


def graphs(count=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x = torch.randn(3, 3, generator=generator)
        found.append(Data(x=x, edge_index=PATH, y=x.mean().view(1, 1)))
    return found


def test_a_train_step_is_forward_backward_clipping_and_the_optimizer():
    set_seed(0)
    batch = next(iter(DataLoader(graphs(), batch_size=4)))
    model, loss_fn = Net(), get_loss_fn("regression", "mse")
    ours = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.mse_loss(model(batch), batch.y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    found = train_step(model, batch, optimizer, loss_fn, "cpu", grad_clip=0.01)
    assert found == {"grad_norm": pytest.approx(norm.item()), "loss": pytest.approx(loss.item())}
    for before, gradient, after in zip(ours, gradients, model.parameters(), strict=True):
        assert torch.allclose(after, before - 0.1 * gradient * 0.01 / norm, atol=1e-7)


def test_an_eval_step_and_its_loop_keep_no_gradient_and_weigh_batches_by_their_targets():
    model, loss_fn = Net(), mspe.RegressionLoss("mae")
    loader = DataLoader(graphs(), batch_size=5)  # 5, 5, 2
    result = eval_step(model, next(iter(loader)), loss_fn, "cpu")
    assert not result["pred"].requires_grad
    assert not model.training
    found = run_eval_loop(model, loader, loss_fn, get_metrics("regression"), "cpu")
    whole = next(iter(DataLoader(graphs(), batch_size=12)))
    assert found["loss"] == pytest.approx(eval_step(model, whole, loss_fn, "cpu")["loss"], abs=1e-6)
    assert found["mae"] == pytest.approx(found["loss"], abs=1e-6)
    outputs = run_inference(model, loader, "cpu")
    assert torch.allclose(torch.cat(outputs), model(whole), atol=1e-6)


def test_a_training_loop_lowers_the_loss_moves_the_schedule_and_calls_back():
    set_seed(42)
    model, seen = Net(), []
    optimizer = get_optimizer(model, lr=1e-2)
    scheduler = get_scheduler_from_config(optimizer, {"type": "step", "epochs": 10, "step_size": 5, "gamma": 0.1})
    history = run_training_loop(
        model, DataLoader(graphs(), batch_size=4), DataLoader(graphs(seed=1), batch_size=4), optimizer, scheduler,
        get_loss_fn("regression"), get_metrics("regression"), torch.device("cpu"), epochs=10,
        callbacks=[lambda epoch, *_: seen.append(epoch)],
    )  # fmt: skip
    assert history["train_loss"][-1] < 0.6 * history["train_loss"][0]
    assert {len(column) for column in history.values()} == {10}
    assert seen == list(range(10))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_losses_metrics_and_schedules_by_their_class_names():
    assert mspe.RegressionLoss("mae")(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1)) == 1.5
    assert isinstance(get_loss_fn("regression"), mspe.RegressionLoss)
    assert isinstance(get_loss_fn("classification", num_classes=5), mspe.ClassificationLoss)
    assert isinstance(get_loss_fn("edge_prediction"), mspe.EdgePredictionLoss)
    assert not isinstance(get_loss_fn("edge_prediction"), mspe.RegressionLoss)
    target = torch.tensor([0, 1, 1, 0])
    logits = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    expected = nn.functional.cross_entropy(logits, target)
    assert torch.allclose(mspe.ClassificationLoss("cross_entropy", 2)(logits, target), expected)
    multiclass = mspe.ClassificationMetrics(num_classes=5, task="multiclass")
    multiclass.update(torch.eye(5), torch.arange(5))
    assert multiclass.compute()["f1_macro"] == 1.0
    binary, edges = mspe.ClassificationMetrics(), mspe.EdgeMetrics()
    for metrics in (binary, edges):
        metrics.update(torch.tensor([2.0, -1.0, 0.5, -0.5]), torch.tensor([1, 0, 0, 1]))
    assert binary.compute()["accuracy"] == 0.5
    assert edges.compute()["precision@100"] == 0.5
    optimizer = torch.optim.SGD(Net().parameters(), lr=1e-3)
    schedule = mspe.CosineWithWarmup(optimizer, warmup_epochs=5, total_epochs=100)
    rates = []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[0] == 1e-7
    assert rates[5] == 1e-3
    assert rates[99] == pytest.approx(1e-6, rel=0.3)


def test_encodings_by_their_class_names_are_those_of_the_functions():
    graph = graphs(1)[0]
    assert torch.equal(mspe.LapPE(dim=4, k=2).compute(graph)[:, :2], lap_pe(PATH, 3, k=2))
    assert mspe.RWSE(dim=16, scales=[1, 2, 4]).compute(graph).tolist()[1][:3] == [0.0, 1.0, 1.0]
    assert mspe.HKS(dim=5).compute(graph).shape == (3, 5)
    assert mspe.RolePE(dim=3, features=["degree", "clustering", "core"]).compute(graph)[:, 2].tolist() == [1.0] * 3
    pairs, code = mspe.SPDBuckets(num_buckets=8, max_distance=5).compute(graph)
    assert (pairs.shape, code.shape) == ((2, 9), (9, 8))
    assert mspe.BFSDistance(8, 1).compute(graph)[0].shape == (2, 4)
    assert mspe.EffectiveResistancePE().compute(graph)[1].flatten()[2] == 2.0
    assert mspe.DiffusionPE([1.0]).compute(graph)[1].shape == (9, 1)
    assert mspe.LandmarkSPD(1).compute(graph)[1].shape == (9, 3)
    encoded = mspe.ApplyRelativePE({"types": ["shortest_path"], "num_buckets": 4})(graph)
    assert encoded.edge_pe.shape == (9, 4)
    assert mspe.ApplyNodePE({"types": ["rwse"], "scales": [2], "dim": 3})(graph).node_pe.shape == (3, 3)


def test_lists_of_encodings_are_read_and_give_columns_side_by_side():
    node = {"enabled": True, "types": ["lap_pe", "rwse", "hks"], "dim": 32, "scales": [1, 2, 4, 8]}
    relative = {"enabled": True, "types": ["effective_resistance"], "max_distance": 10, "num_buckets": 16}
    config = parse_pe_config({"node": node, "relative": relative})
    assert config.node.blocks == {"lap": 10, "rwse": 4, "hks": 4}
    assert (config.node_dim, config.relative.type) == (32, "resistance")
    assert parse_pe_config(config.to_dict()) == config
    assert parse_pe_config({"node": {"types": []}, "relative": {"enabled": False}}).node is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"relative": {"types": ["spd", "diffusion"]}}, "computes only the first of a list"),
        ({"node": {"types": ["rwse"], "type": "lap"}}, "twice"),
        ({"node": {"types": ["rswe"]}}, "did you mean 'rwse'"),
        ({"node": {"types": ["lap"], "sign_invariant": False}}, "signs of eigenvectors are arbitrary"),
        ({"node": {"type": "rwse+lap"}}, "node.type"),
    ],
)
def test_a_list_of_encodings_that_cannot_be_meant_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        parse_pe_config(section)


@pytest.mark.parametrize(
    ("family", "params", "nodes"),
    [
        ("ring", {"n": 12}, 12), ("grid_2d", {"m": 3, "n": 5}, 15), ("grid_3d", {"m": 2, "n": 2, "k": 3}, 12),
        ("tree", {"r": 3, "h": 2}, 13), ("random_regular", {"n": 10, "d": 4}, 10),
        ("erdos_renyi", {"n": 9, "p": 0.5}, 9), ("barabasi_albert", {"n": 9, "m": 2}, 9),
        ("watts_strogatz", {"n": 9, "k": 4, "p": 0.3}, 9),
    ],
)  # fmt: skip
def test_settings_of_graphs_by_the_names_of_networkx(family, params, nodes):
    data = get_dataset(f"synthetic_{family}", num_graphs=10, graph_params=params, num_workers=0)
    assert {graph.num_nodes for graph in data.train} == {nodes}


def test_a_setting_of_graphs_by_both_names_is_refused():
    with pytest.raises(ConfigError, match="num_nodes"):
        get_dataset("synthetic_ring", num_graphs=10, graph_params={"n": 9, "num_nodes": 9})


def test_data_sets_by_kind_their_statistics_and_zeros_for_missing_encodings():
    kinds = list_available_datasets()
    assert set(kinds) == {"molecular", "lrgb", "ogb", "superpixel", "synthetic"}
    assert "zinc" in kinds["molecular"]
    assert len(kinds["synthetic"]) == 10
    stats = mspe.compute_dataset_stats(graphs(5))
    assert (stats["num_graphs"], stats["avg_num_nodes"], stats["avg_num_edges"]) == (5, 3.0, 4.0)
    data = mspe.ensure_data_has_pe(graphs(1)[0])
    assert (data.node_pe.shape, data.edge_pe.shape) == ((3, 32), (4, 16))
    assert mspe.collate_with_pe(graphs(2)).node_pe.shape == (6, 32)
    few = graphs(4)
    mean, _ = mspe.normalize_targets(few)
    assert torch.cat([graph.y for graph in few]).mean().abs() < 1e-6
    assert mean == pytest.approx(torch.cat([graph.y for graph in graphs(4)]).mean().item())
    train, val, test = mspe.create_random_split(few, 0.5, 0.25)
    assert sorted(train + val + test) == [0, 1, 2, 3]


def test_a_schedule_from_a_config_refuses_what_it_does_not_read():
    optimizer = torch.optim.SGD(Net().parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match="warmup_epochs"):
        get_scheduler_from_config(optimizer, {"warmup_epoch": 3})
    with pytest.raises(ConfigError, match="give one"):
        get_scheduler_from_config(optimizer, {"epochs": 3, "total_epochs": 4})
    assert get_scheduler_from_config(optimizer, {"type": "none"}) is None
