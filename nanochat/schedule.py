"""How long, in what batches and at which rates a run trains: numbers make a Plan, a Plan makes schedules."""

import math
from dataclasses import dataclass

from nanochat.optim import TABLE_LR_SCALE, TABLE_WEIGHT_DECAY

# ---------------------------------------------------------------------------- constants

# The hyperparameters were tuned on a d12 model of width 768 with batches of 2^19 tokens.
REFERENCE_BATCH = 2**19
REFERENCE_WIDTH = 768
BATCH_EXPONENT = 0.383  # best batch grows as tokens ** 0.383 (arXiv 2505.13738)

MOMENTUM_START, MOMENTUM_PEAK, MOMENTUM_END = 0.85, 0.97, 0.90
MOMENTUM_WARMUP = 400  # steps

# ClimbMix as hosted in shards of about 250M characters. By estimate 170 yield 5 to 6 billion BOS-aligned tokens
# at vocabulary 32,768, so 100 billion tokens need about 3,000 shards and 300 GB.
CLIMBMIX_TOKENS_PER_SHARD = 33_333_333
CLIMBMIX_BYTES_PER_SHARD = 100_000_000
CLIMBMIX_TRAIN_SHARDS = 6_542  # one more is held out for validation

# ---------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Plan:
    """A run's size and rates. Tokens count all ranks; `lr` is what the optimizer's groups hold at multiplier 1."""

    num_iterations: int
    total_batch_size: int  # tokens per step
    device_batch_size: int  # rows per rank and micro-batch
    seq_len: int
    world_size: int
    grad_accum_steps: int
    total_tokens: int
    total_flops: int
    lr: dict[str, float]  # matrix, embedding, unembedding, scalar, value_table
    weight_decay: float  # Muon's, at step 0
    optimizer_args: dict[
        str, float
    ]  # keywords of GPT.setup_optimizer: `lr` before the scaling by width, decay, the tables' own
    warmup_steps: int
    warmdown_steps: int
    final_lr_frac: float


def make_plan(
    *,
    scaling_params: int,
    reference_scaling_params: int,
    flops_per_token: int,
    n_embd: int,
    device_batch_size: int,
    seq_len: int,
    world_size: int = 1,
    total_batch_size: int = -1,
    num_iterations: int = -1,
    target_flops: float = -1,
    target_tokens: float = -1,
    target_param_data_ratio: float = -1,
    embedding_lr: float = 0.3,
    unembedding_lr: float = 0.008,
    matrix_lr: float = 0.02,
    scalar_lr: float = 0.5,
    weight_decay: float = 0.28,
    table_lr_scale: float = TABLE_LR_SCALE,
    table_weight_decay: float = TABLE_WEIGHT_DECAY,
    warmup_steps: int = 40,
    warmdown_ratio: float = 0.65,
    final_lr_frac: float = 0.05,
) -> Plan:
    """The Plan of a model; `scaling_params` = block matrices + lm_head, an absent c_v counted; reference: d12's.

    Horizon: the first positive one of num_iterations, target_flops, target_tokens, target_param_data_ratio.
    Tokens D = ratio * N of the model and D_ref = ratio * N_ref set batch and decay, so the ratio itself cancels:
    batch = 2^19 (N/N_ref)^0.383 to the nearest power of two unless given, rates * sqrt(batch / 2^19),
    decay * sqrt(batch / 2^19) * N_ref / N (keeps the averaging time of AdamW constant, arXiv 2405.13698).
    Raises ValueError without a horizon, for one under a step, and for a batch that ranks and rows do not divide.
    """
    size_ratio = scaling_params / reference_scaling_params
    if total_batch_size == -1:
        total_batch_size = 2 ** round(math.log2(REFERENCE_BATCH * size_ratio**BATCH_EXPONENT))
    grad_accum_steps = _grad_accum_steps(total_batch_size, device_batch_size, seq_len, world_size)
    steps = _num_iterations(
        total_batch_size, num_iterations, target_flops / flops_per_token, target_tokens,
        int(target_param_data_ratio * scaling_params),
    )  # fmt: skip
    total_tokens = steps * total_batch_size
    by_batch = math.sqrt(total_batch_size / REFERENCE_BATCH)
    by_width = (n_embd / REFERENCE_WIDTH) ** -0.5
    args = dict(
        unembedding_lr=unembedding_lr * by_batch,
        embedding_lr=embedding_lr * by_batch,
        matrix_lr=matrix_lr * by_batch,
        scalar_lr=scalar_lr * by_batch,
        weight_decay=weight_decay * by_batch / size_ratio,
        table_lr_scale=table_lr_scale,
        table_weight_decay=table_weight_decay,
    )
    return Plan(
        num_iterations=steps,
        total_batch_size=total_batch_size,
        device_batch_size=device_batch_size,
        seq_len=seq_len,
        world_size=world_size,
        grad_accum_steps=grad_accum_steps,
        total_tokens=total_tokens,
        total_flops=total_tokens * flops_per_token,
        lr=dict(
            matrix=args["matrix_lr"],
            embedding=args["embedding_lr"] * by_width,
            unembedding=args["unembedding_lr"] * by_width,
            scalar=args["scalar_lr"],
            value_table=args["embedding_lr"] * by_width * table_lr_scale,
        ),
        weight_decay=args["weight_decay"],
        optimizer_args=args,
        warmup_steps=warmup_steps,
        warmdown_steps=round(warmdown_ratio * steps),
        final_lr_frac=final_lr_frac,
    )


def _grad_accum_steps(total_batch_size, device_batch_size, seq_len, world_size) -> int:
    if device_batch_size < 1 or seq_len < 1:
        raise ValueError(f"--device-batch-size {device_batch_size} and --max-seq-len {seq_len} must be at least 1")
    micro = device_batch_size * seq_len * world_size
    steps, rest = divmod(total_batch_size, micro)
    if total_batch_size < 1 or rest:
        nearest = " or ".join(f"{n * micro:,}" for n in (steps, steps + 1) if n > 0)
        raise ValueError(
            f"--total-batch-size {total_batch_size:,} is not a multiple of --device-batch-size {device_batch_size} * "
            f"--max-seq-len {seq_len} * {world_size} rank(s) = {micro:,}: use {nearest}, or another device batch"
        )
    return steps


def _num_iterations(batch, iterations, flops_tokens, target_tokens, ratio_tokens) -> int:
    """Steps of the first positive horizon; FLOPs and tokens are rounded, the ratio rounds down as upstream's."""
    if iterations > 0:
        return iterations
    if flops_tokens > 0:
        steps, flag = round(flops_tokens / batch), "--target-flops"
    elif target_tokens > 0:
        steps, flag = round(target_tokens / batch), "--target-tokens"
    elif ratio_tokens > 0:
        steps, flag = ratio_tokens // batch, "--target-param-data-ratio"
    else:
        raise ValueError(
            "no horizon: give --num-iterations, --target-flops, --target-tokens or --target-param-data-ratio"
        )
    if steps < 1:
        raise ValueError(f"{flag} is less than one step of {batch:,} tokens: raise it, or lower --total-batch-size")
    return steps


# ---------------------------------------------------------------------------- functions of the step


def lr_multiplier(step: int, plan: Plan) -> float:
    """Factor on every group's initial rate: linear warmup, 1, linear warmdown to `final_lr_frac` at the last step."""
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    left = plan.num_iterations - step
    if left >= plan.warmdown_steps:
        return 1.0
    return _mix(plan.final_lr_frac, 1.0, left / plan.warmdown_steps)


def muon_momentum(step: int, plan: Plan) -> float:
    """0.85 to 0.97 over 400 steps, then 0.97, then to 0.90 over the warmdown; where both overlap the warmup wins."""
    if step < MOMENTUM_WARMUP:
        return _mix(MOMENTUM_START, MOMENTUM_PEAK, step / MOMENTUM_WARMUP)
    left = plan.num_iterations - step
    if left >= plan.warmdown_steps:
        return MOMENTUM_PEAK
    return _mix(MOMENTUM_END, MOMENTUM_PEAK, left / plan.warmdown_steps)


def weight_decay_at(step: int, plan: Plan) -> float:
    """Muon's weight decay: half a cosine from `plan.weight_decay` to 0 at the last step."""
    return plan.weight_decay * 0.5 * (1 + math.cos(math.pi * step / plan.num_iterations))


def _mix(a, b, t):
    return (1 - t) * a + t * b


# ---------------------------------------------------------------------------- data


def expected_epochs(total_tokens: int, dataset_tokens: float) -> float:
    """Passes over a data set of `dataset_tokens` BOS-aligned tokens (those left after packing)."""
    if dataset_tokens <= 0:
        raise ValueError("the data set has no tokens: run python -m nanochat.dataset first")
    return total_tokens / dataset_tokens


def climbmix_shards(total_tokens: int) -> int:
    """Training shards of ClimbMix for one pass of `total_tokens`; never more than there are (then data repeat)."""
    return min(math.ceil(total_tokens / CLIMBMIX_TOKENS_PER_SHARD), CLIMBMIX_TRAIN_SHARDS)


def climbmix_bytes(shards: int) -> int:
    """Bytes on disk of that many training shards and the validation shard."""
    return (shards + 1) * CLIMBMIX_BYTES_PER_SHARD
