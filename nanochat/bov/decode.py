"""Attention of one decoding step without a V cache: the values of past tokens are table rows of their ids.

With p = softmax(q K^T / sqrt(D)) and ids i_t, the output of a head is
    gamma sum_t p_t E[i_t]  =  gamma sum_u w_u E[u],   w_u = sum over t with i_t = u of p_t.
gather  V = E[ids] of the attended positions, then ordinary attention (the paper, section 4)
fused   rows are read by id while they are added up; V is never collected (CPU: one_query.py, CUDA: kernels.py)
pooled  p is added up by token into w, then the U distinct rows are, from a pool: its cost does not depend on T
auto    see `rule`
Shapes: B batch, T positions cached so far, Tq new ones, S positions allocated, H kv heads, N query heads, D head dim,
V padded vocab, U distinct tokens.
"""

import ctypes

import torch
import torch.nn.functional as F

from nanochat.bov import kernels
from nanochat.bov.one_query import scores, take, value_bags, weigh, weigh_values

STRATEGIES = ("auto", "gather", "fused", "pooled")


class History:
    """Token ids of all cached positions, and what is derived from them, once for all layers.

    ids (B, S) int32; lengths (B,) int32, filled positions of each row; length and shortest, their extremes, as ints.
    Derived when pooled attention or a placed table first asks: slots (B, S) int64 position -> slot; token_slot (V,)
    int32 token -> slot, -1 unseen; pool_ids (V,) int64 slot -> token; distinct = U; and a pool for each table, the rows
    of the distinct tokens head by head. Each appended token costs O(1), and a step one `.item()` on a GPU.
    """

    def __init__(self, batch_size, seq_len, device, strategy="auto"):
        if strategy not in STRATEGIES:
            raise ValueError(f"decode strategy {strategy!r}: use one of {', '.join(STRATEGIES)}")
        self.strategy = strategy
        self.ids = torch.zeros(batch_size, seq_len, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.reset()

    def reset(self):
        """Forget every token and everything derived."""
        self._lengths.zero_()
        self.length = self.shortest = 0
        self._ahead = 0  # what _lengths lacks: a step whose rows have one length never asks for it
        self._forget()

    def _forget(self):
        self.slots = self.token_slot = self.pool_ids = None
        self.distinct = 0
        self._pending = 0  # newest positions of every row that have no slot yet
        self._pools, self._bags = {}, {}

    @property
    def lengths(self):
        if self._ahead:
            self._lengths += self._ahead
            self._ahead = 0
        return self._lengths

    @property
    def ragged(self) -> bool:
        """Whether rows differ in length."""
        return self.shortest != self.length

    def first_seen(self, Tq, window) -> int:
        """The earliest position that the newest Tq queries of any row can see."""
        return max(0, self.shortest - Tq - window) if window >= 0 else 0

    def rewind(self, length):
        """Back to `length` positions of the longest row: forget what a forward appended that did not end."""
        if length != self.length:
            self._ahead -= self.length - length
            self.shortest -= self.length - length
            self.length = length
            self._forget()

    def append(self, idx):
        """Take the next tokens of every row: idx (B, T)."""
        T = idx.size(1)
        if self.ragged:
            self.ids[self._newest(T, ends=self.lengths + T)] = idx.to(torch.int32)
        else:
            self.ids[:, self.length : self.length + T] = idx
        self._ahead += T
        self.length += T
        self.shortest += T
        self._pending += T

    def _newest(self, T, ends):
        """Index (B, T) of the last T positions before `ends` (B,)."""
        rows = torch.arange(len(ends), device=ends.device)[:, None]
        return rows, ends[:, None].long() - T + torch.arange(T, device=ends.device)

    def write(self, cache, new):
        """Put `new` (B, T, H, D) at the newest positions of `cache` (B, S, H, D); returns what is filled of it."""
        T = new.size(1)
        if self.ragged:
            cache[self._newest(T, ends=self.lengths)] = new
        else:
            cache[:, self.length - T : self.length] = new
        return cache[:, : self.length]

    def prefill(self, other):
        """Start from `other`, whose one row is repeated, or which has as many rows."""
        self.ids[:, : other.length] = other.ids[:, : other.length]
        self.lengths.copy_(other.lengths.expand_as(self.lengths))
        self.length, self.shortest = other.length, other.shortest
        self._forget()

    def prefill_row(self, row, other):
        """Start one row from the single row of `other`; once all rows are filled, call `settle`."""
        self.ids[row, : other.length] = other.ids[0, : other.length]
        self.lengths[row] = other.length

    def settle(self, lengths):
        """Go on from rows that were filled one by one: `lengths`, one int per row."""
        self.length, self.shortest = max(lengths), min(lengths)
        self._forget()

    # ------------------------------------------------------------------------ slots and pools

    def assign_slots(self, vocab) -> int:
        """Give every position its slot, of at most `vocab` (rows of a table); returns the number of distinct tokens.

        Slots are in the order of first occurrence, rows aligned at their ends: it does not matter when this is called.
        """
        new = self._pending
        if self.slots is None:
            self.slots = torch.zeros(self.ids.shape, dtype=torch.int64, device=self.ids.device)
            self.token_slot = torch.full((vocab,), -1, dtype=torch.int32, device=self.ids.device)
            self.pool_ids = torch.zeros(vocab, dtype=torch.int64, device=self.ids.device)
            new = self.length
        if new == 1 and self.ids.is_cpu and len(self.ids) == 1:
            self._assign_one(self.length - 1)
        elif new and self.ragged:  # before the start of a shorter row its first token stands in
            rows, positions = self._newest(new, ends=self.lengths)
            self._assign(rows, positions.clamp_(min=0))
        elif new:
            self._assign(slice(None), slice(self.length - new, self.length))
        self._pending = 0
        return self.distinct

    def _assign_one(self, position):
        """`_assign` for the next token of a single row in CPU memory."""
        token = _numbers(self.ids)[position]
        slots = _numbers(self.token_slot)
        if slots[token] < 0:
            slots[token] = self.distinct
            self.pool_ids[self.distinct] = token
            self.distinct += 1
        _numbers(self.slots)[position] = slots[token]

    def _assign(self, rows, positions):
        tokens = self.ids[rows, positions].T  # by position, then by row
        flat = tokens.flatten().long()
        known = self.token_slot[flat]
        fresh, first = known < 0, slice(None)
        if len(flat) > 1:  # a token that occurs several times in here is fresh once
            order = torch.arange(len(flat), device=flat.device)
            first = torch.empty(len(self.token_slot), dtype=torch.int64, device=flat.device)
            first = first.scatter_reduce_(0, flat, order, "amin", include_self=False)[flat]
            fresh &= first == order
        new = int(fresh.sum().item())
        if new:
            rank = torch.cumsum(fresh, 0, dtype=torch.int32) - 1
            known = torch.where(known < 0, self.distinct + rank[first], known)
            self.token_slot[flat] = known
            self.pool_ids[known.long()] = flat
            self.distinct += new
        self.slots[rows, positions] = known.long().view(tokens.shape).T

    def pool(self, table, heads):
        """Rows of the distinct tokens in the order of slots, each fetched once: (1, H, U, D), of (H, cap, D)."""
        self.assign_slots(table.vocab)
        filled, rows, pool = self._pools.get(table, (0, None, None))
        if filled < self.distinct:
            if rows is None or rows.size(1) < self.distinct:
                grown = min(table.vocab, self.distinct + self.distinct // 4 + 64)
                larger = torch.empty(heads, grown, table.width // heads, dtype=table.dtype, device=table.device)
                if filled:
                    larger[:, :filled] = rows[:, :filled]
                rows = larger
            fresh = table.fetch(self.pool_ids[filled : self.distinct])
            pool = rows[None, :, : self.distinct]
            pool[0, :, filled:] = fresh.unflatten(1, (heads, -1)).transpose(0, 1)
            self._pools[table] = self.distinct, rows, pool
        return pool

    def weigh_pool(self, w, table):
        """Sums of a table's pool by weights w (B, H, G, U) -> (B, H, G, D): one for the whole batch, its queries of one
        kv head side by side.
        """
        B, H, G, U = w.shape
        pool = self.pool(table, H)
        shape, of, bags = self._bags.get(table, (None, None, None))
        if B > 1:
            w = w.transpose(0, 1).reshape(1, H, B * G, U)
        if of is not pool or shape != w.shape:
            bags = value_bags(w, pool)
            self._bags[table] = w.shape, pool, bags
        y = weigh_values(w, pool, bags)
        return y.view(H, B, G, -1).transpose(0, 1) if B > 1 else y

    def rows(self, table, heads):
        """(rows (R, H, D), index (B, S)): a position's row is rows[index], of the table or, when placed, its pool."""
        if table.weight is not None:
            return table.weight.unflatten(1, (heads, -1)), self.ids
        return self.pool(table, heads)[0].transpose(0, 1), self.slots


def _numbers(tensor):
    """The memory of a contiguous integer tensor on the CPU as numbers; a call of torch costs 20 us for one of them."""
    kind = ctypes.c_int64 if tensor.dtype == torch.int64 else ctypes.c_int32
    return (kind * tensor.numel()).from_address(tensor.data_ptr())


# ---------------------------------------------------------------------------- attention


POOLED_FROM = 4096  # cached positions; runs/LOG.md, "decoding on a CPU"


def rule(strategy, *, queries, length, window, kernel, distinct) -> str:
    """The one place that decides how a layer decodes: gather, fused or pooled.

    queries: new positions of each row; length: of the longest row; kernel: off the CPU whether Triton's kernel runs,
    None on a CPU; distinct(): the number of distinct tokens, asked only where it matters, for counting gives slots.
    Several new positions gather: they have many queries. Where the window has passed, pooled becomes gather: few rows
    are left. auto on a CPU: fused for windows, below POOLED_FROM positions and while the longest row is not twice as
    long as there are distinct tokens; else pooled. auto on CUDA: fused, or gather where Triton is missing.
    """
    cut = 0 <= window < length - 1
    if queries > 1:
        return "gather"
    if strategy != "auto":
        return "gather" if strategy == "pooled" and cut else strategy
    if kernel is not None:
        return "fused" if kernel else "gather"
    if cut or length < POOLED_FROM:
        return "fused"
    return "pooled" if length >= 2 * distinct() else "fused"


def choose(strategy, q, history, window, table) -> str:
    """`rule` for the newest tokens of a history: q (B, Tq, N, D)."""
    kernel = None if q.device.type == "cpu" else q.is_cuda and kernels.available(q.device) is None
    numbers = dict(queries=q.size(1), length=history.length, window=window, kernel=kernel)
    return rule(strategy, **numbers, distinct=lambda: history.assign_slots(table.vocab))


def attend(q, k, table, history, *, coeff, window, strategy, dense):
    """Attention of the newest Tq positions over all keys: q (B, Tq, N, D), k (B, T, H, D) -> (B, Tq, N, D).

    table: placement.OnDevice, OnHost or OnDisk; coeff: (1,) or (H,) or None; window: a query sees itself and `window`
    keys before it, < 0 all; strategy: see `rule`; dense: the host's flash_attn_func, whose last query
    stands at the last key.
    """
    chosen = choose(strategy, q, history, window, table)
    if chosen == "fused" and q.is_cuda:
        return kernels.fused(q, k, *history.rows(table, k.size(2)), history.lengths, coeff=coeff, window=window)
    if chosen == "gather":
        y = _gather(q, k, table, history, window, dense)
    else:
        y = (_fused if chosen == "fused" else _pooled)(q, k, table, history, window)
    if coeff is None:
        return y
    coeff = coeff.to(y.dtype)
    if coeff.numel() > 1:
        coeff = coeff.repeat_interleave(q.size(2) // coeff.numel()).view(-1, 1)
    return y * coeff


def _gather(q, k, table, history, window, dense):
    first = history.first_seen(q.size(1), window)
    rows, index = history.rows(table, k.size(2))
    k, v = k[:, first:], take(rows, index[:, first : history.length]).to(q.dtype)
    if not history.ragged:
        return dense(q, k, v, causal=True, window_size=(window, 0))
    mask = _visible(history, q.size(1), first, window)[:, None]
    heads = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=q.size(2) != k.size(2))
    return y.transpose(1, 2)


def _fused(q, k, table, history, window):
    first = history.first_seen(1, window)
    rows, index = history.rows(table, k.size(2))
    p = _probabilities(q, k, history, first, window)
    return weigh(p, rows, index[:, first : history.length]).view(q.shape).to(q.dtype)


def _pooled(q, k, table, history, window):
    history.assign_slots(table.vocab)
    w = by_slot(_probabilities(q, k, history, 0, window), history)
    return history.weigh_pool(w, table).reshape(q.shape).to(q.dtype)


def by_slot(p, history):
    """Sums of p (B, H, G, T) over the positions of each slot -> (B, H, G, U)."""
    slots = history.slots.as_strided(p.shape, (history.slots.stride(0), 0, 0, 1))
    return p.new_zeros(*p.shape[:3], history.distinct).scatter_add_(3, slots, p)


def _probabilities(q, k, history, first, window):
    """softmax in fp32 over the keys from `first` on: q (B, 1, N, D), k (B, T, H, D) -> (B, H, G, T - first)."""
    B, _, N, D = q.shape
    H = k.size(2)
    s = scores(q.view(B, H, N // H, D), (k[:, first:] if first else k).transpose(1, 2))
    if history.ragged:
        s.masked_fill_(~_visible(history, 1, first, window)[:, None], -torch.inf)
    return s.softmax(-1)


def _visible(history, Tq, first, window):
    """Which positions from `first` on the newest Tq queries of each row see: bool (B, Tq, T - first)."""
    key = torch.arange(first, history.length, device=history.ids.device)
    query = history.lengths[:, None, None] - Tq + torch.arange(Tq, device=key.device)[:, None]
    seen = key <= query
    return seen & (query - key <= window) if window >= 0 else seen
