"""Muon and AdamW against plain references, the parameter table, and sharding over ranks."""

import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import optim
from nanochat.optim import MuonAdamW, param_groups, polar_factor, reshard
from ranks import spawn


@pytest.fixture(autouse=True)
def fp32_iteration(monkeypatch):
    """Muon's iteration in fp32 whatever the machine; the one bf16 test sets it back."""
    monkeypatch.setattr(optim, "COMPUTE_DTYPE", torch.float32)


def parameter(*shape, seed=0, std=0.05, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter((torch.randn(shape, generator=generator) * std).to(dtype))


def set_gradients(groups, seed, std=0.01):
    generator = torch.Generator().manual_seed(seed)
    for p in (p for group in groups for p in group["params"]):
        p.grad = (torch.randn(p.shape, generator=generator) * std).to(p.dtype)


# ---------------------------------------------------------------------------- the parameter table

BLOCK = "transformer.h.1."
MODEL = {
    "transformer.wte.weight": (64, 32),
    BLOCK + "attn.c_q.weight": (32, 32),
    BLOCK + "attn.c_k.weight": (16, 32),
    BLOCK + "attn.c_v.weight": (16, 32),
    BLOCK + "attn.c_proj.weight": (32, 32),
    BLOCK + "attn.ve_gate.weight": (2, 12),
    BLOCK + "attn.gamma_v": (1,),
    BLOCK + "attn.alpha_v": (2,),
    BLOCK + "attn.beta_v": (2,),
    BLOCK + "attn.lambda_v": (2,),
    BLOCK + "mlp.c_fc.weight": (128, 32),
    BLOCK + "mlp.c_proj.weight": (32, 128),
    "value_embeds.1.weight": (64, 16),
    "value_embeds.11.weight": (64, 16),
    "lm_head.weight": (64, 32),
    "resid_lambdas": (2,),
    "x0_lambdas": (2,),
    "smear_gate.weight": (1, 24),
    "smear_lambda": (1,),
    "backout_lambda": (1,),
}
RATES = dict(unembedding_lr=0.008, embedding_lr=0.3, matrix_lr=0.02, scalar_lr=0.5, weight_decay=0.28)


def groups_of(shapes, n_embd=768, **kw):
    named = [(name, parameter(*shape)) for name, shape in shapes.items()]
    return {group["name"]: group for group in param_groups(named, n_embd=n_embd, **{**RATES, **kw})}


def test_value_tables_alone_take_their_own_rate_and_decay():
    shapes = {name: (64, 16) for name in ("lm_head.weight", "transformer.wte.weight", "value_embeds.1.weight")}
    default, changed = groups_of(shapes), groups_of(shapes, table_lr_scale=0.1, table_weight_decay=0.7)
    assert changed["value_embeds"]["lr"] == pytest.approx(default["wte"]["lr"] / 10)
    assert changed["value_embeds"]["weight_decay"] == 0.7
    for name in ("lm_head", "wte"):
        assert [changed[name][key] for key in ("lr", "weight_decay")] == [
            default[name][k] for k in ("lr", "weight_decay")
        ]


@pytest.mark.parametrize(
    "group, members, lr, betas, weight_decay",
    [
        ("lm_head", ["lm_head.weight"], 0.008, (0.8, 0.96), 0.01),
        ("wte", ["transformer.wte.weight"], 0.3, (0.8, 0.995), 0.001),
        ("value_embeds", ["value_embeds.1.weight", "value_embeds.11.weight"], 0.15, (0.8, 0.995), 0.01),
        ("resid", ["resid_lambdas"], 0.005, (0.8, 0.95), 0.05),
        ("x0", ["x0_lambdas"], 0.5, (0.96, 0.95), 0),
        ("alpha_v", [BLOCK + "attn.alpha_v"], 0.005, (0.8, 0.95), 0.05),
        ("beta_v", [BLOCK + "attn.beta_v"], 0.5, (0.96, 0.95), 0),
        ("gamma_v", [BLOCK + "attn.gamma_v"], 0.5, (0.96, 0.95), 0),
        ("lambda_v", [BLOCK + "attn.lambda_v"], 0.005, (0.8, 0.95), 0),
        ("smear", ["smear_gate.weight", "smear_lambda", "backout_lambda"], 0.2, (0.8, 0.95), 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_adamw_rows_of_the_table(group, members, lr, betas, weight_decay):
    row = groups_of(MODEL)[group]
    assert set(row["names"]) == set(members)
    assert (row["kind"], row["lr"], row["betas"], row["weight_decay"]) == ("adamw", lr, betas, weight_decay)
    assert row["initial_lr"] == lr and row["eps"] == 1e-10


def test_muon_takes_every_block_matrix_by_shape_and_nothing_else():
    muon = [group for group in groups_of(MODEL).values() if group["kind"] == "muon"]
    assert [tuple(group["params"][0].shape) for group in muon] == [(2, 12), (16, 32), (32, 32), (32, 128), (128, 32)]
    assert {name for group in muon for name in group["names"]} == {
        name for name in MODEL if name.startswith("transformer.h.") and name.endswith(".weight")
    }
    assert all(group["weight_decay"] == 0.28 and group["lr"] == 0.02 for group in muon)


def test_width_scales_head_embedding_and_tables_alone():
    d12, d24 = groups_of(MODEL), groups_of(MODEL, n_embd=1536)
    scaled = {name for name in d12 if d24[name]["lr"] != d12[name]["lr"]}
    assert scaled == {"lm_head", "wte", "value_embeds"}
    assert all(d24[name]["lr"] == pytest.approx(d12[name]["lr"] * 2**-0.5) for name in scaled)


def test_batch_scaled_rates_leave_smear_and_lambda_v_alone():
    twice = groups_of(MODEL, **{name: 2 * rate for name, rate in RATES.items()})
    once = groups_of(MODEL)
    assert {name for name in once if twice[name]["lr"] == once[name]["lr"]} == {"smear", "lambda_v"}


def test_a_plain_trunk_has_no_empty_groups():
    plain = {name: shape for name, shape in MODEL.items() if "lambda" not in name and "_v" not in name}
    assert all(group["params"] for group in groups_of(plain).values())


@pytest.mark.parametrize(
    "name, shape",
    [("transformer.h.0.attn.mystery", (3,)), ("transformer.h.0.norm.weight", (32,)), ("lm_head.bias", (64,))],
    ids=["unknown-coefficient", "vector-for-muon", "bias"],
)
def test_a_parameter_without_one_row_is_named(name, shape):
    with pytest.raises(ValueError, match=re.escape(name)):
        groups_of({**MODEL, name: shape})


def test_unknown_muon_variant_names_the_flag():
    with pytest.raises(ValueError, match="--muon 'fast'.*upstream, paper"):
        groups_of(MODEL, muon="fast")


# ---------------------------------------------------------------------------- AdamW

HYPER = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 24), (96, 33)], ids=str)
def test_adamw_equals_torch(shape):
    ours, reference = parameter(*shape), parameter(*shape)
    mine, theirs = MuonAdamW([dict(kind="adamw", params=[ours], **HYPER)]), torch.optim.AdamW([reference], **HYPER)
    for step in range(10):
        set_gradients(mine.param_groups, step)
        reference.grad = ours.grad.clone()
        mine.step()
        theirs.step()
    torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-7)


def test_adamw_in_bf16_computes_in_fp32_and_stores_in_bf16():
    p = parameter(40, 30, std=0.8, dtype=torch.bfloat16)
    optimizer = MuonAdamW([dict(kind="adamw", params=[p], **HYPER)])
    (b1, b2), lr = HYPER["betas"], HYPER["lr"]
    for step in range(1, 6):
        set_gradients(optimizer.param_groups, step)
        state = optimizer.state[p]
        m, v = (state[k].double() if state else torch.zeros(40, 30).double() for k in ("exp_avg", "exp_avg_sq"))
        m, v = b1 * m + (1 - b1) * p.grad.double(), b2 * v + (1 - b2) * p.grad.double() ** 2
        update = m / (1 - b1**step) / ((v / (1 - b2**step)).sqrt() + 1e-10)
        expected = p.detach().double() * (1 - lr * 0.1) - lr * update
        optimizer.step()
        state = optimizer.state[p]
        for value, wanted in ((p, expected), (state["exp_avg"], m), (state["exp_avg_sq"], v)):
            assert value.dtype == torch.bfloat16
            # rounding once costs half an ulp, at most 2^-8 relative
            torch.testing.assert_close(value.double(), wanted, rtol=2**-8 + 1e-5, atol=1e-7)


def test_table_decay_acts_in_fp32_and_vanishes_in_bf16():
    for dtype, factor in ((torch.float32, 1 - 0.0015), (torch.bfloat16, 1.0)):
        p = parameter(64, 32, dtype=dtype)
        before = p.detach().clone()
        optimizer = MuonAdamW([dict(kind="adamw", params=[p], **{**HYPER, "lr": 0.15, "weight_decay": 0.01})])
        p.grad = torch.zeros_like(p)
        optimizer.step()
        torch.testing.assert_close(p.detach(), before * factor, rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------- Muon


def muon_reference(p, grads, *, lr, momentum, beta2, weight_decay, equalize):
    """One matrix over several steps in the dtype of `p`, line by line from the papers."""
    rows, cols = p.shape
    m, axis = torch.zeros_like(p), 1 if rows >= cols else 0
    second = torch.zeros(rows if axis else cols, dtype=p.dtype)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        x = (1 - momentum) * g + momentum * m
        if equalize:
            lengths = x.norm(dim=1)
            x = x / lengths[:, None] * (x.norm() / rows**0.5)
        x = x / (1.01 * x.norm())
        for a, b, c in optim.POLAR_EXPRESS:
            x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
        if equalize:
            x = x * min(rows, cols) ** 0.5 / x.norm()
        second = beta2 * second + (1 - beta2) * x.square().mean(dim=axis)
        scaled = x / second.sqrt().unsqueeze(axis)
        update = scaled * x.norm() / scaled.norm()
        rate = lr * max(1.0, rows / cols) ** 0.5
        decay = torch.where(update * p >= 0, rate * weight_decay * p, torch.zeros_like(p))
        p = p - rate * update - decay
    return p


SHAPES = [(24, 24), (24, 96), (96, 24), (2, 12)]
MUON = dict(lr=0.02, momentum=0.95, beta2=0.9, weight_decay=0.28)


def run_muon(shape, variant, steps=4, dtype=torch.float32):
    """Three matrices after some steps, and what they and their gradients were."""
    params = [parameter(*shape, seed=i, dtype=dtype) for i in range(3)]
    start = [p.detach().clone() for p in params]
    optimizer = MuonAdamW([dict(kind="muon", params=params, ns_steps=5, variant=variant, **MUON)])
    grads = []
    for step in range(steps):
        set_gradients(optimizer.param_groups, step, std=1)
        grads.append([p.grad.clone() for p in params])
        optimizer.step()
    return params, start, grads


@pytest.mark.parametrize("variant", ["upstream", "paper"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_muon_equals_the_fp64_reference(shape, variant):
    # in fp64 on both sides: a rounding that flips the sign of a tiny update would flip its decay too
    params, start, grads = run_muon(shape, variant, dtype=torch.float64)
    for i, p in enumerate(params):
        wanted = muon_reference(start[i], [g[i] for g in grads], equalize=variant == "upstream", **MUON)
        torch.testing.assert_close(p.detach(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_muon_in_fp32_is_near_fp64(shape):
    for a, b in zip(run_muon(shape, "upstream", 1)[0], run_muon(shape, "upstream", 1, torch.float64)[0], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_iteration_moves_the_update_by_a_few_percent(shape, monkeypatch):
    exact, start, _ = run_muon(shape, "upstream", steps=1)
    monkeypatch.setattr(optim, "COMPUTE_DTYPE", torch.bfloat16)
    rounded, _, _ = run_muon(shape, "upstream", steps=1)
    for a, b, s in zip(exact, rounded, start, strict=True):
        error = ((b - a).norm() / (a - s).norm()).item()
        assert 0 < error < 0.1


@given(rows=st.integers(1, 40), cols=st.integers(1, 40), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_polar_factor_is_nearly_orthogonal_and_keeps_singular_vectors(rows, cols, seed):
    u, _, vh = torch.linalg.svd(parameter(rows, cols, seed=seed, std=1).detach(), full_matrices=False)
    singular = torch.linspace(0.02, 1, len(vh.T.mT))
    x = u @ torch.diag(singular / singular.norm() / 1.01) @ vh
    after = u.mT @ polar_factor(x.unsqueeze(0))[0] @ vh.mT
    assert (after - torch.diag(after.diag())).abs().max() < 1e-3
    assert 0.8 < after.diag().min() and after.diag().max() < 1.2


@pytest.mark.parametrize("variant", ["upstream", "paper"])
def test_a_zero_gradient_only_decays(variant):
    """Behind a zero-initialised projection the first gradients are exactly zero."""
    p = parameter(24, 24)
    before = p.detach().clone()
    optimizer = MuonAdamW([dict(kind="muon", params=[p], ns_steps=5, variant=variant, **MUON)])
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), before * (1 - 0.02 * 0.28))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_upstream_variant_has_the_norm_of_an_orthogonal_matrix(shape):
    p = parameter(*shape)
    before = p.detach().clone()
    optimizer = MuonAdamW([dict(kind="muon", params=[p], ns_steps=5, **{**MUON, "weight_decay": 0.0})])
    set_gradients(optimizer.param_groups, 9)
    optimizer.step()
    rows, cols = shape
    expected = 0.02 * max(1, rows / cols) ** 0.5 * min(rows, cols) ** 0.5
    assert (p - before).norm().item() == pytest.approx(expected, rel=1e-4)


def test_how_a_stack_is_cut_into_pieces_does_not_matter(monkeypatch):
    results = []
    for size in (1, 2 * 24 * 96, 10**9):
        monkeypatch.setitem(optim.PIECE, "cpu", size)
        results.append(run_muon((24, 96), "upstream")[0])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------- the optimizer as a whole


def small_model(table_rows=96, dtype=torch.float32):
    """Groups with every path: a sharded table, small tensors, Muon groups whose count 2 ranks do not divide."""
    shapes = {
        "lm_head.weight": (table_rows, 16),
        "transformer.wte.weight": (table_rows, 16),
        "value_embeds.0.weight": (table_rows, 12),
        "resid_lambdas": (3,),
        "smear_gate.weight": (1, 24),
        "transformer.h.0.attn.gamma_v": (1,),
        **{f"transformer.h.{i}.attn.c_q.weight": (16, 16) for i in range(3)},
        **{f"transformer.h.{i}.mlp.c_fc.weight": (64, 16) for i in range(3)},
        "transformer.h.0.attn.ve_gate.weight": (2, 12),
    }
    tables = ("transformer.wte.weight", "value_embeds.0.weight")
    named = [
        (name, parameter(*shape, seed=i, dtype=dtype if name in tables else torch.float32))
        for i, (name, shape) in enumerate(shapes.items())
    ]
    return param_groups(named, n_embd=768, **RATES)


def parameters_of(optimizer):
    return {
        n: p.detach() for g in optimizer.param_groups for n, p in zip(g["names"], g["params"], strict=True)
    }  # fmt: skip


def trained(steps=2, **kw):
    optimizer = MuonAdamW(small_model(**kw))
    for step in range(steps):
        set_gradients(optimizer.param_groups, step)
        optimizer.step()
    return optimizer


def test_missing_gradients_are_named_and_nothing_moves():
    optimizer = MuonAdamW(small_model())
    set_gradients(optimizer.param_groups, 0)
    before = {n: p.clone() for n, p in parameters_of(optimizer).items()}
    missing = ["value_embeds.0.weight", "transformer.h.2.attn.c_q.weight"]
    for group in optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            p.grad = None if name in missing else p.grad
    with pytest.raises(ValueError, match="no gradient for " + ", ".join(missing)):
        optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in parameters_of(optimizer).items())


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(kind="sgd"), "kind 'sgd'"),
        (dict(variant="best"), "variant 'best'"),
        (dict(params=[parameter(4, 4), parameter(4, 5)]), "one shape"),
        (dict(params=[parameter(4)]), "one shape"),
    ],
    ids=["kind", "variant", "mixed-shapes", "vector"],
)
def test_wrong_groups_are_refused(change, message):
    group = dict(kind="muon", params=[parameter(4, 4)], ns_steps=5, **MUON)
    with pytest.raises(ValueError, match=message):
        MuonAdamW([{**group, **change}])


def test_state_has_upstreams_keys():
    optimizer = trained()
    for group in optimizer.param_groups:
        keys = set(optimizer.state[group["params"][0]])
        if group["kind"] == "adamw":
            assert keys == {"step", "exp_avg", "exp_avg_sq"}
        else:
            assert keys == {"momentum_buffer", "second_momentum_buffer"}


def test_upstreams_file_of_one_rank_continues_exactly():
    """Upstream's groups have no names, no variant and no layout, and its step is an int."""
    ours = trained()
    file = ours.state_dict()
    groups = [{k: v for k, v in g.items() if k not in ("names", "name", "variant")} for g in file["param_groups"]]
    state = {i: {k: int(v) if k == "step" else v.clone() for k, v in s.items()} for i, s in file["state"].items()}
    other = MuonAdamW(small_model())
    with torch.no_grad():
        for name, p in parameters_of(other).items():
            p.copy_(parameters_of(ours)[name])
    other.load([dict(state=state, param_groups=groups)])
    for optimizer in (ours, other):
        set_gradients(optimizer.param_groups, 7)
        optimizer.step()
    assert all(torch.equal(p, parameters_of(ours)[n]) for n, p in parameters_of(other).items())


def test_state_of_another_model_is_refused():
    saved = trained().state_for_save()
    renamed = small_model()
    renamed[0]["names"] = ["lm_head.other"]
    with pytest.raises(ValueError, match="lm_head.other"):
        MuonAdamW(renamed).load([saved])
    with pytest.raises(ValueError, match="another model"):
        MuonAdamW(small_model()[:-1]).load([saved])


# ---------------------------------------------------------------------------- other numbers of ranks


def assert_same_state(a, b):
    assert a["state"].keys() == b["state"].keys()
    for i, state in a["state"].items():
        assert state.keys() == b["state"][i].keys()
        for key, value in state.items():
            assert torch.equal(value, b["state"][i][key]), (i, key)


@given(worlds=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), dtype=st.sampled_from(["f", "b"]))
@settings(max_examples=20, deadline=None)
def test_resharding_back_and_forth_is_exact(worlds, dtype):
    saved = trained(dtype=torch.bfloat16 if dtype == "b" else torch.float32).state_for_save()
    states = [saved]
    for world in worlds:
        states = [reshard(states, world, rank) for rank in range(world)]
        rows = [s["state"][0]["exp_avg"].shape[0] for s in states]  # lm_head, 96 rows of 16
        assert rows == [96 // world] * world
    assert_same_state(reshard(states[::-1], 1, 0), saved)


def test_resharded_muon_stacks_are_padded_with_zeros():
    saved = trained().state_for_save()
    first = next(g for g in saved["param_groups"] if g["name"] == "muon 64x16")["params"][0]
    last = reshard([saved], 2, 1)["state"][first]["momentum_buffer"]
    assert torch.equal(last[0], saved["state"][first]["momentum_buffer"][2])
    assert last.shape == (2, 64, 16) and not last[1].any()


def test_a_missing_rank_names_both_counts():
    two = [reshard([trained().state_for_save()], 2, rank) for rank in range(2)]
    with pytest.raises(ValueError, match=r"saved by 2 ranks, but the files here are 1, of ranks \[1\].* on 3 ranks"):
        reshard(two[1:], 3, 0)


def test_uneven_rows_name_tensor_rows_and_ranks():
    with pytest.raises(ValueError, match="lm_head.weight has 96 rows, which 5 ranks"):
        reshard([trained().state_for_save()], 5, 0)


def rank_gradients(groups, step, rank):
    set_gradients(groups, 100 * step + rank)


def train_on_two_ranks(rank, folder):
    """Worker: three steps, the state saved, two more steps; parameters and state go to files."""
    torch.set_num_threads(1)
    optim.COMPUTE_DTYPE = torch.float32
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    with pytest.raises(ValueError, match="lm_head.weight has 97 rows, which 2 ranks"):
        MuonAdamW(small_model(table_rows=97))
    optimizer = MuonAdamW(small_model(dtype=torch.bfloat16))
    for step in range(5):
        if step == 3:
            torch.save((optimizer.state_for_save(), parameters_of(optimizer)), f"{folder}/middle{rank}.pt")
        rank_gradients(optimizer.param_groups, step, rank)
        optimizer.step()
    torch.save(parameters_of(optimizer), f"{folder}/end{rank}.pt")
    dist.barrier()


def average_gradients(groups, step):
    rank_gradients(groups, step, 0)
    params = [p for group in groups for p in group["params"]]
    first = [p.grad for p in params]
    rank_gradients(groups, step, 1)
    for p, grad in zip(params, first, strict=True):
        p.grad = (p.grad + grad) / 2


def test_two_ranks_equal_one_and_each_other(tmp_path):
    spawn(train_on_two_ranks, (str(tmp_path),))
    end = [torch.load(tmp_path / f"end{rank}.pt", weights_only=True) for rank in range(2)]
    assert all(torch.equal(end[0][name], end[1][name]) for name in end[0])

    alone = MuonAdamW(small_model(dtype=torch.bfloat16))
    for step in range(5):
        average_gradients(alone.param_groups, step)
        alone.step()
    for name, p in parameters_of(alone).items():
        torch.testing.assert_close(end[0][name], p, rtol=1e-6, atol=1e-6)

    # the files of two ranks continue on one
    middle = [torch.load(tmp_path / f"middle{rank}.pt", weights_only=True) for rank in range(2)]
    resumed = MuonAdamW(small_model(dtype=torch.bfloat16))
    with torch.no_grad():
        for name, p in parameters_of(resumed).items():
            p.copy_(middle[0][1][name])
    resumed.load([state for state, _ in middle])
    for step in (3, 4):
        average_gradients(resumed.param_groups, step)
        resumed.step()
    for name, p in parameters_of(resumed).items():
        torch.testing.assert_close(p, end[0][name], rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------------- upstream


@pytest.mark.skipif("NANOCHAT_UPSTREAM" not in os.environ, reason="NANOCHAT_UPSTREAM names no upstream checkout")
def test_steps_equal_upstreams_optimizer():
    path = Path(os.environ["NANOCHAT_UPSTREAM"]) / "nanochat" / "optim.py"
    spec = importlib.util.spec_from_file_location("upstream_optim", path)
    upstream = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(upstream)
    upstream.COMPUTE_DTYPE = torch.float32
    ours, theirs = MuonAdamW(small_model()), upstream.MuonAdamW(small_model())
    for step in range(5):
        for optimizer in (ours, theirs):
            set_gradients(optimizer.param_groups, step)
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
    for name, p in parameters_of(theirs).items():
        torch.testing.assert_close(parameters_of(ours)[name], p, rtol=1e-6, atol=1e-6)
    # and its file continues with ours
    continued = MuonAdamW(small_model())
    continued.load([theirs.state_dict()])
    assert int(continued.state[continued.param_groups[0]["params"][0]]["step"]) == 5
