"""The two passes over memory and one-row matmuls, as written and compiled, against double precision."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.bov.compiled import Fused, compile_fused, cpp_compiler
from nanochat.bov.one_query import attend, scores, take, value_bags, weigh, weigh_values
from nanochat.linear import linear


@pytest.fixture
def loops():
    """The two passes over memory in their compiled form."""
    if cpp_compiler() is None:
        pytest.skip("no C++ compiler here: nothing is compiled on a CPU without one")
    assert compile_fused(dynamic=True) is None
    yield
    for part in Fused.every:
        part.reset()


def close(actual, expected, dtype):
    bf16 = dtype == torch.bfloat16
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=(6e-3 if bf16 else 1e-5) * scale + 1e-6)


def check_scores(G):
    generator = torch.Generator().manual_seed(G)
    for T in (1, 70, 300):
        q = torch.randn(2, 3, G, 8, generator=generator).bfloat16()
        k = torch.randn(2, 3, 400, 8, generator=generator).bfloat16()[:, :, :T]
        expected = (q.double() @ k.double().mT / 8**0.5).float()
        torch.testing.assert_close(scores(q, k), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("G", [1, 6])
def test_scores_keep_fp32_over_bf16_keys(G, monkeypatch):
    monkeypatch.setattr("nanochat.bov.one_query.PIECE", 2 * 3 * 8 * 32)  # several pieces, the last one short
    check_scores(G)


def test_compiled_scores_keep_fp32_over_bf16_keys(loops):
    check_scores(1)
    check_scores(2)


def test_a_compiled_product_of_one_row_rounds_as_the_matmul_does(loops):
    x, weight = torch.randn(1, 1, 96).bfloat16(), torch.randn(70, 96)
    expected = x.double() @ weight.bfloat16().double().T
    close(linear(x, weight), expected, torch.bfloat16)
    rows = torch.randn(2, 1, 96).bfloat16()
    assert torch.equal(linear(rows, weight), F.linear(rows, weight.bfloat16()))


@settings(deadline=None, max_examples=40)
@given(
    B=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (3, 2), (2, 5), (1, 8)]),
    T=st.sampled_from([1, 7, 300, 1500]),
    shared=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.sampled_from([1, 5]),
)
def test_weighted_sums_of_rows(B, heads, T, shared, dtype, threads):
    """By index and of cached values, in every layout; with more threads than queries a sum is made in parts."""
    (H, G), D, R = heads, 8, 50
    generator = torch.Generator().manual_seed(T)
    w = torch.rand(B, H, G, T, generator=generator)
    table = torch.randn(R, H, D, generator=generator).to(dtype)
    pool = torch.randn(H, R + 4, D, generator=generator).to(dtype)[:, :R].transpose(0, 1)
    wide = torch.randn(R, H, D + 1, generator=generator).to(dtype)[..., :D]
    index = torch.randint(0, R, (1 if shared else B, T), generator=generator)
    cached = torch.randn(B, H, T + 3, D, generator=generator).to(dtype)[:, :, :T]
    strided = torch.randn(B, T, H, D, generator=generator).to(dtype).transpose(1, 2)
    odd = torch.randn(B, H, T, D + 1, generator=generator).to(dtype)[..., :D]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (table, pool, wide):
            values = rows[index].transpose(1, 2)
            assert torch.equal(take(rows, index.int()), rows[index])
            close(weigh(w, rows, index), w.double() @ values.double(), dtype)
        for v in (cached, strided, odd):
            close(weigh_values(w, v), w.double() @ v.double(), dtype)
            assert torch.equal(weigh_values(w, v, value_bags(w, v)), weigh_values(w, v))
            q = torch.randn(B, H * G, 1, D, generator=generator).to(dtype)
            keys, values = (x.double().repeat_interleave(G, dim=1) for x in (cached, v))
            expected = F.scaled_dot_product_attention(q.double(), keys, values)
            close(attend(q, cached, v), expected, dtype)
    finally:
        torch.set_num_threads(before)
