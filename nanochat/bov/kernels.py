"""Decoding one token per row without a V cache, in Triton: the strategy "fused".

Split-T flash decoding. A program owns one (row, kv head, split): it walks over its share of the row's keys with an
online softmax, reads K from the cache and value rows from the table by token id, and leaves its normalised output and
the log-sum-exp of its scores. A second kernel weighs the splits and applies the coefficient.

The query heads of a group are the rows of one tl.dot, padded to the 16 that it needs: K and V are read once per group,
every group size takes the same path, and loads that feed a tl.dot are those that Triton pipelines. Broadcast products
would hold G x keys x D in registers.

Shapes: B batch, S positions allocated, T cached ones, H kv heads, N query heads, G = N / H, D head dim, V vocab.
"""

from functools import lru_cache

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MAX_SPLITS = 128  # the second kernel reads them as one tile
SPLIT_KEYS = 256  # fewest keys of a split, so that its output and its last partial tile cost little
PROGRAMS = 4  # per multiprocessor: at D 128 in bf16 one takes 80 registers per thread and 39 KB of shared memory
TILE_BYTES = 16384  # of one tile of K or V
COLUMNS = 32  # of the output, per program of the second kernel

if triton is not None:

    @triton.jit
    def _attend_split(
        Q,  # (B, N, D)
        K,  # (B, T, H, D)
        W,  # (R, H, D)
        Ids,  # (B, S)
        Lengths,  # (B,)
        Out,  # (B, N, splits, D) fp32
        Lse,  # (B, N, splits) fp32
        q_row, q_head, q_dim, k_row, k_key, k_head, k_dim, w_token, w_head, w_dim, ids_row, ids_key,
        window, scale,
        G: tl.constexpr, D: tl.constexpr,
        HEADS: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, DOT: tl.constexpr,
    ):  # fmt: skip
        row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
        splits = tl.num_programs(2)
        g, d = tl.arange(0, HEADS), tl.arange(0, DIMS)
        n = head * G + g
        own = (g < G)[:, None] & (d < D)[None, :]

        last = tl.load(Lengths + row)
        first = tl.where(window < 0, 0, tl.maximum(last - 1 - window, 0))
        share = tl.cdiv(tl.cdiv(last - first, splits), KEYS) * KEYS
        begin = first + split * share
        end = tl.minimum(begin + share, last)

        q = tl.load(Q + row * q_row + n[:, None] * q_head + d[None, :] * q_dim, mask=own, other=0.0).to(DOT)
        best = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        out = tl.zeros([HEADS, DIMS], tl.float32)
        for start in range(begin, end, KEYS):
            t = start + tl.arange(0, KEYS)
            live = t < end
            cells = live[:, None] & (d < D)[None, :]
            at = K + row * k_row + head * k_head + t.to(tl.int64)[:, None] * k_key + d[None, :] * k_dim
            k = tl.load(at, mask=cells, other=0.0).to(DOT)
            token = tl.load(Ids + row * ids_row + t * ids_key, mask=live, other=0).to(tl.int64)
            at = W + token[:, None] * w_token + head * w_head + d[None, :] * w_dim
            v = tl.load(at, mask=cells, other=0.0).to(DOT)

            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            s = tl.where(live[None, :], s, float("-inf"))
            peak = tl.maximum(best, tl.max(s, 1))
            kept = tl.exp(best - peak)
            p = tl.exp(s - peak[:, None])
            total = total * kept + tl.sum(p, 1)
            out = out * kept[:, None] + tl.dot(p.to(DOT), v, input_precision="ieee")
            best = peak

        total = tl.where(total > 0, total, 1.0)  # a split without keys: output 0, log-sum-exp -inf
        place = (row * tl.num_programs(1) * G + n) * splits + split
        tl.store(Lse + place, best + tl.log(total), mask=g < G)
        tl.store(Out + place[:, None] * D + d[None, :], out / total[:, None], mask=own)

    @triton.jit(do_not_specialize=["splits"])  # it grows with the context
    def _combine_splits(
        Out,  # (B, N, splits, D) fp32
        Lse,  # (B, N, splits) fp32
        Coeff,  # (1,) or (H,) or None
        Y,  # (B, N, D)
        coeff_head,  # 0: one coefficient for all heads
        splits,
        G: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, COLS: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(1)
        place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + n
        split, d = tl.arange(0, SPLITS), tl.program_id(2) * COLS + tl.arange(0, COLS)
        real = split < splits
        lse = tl.load(Lse + place * splits + split, mask=real, other=float("-inf"))
        best = tl.max(lse, 0)
        weight = tl.exp(lse - tl.where(best == float("-inf"), 0.0, best))
        total = tl.sum(weight, 0)
        at = Out + (place * splits + split)[:, None] * D + d[None, :]
        out = tl.load(at, mask=real[:, None] & (d < D)[None, :], other=0.0)
        y = tl.sum(out * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
        if Coeff is not None:
            coeff = tl.load(Coeff + (n // G) * coeff_head)
            y *= coeff.to(Y.dtype.element_ty).to(tl.float32)  # rounded as the forward of training does
        tl.store(Y + place * D + d, y.to(Y.dtype.element_ty), mask=d < D)

    # Triton decides when it decorates, by TRITON_INTERPRET.
    INTERPRETED = not isinstance(_attend_split, triton.JITFunction)


@lru_cache
def available(device) -> str | None:
    """None where `fused` can run on `device` (torch.device or its name), else why not, in one line."""
    device = torch.device(device)
    if triton is None:
        return "triton is not installed (on Linux: pip install 'nanochat[dev]')"
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"Triton compiles for GPUs, not for {device.type} (TRITON_INTERPRET=1 interprets it, slowly)"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU's compute capability is under 8.0, where Triton's tl.dot spills its registers"
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # no C compiler, no Python.h, no libcuda: many kinds
        return f"triton cannot load its GPU driver: {' '.join(str(error).split()) or type(error).__name__}"
    return None


def split_count(rows, heads, length, processors) -> int:
    """Into how many parts the keys of a row are split: rows B, kv heads H, `length` keys that a query sees at most.

    As many as fill `processors` multiprocessors once, each with at least SPLIT_KEYS keys; from 1 to MAX_SPLITS.
    """
    return max(1, min(PROGRAMS * processors // (rows * heads), length // SPLIT_KEYS, MAX_SPLITS))


@lru_cache
def _processors(device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def _tiles(dtype, G, D) -> dict:
    """Tile sizes and tl.dot's dtype for _attend_split: powers of two, at least the 16 that tl.dot needs."""
    dims = max(16, triton.next_power_of_2(D))
    keys = max(16, min(128, TILE_BYTES // (dims * dtype.itemsize)))
    dot = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
    if INTERPRETED and dtype == torch.bfloat16:
        dot = tl.float32  # the interpreter's tl.dot multiplies the bit patterns of bf16
    return {"HEADS": max(16, triton.next_power_of_2(G)), "KEYS": keys, "DIMS": dims, "DOT": dot}


def fused(q, k, rows, ids, lengths, *, coeff, window):
    """Attention of the newest token of every row over its cached keys, values read from a table: (B, 1, N, D).

    q (B, 1, N, D); k (B, T, H, D), the cache's view with the new keys written; rows (R, H, D); ids (B, S >= T) into
    them: tokens of a table or slots of a pool; lengths (B,), filled positions, at most T; coeff (1,) or (H,),
    None for 1; window: a query sees itself and `window` keys before it, < 0 all. Any strides; q in bf16, fp16 or fp32.
    Scores, softmax and sums in fp32, p in q's dtype for the product. A row of length 0 gives 0. No gradient.
    Raises ValueError where `available` gives a reason.
    """
    if reason := available(q.device):
        raise ValueError(f"decode strategy fused: {reason}; use auto, gather or pooled")
    B, Tq, N, D = q.shape
    T, H = k.shape[1:3]
    assert Tq == 1 and N % H == 0 and rows.shape[1:] == (H, D) and ids.size(1) >= T
    G = N // H
    splits = split_count(B, H, T if window < 0 else min(T, window + 1), _processors(q.device))
    out = torch.empty(B, N, splits, D, dtype=torch.float32, device=q.device)
    lse = torch.empty(B, N, splits, dtype=torch.float32, device=q.device)
    y = torch.empty(B, 1, N, D, dtype=q.dtype, device=q.device)
    strides = q.stride(0), *q.stride()[2:], *k.stride(), *rows.stride(), *ids.stride()
    coeff_head = 0 if coeff is None or coeff.numel() == 1 else coeff.stride(0)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        _attend_split[B, H, splits](
            q, k, rows, ids, lengths, out, lse, *strides, window, D**-0.5, G, D, **_tiles(q.dtype, G, D)
        )
        _combine_splits[B, N, triton.cdiv(D, COLUMNS)](
            out, lse, coeff, y, coeff_head, splits, G, D, SPLITS=MAX_SPLITS, COLS=COLUMNS
        )
    return y
