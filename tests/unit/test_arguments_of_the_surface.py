"""Public constructors, and functions that build or read, refuse arguments of another type by name."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import nn

import treadle
from surface_kit import stored
from treadle import ConfigError
from treadle.errors.arguments import _annotated, _is_known, _parts_of

# What the step calls, what only the library makes, and what has rules that its module checks when it is used.
UNCHECKED = {
    "TrainerConfig", "TesterConfig", "ExtractorConfig", "load_npz_key", "build_trainer",
    "ConfigError", "NonFiniteError", "Answer", "Mixture", "LossPositions", "Codebook", "CrossPrediction",
    "CrossResult", "Survey", "SurveyTokenizers", "ImageTokenizer", "SpectrumTokenizer", "ScalarTokenizer",
    "Exported", "LLAResult", "LLAWindowResult", "SdssCatalog", "SpexSpectra", "Tecator", "XdfCutouts", "Evaluation",
    "Opened", "Predictions", "Results", "Run", "Picture", "Report", "Table", "ForeignCheckpoint", "Group", "Cursor",
    "StepOutput", "Uncertainty", "SmilesPrediction", "EncodedGraphs", "GraphStatistics", "PaddedGraphBatch",
    "PreparedBatch", "GraphEncoding", "GraphMetrics", "CosineKMeans", "VMFMixture", "SNVScaler", "TrainingSettings",
    "read_settings", "Population", "Total", "Weighted", "REPLACE", "Registry", "masked_mse", "masked_sse",
    "make_band_mask", "make_block_mask", "make_patch_mask", "snv", "cosine_schedule_with_warmup", "joint_loss",
    "cross_entropy_loss", "combined_loss", "combined_loss_from_hidden", "meaningful_loss",
    "image_reconstruction_loss", "scalar_reconstruction_loss", "spectrum_reconstruction_loss", "choose_positions",
    "sample_positions", "pad_batch", "format_time", "norm_gaia_id", "norm_splus_id", "is_statement",
    "cosine_similarity", "cosine_dissimilarity", "l2_normalize_rows", "vmf_logC", "vmf_bessel_ratio",
    "vmf_log_normalizer", "sinusoidal_positional_encoding", "restore_rng_state", "flatten_nested_dict",
    "key_average", "map_nested_tensor", "log_gradient_stats", "encode_sequence", "move_scalars_last", "find_latest",
    "listeners", "looks_only", "reaches_hooks", "control_group", "graph_from_smiles", "class_scores", "code_use",
    "explained_variance", "ridge_prediction", "Trainer", "tree_predictions", "token_values", "mixing_shares",
    "pretreatments", "hop_distances", "core_numbers", "collate_sequences", "loss_weight",
}  # fmt: skip


def public():
    """Every class and function of the recorded surface that is not left out, with the function that takes arguments."""
    for name, line in stored().items():
        home, _, last = name.rpartition(".")
        if line.startswith(("class (", "function (")) and last not in UNCHECKED and "(inherited" not in line:
            target = getattr(importlib.import_module(home), last)
            yield name, target


def cases():
    for name, target in public():
        taking = target.__init__ if isinstance(target, type) else target
        if not hasattr(taking, "__annotations__"):
            continue
        _, _, hints = _annotated(inspect.unwrap(taking), inspect.unwrap(taking).__module__ or target.__module__)
        for argument, hint in hints.items():
            kind = inspect.signature(inspect.unwrap(taking)).parameters.get(argument)
            variable = kind is None or kind.kind in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)
            if not variable and all(map(_is_known, _parts_of(hint))):
                yield name, target, argument


def test_every_argument_whose_type_is_known_is_checked():
    tried, silent = 0, []
    for name, target, argument in cases():
        tried += 1
        try:
            target(**{argument: object()})
        except ConfigError as error:
            silent += [] if str(error).startswith(f"{argument}=<object") else [f"{name}({argument}=): {error}"]
        except Exception as error:
            silent.append(f"{name}({argument}=): {type(error).__name__}: {error}")
    assert silent == []
    assert tried > 700


MODEL = nn.Linear(1, 1)


def optimizer():
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: treadle.Engine(optimizer(), MODEL, None), "^model=<SGD>: must be a torch.nn.Module"),
        (lambda: treadle.Engine(MODEL, MODEL, None), r"^optimizer=Linear.*must be an optimizer, such as"),
        (lambda: treadle.Engine(MODEL, optimizer(), MODEL), "^task=Linear.*must be a task"),
        (lambda: treadle.Engine(MODEL, torch.optim.SGD, None), "^optimizer=<class.*must be an optimizer"),
        (lambda: treadle.build_schedule(MODEL, total_steps=3), "^optimizer=Linear.*must be an optimizer"),
        (lambda: treadle.build_schedule(optimizer(), total_steps=True), "^total_steps=True: must be a whole number"),
        (lambda: treadle.build_schedule(optimizer(), total_steps="9"), "^total_steps='9': must be a whole number"),
        (lambda: treadle.SwaSchedule(MODEL, start=1, swa_lr=0.1), "^optimizer=Linear"),
        (lambda: treadle.SwaSchedule(optimizer(), start=1.5, swa_lr=0.1), "^start=1.5: must be a whole number"),
        (lambda: treadle.EpochTrainer(MODEL), "^engine=Linear.*must be a treadle.Engine"),
        (lambda: treadle.set_seed("1"), "^seed='1': must be a whole number"),
        (lambda: treadle.load_weights(True), "^path=True: must be a path"),
        (lambda: treadle.spectra.ChemoMAE(seq_len=64, nhead=-1), "^nhead=-1: must be at least 1"),
        (lambda: treadle.spectra.TrainerConfig(ema_decay="0.9"), "ema_decay='0.9'"),
        (lambda: treadle.astro.TrainingConfig(epochs=1.5), "^epochs=1.5: must be a whole number"),
        (lambda: treadle.graphs.PadBucket(graphs=0, rows=1, row_length=1, edges=1), "^graphs=0: must be at least 1"),
        (lambda: treadle.datasets.splits.split_by_group([1, 2, 3], val_fraction=-1), r"^val_fraction=-1: must lie in"),
    ],
)
def test_swapped_and_wrong_arguments_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"weight": "3"}, "^weight='3': must be the number of elements"),
        ({"weight": -1.0}, "^weight=-1.0: must be the number of elements"),
        ({"weight": float("nan")}, "^weight=nan: must be the number of elements"),
        ({"weight": True}, "^weight=True: must be the number of elements"),
        ({"records": [1]}, r"^records=\[1\]: must be a dict"),
        ({"records": 3.0}, "^records=3.0: must be a dict"),
        ({"reduction": None}, "^reduction=None: must be 'mean' or 'sum'"),
        ({"loss": 3.0}, "^loss: expected a 0-d tensor or None, got float"),
    ],
)
def test_an_output_of_a_step_that_does_not_fit_is_named_before_the_step(output, message):
    class Wrong:
        def step(self, model, batch, totals=None, generator=None):
            return treadle.StepOutput(**{"loss": model(batch).mean(), **output})

    model = nn.Linear(1, 1)
    before = model.weight.detach().clone()
    engine = treadle.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), Wrong(), device="cpu", progress=False)
    with pytest.raises(ConfigError, match=message):
        engine.run([torch.ones(2, 1)], max_steps=1)
    assert torch.equal(model.weight, before)
