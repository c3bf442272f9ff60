"""torch.compile as one setting. Backends that need no compiler; what inductor costs is in benchmarks/compile.py."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import treadle.capture.compile
import treadle.capture.steps
from treadle import BaseTrainer, EmaHook, Engine, StepOutput, Trainer, compile_model
from treadle.capture.compile import check_compile, is_compiled, makes_cuda_graphs, repeated_blocks, uncompiled
from treadle.errors import ConfigError
from treadle.runs.settings import changes

# Of torch itself: inductor's imports call torch.jit.script_method, and dynamo looks at a block's input as at a leaf.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(x)))


class Net(nn.Module):
    def __init__(self, num_blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Square:
    def step(self, model, batch, totals=None, generator=None):
        return StepOutput(((model(batch) - 1) ** 2).mean())


class Fit(BaseTrainer):
    def build_data_loader(self):
        return [torch.full((2, 4), float(number)) for number in range(3)]

    def build_model(self):
        torch.manual_seed(0)
        return Net()

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def forward(self, input):
        return ((self.model(input) - 1) ** 2).mean(), {}


@pytest.fixture
def asked(monkeypatch):
    """Record which modules would be compiled, and how, and compile nothing."""
    parts = []

    def compiled(part, **how):
        parts.append(type(part).__name__)

    monkeypatch.setattr(treadle.capture.compile, "compile_in_place", compiled)
    return parts


def engine_of(backend, **kwargs):
    torch.manual_seed(0)
    model = compile_model(Net(), "blocks", backend=backend) if backend else Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Engine(model, optimizer, Square(), device="cpu", hooks=[EmaHook(0.9)], **kwargs)


def batches():
    return [torch.full((2, 4), 0.1 * number) for number in range(6)]


@pytest.mark.parametrize("wrong", ["all", 1, None])
def test_another_setting_is_refused_with_the_allowed_ones(wrong):
    with pytest.raises(ConfigError, match=r"TrainerConfig.compile=.*True .*'blocks'.* or False"):
        check_compile(wrong, name="TrainerConfig.compile")


def test_false_compiles_nothing_and_true_the_model(asked):
    assert is_compiled(compile_model(Net(), False)) is False
    compile_model(Net(), True)
    assert asked == ["Net"]


def test_blocks_are_the_items_of_module_lists_or_the_whole_model(asked):
    compile_model(Net(), "blocks")
    compile_model(nn.Linear(1, 1), "blocks")
    assert asked == ["Block", "Block", "Block", "Linear"]


def test_a_container_in_a_list_stands_for_what_it_holds():
    attention, mlp = nn.Linear(1, 1), nn.Linear(1, 1)
    layers = nn.ModuleList([nn.ModuleDict({"attention": attention, "mlp": mlp}), nn.ReLU()])
    assert repeated_blocks(nn.Sequential(layers)) == [attention, mlp]


def test_inside_a_wrapper_the_model_is_compiled(asked):
    compile_model(nn.DataParallel(Net()), "blocks")
    assert asked == ["Block"] * 3


@pytest.mark.parametrize("first", [True, "blocks"])
def test_twice_is_refused(first):
    model = compile_model(Net(), first, backend="eager")
    with pytest.raises(ConfigError, match="already compiled"):
        compile_model(model, first)


def test_a_model_in_torch_compile_is_refused():
    with pytest.raises(ConfigError, match="already compiled"):
        compile_model(torch.compile(Net(), backend="eager"), "blocks")


def test_names_stay_and_many_blocks_are_compiled_as_one():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = compile_model(Net(num_blocks=10), "blocks", backend=backend)
    model(torch.ones(2, 4)).sum().backward()
    # The first block differs from the others: its input needs no gradient.
    assert len(compiled) == 2
    assert list(model.state_dict()) == list(Net(num_blocks=10).state_dict())


def same(one, other):
    parts = [(tree["model"], tree["ema"]["ema"]["shadow"]) for tree in (one, other)]
    assert list(parts[0][0]) == list(parts[1][0])
    return all(torch.equal(mine[name], theirs[name]) for mine, theirs in zip(*parts, strict=True) for name in mine)


@pytest.mark.parametrize("setting", ["blocks", True])
@pytest.mark.parametrize(
    "make",
    [lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU()), lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)],
)
def test_layers_of_torch_itself_are_compiled_too_and_as_one(make, setting):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    layers = nn.ModuleList(make() for _ in range(10))
    model = layers[0] if setting is True else nn.ModuleDict({"layers": layers})
    plain = [layer(torch.ones(2, 4)) for layer in layers]
    compile_model(model, setting, backend=backend)
    x = torch.ones(2, 4)
    for layer in layers:
        assert torch.equal(layer(torch.ones(2, 4)), plain.pop(0))
        x = layer(x)
    x.sum().backward()
    assert 1 <= len(compiled) <= 2


def test_many_layers_that_differ_are_all_compiled():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    layers = nn.ModuleList(nn.Sequential(nn.Linear(2, width)) for width in range(1, 13))
    compile_model(nn.ModuleDict({"layers": layers}), "blocks", backend=backend)
    for layer in layers:
        layer(torch.ones(1, 2))
    assert len(compiled) == 12  # more than torch compiles of one code object


def test_a_compiled_run_has_the_numbers_of_a_plain_one_where_the_kernels_are_the_same():
    states = []
    for backend in (None, "eager"):
        engine = engine_of(backend)
        engine.run(batches(), max_steps=5)
        states.append(engine.state_dict())
    assert same(*states)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_run_resumes_to_the_bit_with_evaluations_between(backend):
    straight = engine_of(backend)
    straight.run(batches(), max_steps=2)
    scores = straight.evaluate(batches())
    straight.run(batches(), max_steps=5)
    first = engine_of(backend)
    first.run(batches(), max_steps=2)
    state = first.state_dict()
    assert not any("_orig_mod" in name for name in [*state["model"], *state["ema"]["ema"]["shadow"]])
    second = engine_of(backend)
    second.load_state_dict(state)
    assert second.evaluate(batches()) == scores
    second.run(batches(), max_steps=5)
    assert same(straight.state_dict(), second.state_dict())


def test_the_replay_for_a_broken_gradient_sees_inside_compiled_blocks():
    model = compile_model(Net(), "blocks", backend="eager")
    model(torch.ones(2, 4))
    called = []
    model.blocks[1].linear.register_forward_hook(lambda *_: called.append("linear"))
    model(torch.ones(2, 4))
    assert called == []  # torch: compiled code calls no hook that came later
    with uncompiled(model):
        model(torch.ones(2, 4))
    assert called == ["linear"]


# -- every face has it ----------------------------------------------------------------------------------------------


def test_the_step_face(asked):
    trainer = Fit(max_steps=1, device="cpu", compile="blocks")
    trainer.train()
    assert asked == ["Block"] * 3
    assert trainer.config["compile"] == "blocks"


def test_the_step_face_refuses_another_setting_before_anything_is_built():
    with pytest.raises(ConfigError, match="compile='no'"):
        Fit(max_steps=1, compile="no")


def test_the_functional_face(asked):
    Trainer(Net(), None, nn.MSELoss(), device="cpu", compile="blocks")
    assert asked == ["Block"] * 3


def test_the_spectra_face(asked, tmp_path):
    from treadle.spectra import SpectraTrainer, TrainerConfig

    model = Net()
    cfg = TrainerConfig(out_dir=tmp_path, compile="blocks")
    SpectraTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), [], cfg=cfg, device="cpu")
    assert asked == ["Block"] * 3
    with pytest.raises(ConfigError, match=r"^compile='x'"):
        TrainerConfig(compile="x")


def test_the_graph_face(asked):
    from treadle.graphs import GraphTrainer, get_model

    model = get_model(num_features=2, hidden_dim=8, num_layers=2, num_heads=2)
    GraphTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", compile="blocks")
    assert len(asked) >= 2


@pytest.mark.parametrize(("given", "blocks"), [("blocks", 1), (True, 0), (False, 0)])
def test_the_astro_face(asked, given, blocks):
    from treadle.astro import AstroTrainer, CausalTransformerLM, build_vocab_spec, collate_sequences, encode_sequence

    vocab = build_vocab_spec(2, 4, 2, ["a"], scalar_bins=2)
    batch = collate_sequences([encode_sequence(vocab, image=[0, 1], scalars=[1, 0], spectra={"a": [1]})])
    model = CausalTransformerLM(vocab.vocab_size, 8, 16, 1, 2, 32, 0.0, 32)
    trainer = AstroTrainer(
        model, vocab, [batch], {"warmup_steps": 1, "meaningful_loss": {"weight_spectrum": 0.0}},
        image_codebook=[[0.0], [1.0]], scalar_centers=[1.0, 3.0, 10.0, 30.0], device="cpu", compile_model=given,
    )  # fmt: skip
    assert len(asked) == blocks
    assert trainer._engine.config["compile_model"] == given


def test_old_runs_of_packs_do_not_hear_of_a_setting_that_is_off():
    assert changes({"trainer": {}}, {"trainer": {"compile": False}}) == {}
    assert changes({"trainer": {}}, {"trainer": {"compile": True}}) == {"trainer.compile": (None, True)}


# -- CUDA graphs of its own -----------------------------------------------------------------------------------------


def test_a_mode_that_makes_cuda_graphs_is_known_in_place_and_in_a_wrapper():
    assert makes_cuda_graphs(compile_model(Net(), "blocks", mode="reduce-overhead"))
    assert makes_cuda_graphs(nn.Sequential(torch.compile(Net(), mode="reduce-overhead")))
    assert not makes_cuda_graphs(compile_model(Net(), "blocks"))


@pytest.mark.parametrize(("mode", "warned"), [("reduce-overhead", True), (None, False)])
def test_capture_warns_of_a_model_that_makes_cuda_graphs_of_its_own(monkeypatch, caplog, mode, warned):
    monkeypatch.setattr(treadle.capture.steps, "reason_against", lambda engine: None)
    monkeypatch.setattr(treadle.capture.steps, "CapturedSteps", lambda engine: engine.train_step)
    model = compile_model(Net(), "blocks", mode=mode)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), Square(), device="cpu", capture="auto")
    with caplog.at_level(logging.WARNING):
        engine.prepare()
    assert ("reduce-overhead" in caplog.text) is warned


@pytest.mark.parametrize(("deterministic", "warnings"), [(False, 1), (True, 0)])
def test_kernels_chosen_by_timing_are_warned_of_on_a_gpu(monkeypatch, caplog, deterministic, warnings):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch._inductor.config.patch(deterministic=deterministic):
        compile_model(nn.Linear(1, 1), True)
    assert sum("TORCHINDUCTOR_DETERMINISTIC=1" in record.message for record in caplog.records) == warnings
