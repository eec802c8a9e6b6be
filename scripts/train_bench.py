"""Training speed of this code against a checkout of upstream nanochat, step by step in turn, in one run.

python -m scripts.train_bench --upstream DIR --out runs/results/train_cpu.json

Each side is a process of its own with the same shapes, weights, tokens and optimizer; the parent lets them take turns,
so that other load on the machine hits both. Each side runs in the mode that is faster for it (eager or compiled).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOSS_STEPS = 20


def worker():
    """One side: reads {"steps": n} lines, answers {"seconds": [...], "losses": [...]}."""
    import torch

    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a side prints goes to stderr
    setting = json.loads(sys.stdin.readline())
    from nanochat.gpt import GPT, GPTConfig

    with torch.device("meta"):
        model = GPT(GPTConfig(**setting["config"]))
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    model.init_weights()
    rates = dict(unembedding_lr=0.001, embedding_lr=0.0375, matrix_lr=0.0025, scalar_lr=0.0625, weight_decay=0.1)
    optimizer = model.setup_optimizer(**rates)
    step_of = model
    if setting["mode"] == "compiled" and setting["ours"]:
        from nanochat.train import compile_model

        step_of, problem = compile_model(model, model.get_device())
        assert problem is None, problem
    elif setting["mode"] == "compiled":
        step_of = torch.compile(model, dynamic=False)
    rows, length = setting["rows"], setting["config"]["sequence_len"]
    weights = 1.0 / torch.arange(1, setting["config"]["vocab_size"] + 1)  # Zipf, s = 1
    generator = torch.Generator().manual_seed(0)
    step = 0
    while line := sys.stdin.readline():
        seconds, losses = [], []
        for _ in range(json.loads(line)["steps"]):
            ids = torch.multinomial(weights, rows * (length + 1), replacement=True, generator=generator)
            ids = ids.view(rows, length + 1)
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * min(1.0, step / 40)  # warmup as in training: without it losses jump
            start = time.perf_counter()
            loss = step_of(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            loss.backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"seconds": seconds, "losses": losses}), file=answer, flush=True)


class Side:
    """One running worker."""

    def __init__(self, root, dtype, mode, config, rows, threads):
        env = os.environ | {"PYTHONPATH": str(root), "NANOCHAT_DTYPE": dtype, "OMP_NUM_THREADS": str(threads)}
        if mode == "eager":
            env["TORCHDYNAMO_DISABLE"] = "1"  # upstream's optimizer compiles itself
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
            cwd=root, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._send({"config": config, "rows": rows, "mode": mode, "ours": root == ROOT})

    def _send(self, message):
        print(json.dumps(message), file=self.process.stdin, flush=True)

    def run(self, steps: int) -> dict:
        self._send({"steps": steps})
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a benchmark process ended with code {self.process.wait()}; run it alone to see why")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(sides: dict, config: dict, rows: int, args) -> dict:
    """Interleaved rounds of all `sides` {name: (root, dtype)}, each in its faster mode; seconds per step and ratios."""
    threads = args.threads
    chosen, probes = {}, {}
    for name, (root, dtype) in sides.items():
        probes[name] = {}
        for mode in args.modes.split(","):
            side = Side(root, dtype, mode, config, rows, threads)
            side.run(args.warmup)
            probes[name][mode] = statistics.median(side.run(3)["seconds"])
            side.close()
        chosen[name] = min(probes[name], key=probes[name].get)
        print(f"  {name}: {chosen[name]} ({', '.join(f'{m} {s:.2f} s' for m, s in probes[name].items())})", flush=True)
    running = {name: Side(root, dtype, chosen[name], config, rows, threads) for name, (root, dtype) in sides.items()}
    results = {name: {"seconds": [], "losses": []} for name in sides}
    for name, side in running.items():
        first = side.run(args.warmup)
        results[name]["losses"] += first["losses"]
    for _ in range(args.rounds):
        for name, side in running.items():
            for key, values in side.run(1).items():
                results[name][key] += values
    for side in running.values():
        side.close()
    ours = results["ours"]
    tokens = rows * config["sequence_len"]
    report = {"tokens_per_step": tokens, "probes": probes, "sides": {}}
    for name, result in results.items():
        ratios = [other / own for own, other in zip(ours["seconds"], result["seconds"], strict=True)]
        quarter = statistics.quantiles(ratios, n=4)
        report["sides"][name] = {
            "mode": chosen[name],
            "tok_per_sec": tokens / statistics.median(result["seconds"]),
            "step_seconds": {"median": statistics.median(result["seconds"]), "min": min(result["seconds"])},
            "ours_times_faster": {"median": statistics.median(ratios), "quartiles": [quarter[0], quarter[2]]},
            "largest_loss_difference": max(
                abs(a - b) for a, b in zip(ours["losses"][:LOSS_STEPS], result["losses"][:LOSS_STEPS], strict=True)
            ),
            "losses": result["losses"],
        }
    return report


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.train_bench", description=__doc__.split("\n")[0])
    parser.add_argument("--upstream", required=True, help="a checkout of karpathy/nanochat")
    parser.add_argument("--out", default=None, help="JSON file of all results")
    parser.add_argument("--seq-lens", default="256,512")
    parser.add_argument("--tokens", type=int, default=8192, help="per step")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15, help="measured steps of each side")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--skip-fp32", action="store_true", help="leave out upstream in fp32")
    args = parser.parse_args(argv)
    if args.warmup + args.rounds < LOSS_STEPS:
        sys.exit(f"--warmup {args.warmup} and --rounds {args.rounds}: losses are compared over {LOSS_STEPS} steps")
    if not Path(args.upstream, "nanochat", "gpt.py").is_file():
        sys.exit(f"--upstream {args.upstream}: there is no nanochat/gpt.py in it")
    from nanochat import metrics

    width = args.depth * 64
    results = {}
    for length in map(int, args.seq_lens.split(",")):
        config = dict(
            sequence_len=length, vocab_size=args.vocab_size, n_layer=args.depth, n_head=width // 128,
            n_kv_head=width // 128, n_embd=width,
        )  # fmt: skip
        sides = {"ours": (ROOT, "bfloat16"), "upstream bf16": (args.upstream, "bfloat16")}
        if not args.skip_fp32:
            sides["upstream fp32"] = (args.upstream, "float32")
        print(f"T {length}", flush=True)
        report = results[f"T{length}"] = compare(sides, config, args.tokens // length, args)
        for name, side in report["sides"].items():
            low, high = side["ours_times_faster"]["quartiles"]
            print(
                f"  {name:14} {side['tok_per_sec']:8,.0f} tok/s   ours is {side['ours_times_faster']['median']:.2f} "
                f"times as fast (quartiles {low:.2f}-{high:.2f}), losses differ by at most "
                f"{side['largest_loss_difference']:.1e}", flush=True,
            )  # fmt: skip
    if args.out:
        from nanochat.common import write_json

        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=args.upstream, capture_output=True, text=True
        ).stdout.strip()
        settings = {name: value for name, value in vars(args).items() if name not in ("upstream", "out")}
        head = {"commit": metrics.git_commit(), "upstream_commit": commit, "versions": metrics.versions()}
        write_json(args.out, head | {"settings": settings, "results": results})
        print(f"written to {args.out}")


if __name__ == "__main__":
    try:
        worker() if sys.argv[1:] == ["--worker"] else main()
    except KeyboardInterrupt:
        sys.exit("\ntrain_bench: stopped")
