"""The soft-capped head: logits, and the cross-entropy without ever holding all logits on a CPU.

Shapes: B batch, T time, R = B*T rows, C n_embd, V vocab (weights padded to a multiple of 64).
"""

import torch
import torch.nn.functional as F

SOFTCAP = 15.0
ROWS_PER_CHUNK = 512


def _cap(logits):
    return SOFTCAP * torch.tanh(logits / SOFTCAP)


def head_logits(x, weight, vocab_size):
    """x (B, T, C), weight (V_padded, C) -> logits (B, T, vocab_size) in fp32, within +-15."""
    return _cap(F.linear(x, weight.to(x.dtype))[..., :vocab_size].float())


def head_loss(x, weight, targets, vocab_size, reduction="mean"):
    """Cross-entropy of targets (B, T), -1 ignored, from x (B, T, C): a scalar, or (B*T,) for reduction "none"."""
    rows, targets = x.flatten(0, 1), targets.flatten()
    if x.device.type != "cpu" or (reduction == "none" and torch.is_grad_enabled() and x.requires_grad):
        logits = head_logits(rows, weight, vocab_size)
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction)
    losses = _ChunkedLoss.apply(rows, weight, targets, vocab_size, reduction == "mean")
    return losses if reduction == "none" else losses.sum()


class _ChunkedLoss(torch.autograd.Function):
    """Per-row losses, chunk by chunk in cache; the gradient is made in the same pass and only scaled in backward.

    Backward needs equal output gradients of all rows, which a sum gives.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, mean):
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        w = weight.to(x.dtype)
        w = w[:vocab_size]
        valid = targets >= 0
        safe = targets.clamp_min(0)
        losses = torch.empty(x.size(0), dtype=torch.float32)
        share = 1.0 / valid.sum().clamp_min(1) if mean else torch.ones(())
        if needs_grad:
            dx = torch.empty_like(x)
            dw = torch.zeros(weight.shape, dtype=torch.float32)
        for start in range(0, x.size(0), ROWS_PER_CHUNK):
            part = slice(start, start + ROWS_PER_CHUNK)
            z = F.linear(x[part], w).float().div_(SOFTCAP).tanh_()
            scale = valid[part] * share
            picked = z.gather(1, safe[part, None]).squeeze(1)
            p = z * SOFTCAP
            lse = p.logsumexp(1)
            losses[part] = (lse - SOFTCAP * picked) * scale
            if needs_grad:
                p.sub_(lse[:, None]).exp_()
                p.scatter_add_(1, safe[part, None], p.new_full((len(p), 1), -1.0))
                slope = z.square_().neg_().add_(1.0)
                dlogits = p.mul_(slope).mul_(scale[:, None]).to(x.dtype)
                torch.mm(dlogits, w, out=dx[part])
                dw[:vocab_size] += torch.mm(dlogits.t(), x[part])
        if needs_grad:
            ctx.save_for_backward(dx, dw.to(weight.dtype))
        return losses

    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        factor = grad[0]
        return dx * factor.to(dx.dtype), dw * factor, None, None, None
