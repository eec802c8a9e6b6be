"""Trainings on several ranks."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ranks
from models import randomise_
from nanochat import metrics, train
from nanochat.common import compute_cleanup
from tiny import TINY
from trainings import assert_same_weights, base, corpus, flags, go, handlers, losses  # noqa: F401


def worker(rank, world_size, port, out, more, steps, resume_from):
    """Train `steps` on one of several ranks; writes losses, first averaged gradients and final weights."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if world_size == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
    torch.set_num_threads(1)
    run = train.build(
        flags("--num-iterations", "9", *more, *(["--resume-from-step", str(resume_from)] if resume_from else []))
    )
    if not resume_from:
        randomise_(run.model)
    grads, update = {}, run.optimizer.step

    def step_and_note():
        if not grads:
            for name, p in run.model.named_parameters():
                grads[name] = p.grad.clone()
                if world_size > 1:
                    torch.distributed.all_reduce(grads[name])
                    grads[name] /= world_size
        update()

    run.optimizer.step = step_and_note
    result = [train.train_step(run) for _ in range(steps)]
    train.save(run)
    if world_size > 1:
        torch.distributed.barrier()
    torch.save({"losses": result, "grads": grads, "weights": run.model.state_dict()}, out / f"{world_size}_{rank}.pt")
    compute_cleanup()


def spawn(world_size, out, more, steps=5, resume_from=None):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks.spawn(worker, (world_size, port, out, more, steps, resume_from), world_size)
    return [torch.load(out / f"{world_size}_{rank}.pt", weights_only=True) for rank in range(world_size)]


@pytest.mark.parametrize("preset", ["paper/bov", "upstream"])
def test_two_ranks_do_what_one_does_and_stay_bit_identical(preset, base, tmp_path):
    more = ["--preset", preset, "--device-batch-size", "2"]
    (alone,), (first, second) = (spawn(n, tmp_path, [*more, "--model-tag", f"on{n}"]) for n in (1, 2))
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    for name, grad in alone["grads"].items():
        assert (first["grads"][name] - grad).norm() <= 1e-6 * grad.norm(), name
    assert_same_weights(first["weights"], second["weights"])
    assert first["losses"] == second["losses"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_resumes_on_another_number_of_ranks(before, after, base, tmp_path):
    more = ["--preset", "paper/bov", "--device-batch-size", "2"]
    (whole,) = spawn(1, tmp_path, [*more, "--model-tag", "whole"], steps=8)
    spawn(before, tmp_path, more, steps=4)
    continued = spawn(after, tmp_path, more, steps=4, resume_from=4)
    assert continued[0]["losses"] == pytest.approx(whole["losses"][4:], rel=1e-4)


def test_torchrun_on_cpu_averages_over_gloo(base):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "scripts.base_train",
    ]
    flow = [*TINY, "--num-iterations", "4", "--preset", "paper/bov", "--save-every", "2"]
    done = subprocess.run(
        [*command, *flow], capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    folder = base / "base_checkpoints" / "t"
    alone = losses(go(*flow[:-2], "--model-tag", "alone").parent / "alone")
    assert losses(folder) == pytest.approx(alone, rel=1e-4)
    assert metrics.read_metrics(folder / "metrics.jsonl")[0]["ranks"] == 2
