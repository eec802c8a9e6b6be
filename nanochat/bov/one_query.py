"""The two passes over memory of attention with one query per row: scores over the keys, then a weighted sum of rows.

Both are bound by memory bandwidth as long as bf16 is read once and added up in fp32. On a CPU the scores want a
compiled loop (without a compiler, pieces that fit the cache are converted first), and the sum is torch's embedding_bag,
which reads rows by index while it adds them: of a table by token, of a V cache by position. No row is copied.
Shapes: B batch, H kv heads, G query heads of one kv head, T keys, R rows of a table, D head dim.
"""

import torch
import torch.nn.functional as F

from nanochat.bov.compiled import Fused

PIECE = 2**20  # elements converted to fp32 at a time, 4 MiB
# Up to so many queries of one kv head a pass for each, over rows in cache, beats a matmul over converted pieces.
SCORED_ALONE, SUMMED_ALONE = 4, 16


def _row_products(q, k, scale):
    return (q[:, :, :, None].float() * k[:, :, None].float()).sum(-1) * scale


ROW_PRODUCTS = Fused(_row_products, dynamic=True)


def scores(q, k):
    """q k^T / sqrt(D) in fp32: q (B, H, G, D), k (B, H, T, D) -> (B, H, G, T)."""
    scale = q.size(3) ** -0.5
    if q.dtype == torch.float32:
        return (q * scale) @ k.mT
    if q.device.type not in ("cpu", "cuda"):
        return (q.float() * scale) @ k.float().mT
    if q.is_cuda:
        B, H, G, D = q.shape
        products = torch.bmm(q.reshape(B * H, G, D), k.reshape(B * H, -1, D).mT, out_dtype=torch.float32)
        return products.view(B, H, G, -1).mul_(scale)
    if ROW_PRODUCTS.compiled and q.size(2) <= SCORED_ALONE:
        return ROW_PRODUCTS(q, k, scale)
    B, H, T, D = k.shape
    length = min(T, max(16, PIECE // (B * H * D)))
    buffer = torch.empty(
        B, H, length, D, dtype=torch.float32
    )  # one for all pieces: fresh memory costs more than the sum
    products, q = torch.empty(*q.shape[:3], T, dtype=torch.float32), q.float() * scale
    for start in range(0, T, length):
        piece = k[:, :, start : start + length]
        products[..., start : start + length] = q @ buffer[:, :, : piece.size(2)].copy_(piece).mT
    return products


def weigh(w, rows, index):
    """Sum of rows by weights: w (B, H, G, T) fp32, rows (R, H, D), index (B, T) or (1, T) -> (B, H, G, D).

    The result has the dtype of `rows`, sums are in fp32. Rows of a head are read in any layout.
    """
    H, D = rows.shape[1:]
    if not _has_bags(w, rows):
        return _weigh_pieces(w, rows, index)
    row, head = (stride // D for stride in rows.stride()[:2])
    places = torch.add(torch.arange(H, dtype=torch.int32)[:, None] * head, index.int()[:, None], alpha=row)
    return _sum_bags(w, _in_rows(rows), *_bags(w.shape, places))


def weigh_values(w, v, bags=None):
    """The same for values in their order, v (B, H, T, D): -> (B, H, G, D). bags: value_bags(w, v), if kept."""
    bags = bags or value_bags(w, v)
    return (w.to(v.dtype) @ v).to(v.dtype) if bags is None else _sum_bags(w, *bags)


def value_bags(w, v):
    """Where the rows of v lie in memory, for weights of w's shape; serves as long as that memory. None: no bags."""
    if not _has_bags(w, v):
        return None
    B, H, T, D = v.shape
    batch, head, row = (stride // D for stride in v.stride()[:3])
    start = torch.arange(B, dtype=torch.int32)[:, None] * batch + torch.arange(H, dtype=torch.int32) * head
    return _in_rows(v), *_bags(w.shape, start[..., None] + torch.arange(0, T * row, row, dtype=torch.int32))


def _has_bags(w, rows) -> bool:
    """Whether embedding_bag serves: on a CPU, few queries, int32 places, and rows whose memory is a matrix (R', D)."""
    D = rows.size(-1)
    small = max(w.numel(), rows.untyped_storage().nbytes() // (D * rows.itemsize)) < 2**31
    whole = rows.stride(-1) == 1 and not any(stride % D for stride in rows.stride()[:-1])
    return rows.device.type == "cpu" and w.size(2) <= SUMMED_ALONE and small and whole


def _in_rows(rows):
    """The memory of rows (..., D) as a matrix (R', D) that begins at its first element."""
    D = rows.size(-1)
    last = sum((size - 1) * stride for size, stride in zip(rows.shape[:-1], rows.stride()[:-1], strict=True)) // D
    return rows.as_strided((last + 1, D), (D, 1))


def take(rows, index):
    """rows (R, H, D), index (...) -> (..., H, D)."""
    if rows.stride(0) == rows.size(1) * rows.size(2) and rows.is_contiguous():
        return F.embedding(index, rows.flatten(1)).unflatten(-1, rows.shape[1:])
    return rows[index.long()]


def _bags(shape, places):
    """One bag per query: (B, H, G, T) and places (B or 1, H, T) int32 -> places (B H G T) and where each bag begins."""
    B, H, G, T = shape
    bags = B * H * G
    parts = bag_parts(bags, T)
    offsets = (torch.arange(bags)[:, None] * T + torch.arange(parts) * T // parts).flatten().int()
    return places[:, :, None].expand(B, H, G, T).flatten(), offsets


def bag_parts(bags, T) -> int:
    """Into how many parts a bag of T rows is cut: fewer bags than threads are, so that every thread has one."""
    return -(-torch.get_num_threads() // bags) if T > 1024 else 1


def _sum_bags(w, rows, places, offsets):
    """w (B, H, G, T), rows (R', D), what _bags returns -> (B, H, G, D)."""
    B, H, G, _ = w.shape
    y = F.embedding_bag(places, rows, offsets, mode="sum", per_sample_weights=w.to(rows.dtype).flatten())
    if len(offsets) > B * H * G:
        y = y.view(B * H * G, -1, rows.size(1)).float().sum(1).to(rows.dtype)
    return y.view(B, H, G, -1)


def _weigh_pieces(w, rows, index):
    """Matmuls over rows that are collected PIECE elements at a time."""
    T, y = w.size(3), 0
    length = max(16, PIECE // (len(index) * rows[0].numel()))
    for start in range(0, T, length):
        piece = take(rows, index[:, start : start + length]).transpose(1, 2)
        part = w[..., start : start + length]
        on_cpu = rows.device.type == "cpu"
        y = y + (part @ piece.float() if on_cpu else (part.to(piece.dtype) @ piece).float())
    return y.to(rows.dtype)


def attend(q, k, v):
    """softmax(q k^T / sqrt(D)) v: q (B, N, 1, D), k and v (B, H, T, D) -> (B, N, 1, D)."""
    B, N, _, D = q.shape
    H = k.size(1)
    p = scores(q.reshape(B, H, N // H, D), k).softmax(-1)
    return weigh_values(p, v).view(B, N, 1, D)
