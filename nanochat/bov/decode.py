"""Attention of one decoding step without a V cache: the values of past tokens are table rows of their ids.

With p = softmax(q K^T / sqrt(D)) and ids i_t, the output of a head is
    gamma sum_t p_t E[i_t]  =  gamma sum_u w_u E[u],   w_u = sum over t with i_t = u of p_t.
gather  V = E[ids] of the attended positions, then ordinary attention (the paper, section 4)
pooled  p is added up by token into w, then one product with the rows of the distinct tokens; nothing of size (T, D)
fused   a Triton kernel that reads K from the cache and rows by id (kernels.py)
auto    see `choose`
Shapes: B batch, T positions cached so far, Tq new ones, S positions allocated, H kv heads, N query heads, D head dim,
V padded vocab, U distinct tokens.
"""

import torch
import torch.nn.functional as F

from nanochat.bov.one_query import scores, weigh

STRATEGIES = ("auto", "gather", "pooled", "fused")


class History:
    """Token ids of all cached positions, and what pooled attention derives from them, once for all layers.

    ids (B, S) int32; lengths (B,) int32, filled positions of each row; length and shortest, their extremes, as ints.
    Derived when first asked for: slots (B, S) int64 position -> slot; token_slot (V,) int32 token -> slot, -1 unseen;
    pool_ids (V,) int64 slot -> token; distinct = U. Each appended token costs O(1), and one `.item()` per step.
    Once U passes half the vocabulary of a table on the device, the table itself is the pool (`direct`: slot = id).
    """

    def __init__(self, batch_size, seq_len, device, strategy="auto"):
        if strategy not in STRATEGIES:
            raise ValueError(f"decode strategy {strategy!r}: use one of {', '.join(STRATEGIES)}")
        self.strategy = strategy
        self.ids = torch.zeros(batch_size, seq_len, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.reset()

    def reset(self):
        """Forget every token and everything derived."""
        self.lengths.zero_()
        self.length = self.shortest = 0
        self._forget()

    def _forget(self):
        self.slots = self.token_slot = self.pool_ids = None
        self.distinct, self.direct = 0, False
        self._pending = 0  # newest positions of every row that have no slot yet
        self._pools = {}

    @property
    def ragged(self) -> bool:
        """Whether rows differ in length."""
        return self.shortest != self.length

    def append(self, idx):
        """Take the next tokens of every row: idx (B, T)."""
        T = idx.size(1)
        if self.ragged:
            self.ids[self._newest(T, ends=self.lengths + T)] = idx.to(torch.int32)
        else:
            self.ids[:, self.length : self.length + T] = idx
        self.lengths += T
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

    def assign_slots(self, table):
        """Give every position its slot; `table` (placement.py) says how many tokens there are and where rows lie."""
        if self.slots is None:
            self.slots = torch.zeros(self.ids.shape, dtype=torch.int64, device=self.ids.device)
            self.token_slot = torch.full((table.vocab,), -1, dtype=torch.int32, device=self.ids.device)
            self.pool_ids = torch.zeros(table.vocab, dtype=torch.int64, device=self.ids.device)
            self._assign(slice(None), slice(0, self.length))
        elif self._pending and self.ragged:
            self._assign(*self._newest(self._pending, ends=self.lengths))
        elif self._pending:
            self._assign(slice(None), slice(self.length - self._pending, self.length))
        self._pending = 0
        if not self.direct and table.weight is not None and 2 * self.distinct > table.vocab:
            self._use_table(table)

    def _assign(self, rows, positions):
        tokens = self.ids[rows, positions]
        if self.ragged and isinstance(positions, slice):  # behind the end of a row its first token stands in
            past = torch.arange(self.length, device=tokens.device) >= self.lengths[:, None]
            tokens = torch.where(past, tokens[:, :1], tokens)
        if self.direct:
            self.slots[rows, positions] = tokens.long()
            return
        flat = tokens.flatten().long()
        known = self.token_slot[flat]
        order = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
        owner = torch.empty_like(self.token_slot)
        owner[flat] = order  # any one of the places where a token occurs
        owner = owner[flat]
        fresh = (owner == order) & (known < 0)
        rank = torch.cumsum(fresh, 0, dtype=torch.int32) - 1
        slot = torch.where(known < 0, self.distinct + rank[owner.long()], known)
        self.token_slot[flat] = slot
        self.pool_ids[slot.long()] = flat
        self.slots[rows, positions] = slot.long().view(tokens.shape)
        self.distinct += int(fresh.sum().item())

    def _use_table(self, table):
        self.direct, self.distinct = True, table.vocab
        self.slots[:, : self.length] = self.ids[:, : self.length]
        self._pools.clear()
        self.token_slot = self.pool_ids = None

    def pool(self, table):
        """Rows of the distinct tokens in the order of their slots, (U, H * D); call assign_slots first."""
        if self.direct:
            return table.weight
        filled, rows = self._pools.get(table, (0, None))
        if filled < self.distinct:
            if rows is None or len(rows) < self.distinct:
                grown = min(table.vocab, max(64, 2 * self.distinct))
                larger = torch.empty(grown, table.width, dtype=table.dtype, device=table.device)
                if filled:
                    larger[:filled] = rows[:filled]
                rows = larger
            rows[filled : self.distinct] = table.fetch(self.pool_ids[filled : self.distinct])
            self._pools[table] = self.distinct, rows
        return rows[: self.distinct]

    def values(self, table, first):
        """Rows of the tokens at positions `first`.. of every row: (B, T - first, H * D)."""
        if table.weight is not None:
            return F.embedding(self.ids[:, first : self.length], table.weight)
        self.assign_slots(table)
        return F.embedding(self.slots[:, first : self.length], self.pool(table))


# ---------------------------------------------------------------------------- attention


def attend(q, k, table, history, *, coeff, window, strategy, dense):
    """Attention of the newest Tq positions over all keys: q (B, Tq, N, D), k (B, T, H, D) -> (B, Tq, N, D).

    table: placement.OnDevice, OnHost or OnDisk; coeff: (1,) or (H,) or None; window: a query sees itself and `window`
    keys before it, < 0 all; strategy: see `choose`; dense: the host's flash_attn_with_kvcache.
    """
    chosen = choose(strategy, q, history, window, table)
    if chosen == "fused":
        from nanochat.bov import kernels

        return kernels.fused(q, k, table.weight, history.ids, history.lengths, coeff=coeff, window=window)
    y = _pooled(q, k, table, history) if chosen == "pooled" else _gather(q, k, table, history, window, dense)
    if coeff is None:
        return y
    if coeff.numel() > 1:
        coeff = coeff.repeat_interleave(q.size(2) // coeff.numel())
    return y * coeff.to(y.dtype).view(-1, 1)


# Cached positions of a row from which pooled is faster than gather: runs/LOG.md, "decode on a CPU".
POOLED_FROM = 1024


def choose(strategy, q, history, window, table) -> str:
    """The one place that decides how a layer decodes: gather, pooled or fused.

    Several new positions, and layers whose window has passed, gather: they need few rows or many queries. Otherwise
    auto takes fused on a CUDA device with the table on it, pooled from POOLED_FROM positions on, and gather before.
    """
    cut = 0 <= window < history.length - 1
    if q.size(1) > 1 or strategy == "gather":
        return "gather"
    if strategy == "fused" or (strategy == "auto" and q.is_cuda and table.weight is not None):
        return "fused"
    if cut or (strategy == "auto" and history.length < POOLED_FROM):
        return "gather"
    return "pooled"


def _gather(q, k, table, history, window, dense):
    first = max(0, history.shortest - q.size(1) - window) if window >= 0 else 0
    v = history.values(table, first).view(len(q), -1, *k.shape[2:])
    seen = history.lengths - first if history.ragged else history.length - first
    return dense(q, k[:, first:], v.to(q.dtype), cache_seqlens=seen, causal=True, window_size=(window, 0))


def _pooled(q, k, table, history):
    """softmax and its sums by token in fp32; one product for all rows of the batch."""
    history.assign_slots(table)
    rows = history.pool(table)
    B, _, N, D = q.shape
    H = k.size(2)
    p = scores(q.view(B, H, N // H, D), k.transpose(1, 2)).view(B, N, -1).mul_(D**-0.5)
    if history.ragged:
        past = torch.arange(history.length, device=q.device) >= history.lengths[:, None]
        p.masked_fill_(past[:, None], -torch.inf)
    p = p.softmax(-1)
    slots = history.slots[:, None, : history.length].expand(B, N, -1)
    w = p.new_zeros(B, N, len(rows)).scatter_add_(2, slots, p)
    w = w.view(B, H, N // H, -1).transpose(0, 1).reshape(1, H, B * (N // H), -1)
    y = weigh(w, rows.view(1, -1, H, D).transpose(1, 2))
    return y.view(H, B, N // H, D).transpose(0, 1).reshape(B, 1, N, D).to(q.dtype)
