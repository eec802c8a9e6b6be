"""From flags to a plan: the model, its size, the run's length and rates, and what they cost. No data is touched."""

import json

import torch

from nanochat.bov import host, memory
from nanochat.bov.layers import is_explicit
from nanochat.bov.spec import bank_layers
from nanochat.common import COMPUTE_DTYPE, get_dist_info, jsonable, print0
from nanochat.gpt import GPT, GPTConfig, config_to_dict
from nanochat.schedule import (
    CLIMBMIX_TOKENS_PER_SHARD,
    Plan,
    climbmix_bytes,
    climbmix_shards,
    expected_epochs,
    make_plan,
)
from nanochat.tokenizer import get_tokenizer


def model_config(args, vocab_size: int, depth: int, own: bool = True) -> GPTConfig:
    """The model of `depth` under the flags: n_embd = depth * aspect_ratio, rounded up to whole heads.

    `own` False: the d12 of the scaling rules, to which explicit layer lists, --kv-heads and --mlp-hidden do not apply.
    """
    if depth < 1:
        raise ValueError(f"--depth {depth}: at least 1")
    if args.head_dim < 2 or args.head_dim % 2 or args.aspect_ratio < 1:
        raise ValueError(f"--head-dim {args.head_dim} must be even, --aspect-ratio {args.aspect_ratio} at least 1")
    n_head = -(-depth * args.aspect_ratio // args.head_dim)
    if own and args.kv_heads and n_head % args.kv_heads:
        fits = ", ".join(str(n) for n in range(1, n_head + 1) if n_head % n == 0)
        raise ValueError(f"--kv-heads {args.kv_heads}: must divide the {n_head} query heads; use one of {fits}")
    axes = host.axes_from_flags(args)
    if not own:
        axes |= {name: "none" for name in ("ve_layers", "bov_layers") if is_explicit(axes[name])} | {"mlp_hidden": 0}
    return GPTConfig(
        sequence_len=args.max_seq_len, vocab_size=vocab_size, n_layer=depth, n_head=n_head,
        n_kv_head=args.kv_heads or n_head if own else n_head, n_embd=n_head * args.head_dim,
        window_pattern=args.window_pattern, **axes,
    )  # fmt: skip


def meta_model(config: GPTConfig) -> GPT:
    """A model of shapes without data."""
    with torch.device("meta"):
        return GPT(config)


def scaling_params(model: GPT) -> int:
    """N of the scaling rules: block matrices + lm_head, with the W_V that bank layers lack counted in."""
    counts = model.num_scaling_params()
    return counts["transformer_matrices"] + counts["lm_head"] + host.absent_projection_params(model)


def plan_run(args, vocab_size: int, world_size: int) -> tuple[GPTConfig, Plan]:
    """Config and Plan from the flags. Raises ValueError naming the flag for what cannot be trained."""
    config = model_config(args, vocab_size, args.depth)
    model, reference = meta_model(config), meta_model(model_config(args, vocab_size, 12, own=False))
    plan = make_plan(
        scaling_params=scaling_params(model), reference_scaling_params=scaling_params(reference),
        flops_per_token=model.estimate_flops(), n_embd=config.n_embd, device_batch_size=args.device_batch_size,
        seq_len=args.max_seq_len, world_size=world_size, total_batch_size=args.total_batch_size,
        num_iterations=args.num_iterations, target_flops=args.target_flops, target_tokens=args.target_tokens,
        target_param_data_ratio=args.target_param_data_ratio, embedding_lr=args.embedding_lr * args.lr_scale,
        unembedding_lr=args.unembedding_lr * args.lr_scale, matrix_lr=args.matrix_lr * args.lr_scale,
        scalar_lr=args.scalar_lr * args.lr_scale, weight_decay=args.weight_decay,
        table_lr_scale=args.table_lr_scale, table_weight_decay=args.table_weight_decay,
        warmup_steps=args.warmup_steps, warmdown_ratio=args.warmdown_ratio,
        final_lr_frac=args.final_lr_frac,
    )  # fmt: skip
    return config, plan


def memory_sizes(model: GPT) -> memory.Sizes:
    """What the bytes of a model depend on; a model of shapes without data will do."""
    return memory.Sizes.of(model.config, [left for left, _ in model.window_sizes], rotary=model.cos.size(1))


def train_bytes(model: GPT, plan: Plan) -> dict[str, int]:
    """Bytes on one rank by formula: weights, whole gradients, this rank's share of the optimizer state, logits."""
    sizes = memory_sizes(model)
    weights = memory.weight_bytes(sizes, COMPUTE_DTYPE) + memory.table_bytes(sizes, COMPUTE_DTYPE)
    logits = 2 * plan.device_batch_size * plan.seq_len * model.lm_head.out_features * 4
    parts = {"weights": weights, **memory.train_bytes(sizes, COMPUTE_DTYPE, plan.world_size), "logits": logits}
    return parts | {"total": sum(parts.values())}


def plan_summary(config: GPTConfig, plan: Plan, epoch_tokens: float | None = None) -> dict:
    """What --dry-run prints as its last line. `epoch_tokens`: of one pass over the data, by default of `shards`.

    shards, disk_bytes: of ClimbMix for one pass, whatever the data. Parameters in elements, everything else in bytes.
    """
    model = meta_model(config)
    counts = model.num_scaling_params()
    tables = counts["value_embeds"]
    shards = climbmix_shards(plan.total_tokens)
    epoch_tokens = epoch_tokens or shards * CLIMBMIX_TOKENS_PER_SHARD
    return {
        "model_config": config_to_dict(config),
        "num_params": {
            "wte": counts["wte"], "value_tables": tables, "lm_head": counts["lm_head"],
            "matrices": counts["transformer_matrices"], "scalars": counts["scalars"], "total": counts["total"],
            "without_tables": counts["total"] - tables,
        },
        "num_matmul_params": model.num_matmul_params(),
        "flops_per_token": model.estimate_flops(),
        "total_batch_size": plan.total_batch_size,
        "num_iterations": plan.num_iterations,
        "total_tokens": plan.total_tokens,
        "total_flops": plan.total_flops,
        "lr": plan.lr,
        "weight_decay": plan.weight_decay,
        "table_weight_decay": plan.optimizer_args["table_weight_decay"],
        "bov_layers": list(bank_layers(config.n_layer, host.axes_of(config))),
        "kv_bytes_per_token": model.kv_bytes_per_token(),
        "table_bytes": tables * COMPUTE_DTYPE.itemsize,
        "expected_epochs": expected_epochs(plan.total_tokens, epoch_tokens),
        "shards": shards,
        "disk_bytes": climbmix_bytes(shards),
        "train_bytes_per_rank": train_bytes(model, plan)["total"],
    }  # fmt: skip


def dry_run(args):
    """Print the plan and, as the last line, its JSON. Needs no data, and no tokenizer when --vocab-size is given."""
    vocab_size = args.vocab_size or get_tokenizer().get_vocab_size()
    config, plan = plan_run(args, vocab_size, get_dist_info()[3])
    summary = plan_summary(config, plan)
    counts = summary["num_params"]
    shape = f"{config.n_layer} layers, width {config.n_embd}, {config.n_head} heads of {config.n_kv_head} keys"
    print0(f"model      {shape}, windows {config.window_pattern}")
    print0(f"parameters {counts['without_tables']:,} without value tables, {counts['value_tables']:,} in tables")
    print0(
        f"batch      {plan.total_batch_size:,} tokens, {plan.grad_accum_steps} micro-steps, {plan.world_size} rank(s)"
    )
    print0(f"horizon    {plan.num_iterations:,} steps, {plan.total_tokens:,} tokens, {plan.total_flops:.3g} FLOPs")
    rates = ", ".join(f"{name} {rate:.4g}" for name, rate in plan.lr.items())
    print0(f"rates      {rates}, weight decay {plan.weight_decay:.4f}")
    size = summary["train_bytes_per_rank"] / 2**30
    print0(f"memory     {size:.2f} GiB a rank for weights, gradients, optimizer state and logits")
    print0("data       the last line's expected_epochs, shards and disk_bytes are of ClimbMix, whatever the text")
    print0(json.dumps(jsonable(summary)))
