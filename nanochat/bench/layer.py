"""One bank layer while it decodes, alone: every way to the same output, step by step in the steady state.

The caches of the other layers and the weights pass through the processor between two uses of a layer's cache, so a
buffer larger than the last-level cache is read before every timed call: all ways start from memory.
Shapes: B batch, T positions cached before the first step, H kv heads, N query heads, D head dim, V vocab, U distinct.
"""

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanochat.bench.sides import clocked, fill_positions, unit, upstream_attend
from nanochat.bov import decode, kernels
from nanochat.bov.compiled import Fused
from nanochat.bov.one_query import scores
from nanochat.bov.placement import OnDevice
from nanochat.common import COMPUTE_DTYPE
from nanochat.flash_attention import flash_attn

WITH_V = {
    "upstream": "cached V in upstream's layout (B, T, H, D), by torch's SDPA",
    "sdpa": "cached V on contiguous heads (B, H, T, D), by torch's SDPA",
    "cached": "cached V on contiguous heads, by flash_attn_with_kvcache of this code",
}
WITHOUT_V = {
    "gather": "rows of all cached tokens are gathered, then attention as with cached V",
    "fused": "rows are read by id while they are added up (CUDA: a Triton kernel)",
    "pooled": "softmax is summed up by token, then the rows of the distinct tokens are",
}
WAYS = WITH_V | WITHOUT_V
PARTS = ("bookkeeping", "scores", "softmax", "scatter", "product")
GAMMA = 1.5
TOLERANCE = 2e-2  # of the largest output


@dataclass(frozen=True)
class Shape:
    n_head: int
    n_kv_head: int
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, config):
        return cls(config.n_head, config.n_kv_head, config.n_embd // config.n_head, config.vocab_size)

    @property
    def row_bytes(self) -> int:
        """Of one token's K, V or table row."""
        return self.n_kv_head * self.head_dim * COMPUTE_DTYPE.itemsize


def ways_on(device) -> list[str]:
    """The ways that can run on a device."""
    missing = device.type == "cuda" and kernels.available(device)
    return [way for way in WAYS if not (way == "fused" and missing)]


def bytes_needed(shape, ways, batch, positions) -> int:
    """What a Layer allocates, and the largest temporaries of its steps."""
    stores = 2 + 2 * ("upstream" in ways) + 1.2 * ("gather" in ways)
    return int(batch * positions * (stores * shape.row_bytes + 12 * shape.n_head + 16))


class Layer:
    """Caches, table and inputs of one layer; `step(way)` decodes the next token of `ids` by one of `ways`.

    ids (B, T + steps). All ways share the keys; each counts its own steps, so that they can take turns.
    """

    def __init__(self, shape, ids, context, ways, device, seed, flush_bytes=0):
        generator = torch.Generator(device).manual_seed(seed)
        B, S = ids.shape
        H, D = shape.n_kv_head, shape.head_dim
        self.shape, self.context, self.device, self.ids = shape, context, device, ids.to(device)
        self.table = OnDevice(nn.Embedding(shape.vocab, H * D, device=device, dtype=COMPUTE_DTYPE))
        nn.init.normal_(self.table.weight, generator=generator)
        self.coeff = torch.tensor([GAMMA], device=device)
        self.q = unit(S - context, B, 1, shape.n_head, D, generator=generator)
        self.new_k = unit(S - context, B, 1, H, D, generator=generator)
        self.k = torch.zeros(B, H, S, D, device=device, dtype=COMPUTE_DTYPE).transpose(1, 2)
        fill_positions(self.k, context, generator)
        self.v = self._values() if any(way in WITH_V for way in ways) else None
        self.upstream = (self.k.contiguous(), self.v.contiguous()) if "upstream" in ways else None
        self.flush = torch.zeros(flush_bytes // 4, device=device)
        self.ways = ways
        self.restart()

    @torch.inference_mode()
    def restart(self):
        """Back to `context` positions."""
        self.done = dict.fromkeys(self.ways, 0)
        self.histories = {
            way: decode.History(*self.ids.shape, self.device, way) for way in self.ways if way in WITHOUT_V
        }
        for history in self.histories.values():
            history.append(self.ids[:, : self.context])

    @torch.inference_mode()
    def _values(self):
        """What a V cache would hold, the tokens still to come included."""
        v = torch.empty_like(self.k)
        for start in range(0, v.size(1), 4096):
            rows = self.table.fetch(self.ids[:, start : start + 4096].flatten())
            v[:, start : start + 4096] = (GAMMA * rows).view(len(v), -1, *v.shape[2:])
        return v

    @torch.inference_mode()
    def step(self, way):
        """The output (B, 1, N, D) of the next token."""
        i = self.done[way]
        self.done[way] += 1
        if way in WITH_V:
            return self._with_v(way, i)
        history = self.histories[way]
        history.append(self.ids[:, self.context + i : self.context + i + 1])
        keys = history.write(self.k, self.new_k[i])
        options = dict(coeff=self.coeff, window=-1, strategy=way, dense=flash_attn.flash_attn_func)
        return decode.attend(self.q[i], keys, self.table, history, **options)

    def _with_v(self, way, i):
        k, v = self.upstream if way == "upstream" else (self.k, self.v)
        attend = flash_attn.flash_attn_with_kvcache if way == "cached" else upstream_attend
        at = self.context + i
        new = dict(k=self.new_k[i], v=self.v[:, at : at + 1], cache_seqlens=at)
        return attend(self.q[i], k[:, : at + 1], v[:, : at + 1], **new, causal=True)

    def timed_step(self, way) -> float:
        """Seconds of one step that starts from memory."""
        self.flush.sum()
        return clocked(self.device, lambda: self.step(way))[0]

    def check(self) -> dict[str, float]:
        """One step by every way: its largest difference to the first one, over the largest output.

        Raises RuntimeError beyond TOLERANCE: then the ways do not compute the same and no time means anything.
        """
        outputs = {way: self.step(way).float() for way in self.ways}
        reference = outputs[self.ways[0]]
        largest = reference.abs().max().item()
        found = {way: ((y - reference).abs().max().item() / largest) for way, y in outputs.items()}
        worst = max(found, key=found.get)
        if not found[worst] <= TOLERANCE:
            raise RuntimeError(f"{worst} differs from {self.ways[0]} by {found[worst]:.3f} of the largest output")
        return found

    @torch.inference_mode()
    def pooled_parts(self) -> tuple[torch.Tensor, dict[str, float]]:
        """One step of pooled, part by part: (output, seconds of each of PARTS).

        The same calls as decode.attend makes, with a clock between them.
        """
        i, history, shape = self.done["pooled"], self.histories["pooled"], self.shape
        self.done["pooled"] += 1
        at = self.context + i
        N, H, D = shape.n_head, shape.n_kv_head, shape.head_dim
        B, G = len(self.ids), N // H

        def bookkeeping():
            history.append(self.ids[:, at : at + 1])
            history.pool(self.table, H)
            return history.write(self.k, self.new_k[i])

        def product():
            return history.weigh_pool(w, self.table).reshape(B, 1, N, D) * self.coeff.to(COMPUTE_DTYPE)

        self.flush.sum()
        spent = {}
        spent["bookkeeping"], keys = clocked(self.device, bookkeeping)
        spent["scores"], s = clocked(self.device, lambda: scores(self.q[i].view(B, H, G, D), keys.transpose(1, 2)))
        spent["softmax"], p = clocked(self.device, lambda: s.softmax(-1))
        spent["scatter"], w = clocked(self.device, lambda: decode.by_slot(p, history))
        spent["product"], y = clocked(self.device, product)
        return y, spent


# ---------------------------------------------------------------------------- what a step allocates


class LargestResult(TorchDispatchMode):
    """Elements of the largest memory that an operation makes; results that share memory with an argument are views."""

    def __init__(self):
        super().__init__()
        self.elements, self.operation = 0, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                elements = tensor.untyped_storage().nbytes() // tensor.itemsize
                if elements > self.elements:
                    self.elements, self.operation = elements, str(func)
        return out


@contextmanager
def as_written():
    """Functions of compiled.Fused run uncompiled: a dispatch mode sees into no compiled loop."""
    kept = [(fused, fused.run, fused.compiled) for fused in Fused.every]
    for fused in Fused.every:
        fused.reset()
    try:
        yield
    finally:
        for fused, run, compiled in kept:
            fused.run, fused.compiled = run, compiled


def largest_result(call) -> SimpleNamespace:
    """(elements, operation) of the largest memory that call() makes, seen operation by operation, uncompiled."""
    with as_written(), LargestResult() as seen:
        call()
    return SimpleNamespace(elements=seen.elements, operation=seen.operation)


@contextmanager
def _silent_stderr():
    """The profiler's own library announces its start and stop there."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def largest_allocation(call) -> int:
    """Bytes of the largest allocation on the CPU during call(), as its allocator reports: compiled loops included."""
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    return max(e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")
