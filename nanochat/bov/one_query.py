"""The two passes over memory of attention with one query per row: scores over the keys, then a weighted sum of rows.

Both are bound by memory bandwidth when they read bf16 once and compute in fp32. On a CPU a compiled loop does that;
without a compiler pieces that fit the cache are converted first. On CUDA matmuls do it.
Shapes: B batch, H kv heads, G query heads of one kv head, T keys or rows, D head dim.
"""

import torch

from nanochat.bov.compiled import Fused

PIECE = 1024  # keys of one head converted to fp32 at a time: 512 KiB at D = 128


def _row_products(q, k):
    return (q[:, :, :, None].float() * k[:, :, None].float()).sum(-1)


def _weighted_sum(w, rows):
    return (w[..., None] * rows[:, :, None].float()).sum(-2)


ROW_PRODUCTS = Fused(_row_products, dynamic=True)
WEIGHTED_SUM = Fused(_weighted_sum, dynamic=True)


def scores(q, k):
    """Unscaled q k^T in fp32: q (B, H, G, D), k (B, H, T, D) -> (B, H, G, T)."""
    if q.is_cuda and q.dtype != torch.float32:
        B, H, G, D = q.shape
        products = torch.bmm(q.reshape(B * H, G, D), k.reshape(B * H, -1, D).mT, out_dtype=torch.float32)
        return products.view(B, H, G, -1)
    if q.dtype == torch.float32:
        return q @ k.mT
    if ROW_PRODUCTS.compiled:
        return ROW_PRODUCTS(q, k)
    return torch.cat([q.float() @ piece.float().mT for piece in k.split(PIECE, dim=2)], dim=-1)


def weigh(w, rows):
    """Sum of rows by weights: w (B, H, G, T) fp32, rows (B, H, T, D) -> (B, H, G, D) in fp32.

    Without a compiled loop the weights are cast to the dtype of the rows.
    """
    if WEIGHTED_SUM.compiled and rows.dtype != torch.float32:
        return WEIGHTED_SUM(w, rows)
    return (w.to(rows.dtype) @ rows).float()


def attend(q, k, v):
    """softmax(q k^T / sqrt(D)) v: q (B, N, 1, D), k and v (B, H, T, D) -> (B, N, 1, D)."""
    B, N, _, D = q.shape
    H = k.size(1)
    p = scores(q.reshape(B, H, N // H, D), k).mul_(D**-0.5).softmax(-1)
    return weigh(p, v).to(q.dtype).view(B, N, 1, D)
