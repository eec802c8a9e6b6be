"""Attention back ends behind Flash Attention 3's interface, chosen once when the module is imported.

fa3     torch's varlen attention with the FA3 kernels that torch activated (Hopper, package flash_attn_interface)
varlen  torch's varlen attention with its own kernels (other CUDA devices, bf16 or fp16)
sdpa    scaled_dot_product_attention (CPU, MPS, fp32)

Window (left, right): a query attends to itself and `left` keys before it; left < 0 is unlimited; right is 0 (causal).
Shapes: B batch, T time, N query heads, H kv heads, D head dim.
"""

from functools import lru_cache
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nanochat.bov import one_query
from nanochat.bov.compiled import Fused
from nanochat.common import COMPUTE_DTYPE


def _activate_fa3() -> bool:
    """Whether torch could switch its flash attention to FA3; nothing is downloaded."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError):
        return False
    return True


HAS_FA3 = _activate_fa3()
_override_impl = None  # for tests: "fa3", "varlen", "sdpa" or None (automatic); call _resolve_use_fa3 after a change


def _choose() -> str:
    if _override_impl is not None:
        if _override_impl == "fa3" and not HAS_FA3:
            raise RuntimeError("attention back end fa3 was asked for, but torch cannot activate FA3 here")
        return _override_impl
    if torch.cuda.is_available() and COMPUTE_DTYPE in (torch.bfloat16, torch.float16):
        return "fa3" if HAS_FA3 else "varlen"
    return "sdpa"


def _resolve_use_fa3() -> bool:
    """Choose the back end anew and return whether it is FA3."""
    global BACKEND
    BACKEND = _choose()
    return BACKEND == "fa3"


USE_FA3 = _resolve_use_fa3()


def describe(length: int) -> str:
    """One line for logs: what attends over training rows of `length` tokens, and why."""
    if BACKEND == "sdpa" and _uses_blocks(length):
        return "attention: matmuls over blocks (CPU with compiled parts)"
    return {
        "fa3": "attention: FA3 through torch",
        "varlen": "attention: torch varlen (FA3 cannot be activated here)",
        "sdpa": f"attention: torch SDPA ({'no CUDA' if not torch.cuda.is_available() else f'{COMPUTE_DTYPE} on CUDA'})",
    }[BACKEND]


@lru_cache(maxsize=8)  # training rows of 512 tokens take 6; a long row takes a byte per query and key in each
def _mask(queries: int, keys: int, left: int, device: str):
    """Mask (queries, keys): the last query sees the last key, `left` keys before it, and none behind it."""
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    return (key <= query) & (query - key <= left)


def _sdpa(q, k, v, left):
    """q (B, N, Tq, D), k and v (B, H, Tk, D), queries aligned to the last keys -> (B, N, Tq, D)."""
    Tq, Tk = q.size(2), k.size(2)
    gqa = q.size(1) != k.size(1)
    left = Tk if left < 0 else left
    if Tq == 1:
        first = max(0, Tk - (left + 1))
        if q.device.type == "cpu" and q.dtype != torch.float32:
            return one_query.attend(q, k[:, :, first:], v[:, :, first:])  # torch's kernel takes 2 to 10 times as long
        return F.scaled_dot_product_attention(q, k[:, :, first:], v[:, :, first:], enable_gqa=gqa)
    if Tq == Tk and left >= Tk - 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_mask(Tq, Tk, left, str(q.device)), enable_gqa=gqa)


BLOCK = 128  # queries
BLOCKED_LENGTH = 512  # above it there are more shapes to compile and the stored probabilities grow large


def _uses_blocks(length) -> bool:
    return _probabilities.compiled and length <= BLOCKED_LENGTH


def _blocks(T, left):
    """(queries, keys they can see) as slices, block by block."""
    for start in range(0, T, BLOCK):
        end = min(start + BLOCK, T)
        yield slice(start, end), slice(max(0, start - left), end)


class _Blocked(torch.autograd.Function):
    """The same for Tq = Tk as plain matmuls over the keys that each block of queries can see: q, k, v (B * N, T, D).

    For training on a CPU, where the backward of scaled_dot_product_attention is the slowest part of a step: at T 512
    this takes half to a third of its time, when its two element-wise parts are compiled.
    """

    @staticmethod
    def forward(ctx, q, k, v, left):
        scale, weights, y = q.size(-1) ** -0.5, [], torch.empty_like(q)
        for rows, seen in _blocks(q.size(1), left):
            mask = _mask(rows.stop - rows.start, seen.stop - seen.start, left, str(q.device))
            weights.append(_probabilities(q[:, rows] @ k[:, seen].mT, mask, scale))
            y[:, rows] = weights[-1] @ v[:, seen]
        ctx.left, ctx.scale = left, scale
        ctx.save_for_backward(q, k, v, *weights)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v, *weights = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (rows, seen), p in zip(_blocks(q.size(1), ctx.left), weights, strict=True):
            grad = dy[:, rows]
            dscores = _score_gradient(p, grad @ v[:, seen].mT, ctx.scale)
            dv[:, seen] += p.mT @ grad
            dk[:, seen] += dscores.mT @ q[:, rows]
            dq[:, rows] = dscores @ k[:, seen]
        return dq, dk, dv, None


def _blocked(q, k, v, left):
    """q (B, N, T, D), k and v (B, H, T, D) -> (B, N, T, D) through _Blocked."""
    B, N, T, D = q.shape
    if k.size(1) != N:
        k, v = (t.repeat_interleave(N // t.size(1), dim=1) for t in (k, v))
    heads = (t.reshape(B * N, T, D) for t in (q, k, v))
    return _Blocked.apply(*heads, T if left < 0 else left).view(B, N, T, D)


@Fused
def _probabilities(scores, mask, scale):
    """softmax(scores * scale) where mask, in fp32, returned in the dtype of scores (B * N, Tq, Tk)."""
    return (scores.float() * scale).masked_fill(~mask, -torch.inf).softmax(-1).to(scores.dtype)


@Fused
def _score_gradient(weights, dweights, scale):
    """Gradient by the raw scores from that by the weights, both (B * N, Tq, Tk)."""
    p, g = weights.float(), dweights.float()
    return (p * (g - (p * g).sum(-1, keepdim=True)) * scale).to(weights.dtype)


@lru_cache(maxsize=16)
def _offsets(batch: int, length: int, device: str):
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


def _varlen(q, k, v, left):
    """q (B, Tq, N, D), k and v (B, Tk, H, D), queries aligned to the last keys -> (B, Tq, N, D)."""
    from torch.nn.attention.varlen import varlen_attn

    (B, Tq), Tk = q.shape[:2], k.size(1)
    offsets = (_offsets(B, length, str(q.device)) for length in (Tq, Tk))
    window = (-1, 0) if left < 0 or left >= Tk - 1 else (left, 0)
    rows = (t.flatten(0, 1) for t in (q, k, v))
    y = varlen_attn(*rows, *offsets, Tq, Tk, window_size=window, enable_gqa=q.size(2) != k.size(2))
    return y.view_as(q)


def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
    """Attention over a whole sequence: q (B, Tq, N, D), k and v (B, Tk, H, D) -> (B, Tq, N, D).

    With fewer queries than keys the last query stands at the last key. causal=False is plain bidirectional attention
    and takes no window (ValueError otherwise).
    """
    if not causal:
        if window_size != (-1, -1):
            raise ValueError(f"window_size={window_size} without causal=True is not implemented")
        heads = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads, enable_gqa=q.size(2) != k.size(2)).transpose(1, 2)
    if BACKEND != "sdpa" and q.size(1) > 1:
        return _varlen(q, k, v, window_size[0])
    blocked = q.device.type == "cpu" and q.size(1) == k.size(1) and _uses_blocks(q.size(1))
    attend = _blocked if blocked else _sdpa
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), window_size[0]).transpose(1, 2)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, window_size=(-1, -1)
):
    """Write k, v (B, T, H, D) into the caches (B, T_max, H, D) at cache_seqlens and attend to all that is there.

    q (B, T, N, D) -> (B, T, N, D). cache_seqlens, filled positions before the write: an int, or an integer tensor (B,)
    when rows differ (on a GPU cut the caches to the longest row before: only a CPU is asked for it here).
    Raises ValueError, before anything is written, when the cache is too short; and on causal=False with T > 1.
    """
    T = q.size(1)
    if not causal and T > 1:
        raise ValueError("flash_attn_with_kvcache attends causally; pass causal=True")
    if not isinstance(cache_seqlens, int):
        return _rows_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens, window_size[0])
    start, end = cache_seqlens, cache_seqlens + (T if k is not None else 0)
    if end > k_cache.size(1):
        raise ValueError(f"the KV cache holds {k_cache.size(1)} tokens, {end} are needed")
    if k is not None:
        k_cache[:, start:end] = k
        v_cache[:, start:end] = v
    return flash_attn_func(q, k_cache[:, :end], v_cache[:, :end], causal=True, window_size=window_size)


def _rows_with_kvcache(q, k_cache, v_cache, k, v, lengths, left):
    """flash_attn_with_kvcache for rows of different lengths (B,): a mask per row, and no question to the device."""
    T, device = q.size(1), q.device
    if device.type == "cpu":
        end = int(lengths.max()) + (T if k is not None else 0)
        if end > k_cache.size(1):
            raise ValueError(f"the KV cache holds {k_cache.size(1)} tokens, {end} are needed")
        k_cache, v_cache = k_cache[:, :end], v_cache[:, :end]
    if k is not None:
        at = torch.arange(len(q), device=device)[:, None], lengths[:, None].long() + torch.arange(T, device=device)
        k_cache[at], v_cache[at] = k, v
        lengths = lengths + T
    query = (lengths[:, None] - T + torch.arange(T, device=device))[:, None, :, None]
    key = torch.arange(k_cache.size(1), device=device)
    mask = (key <= query) & (query - key <= (k_cache.size(1) if left < 0 else left))
    heads = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
    y = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=q.size(2) != k_cache.size(2))
    return y.transpose(1, 2)


flash_attn = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_with_kvcache=flash_attn_with_kvcache)
