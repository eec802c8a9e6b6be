"""The plan against the published numbers, the schedules against invariants."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from models import build
from nanochat import schedule
from nanochat.bov.memory import storage_bytes
from nanochat.bov.presets import preset
from nanochat.memory_meter import measure_training
from nanochat.plan import train_bytes
from nanochat.schedule import lr_multiplier, make_plan, muon_momentum, weight_decay_at

# Vocabulary 32,768, MLP x4: block matrices 12 C^2 per layer, and lm_head V C.
WIDTH = {12: 768, 24: 1536}
N = {depth: depth * 12 * width**2 + 32768 * width for depth, width in WIDTH.items()}
FLOPS = {12: 759_693_312, 24: 4_775_215_104}  # baseline


def flops_without(depth, value_projections):
    """FLOPs per token when that many layers have no W_V (negative: as many run it twice)."""
    return FLOPS[depth] - 6 * value_projections * WIDTH[depth] ** 2


def plan_of(depth=12, flops=FLOPS[12], **kw):
    kw = {"device_batch_size": 32, "seq_len": 2048, **kw}
    return make_plan(
        scaling_params=N[depth], reference_scaling_params=N[12], flops_per_token=flops, n_embd=WIDTH[depth], **kw
    )


@pytest.mark.parametrize(
    "depth, value_projections, target, batch, steps, billions",
    [
        pytest.param(12, 0, 1.5e18, 2**19, 3766, 1.97, id="d12-baseline"),
        pytest.param(12, 4, 1.5e18, 2**19, 3838, 2.01, id="d12-bov"),
        pytest.param(24, 0, 3.91e19, 2**20, 7809, 8.19, id="d24-baseline"),
        pytest.param(24, 8, 3.91e19, 2**20, 7998, 8.39, id="d24-bov"),
        pytest.param(12, -4, 1.5e18, 2**19, 3697, 1.94, id="d12-v-plus-x0"),
        pytest.param(12, 11, 1.5e18, 2**19, 3969, 2.08, id="d12-first-all"),
        pytest.param(12, 6, 1.5e18, 2**19, 3874, 2.03, id="d12-first-every-2"),
        pytest.param(12, 12, 1.5e18, 2**19, 3989, 2.09, id="d12-bov-every-layer"),
    ],
)
def test_steps_and_batch_of_the_paper(depth, value_projections, target, batch, steps, billions):
    flops_per_token = flops_without(depth, value_projections)
    plan = plan_of(depth, flops_per_token, target_flops=target)
    assert (plan.total_batch_size, plan.num_iterations) == (batch, steps)
    assert round(plan.total_tokens / 1e9, 2) == billions
    assert plan.total_flops == plan.total_tokens * flops_per_token == pytest.approx(target, rel=1e-3)


def test_scaling_parameters_are_those_of_the_paper():
    # 12 C^2 per layer + V C = 110.1M and 729.8M
    assert [round(N[d] / 1e6, 1) for d in (12, 24)] == [110.1, 729.8]


def test_a_hundred_billion_tokens():
    plan = plan_of(24, flops_without(24, 8), target_tokens=100e9)
    assert plan.num_iterations == 95_367
    assert plan.total_flops == pytest.approx(4.66e20, rel=1e-3)


def test_d24_rates_as_the_optimizer_uses_them():
    plan = plan_of(24, target_flops=3.91e19)
    assert plan.lr == pytest.approx(
        dict(matrix=0.0283, embedding=0.3, unembedding=0.008, scalar=0.707, value_table=0.15), rel=1e-3
    )
    assert plan.weight_decay == pytest.approx(0.0597, abs=5e-5)


def test_counting_the_absent_value_projections_is_what_gives_the_published_decay():
    structural = N[24] - 8 * 1536**2
    plan = make_plan(
        scaling_params=structural, reference_scaling_params=N[12] - 4 * 768**2, flops_per_token=1, n_embd=1536,
        device_batch_size=32, seq_len=2048, num_iterations=1,
    )  # fmt: skip
    assert plan.weight_decay == pytest.approx(0.0600, abs=5e-5)


def test_d12_rates_are_the_flags_themselves():
    plan = plan_of(num_iterations=10)
    assert plan.lr == dict(matrix=0.02, embedding=0.3, unembedding=0.008, scalar=0.5, value_table=0.15)
    assert plan.weight_decay == 0.28


def test_tables_have_a_rate_and_a_decay_of_their_own():
    plan = plan_of(24, num_iterations=10, table_lr_scale=0.125, table_weight_decay=0.3)
    assert plan.lr["value_table"] == pytest.approx(plan.lr["embedding"] / 8)
    assert plan.optimizer_args["table_weight_decay"] == 0.3


def test_optimizer_arguments_are_the_rates_before_width():
    plan = plan_of(24, num_iterations=10)
    by_width = 2**-0.5
    assert plan.lr["embedding"] == pytest.approx(plan.optimizer_args["embedding_lr"] * by_width)
    assert plan.lr["unembedding"] == pytest.approx(plan.optimizer_args["unembedding_lr"] * by_width)
    assert plan.lr["matrix"] == plan.optimizer_args["matrix_lr"]
    assert plan.lr["scalar"] == plan.optimizer_args["scalar_lr"]
    assert plan.weight_decay == plan.optimizer_args["weight_decay"]


# ---------------------------------------------------------------------------- horizon and batch


def test_horizons_in_order_of_precedence():
    horizons = dict(num_iterations=7, target_flops=1.5e18, target_tokens=2**19 * 50, target_param_data_ratio=12)
    expected = [7, 3766, 50, 12 * N[12] // 2**19]
    for steps in expected:
        assert plan_of(**horizons).num_iterations == steps
        horizons.pop(next(iter(horizons)))


def test_no_horizon_names_the_flags():
    with pytest.raises(
        ValueError, match="--num-iterations.*--target-flops.*--target-tokens.*--target-param-data-ratio"
    ):
        plan_of()


@pytest.mark.parametrize("flag", ["target_flops", "target_tokens", "target_param_data_ratio"])
def test_a_horizon_below_one_step_is_refused(flag):
    tiny = {"target_flops": 1e9, "target_tokens": 100, "target_param_data_ratio": 1e-4}
    with pytest.raises(ValueError, match="--" + flag.replace("_", "-")):
        plan_of(**{flag: tiny[flag]})


@pytest.mark.parametrize("batch, nearest", [(2500, "2,048 or 3,072"), (512, "use 1,024,"), (0, "use 1,024,")])
def test_a_batch_the_ranks_do_not_divide_names_the_nearest(batch, nearest):
    with pytest.raises(ValueError, match=nearest) as error:
        plan_of(total_batch_size=batch, device_batch_size=2, seq_len=256, world_size=2, num_iterations=1)
    assert "--total-batch-size" in str(error.value) and "--device-batch-size" in str(error.value)


@given(
    rows=st.integers(1, 64),
    seq_len=st.sampled_from([16, 256, 2048]),
    world=st.integers(1, 16),
    accum=st.integers(1, 9),
    steps=st.integers(1, 10_000),
)
def test_tokens_are_steps_times_batch_and_batch_is_made_of_micro_batches(rows, seq_len, world, accum, steps):
    batch = rows * seq_len * world * accum
    plan = plan_of(
        total_batch_size=batch, device_batch_size=rows, seq_len=seq_len, world_size=world, num_iterations=steps
    )
    assert plan.grad_accum_steps == accum
    assert plan.total_tokens == steps * batch
    assert plan.lr["matrix"] ** 2 / 0.02**2 == pytest.approx(batch / 2**19)
    # the averaging time B / (lr * decay * D) of the rule is the same at every batch size
    assert batch / (plan.lr["matrix"] * plan.weight_decay) == pytest.approx(2**19 / (0.02 * 0.28))


@given(factor=st.floats(0.01, 1000))
def test_automatic_batch_is_the_nearest_power_of_two(factor):
    plan = make_plan(
        scaling_params=int(factor * N[12]), reference_scaling_params=N[12], flops_per_token=1, n_embd=768,
        device_batch_size=1, seq_len=1, num_iterations=1,
    )  # fmt: skip
    best = 2**19 * factor**0.383
    assert plan.total_batch_size.bit_count() == 1
    assert 2**-0.501 < plan.total_batch_size / best < 2**0.501


# ---------------------------------------------------------------------------- memory


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", ["upstream", "paper/bov"])
def test_the_plans_bytes_are_those_of_a_training_step(name, ranks):
    model = build(**preset(name))
    plan = plan_of(device_batch_size=3, seq_len=8, world_size=ranks, total_batch_size=24 * ranks, num_iterations=1)
    parts = train_bytes(model, plan)
    found = measure_training(model.config, torch.device("cpu"), ranks) | {"weights": storage_bytes(model.parameters())}
    assert {key: parts[key] for key in found} == found
    assert parts["logits"] == 2 * 3 * 8 * 64 * 4
    assert parts["total"] == sum(found.values()) + parts["logits"]


def test_ranks_that_cannot_share_a_tensor_are_refused_before_training():
    plan = plan_of(device_batch_size=1, seq_len=8, world_size=3, total_batch_size=24, num_iterations=1)
    with pytest.raises(ValueError, match="3 ranks cannot share its 64 rows"):
        train_bytes(build(), plan)


# ---------------------------------------------------------------------------- schedules

plans = st.builds(
    lambda steps, warmup, warmdown, frac: plan_of(
        num_iterations=steps, warmup_steps=warmup, warmdown_ratio=warmdown, final_lr_frac=frac
    ),
    st.integers(1, 3000),
    st.integers(0, 100),
    st.floats(0, 1),
    st.floats(0, 1),
)


@given(plan=plans, data=st.data())
@settings(max_examples=200)
def test_schedules_stay_in_their_bounds(plan, data):
    step = data.draw(st.integers(0, plan.num_iterations))
    assert 0 <= lr_multiplier(step, plan) <= 1
    assert lr_multiplier(step, plan) >= min(plan.final_lr_frac, 1 / max(plan.warmup_steps, 1)) - 1e-12
    assert 0.85 <= muon_momentum(step, plan) <= 0.97 + 1e-12
    assert 0 <= weight_decay_at(step, plan) <= plan.weight_decay


@given(plan=plans)
@settings(max_examples=50)
def test_rate_moves_by_small_steps_where_warmup_ends_before_the_warmdown(plan):
    start = plan.num_iterations - plan.warmdown_steps
    assume(0 < plan.warmup_steps <= start and plan.warmdown_steps > 0)
    values = [lr_multiplier(i, plan) for i in range(plan.num_iterations + 1)]
    biggest = max(1 / plan.warmup_steps, (1 - plan.final_lr_frac) / plan.warmdown_steps)
    assert max(abs(b - a) for a, b in zip(values, values[1:], strict=False)) <= biggest + 1e-9
    assert values[plan.warmup_steps : start + 1] == [1.0] * (start + 1 - plan.warmup_steps)
    assert values[-1] == pytest.approx(plan.final_lr_frac)


def test_the_paper_s_schedule_at_named_steps():
    plan = plan_of(target_flops=1.5e18)  # 3,766 steps, warmdown over the last 2,448
    start = 3766 - 2448
    at = [0, 19, 39, 40, start, start + 1224, 3766]
    assert [lr_multiplier(i, plan) for i in at] == pytest.approx([1 / 40, 0.5, 1, 1, 1, 0.525, 0.05])
    at = [0, 200, 400, start, start + 1224, 3766]
    assert [muon_momentum(i, plan) for i in at] == pytest.approx([0.85, 0.91, 0.97, 0.97, 0.935, 0.90])
    at = [0, 3766 // 2, 3766]
    assert [weight_decay_at(i, plan) for i in at] == pytest.approx([0.28, 0.14, 0], abs=1e-12)


def test_momentum_warmup_wins_over_the_warmdown():
    plan = plan_of(num_iterations=300)  # the warmdown starts at step 105
    assert [muon_momentum(i, plan) for i in (105, 300)] == pytest.approx([0.85 + 0.12 * i / 400 for i in (105, 300)])


def test_weight_decay_falls_like_a_half_cosine():
    plan = plan_of(num_iterations=1000)
    values = [weight_decay_at(i, plan) for i in range(1001)]
    assert all(a > b for a, b in zip(values, values[1:], strict=False))
    assert all(math.isclose(a + b, 0.28) for a, b in zip(values, values[::-1], strict=True))


def test_no_warmup_and_no_warmdown_is_constant():
    plan = replace(plan_of(num_iterations=20), warmup_steps=0, warmdown_steps=0)
    assert {lr_multiplier(i, plan) for i in range(21)} == {1.0}


# ---------------------------------------------------------------------------- data


def test_the_authors_download_repeats_data_and_100_billion_tokens_need_3000_shards():
    assert 5e9 < 170 * schedule.CLIMBMIX_TOKENS_PER_SHARD < 6e9
    assert 1 < schedule.expected_epochs(8_190_000_000, 170 * schedule.CLIMBMIX_TOKENS_PER_SHARD) < 2
    shards = schedule.climbmix_shards(95_367 * 2**20)
    assert shards == pytest.approx(3000, rel=0.01)
    assert schedule.climbmix_bytes(shards) == pytest.approx(300e9, rel=0.01)


def test_shards_are_bounded_by_the_data_set():
    assert schedule.climbmix_shards(1) == 1
    assert schedule.climbmix_shards(10**15) == 6542


def test_epochs_of_nothing_is_an_error():
    assert schedule.expected_epochs(10, 4) == 2.5
    with pytest.raises(ValueError, match="no tokens"):
        schedule.expected_epochs(10, 0)
