"""What the commands of packs refuse on ranks, without launching any."""

from __future__ import annotations

import pytest
import torch

from treadle import distributed
from treadle.errors import ConfigError
from treadle.runs import ranks
from treadle.runs.folder import finished_metrics
from treadle.runs.pack import newest_checkpoint


@pytest.fixture
def on_gpus(monkeypatch):
    """Rank 1 of two, which talk through NCCL."""
    monkeypatch.setattr(distributed, "is_distributed", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "nccl")
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    monkeypatch.setattr(ranks, "get_device", lambda asked: torch.device(asked or "cuda:1"))


def test_each_rank_has_the_gpu_of_its_own(on_gpus):
    assert ranks.device_of_rank(None) == torch.device("cuda:1")
    with pytest.raises(ConfigError, match=r"--device cuda:0: under torchrun each rank has its own GPU.*cuda:1"):
        ranks.device_of_rank("cuda:0")
    with pytest.raises(ConfigError, match=r"--device cpu: .*set CUDA_VISIBLE_DEVICES="):
        ranks.device_of_rank("cpu")


def test_a_setting_that_is_newer_than_a_finished_run_counts_as_none(tmp_path):
    (tmp_path / "metrics.json").write_text('{"config": {"epochs": 2, "training": {"lr": 0.1}}}')
    assert finished_metrics(tmp_path, {"epochs": 2, "training": {"lr": 0.1, "parallel": None}}) is not None
    assert finished_metrics(tmp_path, {"epochs": 2, "training": {"lr": 0.1, "parallel": "fsdp"}}) is None
    assert finished_metrics(tmp_path, {"epochs": 3, "training": {"lr": 0.1}}) is None


@pytest.mark.parametrize("name", ["checkpoint_latest.pt", "checkpoint_latest"])
def test_the_start_of_a_text_run_names_the_newest_file_or_folder_of_shards(name, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / name).symlink_to("checkpoint_step_7")
    assert newest_checkpoint(tmp_path, ("", "lora")) == f"resumes from {tmp_path / 'checkpoints' / 'checkpoint_step_7'}"
