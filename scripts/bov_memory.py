"""Memory of a model while it decodes and trains: by formula, and with --measure as allocated on this machine.

python -m scripts.bov_memory --depth 12 --vocab-size 32768 --batch 1 --context 2048,32768
python -m scripts.bov_memory --depth 4 --vocab-size 4096 --context 2048 --measure --json
python -m scripts.bov_memory --depth 12 --plot saved.png --vocabs 32768,151936

Without --preset the model is paper/bov. Savings are against the same shape with standard attention in its bank layers.
"""

import argparse
import json
import math
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import torch

from nanochat.authors_checkpoints import authors_config
from nanochat.bov import decode as bov_decode
from nanochat.bov import host, memory, placement
from nanochat.bov.memory import Decode, Sizes
from nanochat.checkpoint_manager import list_steps, meta_path, resolve_checkpoint
from nanochat.common import COMPUTE_DTYPE, DTYPES, autodetect_device_type, compute_init, run_script
from nanochat.gpt import GPTConfig, config_from_dict
from nanochat.memory_meter import SEED, measure
from nanochat.plan import memory_sizes, meta_model, model_config

SHAPE_FLAGS = ("depth", "aspect_ratio", "width", "head_dim", "kv_heads", "vocab_size", "max_seq_len", "window_pattern")
LABELS = {
    "weights": "weights without tables",
    "tables": "tables",
    "rotary": "rotary table",
    "k": "K cache",
    "v": "V cache",
    "ids": "token ids",
    "slots": "slots",
    "slot_map": "slot map",
    "pool": "pools of tables",
    "state": "lengths, smear state",
    "host_tables": "tables in host memory",
    "temporaries": "one attention layer, at its peak",
    "step_temporaries": "one decode step, at its peak",
    "gradients": "gradients",
    "optimizer": "optimizer state",
}

# ---------------------------------------------------------------------------- flags


def numbers(text: str) -> list[int]:
    """A comma list of positive ints."""
    try:
        values = [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: use numbers with commas between them, such as 1,64") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{min(values)}: must be at least 1")
    return values


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m scripts.bov_memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    g = p.add_argument_group("model: a checkpoint or a shape")
    g.add_argument("--model-tag", default=None, help="folder under base_checkpoints; its shape and axes")
    g.add_argument("--step", type=int, default=None, help="step of it (default: the newest)")
    g.add_argument("--depth", type=int, default=None, help="layers (default 12)")
    g.add_argument("--aspect-ratio", type=int, default=None, help="width = depth * aspect ratio (default 64)")
    g.add_argument("--width", type=int, default=None, help="width itself; both are rounded up to whole heads")
    g.add_argument("--head-dim", type=int, default=None, help="default 128")
    g.add_argument("--kv-heads", type=int, default=None, help="key and value heads (default: as many as query heads)")
    g.add_argument("--vocab-size", type=int, default=None, help="default 32768")
    g.add_argument("--max-seq-len", type=int, default=None, help="sequence_len (default: the context, at least 2048)")
    g.add_argument("--window-pattern", default=None, help="S quarter of sequence_len, L all of it (default SSSL)")
    host.add_flags(p)
    g = p.add_argument_group("use")
    g.add_argument("--batch", type=numbers, default=[1], help="rows, comma list")
    g.add_argument("--context", type=numbers, default=None, help="positions per row, comma list (2048)")
    g.add_argument("--dtype", choices=DTYPES, default=None, help="of cache and tables (default: this machine's)")
    g.add_argument("--window-policy", choices=memory.POLICIES, default="full", help="ring keeps the window alone")
    g.add_argument("--placement", choices=placement.PLACEMENTS, default="device", help="of the tables of bank layers")
    g.add_argument("--strategy", choices=bov_decode.STRATEGIES, default="auto", help="of decoding without V")
    g.add_argument("--device-type", choices=("cuda", "cpu", "mps"), default=None, help="default: what there is")
    g.add_argument("--distinct", default="zipf", help="tokens: a number, zipf (expected, s = 1) or bound (min(T, V))")
    g.add_argument("--ranks", type=int, default=1, help="that share the optimizer state in training")
    g = p.add_argument_group("output")
    g.add_argument("--measure", action="store_true", help="allocate it here, decode and train one step, and compare")
    g.add_argument("--plot", default=None, metavar="FILE.png", help="saved share against batch * context")
    g.add_argument("--vocabs", type=numbers, default=[32768, 151936], help="of the plot, comma list")
    g.add_argument("--json", action="store_true", help='last line {"formula": {...}, "measured": {...}}, in bytes')
    return p


# ---------------------------------------------------------------------------- what the flags mean


def checkpoint_config(args) -> GPTConfig:
    """The config in a checkpoint's metadata; the weights are not read."""
    folder, step = resolve_checkpoint("base", args.model_tag, args.step)
    if step not in list_steps(folder):
        raise FileNotFoundError(f"--step {step}: {folder} has the steps {', '.join(map(str, list_steps(folder)))}")
    meta = json.loads(meta_path(folder, step).read_text(encoding="utf-8"))
    config = meta["model_config"]
    config = config if meta.get("model_type") is None else authors_config(meta["model_type"], config)
    return config_from_dict({"window_pattern": "L"} | config)


def shape_config(args, context: int, vocab_size: int | None = None) -> GPTConfig:
    """The model of the flags for one context. Raises ValueError naming the flag."""
    given = {name: vars(args)[name] for name in SHAPE_FLAGS if vars(args)[name] is not None}
    if "width" in given and "aspect_ratio" in given:
        raise ValueError("--width and --aspect-ratio both say how wide the model is: give one")
    defaults = dict(depth=12, aspect_ratio=64, head_dim=128, kv_heads=0, vocab_size=32768, window_pattern="SSSL")
    shape = argparse.Namespace(**(vars(args) | defaults | {"max_seq_len": max(2048, context)} | given))
    if "width" in given and (args.width < 1 or shape.depth < 1):
        raise ValueError(f"--width {args.width} and --depth {shape.depth}: both are at least 1")
    if "width" in given:
        shape.aspect_ratio = Fraction(args.width, shape.depth)
    return model_config(shape, vocab_size or shape.vocab_size, shape.depth)


def config_for(args, context: int) -> GPTConfig:
    if args.model_tag is None:
        if args.step is not None:
            raise ValueError("--step without --model-tag: name the checkpoint")
        config = shape_config(args, context)
    else:
        given = [n for n in (*SHAPE_FLAGS, "preset", *host.AXES) if vars(args)[n] is not None]
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(f"--model-tag with {flags}: a checkpoint has its own shape and axes")
        config = checkpoint_config(args)
    return config


def sizes_of(config: GPTConfig) -> Sizes:
    return memory_sizes(meta_model(config))


def check_context(args, sizes: Sizes, context: int):
    if context > sizes.rotary:
        raise ValueError(
            f"--context {context} is past the {sizes.rotary} rotary positions of a model of sequence_len "
            f"{sizes.sequence_len}" + ("" if args.model_tag else "; raise --max-seq-len")
        )


def distinct_tokens(text: str, vocab_size: int, tokens: int) -> tuple[int, str]:
    """(number, how it came about) of --distinct for `tokens` tokens of a vocabulary."""
    bound = min(vocab_size, tokens)
    if text == "zipf":
        return round(memory.zipf_distinct(vocab_size, tokens)), "expected of Zipf's law, s = 1"
    if text == "bound":
        return bound, "the most there can be"
    if not text.isdigit() or not 1 <= int(text) <= bound:
        raise ValueError(f"--distinct {text!r}: use zipf, bound or a number from 1 to {bound}")
    return int(text), "given"


def draw_ids(text: str, vocab_size: int, batch: int, context: int) -> torch.Tensor:
    """Seeded ids (batch, context) as --distinct describes them; the last token of each row repeats the one before."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = batch * context
    if text == "zipf":
        weights = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
        ids = torch.multinomial(weights, tokens, replacement=True, generator=generator)
    else:
        kinds = distinct_tokens(text, vocab_size, tokens)[0]
        ids = torch.randperm(tokens, generator=generator) % kinds
    ids = ids.view(batch, context)
    if context > 1:
        ids[:, -1] = ids[:, -2]
    return ids


# ---------------------------------------------------------------------------- text


def size(count: int) -> str:
    if count < 2**10:
        return f"{count} B"
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"


def description_lines(config: GPTConfig, sizes: Sizes, decode: Decode, origin: str):
    """The model and its use; origin: where the number of distinct tokens comes from."""
    ways = defaultdict(list)
    for i in sizes.bank_layers:
        ways[memory.chosen(sizes, decode, i)].append(str(i))
    banks = "; ".join(f"{','.join(layers)} by {way}" for way, layers in ways.items())
    pools = "a pool for each pooled table, none with --strategy fused" if "pooled" in ways else "no pool"
    if decode.placement != "device":
        pools = "a pool for each placed table"
    yield (
        f"model   {config.n_layer} layers, width {config.n_embd}, {config.n_head} query and {config.n_kv_head} kv "
        f"heads of {config.n_embd // config.n_head}, vocabulary {config.vocab_size:,}, windows {config.window_pattern} "
        f"of {config.sequence_len:,}"
    )
    how = f"--strategy {decode.strategy}, {decode.device}; {pools}"
    yield f"        layers without a V cache: {banks or 'none'} ({how})"
    dtype = str(decode.dtype).removeprefix("torch.")
    yield (
        f"use     batch {decode.batch:,}, context {decode.context:,}, {dtype}, window policy {decode.policy}, "
        f"tables on {decode.placement}, {decode.distinct:,} distinct tokens ({origin})"
    )


def table_lines(formula: dict, standard: dict, measured: dict | None, ranks: int):
    """The bytes, one line each: this model by formula, the standard one, and this one as measured."""
    head = f"{'bytes':34}{'this model':>30}{'standard attention':>22}"
    yield head + (f"{'measured':>18}" if measured else "")
    rows = [*memory.HELD, None, "host_tables", "temporaries", "step_temporaries", "gradients", "optimizer"]
    for name in rows:
        sides = [memory.held(part) if name is None else part[name] for part in (formula, standard)]
        if name == "host_tables" and not any(sides):
            continue
        label = "held on the device" if name is None else LABELS[name]
        label += f", one of {ranks} ranks" if name in ("gradients", "optimizer") and ranks > 1 else ""
        line = f"  {label:32}{sides[0]:>18,}{size(sides[0]):>12}{size(sides[1]):>22}"
        if measured:
            found = memory.held(measured) if name is None else measured[name]
            line += f"{found:>18,}{'' if found == sides[0] else '  differs'}"
        yield line


def saving_lines(sizes: Sizes, decode: Decode, distinct):
    """What is saved against standard attention, every denominator named, and where it begins."""
    if not sizes.bank_layers:
        yield "nothing is saved: every layer of this model caches V"
        return
    shares, limits = memory.shares(sizes, decode), memory.limits(sizes, decode.policy)
    yield f"{'saved against standard attention':34}{'V - tables':>18}{'all counted':>12}{'limit':>22}"
    for name in ("kv", "v"):
        label = f"of {memory.DENOMINATORS[name]}"
        yield f"  {label:32}{shares[name]:>18.1%}{shares[f'{name}_all']:>12.1%}{limits[name]:>22.1%}"
    yield f"  {'of ' + memory.DENOMINATORS['everything']:50}{shares['everything']:>12.1%}"
    yield "break-even"
    if decode.placement == "device":
        even = memory.break_even(sizes, decode)
        tokens = {name: "never" if math.isinf(count) else f"{math.ceil(count):,}" for name, count in even.items()}
        yield f"  tables = V no longer cached, at batch * context of {tokens['tables']:>15} tokens"
        kinds = f" of {decode.distinct:,} distinct" if memory.decode_bytes(sizes, decode)["pool"] else ""
        yield f"  the same with ids, slots, pools, W_V that is gone, at {tokens['all']:>12} tokens{kinds}"
    batch = memory.paying_batch(sizes, decode, distinct)
    start = f"from batch {batch:,} on" if batch else f"at no batch up to {memory.MOST_ROWS:,}"
    yield f"  everything held on the device is less {start} (context {decode.context:,})"
    if decode.policy == "ring":
        yield from ring_lines(sizes, decode)


def ring_lines(sizes: Sizes, decode: Decode):
    kept = {sizes.is_window(i): sizes.rows(i, decode.context, "ring") for i in sizes.bank_layers}
    for window, rows in sorted(kept.items(), reverse=True):
        batch, kind = math.ceil(sizes.vocab / rows), "an S" if window else "an L"
        yield f"  a table of {kind} layer, of which a ring keeps {rows:,} positions a row, pays from batch {batch:,} on"


# ---------------------------------------------------------------------------- plot


def draw(args, path):
    """Saved share of K+V and of V of all layers against batch * context, a line per vocabulary (the paper's 5(a))."""
    from nanochat.report_plots import COLORS, STYLE, plt

    if args.model_tag is not None:
        raise ValueError(
            "--plot with --model-tag: the plot compares vocabularies and a checkpoint has one; give a shape"
        )
    if not sizes_of(shape_config(args, 2048)).bank_layers:
        raise ValueError("--plot of a model without a bank: nothing is saved; give --preset paper/bov or --bov-layers")
    points = [2 ** (10 + i / 16) for i in range(12 * 16 + 1)]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(11.5, 4.8), layout="constrained")
        for axis, name in zip(axes, ("kv", "v"), strict=True):
            for vocab, color in zip(args.vocabs, COLORS * len(args.vocabs), strict=False):
                sizes = sizes_of(shape_config(args, 2048, vocab))
                limit = 100 * memory.limits(sizes, args.window_policy)[name]
                saved = [100 * memory.shares(sizes, plot_point(args, round(x)))[name] for x in points]
                axis.plot(points, saved, color=color, label=f"vocabulary {vocab:,}")
            panel(axis, name, limit, f", batch {args.batch[0]}" if args.window_policy == "ring" else "")
        figure.savefig(path, format=Path(path).suffix[1:] or "png")  # else a name without one is not the file's
        plt.close(figure)


def plot_point(args, tokens: int) -> Decode:
    batch = args.batch[0]
    context = max(1, tokens // batch)
    return Decode(batch, context, torch.bfloat16, 1, args.window_policy, strategy="fused")


def panel(axis, name: str, limit: float, fixed: str):
    axis.axhline(0, color="#444444", linewidth=1.2)
    axis.axhline(limit, color="#444444", linewidth=1.2, linestyle="--")
    axis.text(1100, limit * 1.01, f"limit {limit:.1f} %", va="bottom", fontsize=11)
    axis.text(1100, limit * 0.01, "break-even", va="bottom", fontsize=11)
    axis.set_xscale("log", base=2)
    ticks = [2**k for k in range(10, 23, 2)]
    axis.set_xticks(ticks, [f"{t // 2**20}M" if t >= 2**20 else f"{t // 2**10}k" for t in ticks])
    axis.set_xlim(2**10, 2**22)
    axis.set_ylim(-0.15 * limit, 1.15 * limit)
    axis.set_xlabel(f"batch * context (tokens{fixed})")
    axis.set_ylabel("bytes saved, tables counted (%)")
    axis.set_title(f"share of {memory.DENOMINATORS[name]}")
    axis.legend(loc="center left")


# ---------------------------------------------------------------------------- main


def report(args, batch: int, context: int):
    """Everything about one batch and context, printed."""
    config = config_for(args, context)
    sizes, dtype = sizes_of(config), DTYPES[args.dtype] if args.dtype else COMPUTE_DTYPE
    check_context(args, sizes, context)
    distinct, origin = distinct_tokens(args.distinct, config.vocab_size, batch * context)
    device = args.device_type or autodetect_device_type()
    code = "cuda" if device.startswith("cuda") else "cpu"
    decode = Decode(batch, context, dtype, distinct, args.window_policy, args.placement, args.strategy, code)
    measured = None
    if args.measure:
        ids = draw_ids(args.distinct, config.vocab_size, batch, context)
        measured = measure(config, decode, ids.to(compute_init(device, seed=SEED)[-1]), args.ranks)
        decode, origin = replace(decode, distinct=len(ids.unique())), "counted"
    formula, standard = (
        memory.decode_bytes(s, decode) | memory.train_bytes(s, dtype, args.ranks) for s in (sizes, sizes.standard)
    )

    def kinds(tokens):
        given = args.distinct.isdigit()
        return min(distinct, tokens) if given else distinct_tokens(args.distinct, config.vocab_size, tokens)[0]

    for line in (
        *description_lines(config, sizes, decode, origin), "",
        *table_lines(formula, standard, measured, args.ranks), "",
        *saving_lines(sizes, decode, kinds),
    ):  # fmt: skip
        print(line)
    if args.json:
        measured = measured or dict.fromkeys(formula)
        print(json.dumps({"formula": formula, "measured": {name: measured[name] for name in formula}}))


def main(argv=None):
    args = parser().parse_args(argv)
    if args.preset is None and args.model_tag is None:
        args.preset = "paper/bov"
    if args.plot:
        draw(args, args.plot)
        print(f"written: {args.plot}")
    if args.context is None:
        args.context = [2048 if args.model_tag is None else checkpoint_config(args).sequence_len]
    settings = [(batch, context) for batch in args.batch for context in args.context]
    for i, (batch, context) in enumerate(settings):
        if i:
            print()
        report(args, batch, context)


if __name__ == "__main__":
    run_script("bov_memory", main)
