"""Decoders of transformers without their look for packed documents."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

from treadle.capture.compile import compile_model
from treadle.text import add_lora, build_gpt2, skip_packing_check

transformers = pytest.importorskip("transformers")
masks = pytest.importorskip("transformers.masking_utils")


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False, attn_implementation="sdpa"
    )
    return transformers.GPT2LMHeadModel(config)


def decoder(name, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, use_cache=False, attn_implementation="sdpa", **more,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config)


def llama():
    return decoder("Llama")


def qwen():
    return decoder("Qwen2", num_key_value_heads=1)


def mistral():
    return decoder("Mistral", num_key_value_heads=1, sliding_window=4)


MODELS = {"gpt2": gpt2, "llama": llama, "qwen": qwen, "mistral": mistral}
IDS = torch.arange(24).reshape(2, 12)


@pytest.fixture
def looks(monkeypatch):
    """Give the calls of the check."""
    calls, check = [], masks.find_packed_sequence_indices

    def counted(position_ids):
        calls.append(position_ids)
        return check(position_ids)

    monkeypatch.setattr(masks, "find_packed_sequence_indices", counted)
    return calls


def loss_and_gradients(model):
    torch.manual_seed(1)
    output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()
    return [output.logits, output.loss, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_are_those_of_the_model_that_looks(name, looks):
    plain, quick = MODELS[name](), skip_packing_check(MODELS[name]())
    before = loss_and_gradients(plain.train())
    assert len(looks) == 1
    after = loss_and_gradients(quick.train())
    assert len(looks) == 1
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_what_the_caller_says_about_the_batch_is_heard(name, looks):
    plain, quick = MODELS[name]().eval(), skip_packing_check(MODELS[name]().eval())
    packed = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, 12)
    padded = torch.ones(2, 12, dtype=torch.long)
    padded[0, 9:] = 0
    asked = {"position_ids": packed}, {"attention_mask": padded}, {"use_cache": True}
    for more in asked:
        assert torch.equal(plain(IDS, **more).logits, quick(IDS, **more).logits), more
    assert len(looks) == 2, "position ids must be looked at"
    assert not torch.equal(quick(IDS, position_ids=packed).logits, quick(IDS).logits)
    assert quick(IDS, use_cache=True).past_key_values is not None
    assert quick(IDS).past_key_values is None
    assert [type(value) for value in quick(IDS, return_dict=False)] == [torch.Tensor]


@pytest.mark.parametrize("name", MODELS)
def test_text_is_continued_as_before(name):
    plain, quick = MODELS[name]().eval(), skip_packing_check(MODELS[name]().eval())
    for use_cache in (False, True):
        texts = [
            model.generate(IDS[:, :4], max_new_tokens=5, do_sample=False, use_cache=use_cache, pad_token_id=0)
            for model in (plain, quick)
        ]
        assert torch.equal(*texts)


def test_gradient_checkpointing_hears_of_no_cache(looks, caplog):
    model = skip_packing_check(llama()).train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # since transformers 5.40
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("error")
        loss_and_gradients(model)
    assert len(looks) == 1
    assert not caplog.messages


def test_a_gpt2_of_the_pack_does_not_look(looks):
    model = build_gpt2(32, n_positions=16, n_embd=16, n_layer=1, n_head=2).train()
    loss_and_gradients(model)
    pytest.importorskip("peft")
    add_lora(model)(input_ids=IDS, labels=IDS).loss.backward()
    assert not looks


def test_the_hook_goes_with_copies_and_into_no_file(looks):
    model = skip_packing_check(gpt2())
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in copies:
        each(IDS)
    assert not looks
    assert model.state_dict().keys() == gpt2().state_dict().keys()


def test_a_model_of_peft_is_reached_inside(looks):
    pytest.importorskip("peft")
    skip_packing_check(add_lora(gpt2()))(IDS)
    assert not looks


def test_layers_that_keep_something_else_than_keys_are_refused():
    model = qwen()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(TypeError, match=r"must be attention; it names .*'linear_attention'"):
        skip_packing_check(model)


@pytest.mark.filterwarnings("default")  # torch's compiler looks at gradients of tensors that are no leaves
@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_is_compiled_once(looks, whole):
    torch._dynamo.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = compile_model(
        build_gpt2(32, n_positions=16, n_embd=16, n_layer=2, n_head=2), whole or "blocks", backend=backend
    )
    losses = [loss_and_gradients(model.train())[1]]
    count = len(compiled)
    for _ in range(3):
        losses.append(loss_and_gradients(model)[1])
    assert len(compiled) == count >= 1
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert not looks


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), None, "gpt2"])
def test_what_is_no_decoder_is_refused(model):
    with pytest.raises(TypeError, match="must take position_ids and a cache"):
        skip_packing_check(model)
