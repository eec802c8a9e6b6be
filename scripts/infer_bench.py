"""Inference benchmark: prefill and decode speed, attention without a V cache against attention with one, memory.

    python -m scripts.infer_bench -i base -g d12                     a checkpoint, batch by batch
    python -m scripts.infer_bench --preset paper/bov --depth 12 --contexts 2048,32768
    python -m scripts.infer_bench --suite --out runs/results/decode_cpu.json

Models: a checkpoint (-i, -g, -s), an export (--export), or random weights as soon as a shape or an axis is given.
With --contexts single steps are timed at caches filled directly, against the same model with a V cache and against
paper/baseline of the same shape, all of them in turn. The last line of the output is one JSON document of all of it.
"""

import argparse
import json
import math
import os
import statistics
import time
from fractions import Fraction
from types import SimpleNamespace

import torch

from nanochat import metrics
from nanochat.bench.sides import IdSource, bank_layers, clocked, random_model, spare_positions
from nanochat.bench.suite import FLUSH_BYTES, SECTIONS, Setting, aims, run_suite
from nanochat.bench.sweep import Sweep
from nanochat.bov import host
from nanochat.bov.compiled import compile_fused
from nanochat.bov.decode import STRATEGIES
from nanochat.bov.placement import PLACEMENTS, place
from nanochat.checkpoint_manager import SOURCES, load_model
from nanochat.common import (
    COMPUTE_DTYPE,
    COMPUTE_DTYPE_REASON,
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    get_peak_bandwidth,
    get_peak_flops,
    jsonable,
    run_script,
    write_json,
)
from nanochat.engine import Engine
from nanochat.export import load_exported
from nanochat.gpt import config_to_dict
from nanochat.plan import model_config
from nanochat.tokenizer import get_tokenizer

SHAPE = dict(depth=12, width=None, head_dim=128, kv_heads=0, vocab_size=32768, window_pattern="SSSL")
WORDS = (
    "A benchmark needs a text that goes on for a while and says little, so that a model has something to continue. "
    "This one names no fact, repeats itself whenever its end is reached, and is read for its length alone. "
)

# ---------------------------------------------------------------------------- flags


def numbers(text: str) -> tuple[int, ...]:
    """A comma list of positive ints."""
    try:
        values = tuple(int(part.replace("_", "")) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: use numbers with commas between them, such as 1,8,32") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{min(values)}: must be at least 1")
    return values


def sections(text: str) -> tuple[str, ...]:
    names = SECTIONS if text == "all" else tuple(text.split(","))
    if unknown := set(names) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: use all or some of {','.join(SECTIONS)}")
    return names


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m scripts.infer_bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    g = p.add_argument_group("a trained model")
    g.add_argument("-i", "--source", default="base", choices=SOURCES, help="kind of checkpoint (default base)")
    g.add_argument("-g", "--model-tag", default=None, help="its folder (default: the largest model)")
    g.add_argument("-s", "--step", type=int, default=None, help="step to load (default: the newest)")
    g.add_argument("--export", default=None, metavar="DIR", help="a model that scripts.bov_export wrote")
    g = p.add_argument_group("or random weights")
    g.add_argument("--depth", type=int, default=None, help="layers (default 12)")
    g.add_argument("--width", type=int, default=None, help="n_embd, rounded up to whole heads (default 64 * depth)")
    g.add_argument("--head-dim", type=int, default=None, help="default 128")
    g.add_argument("--kv-heads", type=int, default=None, help="key and value heads (default: as many as query heads)")
    g.add_argument("--vocab-size", type=int, default=None, help="default 32768")
    g.add_argument("--window-pattern", default=None, help="S quarter of the context, L all of it (default SSSL)")
    host.add_flags(p)
    g = p.add_argument_group("what is measured")
    g.add_argument("--prompt-tokens", type=int, default=2048, help="prompt length (default 2048)")
    g.add_argument("--decode-tokens", type=int, default=256, help="tokens to generate per row (default 256)")
    g.add_argument("--batch-sizes", type=numbers, default=None, help="rows (default 1,8,32,128; with --contexts 1)")
    g.add_argument("-t", "--temperature", type=float, default=0.0)
    g.add_argument("--contexts", type=numbers, default=None, help="time single steps at these numbers of cached tokens")
    g.add_argument("--rounds", type=int, default=20, help="steps per side that count (default 20)")
    g.add_argument("--decode-strategy", choices=STRATEGIES, default="auto", help="of layers without a V cache")
    g.add_argument("--bov-placement", choices=PLACEMENTS, default="device", help="where the tables are")
    g.add_argument("--ids", default="zipf", help="zipf (s = 1), or a text file for the tokenizer")
    g.add_argument("--seed", type=int, default=42, help="of weights, ids, keys and values, and of the order of sides")
    g.add_argument(
        "--suite", nargs="?", const="all", type=sections, default=None, metavar="PARTS",
        help=f"measure what decoding must reach: all, or some of {','.join(SECTIONS)}",
    )  # fmt: skip
    g.add_argument("--budget", type=float, default=math.inf, help="seconds after which --suite leaves cases out")
    g.add_argument("--no-compile", action="store_true", help="on a CPU: leave the loops of decoding uncompiled")
    g.add_argument("--device-type", default="", help="cuda or cpu (default: what there is)")
    g.add_argument("--out", default=None, metavar="FILE.json", help="write the results there too")
    return p


def check(args):
    """ValueError for flags that contradict each other or make no sense."""
    if args.rounds < 2 or args.prompt_tokens < 1 or args.decode_tokens < 2:
        raise ValueError("--rounds and --decode-tokens must be at least 2, --prompt-tokens at least 1")
    if args.out and (os.path.isdir(args.out) or not os.path.isdir(os.path.dirname(args.out) or ".")):
        raise ValueError(f"--out {args.out}: name a file in a folder that exists")
    trained = [
        flag
        for flag, value in (("--model-tag", args.model_tag), ("--step", args.step), ("--export", args.export))
        if value is not None
    ]
    if trained and is_random(args):
        raise ValueError(f"{trained[0]} with a shape or an axis: a trained model has its own")
    if args.export and len(trained) > 1:
        raise ValueError(f"--export with {trained[0]}: give one model")
    if args.suite and trained:
        raise ValueError(f"--suite with {trained[0]}: the suite measures random weights of a shape")
    if args.suite and args.bov_placement != "device":
        raise ValueError("--suite with --bov-placement: its part mmap places tables itself, the others keep them")


def is_random(args) -> bool:
    return any(vars(args)[name] is not None for name in (*SHAPE, "preset", *host.AXES))


def axes_name(args) -> str:
    given = any(vars(args)[name] is not None for name in host.AXES)
    return host.preset_name(args) or ("own axes" if given else "upstream")


def shape_config(args, context):
    """The GPTConfig of the flags, with sequence_len = context."""
    shape = {name: default if vars(args)[name] is None else vars(args)[name] for name, default in SHAPE.items()}
    if shape["depth"] < 1 or (shape["width"] is not None and shape["width"] < 1):
        raise ValueError(f"--depth {shape['depth']} and --width {shape['width']} must be at least 1")
    aspect = 64 if shape["width"] is None else Fraction(shape["width"], shape["depth"])
    flags = SimpleNamespace(**(vars(args) | shape), aspect_ratio=aspect, max_seq_len=context)
    return model_config(flags, shape["vocab_size"], shape["depth"])


# ---------------------------------------------------------------------------- models


class SilentTokenizer:
    """For models without one: every special token is an id that no model gives, so that no row ends."""

    def encode_special(self, text):
        return -1

    def get_bos_token_id(self):
        return -1


def load(args, device):
    """(model, tokenizer or None, label, step) as the flags say; random weights have room for every context."""
    if args.export:
        model, tokenizer, facts = load_exported(args.export, device, placement=args.bov_placement)
        return model, tokenizer, f"export {args.export}", facts.get("step")
    if is_random(args):
        longest = max(args.contexts or (args.prompt_tokens + args.decode_tokens,))
        model = random_model(
            shape_config(args, longest), device, args.seed, longest + spare_positions(longest, args.rounds)
        )
        tokenizer, label, step = None, f"random weights, {axes_name(args)}", None
    else:
        model, tokenizer, meta = load_model(args.source, device, phase="eval", model_tag=args.model_tag, step=args.step)
        label, step = f"{args.source} {args.model_tag or ''}".strip(), meta["step"]
    place(model, args.bov_placement)
    return model, tokenizer, label, step


def id_source(args, vocab_size, tokenizer):
    if args.ids != "zipf" and tokenizer is None:
        tokenizer = get_tokenizer()
    return IdSource(args.ids, vocab_size, args.seed, tokenizer)


def card(args, model, label, step, context_mid, prompt_tokens, device):
    """What the architecture costs, before anything runs: upstream's keys, then ours. None where a peak is unknown."""
    name = metrics.device_name(device)
    bandwidth, flops = get_peak_bandwidth(name), get_peak_flops(name)
    vram = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    dtypes = {}
    for p in model.parameters():
        dtype = str(p.dtype).removeprefix("torch.")
        dtypes[dtype] = dtypes.get(dtype, 0) + p.numel()
    stored = sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
    read = sum(m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Linear))
    kv, kv_read = model.kv_bytes_per_token(), model.kv_read_bytes(context_mid)
    rows = None if vram is None else int((vram - stored) / (kv * model.config.sequence_len))
    found = {
        "source": label if args.export or is_random(args) else args.source,
        "step": step,
        "model_config": config_to_dict(model.config),
        "gpu": name,
        "peak_bandwidth_bytes_per_sec": bandwidth,
        "total_vram_bytes": vram,
        "num_params": sum(p.numel() for p in model.parameters()),
        "param_dtypes": dtypes,
        "weight_bytes": stored,
        "kv_bytes_per_token": kv,
        "kv_read_bytes_per_step": kv_read,
        "context_mid": context_mid,
        "peak_flops_per_sec": flops,
        "decode_flops_per_token": model.estimate_decode_flops(context_mid),
        "ceiling_bs1_tok_per_sec": round(bandwidth / (read + kv_read), 1),
        "max_full_context_rows": rows,
        "prompt_tokens": prompt_tokens,
        "decode_tokens": args.decode_tokens,
        "temperature": args.temperature,
        "prefill": None,
        "sweep": [],
        "weight_read_bytes_per_step": read,
        "bank_layers": list(bank_layers(model)),
        "decode_strategy": args.decode_strategy,
        "bov_placement": args.bov_placement,
        "contexts": [],
    }
    return jsonable(found)


def print_card(found, model, label):
    config = model.config
    banks = ",".join(map(str, found["bank_layers"])) or "none"
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in sorted(found["param_dtypes"].items()))
    peak = found["peak_bandwidth_bytes_per_sec"]
    print(
        f"model    {label}: {config.n_layer} layers, width {config.n_embd}, {config.n_head} query and "
        f"{config.n_kv_head} kv heads, windows {config.window_pattern}; layers without a V cache: {banks}\n"
        f"device   {found['gpu']}, peak bandwidth {f'{peak / 1e12:.2f} TB/s' if peak else 'unknown'}, {COMPUTE_DTYPE} "
        f"({COMPUTE_DTYPE_REASON})\n"
        f"weights  {found['num_params']:,} parameters ({dtypes}), {found['weight_bytes'] / 2**20:,.0f} MiB stored, "
        f"{found['weight_read_bytes_per_step'] / 2**20:,.0f} MiB of matrices read per step\n"
        f"cache    {found['kv_bytes_per_token']:,} bytes of K and V per token"
    )


# ---------------------------------------------------------------------------- generation, batch by batch


def generate(engine, prompt, rows, tokens, temperature, device):
    """(seconds to the first token of all rows, seconds of every later step, peak bytes on CUDA) of one generation."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    stream = engine.generate(prompt, num_samples=rows, max_tokens=tokens, temperature=temperature)
    first, taken = clocked(device, lambda: next(stream, None))
    later = []
    while taken is not None:
        seconds, taken = clocked(device, lambda: next(stream, None))
        if taken is not None:
            later.append(seconds)
    return first, later, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def prompt_of(length, tokenizer, ids):
    """`length` tokens: natural language where there is a tokenizer."""
    if tokenizer is None:
        return ids.draw(1, length)[0].tolist()
    tokens = tokenizer.encode(WORDS, prepend=tokenizer.get_bos_token_id())
    return (tokens + tokens[1:] * (length // (len(tokens) - 1)))[:length]


def percent(rate, peak, digits) -> float | None:
    """Of a peak rate; None where it is unknown."""
    return None if peak is None else round(100 * rate / peak, digits)


def run_generation(args, model, tokenizer, ids, found, device):
    """Prefill at batch 1, then every batch size; fills found["prefill"] and found["sweep"], printing a table."""
    engine = Engine(model, tokenizer or SilentTokenizer(), strategy=args.decode_strategy)
    length, peak = found["prompt_tokens"], found["peak_flops_per_sec"]
    prompt = prompt_of(length, tokenizer, ids)
    print(f"prompt   {'natural language' if tokenizer else ids}")
    generate(engine, prompt, 1, 2, args.temperature, device)  # warm-up
    seconds = generate(engine, prompt, 1, 2, args.temperature, device)[0]
    found["prefill"] = {
        "tok_per_sec": round(length / seconds, 1),
        "mfu_percent": percent(model.estimate_prefill_flops(length) / seconds, peak, 2),
        "time_sec": round(seconds, 6),
    }
    print(f"prefill  {length / seconds:,.0f} tok/s at batch 1, {length} tokens")
    titles = ("batch", 6), ("TTFT ms", 9), ("TPOT ms", 9), ("tok/s", 10), ("MBU %", 7), ("MFU %", 7), ("VRAM GiB", 9)
    print(" ".join(f"{title:>{width}}" for title, width in (*titles, ("steps", 6))))
    for rows in args.batch_sizes or (1, 8, 32, 128):
        generate(engine, prompt, rows, 8, args.temperature, device)
        first, later, vram = generate(engine, prompt, rows, args.decode_tokens, args.temperature, device)
        if not later:
            print(f"{rows:>6}  every row ended at its first token")
            continue
        found["sweep"].append(generation_entry(rows, first, later, vram, found))
        print(generation_line(found["sweep"][-1], args.decode_tokens - 1), flush=True)


def generation_entry(rows, first, later, vram, found) -> dict:
    """Upstream's keys for one batch size: seconds to the first token, then of every step."""
    step = statistics.median(later)
    moved = found["weight_read_bytes_per_step"] + rows * found["kv_read_bytes_per_step"]
    done = rows * found["decode_flops_per_token"]
    return {
        "batch_size": rows,
        "ttft_sec": round(first, 6),
        "tpot_sec": round(step, 6),
        "tok_per_sec": round(rows * len(later) / sum(later), 1),
        "mbu_percent": percent(moved / step, found["peak_bandwidth_bytes_per_sec"], 2),
        "mfu_percent": percent(done / step, found["peak_flops_per_sec"], 4),
        "peak_vram_bytes": vram,
        "decode_steps": len(later),
    }


def generation_line(entry, expected):
    cells = [
        f"{entry['batch_size']:>6}", f"{1e3 * entry['ttft_sec']:>9.1f}", f"{1e3 * entry['tpot_sec']:>9.2f}",
        f"{entry['tok_per_sec']:>10,.0f}", or_dash(entry["mbu_percent"], 7, 1), or_dash(entry["mfu_percent"], 7, 2),
        or_dash(entry["peak_vram_bytes"] and entry["peak_vram_bytes"] / 2**30, 9, 2), f"{entry['decode_steps']:>6}",
    ]  # fmt: skip
    return " ".join(cells) + ("" if entry["decode_steps"] == expected else "  (all rows ended)")


def or_dash(value, width, digits):
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


# ---------------------------------------------------------------------------- the suite


def cpu_name() -> str | None:
    """The processor's name, None where the system does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), None)
    except OSError:
        return None


def head(args, device, problem) -> dict:
    """Where, with what and how the results came about."""
    settings = {name: value for name, value in vars(args).items() if name != "out" and value is not None}
    return {
        "commit": metrics.git_commit(), "versions": metrics.versions(), "device": metrics.device_name(device),
        "cpu": cpu_name(), "threads": torch.get_num_threads(), "dtype": str(COMPUTE_DTYPE).removeprefix("torch."),
        "weights": "random, matrices in this dtype as in an export", "seed": args.seed,
        "compiled": device.type == "cpu" and not args.no_compile and problem is None, "not_compiled_because": problem,
        "settings": settings,
    }  # fmt: skip


def suite(args, device, problem) -> dict:
    """Run --suite, writing --out after every section, and beside it a PNG of the section growth."""
    if args.preset is None:
        args.preset = "paper/bov"
    config = shape_config(args, 2048)
    facts = head(args, device, problem)
    ids = id_source(args, config.vocab_size, None)
    setting = Setting(
        config=config, device=device, ids=ids, seed=args.seed, rounds=args.rounds, strategy=args.decode_strategy,
        contexts=args.contexts, batches=args.batch_sizes, flush_bytes=FLUSH_BYTES[device.type],
        compiled=facts["compiled"], deadline=time.perf_counter() + args.budget,
    )  # fmt: skip
    facts |= {"ids": str(ids), "model_config": config_to_dict(config)}
    print(f"{facts['cpu']}, {facts['device']}, {facts['dtype']}; ids: {ids}; {args.rounds} rounds, seed {args.seed}")
    begin = time.perf_counter()

    def save(results):
        reached = aims(results) if device.type == "cpu" else []  # they are meant for a CPU
        done = facts | {"seconds": round(time.perf_counter() - begin), "aims": reached} | results
        if args.out:
            write_json(args.out, done)
        if args.out and "growth" in results:
            from nanochat.bench.plots import draw_growth

            draw_growth(results["growth"], args.out.removesuffix(".json") + ".png")
        return done

    results = save(run_suite(setting, args.suite, save))
    for aim in results["aims"]:
        wanted, found = (f"{x:,}" if isinstance(x, int) else f"{x:.4g}" for x in (aim["wanted"], aim["found"]))
        print(f"{'met' if aim['met'] else 'NOT':>5}  {aim['aim']} {wanted}: {found}")
    return results


# ---------------------------------------------------------------------------- main


def measure(args, device) -> dict:
    """A trained or random model: by --contexts, or by generation as upstream does."""
    model, tokenizer, label, step = load(args, device)
    context = model.config.sequence_len
    if args.contexts:
        prompt, middle = 0, max(args.contexts)
    else:
        prompt = min(args.prompt_tokens, context - args.decode_tokens)
        middle = prompt + args.decode_tokens // 2
        if prompt < 1:
            raise ValueError(f"--decode-tokens {args.decode_tokens} leave no room for a prompt in {context} positions")
        if prompt < args.prompt_tokens:
            print(f"note: the prompt is cut to {prompt} tokens, so that it and {args.decode_tokens} more fit {context}")
    found = card(args, model, label, step, middle, prompt, device)
    print_card(found, model, label)
    ids = id_source(args, model.config.vocab_size, tokenizer)
    if args.contexts:
        sweep = Sweep(ids, args.seed, args.rounds, args.decode_strategy, args.bov_placement)
        found["contexts"] = sweep.run(model, args.contexts, args.batch_sizes or (1,))
    else:
        run_generation(args, model, tokenizer, ids, found, device)
    return found | {"ids": str(ids), "seed": args.seed}


def main(argv=None):
    args = parser().parse_args(argv)
    check(args)
    device_type = args.device_type or autodetect_device_type()
    if device_type == "mps":
        raise ValueError("infer_bench measures CUDA devices and CPUs: use --device-type cpu")
    under_torchrun, *_, device = compute_init(device_type, args.seed)
    if under_torchrun:
        raise ValueError("infer_bench measures one device: start it without torchrun")
    problem = None
    if device.type == "cpu":
        problem = "--no-compile" if args.no_compile else compile_fused(dynamic=True)
        print(f"loops of decoding: {'compiled' if problem is None else f'not compiled ({problem})'}", flush=True)
    found = suite(args, device, problem) if args.suite else measure(args, device)
    found = jsonable(found)
    try:
        if args.out:
            write_json(args.out, found)
            print(f"written: {args.out}")
    finally:  # a file that cannot be written takes no measurement with it
        print(json.dumps(found))
    compute_cleanup()


if __name__ == "__main__":
    run_script("infer_bench", main)
