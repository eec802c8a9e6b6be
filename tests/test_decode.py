"""Decoding without a V cache against the full forward and attention written out; what a step costs, and errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from models import build, legal_points
from nanochat import gpt
from nanochat.bov import decode, placement
from nanochat.bov.decode import History
from nanochat.bov.presets import preset
from nanochat.engine import KVCache
from nanochat.flash_attention import flash_attn_func

STRATEGIES = ("gather", "fused", "pooled", "auto")


def cache_of(model, batch, length, strategy="auto", value_layers="model", dtype=torch.float32):
    c = model.config
    kept = model.value_layers if value_layers == "model" else value_layers
    sizes = (batch, c.n_kv_head, length, c.n_embd // c.n_head, c.n_layer)
    return KVCache(*sizes, "cpu", dtype, value_layers=kept, strategy=strategy)


@torch.inference_mode()
def decoded(model, ids, chunks, cache):
    """Logits of `ids` (B, T) read in chunks of the given lengths, then token by token."""
    parts, start = [], 0
    for length in [*chunks, *[1] * (ids.size(1) - sum(chunks))]:
        parts.append(model(ids[:, start : start + length], kv_cache=cache))
        start += length
    return torch.cat(parts, dim=1)


# ---------------------------------------------------------------------------- the whole model

POINTS = [dict(zip(("bov_source", "bov_combine", "bov_coeff", "bov_shared"), p, strict=True)) for p in legal_points()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("axes", POINTS, ids=lambda axes: "-".join(map(str, axes.values())))
def test_cached_decoding_equals_the_full_forward_at_every_point(axes, strategy):
    model = build(**axes, bov_layers="1,3", ve_layers="every:2", window_pattern="SL", sequence_len=200).eval()
    ids = torch.randint(0, 50, (2, 24))
    logits = decoded(model, ids, (5, 3), cache_of(model, 2, 24, strategy))
    torch.testing.assert_close(logits, model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("pattern", ["L", "SSSL"])
def test_decoding_past_the_windows_equals_the_full_forward(strategy, pattern):
    """T passes the short window of 128 and the long one of 130."""
    model = build(**preset("paper/bov"), window_pattern=pattern, sequence_len=130, n_layer=6).eval()
    ids = torch.randint(0, 50, (1, 140))
    logits = decoded(model, ids, (120,), cache_of(model, 1, 140, strategy))
    torch.testing.assert_close(logits, model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 3)], ids=str)
@pytest.mark.parametrize("coeff", ["fixed", "scalar", "head"])
def test_query_groups_take_the_coefficient_of_their_head(heads, coeff):
    options = dict(n_head=heads[0], n_kv_head=heads[1], n_embd=heads[0] * 8, bov_layers="all", bov_coeff=coeff)
    model = build(**options, ve_layers="none", sequence_len=64).eval()
    ids = torch.randint(0, 50, (3, 20))
    for strategy in STRATEGIES:
        logits = decoded(model, ids, (7,), cache_of(model, 3, 20, strategy))
        torch.testing.assert_close(logits, model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "fields", [preset("paper/bov"), preset("fig5b/shared") | {"bov_coeff": "head"}], ids=["scalar", "shared-head"]
)
def test_bf16_decoding_is_within_its_rounding(fields, strategy, monkeypatch):
    """2e-2 of the largest logit, past a window of 128 and of 130, and for rows of different lengths."""
    monkeypatch.setattr(gpt, "COMPUTE_DTYPE", torch.bfloat16)
    model = build(**fields, sequence_len=130, n_layer=6, window_pattern="SL").eval()
    ids = torch.randint(0, 50, (2, 140))
    full = model(ids)
    bound = 2e-2 * full.abs().max().item()
    logits = decoded(model, ids, (9, 125), cache_of(model, 2, 140, strategy, dtype=torch.bfloat16))
    torch.testing.assert_close(logits, full, rtol=0, atol=bound)
    alone = [cache_of(model, 1, 140, strategy, dtype=torch.bfloat16) for _ in range(2)]
    for row, length in enumerate((5, 134)):
        model(ids[row : row + 1, :length], kv_cache=alone[row])
    together = cache_of(model, 2, 140, strategy, dtype=torch.bfloat16)
    together.prefill_rows(alone)
    for step in range(3):
        new = torch.stack([ids[0, 5 + step], ids[1, 134 + step]])[:, None]
        logits = model(new, kv_cache=together)
        torch.testing.assert_close(logits[0, 0], full[0, 5 + step], rtol=0, atol=bound)
        torch.testing.assert_close(logits[1, 0], full[1, 134 + step], rtol=0, atol=bound)


@pytest.mark.parametrize("axes", POINTS, ids=lambda axes: "-".join(map(str, axes.values())))
def test_bf16_decoding_at_every_point(axes, monkeypatch):
    """2e-2 of the largest logit, with a V cache and without, past the windows of 128 and 130."""
    monkeypatch.setattr(gpt, "COMPUTE_DTYPE", torch.bfloat16)
    model = build(**axes, bov_layers="1,3", ve_layers="every:2", window_pattern="SL", sequence_len=130).eval()
    ids = torch.randint(0, 50, (2, 136))
    full = model(ids)
    for strategy in STRATEGIES if len(model.value_layers) < 4 else ("auto",):
        logits = decoded(model, ids, (9, 121), cache_of(model, 2, 136, strategy, dtype=torch.bfloat16))
        torch.testing.assert_close(logits, full, rtol=0, atol=2e-2 * full.abs().max().item())


@settings(deadline=None, max_examples=25)
@given(
    chunks=st.lists(st.integers(1, 9), max_size=4),
    batch=st.integers(1, 3),
    vocab=st.sampled_from([3, 50, 1000]),
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(0, 9),
)
def test_any_chunking_gives_the_same_logits(chunks, batch, vocab, strategy, seed):
    model = build(seed, **preset("paper/bov"), vocab_size=vocab, sequence_len=64).eval()
    T = sum(chunks) + 4
    ids = torch.randint(0, vocab, (batch, T), generator=torch.Generator().manual_seed(seed))
    logits = decoded(model, ids, chunks, cache_of(model, batch, T, strategy))
    torch.testing.assert_close(logits, model(ids), rtol=1e-5, atol=1e-5)


def test_a_cache_with_all_values_decodes_the_same():
    model = build(**preset("paper/bov"), sequence_len=64).eval()
    ids = torch.randint(0, 50, (2, 20))
    kept = decoded(model, ids, (6,), cache_of(model, 2, 20, value_layers=None))
    torch.testing.assert_close(decoded(model, ids, (6,), cache_of(model, 2, 20)), kept, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["gather", "fused", "pooled", "auto"])
@pytest.mark.parametrize("name", ["paper/bov", "fig5b/shared"])
def test_placed_tables_decode_to_the_same_bits(name, strategy, tmp_path):
    ids = torch.randint(0, 50, (2, 40))
    results = []
    for where in placement.PLACEMENTS:
        model = build(**preset(name), sequence_len=64, n_layer=6).eval()
        if where == "mmap":
            save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
        if where != "device":
            placement.place(model, where, tmp_path / "model.safetensors" if where == "mmap" else None)
        results.append(decoded(model, ids, (9, 4), cache_of(model, 2, 40, strategy)))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_rows_of_different_lengths_give_their_single_logits():
    """With windows, GQA, a smear, and steps of more than one token."""
    model = build(**preset("paper/bov"), window_pattern="SL", sequence_len=130).eval()
    prompts = [torch.randint(0, 50, (1, n)) for n in (1, 135, 17)]
    for strategy in STRATEGIES:
        alone = [cache_of(model, 1, 160, strategy) for _ in prompts]
        for ids, cache in zip(prompts, alone, strict=True):
            model(ids, kv_cache=cache)
        together = cache_of(model, 3, 160, strategy)
        together.prefill_rows(alone)
        assert together.get_pos() == 135 and together.cache_seqlens.tolist() == [1, 135, 17]
        for T in (1, 1, 3, 1):
            ids = torch.randint(0, 50, (3, T))
            logits = model(ids, kv_cache=together)
            for row, cache in enumerate(alone):
                single = model(ids[row : row + 1], kv_cache=cache)[0]
                torch.testing.assert_close(logits[row], single, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------- attention alone


def naive(q, k, rows, left):
    """q (N, D) of the last position, k (T, H, D), rows (T, H, D) -> (N, D), position by position."""
    T, H, D = k.shape
    out = []
    for n, query in enumerate(q):
        h = n * H // len(q)
        seen = [t for t in range(T) if left < 0 or T - 1 - t <= left]
        weights = torch.stack([query @ k[t, h] for t in seen]).div(D**0.5).softmax(0)
        out.append(sum(w * rows[t, h] for w, t in zip(weights, seen, strict=True)))
    return torch.stack(out)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    vocab=st.integers(1, 60),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1)]),
    left=st.sampled_from([-1, 0, 3, 50]),
    coeff=st.sampled_from(["none", "scalar", "head"]),
    strategy=st.sampled_from(STRATEGIES),
    placed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attend_equals_attention_written_out(lengths, vocab, heads, left, coeff, strategy, placed, seed):
    generator = torch.Generator().manual_seed(seed)
    (N, H), D, B, longest = heads, 4, len(lengths), max(lengths)
    embedding = torch.nn.Embedding(vocab, H * D, _weight=torch.randn(vocab, H * D, generator=generator))
    history = History(B, longest + 1, "cpu")
    ids = torch.randint(0, vocab, (B, longest + 1), generator=generator)
    history.ids.random_(0, vocab, generator=generator)  # what lies behind a row's end must not matter
    history.append(ids[:, :longest])
    history.lengths.copy_(torch.tensor(lengths))
    history.settle(lengths)
    newest = ids[:, -1:]
    history.append(newest)
    k = torch.randn(B, longest + 1, H, D, generator=generator)
    q = torch.randn(B, 1, N, D, generator=generator)
    scale = {"none": None, "scalar": torch.tensor([0.7]), "head": torch.linspace(0.5, 2, H)}[coeff]
    with torch.no_grad():
        table = placement.OnHost(embedding, "cpu") if placed else placement.OnDevice(embedding)
        options = dict(coeff=scale, window=left, strategy=strategy, dense=flash_attn_func)
        y = decode.attend(q, k, table, history, **options)
        for b, length in enumerate(lengths):
            tokens = torch.cat([ids[b, :length], newest[b]])
            rows = embedding.weight[tokens].view(-1, H, D)
            expected = naive(q[b, 0], k[b, : length + 1], rows, left)
            if scale is not None:
                expected = expected * scale.repeat_interleave(N // len(scale))[:, None]
            torch.testing.assert_close(y[b, 0], expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------- what a step costs


ATEN = torch.ops.aten
WAITS = (ATEN.item.default, ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.is_nonzero.default)


class Watch(TorchDispatchMode):
    """The largest tensor made, and how often the host waits for a number."""

    def __init__(self):
        super().__init__()
        self.largest = self.waits = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.waits += function in WAITS
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() not in self.known:
                self.largest = max(self.largest, tensor.numel())
        return result

    known: set = set()


@pytest.mark.parametrize(("strategy", "makes"), [("pooled", False), ("fused", False), ("gather", True)])
def test_pooled_makes_no_tensor_of_the_size_of_the_values(strategy, makes):
    T = 600
    model = build(**preset("paper/bov"), sequence_len=1024, window_pattern="L", vocab_size=300).eval()
    cache = cache_of(model, 1, T + 2, strategy)
    model(torch.randint(0, 100, (1, T)), kv_cache=cache)
    model(torch.randint(0, 100, (1, 1)), kv_cache=cache)
    bank = model.transformer.h[3].attn
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8)
    cache.append_ids(torch.tensor([[3]]))
    with torch.inference_mode(), Watch() as watch:
        watch.known = {cache.k_cache.untyped_storage().nbytes(), bank.bank.table.weight.untyped_storage().nbytes()}
        gpt.host.attend(bank, q, k, cache, (-1, 0), flash_attn_func)
    assert (watch.largest >= T * bank.n_kv_head * bank.head_dim) == makes


@pytest.mark.parametrize("where", placement.PLACEMENTS[:2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_asks_the_device_for_one_number_at_most(strategy, where, monkeypatch):
    """Placed tables too, as long as tokens repeat; a new one costs a copy of its id to the host for each table."""
    monkeypatch.setattr(decode, "POOLED_FROM", 4)
    model = build(**preset("paper/bov"), sequence_len=64, n_layer=6).eval()
    if where != "device":
        placement.place(model, where)
    cache = cache_of(model, 2, 30, strategy)
    ids = torch.randint(0, 50, (2, 8))
    model(ids, kv_cache=cache)
    with torch.inference_mode():
        model(ids[:, :1], kv_cache=cache)
        for new in (ids[:, 1:2], torch.tensor([[49], [48]])) if where == "device" else (ids[:, 1:2],):
            with Watch() as watch:
                model(new, kv_cache=cache)
            assert watch.waits == (strategy in ("pooled", "auto") or where != "device")


def test_bank_layers_hold_no_value_bytes():
    model = build(**preset("paper/bov"), sequence_len=64)
    cache = cache_of(model, 3, 20)
    assert model.value_layers == (0, 1)
    row = model.config.n_kv_head * (model.config.n_embd // model.config.n_head) * 4
    assert cache.v_cache.untyped_storage().nbytes() == len(model.value_layers) * 3 * 20 * row
    assert cache.k_cache.untyped_storage().nbytes() == model.config.n_layer * 3 * 20 * row
    kept = sum(c.untyped_storage().nbytes() for c in (cache.k_cache, cache.v_cache))
    assert kept == 3 * 20 * model.kv_bytes_per_token()
    for i in range(model.config.n_layer):
        assert (cache.get_layer_cache(i)[1] is not None) == (i in model.value_layers)


# ---------------------------------------------------------------------------- choice and errors


def table_of(vocab):
    return placement.OnDevice(torch.nn.Embedding(vocab, 4))


@pytest.mark.parametrize(
    ("strategy", "Tq", "length", "window", "chosen"),
    [
        ("auto", 1, decode.POOLED_FROM - 1, -1, "fused"),
        ("auto", 1, decode.POOLED_FROM, -1, "pooled"),
        ("auto", 1, decode.POOLED_FROM, decode.POOLED_FROM - 1, "pooled"),
        ("auto", 1, decode.POOLED_FROM, decode.POOLED_FROM - 2, "fused"),
        ("auto", 2, 10**6, -1, "gather"),
        ("pooled", 1, 1, -1, "pooled"),
        ("pooled", 1, 100, 98, "gather"),
        ("pooled", 3, 100, -1, "gather"),
        ("gather", 1, 10**6, -1, "gather"),
        ("fused", 1, 100, 5, "fused"),
        ("fused", 4, 100, -1, "gather"),
    ],
)
def test_the_choice_of_a_strategy(strategy, Tq, length, window, chosen):
    """The ids hold one token, so from POOLED_FROM on the row is long enough."""
    history = History(1, 5000, "cpu")
    history.append(torch.zeros(1, min(length, 5000), dtype=torch.long))
    history.settle([length])
    assert decode.choose(strategy, torch.empty(1, Tq, 2, 4), history, window, table_of(8)) == chosen


def test_auto_stays_fused_while_most_tokens_are_new():
    history, q, n = History(1, 9000, "cpu"), torch.empty(1, 1, 2, 4), decode.POOLED_FROM
    history.append(torch.arange(n)[None])
    assert decode.choose("auto", q, history, -1, table_of(10000)) == "fused"
    history.append(torch.zeros(1, n - 1, dtype=torch.long))
    assert decode.choose("auto", q, history, -1, table_of(10000)) == "fused"
    history.append(torch.zeros(1, 1, dtype=torch.long))
    assert decode.choose("auto", q, history, -1, table_of(10000)) == "pooled"


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="'quick'.*auto, gather, fused, pooled"):
        History(1, 4, "cpu", "quick")


def interrupt(model, ids, cache):
    """A forward of ids that is stopped in its last layer."""

    def stop(x):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model.transformer.h[3].mlp, "forward", stop)
        model(ids, kv_cache=cache)


@pytest.mark.parametrize("smear", [False, True], ids=["no-smear", "smear"])
@pytest.mark.parametrize("kept", [False, True], ids=["without-v", "with-v"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cache_goes_on_after_a_forward_that_was_interrupted(strategy, kept, smear):
    model = build(**preset("paper/bov") | {"smear": smear}, sequence_len=64).eval()
    ids = torch.randint(0, 50, (2, 20))
    cache = cache_of(model, 2, 20, strategy, value_layers=None if kept else "model")
    first = decoded(model, ids[:, :4], (3,), cache)

    interrupt(model, torch.randint(0, 50, (2, 14)), cache)
    rest = decoded(model, ids[:, 4:], (3,), cache)
    torch.testing.assert_close(torch.cat([first, rest], 1), model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cache_of_different_lengths_can_be_copied_interrupted_and_used_again(strategy):
    model = build(**preset("paper/bov"), sequence_len=8, window_pattern="L").eval()
    ids = torch.randint(0, 50, (2, 20))
    alone = [cache_of(model, 1, 20, strategy) for _ in range(2)]
    for row, length in enumerate((3, 9)):
        model(ids[row : row + 1, :length], kv_cache=alone[row])
    first, copy = (cache_of(model, 2, 20, strategy) for _ in range(2))
    first.prefill_rows(alone)
    copy.prefill(first)
    for step in range(2):
        interrupt(model, torch.randint(0, 50, (2, 7)), copy)
        new = torch.stack([ids[0, 3 + step], ids[1, 9 + step]])[:, None]
        logits = model(new, kv_cache=copy)
        for row, length in enumerate((3, 9)):
            whole = model(ids[row : row + 1, : length + step + 1])[0, -1]
            torch.testing.assert_close(logits[row, 0], whole, rtol=1e-5, atol=1e-5)
    copy.reset()
    torch.testing.assert_close(decoded(model, ids, (5,), copy), model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_reset_cache_holds_nothing_of_before(strategy):
    model = build(**preset("paper/bov"), sequence_len=64).eval()
    cache = cache_of(model, 2, 20, strategy)
    for part in (cache.k_cache, cache.v_cache):
        part.fill_(torch.nan)
    cache.reset()
    alone = [cache_of(model, 1, 20, strategy) for _ in range(2)]
    for length, one in zip((5, 9), alone, strict=True):
        model(torch.randint(0, 50, (1, length)), kv_cache=one)
    cache.prefill_rows(alone)
    assert model(torch.randint(0, 50, (2, 1)), kv_cache=cache).isfinite().all()


def test_training_with_placed_tables_is_refused():
    model = build(**preset("paper/bov"), sequence_len=64)
    ids = torch.randint(0, 50, (1, 8))
    placement.place(model, "host")
    with pytest.raises(ValueError, match="before training"):
        model(ids, ids)
    placement.place(model, "device")
    model(ids, ids).backward()
    assert model.value_embeds["3"].weight.grad.abs().sum() > 0


def test_a_token_without_a_row_raises_before_the_cache_changes():
    model = build(**preset("paper/bov"), sequence_len=64).eval()
    ids = torch.randint(0, 50, (1, 8))
    cache = cache_of(model, 1, 10)
    model(ids[:, :5], kv_cache=cache)
    with pytest.raises(IndexError):
        model(torch.tensor([[64]]), kv_cache=cache)
    logits = model(ids[:, 5:], kv_cache=cache)
    torch.testing.assert_close(logits, model(ids)[:, 5:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["paper/bov", "upstream"])
def test_a_step_past_the_cache_raises_and_writes_nothing(name):
    model = build(**preset(name)).eval()
    cache = cache_of(model, 1, 10)
    model(torch.randint(0, 50, (1, 8)), kv_cache=cache)
    before = cache.k_cache.clone()
    with pytest.raises(ValueError, match="holds 10 positions: 8 are filled and 3 more"):
        model(torch.randint(0, 50, (1, 3)), kv_cache=cache)
    assert torch.equal(cache.k_cache, before) and cache.get_pos() == 8
    assert cache.history is None or cache.history.length == 8
    model(torch.randint(0, 50, (1, 2)), kv_cache=cache)


@pytest.mark.parametrize("name", ["paper/bov", "upstream"])
def test_rows_of_different_lengths_end_with_the_longest(name):
    model = build(**preset(name)).eval()
    alone = [cache_of(model, 1, 9) for _ in range(2)]
    for length, cache in zip((3, 9), alone, strict=True):
        model(torch.randint(0, 50, (1, length)), kv_cache=cache)
    cache = cache_of(model, 2, 10)
    cache.prefill_rows(alone)
    before = cache.k_cache.clone()
    with pytest.raises(ValueError, match="holds 10 positions: 9 are filled and 2 more"):
        model(torch.randint(0, 50, (2, 2)), kv_cache=cache)
    assert torch.equal(cache.k_cache, before) and cache.cache_seqlens.tolist() == [3, 9]
    model(torch.randint(0, 50, (2, 1)), kv_cache=cache)
    assert cache.cache_seqlens.tolist() == [4, 10]


def test_positions_past_the_rotary_table_raise():
    model = build(**preset("paper/bov")).eval()
    cache = cache_of(model, 1, 200)
    model(torch.randint(0, 50, (1, 160)), kv_cache=cache)
    with pytest.raises(ValueError, match="position 161 is past the rotary table of 160"):
        model(torch.randint(0, 50, (1, 1)), kv_cache=cache)
