"""Records of the loss terms of a step, and the reported values computed from their means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from treadle.astro.loss_terms import LossValues
from treadle.means import Total, Weighted

TERMS = ("ce", "img", "sca", "spec")


def records_of(values: LossValues) -> dict[str, Any]:
    """Return the terms of a micro-batch, each mean with its count; spectrum terms by group.

    Every term is present, with count 0 if it is disabled or has no positions, so that all ranks have the same names.

    Example:
        >>> import torch
        >>> values = LossValues(torch.tensor(1.0), {"ce": torch.tensor(1.0)}, {"ce": 4, "spec/a": 0})
        >>> records_of(values)["n_ce"], records_of(values)["n_spec"]
        (Total(value=4), {'a': Total(value=0)})
    """
    records: dict[str, Any] = {"loss_spec": {}, "n_spec": {}}
    for term, count in values.counts.items():
        mean, total = Weighted(values.means.get(term, math.nan), count), Total(count)
        name, _, group = term.partition("/")
        if group:
            records["loss_spec"][group], records["n_spec"][group] = mean, total
        else:
            records[f"loss_{name}"], records[f"n_{name}"] = mean, total
    return records


def records_of_stats(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of a user-supplied loss: ``loss_…`` weighted by its ``n_…``, which is summed.

    Example:
        >>> records_of_stats({"loss_ce": 2.0, "n_ce": 3, "temperature": 0.5})
        {'loss_ce': Weighted(value=2.0, weight=3), 'n_ce': Total(value=3), 'temperature': 0.5}
    """
    records: dict[str, Any] = {}
    for name, value in stats.items():
        count = stats.get(f"n_{name.removeprefix('loss_')}") if name.startswith("loss_") else None
        if name.startswith("n_"):
            records[name] = Total(value)
        else:
            records[name] = value if count is None else Weighted(value, count)
    return records


def numbers_of(means: Mapping[str, Any], weights: Mapping[str, float] | None) -> dict[str, Any]:
    """Return ``loss_total``, computed from the means of its terms, followed by the means and their counts.

    Args:
        means: ``loss`` and ``records``, means of the results of :func:`records_of` or :func:`records_of_stats`.
        weights: weights of ``img``, ``sca`` and ``spec``; None for the statistics of a user-supplied loss.

    Returns:
        A mean over nothing is NaN and counts as 0 in ``loss_total``, which is NaN if nothing was counted. For a
        user-supplied loss, ``loss_total`` is the mean of that loss.

    Example:
        >>> records = {"loss_ce": 2.0, "n_ce": 8.0, "loss_img": float("nan"), "n_img": 0.0, "loss_sca": 4.0,
        ...            "n_sca": 2.0, "loss_spec": {"a": 1.0, "b": 3.0}, "n_spec": {"a": 1.0, "b": 5.0}}
        >>> numbers_of({"records": records}, {"img": 1.0, "sca": 0.5, "spec": 1.0})["loss_total"]
        6.0
        >>> numbers_of({}, {})["n_spec"]
        0
    """
    records = dict(means.get("records", {}))
    if weights is None:
        counts = {name: int(value) for name, value in records.items() if name.startswith("n_")}
        return {"loss_total": means.get("loss", math.nan), **records, **counts}
    # A vocabulary without groups has no group means, and an epoch that was cut short may have none.
    records = {"loss_ce": math.nan, "loss_img": math.nan, "loss_sca": math.nan, "loss_spec": {}, **records}
    records = {"n_ce": 0, "n_img": 0, "n_sca": 0, "n_spec": {}, **records}
    groups = [mean for group, mean in records["loss_spec"].items() if records["n_spec"][group]]
    records["loss_spec"] = sum(groups) / len(groups) if groups else math.nan
    records["n_spec"] = sum(records["n_spec"].values())
    parts = [weights.get(term, 1.0) * records[f"loss_{term}"] for term in TERMS if records[f"n_{term}"]]
    return {
        "loss_total": sum(parts) if parts else math.nan,
        **{f"loss_{term}": records[f"loss_{term}"] for term in TERMS},
        **{f"n_{term}": int(records[f"n_{term}"]) for term in TERMS},
    }
