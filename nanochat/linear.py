"""Bias-free matmuls in the dtype of their input. Shapes: C inputs, O outputs."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat.bov.compiled import Fused


def _one_row(x, weight):
    return (x.float() * weight.to(x.dtype).float()).sum(-1).to(x.dtype)


ONE_ROW = Fused(_one_row, dynamic=True)  # decoding on a CPU: one pass over the weight, half of oneDNN's time


def linear(x, weight):
    """x (..., C), weight (O, C), cast to the dtype of x -> (..., O)."""
    if ONE_ROW.compiled and x.numel() == x.size(-1) and x.device.type == "cpu" and x.dtype == torch.bfloat16:
        return ONE_ROW(x.view(1, -1), weight).view(*x.shape[:-1], -1)
    return F.linear(x, weight.to(x.dtype))


class Linear(nn.Linear):
    """A layer of `linear`; its weight stays in its own dtype (fp32) for the optimizer."""

    def forward(self, x):
        return linear(x, self.weight)
