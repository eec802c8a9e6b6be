"""CORE's evaluator against upstream's, task by task in turn, in one process: seconds, equal answers, memory.

python -m scripts.core_bench --upstream ../nanochat --out runs/results/core_cpu.json

Both ask the same model (random weights, projections drawn too) the same items of a bundle, with the same tokenizer;
upstream's is the core_eval.py of a checkout of karpathy/nanochat. Of each task both answer the same items per round.
"""

import argparse
import importlib.util
import os
import platform
import statistics
import time
from pathlib import Path

import torch

from nanochat import core_eval
from nanochat.bov.presets import preset
from nanochat.common import COMPUTE_DTYPE, progress, run_script, write_json
from nanochat.core_bundle import choose_tasks, find_bundle, read_items
from nanochat.gpt import GPT, GPTConfig
from nanochat.metrics import git_commit
from nanochat.tokenizer import get_tokenizer

PAGE = os.sysconf("SC_PAGE_SIZE")


def load_upstream(checkout):
    """The module nanochat/core_eval.py of a checkout, which imports nothing else of it. ValueError without one."""
    path = Path(checkout, "nanochat", "core_eval.py")
    if not path.is_file():
        raise ValueError(f"--upstream {checkout}: there is no {path}; name a checkout of upstream nanochat")
    spec = importlib.util.spec_from_file_location("upstream_core_eval", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(args, tokenizer) -> GPT:
    """A model of --depth, 64 channels per layer of it; no projection is zero, so that every layer matters."""
    vocab = max(args.vocab_size, tokenizer.get_vocab_size())
    width = 64 * args.depth
    config = GPTConfig(**preset(args.preset), n_layer=args.depth, n_embd=width, n_head=max(1, width // 128),
                       n_kv_head=max(1, width // 128), vocab_size=vocab, sequence_len=args.sequence_len)  # fmt: skip
    torch.manual_seed(args.seed)
    model = GPT(config)
    model.init_weights()
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.normal_(std=0.02)
    return model.eval()


def resident() -> int:
    """Bytes of the process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def timed(evaluate, *args) -> tuple[float, list]:
    start = time.perf_counter()
    answers = evaluate(*args)
    return time.perf_counter() - start, answers


def ours(model, tokenizer, data, meta, indices) -> list[bool]:
    return [result.answer.correct for result in core_eval.answer_items(model, tokenizer, data, meta, indices)]


def theirs(module):
    """Upstream's evaluator as a function like `ours`."""
    device = torch.device("cpu")

    @torch.no_grad()
    def evaluate(model, tokenizer, data, meta, indices):
        return [bool(module.evaluate_example(i, model, tokenizer, data, device, meta)) for i in indices]

    return evaluate


def compare(tasks, model, tokenizer, sides, rounds, max_per_task) -> dict:
    """{task: seconds of each side per round, ratio (median over rounds), items, equal answers, resident bytes}."""
    found = {}
    for task in progress(tasks, desc="tasks"):
        data = read_items(task)
        asked = range(len(data) if max_per_task < 0 else min(max_per_task, len(data)))
        for evaluate in sides.values():
            evaluate(model, tokenizer, data, task.meta, asked[:2])  # warm
        seconds, answers, memory = {name: [] for name in sides}, {}, []
        for turn in range(rounds):
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                spent, answers[name] = timed(sides[name], model, tokenizer, data, task.meta, asked)
                seconds[name].append(spent)
                memory.append(resident())
        a, b = answers.values()
        found[task.label] = {
            "items": len(asked), "shots": task.shots, "seconds": seconds,
            "ratio": statistics.median(u / o for o, u in zip(seconds["ours"], seconds["upstream"], strict=True)),
            "equal_answers": sum(x == y for x, y in zip(a, b, strict=True)), "resident_bytes": memory,
        }  # fmt: skip
    return found


def memory_over_items(model, tokenizer, task, parts=4) -> list[int]:
    """Largest resident bytes in each quarter of a whole task, answered by our evaluator; flat = the same in all."""
    data, seen = read_items(task), []

    def watch(results):
        for result in results:
            seen.append(resident())
            yield result

    core_eval.answer_task(model, tokenizer, data, task.meta, watch=watch)
    size = -(-len(seen) // parts)
    return [max(seen[i : i + size]) for i in range(0, len(seen), size)]


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.core_bench", description=__doc__.split("\n")[0])
    parser.add_argument("--upstream", required=True, help="a checkout of karpathy/nanochat")
    parser.add_argument("--eval-bundle", default=None, metavar="DIR", help="a bundle (default: the base directory's)")
    parser.add_argument("--out", default=None, help="JSON file of the result")
    parser.add_argument("--depth", type=int, default=6, help="layers (default: %(default)s)")
    parser.add_argument("--preset", default="upstream", help="point on the axes (default: %(default)s)")
    parser.add_argument("--sequence-len", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--vocab-size", type=int, default=32768, help="rows of the head (default: %(default)s)")
    parser.add_argument("--max-per-task", type=int, default=24, help="items of a task, -1 = all (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side per task (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    parser.add_argument("--memory-task", default=None, help="task for memory over all its items (default: none)")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    sides = {"ours": ours, "upstream": theirs(load_upstream(args.upstream))}
    tokenizer = get_tokenizer()
    tasks, _ = choose_tasks(find_bundle(args.eval_bundle), "bundle")
    model = build(args, tokenizer)
    memory = {}
    if args.memory_task:  # first: the other side fills caches
        (task,) = [task for task in tasks if task.label == args.memory_task]
        memory = {"memory": {"task": task.label, "resident_bytes": memory_over_items(model, tokenizer, task)}}
        print(f"memory over {task.label}: {[round(b / 2**20) for b in memory['memory']['resident_bytes']]} MiB")
    found = compare(tasks, model, tokenizer, sides, args.rounds, args.max_per_task)
    totals = {name: [sum(times) for times in zip(*(t["seconds"][name] for t in found.values()), strict=True)]
              for name in sides}  # fmt: skip
    ratios = [u / o for o, u in zip(totals["ours"], totals["upstream"], strict=True)]
    result = {
        "commit": git_commit(), "torch": torch.__version__, "machine": platform.machine(), "seed": args.seed,
        "dtype": str(COMPUTE_DTYPE).removeprefix("torch."), "threads": args.threads, "depth": args.depth,
        "vocab_size": model.config.vocab_size, "rounds": args.rounds, "seconds": totals, "ratios": ratios,
        "ratio": statistics.median(ratios), "items": sum(t["items"] for t in found.values()),
        "equal_answers": sum(t["equal_answers"] for t in found.values()), "tasks": found, **memory,
    }  # fmt: skip
    for label, row in found.items():
        spent = {name: statistics.median(times) for name, times in row["seconds"].items()}
        print(f"{label:<34} {row['shots']:>2}-shot  ours {spent['ours']:7.2f} s  upstream {spent['upstream']:7.2f} s  "
              f"{row['ratio']:5.2f} times  {row['equal_answers']} of {row['items']} answers equal")  # fmt: skip
    print(f"whole: {result['ratio']:.2f} times faster ({min(ratios):.2f} to {max(ratios):.2f}), "
          f"{result['equal_answers']} of {result['items']} answers equal, {result['dtype']}")  # fmt: skip
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    run_script("core_bench", main)
