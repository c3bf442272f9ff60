"""The losses on logits: values by hand, gradients, every term alone, what is absent, what is refused, what it costs."""

from __future__ import annotations

import dataclasses
import logging
import math

import numpy as np
import pytest
import torch

from astro_kit import (
    CENTERS,
    IMAGE,
    SECOND_ROW,
    SPECTRUM,
    TARGETS,
    NewTensors,
    plain_loss,
    plain_terms,
    random_case,
    tiny_logits,
    tiny_vocab,
)
from treadle.astro import (
    LossConfig,
    build_vocab_spec,
    choose_positions,
    combined_loss,
    cross_entropy_loss,
    image_reconstruction_loss,
    loss_terms,
    losses,
    prepare_codebooks,
    sampling,
    scalar_reconstruction_loss,
    spectrum_reconstruction_loss,
)
from treadle.astro.losses import loss_of_logits

KEYS = {"loss_ce", "loss_img", "loss_sca", "loss_spec", "n_ce", "n_img", "n_sca", "n_spec"}


def tiny(logits, config=None, use_ce=True, **kwargs):
    return combined_loss(logits, TARGETS, tiny_vocab(), IMAGE, SPECTRUM, CENTERS, config, use_ce, **kwargs)


def numbers(stats):
    assert set(stats) == KEYS
    assert all(isinstance(value, int) for key, value in stats.items() if key.startswith("n_"))
    assert all(value.dim() == 0 and not value.requires_grad for key, value in stats.items() if key[:4] == "loss")
    return [float(stats[f"loss_{term}"]) for term in ("ce", "img", "sca", "spec")]


@pytest.mark.parametrize(
    ("raised", "expected", "total"),
    [((), [2.708050, 2.5, 50.5, 14.5], 9.458050), (SECOND_ROW, [2.393768, 5.625, 112.625, 28.625], 17.081268)],
)
def test_the_example_of_the_specification(raised, expected, total):
    loss, stats = tiny(tiny_logits(*raised))
    assert numbers(stats) == pytest.approx(expected, abs=1e-6, rel=1e-6)
    assert loss.item() == pytest.approx(total, abs=1e-5)
    assert [stats[f"n_{term}"] for term in ("ce", "img", "sca", "spec")] == [5, 1, 2, 2]
    without_ce, without_stats = tiny(tiny_logits(*raised), use_ce=False)
    assert without_ce.item() == pytest.approx(total - expected[0], abs=1e-5)
    assert (float(without_stats["loss_ce"]), without_stats["n_ce"]) == (0.0, 0)


@pytest.mark.parametrize(("raised", "a", "b"), [((), 4, 25), (SECOND_ROW, 1, 56.25)])
def test_each_spectrum_group_has_its_own_codebook_and_share(raised, a, b):
    positions = choose_positions(TARGETS, tiny_vocab())
    books = prepare_codebooks(tiny_vocab(), image=IMAGE, spectrum=SPECTRUM, scalar=CENTERS)
    weights = LossConfig().term_weights(tiny_vocab())
    means = loss_of_logits(tiny_logits(*raised), positions, books, weights).means
    assert [float(means["spec/a"]), float(means["spec/b"])] == pytest.approx([a, b])


@pytest.mark.parametrize(
    ("loss_fn", "codebook", "values"),
    [
        (image_reconstruction_loss, IMAGE, (2.5, 5.625)),
        (scalar_reconstruction_loss, CENTERS, (50.5, 112.625)),
        (spectrum_reconstruction_loss, SPECTRUM, (14.5, 28.625)),
    ],
)
def test_each_term_alone(loss_fn, codebook, values):
    for raised, value in zip(((), SECOND_ROW), values, strict=True):
        loss, count = loss_fn(tiny_logits(*raised), TARGETS, tiny_vocab(), codebook, 10)
        assert loss.item() == pytest.approx(value)
        assert count == (1 if loss_fn is image_reconstruction_loss else 2)


def test_on_equal_logits_a_term_is_the_squared_distance_to_the_mean_of_the_codebook():
    vocab, targets, (image, _, centers), _, _ = random_case()
    logits = torch.zeros(*targets.shape, vocab.vocab_size)
    ids = targets[(targets >= 5) & (targets < 12)] - 5
    by_hand = (image.mean(0) - image[ids]).square().mean()
    torch.testing.assert_close(image_reconstruction_loss(logits, targets, vocab, image, 1000)[0], by_hand)
    ids = targets[(targets >= 12) & (targets < 32)] - 12
    by_hand = (centers.mean(1)[ids // 5] - centers.flatten()[ids]).square().mean()
    torch.testing.assert_close(scalar_reconstruction_loss(logits, targets, vocab, centers, 1000)[0], by_hand)


@pytest.mark.parametrize("use_ce", [True, False])
def test_value_and_gradient_are_those_of_the_formula_written_plainly(use_ce):
    vocab, targets, books, hidden, head = random_case()
    logits = (hidden @ head.T).requires_grad_()
    plain = logits.detach().clone().requires_grad_()
    loss, stats = combined_loss(logits, targets, vocab, *books, {"weight_image": 0.3}, use_ce)
    terms = plain_terms(plain, targets, vocab, *books)
    expected = plain_loss(terms, use_ce=use_ce, weights=(0.3, 0.1, 0.1))
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-4, atol=1e-8)
    assert stats["n_spec"] == sum(count for term, (_, count) in terms.items() if term.startswith("spec/"))


@pytest.mark.parametrize("term", ["ce", "img", "sca", "spec", "all"])
def test_gradients_agree_with_finite_differences_in_float64(term):
    vocab, targets, books, hidden, head = random_case(batch=(1, 14), width=4, dtype=torch.float64)
    weights = {f"weight_{name}": float(term in (short, "all")) for name, short in
               (("image", "img"), ("scalar", "sca"), ("spectrum", "spec"))}  # fmt: skip

    def loss(logits):
        return combined_loss(logits, targets, vocab, *books, weights, use_ce=term in ("ce", "all"))[0]

    logits = (hidden @ head.T).requires_grad_()
    assert loss(logits).dtype == torch.float64
    # Each entry by itself for all terms together, one random direction for each alone.
    assert torch.autograd.gradcheck(loss, (logits,), atol=1e-7, fast_mode=term != "all")


@pytest.mark.parametrize("use_ce", [True, False])
def test_without_a_position_the_loss_is_zero_with_a_zero_gradient_even_for_infinite_logits(use_ce):
    vocab = tiny_vocab()
    logits = torch.full((1, 2, 15), math.inf, requires_grad=True)
    loss, stats = combined_loss(
        logits, torch.zeros(1, 2, dtype=torch.long), vocab, IMAGE, SPECTRUM, CENTERS, None, use_ce
    )
    (loss * 3).backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    assert numbers(stats) == [0, 0, 0, 0]
    assert sum(value for key, value in stats.items() if key.startswith("n_")) == 0


def test_special_targets_count_in_the_cross_entropy_only():
    logits = tiny_logits()
    loss, stats = combined_loss(logits, torch.tensor([[1, 2, 3, 4, 0]]), tiny_vocab(), IMAGE, SPECTRUM, CENTERS)
    assert [stats[f"n_{term}"] for term in ("ce", "img", "sca", "spec")] == [4, 0, 0, 0]
    assert loss.item() == pytest.approx(math.log(15))


def test_what_is_forbidden_by_minus_infinity_elsewhere_does_not_matter():
    vocab, targets, books, hidden, head = random_case()
    logits = hidden @ head.T
    own = vocab.types_of(torch.arange(vocab.vocab_size))[None, None] == vocab.types_of(targets)[..., None]
    logits = logits.masked_fill(~own, -math.inf)
    column = (torch.arange(vocab.vocab_size) - 12) // 5
    other = (vocab.types_of(targets) == 6)[..., None] & (column != (targets[..., None] - 12) // 5)
    logits = logits.masked_fill(other, -math.inf).requires_grad_()
    loss, _ = combined_loss(logits, targets, vocab, *books)
    loss.backward()
    assert math.isfinite(loss.item())
    assert bool(logits.grad.isfinite().all())


def test_cross_entropy_of_padding_alone_is_zero_and_else_that_of_torch():
    _, targets, _, hidden, head = random_case()
    logits = hidden @ head.T
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)
    torch.testing.assert_close(cross_entropy_loss(logits, targets, 0), expected)
    assert cross_entropy_loss(logits, torch.zeros_like(targets), 0).item() == 0
    far = torch.tensor([[[0.0, 1000.0]]])
    assert cross_entropy_loss(far, torch.tensor([[0]]), 5).item() == 1000.0


def test_codebooks_with_values_beyond_float16_are_right_in_half_precision():
    vocab = tiny_vocab()
    loss, _ = image_reconstruction_loss(tiny_logits().half(), TARGETS, vocab, np.array([[0.0], [70000.0]]), 10)
    assert loss.item() == pytest.approx(35000.0**2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_taken_to_float32(dtype):
    vocab, targets, books, hidden, head = random_case()
    half = (hidden @ head.T).to(dtype).requires_grad_()
    full = half.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = combined_loss(half, targets, vocab, *books)
    expected, _ = combined_loss(full, targets, vocab, *books)
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(half.grad.float(), full.grad, rtol=2e-2, atol=1e-5)


def test_micro_batches_with_totals_add_up_to_one_batch():
    vocab, targets, books, hidden, head = random_case(batch=(8, 20))
    whole = (hidden @ head.T).requires_grad_()
    expected, _ = combined_loss(whole, targets, vocab, *books)
    expected.backward()
    pieces = [slice(0, 1), slice(1, 2), slice(2, 7), slice(7, 8)]
    chosen = [choose_positions(targets[piece], vocab) for piece in pieces]
    totals = {term: float(sum(one.counts[term] for one in chosen)) for term in chosen[0].counts}
    assert len({one.counts["img"] for one in chosen}) > 1
    parts = whole.detach().clone().requires_grad_()
    losses_of = [
        combined_loss(parts[piece], targets[piece], vocab, *books, positions=one, totals=totals)[0]
        for piece, one in zip(pieces, chosen, strict=True)
    ]
    torch.stack(losses_of).sum().backward()
    torch.testing.assert_close(torch.stack(losses_of).sum(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-5, atol=1e-8)


def test_a_batch_without_a_group_that_the_step_has_keeps_the_groups_share():
    vocab, books = tiny_vocab(), prepare_codebooks(tiny_vocab(), image=IMAGE, spectrum=SPECTRUM, scalar=CENTERS)
    only_a = choose_positions(torch.tensor([[12]]), vocab)
    weights = {"img": 0.0, "sca": 0.0, "spec": 1.0}
    totals = {"ce": 2, "img": 0, "sca": 0, "spec/a": 1, "spec/b": 1}
    loss = loss_of_logits(torch.zeros(1, 1, 15), only_a, books, weights, totals=totals).loss
    assert loss.item() == pytest.approx(math.log(15) / 2 + 4 / 2)
    with pytest.raises(ValueError, match=r"totals\['spec/a'\]=0"):
        loss_of_logits(torch.zeros(1, 1, 15), only_a, books, weights, totals={**totals, "spec/a": 0})


def test_a_weight_that_became_zero_after_the_positions_were_chosen_leaves_the_term_out_of_the_loss():
    books = prepare_codebooks(tiny_vocab(), image=IMAGE, spectrum=SPECTRUM, scalar=CENTERS)
    logits = tiny_logits()
    values = loss_of_logits(logits, choose_positions(TARGETS, tiny_vocab()), books, {"img": 0, "sca": 0, "spec": 0})
    assert values.loss.item() == pytest.approx(math.log(15))
    assert float(values.means["sca"]) == pytest.approx(50.5)
    values.loss.backward()
    alone = tiny_logits()
    cross_entropy_loss(alone, TARGETS, 0).backward()
    assert torch.equal(logits.grad, alone.grad)


def test_the_same_generator_gives_the_same_sample_and_its_share_to_each_group():
    vocab, targets, books, hidden, head = random_case(batch=(10, 60))
    logits = hidden @ head.T
    drawn = [
        combined_loss(logits, targets, vocab, *books, {"sample_k": 12}, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert [drawn[0][1][f"n_{term}"] for term in ("img", "sca", "spec")] == [12, 12, 3 * 4]


def test_a_term_of_weight_zero_is_not_computed_and_needs_no_codebook():
    vocab = tiny_vocab()
    loss, stats = combined_loss(
        tiny_logits(), TARGETS, vocab, None, None, CENTERS, {"weight_image": 0, "weight_spectrum": 0}
    )
    assert numbers(stats)[1:] == [0, pytest.approx(50.5), 0]
    assert [stats["n_img"], stats["n_spec"]] == [0, 0]
    assert loss.item() == pytest.approx(2.708050 + 5.05)
    off, stats = combined_loss(tiny_logits(), TARGETS, vocab, None, None, None, {"enabled": False})
    assert off.item() == pytest.approx(2.708050)
    assert stats["n_sca"] == 0


@dataclasses.dataclass
class _Settings:
    enabled: bool = True
    sample_k_per_modality: int = 7
    weight_image: float = 0.5
    weight_scalar: float = 0.0
    weight_spectrum: float = 0.0


def test_settings_are_read_from_mappings_and_dataclasses():
    assert LossConfig.read(_Settings()) == LossConfig(True, 7, 0.5, 0.0, 0.0)
    assert LossConfig.read(None) == LossConfig.read({}) == LossConfig()
    assert LossConfig() == LossConfig(True, 4096, 0.1, 0.1, 0.1)
    numbers = LossConfig.read({"sample_k": np.int64(7), "weight_image": np.float32(0.5)})
    assert [type(value) for value in (numbers.sample_k, numbers.weight_image)] == [int, float]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"weight_imag": 1}, "did you mean 'weight_image'"),
        ({"weight_image": -1}, "weight_image=-1"),
        ({"weight_scalar": math.nan}, "weight_scalar=nan"),
        ({"sample_k": 0}, "sample_k=0"),
        ({"sample_k": 5, "sample_k_per_modality": 6}, "are one setting"),
        ({"enabled": "yes"}, "enabled='yes'"),
        (3, "not a mapping"),
    ],
)
def test_wrong_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        tiny(tiny_logits(), config)


@pytest.mark.parametrize(
    ("books", "message"),
    [
        ({"image": None}, "image_codebook=None"),
        ({"spectrum": None}, "spectrum_codebook=None"),
        ({"scalar": None}, "scalar_centers=None"),
        ({"image": [[0.0], [1.0], [2.0]]}, "image_codebook of shape .3, 1.: .* 2 ids"),
        ({"image": [0.0, 1.0]}, "image_codebook of shape .2,.: it must be 2-D"),
        ({"image": [[math.inf], [1.0]]}, "image_codebook has values that are not finite"),
        ({"scalar": [[1.0, 2.0, 3.0, 4.0]]}, "scalar_centers of shape .1, 4. disagrees"),
        ({"scalar": [1.0, math.nan, 3.0, 4.0]}, "scalar_centers has values"),
        ({"spectrum": {"a": [[0.0], [4.0]]}}, "no codebook for b"),
        ({"spectrum": {**SPECTRUM, "c": [[0.0], [4.0]]}}, "unknown key 'c'"),
        ({"spectrum": np.zeros((3, 2, 1))}, r"spectrum_codebook of shape \(3, 2, 1\)"),
        ({"spectrum": {"a": [[0.0], [4.0]], "b": [[0.0]]}}, r"spectrum_codebook\['b'\] of shape"),
        ({"image": "codebook.npz"}, "image_codebook: .*|image_codebook has dtype"),
    ],
)
def test_a_codebook_that_does_not_fit_is_named(books, message):
    given = {"image": IMAGE, "spectrum": SPECTRUM, "scalar": CENTERS, **books}
    with pytest.raises(ValueError, match=message):
        combined_loss(tiny_logits(), TARGETS, tiny_vocab(), given["image"], given["spectrum"], given["scalar"])


def test_codebooks_may_be_arrays_tensors_stacked_or_prepared():
    stacked = np.array([[[0.0], [4.0]], [[10.0], [20.0]]])
    expected, _ = tiny(tiny_logits())
    for image, spectrum, centers in (
        (np.array(IMAGE), stacked, np.array([1.0, 3.0, 10.0, 30.0], dtype=np.float32)),
        (torch.tensor(IMAGE).half(), torch.tensor(stacked), torch.tensor(CENTERS)),
        tuple(prepare_codebooks(tiny_vocab(), image=IMAGE, spectrum=SPECTRUM, scalar=CENTERS)),
    ):
        loss, _ = combined_loss(tiny_logits(), TARGETS, tiny_vocab(), image, spectrum, centers)
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("as_array", [np.array, torch.tensor, list])
def test_one_codebook_for_several_groups_is_shared_and_warned_of_once_in_a_loop(caplog, as_array):
    def warnings():
        found = [record.message for record in caplog.records if "shared by the groups a, b" in record.message]
        caplog.clear()
        return len(found)

    caplog.set_level(logging.WARNING, "treadle.astro")
    vocab = tiny_vocab()
    for _ in range(2):
        codebook = as_array([[0.0], [4.0]])  # as one that is moved to the device for each batch
        loss, _ = spectrum_reconstruction_loss(tiny_logits(), TARGETS, vocab, codebook, 10)
    assert loss.item() == pytest.approx(4.0)
    assert warnings() == 1
    other = tiny_vocab()  # whoever asks for it elsewhere is told, too
    spectrum_reconstruction_loss(tiny_logits(), TARGETS, other, codebook, 10)
    assert warnings() == 1
    for _ in range(2):
        prepare_codebooks(vocab, spectrum=codebook)
    assert warnings() == 2


def test_one_codebook_for_one_group_is_no_reason_to_warn(caplog):
    caplog.set_level(logging.WARNING, "treadle.astro")
    one = build_vocab_spec(2, 4, 2, ["a"], scalar_bins=2)
    spectrum_reconstruction_loss(torch.zeros(1, 1, 13), torch.tensor([[12]]), one, [[0.0], [4.0]], 10)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (torch.zeros(1, 4, 15), TARGETS, "targets of shape .1, 5. do not fit logits"),
        (torch.zeros(1, 5, 16), TARGETS, "logits of 16 ids for a vocabulary of 15"),
        (torch.zeros(1, 5, 15), TARGETS + 10, "targets from 15 to 23"),
        (torch.zeros(1, 5, 15), TARGETS.float(), "dtype torch.float32"),
    ],
)
def test_targets_that_do_not_fit_are_refused(logits, targets, message):
    with pytest.raises(ValueError, match=message):
        combined_loss(logits, targets, tiny_vocab(), IMAGE, SPECTRUM, CENTERS)


def test_positions_of_another_batch_are_refused():
    positions = choose_positions(TARGETS[:, :3], tiny_vocab())
    with pytest.raises(ValueError, match="5 positions, but positions were chosen from 3 targets"):
        tiny(tiny_logits(), positions=positions)


def test_small_pieces_and_blocks_change_nothing_but_rounding(monkeypatch):
    vocab, targets, books, hidden, head = random_case(batch=(6, 50))
    results = []
    for small in (False, True):
        if small:
            monkeypatch.setattr(losses, "FLOAT_LOGITS", 5 * vocab.vocab_size)
            monkeypatch.setattr(loss_terms, "FLOAT_LOGITS", 2 * vocab.vocab_size)
            monkeypatch.setattr(sampling, "_MAX_LOGITS", 40)
            monkeypatch.setattr(sampling, "_FREE_SLOTS", 0)
        logits = (hidden @ head.T).requires_grad_()
        loss, stats = combined_loss(logits, targets, vocab, *books)
        loss.backward()
        results.append((loss, logits.grad, stats["n_spec"], len(choose_positions(targets, vocab).blocks)))
    assert results[1][3] > 10 > results[0][3]
    torch.testing.assert_close(results[0][:2], results[1][:2], rtol=1e-5, atol=1e-8)


def test_the_one_tensor_of_the_logits_size_is_their_gradient(monkeypatch):
    for module in (losses, loss_terms):
        monkeypatch.setattr(module, "FLOAT_LOGITS", 2000)
    vocab, targets, books, hidden, head = random_case(batch=(10, 100))
    logits = (hidden @ head.T).requires_grad_()
    with NewTensors() as forward:
        loss, _ = combined_loss(logits, targets, vocab, *books, {"sample_k": 30})
    assert 2000 <= max(forward.sizes) < logits.numel() // 10
    with NewTensors() as backward:
        loss.backward()
    assert [size for size in backward.sizes if size >= logits.numel() // 10] == [logits.numel()]
