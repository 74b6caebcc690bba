"""The examples for clusters start torchrun and logitless with arguments that both take, and their parts fit."""

import argparse
import os
import subprocess
from pathlib import Path

import yaml
from torch.distributed.run import parse_args

from logitless.cli.train import add_arguments

EXAMPLES = Path(__file__).parents[2] / "examples"


def _started(arguments):
    """The arguments of torchrun and of ``logitless train``."""
    of_torchrun = parse_args(arguments)
    assert (of_torchrun.module, of_torchrun.training_script) == (True, "logitless")
    command, *rest = of_torchrun.training_script_args
    assert command == "train"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return of_torchrun, parser.parse_args(rest)


def test_a_slurm_job_starts_a_torchrun_on_each_node_that_meet_at_the_first(tmp_path):
    for name, prints in (("scontrol", "printf 'n7\\nn8\\n'"), ("srun", 'printf "%s\\n" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{prints}\n")
        (tmp_path / name).chmod(0o700)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[7-8]"}
    environment |= {"SLURM_NNODES": "2", "SLURM_JOB_ID": "5"}
    script = ["bash", str(EXAMPLES / "slurm.sh"), "a.yaml", "--set", "parallel.replicate=2"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    of_srun, _, rest = done.stdout.partition("torchrun\n")
    assert of_srun == "--wait\n60\n"  # or the others are ended before they say which node is lost
    of_torchrun, of_train = _started(rest.splitlines())
    assert (of_torchrun.nnodes, of_torchrun.nproc_per_node) == ("2", "gpu")
    assert (of_torchrun.rdzv_endpoint, of_torchrun.rdzv_id) == ("n7:29500", "5")
    assert (str(of_train.recipe), of_train.resume_or_start) == ("a.yaml", True)


def test_the_pods_of_a_kubernetes_job_find_each_other_and_have_a_gpu_for_each_process():
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    program, *arguments = container["command"]
    assert program == "torchrun"
    of_torchrun, of_train = _started(arguments)
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}  # the label that a Job gives its pods
    assert of_torchrun.rdzv_endpoint.split(":")[0] == f"{name}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert int(of_torchrun.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(of_torchrun.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert of_train.resume_or_start
