"""The losses from hidden states: the values and gradients of the logits form, without the logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from astro_kit import NewTensors, plain_loss, plain_terms, random_case
from helpers import READS
from treadle.astro import (
    choose_positions,
    combined_loss,
    combined_loss_from_hidden,
    hidden_losses,
    loss_terms,
    prepare_codebooks,
)


def both(case, *, autocast=None, config=None, use_ce=True, upstream=1.0):
    """Loss, stats and the gradients of states and head: from hidden states, and from their logits."""
    vocab, targets, books, hidden, head = case
    results = []
    for from_hidden in (True, False):
        states, weight = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            generator = torch.Generator().manual_seed(0)
            if from_hidden:
                loss, stats = combined_loss_from_hidden(
                    states, weight, targets, vocab, *books, config, use_ce, generator=generator
                )
            else:
                logits = nn.functional.linear(states, weight)
                loss, stats = combined_loss(logits, targets, vocab, *books, config, use_ce, generator=generator)
        (loss * upstream).backward()
        results.append((loss, stats, states.grad, weight.grad))
    return results


def assert_equal(results, *, rtol, atol):
    (loss, stats, *grads), (expected, expected_stats, *expected_grads) = results
    assert stats.keys() == expected_stats.keys()
    torch.testing.assert_close([loss, *stats.values()], [expected, *expected_stats.values()], rtol=rtol, atol=atol)
    for grad, other in zip(grads, expected_grads, strict=True):
        assert grad.dtype == other.dtype
        torch.testing.assert_close(grad, other, rtol=rtol, atol=atol * float(other.abs().max()))


@pytest.mark.parametrize("use_ce", [True, False])
@pytest.mark.parametrize("config", [None, {"sample_k": 9}, {"weight_scalar": 0, "weight_spectrum": 3.0}])
def test_in_float32_it_is_the_loss_of_the_logits(config, use_ce):
    assert_equal(both(random_case(), config=config, use_ce=use_ce, upstream=2.5), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aligned", [4, 8, 47, 64])
def test_ids_that_fill_no_whole_tile_count_as_the_others(aligned, monkeypatch):
    case = random_case()
    assert case[0].vocab_size % 8, "the last tile must not be full"
    monkeypatch.setattr(hidden_losses, "_ALIGNED", aligned)
    monkeypatch.setattr(hidden_losses, "_PRODUCT", 16 * 9)  # the head's gradient in several products
    assert_equal(both(case), rtol=1e-4, atol=1e-5)


def test_it_is_the_formula_written_plainly():
    vocab, targets, books, hidden, head = random_case()
    expected = plain_loss(plain_terms(hidden @ head.T, targets, vocab, *books))
    loss, _ = combined_loss_from_hidden(hidden, head, targets, vocab, *books)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_the_loss_of_the_logits_up_to_the_rounding_of_half_precision(dtype):
    assert_equal(both(random_case(batch=(4, 60)), autocast=dtype), rtol=3e-2, atol=2e-2)


def test_in_float16_codebook_values_beyond_its_range_give_a_finite_gradient():
    vocab, targets, (image, spectrum, centers), hidden, head = random_case()
    case = vocab, targets, (image * 1e4, spectrum, centers), hidden, head
    half, full = both(case, autocast=torch.float16, use_ce=False)[0], both(case, use_ce=False)[0]
    for grad, exact in zip(half[2:], full[2:], strict=True):
        assert bool(grad.isfinite().all())
        torch.testing.assert_close(grad, exact, rtol=5e-2, atol=5e-2 * float(exact.abs().max()))


@pytest.mark.parametrize("term", ["ce", "img", "sca", "spec", "all"])
def test_gradients_agree_with_finite_differences_in_float64(term):
    vocab, targets, books, hidden, head = random_case(batch=(1, 14), width=2, dtype=torch.float64)
    weights = {f"weight_{name}": float(term in (short, "all")) for name, short in
               (("image", "img"), ("scalar", "sca"), ("spectrum", "spec"))}  # fmt: skip

    def loss(states, weight):
        use_ce = term in ("ce", "all")
        return combined_loss_from_hidden(states, weight, targets, vocab, *books, weights, use_ce=use_ce)[0]

    assert torch.autograd.gradcheck(loss, (hidden.requires_grad_(), head.requires_grad_()), atol=1e-7)


def test_a_second_backward_pass_gives_the_same_gradients():
    vocab, targets, books, hidden, head = random_case()
    layer = nn.Linear(*head.T.shape, bias=False)
    hidden.requires_grad_()
    loss, _ = combined_loss_from_hidden(hidden, layer, targets, vocab, *books)
    first = torch.autograd.grad(loss, (hidden, layer.weight), retain_graph=True)
    kept = [grad.clone() for grad in first]
    for grad in first:
        grad.mul_(7)
    for again, grad in zip(torch.autograd.grad(loss * 2, (hidden, layer.weight)), kept, strict=True):
        torch.testing.assert_close(again, grad * 2)


@pytest.mark.parametrize(("states", "weight"), [(True, False), (False, True)])
def test_only_what_requires_a_gradient_gets_one(states, weight):
    vocab, targets, books, hidden, head = random_case()
    hidden.requires_grad_(states)
    head.requires_grad_(weight)
    combined_loss_from_hidden(hidden, head, targets, vocab, *books)[0].backward()
    assert (hidden.grad is not None, head.grad is not None) == (states, weight)


def test_without_gradients_the_value_is_the_same():
    vocab, targets, books, hidden, head = random_case()
    expected, _ = combined_loss_from_hidden(hidden.requires_grad_(), head, targets, vocab, *books)
    with torch.no_grad():
        loss, _ = combined_loss_from_hidden(hidden, head, targets, vocab, *books)
    assert not loss.requires_grad
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("use_ce", [True, False])
def test_without_a_position_the_loss_is_zero_with_a_zero_gradient_even_for_infinite_states(use_ce):
    vocab, targets, books, hidden, head = random_case()
    hidden = torch.full_like(hidden, torch.inf).requires_grad_()
    head.requires_grad_()
    loss, stats = combined_loss_from_hidden(hidden, head, torch.zeros_like(targets), vocab, *books, None, use_ce)
    loss.backward()
    assert loss.item() == 0
    assert stats["n_ce"] == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(head.grad, torch.zeros_like(head))


def test_micro_batches_with_totals_add_up_to_one_batch():
    vocab, targets, books, hidden, head = random_case(batch=(6, 30))
    hidden.requires_grad_()
    head.requires_grad_()
    expected = combined_loss_from_hidden(hidden, head, targets, vocab, *books)[0]
    whole = torch.autograd.grad(expected, (hidden, head))
    pieces = [slice(0, 1), slice(1, 4), slice(4, 6)]
    chosen = [choose_positions(targets[piece], vocab) for piece in pieces]
    totals = {term: sum(one.counts[term] for one in chosen) for term in chosen[0].counts}
    loss = sum(
        combined_loss_from_hidden(hidden[piece], head, targets[piece], vocab, *books, positions=one, totals=totals)[0]
        for piece, one in zip(pieces, chosen, strict=True)
    )
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, head)), whole, rtol=1e-5, atol=1e-7)


def test_small_pieces_change_nothing_but_rounding(monkeypatch):
    case = random_case(batch=(6, 50))
    expected = both(case)[0]
    monkeypatch.setattr(hidden_losses, "_PIECE_LOGITS", 7 * case[0].vocab_size)
    monkeypatch.setattr(hidden_losses, "_PRODUCT", 100)
    assert_equal([both(case)[0], expected], rtol=1e-5, atol=1e-6)


def test_no_tensor_is_as_large_as_the_logits(monkeypatch):
    monkeypatch.setattr(hidden_losses, "_PIECE_LOGITS", 6000)
    monkeypatch.setattr(loss_terms, "FLOAT_LOGITS", 2000)
    vocab, targets, books, hidden, head = random_case(batch=(10, 100), width=4)
    with NewTensors() as new:
        loss, _ = combined_loss_from_hidden(
            hidden.requires_grad_(), head.requires_grad_(), targets, vocab, *books, {"sample_k": 30}
        )
        loss.backward()
    assert max(new.sizes) == 6000 // 50 * 64, "a piece of 120 rows, of 50 ids in aligned rows"
    assert max(new.sizes) < targets.numel() * vocab.vocab_size // 6


def test_a_head_that_does_not_fit_is_refused():
    vocab, targets, books, hidden, head = random_case()
    for wrong, message in (
        (nn.Linear(16, vocab.vocab_size), "bias=False"),
        (head[:, :-1], "does not fit hidden"),
        (head[:-1], f"logits of {vocab.vocab_size - 1} ids"),
        (head.double(), "use one type, or autocast"),
    ):
        with pytest.raises(ValueError, match=message):
            combined_loss_from_hidden(hidden, wrong, targets, vocab, *books)


class Operations(TorchDispatchMode):
    """Notes every operation."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


def test_with_positions_and_prepared_codebooks_the_host_reads_nothing():
    vocab, targets, books, hidden, head = random_case()
    prepared = prepare_codebooks(vocab, image=books[0], spectrum=books[1], scalar=books[2])
    positions = choose_positions(targets, vocab)
    hidden.requires_grad_()
    logits = (hidden.detach() @ head.T).requires_grad_()
    with Operations() as operations:
        combined_loss_from_hidden(hidden, head, targets, vocab, *prepared, positions=positions)[0].backward()
        combined_loss(logits, targets, vocab, *prepared, positions=positions)[0].backward()
    assert torch.ops.aten.bmm.default in operations.seen
    of_unknown_size = {torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default}
    assert operations.seen & (set(READS) | of_unknown_size) == set()
