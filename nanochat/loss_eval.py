"""Validation loss in bits per byte, which does not depend on the tokenizer."""

import math
from itertools import islice

import torch
import torch.distributed as dist

from nanochat.common import is_ddp_initialized


@torch.no_grad()
def evaluate_bpb(model, batches, steps, token_bytes):
    """Bits per byte of `model` over `batches` of (inputs, targets), each (B, T), summed over all ranks.

    `steps` batches are read; None reads a finite loader to its end. `token_bytes` (vocab_size,) holds the bytes of each
    token, 0 for those that do not count (special tokens); targets below 0 do not count either. Sums are kept in fp64
    and int64. Returns inf when no byte was counted. Raises ValueError when the loader ends before `steps`.
    """
    device = model.get_device()
    totals_on = torch.device("cpu") if device.type == "mps" else device  # MPS has no fp64
    nats = torch.zeros((), dtype=torch.float64, device=totals_on)
    num_bytes = torch.zeros((), dtype=torch.int64, device=totals_on)
    done = 0
    for inputs, targets in batches if steps is None else islice(batches, steps):
        loss = model(inputs, targets, loss_reduction="none").view(-1)
        targets = targets.view(-1)
        size = torch.where(targets >= 0, token_bytes[targets.clamp(min=0)], 0)
        nats += torch.where(size > 0, loss, 0).to(totals_on).sum(dtype=torch.float64)
        num_bytes += size.to(totals_on).sum(dtype=torch.int64)
        done += 1
    if steps is not None and done < steps:
        raise ValueError(f"the loader ended after {done} of {steps} evaluation batches; ask for fewer steps")
    if is_ddp_initialized():
        dist.all_reduce(nats)
        dist.all_reduce(num_bytes)
    total = num_bytes.item()
    return nats.item() / (math.log(2) * total) if total else math.inf
