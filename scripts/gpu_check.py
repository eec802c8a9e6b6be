"""What training on this device must do, checked and measured in minutes, without a data set.

    python -m scripts.gpu_check --out FILE.json -- --depth 12 --device-batch-size 32 --muon paper

Behind -- stand flags of scripts.base_train. The parts, each in a process of its own:
equality       back ends of attention, decoding without a V cache, compiled models: all against a reference
equality_fp32  the same in fp32, with a hundredth of the tolerance
training       baseline and BoV in turn: tokens/s, MFU, optimizer, start, compiling, memory beside its formula
resume         a fresh process goes on from a checkpoint: the same losses
One that takes longer than its share of --limit is skipped. The exit code is 1 unless every part has passed.
"""

import argparse
import os
import signal
import sys
import time

from scripts.base_train import parser as train_parser

VOCAB_SIZE = 32768


def parser() -> argparse.ArgumentParser:
    from nanochat.bench.parts import PARTS

    p = argparse.ArgumentParser(
        prog="python -m scripts.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--parts", default=",".join(PARTS), help="all or some of them (default: %(default)s)")
    p.add_argument("--steps", type=int, default=30, help="timed steps of either variant (default 30)")
    p.add_argument("--limit", type=float, default=460, help="seconds for all of it (default 460)")
    p.add_argument("--out", default=None, metavar="FILE.json", help="write the results there, after every part")
    return p


def check(args, train_args) -> list[str]:
    """Names of the parts; fills in what base_train would leave open. ValueError for what cannot be run."""
    from nanochat.bench.parts import PARTS
    from nanochat.bench.sides import WARMUP
    from nanochat.common import autodetect_device_type
    from nanochat.plan import plan_run

    names = args.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"--parts {','.join(unknown)}: use all or some of {','.join(PARTS)}")
    if args.steps < 2 or args.limit <= 0:
        raise ValueError(f"--steps {args.steps} must be at least 2, --limit {args.limit:g} more than 0")
    if args.out and (os.path.isdir(args.out) or not os.path.isdir(os.path.dirname(args.out) or ".")):
        raise ValueError(f"--out {args.out}: name a file in a folder that exists")
    train_args.device_type = train_args.device_type or autodetect_device_type()
    train_args.vocab_size = train_args.vocab_size or VOCAB_SIZE
    if train_args.total_batch_size == -1:
        train_args.total_batch_size = train_args.device_batch_size * train_args.max_seq_len
    train_args.num_iterations = 2 + WARMUP + args.steps
    plan_run(train_args, train_args.vocab_size, world_size=1)
    return names


def run(argv):
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser().parse_args(argv[:split])
    train_args = train_parser().parse_args(argv[split + 1 :])
    from nanochat import metrics
    from nanochat.bench.parts import Setting, run_parts, summary
    from nanochat.common import COMPUTE_DTYPE, compute_init, write_json

    names = check(args, train_args)
    device = compute_init(train_args.device_type, train_args.seed)[-1]
    sizes = [f"--{name.replace('_', '-')}={vars(train_args)[name]}" for name in
             ("device_type", "vocab_size", "total_batch_size")]  # fmt: skip
    setting = Setting(train_args, [*argv[split + 1 :], *sizes], args.steps)
    start = time.perf_counter()
    head = {
        "commit": metrics.git_commit(), "versions": metrics.versions(), "device": metrics.device_name(device),
        "dtype": str(COMPUTE_DTYPE).removeprefix("torch."), "seed": train_args.seed,
        "settings": {"limit": args.limit, "steps": args.steps, "flags": setting.flags},
    }  # fmt: skip
    print(f"{head['device']}, {head['dtype']}, torch {head['versions']['torch']}, seed {train_args.seed}", flush=True)

    def save(results):
        done = all(name in results and results[name]["status"] == "passed" for name in names)
        if args.out:
            seconds = round(time.perf_counter() - start, 1)
            write_json(args.out, head | {"seconds": seconds, "passed": done, "parts": results})

    results = run_parts(setting, names, args.limit, save)
    print(summary(results))
    if args.out:
        print(f"written to {args.out}")
    bad = [name for name, result in results.items() if result["status"] != "passed"]
    if bad:
        sys.exit(f"gpu_check: not passed: {', '.join(bad)}")


def main(argv=None):
    try:
        run(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        sys.exit(f"gpu_check: {error}")
    except KeyboardInterrupt:
        sys.exit("\ngpu_check: stopped")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part's processes end with this one
    main()
