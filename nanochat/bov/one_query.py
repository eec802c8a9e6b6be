"""The two passes over memory of attention with one query per row: scores over the keys, then a weighted sum of rows.

Both are bound by memory bandwidth when they read bf16 once and compute in fp32. On a CPU a compiled loop does that;
without a compiler pieces that fit the cache are converted first. On CUDA matmuls do it.
Shapes: B batch, H kv heads, G query heads of one kv head, T keys or rows, D head dim.
"""

import torch

from nanochat.bov.compiled import Fused

PIECE = 2**20  # elements converted to fp32 at a time, 4 MiB


def _row_products(q, k):
    return (q[:, :, :, None].float() * k[:, :, None].float()).sum(-1)


def _weighted_sum(w, rows):
    return (w[..., None] * rows[:, :, None].float()).sum(-2)


ROW_PRODUCTS = Fused(_row_products, dynamic=True)
WEIGHTED_SUM = Fused(_weighted_sum, dynamic=True)


def _pieces(rows):
    """(positions as a slice, rows there in fp32) of rows (B, H, T, D); each piece reuses the memory of the last one."""
    B, H, T, D = rows.shape
    length = min(T, max(16, PIECE // (B * H * D)))
    buffer = torch.empty(B, H, length, D, dtype=torch.float32, device=rows.device)
    for start in range(0, T, length):
        piece = rows[:, :, start : start + length]
        yield slice(start, start + length), buffer[:, :, : piece.size(2)].copy_(piece)


def scores(q, k):
    """Unscaled q k^T in fp32: q (B, H, G, D), k (B, H, T, D) -> (B, H, G, T)."""
    if q.dtype == torch.float32:
        return q @ k.mT
    if q.is_cuda:
        B, H, G, D = q.shape
        products = torch.bmm(q.reshape(B * H, G, D), k.reshape(B * H, -1, D).mT, out_dtype=torch.float32)
        return products.view(B, H, G, -1)
    if ROW_PRODUCTS.compiled:
        return ROW_PRODUCTS(q, k)
    products, q = torch.empty(*q.shape[:3], k.size(2)), q.float()
    for at, piece in _pieces(k):
        products[..., at] = q @ piece.mT
    return products


def weigh(w, rows):
    """Sum of rows by weights: w (B, H, G, T) in fp32, rows (B, H, T, D) -> (B, H, G, D) in fp32.

    On CUDA the weights are cast to the dtype of the rows.
    """
    if rows.dtype == torch.float32 or rows.is_cuda:
        return (w.to(rows.dtype) @ rows).float()
    if WEIGHTED_SUM.compiled:
        return WEIGHTED_SUM(w, rows)
    return sum(w[..., at] @ piece for at, piece in _pieces(rows))


def attend(q, k, v):
    """softmax(q k^T / sqrt(D)) v: q (B, N, 1, D), k and v (B, H, T, D) -> (B, N, 1, D)."""
    B, N, _, D = q.shape
    H = k.size(1)
    p = scores(q.reshape(B, H, N // H, D), k).mul_(D**-0.5).softmax(-1)
    return weigh(p, v).to(q.dtype).view(B, N, 1, D)
