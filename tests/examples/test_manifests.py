"""Manifests of examples/kubernetes and examples/skypilot: their syntax, and that the commands in them parse."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from processes import python

yaml = pytest.importorskip("yaml")
EXAMPLES = Path(__file__).parents[2] / "examples"


def check_command(words, folder):
    """Parse what torchrun gets, and let treadle show the settings that it gets; return both."""
    from torch.distributed.run import get_args_parser

    assert words[0] == "torchrun"
    given = get_args_parser().parse_args(words[1:])
    assert (given.module, given.training_script) == (True, "treadle")
    shutil.copy(EXAMPLES.parent / "tests" / "slurm" / "fit_slowly.py", folder)
    settings = "{type: fit_slowly.Fit, max_steps: 4, device: cpu, workspace: run}"
    (folder / "fit.yaml").write_text(f"imports: [fit_slowly.py]\ntrainer: {settings}\n")
    shown = python("-m", "treadle", *given.training_script_args, "--show-settings", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    return given, shown.stdout


def test_the_job_of_kubernetes_starts_as_many_ranks_as_it_has_gpus(tmp_path):
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes" / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given, shown = check_command(container["command"], tmp_path)
    assert "/shared/runs/fit" in shown
    assert given.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert given.nnodes == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert given.rdzv_endpoint == f"{job['metadata']['name']}-0.{service['metadata']['name']}:29500"
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert int(container["env"][0]["value"]) < pod["terminationGracePeriodSeconds"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_task_of_skypilot_is_bash_and_names_what_it_uses(tmp_path):
    task = yaml.safe_load((EXAMPLES / "skypilot" / "train.yaml").read_text())
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    given, shown = check_command(shlex.split(task["run"]), tmp_path)
    assert given.standalone
    assert "s3://$BUCKET/runs/fit" in shown
    assert set(task["envs"]) == {"BUCKET"}
