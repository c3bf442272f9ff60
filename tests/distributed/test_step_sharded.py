"""Steps of models that ``fully_shard`` spread over two ranks: the weights of one process, whatever the ranks lack."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import outcomes_on_ranks, run_on_ranks
from step_kit import Counting, Rows, differing, engine_of, net, share, train, whole
from treadle import EmaHook, NonFiniteError
from treadle.distributed import is_dtensor, is_sharded
from treadle.engine.hook import BaseHook
from treadle.errors import ConfigError
from treadle.hooks.nonfinite import NonFiniteHook

# Rows of each rank for one micro-batch after the other; a rank with none of them has no loss.
SIZES = [(3, 3), (4, 2), (1, 5), (2, 2), (3, 1), (0, 4), (3, 0), (2, 6), (1, 1)]
CASES = {
    "a micro-batch a step": {},
    "three micro-batches a step": {"k": 3},
    "clipped": {"grad_clip": 0.5, "k": 3},
    "Adam": {"make": torch.optim.AdamW, "lr": 0.01},
    "an average": {"hooks": "ema"},
}


def arguments(case):
    """The settings of a case, with hooks of its own."""
    settings = dict(CASES[case])
    if settings.get("hooks"):
        settings["hooks"] = [EmaHook(0.5)]
    return settings


def average_of(engine):
    ema = engine.averages.get("ema")
    if ema is None:
        return None
    with ema.applied_to(engine.model):
        swapped = whole(engine.model)
    averaged = ema.export(engine.model)
    exported = {name: value.full_tensor() if is_dtensor(value) else value for name, value in averaged.items()}
    return {"swapped": swapped, "exported": exported, "updates": ema.num_updates}


def every_case(folder):
    found = {}
    for kind in ("ddp", "fsdp"):
        for case in CASES:
            done = train(kind, SIZES, **arguments(case))
            engine = done.pop("engine")
            assert is_sharded(engine.model) is (kind == "fsdp")
            found[kind, case] = {**done, "average": average_of(engine), "after": whole(engine.model)}
    return {"cases": found, **edges(folder)}


def edges(folder):
    """Return the errors on one rank only, and the counts."""
    return {
        "counted": counted_collectives(), "nan": nan_on_one_rank(folder), "raised": raised_on_both(),
        "fp16": overflow_in_fp16(),
        "bf16": mixed_precision(), "evaluated": evaluated_on_the_way(), "nobody": nobody_has_a_loss(),
        "running means": running_means(), "plain beside": plain_weights_beside_sharded_ones(),
        "fused": fused_skips(),
    }  # fmt: skip


def counted_collectives():
    """Per step: FSDP2's own reductions of four micro-batches, and what the ranks' hosts exchange."""
    counts = {}
    for k in (1, 4):
        engine = engine_of("fsdp", accumulation_steps=k)
        engine.prepare()
        rows = share(dist.get_rank(), 2, [(2, 3)] * 2 * k)
        engine.model.train()
        engine.step_group(rows[:k])
        with Counting() as counting:
            engine.step_group(rows[k:])
        counts[k] = dict(counting.calls)
    return counts


def rows_with_nan(sizes, at):
    rows = share(dist.get_rank(), 2, sizes)
    if dist.get_rank() == 1:
        rows[at][0, 0] = float("nan")
    return rows


def nan_on_one_rank(folder):
    engine = engine_of("fsdp", hooks=[NonFiniteHook("skip", path=folder)])
    engine.run(rows_with_nan([(3, 3)] * 4, at=1), max_steps=4)
    return engine.applied_steps, engine.step, whole(engine.model)


def raised_on_both():
    engine = engine_of("fsdp", max_non_finite_grad_retries=1)
    before = whole(engine.model)
    try:
        engine.run(rows_with_nan([(3, 3)] * 2, at=0)[:1] * 2, max_steps=2)
    except NonFiniteError as error:
        return error.tries, differing(before, whole(engine.model), 0.0)
    return None


def overflow_in_fp16():
    engine = engine_of("fsdp", precision="fp16", lr=1e-3)
    engine.precision.scaler._init_scale = 2.0**20
    engine.run(share(dist.get_rank(), 2, [(3, 3)] * 12), max_steps=12)
    return engine.precision.scaler.get_scale(), engine.applied_steps, whole(engine.model)


def mixed_precision():
    engine = engine_of("fsdp", settings={"param_dtype": "bf16", "reduce_dtype": "fp32"}, grad_clip=1.0)
    dtypes = set()
    engine.model.blocks[0][1].register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    engine.run(share(dist.get_rank(), 2, [(3, 3)] * 3), max_steps=3)
    return dtypes, {value.dtype for value in engine.model.state_dict().values()}, whole(engine.model)


def evaluated_on_the_way():
    """Evaluations with averaged weights between steps change nothing, and give what one process gives."""
    rows = share(dist.get_rank(), 2, SIZES[:4])

    def run(evaluates):
        values = []

        class Evaluate(BaseHook):
            def on_after_step(self, trainer):
                if evaluates:
                    with trainer.averages["ema"].applied_to(trainer.model):
                        values.append(trainer.evaluate(rows)["loss"])

        engine = engine_of("fsdp", hooks=[EmaHook(0.5), Evaluate()], settings={"blocks": [nn.Sequential]})
        engine.run(rows, max_steps=4)
        named = {id(parameter) for parameter in engine.model.parameters()}
        in_optimizer = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
        return whole(engine.model), values, named == in_optimizer

    quiet, looked = run(False), run(True)
    return differing(quiet[0], looked[0], 0.0), looked[1], looked[2]


def nobody_has_a_loss():
    engine = engine_of("fsdp")
    before = whole(engine.model)
    engine.run(share(dist.get_rank(), 2, [(0, 0), (2, 2)]), max_steps=1)
    return engine.applied_steps, differing(before, whole(engine.model), 0.0)


def running_means():
    """A batch norm's own, after two steps of replicas, a sharded model, and each as plain torch trains it."""
    from torch.distributed.fsdp import fully_shard

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))

    rows, found = share(dist.get_rank(), 2, [(3, 3)] * 2), {}
    for kind in ("ddp", "fsdp"):
        trained = model()
        engine_of(kind, model=trained).run(rows, max_steps=2)
        found[kind] = trained[1].running_mean.clone()
    for kind, wrap in {"plain ddp": nn.parallel.DistributedDataParallel, "plain fsdp": fully_shard}.items():
        trained = model()
        wrapped = wrap(trained)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.02)
        for batch in rows:
            optimizer.zero_grad()
            Rows().step(wrapped, batch).loss.backward()
            optimizer.step()
        found[kind] = trained[1].running_mean.clone()
    return found


def plain_weights_beside_sharded_ones():
    """The norm of both kinds together, when only a part of the model is sharded."""
    from torch.distributed.fsdp import fully_shard

    from treadle.distributed.gradients import gradient_exchange
    from treadle.optim.gradients import clip_, divide_, total_norm

    model = net()
    fully_shard(model.blocks[0])
    for number, parameter in enumerate(model.parameters(), start=1):
        parameter.grad = torch.full_like(parameter, 0.1 * number)
    grads = [parameter.grad for parameter in model.parameters()]
    divide_(grads, torch.tensor(2.0))
    norm = total_norm(grads)
    clip_(grads, 1.0, norm)
    with pytest.raises(ConfigError, match=r"parameter 'inward.weight' is trained and not sharded"):
        gradient_exchange(model)
    return norm.item(), total_norm(grads).item()


def fused_skips():
    """Check that a fused optimizer leaves sharded weights alone at ``found_inf``, as the guard assumes."""
    engine = engine_of("fsdp", make=partial(torch.optim.AdamW, fused=True))
    optimizer, changed = engine.optimizer, []
    for found_inf in (0.0, 1.0):
        before = whole(engine.model)
        engine.model(torch.ones(2, 5)).square().mean().backward()
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found_inf)
        optimizer.step()
        changed.append(len(differing(before, whole(engine.model), 0.0)))
    return changed, {float(state["step"]) for state in optimizer.state.values()}


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    return tmp_path_factory.mktemp("nonfinite")


@pytest.fixture(scope="module")
def found(events):
    return run_on_ranks(every_case, 2, str(events), timeout=150)


@pytest.fixture(scope="module")
def alone():
    return {case: train(None, SIZES, **arguments(case)) for case in CASES}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_train_as_one_process_with_the_same_global_batch(kind, case, found, alone):
    for ours in (rank["cases"][kind, case] for rank in found):
        assert torch.allclose(torch.tensor(ours["said"]), torch.tensor(alone[case]["said"]), rtol=1e-5)
        assert differing(ours["weights"], alone[case]["weights"]) == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_averages_are_those_of_one_process_and_swapping_puts_the_weights_back(kind, found, alone):
    expected = average_of(alone["an average"]["engine"])
    for rank in found:
        ours = rank["cases"][kind, "an average"]
        assert ours["average"]["updates"] == expected["updates"] == len(SIZES)
        for name in ("swapped", "exported"):
            assert differing(ours["average"][name], expected[name]) == []
        assert differing(ours["weights"], ours["after"], 0.0) == []


def test_gradients_are_reduced_once_a_step_and_hosts_exchange_little(found):
    for rank in found:
        one, four = rank["counted"][1], rank["counted"][4]
        reductions = [sum(calls for name, calls in step.items() if "reduce_scatter" in name) for step in (one, four)]
        assert reductions == [3, 3]  # two blocks and the rest
        assert (one["all_gather"], four["all_gather"]) == (1, 2)
        assert [name for name in one if name.startswith(("all_reduce", "broadcast"))] == []


def test_nan_on_one_rank_skips_the_step_on_all(found, events):
    assert sorted(path.name for path in events.iterdir()) == [f"step_00000002_try_1_rank_{rank}" for rank in range(2)]
    assert [rank["nan"][:2] for rank in found] == [(3, 4), (3, 4)]
    assert differing(found[0]["nan"][2], found[1]["nan"][2], 0.0) == []
    assert all(value.isfinite().all() for value in found[0]["nan"][2].values())


def test_nan_on_one_rank_raises_on_all_after_the_same_tries_and_no_weight_moved(found):
    assert [rank["raised"] for rank in found] == [(2, []), (2, [])]


def test_an_fp16_overflow_lowers_the_scale_on_all_ranks_alike(found):
    (scale, applied, weights), other = found[0]["fp16"], found[1]["fp16"]
    assert scale < 2.0**20
    assert 0 < applied < 12
    assert (scale, applied) == other[:2]
    assert differing(weights, other[2], 0.0) == []


def test_a_mixed_precision_policy_computes_in_half_and_keeps_whole_weights(found):
    computed, kept, weights = found[0]["bf16"]
    assert (computed, kept) == ({torch.bfloat16}, {torch.float32})
    exact = train(None, [(3, 3)] * 3, grad_clip=1.0)["weights"]
    assert differing(weights, exact, 0.05) == []
    assert differing(weights, exact) != []


def test_evaluations_on_the_way_change_nothing(found):
    for changed, values, names_kept in (rank["evaluated"] for rank in found):
        assert changed == []
        assert names_kept
        assert values == found[0]["evaluated"][1]
        assert len(values) == 4


def test_a_step_without_any_loss_is_not_applied(found):
    assert [rank["nobody"] for rank in found] == [(0, []), (0, [])]


def test_running_means_are_those_of_rank_0_on_every_rank_as_plain_replicas_have_them_there(found):
    first, second = (rank["running means"] for rank in found)
    for kind in ("ddp", "fsdp"):
        assert torch.equal(first[kind], second[kind])
        assert torch.allclose(first[kind], first["plain ddp"], atol=1e-6)
    assert torch.equal(first["ddp"], first["plain ddp"])
    for kind in ("plain ddp", "plain fsdp"):  # torch leaves the other ranks their own, until replicas are run again
        assert not torch.equal(first[kind], second[kind])


def test_the_norm_takes_sharded_and_plain_gradients_together(found):
    grads = [torch.full_like(parameter, 0.05 * number) for number, parameter in enumerate(net().parameters(), start=1)]
    expected = nn.utils.get_total_norm(grads).item()
    for rank in found:
        assert rank["plain beside"] == (pytest.approx(expected, rel=1e-5), pytest.approx(1.0, rel=1e-4))


def test_a_fused_optimizer_leaves_sharded_weights_alone_where_it_is_told_to(found):
    for (applied, skipped), steps in (rank["fused"] for rank in found):
        assert applied > 0
        assert (skipped, steps) == (0, {1.0})


def without_running_the_model():
    engine = engine_of("fsdp", task=Rows(run_empty=False))
    engine.run(share(dist.get_rank(), 2, [(2, 0)]), max_steps=1)


def test_a_rank_that_does_not_run_a_sharded_model_is_told_the_rule():
    first, second = outcomes_on_ranks(without_running_the_model, 2, grace=1)
    assert not first.ok
    assert "ConfigError: loss: None, and the model was not run on this micro-batch" in second.error
