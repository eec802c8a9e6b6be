"""Bytes a model needs to decode and to train, by formula; nanochat/memory_meter.py measures the same.

Shapes: B batch, S positions allocated (the context), C n_embd, H kv heads, N query heads, G = N / H, D head dim,
V padded vocab, U distinct tokens, W ranks.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

import torch

from nanochat.bov import kernels, one_query
from nanochat.bov.decode import STRATEGIES, rule
from nanochat.bov.host import AXES, SMEAR_CHANNELS
from nanochat.bov.placement import BUFFER_BYTES, PLACEMENTS
from nanochat.bov.spec import PLAIN, ValueSpec, layer_specs
from nanochat.bov.values import GATE_CHANNELS

POLICIES = ("full", "ring")
DEVICES = ("cpu", "cuda")
SHARDED_FROM = 1024  # elements from which the ranks share an AdamW moment
PROCESSORS = 132  # multiprocessors of the GPU that the formula supposes: H100, H200

# ---------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class Sizes:
    """What the bytes of a model depend on.

    windows: keys before itself that a query of each layer sees, below sequence_len for a window layer.
    rotary: positions of the rotary table. vocab_size: tokens, of which V is the padded number.
    """

    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    mlp_hidden: int
    vocab_size: int
    vocab: int
    sequence_len: int
    windows: tuple[int, ...]
    rotary: int
    trunk: str
    smear: bool
    specs: tuple[ValueSpec, ...]

    @classmethod
    def of(cls, config, windows, rotary=0, padding=64):
        """From a GPTConfig or any object with its fields n_layer, n_head, n_kv_head, n_embd, vocab_size, sequence_len.

        Axes (host.AXES) that the object lacks have their defaults. `windows`: the left window of each layer.
        Raises ValueError on contradictory axes.
        """
        fields = vars(config)
        axes = {name: fields.get(name, default) for name, (default, _) in AXES.items()}
        own = {
            name: fields[name] for name in ("n_layer", "n_head", "n_kv_head", "n_embd", "vocab_size", "sequence_len")
        }
        return cls(
            **own, windows=tuple(windows), rotary=rotary, trunk=axes["trunk"], smear=axes["smear"],
            vocab=-(-own["vocab_size"] // padding) * padding, mlp_hidden=axes["mlp_hidden"] or 4 * own["n_embd"],
            specs=layer_specs(own["n_layer"], axes),
        )  # fmt: skip

    @property
    def kv_dim(self) -> int:
        """H * D, the width of one token's K, V or table row."""
        return self.n_kv_head * (self.n_embd // self.n_head)

    @property
    def bank_layers(self) -> tuple[int, ...]:
        """Layers without a V cache."""
        return tuple(i for i, spec in enumerate(self.specs) if not spec.caches_value)

    @property
    def tables(self) -> tuple[int, ...]:
        """Layers under whose key a table is stored."""
        return tuple(sorted({spec.table for spec in self.specs if spec.table is not None}))

    @property
    def bank_tables(self) -> tuple[int, ...]:
        """Those of them that stand in for a V cache, and can be placed off the device."""
        return tuple(sorted({self.specs[i].table for i in self.bank_layers}))

    @property
    def standard(self):
        """The same shape with W_V and a V cache in its bank layers: what savings are measured against."""
        return replace(self, specs=tuple(spec if spec.caches_value else PLAIN for spec in self.specs))

    def rows(self, layer: int, context: int, policy: str) -> int:
        """Positions of one layer that the cache holds for a context: all, or under `ring` a window layer's window."""
        return min(self.windows[layer], context) if policy == "ring" and self.is_window(layer) else context

    def is_window(self, layer: int) -> bool:
        return 0 <= self.windows[layer] < self.sequence_len


@dataclass(frozen=True)
class Decode:
    """How a model decodes: `batch` rows of `context` positions, `distinct` different tokens among all of them.

    policy: full = every layer keeps all positions, as implemented here; ring = a server whose window layers keep
    `window` rows. placement: where the tables of bank layers are. strategy: of layers without V, see decode.py.
    device: whose code runs, cpu or cuda (with Triton). Raises ValueError naming the flag.
    """

    batch: int
    context: int
    dtype: torch.dtype
    distinct: int
    policy: str = "full"
    placement: str = "device"
    strategy: str = "auto"
    device: str = "cpu"

    def __post_init__(self):
        for name in ("batch", "context"):
            if vars(self)[name] < 1:
                raise ValueError(f"--{name} {vars(self)[name]}: at least 1")
        if not 1 <= self.distinct <= self.batch * self.context:
            raise ValueError(f"--distinct {self.distinct}: from 1 to the {self.batch * self.context} tokens there are")
        words = {"window-policy": POLICIES, "placement": PLACEMENTS, "strategy": STRATEGIES, "device-type": DEVICES}
        values = (self.policy, self.placement, self.strategy, self.device)
        for (flag, known), value in zip(words.items(), values, strict=True):
            if value not in known:
                raise ValueError(f"--{flag} {value!r}: use one of {', '.join(known)}")


def zipf_distinct(vocab_size: int, tokens: int) -> float:
    """Expected distinct ids in T independent draws with p_v = 1 / (v H_V): the sum over v of 1 - (1 - p_v)^T."""
    share = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    share /= share.sum()
    return -torch.expm1(tokens * torch.log1p(-share)).sum().item() if vocab_size > 1 else 1.0


# ---------------------------------------------------------------------------- parameters


def parameters(sizes: Sizes) -> dict[str, Counter]:
    """Shape -> number of parameters, by kind: embedding and table (compute dtype), adam and muon (fp32)."""
    C, V, kv_dim = sizes.n_embd, sizes.vocab, sizes.kv_dim
    adam, muon = Counter({(V, C): 1}), Counter()  # lm_head
    for spec in sizes.specs:
        muon.update([(C, C), (C, C), (kv_dim, C), (sizes.mlp_hidden, C), (C, sizes.mlp_hidden)])
        muon.update([(kv_dim, C)] if spec.projects else [])
        muon.update([(sizes.n_kv_head, GATE_CHANNELS)] if spec.gated else [])
        adam.update((size,) for size, _ in spec.coefficients(sizes.n_kv_head).values())
    adam.update([(sizes.n_layer,), (sizes.n_layer,), (1,)] if sizes.trunk == "full" else [])
    adam.update([(1, SMEAR_CHANNELS), (1,)] if sizes.smear else [])
    tables = Counter({(V, kv_dim): len(sizes.tables)})
    return {"embedding": Counter({(V, C): 1}), "table": tables, "adam": adam, "muon": muon}


def stored(kind: str, dtype: torch.dtype) -> int:
    """Bytes of one element of a kind of parameter; fp16 models keep everything in fp32."""
    return dtype.itemsize if kind in ("embedding", "table") and dtype != torch.float16 else 4


def _elements(shapes: Counter) -> int:
    return sum(count * math.prod(shape) for shape, count in shapes.items())


def weight_bytes(sizes: Sizes, dtype) -> int:
    """All parameters but the tables."""
    return sum(_elements(shapes) * stored(k, dtype) for k, shapes in parameters(sizes).items() if k != "table")


def table_bytes(sizes: Sizes, dtype) -> int:
    """All tables, of bank layers and of gated value embeddings."""
    return _elements(parameters(sizes)["table"]) * stored("table", dtype)


def optimizer_bytes(sizes: Sizes, dtype, ranks: int = 1) -> int:
    """One rank's optimizer state: two moments in the parameter's dtype and a step number (AdamW), momentum and one
    number per neuron of the longer side (Muon). Every rank has the same. See nanochat/optim.py.

    Raises ValueError when the ranks cannot share a tensor's rows evenly.
    """
    if ranks < 1:
        raise ValueError(f"--ranks {ranks}: at least 1")
    total = 0
    for kind, shapes in parameters(sizes).items():
        for shape, count in shapes.items():
            if kind == "muon":
                total += -(-count // ranks) * (math.prod(shape) + max(shape)) * 4
                continue
            elements = math.prod(shape)
            if ranks > 1 and elements >= SHARDED_FROM:
                if shape[0] % ranks:
                    raise ValueError(f"{kind}: {ranks} ranks cannot share its {shape[0]} rows evenly")
                elements //= ranks
            total += count * (2 * elements * stored(kind, dtype) + 4)
    return total


def train_bytes(sizes: Sizes, dtype, ranks: int = 1) -> dict[str, int]:
    """What one rank adds to the weights: whole gradients, tables included, however many ranks there are, and its part
    of the optimizer state. Activations are not in it.
    """
    gradients = weight_bytes(sizes, dtype) + table_bytes(sizes, dtype)
    return {"gradients": gradients, "optimizer": optimizer_bytes(sizes, dtype, ranks)}


# ---------------------------------------------------------------------------- decoding

# What lies on the compute device between two steps.
HELD = ("weights", "tables", "rotary", "k", "v", "ids", "slots", "slot_map", "pool", "state")


def decode_bytes(sizes: Sizes, decode: Decode) -> dict[str, int]:
    """Bytes by what they are for: HELD, host_tables (mmap: read buffers), and what a step allocates at its peak in one
    layer's attention (temporaries) and in all (step_temporaries).

    v: only layers with spec.caches_value. ids: int32 (B, S). slots: int64 (B, S), and slot_map: int32 and int64 (V,),
    where a layer is pooled or considers it, or tables are placed. pool: rows of the distinct tokens of every table that
    is placed or pooled, and room for a quarter more, as after one prompt; of pooled ones also the places of the rows
    where bags add them up. state: row lengths, the smear's embedding.
    """
    B, S, dtype = decode.batch, decode.context, decode.dtype
    kept = [sizes.rows(i, S, decode.policy) for i in range(sizes.n_layer)]
    row = B * sizes.kv_dim * dtype.itemsize
    banks = sizes.bank_layers
    table_row = sizes.kv_dim * stored("table", dtype)
    placed = len(sizes.bank_tables) if decode.placement != "device" else 0
    buffered = max(1, BUFFER_BYTES // table_row) if decode.placement == "mmap" else sizes.vocab
    slots = placed or any(chosen(sizes, replace(decode, distinct=1), i) == "pooled" for i in banks)
    pooled = {sizes.specs[i].table for i in banks if chosen(sizes, decode, i) == "pooled"}
    pools = {sizes.specs[i].table for i in banks} if placed else pooled
    return {
        "weights": weight_bytes(sizes, dtype),
        "tables": table_bytes(sizes, dtype) - placed * sizes.vocab * table_row,
        "host_tables": placed * buffered * table_row,
        "rotary": sizes.rotary * (sizes.n_embd // sizes.n_head) * dtype.itemsize,
        "k": sum(kept) * row,
        "v": sum(rows for i, rows in enumerate(kept) if i not in banks) * row,
        "ids": 4 * B * S if banks else 0,
        "slots": 8 * B * S if slots else 0,
        "slot_map": (4 + 8) * sizes.vocab if slots else 0,
        "pool": len(pools) * min(sizes.vocab, decode.distinct + decode.distinct // 4 + 64) * table_row
        + kept_places(sizes, decode),
        "state": 4 * B * (2 if banks else 1) + (B * sizes.n_embd * dtype.itemsize if sizes.smear else 0),
        "temporaries": max(attention_temporaries(sizes, decode, i) for i in range(sizes.n_layer)),
        "step_temporaries": step_temporaries(sizes, decode),
    }


def held(parts: dict[str, int]) -> int:
    """Bytes on the compute device between two steps."""
    return sum(parts[name] for name in HELD)


def chosen(sizes: Sizes, decode: Decode, layer: int) -> str:
    """How a layer attends in a step: cached, or as decode.rule says gather, fused or pooled."""
    if layer not in sizes.bank_layers:
        return "cached"
    numbers = dict(queries=1, length=decode.context, window=sizes.windows[layer], distinct=lambda: decode.distinct)
    return rule(decode.strategy, **numbers, kernel=True if decode.device == "cuda" else None)


def attended(sizes: Sizes, layer: int, context: int) -> int:
    """Keys that the newest query of a full context sees in a layer."""
    return min(context, sizes.windows[layer] + 1) if sizes.windows[layer] >= 0 else context


def attention_temporaries(sizes: Sizes, decode: Decode, layer: int) -> int:
    """What one layer's attention allocates at its peak in a step, by its largest tensors, nothing compiled.

    fp32 and CUDA attend to a given V without scores; everything else makes them, see decode.py and one_query.py.
    """
    B, H, U, dtype = decode.batch, sizes.n_kv_head, decode.distinct, decode.dtype
    keys, groups = attended(sizes, layer, decode.context), sizes.n_head // H
    way, row = chosen(sizes, decode, layer), stored("table", dtype)
    output, p = B * sizes.n_embd * dtype.itemsize, 4 * B * sizes.n_head * keys
    if way == "fused" and decode.device == "cuda":
        splits = kernels.split_count(B, H, keys, PROCESSORS)
        return output + 4 * B * splits * (sizes.n_embd + sizes.n_head)
    scores = p + max(p, _converted(sizes, decode, keys))
    if way == "pooled":
        weights, queries, aside = B * sizes.n_head * U, B * groups, 0
        if B > 1 and H > 1:  # the batch is copied side by side, at the latest in bags
            aside = 4 * weights if groups > 1 else row * weights * _in_bags(decode, queries)
        total = _sum_of_values(sizes, decode, (1, queries, U), row, kept=True)
        return max(scores, p + 4 * weights, 4 * weights + aside + total)
    if way == "fused":
        return max(scores, p + _sum_by_index(sizes, decode, (B, groups, keys), row))
    values = B * keys * sizes.kv_dim
    read = values * (row + dtype.itemsize) if way == "gather" and row != dtype.itemsize else 0
    if decode.device == "cuda" or dtype == torch.float32:
        dense = output
    else:
        dense = max(scores, p + _sum_of_values(sizes, decode, (B, groups, keys), dtype.itemsize))
    return max(read, dense + (values * dtype.itemsize if way == "gather" else 0))


def _converted(sizes: Sizes, decode: Decode, keys: int) -> int:
    """Bytes of the piece of K that is converted to fp32 at a time, and of its products."""
    if decode.device == "cuda" or decode.dtype == torch.float32:
        return 0
    piece = min(keys, max(16, one_query.PIECE // (decode.batch * sizes.kv_dim)))
    return 4 * decode.batch * piece * (sizes.kv_dim + sizes.n_head)


def _in_bags(decode: Decode, queries: int) -> bool:
    """Whether rows are added up in place by embedding_bag."""
    return decode.device == "cpu" and queries <= one_query.SUMMED_ALONE


def kept_places(sizes: Sizes, decode: Decode) -> int:
    """Bytes of one_query.value_bags for all pools: the place of each row for each query, and where each bag begins."""
    pooled = {sizes.specs[i].table for i in sizes.bank_layers if chosen(sizes, decode, i) == "pooled"}
    bags, U = decode.batch * sizes.n_head, decode.distinct
    if not _in_bags(decode, bags // sizes.n_kv_head):
        return 0
    return len(pooled) * 4 * bags * (U + one_query.bag_parts(bags, U))


def _sum_of_values(sizes: Sizes, decode: Decode, shape: tuple[int, int, int], itemsize: int, kept=False) -> int:
    """Bytes of one_query.weigh_values for rows of `itemsize`, its result too: (batch, queries of one kv head, rows).

    kept: the places of its bags are there already.
    """
    B, queries, rows = shape
    weights = B * sizes.n_kv_head * queries * rows
    places = 4 * weights if _in_bags(decode, queries) and not kept else 0
    return places + (itemsize * weights if itemsize < 4 else 0) + decode.batch * sizes.n_embd * itemsize


def _sum_by_index(sizes: Sizes, decode: Decode, shape: tuple[int, int, int], itemsize: int) -> int:
    """The same of one_query.weigh, which keeps the places of one query while it repeats them for all."""
    B, queries, rows = shape
    if _in_bags(decode, queries):
        once = 4 * B * sizes.n_kv_head * rows if queries > 1 else 0
        return once + _sum_of_values(sizes, decode, shape, itemsize)
    length = min(rows, max(16, one_query.PIECE // (B * sizes.kv_dim)))
    converted = 4 * length if itemsize < 4 else 0
    later = itemsize * min(length, rows - length)  # the next piece, made beside it
    return B * sizes.kv_dim * (itemsize * length + max(converted, later)) + 8 * decode.batch * sizes.n_embd


def step_temporaries(sizes: Sizes, decode: Decode) -> int:
    """What one decode step allocates, by its largest moment: a layer's attention, the MLP, or the head.

    Matrices are kept in fp32: the largest of a block, and lm_head, count as cast to the compute dtype.
    """
    B, itemsize = decode.batch, decode.dtype.itemsize
    cast = itemsize if itemsize < 4 else 0
    attention = max(attention_temporaries(sizes, decode, i) for i in range(sizes.n_layer))
    mlp = sizes.mlp_hidden * (sizes.n_embd * cast + 2 * B * itemsize)
    head = sizes.vocab * (sizes.n_embd * cast + B * itemsize)
    logits = sizes.vocab * B * 12
    return max(attention, mlp, head, logits)


# ---------------------------------------------------------------------------- savings

DENOMINATORS = {"v": "V of all layers", "kv": "K+V of all layers", "everything": "weights + tables + cache"}


def shares(sizes: Sizes, decode: Decode) -> dict[str, float]:
    """Share saved against `sizes.standard`, by denominator (DENOMINATORS, of the standard model).

    v, kv: V no longer cached minus the tables on the device, the paper's count. v_all, kv_all and everything: all that
    is held counts, so ids, slots, pools, and the W_V that is gone.
    """
    own, standard = decode_bytes(sizes, decode), decode_bytes(sizes.standard, decode)
    paper = standard["v"] - own["v"] - (own["tables"] - standard["tables"])
    whole = held(standard) - held(own)
    of = {"v": standard["v"], "kv": standard["k"] + standard["v"], "everything": held(standard)}
    return {
        "v": paper / of["v"], "kv": paper / of["kv"],
        "v_all": whole / of["v"], "kv_all": whole / of["kv"], "everything": whole / of["everything"],
    }  # fmt: skip


def limits(sizes: Sizes, policy: str = "full") -> dict[str, float]:
    """Where shares v and kv go for ever longer text: the part of V, of K+V, in the layers without a V cache."""
    grows = [i for i in range(sizes.n_layer) if policy == "full" or not sizes.is_window(i)]
    part = len(set(grows) & set(sizes.bank_layers)) / len(grows)
    return {"v": part, "kv": part / 2}


def break_even(sizes: Sizes, decode: Decode) -> dict[str, float]:
    """batch * context at which a model holds as much as its standard form, for `decode`'s context and any batch.

    tables: the tables equal the V no longer cached (V rows per table under `full`). all: everything held counts, so
    ids, slots, slot map, pools of `decode`'s distinct tokens, the W_V that is gone; only kept_places do not, a few
    percent of a pool that grow with the batch. 0 when the banks always save, inf when never or without.
    """
    own, standard = decode_bytes(sizes, decode), decode_bytes(sizes.standard, decode)
    saved = standard["v"] - own["v"]
    tables = own["tables"] - standard["tables"]
    pool = own["pool"] - kept_places(sizes, decode)
    fixed = tables + own["slot_map"] + pool + own["weights"] - standard["weights"]
    tokens = decode.batch * decode.context
    grows = own["ids"] + own["slots"] + own["state"] - standard["state"]
    return {"tables": _tokens(tables, saved / tokens), "all": _tokens(fixed, (saved - grows) / tokens)}


def _tokens(paid: int, saved: float) -> float:
    return math.inf if saved <= 0 else max(0.0, paid / saved)


MOST_ROWS = 2**20


def paying_batch(sizes: Sizes, decode: Decode, distinct) -> int | None:
    """Smallest batch at `decode`'s context from which on everything held, pools included, is less than in the standard
    form; None when that takes more than MOST_ROWS. distinct: number of tokens -> U.
    """

    def saves(batch):
        there = replace(decode, batch=batch, distinct=distinct(batch * decode.context))
        return held(decode_bytes(sizes, there)) < held(decode_bytes(sizes.standard, there))

    tried = sorted({round(2 ** (k / 4)) for k in range(81)})  # pools stop growing at some point: not monotonous
    failed = [batch for batch in tried if not saves(batch)]
    if not failed:
        return 1
    if failed[-1] == MOST_ROWS:
        return None
    low, high = failed[-1], tried[tried.index(failed[-1]) + 1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if saves(middle) else (middle, high)
    return high


def storage_bytes(tensors) -> int:
    """Bytes of the distinct storages behind `tensors`, whole, however small the views."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for address, size in storages.items() if address)
