"""Tiny trainings in this process, and what tests ask of their folders."""

import os
import signal
from pathlib import Path

import pytest
import torch

from nanochat import metrics, stopping, train
from nanochat.checkpoint_manager import load_checkpoint
from scripts import base_train
from tiny import TINY, link_corpus, make_corpus


def flags(*more):
    return base_train.parser().parse_args([*TINY, *more])


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def base(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    return link_corpus(corpus, tmp_path)


@pytest.fixture(autouse=True)
def handlers():
    """A run listens to signals; afterwards they are the test runner's again."""
    before = {number: signal.getsignal(number) for number in stopping.STOPPING}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def go(*more):
    train.train(flags(*more))
    return Path(os.environ["NANOCHAT_BASE_DIR"], "base_checkpoints", "t")


def losses(folder, kind="train", field="loss"):
    return [entry[field] for entry in metrics.read_metrics(folder / "metrics.jsonl") if entry["kind"] == kind]


def weights(folder, step):
    return load_checkpoint(folder, step, torch.device("cpu"))[0]


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture
def finished(base):
    return go("--preset", "paper/bov", "--num-iterations", "8", "--save-every", "4")
