"""The plans of the paper's runs on one budget, for runs/_paper.sh and for people. Neither data nor GPU is needed.

    python -m scripts.paper_plan --budget params --flops 1.5e18 -- --depth 12 --vocab-size 32768

What follows `--` are flags of scripts.base_train that all variants share. Ranks are taken from WORLD_SIZE, as under
torchrun. Budgets: `flops` gives every variant the same training FLOPs; `tokens` the same tokens (--tokens, else those
of the FLOPs budget's baseline); `params` those tokens too, and a baseline with as many parameters as BoV has with its
tables. Lines for the shell start with `flags<TAB>VARIANT<TAB>` and `shards<TAB>`.
"""

import argparse
import math
import sys
from dataclasses import replace

from nanochat.common import get_dist_info, get_peak_flops
from nanochat.plan import dry_run, meta_model, plan_run, plan_summary, scaling_params, train_bytes
from nanochat.schedule import climbmix_shards
from scripts.base_train import parser as train_parser

PRESETS = {"baseline": "paper/baseline", "bov": "paper/bov"}
LONGEST = "fig5b/every_layer"  # fewest FLOPs a token, so most tokens for given FLOPs
ASSUMED_MFU = 0.4
NOT_A_VARIANTS = {"seed", "model-tag", "resume", "run", "preset"}  # set for every run by runs/_paper.sh


def matched_mlp_hidden(total: int, target: int, n_layer: int, n_embd: int, multiple=128, tolerance=0.005) -> int:
    """The MLP width at which a model of `total` parameters at width 4*n_embd comes nearest to `target` parameters.

    The width is a multiple of `multiple`. ValueError when that misses `target` by more than `tolerance` of it.
    """
    per_unit = 2 * n_layer * n_embd  # c_fc and c_proj of every layer
    hidden = max(1, round((4 * n_embd + (target - total) / per_unit) / multiple)) * multiple
    off = abs(total + (hidden - 4 * n_embd) * per_unit - target) / target
    if off > tolerance:
        raise ValueError(
            f"BUDGET=params: the nearest --mlp-hidden is {hidden}, a multiple of {multiple}, and misses {target:,} "
            f"parameters by {off:.1%}, more than {tolerance:.1%}: use a deeper or wider model"
        )
    return hidden


def hours(flops: float, gpus: int, peak: float, mfu: float = ASSUMED_MFU) -> float:
    """Hours of training for `flops` on `gpus` devices of `peak` FLOP/s at that share of it."""
    return flops / (gpus * peak * mfu) / 3600


def expected_time(flops, seeds, gpu, ranks) -> str:
    """Hours of one run and of all seeds, in words."""
    peak = get_peak_flops(gpu)
    if not math.isfinite(peak):
        return f"unknown: no peak FLOP/s on record for {gpu}"
    one = hours(flops, ranks, peak)
    rate = f"{peak / 1e12:.0f} TFLOP/s each at an assumed MFU of {ASSUMED_MFU:.0%}"
    return f"{one:.2f} h a seed, {one * seeds:.2f} h for {seeds}, on {ranks} x {gpu}, {rate}"


def preset_flags(variant: str) -> list[str]:
    """ "bov:train-part=0.5,bov-layers=8,9" -> --preset paper/bov --train-part 0.5 --bov-layers 8,9."""
    name, _, changes = variant.partition(":")
    flags = ["--preset", PRESETS.get(name, name)]
    for change in changes.split(",") if changes else []:
        flag, equals, value = change.partition("=")
        if change and not equals and len(flags) > 2:  # a list of layers has commas too
            flags[-1] += f",{change}"
        elif flag in NOT_A_VARIANTS:
            raise ValueError(f"variant {variant!r}: --{flag} is set for each run; SEEDS says the seeds")
        elif flag and value:
            flags += [f"--{flag}", value]
        else:
            raise ValueError(f"variant {variant!r}: after the colon write FLAG=VALUE,... without --")
    return flags


def _planned(flags, ranks):
    """(parsed flags, config, plan) of base_train's flags."""
    args = train_parser().parse_args(flags)
    if args.vocab_size is None:
        raise ValueError("give --vocab-size after --: the plan is made before there is a tokenizer")
    return args, *plan_run(args, args.vocab_size, ranks)


def budget_flags(variants, budget, flops, tokens, common, tolerance=0.005) -> dict[str, list[str]]:
    """{variant: its preset and horizon as flags of base_train}; `tokens` 0 = those of the FLOPs budget's baseline.

    The widened baseline keeps the batch and the weight decay of the plain one: with tokens and batch equal, a decay
    lowered by the rule for larger models would be a second difference. Every variant without tables and banks is
    widened, unless it has an --mlp-hidden.
    """
    if budget == "flops":
        return {v: [*preset_flags(v), "--target-flops", f"{flops:g}"] for v in variants}
    plan = _planned([*common, *preset_flags("baseline"), "--target-flops", str(flops)], ranks=1)[2]
    horizon = ["--target-tokens", f"{tokens:.0f}" if budget == "tokens" and tokens else str(plan.total_tokens)]
    found = {v: [*preset_flags(v), *horizon] for v in variants}
    if budget == "params":
        bov = meta_model(_planned([*common, *preset_flags("bov"), *horizon], ranks=1)[1])
        for flags in found.values():
            flags += _widening([*common, *flags], bov.num_scaling_params()["total"], tolerance)
    return found


def _widening(flags, target, tolerance) -> list[str]:
    """What gives standard attention as many as `target` parameters, and leaves its batch and decay alone."""
    args, config, plan = _planned(flags, ranks=1)
    if args.mlp_hidden or not config.bov_layers == config.ve_layers == "none":
        return []
    base = meta_model(config)
    total = base.num_scaling_params()["total"]
    hidden = matched_mlp_hidden(total, target, config.n_layer, config.n_embd, tolerance=tolerance)
    wide = meta_model(_planned([*flags, "--mlp-hidden", str(hidden)], ranks=1)[1])
    decay = args.weight_decay * scaling_params(wide) / scaling_params(base)
    widened = ["--mlp-hidden", str(hidden), "--total-batch-size", str(plan.total_batch_size)]
    return [*widened, "--weight-decay", f"{decay:.10g}"]


def describe(variant, flags, args, seeds, gpu, ranks, source):
    """Print one variant's plan, time, data and memory; returns (tokens, FLOPs) of one run."""
    config, plan = plan_run(args, args.vocab_size, ranks)
    model, summary = meta_model(config), plan_summary(config, plan)
    print(f"\n-- {variant}: {' '.join(flags)}")
    parts, counts = train_bytes(model, plan), summary["num_params"]
    gib = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items() if name != "total")
    saved = parts["weights"] + train_bytes(model, replace(plan, world_size=1))["optimizer"]
    data = f"{plan.total_tokens:,} tokens of {source}"
    if source == "climbmix":
        data = f"{summary['expected_epochs']:.2f} epochs of {summary['shards']:,} ClimbMix shards, "
        data += f"{summary['disk_bytes'] / 1e9:.1f} GB on disk"
    millions = [f"{counts[name] / 1e6:.1f}M" for name in ("without_tables", "value_tables")]
    print(
        f"counts     {millions[0]} parameters and {millions[1]} in tables, {summary['flops_per_token']:,} FLOPs a token"
    )
    print(f"cache      {summary['kv_bytes_per_token']:,} bytes of K and V a token, ids apart")
    print(f"data       {data}")
    saves = -(-plan.num_iterations // args.save_every) if args.save_every > 0 else 1
    kept = min(saves, args.keep_last) if args.keep_last > 0 else saves
    print(f"checkpoint {saved / 1e9:.1f} GB, {kept} kept ({kept * saved / 1e9:.0f} GB), and one more while it is saved")
    print(f"a rank     {gib} GiB; activations come on top and grow with --device-batch-size")
    print(f"time       {expected_time(plan.total_flops, seeds, gpu, ranks)}")
    dry_run(args)
    return plan.total_tokens, plan.total_flops


def run(args, common):
    ranks, variants = get_dist_info()[3], args.variants.split()
    if not variants:
        raise ValueError("VARIANTS is empty: use baseline, bov or names of presets")
    found = budget_flags(variants, args.budget, args.flops, args.tokens, common, args.tolerance)
    spent = []
    for variant, flags in found.items():
        parsed = train_parser().parse_args([*common, *flags])
        spent.append(describe(variant, flags, parsed, args.seeds, args.gpu, ranks, args.source))
    total = sum(flops for _, flops in spent)
    print(f"\nall of it  {len(found)} variant(s): {expected_time(total, args.seeds, args.gpu, ranks)}")
    longest = _planned([*common, *preset_flags(LONGEST), "--target-flops", str(args.flops)], ranks)[2].total_tokens
    print(f"shards\t{max(climbmix_shards(tokens) for tokens in [longest, *(tokens for tokens, _ in spent)])}")
    for variant, flags in found.items():
        print(f"flags\t{variant}\t{' '.join(flags)}")


def parse_args(argv):
    split = argv.index("--") if "--" in argv else len(argv)
    p = argparse.ArgumentParser(prog="python -m scripts.paper_plan", description="Plans of the paper's runs")
    p.add_argument("--budget", default="flops", choices=("flops", "tokens", "params"))
    p.add_argument("--flops", type=float, required=True, help="of the FLOPs budget")
    p.add_argument("--tokens", type=float, default=0, help="of the tokens budget; 0 = the FLOPs budget's baseline's")
    p.add_argument("--variants", default="baseline bov", help="names of presets; FLAG=VALUE,... after a colon")
    p.add_argument("--seeds", type=int, default=1, help="how many, for the hours")
    p.add_argument("--gpu", default="H100", help="name of the device, for the hours")
    p.add_argument("--source", default="climbmix", help="of the training text")
    p.add_argument("--tolerance", type=float, default=0.005, help="of the matched parameters")
    return p.parse_args(argv[:split]), argv[split + 1 :]


def main(argv=None):
    try:
        run(*parse_args(sys.argv[1:] if argv is None else argv))
    except ValueError as error:
        sys.exit(f"paper_plan: {error}")


if __name__ == "__main__":
    main()
