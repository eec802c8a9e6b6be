"""The host model: configuration, counts, FLOPs, attention windows, head, smear."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from models import build
from nanochat import flash_attention
from nanochat.bov.compiled import Fused, compile_fused, cpp_compiler
from nanochat.bov.presets import PRESETS, preset
from nanochat.flash_attention import flash_attn_func, flash_attn_with_kvcache
from nanochat.gpt import GPT, GPTConfig, config_from_dict, config_to_dict, window_sizes
from nanochat.head import head_logits, head_loss


def paper_model(depth, name):
    width = depth * 64
    with torch.device("meta"):
        return GPT(GPTConfig(n_layer=depth, n_embd=width, n_head=width // 128, n_kv_head=width // 128, **preset(name)))


# ---------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("depth", "name", "without_tables", "tables", "flops"),
    [
        (12, "paper/baseline", 135.3e6, 0, 759_693_312),
        (12, "paper/bov", 132.9e6, 100_663_296, 745_537_536),
        (24, "paper/baseline", 780.1e6, 0, 4_775_215_104),
        (24, "paper/bov", 761.3e6, 402_653_184, 4_661_968_896),
    ],
)
def test_counts_of_the_paper(depth, name, without_tables, tables, flops):
    model = paper_model(depth, name)
    counts = model.num_scaling_params()
    assert counts["value_embeds"] == tables
    assert round((counts["total"] - tables) / 1e5) == round(without_tables / 1e5)
    assert model.estimate_flops() == flops
    assert counts["total"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "steps"),
    [("table1/13", 3697), ("table1/3", 3969), ("table1/4", 3874), ("fig5b/every_layer", 3989), ("table1/9", 3766)],
)
def test_steps_of_the_papers_variants_at_equal_flops(name, steps):
    assert round(1.5e18 / (paper_model(12, name).estimate_flops() * 2**19)) == steps


@pytest.mark.parametrize("name", PRESETS)
def test_flops_equal_torchs_counter(name):
    model = build(**preset(name))
    ids = torch.randint(0, 50, (2, 16))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    twice = 2 * 16 * 32 if "x0" in str(preset(name)) and "add" in str(preset(name)) else 0  # c_v of 2 layers, 16 x 32
    assert counter.get_total_flops() == 2 * (model.num_matmul_params() + twice) * ids.numel() - 48 * len(ids)


def test_attention_flops_by_hand():
    model = build(sequence_len=1024, window_pattern="SSSL", trunk="plain", smear=False, ve_layers="none")
    attended = 256 + 256 + 256 + 1024
    assert model.estimate_flops() == 6 * model.num_matmul_params() + 12 * 32 * attended
    assert model.estimate_decode_flops(300) == 2 * model.num_matmul_params() + 4 * 32 * (3 * 256 + 300)
    pairs = 3 * sum(min(t + 1, 256) for t in range(300)) + sum(t + 1 for t in range(300))
    assert model.estimate_prefill_flops(300) == 2 * model.num_matmul_params() * 300 + 4 * 32 * pairs


def test_kv_bytes_leave_out_the_values_of_bank_layers():
    baseline, bov = build(**preset("paper/baseline")), build(**preset("paper/bov"))
    row = 2 * 8 * 4  # kv heads, head dim, fp32
    assert (baseline.kv_bytes_per_token(), bov.kv_bytes_per_token()) == (8 * row, 6 * row)
    assert (baseline.kv_read_bytes(10), bov.kv_read_bytes(10)) == (80 * row, 60 * row)


def test_windows_quarter_context_rounded_to_128_and_last_layer_long():
    config = GPTConfig(sequence_len=2048, n_layer=6, window_pattern="SSL")
    assert window_sizes(config) == [(512, 0), (512, 0), (2048, 0), (512, 0), (512, 0), (2048, 0)]
    assert window_sizes(GPTConfig(sequence_len=520, n_layer=1, window_pattern="S")) == [(520, 0)]
    assert window_sizes(GPTConfig(sequence_len=520, n_layer=2, window_pattern="S"))[0] == (256, 0)


# ---------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("name", PRESETS)
def test_metadata_leaves_out_default_axes_and_comes_back(name):
    config = GPTConfig(**preset(name))
    stored = config_to_dict(config)
    assert set(stored) - set(preset(name)) == {
        "sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "window_pattern"
    }  # fmt: skip
    assert config_from_dict(stored) == config


def test_unknown_metadata_names_the_field():
    with pytest.raises(ValueError, match="rope_theta"):
        config_from_dict({"n_layer": 2, "rope_theta": 1})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n_layer": 0}, "n_layer"), ({"n_head": 5}, "n_head"), ({"n_kv_head": 3}, "n_kv_head"),
        ({"window_pattern": "SX"}, "window_pattern"), ({"window_pattern": ""}, "window_pattern"),
        ({"mlp_hidden": -1}, "mlp_hidden"), ({"trunk": "thin"}, "trunk"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_configurations_are_named(fields, named):
    with pytest.raises(ValueError, match=named):
        build(**fields)


# ---------------------------------------------------------------------------- attention


def naive_attention(q, k, v, left):
    """One query, one head at a time: q (Tq, N, D), k, v (Tk, H, D), queries aligned to the last keys."""
    Tq, N, D = q.shape
    Tk, H, _ = k.shape
    out = torch.empty_like(q)
    for t in range(Tq):
        end = Tk - Tq + t
        seen = slice(max(0, end - left) if left >= 0 else 0, end + 1)
        for n in range(N):
            weights = (k[seen, n * H // N] @ q[t, n] / D**0.5).softmax(0)
            out[t, n] = weights @ v[seen, n * H // N]
    return out


HEADS = st.sampled_from([(4, 4), (4, 2), (3, 1)])


@settings(deadline=None, max_examples=40)
@given(T=st.integers(1, 20), left=st.integers(-1, 25), heads=HEADS, seed=st.integers(0, 9))
def test_attention_over_a_sequence_equals_the_definition(T, left, heads, seed):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, T, n, 8) for n in (heads[0], heads[1], heads[1]))
    y = flash_attn_func(q, k, v, causal=True, window_size=(left, 0))
    for b in range(2):
        torch.testing.assert_close(y[b], naive_attention(q[b], k[b], v[b], left), rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(T=st.integers(1, 300), left=st.integers(-1, 300), heads=HEADS)
def test_blocked_attention_equals_sdpa_with_its_gradients(T, left, heads):
    torch.manual_seed(T)
    grads = []
    for attend in (flash_attention._blocked, flash_attention._sdpa):
        torch.manual_seed(left)
        q, k, v = (torch.randn(1, n, T, 8, requires_grad=True) for n in (heads[0], heads[1], heads[1]))
        y = attend(q, k, v, left)
        (y * torch.linspace(0, 1, T)[:, None]).sum().backward()
        grads.append((y.detach(), q.grad, k.grad, v.grad))
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(past=st.integers(0, 12), T=st.integers(1, 6), left=st.integers(-1, 15), heads=st.sampled_from([(4, 4), (4, 2)]))
def test_attention_with_a_cache_equals_the_definition(past, T, left, heads):
    torch.manual_seed(past)
    q = torch.randn(2, T, heads[0], 8)
    k, v = (torch.randn(2, past + T, heads[1], 8) for _ in range(2))
    caches = [torch.full((2, 20, heads[1], 8), float("nan")) for _ in range(2)]
    for cache, full in zip(caches, (k, v), strict=True):
        cache[:, :past] = full[:, :past]
    y = flash_attn_with_kvcache(
        q,
        *caches,
        k=k[:, past:],
        v=v[:, past:],
        cache_seqlens=torch.full((2,), past),
        causal=True,
        window_size=(left, 0),
    )
    for b in range(2):
        torch.testing.assert_close(y[b], naive_attention(q[b], k[b], v[b], left), rtol=1e-4, atol=1e-5)


def test_a_full_cache_raises_before_anything_is_written():
    caches = [torch.zeros(1, 4, 2, 8) for _ in range(2)]
    new = torch.ones(1, 2, 2, 8)
    with pytest.raises(ValueError, match="4 tokens, 5 are needed"):
        flash_attn_with_kvcache(new, *caches, k=new, v=new, cache_seqlens=3, causal=True)
    assert not any(cache.any() for cache in caches)


def test_bidirectional_attention_is_honoured_and_a_window_with_it_refused():
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    expected = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(flash_attn_func(q, k, v), expected)
    with pytest.raises(ValueError, match="causal"):
        flash_attn_func(q, k, v, window_size=(3, 0))


def test_the_varlen_back_end_gets_flattened_rows_and_the_same_window(monkeypatch):
    """varlen_attn itself needs CUDA; here a plain version of its documented contract stands in for the kernel."""

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa):
        assert enable_gqa == (q.size(1) != k.size(1)) and max_q == max_k == 7
        rows = [naive_attention(q[a:b], k[a:b], v[a:b], window_size[0]) for a, b in zip(cu_q, cu_q[1:], strict=False)]
        return torch.cat(rows)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    q, k, v = torch.randn(3, 7, 4, 8), torch.randn(3, 7, 2, 8), torch.randn(3, 7, 2, 8)
    for left in (-1, 2, 6, 7, 100):
        expected = flash_attn_func(q, k, v, causal=True, window_size=(left, 0))
        monkeypatch.setattr(flash_attention, "BACKEND", "varlen")
        torch.testing.assert_close(flash_attn_func(q, k, v, causal=True, window_size=(left, 0)), expected)
        monkeypatch.setattr(flash_attention, "BACKEND", "sdpa")


# ---------------------------------------------------------------------------- head and smear


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunked_loss_equals_cross_entropy_of_the_logits(reduction):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 700, 24), torch.randn(64, 24)
    targets = torch.randint(-1, 50, (2, 700))
    expected = F.cross_entropy(
        head_logits(x, weight, 50).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction
    )
    torch.testing.assert_close(head_loss(x, weight, targets, 50, reduction), expected, rtol=1e-5, atol=1e-4)


@pytest.fixture
def compiled():
    """The element-wise parts in their compiled form, as in a training run on a CPU."""
    if cpp_compiler() is None:
        pytest.skip("no C++ compiler here: nothing is compiled on a CPU without one")
    compile_fused()
    yield
    for part in Fused.every:
        part.reset()


def test_compiled_parts_give_the_eager_losses_and_gradients(compiled):
    assert "blocks" in flash_attention.describe(150) and "SDPA" in flash_attention.describe(2048)
    ids = torch.randint(0, 50, (2, 150))
    results = []
    for eager in (False, True):
        model = build(sequence_len=150, **preset("paper/bov"))
        with torch.compiler.set_stance("force_eager" if eager else "default"):
            loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["upstream", "paper/bov", "table1/3", "table1/6", "table1/13", "fig5b/shared"])
def test_the_whole_model_is_traced_into_one_graph(name):
    """What torch.compile does on CUDA, up to the kernels: no graph break, the same logits, nothing left behind."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = build(**preset(name))
    ids = torch.randint(0, 50, (2, 16))
    torch._dynamo.reset()
    logits = torch.compile(model, dynamic=False, backend=backend)(ids)
    assert len(graphs) == 1
    torch.testing.assert_close(logits, model(ids))
    assert all(block.attn.bank.first is None for block in model.transformer.h)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunked_loss_gradients_equal_autograd_and_scale(reduction):
    torch.manual_seed(0)
    grads = []
    for function in (head_loss, None):
        torch.manual_seed(1)
        x, weight = torch.randn(2, 700, 24, requires_grad=True), torch.randn(64, 24, requires_grad=True)
        targets = torch.randint(-1, 50, (2, 700))
        if function:
            loss = function(x, weight, targets, 50, reduction)
        else:
            logits = head_logits(x, weight, 50).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction=reduction)
        weights = torch.arange(loss.numel()).view(loss.shape) * 0.01 + 0.5 if loss.ndim else 0.25
        (loss * weights).sum().backward()
        grads.append((x.grad, weight.grad))
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-6)


def test_loss_of_rows_that_weigh_differently_reaches_a_lone_weight():
    torch.manual_seed(0)
    x, weight = torch.randn(1, 9, 24), torch.randn(64, 24, requires_grad=True)
    targets, factors = torch.randint(0, 50, (1, 9)), torch.rand(9)
    (head_loss(x, weight, targets, 50, "none") * factors).sum().backward()
    expected = weight.detach().clone().requires_grad_()
    logits = head_logits(x, expected, 50).flatten(0, 1)
    (F.cross_entropy(logits, targets.flatten(), reduction="none") * factors).sum().backward()
    torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="reduction"):
        head_loss(x, weight, targets, 50, "median")


def test_all_targets_ignored_gives_zero_not_nan():
    x, weight = torch.randn(1, 4, 24, requires_grad=True), torch.randn(64, 24)
    loss = head_loss(x, weight, torch.full((1, 4), -1), 50)
    loss.backward()
    assert loss.item() == 0 and not x.grad.any()


def test_one_token_forward_and_slow_generation_work():
    model = build()
    assert model(torch.tensor([[3]])).shape == (1, 1, 50)
    assert len(list(model.generate([3], max_tokens=5, temperature=0.0))) == 5
    sampled = [list(model.generate([3, 4], max_tokens=5, top_k=7, seed=s)) for s in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    with pytest.raises(ValueError, match="empty"):
        next(model.generate([], max_tokens=1))


def test_a_text_past_the_rotary_table_is_refused():
    with pytest.raises(ValueError, match="161 is past the rotary table of 160"):
        build()(torch.zeros(1, 161, dtype=torch.long))
