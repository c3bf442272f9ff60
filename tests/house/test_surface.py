"""The public names, and the examples in their docstrings."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import types

import pytest

import treadle
from helpers import OPTIONAL_PACKAGES
from treadle.seed import ReproducibilityContext

PROMISED = {
    "BaseHook", "BaseTrainer", "BestRule", "CheckpointError", "CheckpointingHook", "ConfigError", "DataExhaustedError",
    "EmaHook", "Engine", "EpochTrainer", "LoggingHook", "NonFiniteError", "ParallelConfig", "ProgressHook",
    "RankLostError", "ReproducibilityContext", "StepOutput", "StuckRankHook", "Task", "Total", "Trainer",
    "TreadleError", "Weighted", "flatten_nested_dict", "get_device", "key_average", "load_foreign", "load_weights",
    "map_nested_tensor", "parallelize", "read_foreign", "set_seed", "steps_per_epoch", "verify_checkpoint",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "treadle", "treadle.spectra", "treadle.graphs", "treadle.astro", "treadle.text", "treadle.hooks",
        "treadle.checkpoint", "treadle.data", "treadle.exchange", "treadle.functional", "treadle.builder",
        "treadle.config",
    ],
)  # fmt: skip
def test_all_is_complete_and_every_name_is_there(name):
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert [public for public in module.__all__ if not hasattr(module, public)] == []
    present = {
        public
        for public, value in vars(module).items()
        if not public.startswith("_") and not isinstance(value, types.ModuleType) and public != "annotations"
    }
    assert present - set(module.__all__) == set()


@pytest.mark.parametrize("name", ["treadle", "treadle.spectra", "treadle.graphs", "treadle.astro", "treadle.text"])
def test_all_is_sorted(name):
    names = importlib.import_module(name).__all__
    assert names == sorted(names)


def test_the_promised_names_are_at_the_root():
    assert PROMISED - set(treadle.__all__) == set()


@pytest.mark.parametrize("name", ["astro", "builder", "config", "datasets", "graphs", "spectra", "text"])
def test_packs_come_with_the_root_when_they_are_asked_for(name, monkeypatch):
    module = importlib.import_module(f"treadle.{name}")
    monkeypatch.delattr(treadle, name)  # as it is before anything has imported it
    assert getattr(treadle, name) is module


def test_a_name_that_is_not_there_is_no_attribute_of_the_root():
    assert not hasattr(treadle, "spectrum")


def test_a_packs_trainer_is_its_trainer():
    from treadle import astro, graphs, spectra

    assert astro.Trainer is astro.AstroTrainer
    assert spectra.Trainer is spectra.SpectraTrainer
    assert graphs.Trainer is graphs.GraphTrainer


def module_names():
    found = pkgutil.walk_packages(treadle.__path__, "treadle.")
    names = [module.name for module in found if not module.name.endswith("__main__")]
    if importlib.util.find_spec("triton") is None:  # it comes with torch for CUDA only
        names.remove("treadle.astro.nll_kernel")
    return ["treadle", *names]


# torch_geometric compiles functions with torch.jit.script when it is imported, which torch calls deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", module_names())
def test_the_examples_in_docstrings_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] in OPTIONAL_PACKAGES:
            pytest.skip(f"needs {error.name}")
        raise
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    report: list[str] = []
    with ReproducibilityContext(0):
        for example in doctest.DocTestFinder(exclude_empty=True).find(module, name):
            runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_examples_are_found_at_all():
    finder = doctest.DocTestFinder()
    counted = sum(len(test.examples) for test in finder.find(importlib.import_module("treadle.nested")))
    assert counted > 3
