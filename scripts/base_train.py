"""Pretrain a base model.

python -m scripts.base_train --preset paper/bov --depth 12
torchrun --standalone --nproc_per_node=8 -m scripts.base_train --preset paper/bov --depth 24 --target-flops 3.91e19
python -m scripts.base_train --preset paper/bov --depth 12 --target-flops 1.5e18 --vocab-size 32768 --dry-run
"""

import argparse
import math
import os
import signal
import sys
import traceback

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def parser() -> argparse.ArgumentParser:
    """Upstream's flags, the value axes, and what this host adds."""
    from nanochat.bov.host import add_flags
    from nanochat.optim import TABLE_LR_SCALE, TABLE_WEIGHT_DECAY, VARIANTS

    p = argparse.ArgumentParser(prog="python -m scripts.base_train", description="Pretrain a base model.")
    p.add_argument("--run", default="dummy", help="wandb run name; dummy = no wandb")
    p.add_argument("--model-tag", default=None, help="name of the checkpoint folder (default d<depth>)")
    p.add_argument("--seed", type=int, default=42, help="of the initial weights")
    p.add_argument("--dry-run", action="store_true", help="print the plan, the last line as JSON, and stop")
    p.add_argument("--vocab-size", type=int, default=None, help="of the plan without a tokenizer; else must match it")
    p.add_argument("--device-type", default="", help="cuda, cpu or mps (default: what there is)")
    p.add_argument("--no-compile", action="store_true", help="run eagerly")
    p.add_argument("--fp8", action="store_true", help="not in this host")
    p.add_argument("--fp8-recipe", default="tensorwise", choices=["rowwise", "tensorwise"], help="not in this host")

    g = p.add_argument_group("model")
    g.add_argument("--depth", type=int, default=20, help="layers")
    g.add_argument("--aspect-ratio", type=int, default=64, help="width = depth * aspect ratio, up to whole heads")
    g.add_argument("--head-dim", type=int, default=128)
    g.add_argument("--kv-heads", type=int, default=0, help="key and value heads; 0 = as many as query heads")
    g.add_argument("--max-seq-len", type=int, default=2048, help="context in tokens")
    g.add_argument("--window-pattern", default="SSSL", help="tiled over layers: S quarter context, L full")
    add_flags(p)

    g = p.add_argument_group("horizon: the first positive one counts")
    g.add_argument("--num-iterations", type=int, default=-1, help="optimizer steps")
    g.add_argument("--target-flops", type=float, default=-1.0, help="training FLOPs")
    g.add_argument("--target-tokens", type=float, default=-1.0, help="training tokens")
    g.add_argument("--target-param-data-ratio", type=float, default=12, help="tokens per scaling parameter")

    p.add_argument("--train-part", type=float, default=1.0, help="use only this part of the training documents, again "
                   "and again where the run is longer (to study repetition)")  # fmt: skip

    g = p.add_argument_group("optimization")
    g.add_argument("--device-batch-size", type=int, default=32, help="rows per rank and micro-step")
    g.add_argument("--total-batch-size", type=int, default=-1, help="tokens per step; -1 = by the scaling rule")
    g.add_argument("--embedding-lr", type=float, default=0.3, help="AdamW; also of value tables, see below")
    g.add_argument("--unembedding-lr", type=float, default=0.008, help="AdamW")
    g.add_argument("--matrix-lr", type=float, default=0.02, help="Muon")
    g.add_argument("--scalar-lr", type=float, default=0.5, help="AdamW; the bank's coefficients")
    g.add_argument("--lr-scale", type=float, default=1.0, help="factor on these four rates, after the batch's own")
    g.add_argument("--table-lr-scale", type=float, default=TABLE_LR_SCALE, help="value tables: times --embedding-lr")
    g.add_argument("--table-weight-decay", type=float, default=TABLE_WEIGHT_DECAY, help="of value tables (in bf16 "
                   "a rate times decay under 0.002 rounds to nothing)")  # fmt: skip
    g.add_argument("--weight-decay", type=float, default=0.28, help="of Muon, cautious")
    g.add_argument("--muon", default="upstream", choices=VARIANTS, help="paper: without MuonEq and Muon+")
    g.add_argument("--warmup-steps", type=int, default=40)
    g.add_argument("--warmdown-ratio", type=float, default=0.65, help="share of the steps")
    g.add_argument("--final-lr-frac", type=float, default=0.05)
    g.add_argument("--resume-from-step", type=int, default=-1, help="continue from this saved step; -1 = not")
    g.add_argument("--resume", default="never", choices=["never", "auto"], help="auto: from the newest step, if any")
    g.add_argument("--force-resume", action="store_true", help="continue although settings or data differ")

    g = p.add_argument_group("evaluation and saving, in steps; -1 = never (saving: only at the end)")
    g.add_argument("--eval-every", type=int, default=250)
    g.add_argument("--eval-tokens", type=int, default=80 * 2**19, help="-1 = one pass over the validation split")
    g.add_argument("--core-metric-every", type=int, default=2000)
    g.add_argument("--core-metric-max-per-task", type=int, default=500)
    g.add_argument("--sample-every", type=int, default=2000)
    g.add_argument("--save-every", type=int, default=-1)
    g.add_argument("--keep-last", type=int, default=-1, help="checkpoints to keep, the newest; -1 = all")
    return p


def main(argv=None):
    interrupted = []

    def note(number, frame):
        interrupted.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        run(argv, interrupted)
    except KeyboardInterrupt:
        print("\nstopped before the first step; nothing was changed", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, before)


# flags -> (least, greatest) value
BOUNDS = {
    ("depth", "aspect_ratio", "device_batch_size", "vocab_size"): (1, math.inf),
    ("max_seq_len",): (2, math.inf),  # the smear looks at the token before
    ("kv_heads", "warmup_steps", "weight_decay", "table_weight_decay", "table_lr_scale", "lr_scale"): (0, math.inf),
    ("embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr"): (0, math.inf),
    ("warmdown_ratio", "final_lr_frac"): (0, 1),
    ("seed",): (0, 2**63 - 1),
    ("resume_from_step",): (-1, math.inf),
}
# flags that take numbers from 1 on, and -1 for what is said
OR_ALL = {"keep_last": "all", "total_batch_size": "the scaling rule", "eval_tokens": "one pass",
          "num_iterations": "another horizon"}  # fmt: skip


def check(args):
    """ValueError for values that no model or plan would catch; the rest is checked where it is used."""
    for name, value in vars(args).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{flag(name)} {value}: give a finite number")
    for names, (least, greatest) in BOUNDS.items():
        for name in names:
            value = vars(args)[name]
            if value is not None and value < least:
                raise ValueError(f"{flag(name)} {value}: at least {least}")
            if value is not None and value > greatest:
                raise ValueError(f"{flag(name)} {value}: at most {greatest}")
    for name, meaning in OR_ALL.items():
        if vars(args)[name] < 1 and vars(args)[name] != -1:
            raise ValueError(f"{flag(name)} {vars(args)[name]}: at least 1, or -1 for {meaning}")
    if not 0 < args.train_part <= 1:
        raise ValueError(f"--train-part {args.train_part}: above 0 and at most 1")
    if args.model_tag in (".", "..") or os.path.basename(args.model_tag or "") != (args.model_tag or ""):
        raise ValueError(f"--model-tag {args.model_tag}: the name of a folder, not a path")


def flag(name):
    return "--" + name.replace("_", "-")


def run(argv, interrupted):
    args = parser().parse_args(argv)
    if args.fp8:
        sys.exit("--fp8: not in this host; train in bf16")
    from nanochat import failing
    from nanochat.common import compute_cleanup, is_ddp_requested, leave

    code = 0
    try:
        check(args)
        if args.dry_run:
            from nanochat.plan import dry_run

            dry_run(args)
        else:
            from nanochat.train import train

            if interrupted:  # torch drops an interrupt that comes while it imports numpy
                raise KeyboardInterrupt
            train(args)
    except SystemExit as end:  # after a signal, with a checkpoint saved
        code = end.code
    except (ValueError, OSError, FloatingPointError) as error:
        failing.end(f"base_train: {error}")
    except Exception as error:
        failing.end(f"base_train: {type(error).__name__}: {error}", trace=traceback.format_exc())
    compute_cleanup()
    if is_ddp_requested():
        leave(code)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
