"""Bits per byte against a plain loop, with special and ignored targets, and over two ranks."""

import math
from multiprocessing import Manager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.loss_eval import evaluate_bpb
from ranks import spawn

BYTES = torch.tensor([0, 1, 2, 5, 1])  # token 0 is special


class TableLoss:
    """The loss of a target is a fixed number of nats, 0 for ignored ones."""

    nats = torch.tensor([100.0, 0.25, 1.5, 3.0, 0.1])

    def get_device(self):
        return torch.device("cpu")

    def __call__(self, inputs, targets, loss_reduction):
        assert loss_reduction == "none"
        loss = self.nats[targets.clamp(min=0)].masked_fill(targets < 0, 0.0)
        return loss.flatten()


def by_hand(batches):
    flat = [t for _, targets in batches for t in targets.flatten().tolist()]
    counted = [t for t in flat if t > 0]
    num_bytes = sum(BYTES[t].item() for t in counted)
    return sum(TableLoss.nats[t].item() for t in counted) / math.log(2) / num_bytes if num_bytes else math.inf


def batch(targets):
    targets = torch.tensor(targets)
    return torch.zeros_like(targets), targets


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 4), min_size=6, max_size=6), min_size=0, max_size=4), st.booleans())
def test_equals_a_loop_over_targets(rows, finite):
    batches = [batch([row[:3], row[3:]]) for row in rows]
    steps = None if finite else len(batches)
    assert evaluate_bpb(TableLoss(), iter(batches), steps, BYTES) == pytest.approx(by_hand(batches), rel=1e-6)


def test_reads_no_more_than_steps_and_says_when_there_are_fewer():
    batches = iter([batch([[1, 2]]), batch([[3, 3]]), batch([[4, 4]])])
    assert evaluate_bpb(TableLoss(), batches, 1, BYTES) == pytest.approx(1.75 / math.log(2) / 3)
    assert len(list(batches)) == 2
    with pytest.raises(ValueError, match="after 1 of 5"):
        evaluate_bpb(TableLoss(), [batch([[1, 2]])], 5, BYTES)


def test_infinite_loss_on_a_special_target_does_not_spoil_the_sum():
    model = TableLoss()
    model.nats = torch.tensor([math.inf, 1.0, 1.0, 1.0, 1.0])
    assert evaluate_bpb(model, [batch([[0, 1]])], None, BYTES) == pytest.approx(1 / math.log(2))


def test_long_sums_keep_small_losses():
    """In fp32, 2**24 nats swallow each further 0.25."""

    class Big(TableLoss):
        nats = torch.tensor([0.0, 0.25, 2.0**24, 1.0, 1.0])

    batches = [batch([[2]])] + [batch([[1]])] * 1000
    assert evaluate_bpb(Big(), batches, None, BYTES) * math.log(2) * 1002 == pytest.approx(2**24 + 250, rel=1e-9)


def _rank(rank, path, results):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mine = [[batch([[1, 2, 3]])], [batch([[4, -1, 0]]), batch([[3, 3, 2]])]][rank]
    results[rank] = evaluate_bpb(TableLoss(), mine, None, BYTES)
    dist.destroy_process_group()


def test_two_ranks_give_the_sum_over_both(tmp_path):
    with Manager() as manager:
        results = manager.dict()
        spawn(_rank, (tmp_path / "rendezvous", results))
        expected = by_hand([batch([[1, 2, 3]]), batch([[4, -1, 0]]), batch([[3, 3, 2]])])
        assert results[0] == results[1] == pytest.approx(expected, rel=1e-6)
