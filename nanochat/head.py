"""The soft-capped head: logits, and the cross-entropy without ever holding all logits on a CPU.

Shapes: B batch, T time, R = B*T rows, C n_embd, V vocab (weights padded to a multiple of 64).
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nanochat.bov.compiled import Fused
from nanochat.linear import linear

SOFTCAP = 15.0
ROWS_PER_CHUNK = 512  # of one matmul
ROWS_IN_CACHE = 128  # of one element-wise pass


def _cap(logits):
    return SOFTCAP * torch.tanh(logits / SOFTCAP)


def head_logits(x, weight, vocab_size):
    """x (B, T, C), weight (V_padded, C) -> logits (B, T, vocab_size) in fp32, within +-15."""
    return _cap(linear(x, weight)[..., :vocab_size].float())


def head_loss(x, weight, targets, vocab_size, reduction="mean"):
    """Cross-entropy of targets (B, T), -1 ignored, from x (B, T, C): a scalar, or (B*T,) for reduction "none"."""
    rows, targets = x.flatten(0, 1), targets.flatten()
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction {reduction!r}: use mean, sum or none")
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if x.device.type != "cpu" or (reduction == "none" and learns):
        logits = head_logits(rows, weight, vocab_size)
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction)
    losses = _ChunkedLoss.apply(rows, weight, targets, vocab_size, reduction == "mean", learns)
    return losses if reduction == "none" else losses.sum()


def _capped(logits):
    """SOFTCAP * tanh(logits / SOFTCAP) in fp32, from one exponential."""
    return SOFTCAP - 2 * SOFTCAP / (torch.exp(logits.float() * (2 / SOFTCAP)) + 1)


@Fused
def _partition(logits):
    """Sum over the vocabulary of exp(capped logits): (R, V) -> (R,). The cap bounds the exponent: no maximum needed."""
    return torch.exp(_capped(logits)).sum(1)


@Fused
def _partition_and_gradient_(logits, share):
    """The same; `logits` becomes share (R,) * the gradient of the sum's logarithm by them, in their dtype (R, V)."""
    capped = _capped(logits)
    weight = torch.exp(capped)
    total = weight.sum(1)
    slope = 1 - (capped / SOFTCAP).square()
    logits.copy_(weight * slope * (share / total)[:, None])
    return total


def _by_pieces(function, logits, *per_row):
    """`function` over pieces of rows small enough to stay in cache between its passes -> (R,)."""
    pieces = zip(*(t.split(ROWS_IN_CACHE) for t in (logits, *per_row)), strict=True)
    return torch.cat([function(*piece) for piece in pieces])


class _ChunkedLoss(torch.autograd.Function):
    """Weighted per-row losses, a chunk at a time; the gradient is made in the same pass and only scaled in backward.

    Backward needs equal output gradients of all rows, which a sum gives.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, mean, needs_grad):
        w = weight[:vocab_size].to(x.dtype)
        share = (targets >= 0).float()
        share = share / share.sum().clamp_min(1) if mean else share
        targets = targets.clamp_min(0)
        losses = torch.empty(x.size(0), dtype=torch.float32)
        dx, dw = (torch.empty_like(x), torch.zeros_like(weight)) if needs_grad else (None, None)
        for start in range(0, x.size(0), ROWS_PER_CHUNK):
            part = slice(start, start + ROWS_PER_CHUNK)
            logits, target, weigh = F.linear(x[part], w), targets[part, None], share[part]
            hit = _capped(logits.gather(1, target)).squeeze(1)
            if not needs_grad:
                losses[part] = (_by_pieces(_partition, logits).log() - hit) * weigh
                continue
            total = _by_pieces(_partition_and_gradient_, logits, weigh)
            losses[part] = (total.log() - hit) * weigh
            at_target = (hit.exp() / total - 1) * (1 - (hit / SOFTCAP).square()) * weigh
            logits.scatter_(1, target, at_target[:, None].to(logits.dtype))  # from here on the gradient
            torch.mm(logits, w, out=dx[part])
            dw[:vocab_size] += torch.mm(logits.t(), x[part])
        ctx.save_for_backward(dx, dw)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        return dx * grad[0].to(dx.dtype), dw * grad[0], None, None, None, None
