"""The suite of scripts/infer_bench.py: what decoding without a V cache must reach, section by section.

Each section takes a Setting and returns a list of rows for the JSON file; it prints a line per row. Times are medians
with quartiles over rounds in which all sides take turns; "a / b" is the time of a over the time of b, round by round.
"""

import gc
import math
import time
from dataclasses import dataclass

import torch

from nanochat.bench import layer as decode_layer
from nanochat.bench.layer import PARTS, WITH_V, Layer, Shape, bytes_needed, ways_on
from nanochat.bench.resident import mmap, stand_in_tokenizer
from nanochat.bench.sides import (
    WARMUP,
    IdSource,
    Side,
    available_bytes,
    bank_layers,
    baseline_config,
    cache_bytes,
    formula_bytes,
    interleave,
    milliseconds,
    random_model,
    ratio,
    set_context,
    spare_positions,
)
from nanochat.bov import host, kernels
from nanochat.bov.spec import layer_specs
from nanochat.common import get_peak_bandwidth
from nanochat.gpt import GPTConfig
from nanochat.metrics import device_name

POWERS = tuple(2**k for k in range(10, 19))
DEFAULTS = {  # section: (contexts, batches) where the flags give none
    "cpu": {
        "attention": ((32768, 131072), (1,)),
        "steps": ((64, 128, 256, 512, 1024, 2048, 8192, 32768), (1,)),
        "layout": ((2048, 32768), (1,)),
        "bytes": ((2048, 32768), (1, 4)),
        "growth": (POWERS, (1,)),
    },
    "cuda": {
        "attention": ((1024, 8192, 32768, 131072, 262144), (1, 4, 16, 64)),
        "steps": ((64, 2048, 8192, 32768, 131072, 262144), (1, 8, 64)),
        "layout": ((2048, 32768), (1, 8)),
        "bytes": ((2048, 32768), (1, 4)),
        "growth": (POWERS, (1,)),
    },
}
DISTINCT_AT = 32768  # positions at which pooled is timed against the number of distinct tokens
PATTERNS = ("L", "SSSL")
FLUSH_BYTES = {"cpu": 2**26, "cuda": 2**28}  # more than the last-level cache


@dataclass(frozen=True)
class Setting:
    """What the sections share. config: the model with banks; contexts, batches: instead of DEFAULTS; deadline: on
    time.perf_counter, after which a section leaves out its remaining cases.
    """

    config: GPTConfig
    device: torch.device
    ids: IdSource
    seed: int
    rounds: int
    strategy: str = "auto"
    contexts: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    flush_bytes: int = 0
    compiled: bool = False
    deadline: float = math.inf

    def cases(self, section):
        """(batch, context) of a section, small ones first."""
        contexts, batches = DEFAULTS[self.device.type][section]
        return [(b, t) for t in self.contexts or contexts for b in self.batches or batches]

    def skip(self, needed: float) -> str | None:
        """Why a case that needs so many bytes is left out, if it is."""
        if time.perf_counter() > self.deadline:
            return "the time given by --budget is over"
        gc.collect()
        free = available_bytes(self.device)
        if needed > 0.85 * free:
            return f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
        return None


def count_banks(config) -> int:
    """Layers without a V cache."""
    return sum(not spec.caches_value for spec in layer_specs(config.n_layer, host.axes_of(config)))


def skipped(case: dict, reason: str) -> dict:
    print(f"  {describe(case)}: left out, {reason}", flush=True)
    return case | {"skipped": reason}


def describe(case: dict) -> str:
    return ", ".join(f"{name} {value:,}" if isinstance(value, int) else f"{value}" for name, value in case.items())


# ---------------------------------------------------------------------------- one layer


def attention(setting: Setting) -> list[dict]:
    """The attention of one bank layer by every way, its parts, and its share of what bandwidth allows."""
    ways = ways_on(setting.device)
    if "fused" not in ways:
        print(f"  fused is left out: {kernels.available(setting.device)}")
    return [_attention(setting, batch, context, ways) for batch, context in setting.cases("attention")]


def growth(setting: Setting) -> dict[str, list]:
    """Time against T by every way, and pooled's V side against U at a fixed length."""
    ways = [way for way in ways_on(setting.device) if way != "sdpa"]
    lengths = setting.contexts or DEFAULTS[setting.device.type]["growth"][0]
    rows = [_attention(setting, 1, context, ways) for context in lengths]
    context = min(DISTINCT_AT, max(lengths))
    return {"by_context": rows, "by_distinct": [_v_side(setting, context, kinds) for kinds in _kinds(setting.config)]}


def _kinds(config):
    """Numbers of different tokens, up to the vocabulary."""
    largest = config.vocab_size
    return [u for u in (64, 256, 1024, 2048, 4096, 8192, 12288) if 2 * u < largest] + [largest]


def _attention(setting, batch, context, ways) -> dict:
    case, shape = {"batch": batch, "context": context}, Shape.of(setting.config)
    positions = context + setting.rounds + 2 * WARMUP + 2 + _part_rounds(setting)
    if reason := setting.skip(bytes_needed(shape, ways, batch, positions)):
        return skipped(case, reason)
    ids = setting.ids.draw(batch, positions)
    layer = Layer(shape, ids, context, ways, setting.device, setting.seed, setting.flush_bytes)
    differences = layer.check()
    sides = {way: lambda way=way: layer.timed_step(way) for way in ways}
    times = interleave(sides, setting.rounds, setting.seed)
    parts = _parts(layer, _part_rounds(setting))
    distinct = ids[:, :context].unique().numel()
    row = case | {
        "distinct": distinct,
        "ms": {way: milliseconds(t) for way, t in times.items()},
        "ratios": {f"{way} / pooled": ratio(times, way, "pooled") for way in ways if way != "pooled"},
        "pooled_parts_ms": parts,
        "largest_difference": differences,
    }
    if "sdpa" in ways:
        row["ratios"]["sdpa / cached"] = ratio(times, "sdpa", "cached")
    row |= _bandwidth(setting, shape, row)
    print(_attention_line(row), flush=True)
    return row


def _part_rounds(setting):
    return max(3, setting.rounds // 4)


def _parts(layer, rounds) -> dict:
    """Median milliseconds of each part of a pooled step, each timed in turn."""
    found = [layer.pooled_parts()[1] for _ in range(WARMUP + rounds)][WARMUP:]
    return {part: milliseconds([spent[part] for spent in found])["median"] for part in PARTS}


def _bandwidth(setting, shape, row) -> dict:
    """Bytes that the ways must read, the gain of pooled that they allow (bound, K + V over K + U rows), its share.

    Alone the layer pays for slots and ids of its token; in a model all bank layers share them.
    """
    positions = row["batch"] * row["context"]
    keys, best = positions * shape.row_bytes, "cached"
    pooled, found = keys + row["distinct"] * shape.row_bytes, row["ratios"][f"{best} / pooled"]["median"]
    bound = 2 * keys / pooled
    layers = count_banks(setting.config)
    ms, spared = row["ms"]["pooled"]["median"], row["pooled_parts_ms"]["bookkeeping"] * (1 - 1 / layers)
    read = {way: 2 * keys if way in WITH_V or way in ("gather", "fused") else pooled for way in row["ms"]}
    speed = {way: read[way] / (row["ms"][way]["median"] / 1e3) for way in read}
    peak = get_peak_bandwidth(device_name(setting.device))
    return {
        "bytes_read": {"cached": 2 * keys, "pooled": pooled},
        "bound": bound,
        "share_of_bound": {
            "alone": found / bound,
            f"bookkeeping shared by {layers} layers": found / bound * ms / (ms - spared),
        },
        "gb_per_second": {way: s / 1e9 for way, s in speed.items()},
        "share_of_peak_bandwidth": {way: s / peak if math.isfinite(peak) else None for way, s in speed.items()},
    }


def _attention_line(row):
    times = ", ".join(f"{way} {found['median']:.3g}" for way, found in row["ms"].items())
    parts = ", ".join(f"{part} {ms:.3g}" for part, ms in row["pooled_parts_ms"].items())
    others = (f"{name.split()[0]} {r['median']:.2f}" for name, r in row["ratios"].items() if name.endswith("/ pooled"))
    alone, shared = row["share_of_bound"].values()
    return (
        f"  batch {row['batch']}, T {row['context']:,}, U {row['distinct']:,}, ms: {times}\n"
        f"    pooled is faster than: {', '.join(others)} times; {alone:.0%} ({shared:.0%} with shared bookkeeping) of "
        f"the bound {row['bound']:.2f} against cached\n    its parts, ms: {parts}"
    )


def _v_side(setting, context, kinds) -> dict:
    """Pooled's parts over `kinds` equally frequent tokens."""
    case, shape = {"context": context, "kinds": kinds}, Shape.of(setting.config)
    rounds = _part_rounds(setting)
    if reason := setting.skip(bytes_needed(shape, ["pooled"], 1, context)):
        return skipped(case, reason)
    generator = torch.Generator().manual_seed(setting.seed)
    ids = torch.randint(kinds, (1, context + WARMUP + rounds), generator=generator)
    layer = Layer(shape, ids, context, ["pooled"], setting.device, setting.seed, setting.flush_bytes)
    parts = _parts(layer, rounds)
    distinct = ids[:, :context].unique().numel()
    row = case | {
        "distinct": distinct, "pooled_parts_ms": parts,
        "v_side_ms": parts["scatter"] + parts["product"],
    }  # fmt: skip
    print(f"  T {context:,}, U {distinct:,}: scatter {parts['scatter']:.3g} ms, product {parts['product']:.3g} ms")
    return row


# ---------------------------------------------------------------------------- whole steps


@dataclass
class Models:
    """The model with banks and paper/baseline of its shape, built once for all contexts."""

    setting: Setting

    def __post_init__(self):
        s = self.setting
        longest = max(context for name in ("steps", "layout", "bytes") for _, context in s.cases(name))
        positions = longest + spare_positions(longest, self.rounds(longest)) + 1
        self.banks = random_model(s.config, s.device, s.seed, positions)
        self.baseline = random_model(baseline_config(s.config), s.device, s.seed, positions)

    def rounds(self, context) -> int:
        """Short steps are repeated more often."""
        return self.setting.rounds * (2 if context <= 2048 else 1)

    def side(self, name, ids, context):
        """Side `name`: banks, v_cache (the same model with V cached), baseline, or upstream (baseline, its layout)."""
        model = self.baseline if name in ("baseline", "upstream") else self.banks
        options = {"v_cache": {"value_layers": None}, "upstream": {"upstream": True}}.get(name, {})
        return Side(model, ids, context, seed=self.setting.seed, strategy=self.setting.strategy, **options)

    def set(self, context, pattern):
        """Give both models a sequence_len and windows; past sequence_len a long layer would leave keys out."""
        for model in (self.banks, self.baseline):
            set_context(model, context, pattern)

    def needed(self, names, batch, context) -> int:
        """Bytes of the caches of sides, and of one layer's gathered V."""
        row = Shape.of(self.setting.config).row_bytes
        layers = {"banks": len(self.banks.value_layers)}
        kept = sum(self.setting.config.n_layer + layers.get(name, self.setting.config.n_layer) for name in names)
        return int(1.1 * batch * context * row * (kept + 1))


def steps(setting: Setting, models: Models) -> list[dict]:
    """Whole decode steps: the model with banks against paper/baseline."""
    return _compare(setting, models, "steps", ("banks", "baseline"))


def layout(setting: Setting, models: Models) -> list[dict]:
    """Whole decode steps of paper/baseline: upstream's cache layout and SDPA against ours."""
    return _compare(setting, models, "layout", ("upstream", "baseline"))


def _compare(setting, models, section, names) -> list[dict]:
    rows = []
    for pattern in PATTERNS:
        for batch, context in setting.cases(section):
            case = {"pattern": pattern, "batch": batch, "context": context}
            reason = setting.skip(models.needed(names, batch, context))
            rows.append(skipped(case, reason) if reason else case | _step_times(setting, models, names, case))
    return rows


def _step_times(setting, models, names, case) -> dict:
    batch, context = case["batch"], case["context"]
    rounds = models.rounds(context)
    ids = setting.ids.draw(batch, context + spare_positions(context, rounds))
    models.set(ids.size(1), case["pattern"])
    sides = {name: models.side(name, ids, context) for name in names}
    times = interleave({name: side.timed_step for name, side in sides.items()}, rounds, setting.seed)
    pair = f"{names[0]} / {names[1]}"
    found = {
        "distinct": ids[:, :context].unique().numel(),
        "ms": {name: milliseconds(t) for name, t in times.items()},
        "ratios": {pair: ratio(times, *names)},
    }
    ms = ", ".join(f"{name} {t['median']:.4g}" for name, t in found["ms"].items())
    low, high = found["ratios"][pair]["quartiles"]
    print(
        f"  {describe(case)}, ms: {ms}; {pair} {found['ratios'][pair]['median']:.3f} ({low:.3f}-{high:.3f})", flush=True
    )
    return found


# ---------------------------------------------------------------------------- bytes


def bytes_(setting: Setting, models: Models) -> dict[str, list]:
    """Cache bytes as allocated and by formula, V bytes of bank layers, and the largest thing that a step makes."""
    rows = []
    for batch, context in setting.cases("bytes"):
        for name in ("banks", "v_cache", "baseline"):
            case = {"side": name, "batch": batch, "context": context}
            reason = setting.skip(models.needed([name], batch, context))
            rows.append(skipped(case, reason) if reason else case | _cache_bytes(setting, models, case))
    return {"caches": rows, "largest": _largest(setting)}


def _cache_bytes(setting, models, case) -> dict:
    batch, context = case["batch"], case["context"]
    ids = setting.ids.draw(batch, context + 1)
    models.set(context + 1, "L")
    side = models.side(case["side"], ids, context)
    measured = cache_bytes(side.cache)
    formula = formula_bytes(side, ids.unique().numel())
    caches = (side.cache.get_layer_cache(i)[1] for i in bank_layers(models.banks))
    found = {
        "measured": measured,
        "formula": formula,
        "equal": measured == formula,
        "v_bytes_of_bank_layers": sum(0 if v is None else v.nbytes for v in caches),
    }
    word = "as the formula says" if found["equal"] else f"by formula {formula['total']:,}"
    v = found["v_bytes_of_bank_layers"]
    print(f"  {describe(case)}: {measured['total']:,} bytes, {word}; V of bank layers {v:,}", flush=True)
    return found


def _largest(setting) -> dict:
    """The largest memory that one step of each way without V makes, against the T * D elements of one head's V."""
    shape, context = Shape.of(setting.config), max(context for _, context in setting.cases("bytes"))
    ids = setting.ids.draw(1, context + 4)
    found = {"context": context, "limit_elements": context * shape.head_dim}
    for way in ("pooled", "fused", "gather"):
        layer = Layer(shape, ids, context, [way], setting.device, setting.seed)
        layer.step(way)  # makes slots and pool
        seen = decode_layer.largest_result(lambda: layer.step(way))  # noqa: B023
        found[way] = {
            "elements": seen.elements, "operation": seen.operation,
            "makes_t_times_d": seen.elements >= found["limit_elements"],
        }  # fmt: skip
        if setting.device.type == "cpu":
            found[way]["largest_allocation_bytes"] = decode_layer.largest_allocation(lambda: layer.step(way))  # noqa: B023
        print(
            f"  {way} at T {context:,} makes at most {seen.elements:,} elements ({seen.operation}); T * D is "
            f"{found['limit_elements']:,}",
            flush=True,
        )
    return found


# ---------------------------------------------------------------------------- all of them

SECTIONS = ("attention", "steps", "layout", "bytes", "mmap", "growth")


def run_suite(setting: Setting, sections, save) -> dict:
    """Run sections in order; `save(results)` is called after each.

    Raises ValueError when no layer of the model does without a V cache.
    """
    if count_banks(setting.config) == 0:
        raise ValueError("--suite compares layers without a V cache, and this model has none: use --preset paper/bov")
    if "mmap" in sections:
        stand_in_tokenizer(setting.config.vocab_size)  # refuses a size before anything is measured
    results, models = {}, None
    for name in sections:
        print(f"{name}", flush=True)
        begin = time.perf_counter()
        if name in ("steps", "layout", "bytes"):
            models = models or Models(setting)
            results[name] = {"steps": steps, "layout": layout, "bytes": bytes_}[name](setting, models)
        else:
            results[name] = {"attention": attention, "mmap": mmap, "growth": growth}[name](setting)
        print(f"  [{time.perf_counter() - begin:.0f} s]", flush=True)
        save(results)
    return results


# ---------------------------------------------------------------------------- what it must reach


def aims(results: dict) -> list[dict]:
    """What issue-level aims the rows say something about: what is wanted, what was found, whether it is met."""
    found = []

    def aim(text, value, limit, at_most=False):
        met = value <= limit if at_most else value >= limit
        found.append({"aim": text, "wanted": limit, "found": value, "met": met})

    for row in _of(results.get("attention", []), batch=1):
        times = {32768: (1.5, 4), 131072: (2, 8)}.get(row["context"])
        if times is None:
            continue
        place, ratios = f"attention, T {row['context']:,}: ", row["ratios"]
        aim(place + "upstream / pooled at least", ratios["upstream / pooled"]["median"], times[0])
        aim(place + "gather / pooled at least", ratios["gather / pooled"]["median"], times[1])
        aim(place + "share of the bandwidth bound at least", row["share_of_bound"]["alone"], 0.85)
        aim(place + "sdpa / cached at least", ratios["sdpa / cached"]["median"], 1)
    for row in _of(results.get("steps", []), batch=1, pattern="L"):
        text = f"step, all-L, T {row['context']:,}: banks / baseline at most"
        if row["context"] <= 2048 or row["context"] == 32768:
            limit = 1.1 if row["context"] <= 2048 else 1.0
            aim(text, row["ratios"]["banks / baseline"]["median"], limit, at_most=True)
    if "bytes" in results:
        _byte_aims(results["bytes"], aim)
    if "mmap" in results:
        aim("mmap: part of the tables' bytes that memory is lower by at least", results["mmap"]["saved_share"], 0.9)
        aim("mmap / device, step time at most", results["mmap"]["ratios"]["mmap / device"]["median"], 1.1, at_most=True)
    return found


def _byte_aims(section, aim):
    rows, largest = _of(section["caches"]), section["largest"]
    if rows:
        difference = max(abs(row["measured"]["total"] - row["formula"]["total"]) for row in rows)
        aim("cache bytes: difference to the formula at most", difference, 0, at_most=True)
        v = max(row["v_bytes_of_bank_layers"] for row in rows if row["side"] == "banks")
        aim("V bytes of bank layers at most", v, 0, at_most=True)
    if largest["context"] < 32768:  # in small caches the buffer for converted keys is the largest
        return
    for way in ("pooled", "fused"):
        text = f"{way}: elements of its largest tensor (T * D = {largest['limit_elements']:,}) at most"
        aim(text, largest[way]["elements"], largest["limit_elements"] - 1, at_most=True)


def _of(rows, **wanted):
    return [r for r in rows if "skipped" not in r and all(r[name] == value for name, value in wanted.items())]
