"""Two GPUs through NCCL: the weights of one process, exact resume from shards, one decision, and no waiting."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from ranks import TORCHRUN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpus")
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    script = str(Path(__file__).with_name("on_gpus.py"))
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node=2", script, str(folder)], capture_output=True, text=True, env=environment,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
class TestTwoGpus:
    def test_weights_are_those_of_one_process(self, found, kind):
        assert all(rank[kind]["beside one process"] < 1e-4 for rank in found), found

    def test_the_same_run_twice_has_the_same_bits(self, found, kind):
        assert [rank[kind]["twice"] for rank in found] == [0.0, 0.0]

    def test_captured_steps_have_the_bits_of_eager_ones(self, found, kind):
        assert [rank[kind]["captured"] for rank in found] == [0.0, 0.0]

    def test_a_run_that_was_cut_ends_as_one_that_was_not(self, found, kind):
        assert [rank[kind]["resumed"] for rank in found] == [0.0, 0.0]

    def test_a_nan_on_one_rank_is_an_error_on_both(self, found, kind):
        assert [rank[kind]["nan"] for rank in found] == ["NonFiniteError", "NonFiniteError"]

    def test_no_step_waits_for_the_device(self, found, kind):
        assert [rank[kind]["waits"] for rank in found] == ["none", "none"]
