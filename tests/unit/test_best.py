from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.engine.best import BestRule, EarlyStopping, resolve_mode
from treadle.errors import ConfigError


def feed(rule, values):
    """Feed values until the rule stops; return the epoch at which it did, or None."""
    for epoch, value in enumerate(values, start=1):
        rule.update(epoch, value)
        if rule.should_stop:
            return epoch
    return None


def test_epochs_before_the_start_do_not_count_against_the_patience():
    rule = BestRule("loss", patience=3, start_epoch=5)
    assert feed(rule, [1] + [2] * 9) == 7
    assert (rule.best, rule.best_epoch) == (1, 1)


def test_an_improvement_resets_the_count_of_early_stopping():
    stop = EarlyStopping(patience=2)
    assert [stop(value) for value in (1, 1, 1, 0.5, 0.6, 0.6)] == [False, False, True, False, False, True]
    assert stop.best == 0.5


def test_nan_is_no_improvement_and_does_not_stay_best():
    rule = BestRule("loss", patience=2)
    assert feed(rule, [math.nan, 1, math.nan, 0.5, math.nan, math.nan]) == 6
    assert (rule.best, rule.best_epoch) == (0.5, 4)


def test_a_maximised_metric_keeps_its_largest_value():
    rule = BestRule("acc", patience=3)
    assert feed(rule, [0.1, 0.2, 0.2, 0.3, 0.25, 0.25, 0.25]) == 7
    assert (rule.best, rule.best_epoch) == (0.3, 4)


def test_small_steps_do_not_add_up_to_an_improvement_nor_move_the_best():
    rule = BestRule("loss", min_delta=0.1, patience=2)
    assert feed(rule, [1, 0.95, 0.91, 0.90, 0.89]) == 3
    assert rule.best == 1


def test_the_bar_is_the_best_minus_the_delta_and_strict():
    rule = BestRule("loss", min_delta=0.1)
    assert [rule.update(i, v) for i, v in enumerate([1.0, 0.9, 1.0 - 0.1, 0.89], start=1)] == [True, False, False, True]
    rule = BestRule("acc", min_delta=0.25)
    assert [rule.update(i, v) for i, v in enumerate([0.5, 0.75, 0.7500001], start=1)] == [True, False, True]


@given(st.floats(0.01, 100), st.floats(0, 10), st.floats(0, 100))
def test_improved_means_exactly_what_the_rule_says(best, delta, value):
    low = BestRule("loss", min_delta=delta)
    low.update(1, best)
    assert low.update(2, value) == (value < best - delta)
    high = BestRule("acc", min_delta=delta)
    high.update(1, best)
    assert high.update(2, value) == (value > best + delta)


@pytest.mark.parametrize("metric", ["loss", "acc"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_never_improves_in_either_direction(metric, bad):
    rule = BestRule(metric, patience=3)
    assert not rule.update(1, bad)
    assert (rule.best_epoch, rule.count) == (None, 1)
    assert rule.update(2, 7.0)
    assert not rule.update(3, bad)
    assert (rule.best, rule.best_epoch, rule.count) == (7.0, 2, 1)


@pytest.mark.parametrize(("metric", "values", "best"), [("loss", [3, 2, 1], 1), ("acc", [-3, -2, -1], -1)])
def test_a_first_nan_is_beaten(metric, values, best):
    rule = BestRule(metric)
    feed(rule, [math.nan, *values])
    assert (rule.best, rule.best_epoch) == (best, 4)


def test_the_best_starts_at_the_infinity_that_everything_beats():
    assert BestRule("loss").best == math.inf
    assert BestRule("acc").best == -math.inf


MIN = "loss val_loss eval_nll_loss train/loss val/x_loss mse mae rmse sse nll bic aic error err ppl perplexity test_mae"
MAX = (
    "accuracy acc f1 f1_macro f1_micro auc roc_auc ap map recall precision r2 iou psnr ssim loglik precision@1 "
    "val_precision@10 eval/accuracy val_f1_macro VAL/AUC"
)


@pytest.mark.parametrize("name", MIN.split())
def test_names_of_losses_and_errors_are_minimised(name):
    assert resolve_mode(name) == BestRule(name).mode == "min"


@pytest.mark.parametrize("name", MAX.split())
def test_names_of_scores_are_maximised(name):
    assert resolve_mode(name) == BestRule(name).mode == "max"


@pytest.mark.parametrize("name", ["score", "val_", "", "lossy", "precision@", "precision@k", "my_acc", "loss_total_x"])
def test_a_name_whose_direction_is_unknown_needs_a_mode(name):
    with pytest.raises(ConfigError, match="mode="):
        BestRule(name)
    assert BestRule(name, "max").mode == "max"


def test_a_given_mode_wins_over_the_name():
    assert BestRule("loss", "max").mode == "max"


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "up"}, {"min_delta": -0.1}, {"min_delta": math.nan}, {"patience": 0}, {"patience": -1},
        {"patience": 1.5}, {"patience": "3"},
    ],
)  # fmt: skip
def test_a_setting_outside_its_range_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        BestRule("loss", **wrong)


def test_no_patience_never_stops():
    rule = BestRule("loss")
    assert feed(rule, [1.0] + [2.0] * 500) is None
    assert rule.count == 500


def test_a_missing_metric_is_refused_and_the_present_ones_are_named():
    with pytest.raises(ConfigError, match=r"'typo_loss'.*epoch, train_loss"):
        BestRule("typo_loss").value_in({"epoch": 1, "train_loss": 0.5})


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_restored_rule_stops_at_the_same_epoch(cut):
    values = [1, 2, 2, 0.9, 1, 1, 1]
    straight, first, second = (BestRule("loss", patience=3) for _ in range(3))
    for epoch, value in enumerate(values, start=1):
        straight.update(epoch, value)
    for epoch, value in enumerate(values[:cut], start=1):
        first.update(epoch, value)
    second.load_state_dict(first.state_dict())
    for epoch, value in enumerate(values[cut:], start=cut + 1):
        second.update(epoch, value)
    assert second.state_dict() == straight.state_dict()
    assert second.should_stop is straight.should_stop is True


def test_early_stopping_goes_on_from_its_state():
    first, second = EarlyStopping(patience=2, start_epoch=3), EarlyStopping(patience=2, start_epoch=3)
    assert [first(v) for v in (1, 2)] == [False, False]
    second.load_state_dict(first.state_dict())
    assert [second(v) for v in (2, 2)] == [False, True]


@pytest.mark.parametrize("other", [BestRule("val_mae"), BestRule("loss", "max")])
def test_a_state_of_another_metric_or_direction_is_refused(other):
    with pytest.raises(ConfigError, match="loss"):
        BestRule("loss").load_state_dict(other.state_dict())


def test_a_tensor_is_taken_as_a_number():
    rule = BestRule("loss")
    assert rule.update(1, torch.tensor(0.5))
    assert type(rule.best) is float
