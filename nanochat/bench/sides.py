"""Measuring decoding: random models, caches filled without a forward, sides that take turns, times and bytes.

Everything compared is timed in one process, in rounds: each side takes one step per round, in a new order every round,
so that other load on the machine hits all of them, and ratios are taken round by round.
Shapes: B batch, T positions cached before the first step, L layers, H kv heads, N query heads, D head dim, U distinct.
"""

import math
import random
import statistics
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from nanochat.bov import host
from nanochat.bov.memory import Decode, Sizes, decode_bytes, storage_bytes
from nanochat.bov.presets import preset
from nanochat.common import COMPUTE_DTYPE
from nanochat.engine import KVCache
from nanochat.flash_attention import flash_attn
from nanochat.gpt import GPT, QK_SCALE, window_sizes

WARMUP = 3  # steps before the first that counts
ROTARY_CONTEXTS = 10  # positions of a model's rotary table per position of sequence_len

# ---------------------------------------------------------------------------- models and token ids


def random_model(config, device, seed, positions):
    """A GPT in which nothing is zero, stored as an export is: matrices in the compute dtype. In eval mode.

    Its rotary table has room for `positions` and not for ten contexts (of 262,144 it would take 671 MB in bf16).
    """
    with torch.device("meta"):
        model = GPT(replace(config, sequence_len=math.ceil(positions / ROTARY_CONTEXTS)))
    model.to_empty(device=device)
    torch.manual_seed(seed)
    model.init_weights()
    with torch.no_grad():
        for block in model.transformer.h:
            for linear in (block.attn.c_proj, block.mlp.c_proj):
                torch.nn.init.normal_(linear.weight, std=config.n_embd**-0.5)
        if config.smear:
            model.smear_lambda.fill_(0.1)
        for p in model.parameters():
            p.data = p.data.to(COMPUTE_DTYPE) if p.ndim > 1 else p.data
    set_context(model, config.sequence_len)
    return model.eval()


def set_context(model, context, pattern=None):
    """Make `context` the model's sequence_len: a long layer attends to all of it, a short one to a quarter."""
    model.config.sequence_len = context
    model.config.window_pattern = pattern or model.config.window_pattern
    model.window_sizes = window_sizes(model.config)


def baseline_config(config):
    """The same shape with the axes of paper/baseline."""
    defaults = {name: default for name, (default, _) in host.AXES.items()}
    return replace(config, **(defaults | preset("paper/baseline")))


def bank_layers(model) -> tuple[int, ...]:
    """Layers that need no V cache."""
    return tuple(i for i in range(model.config.n_layer) if i not in model.value_layers)


class IdSource:
    """Token ids to decode from: "zipf" (s = 1, seeded), or a text file through a tokenizer.

    Raises ValueError naming --ids when the file is missing, is no text, or its tokens are not in the vocabulary.
    """

    def __init__(self, source, vocab_size, seed, tokenizer=None):
        self.source, self.vocab_size, self.seed, self.tokens = source, vocab_size, seed, None
        if source == "zipf":
            return
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--ids {source}: cannot be read as text ({error}); or use zipf") from error
        self.tokens = torch.tensor(tokenizer.encode(text))
        if len(self.tokens) and self.tokens.max() >= vocab_size:
            raise ValueError(f"--ids {source}: its tokenizer has more tokens than the model's {vocab_size}")

    def __str__(self):
        return f"Zipf s=1 over {self.vocab_size:,}, seed {self.seed}" if self.tokens is None else f"text {self.source}"

    def draw(self, batch, length):
        """ids (batch, length) int64 on the CPU, the same at every call; ValueError when the text is too short."""
        if self.tokens is None:
            weights = 1 / torch.arange(1, self.vocab_size + 1, dtype=torch.float64)
            generator = torch.Generator().manual_seed(self.seed)
            return weights.multinomial(batch * length, replacement=True, generator=generator).view(batch, length)
        if batch * length > len(self.tokens):
            raise ValueError(
                f"--ids {self.source} has {len(self.tokens):,} tokens, {batch} rows of {length:,} need "
                f"{batch * length:,}: use a longer text, fewer contexts or zipf"
            )
        return self.tokens[: batch * length].view(batch, length)


# ---------------------------------------------------------------------------- caches

DRAWN = 4096  # positions; longer caches repeat them


def unit(*shape, generator):
    """Random vectors with the norm that queries and keys have, in the compute dtype."""
    x = torch.randn(*shape, generator=generator, device=generator.device)
    return (F.rms_norm(x, (shape[-1],)) * QK_SCALE).to(COMPUTE_DTYPE)


def fill_positions(cache, length, generator):
    """Random content for the first `length` positions of `cache` (..., T, H, D)."""
    block = unit(min(length, DRAWN), *cache.shape[-2:], generator=generator)
    for start in range(0, length, DRAWN):
        cache[..., start : min(start + DRAWN, length), :, :] = block[: length - start]


def fill_cache(cache, ids, generator):
    """Leave an empty cache as the forward of ids (B, T) would: ids known, K and V present (random), T positions."""
    length = ids.size(1)
    cache.check(length)
    cache.append_ids(ids)
    for stored in (cache.k_cache, cache.v_cache):
        fill_positions(stored, length, generator)
    cache.advance(length)


def upstream_attend(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, window_size=(-1, -1)):
    """One new token through SDPA, as upstream nanochat decodes without FA3; same arguments as flash_attn_with_kvcache.

    Here `cache_seqlens` is an int, one for all rows.
    """
    end = cache_seqlens + q.size(1)
    k_cache[:, cache_seqlens:end], v_cache[:, cache_seqlens:end] = k, v
    first = max(0, end - 1 - window_size[0]) if window_size[0] >= 0 else 0
    heads = (q.transpose(1, 2), *(cache[:, first:end].transpose(1, 2) for cache in (k_cache, v_cache)))
    return F.scaled_dot_product_attention(*heads, enable_gqa=q.size(2) != k_cache.size(2)).transpose(1, 2)


@contextmanager
def replaced(owner, name, value):
    """Set owner.name to `value` for the duration."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Side:
    """One way of decoding: a model and its own cache, held near `context` positions.

    ids (B, context + spare): what is decoded. value_layers: as KVCache's, by default what the model needs.
    upstream: cache in upstream's layout and SDPA over it.
    """

    def __init__(self, model, ids, context, *, seed, strategy="auto", value_layers="needed", upstream=False):
        self.model, self.context, self.seed, self.upstream = model, context, seed, upstream
        self.ids = ids.to(model.get_device())
        config = model.config
        self.cache = KVCache(
            batch_size=len(ids), num_heads=config.n_kv_head, seq_len=ids.size(1),
            head_dim=config.n_embd // config.n_head, num_layers=config.n_layer, device=model.get_device(),
            dtype=COMPUTE_DTYPE, strategy=strategy,
            value_layers=model.value_layers if value_layers == "needed" else value_layers,
        )  # fmt: skip
        if upstream:
            self.cache.k_cache = self.cache.k_cache.contiguous()
            self.cache.v_cache = self.cache.v_cache.contiguous()
        self.restart()

    @torch.inference_mode()
    def restart(self):
        """Back to `context` positions, and one step, in which slots and pool are made."""
        self.cache.reset()
        ids = self.ids[:, : self.context]
        fill_cache(self.cache, ids, torch.Generator(self.ids.device).manual_seed(self.seed))
        x = self.model.transformer.wte(ids[:, -1:]).to(COMPUTE_DTYPE)
        self.cache.prev_embedding = F.rms_norm(x, (x.size(-1),))
        self.step()

    @torch.inference_mode()
    def step(self):
        at = self.cache.get_pos()
        attend = upstream_attend if self.upstream else flash_attn.flash_attn_with_kvcache
        with replaced(flash_attn, "flash_attn_with_kvcache", attend):
            return self.model(self.ids[:, at : at + 1], kv_cache=self.cache)

    def ready(self):
        """Make room for a step: a full cache goes back."""
        if self.cache.get_pos() == self.ids.size(1):
            self.restart()

    def timed_step(self) -> float:
        """Seconds of one step."""
        self.ready()
        return clocked(self.ids.device, self.step)[0]


def spare_positions(context, rounds) -> int:
    """How far a side moves on from `context` before it goes back: so little that the length hardly changes."""
    return 1 + min(max(8, context // 16), WARMUP + rounds)


# ---------------------------------------------------------------------------- time


def clocked(device, call):
    """(seconds, result) of call(). On CUDA between two events: with the device idle before, launching counts too."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, result
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def interleave(sides, rounds, seed) -> dict[str, list[float]]:
    """Seconds per round of every side {name: function that takes one step and returns its seconds}."""
    order, names = random.Random(seed), list(sides)
    for _ in range(WARMUP):
        for name in names:
            sides[name]()
    times = {name: [] for name in names}
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            times[name].append(sides[name]())
    return times


def spread(values) -> dict:
    """Median and quartiles."""
    quarter = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": quarter[1], "quartiles": [quarter[0], quarter[2]]}


def milliseconds(seconds) -> dict:
    """Median and quartiles in ms, to four digits."""
    return _rounded(spread([1e3 * s for s in seconds]))


def ratio(times, above, below) -> dict:
    """Median and quartiles over the rounds of time `above` divided by time `below`."""
    return _rounded(spread([a / b for a, b in zip(times[above], times[below], strict=True)]))


def _rounded(found):
    def digits(x):
        return float(f"{x:.4g}")

    return {"median": digits(found["median"]), "quartiles": [digits(x) for x in found["quartiles"]]}


def bank_attention(side, layers, steps) -> dict:
    """Milliseconds per step inside the attention calls of `layers`, over `steps` steps of their own.

    The calls are host.attend and flash_attn_with_kvcache: writing K (and V), ids, slots and pool count, projections
    do not. Timed apart from the step because each timer waits for the device.
    """
    current, inside, total, spent = [-1], [False], [0.0], []

    def timer(attend):
        def call(*args, **kwargs):
            if current[0] not in layers or inside[0]:
                return attend(*args, **kwargs)
            inside[0] = True
            seconds, y = clocked(side.ids.device, lambda: attend(*args, **kwargs))
            inside[0] = False
            total[0] += seconds
            return y

        return call

    def enter(layer):
        return lambda *_: current.__setitem__(0, layer)

    blocks = side.model.transformer.h
    hooks = [block.attn.register_forward_pre_hook(enter(i)) for i, block in enumerate(blocks)]
    dense = timer(flash_attn.flash_attn_with_kvcache)
    with replaced(host, "attend", timer(host.attend)), replaced(flash_attn, "flash_attn_with_kvcache", dense):
        for _ in range(steps):
            side.ready()
            total[0] = 0.0
            side.step()
            spent.append(total[0])
    for hook in hooks:
        hook.remove()
    return milliseconds(spent)


# ---------------------------------------------------------------------------- bytes


def tensors_in(value):
    """All tensors that an object of ours holds, in attributes, lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif type(value).__module__.startswith("nanochat."):
        yield from tensors_in(vars(value))


def cache_bytes(cache) -> dict[str, int]:
    """Bytes of a cache's storages by what they are for, and their total; the names are memory.decode_bytes' own."""
    h = cache.history
    parts = {
        "k": [cache.k_cache],
        "v": [cache.v_cache],
        "ids": [] if h is None else [h.ids],
        "slots": [] if h is None else [h.slots],
        "slot_map": [] if h is None else [h.token_slot, h.pool_ids],
        "state": [cache.cache_seqlens, cache.prev_embedding] + ([] if h is None else [h.lengths]),
    }
    sizes = {name: storage_bytes([t for t in held if t is not None]) for name, held in parts.items()}
    total = storage_bytes(tensors_in(cache))
    return sizes | {"pool": total - sum(sizes.values()), "total": total}


def formula_bytes(side, distinct, placement="device") -> dict[str, int]:
    """The same by formula (nanochat/bov/memory.py), for the tokens `distinct` of the first step, which makes the pools.

    How layers decode then follows from the positions filled; what the cache allocates, from all it has room for.
    """
    model, cache = side.model, side.cache
    sizes = Sizes.of(model.config, [left for left, _ in model.window_sizes], padding=64)
    if cache.history is None:
        sizes = sizes.standard
    filled = side.context + 1
    use = Decode(
        cache.batch_size, filled, COMPUTE_DTYPE, distinct, placement=placement, device=side.ids.device.type,
        strategy="auto" if cache.history is None else cache.history.strategy,
    )  # fmt: skip
    parts = decode_bytes(sizes, use)
    found = {name: parts[name] // filled * cache.max_seq_len for name in ("k", "v", "ids", "slots")}
    found |= {name: parts[name] for name in ("slot_map", "pool", "state")}
    return found | {"total": sum(found.values())}


def available_bytes(device) -> float:
    """Memory that can still be allocated on a device; infinite where the system does not say."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
