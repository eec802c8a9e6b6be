"""Training as it will run: speed, memory and its formula, baseline and BoV in turn; and resuming in a fresh process.

The trainer's own build, train_step and checkpoints are used throughout, over a corpus of random words; while steps are
timed the batches are Zipf ids that already lie on the device.
"""

import gc
import itertools
import math
import os
import random
import statistics
import string
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch

from nanochat import STARTED, metrics, train
from nanochat.bench.resident import ROOT, stand_in_tokenizer
from nanochat.bench.sides import IdSource, clocked, interleave, milliseconds, ratio, spread
from nanochat.bov.memory import storage_bytes
from nanochat.checkpoint_manager import model_path
from nanochat.common import COMPUTE_DTYPE, get_base_dir, get_peak_flops
from nanochat.flash_attention import describe
from nanochat.memory_meter import meter
from nanochat.plan import train_bytes
from nanochat.sources import build as build_corpus
from nanochat.tokenizer import save_token_bytes

PAIR = ("baseline", "bov")
BATCHES = 4  # different micro-batches; steps take them in turn
SAVED, LAST = 4, 8  # steps: where a run is left, and where it ends
WARMUP_STEPS = 1  # so that the rates of these few steps are high enough to show a state that was lost
# Of the first loss after resuming and the way of the weights since (_apart). A CPU gives the same bits; CUDA adds up in
# any order. In miniature, bf16: another order 0 and 0.02, other batches 3e-4 and 0.10, no moments 0 and 0.24.
TOLERANCES = {"cpu": (0.0, 0.0), "cuda": (1e-4, 0.06)}

# ---------------------------------------------------------------------------- corpus


FILES, WORDS, PARAGRAPH = 20, 4000, 200  # WORDS: different ones; PARAGRAPH: words, at least 2 tokens each


def make_corpus(args):
    """A tokenizer and shards of random words (Zipf) for LAST steps in the base directory, unless they are there."""
    folder, texts = Path(get_base_dir(), "tokenizer"), Path(get_base_dir(), "texts")
    if folder.exists():
        return
    texts.mkdir()
    draw = random.Random(args.seed)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(WORDS)]
    weights = [1 / rank for rank in range(1, WORDS + 1)]
    paragraphs = 1 + LAST * args.total_batch_size // (2 * PARAGRAPH * FILES)
    for i in range(FILES):
        text = "\n\n".join(" ".join(draw.choices(words, weights, k=PARAGRAPH)) for _ in range(paragraphs))
        (texts / f"{i:02d}.txt").write_text(text, encoding="utf-8")
    build_corpus(f"text:{texts}/*.txt")
    tokenizer = stand_in_tokenizer(args.vocab_size)
    tokenizer.save(str(folder))
    save_token_bytes(tokenizer, str(folder))


# ---------------------------------------------------------------------------- training


class Trained:
    """One variant being trained: build, first and second step, then `step` for every further one.

    build_seconds, first_seconds (with compiling), memory and, of every step, losses and seconds of the optimizer.
    """

    def __init__(self, setting, name, rows, batches):
        args = vars(setting.args) | {
            "preset": f"paper/{name}",
            "model_tag": f"{name}_{rows}",
            "device_batch_size": rows,
        }
        self.losses, self.optimizer_seconds, self._marks = [], [], []
        with meter(setting.device) as seen:
            start = time.perf_counter()
            self.run = train.build(Namespace(**args))
            self.run.loader = ((x, y, None) for x, y in itertools.cycle(batches))
            self.build_seconds = time.perf_counter() - start
            self.memory = {"formula": train_bytes(self.run.model, self.run.plan)}
            self.run.optimizer.register_step_pre_hook(self._mark)
            self.run.optimizer.register_step_post_hook(self._mark)
            weighing = self.run.optimizer.register_step_pre_hook(self._weigh)
            self.first_seconds = self.step()
            weighing.remove()
            seen.restart_peak()
            self.step()
            self.memory |= {"live_between_steps": seen.live, "peak": seen.peak}

    def _weigh(self, *_):
        """Gradients live only until the end of a step."""
        parameters = list(self.run.model.parameters())
        gradients = storage_bytes(p.grad for p in parameters)
        self.memory["allocated"] = {"weights": storage_bytes(parameters), "gradients": gradients}

    def _mark(self, *_):
        if self.run.device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def step(self) -> float:
        """Seconds of one step, from an idle device to the loss on the host."""
        seconds, loss = clocked(self.run.device, lambda: train.train_step(self.run))
        start, end = self._marks
        self._marks.clear()
        cuda = self.run.device.type == "cuda"
        self.optimizer_seconds.append(start.elapsed_time(end) / 1e3 if cuda else end - start)
        self.losses.append(loss)
        return seconds

    def finish_memory(self):
        state = self.run.optimizer.state.values()
        self.memory["allocated"]["optimizer"] = storage_bytes(t for tensors in state for t in tensors.values())


def training(setting):
    """Baseline and BoV in turn, with the largest device batch that fits of the given one and its divisors."""
    imported = time.perf_counter() - STARTED
    args, problem = setting.args, None
    rows, length = args.device_batch_size, args.max_seq_len
    make_corpus(args)
    found = None
    while found is None:
        try:
            found = _train_pair(setting, rows, imported)
        except torch.OutOfMemoryError as error:
            if rows == 1:
                raise
            problem = f"device batch {rows}: {str(error).splitlines()[0]}"
            print(f"  does not fit: {problem}", flush=True)
        if found is None:  # here the error and the models that it held on to are gone
            rows = next(n for n in range(rows // 2, 0, -1) if args.total_batch_size % (n * length) == 0)
            torch._dynamo.reset()
            _free(setting.device)
    yield found | {"did_not_fit": problem}


def _free(device):
    """What a peak or a compiler left in the allocator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _train_pair(setting, rows, imported) -> dict:
    args, device = setting.args, setting.device
    ids = IdSource("zipf", args.vocab_size, args.seed)
    drawn = ids.draw(BATCHES * rows, args.max_seq_len + 1).to(device).view(BATCHES, rows, -1)
    batches = [(b[:, :-1].contiguous(), b[:, 1:].contiguous()) for b in drawn]
    sides = {}
    for name in PAIR:
        sides[name] = Trained(setting, name, rows, batches)
        _free(device)
    times = interleave({name: side.step for name, side in sides.items()}, setting.steps, args.seed)
    found = {
        "ids": str(ids), "device_batch_size": rows, "dtype": str(COMPUTE_DTYPE).removeprefix("torch."),
        "attention": describe(args.max_seq_len), "import_seconds": imported,
        "peak_flops": get_peak_flops(metrics.device_name(device)), "variants": {}, "checks": [],
    }  # fmt: skip
    for name, side in sides.items():
        found["variants"][name] = row = _variant(side, times[name], imported, found["peak_flops"])
        found["checks"] += _checks(name, side)
        print(_line(name, row), flush=True)
    found["tokens_per_second_bov_over_baseline"] = ratio(times, *PAIR)
    process = metrics.peak_bytes(device)
    found["process_peak"] = {
        "bytes": process,
        "of": "torch's allocator" if device.type == "cuda" else "resident memory",
    }
    if device.type == "cuda":
        found["process_peak"]["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return found


def _variant(side, seconds, imported, peak_flops) -> dict:
    run = side.run
    tokens, flops = run.plan.total_batch_size, run.summary["flops_per_token"]
    rates = spread([tokens / s for s in seconds])
    optimizer = side.optimizer_seconds[-len(seconds) :]
    median = statistics.median(seconds)
    side.finish_memory()
    return {
        "parameters": run.summary["num_params"], "flops_per_token": flops, "tokens_per_step": tokens,
        "micro_steps": run.plan.grad_accum_steps, "steps": len(seconds), "step_ms": milliseconds(seconds),
        "tokens_per_second": rates,
        "mfu": flops * rates["median"] / peak_flops if math.isfinite(peak_flops) else None,
        "optimizer_ms": milliseconds(optimizer),
        "optimizer_share": spread([o / s for o, s in zip(optimizer, seconds, strict=True)]),
        "start_to_first_step_seconds": imported + side.build_seconds + side.first_seconds,
        "build_seconds": side.build_seconds, "first_step_seconds": side.first_seconds,
        "compiled": run.compiled is not run.model,
        "compile_seconds": side.first_seconds - median if run.compiled is not run.model else None,
        "memory": side.memory, "losses": side.losses,
    }  # fmt: skip


def _checks(name, side) -> list[dict]:
    """Memory as the formula says, to the byte; losses that are numbers and fall (the ids are not uniform)."""
    formula, allocated, losses = side.memory["formula"], side.memory["allocated"], side.losses
    rows = [
        {"check": f"{name}, {part} bytes", "found": size, "wanted": formula[part], "passed": size == formula[part]}
        for part, size in allocated.items()
    ]
    falls = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    return [*rows, {"check": f"{name}, the loss falls", "found": losses[-1], "below": losses[0], "passed": falls}]


def _line(name, row) -> str:
    low, high = row["tokens_per_second"]["quartiles"]
    mfu = f", MFU {row['mfu']:.1%}" if row["mfu"] else ""
    return (
        f"  {name}: {row['tokens_per_second']['median']:,.0f} tokens/s (quartiles {low:,.0f} to {high:,.0f}){mfu}, "
        f"optimizer {row['optimizer_share']['median']:.1%} of a step, peak {row['memory']['peak'] / 2**30:.2f} GiB, "
        f"first step {row['start_to_first_step_seconds']:.1f} s after the start"
    )


# ---------------------------------------------------------------------------- resume


def resume(setting):
    """BoV to step LAST with a checkpoint at SAVED; then a fresh process from there: the same losses and weights?"""
    make_corpus(setting.args)
    folder = Path(get_base_dir(), "base_checkpoints", "resume")
    whole = _base_train(setting, folder)
    saved, wanted = (_weights(folder, step) for step in (SAVED, LAST))
    yield {"undisturbed": whole, "checks": []}
    again = _base_train(setting, folder, "--resume-from-step", str(SAVED))
    losses = [abs(a / b - 1) for a, b in zip(again["losses"], whole["losses"], strict=True)]
    apart = _apart(_weights(folder, LAST), wanted, saved)
    loss_tolerance, tolerance = TOLERANCES[setting.device.type]
    first, worst = losses[SAVED], max(apart, key=apart.get)
    yield {
        "undisturbed": whole, "resumed": again, "relative_loss_differences": losses[SAVED:], "weights_apart": apart,
        "checks": [
            {"check": "it goes on from the saved step", "found": again["first_step"], "wanted": SAVED + 1,
             "passed": again["first_step"] == SAVED + 1},
            {"check": "first loss after resuming", "difference": first, "tolerance": loss_tolerance,
             "passed": first <= loss_tolerance},
            {"check": f"weights after {LAST - SAVED} steps more", "difference": apart[worst], "at": worst,
             "tolerance": tolerance, "passed": apart[worst] <= tolerance},
        ],
    }  # fmt: skip


def _weights(folder, step) -> dict:
    return torch.load(model_path(folder, step), map_location="cpu", weights_only=True)


def _apart(found, wanted, start) -> dict[str, float]:
    """By kind of weight: how far `found` is from `wanted`, in units of the way from `start` to `wanted`."""
    apart, way = {}, {}
    for name, goal in wanted.items():
        kind = "tables" if name.startswith("value_embeds.") else "matrices" if goal.ndim > 1 else "scalars"
        for sums, origin in ((apart, found), (way, start)):
            sums[kind] = sums.get(kind, 0.0) + (origin[name].double() - goal.double()).square().sum().item()
    return {kind: (apart[kind] / way[kind]) ** 0.5 for kind in way}


def _base_train(setting, folder, *more) -> dict:
    """The command as a user gives it, in a process of its own; what it recorded."""
    command = [
        sys.executable, "-m", "scripts.base_train", *setting.flags, "--preset", "paper/bov", "--model-tag", folder.name,
        "--num-iterations", str(LAST), "--save-every", str(SAVED), "--warmup-steps", str(WARMUP_STEPS),
        "--eval-every=-1", "--core-metric-every=-1", "--sample-every=-1", *more,
    ]  # fmt: skip
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ)
    entries = metrics.read_metrics(folder / "metrics.jsonl")
    started = [entry for entry in entries if entry["kind"] == "start"][-1]
    return {
        "seconds": time.perf_counter() - start, "start_to_first_step_seconds": started["startup_seconds"],
        "first_step": started["step"], "losses": [entry["loss"] for entry in entries if entry["kind"] == "train"],
    }  # fmt: skip
