"""The engine against scripted models: cache bounds, sampling, the tool, budgets, and one prefill per prompt."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import build
from nanochat.bov.presets import preset
from nanochat.common import COMPUTE_DTYPE
from nanochat.engine import Engine, KVCache, sample_next_token, use_calculator

SPECIAL = ("python_start", "python_end", "output_start", "output_end", "assistant_end", "bos")
END, BOS = 260, 261


class Bytes:
    """Bytes as tokens 0..255, six special tokens behind them."""

    ids = {f"<|{name}|>": 256 + i for i, name in enumerate(SPECIAL)}

    def encode_special(self, text):
        return self.ids[text]

    def get_bos_token_id(self):
        return BOS

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(t for t in tokens if t < 256).decode()


@dataclass
class Config:
    vocab_size: int = 262
    sequence_len: int = 24
    n_layer: int = 2
    n_head: int = 2
    n_kv_head: int = 1
    n_embd: int = 8


class Scripted:
    """After position p the next token is script[p - first + 1]; counts forwards and tokens seen."""

    def __init__(self, script, prompt_len):
        self.config, self.script, self.prompt_len, self.calls = Config(), script, prompt_len, []

    def get_device(self):
        return torch.device("cpu")

    def forward(self, ids, kv_cache):
        kv_cache.check(ids.shape[1])
        self.calls.append(tuple(ids.shape))
        kv_cache.advance(ids.shape[1])
        logits = torch.full((*ids.shape, self.config.vocab_size), -1e9)
        logits[:, -1, self.script[kv_cache.get_pos() - self.prompt_len]] = 0
        return logits


class Uniform(Scripted):
    def forward(self, ids, kv_cache):
        return torch.zeros_like(super().forward(ids, kv_cache))


def scripted(text, prompt=(BOS,)):
    model = Scripted(text, len(prompt))
    return model, Engine(model, Bytes()), list(prompt)


def cache(batch_size=1, seq_len=10, layers=2, heads=3, head_dim=4):
    return KVCache(batch_size, heads, seq_len, head_dim, layers, "cpu", torch.float32)


# ---------------------------------------------------------------------------- cache


def test_cache_public_shapes_and_contiguous_heads():
    kv = cache(batch_size=2)
    assert kv.k_cache.shape == kv.v_cache.shape == (2, 2, 10, 3, 4)
    k, v = kv.get_layer_cache(1)
    assert k.shape == v.shape == (2, 10, 3, 4)
    assert k.transpose(1, 2).is_contiguous() and v.transpose(1, 2).is_contiguous()
    k[1, 5] = 7
    assert (kv.k_cache[1, 1, 5] == 7).all() and kv.k_cache.count_nonzero() == 12


def test_position_and_device_lengths_move_together():
    kv = cache(batch_size=3)
    kv.advance(4)
    kv.advance(2)
    assert type(kv.get_pos()) is int and kv.get_pos() == 6
    assert kv.cache_seqlens.dtype == torch.int32 and kv.cache_seqlens.tolist() == [6, 6, 6]
    kv.prev_embedding = torch.ones(3, 1, 8)
    kv.reset()
    assert kv.get_pos() == 0 and kv.cache_seqlens.tolist() == [0, 0, 0] and kv.prev_embedding is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10), st.integers(0, 20))
def test_writing_past_the_cache_raises_and_changes_nothing(filled, more):
    kv = cache()
    kv.advance(filled)
    if filled + more <= 10:
        kv.check(more)
        return
    for method in (kv.check, kv.advance):
        with pytest.raises(ValueError, match=rf"holds 10 positions: {filled} are filled and {more} more"):
            method(more)
    assert kv.get_pos() == filled and kv.cache_seqlens.tolist() == [filled]


def test_prefill_repeats_one_row_and_copies_its_own_smear_state():
    source, target = cache(seq_len=6), cache(batch_size=3, seq_len=10)
    source.k_cache[:, :, :4] = torch.randn(2, 1, 4, 3, 4)
    source.v_cache[:, :, :4] = torch.randn(2, 1, 4, 3, 4)
    source.prev_embedding = torch.randn(1, 1, 8)
    source.advance(4)
    target.prefill(source)
    for row in range(3):
        assert torch.equal(target.k_cache[:, row, :4], source.k_cache[:, 0, :4])
        assert torch.equal(target.v_cache[:, row, :4], source.v_cache[:, 0, :4])
        assert torch.equal(target.prev_embedding[row], source.prev_embedding[0])
    assert target.get_pos() == 4 and target.k_cache[:, :, 4:].count_nonzero() == 0
    assert target.cache_seqlens.tolist() == [4, 4, 4]
    before = source.prev_embedding.clone()
    target.prev_embedding.zero_()
    assert torch.equal(source.prev_embedding, before)


@pytest.mark.parametrize(
    ("source", "filled", "message"),
    [
        (dict(seq_len=20), 12, "holds 10 positions"),
        (dict(heads=2), 4, "prefill from"),
        (dict(batch_size=2), 4, "2 rows into"),
    ],
    ids=["too-long", "other-heads", "other-rows"],
)
def test_prefill_refuses(source, filled, message):
    other, target = cache(**source), cache(batch_size=3)
    other.advance(filled)
    with pytest.raises(ValueError, match=message):
        target.prefill(other)
    target.advance(1)
    with pytest.raises(ValueError, match="empty KV cache"):
        target.prefill(other)


# ---------------------------------------------------------------------------- sampling


def test_sampling_follows_the_softmax_of_the_kept_logits():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20_000, -1)
    rng = torch.Generator().manual_seed(0)
    for temperature, top_k in ((1.0, None), (0.5, 0), (2.0, 2), (1.0, 99)):
        drawn = sample_next_token(logits, rng, temperature, top_k)
        assert drawn.shape == (20_000, 1)
        kept = logits[0][: top_k or 4] / temperature
        expected = torch.zeros(4)
        expected[: len(kept)] = kept.softmax(0)
        assert torch.allclose(torch.bincount(drawn[:, 0], minlength=4) / 20_000, expected, atol=0.015)


def test_temperature_zero_is_the_argmax_and_negatives_are_refused():
    logits = torch.randn(5, 11)
    assert torch.equal(sample_next_token(logits, None, 0.0)[:, 0], logits.argmax(-1))
    for bad in (dict(temperature=-0.1), dict(top_k=-1)):
        with pytest.raises(ValueError, match="temperature -0.1|top_k -1|must not be"):
            sample_next_token(logits, None, **bad)


# ---------------------------------------------------------------------------- calculator


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7),
        ("(1 + 2) * -3", -9),
        ("7/2", 3.5),
        ("7//2", 3),
        ("1,000.5 + 1", 1001.5),
        (" 12 ", 12),
        ("'strawberry'.count('r')", 3),
        ('"a,b,c".count(",")', 2),
    ],
)
def test_calculator_computes(text, value):
    result = use_calculator(text)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1/0",
        "2**9",
        "1e999",
        "-1e999*0",
        "True+1",
        "x",
        "f(1)",
        "(1).real",
        "__import__('os')",
        "'a'*9",
        "'a'.upper()",
    ]
    + ["'a'.count('a', 0)", "'a'.count(sub='a')", "'a'.count(1)", "[1]", "1j", "1 if 1 else 2", "(" * 500, "9" * 1001]
    + ["'a'.count('a').bit_length()", "'a'.__class__", "1;2", "007"],
    ids=lambda text: text[:20] or "empty",
)
def test_calculator_answers_none_to_everything_else(text):
    assert use_calculator(text) is None


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda e: st.tuples(e, st.sampled_from("+-*/"), e).map("({0[0]}{0[1]}{0[2]})".format),
    )
)
def test_calculator_agrees_with_python_on_arithmetic(text):
    try:
        expected = eval(text)
    except (ZeroDivisionError, OverflowError):
        expected = None
    assert use_calculator(text) == expected or (isinstance(expected, float) and not math.isfinite(expected))


# ---------------------------------------------------------------------------- generation


def tool_script(expression):
    head = [256, *expression.encode(), 257]
    return head, [*head, *[0] * 40]


def test_tool_result_is_forced_behind_the_call():
    head, script = tool_script("2*21")
    model, engine, prompt = scripted(script)
    tokens, masks = zip(*engine.generate(prompt, max_tokens=12, temperature=0), strict=True)
    assert [t[0] for t in tokens] == [*head, 258, *b"42", 259, 0, 0]
    assert [m[0] for m in masks] == [1] * len(head) + [0] * 4 + [1] * 2


@pytest.mark.parametrize("expression", ["1/0", "", "open"])
def test_failed_tool_call_forces_nothing(expression):
    head, script = tool_script(expression)
    _, engine, prompt = scripted(script)
    (sequence,), (mask,) = engine.generate_batch(prompt, max_tokens=12, temperature=0)
    assert sequence[1:] == script[:12] and mask == [0] + [1] * 12


class PerRow(Scripted):
    """Row r follows script[r]; the scripts share their first token, because the prompt's logits are shared."""

    def forward(self, ids, kv_cache):
        logits = torch.full_like(Scripted([0] * 40, 1).forward(ids, kv_cache), -1e9)
        for row in range(ids.shape[0]):
            logits[row, -1, self.script[row][kv_cache.get_pos() - 1]] = 0
        return logits


def test_rows_of_one_batch_run_their_own_tool():
    """Row 1 is still writing its call when row 0 already receives its result."""
    first, second = [7, 256, *b"1+1", 257, *[0] * 6], [7, 5, 256, *b"2+3", 257, *[0] * 5]
    engine = Engine(PerRow([first, second], 1), Bytes())
    sequences, masks = engine.generate_batch([BOS], num_samples=2, max_tokens=11, temperature=0)
    assert sequences[0] == [BOS, *first[:6], 258, *b"2", 259, 0, 0]
    assert sequences[1] == [BOS, *second[:7], 258, *b"5", 259, 0]
    assert masks == [[0, *[1] * 6, 0, 0, 0, 1, 1], [0, *[1] * 7, 0, 0, 0, 1]]


def test_terminal_token_ends_the_row_and_is_left_out():
    for end in (END, BOS):
        model, engine, prompt = scripted([65, 66, end, 67, 68])
        assert engine.generate_batch(prompt, max_tokens=5, temperature=0) == ([[BOS, 65, 66]], [[0, 1, 1]])
        assert len(model.calls) == 3


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("prompt", [[BOS], [BOS, 1, 2, 3, 4]], ids=["one-token", "five-tokens"])
def test_one_prefill_and_no_forward_behind_the_last_token(prompt, samples):
    model, engine, _ = scripted([65] * 40, prompt)
    assert len(list(engine.generate(prompt, num_samples=samples, max_tokens=6, temperature=0))) == 6
    assert model.calls == [(1, len(prompt))] + [(samples, 1)] * 5


def test_without_max_tokens_generation_fills_the_context_and_stops():
    prompt = [BOS, 1, 2, 3]
    model, engine, _ = scripted([65] * 40, prompt)
    (sequence,), _ = engine.generate_batch(prompt, temperature=0)
    assert len(sequence) == model.config.sequence_len
    assert list(engine.generate(prompt, max_tokens=0)) == []


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([BOS, 262], {}, r"token id 262 .* 0\.\.261"),
        ([-1], {}, r"token id -1 .* 0\.\.261"),
        ([BOS, 1.5], {}, "int token ids"),
        ([1] * 24, {}, "24 tokens .* sequence_len is 24"),
        ([BOS], dict(max_tokens=-1), "max_tokens -1"),
        ([BOS], dict(num_samples=0), "num_samples 0"),
    ],
    ids=["empty", "padding-row", "negative-id", "not-int", "no-room", "negative-max", "no-sample"],
)
def test_senseless_requests_are_refused_before_anything_runs(prompt, options, message):
    model, engine, _ = scripted([65] * 40)
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt, **options)
    assert model.calls == []


def test_seed_decides_the_samples_and_rows_differ():
    prompt = [BOS, 72, 105]
    engine = Engine(Uniform([0] * 40, len(prompt)), Bytes())
    first, again, other = (
        engine.generate_batch(prompt, num_samples=8, max_tokens=4, seed=seed)[0] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len({tuple(row) for row in first}) > 1


# ---------------------------------------------------------------------------- with the real model


@pytest.mark.parametrize("name", ["upstream", "paper/baseline", "paper/bov", "fig5b/shared", "table1/7", "table1/11"])
def test_cached_steps_give_the_logits_of_one_full_forward(name, monkeypatch):
    """Prefill and steps lie on both sides of the 128-token window of the S layers; the smear is not zero."""
    model = build(**preset(name), vocab_size=262, sequence_len=150)
    prompt, seen, forward = [t * 7 % 255 for t in range(126)], [], model.forward

    def recording(ids, kv_cache):
        logits = forward(ids, kv_cache=kv_cache)
        seen.append(logits[:, -1].expand(2, -1))
        return logits

    monkeypatch.setattr(model, "forward", recording)
    rows, _ = Engine(model, Bytes()).generate_batch(prompt, num_samples=2, max_tokens=6, seed=1)
    monkeypatch.undo()
    assert rows[0] != rows[1] and [len(row) for row in rows] == [132, 132]
    whole = model(torch.tensor(rows))[:, len(prompt) - 1 : -1]
    assert torch.allclose(torch.stack(seen, dim=1), whole, atol=1e-4)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(["upstream", "paper/bov", "table1/11"]))
def test_a_text_in_chunks_gives_the_logits_of_the_whole(chunks, name):
    """The first token of a chunk takes the smear of the chunk before."""
    model = build(**preset(name), vocab_size=262)
    ids = torch.arange(2 * sum(chunks)).view(2, -1) * 11 % 255
    kv = KVCache(2, 2, sum(chunks), 8, 4, "cpu", COMPUTE_DTYPE)
    with torch.no_grad():
        parts = [model(part, kv_cache=kv) for part in ids.split(chunks, dim=1)]
        assert torch.allclose(torch.cat(parts, dim=1), model(ids), atol=1e-4)
    assert kv.get_pos() == sum(chunks) == kv.cache_seqlens[1]


def test_engine_and_model_generate_the_same_tokens():
    model = build(**preset("paper/bov"), vocab_size=262, sequence_len=32)
    for sampling in (dict(temperature=0), dict(temperature=0.7, top_k=1)):
        (row,), _ = Engine(model, Bytes()).generate_batch([3, 4], max_tokens=8, **sampling)
        assert row[2:] == list(model.generate([3, 4], 8, **sampling))[: len(row) - 2] and len(row) > 2


def test_padding_rows_of_the_model_are_no_tokens():
    model = build(vocab_size=262)
    assert model.transformer.wte.num_embeddings > 262
    with pytest.raises(ValueError, match=r"token id 262 .* 0\.\.261"):
        Engine(model, Bytes()).generate([262])


def test_a_forward_past_the_cache_returns_nothing_and_writes_nothing():
    model = build(vocab_size=262)
    kv = KVCache(1, 2, 10, 8, 4, "cpu", COMPUTE_DTYPE)
    model(torch.ones(1, 6, dtype=torch.long), kv_cache=kv)
    k, previous = kv.k_cache.clone(), kv.prev_embedding.clone()
    with pytest.raises(ValueError, match="10 positions: 6 are filled and 6 more"):
        model(torch.ones(1, 6, dtype=torch.long), kv_cache=kv)
    assert torch.equal(k, kv.k_cache) and torch.equal(previous, kv.prev_embedding) and kv.get_pos() == 6


# ---------------------------------------------------------------------------- prompts of different lengths


def bov_engine(**options):
    model = build(**preset("paper/bov"), vocab_size=262, sequence_len=64, window_pattern="SL").eval()
    return Engine(model, Bytes(), **options)


def closest_pair(model, tokens):
    """The smallest lead of the most likely token over the next along `tokens`, from its full forward."""
    best = model(torch.tensor([tokens]))[0].topk(2).values
    return (best[:, 0] - best[:, 1]).min().item()


@pytest.mark.parametrize("strategy", ["gather", "fused", "pooled", "auto"])
def test_many_prompts_continue_as_each_would_alone(strategy):
    engine = bov_engine(strategy=strategy)
    prompts = [[BOS], [BOS, *b"a longer prompt than the others"], [BOS, *b"five!"]]
    together, masks = engine.generate_many(prompts, max_tokens=12, temperature=0)
    for prompt, tokens, mask in zip(prompts, together, masks, strict=True):
        alone, alone_masks = engine.generate_batch(prompt, max_tokens=12, temperature=0)
        assert closest_pair(engine.model, tokens) > 1e-4, "a tie: choose another seed"
        assert tokens == alone[0] and mask == alone_masks[0]


def test_many_prompts_each_fill_the_context():
    engine = bov_engine()
    prompts = [[BOS] * 60, [BOS, 5]]
    together, _ = engine.generate_many(prompts, temperature=0)
    for prompt, tokens in zip(prompts, together, strict=True):
        assert tokens == engine.generate_batch(prompt, temperature=0)[0][0] and len(tokens) <= 64


def test_many_prompts_of_one_length_and_a_single_one():
    engine = bov_engine()
    assert len(engine.generate_many([[BOS, 3], [BOS, 4]], max_tokens=3)[0]) == 2
    assert engine.generate_many([[BOS, 3]], max_tokens=4, seed=7) == engine.generate_batch(
        [BOS, 3], max_tokens=4, seed=7
    )


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt"),
        ([[1], []], "prompt 1 of 2: the prompt is empty"),
        ([[1], [262]], r"prompt 1 of 2: token id 262 in the prompt is outside the vocabulary 0..261"),
        ([[1] * 64], "prompt 0 of 1: the prompt has 64 tokens"),
    ],
    ids=["none", "empty", "padding-row", "no-room"],
)
def test_many_prompts_refuse(prompts, message):
    with pytest.raises(ValueError, match=message):
        bov_engine().generate_many(prompts)


@pytest.mark.parametrize("strategy", ["gather", "fused", "pooled", "auto"])
def test_samples_of_one_prompt_decode_without_values_as_with(strategy):
    engine, kept = bov_engine(strategy=strategy), bov_engine()
    kept.value_layers = None
    options = dict(num_samples=3, max_tokens=20, temperature=1.0, top_k=20, seed=3)
    prompt = [BOS, *b"once"]
    assert engine.generate_batch(prompt, **options) == kept.generate_batch(prompt, **options)


@pytest.mark.parametrize("strategy", ["gather", "pooled"])
def test_the_caches_of_an_engine_hold_what_is_needed(strategy, monkeypatch):
    """V of the layers that need it, positions for prompt and continuation, and the strategy that was asked for."""
    engine, made = bov_engine(strategy=strategy), []

    class Noted(KVCache):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr("nanochat.engine.KVCache", Noted)
    engine.generate_many([[BOS], [BOS, 1, 2]], max_tokens=4)
    engine.generate_batch([BOS, 1], num_samples=2, max_tokens=4)
    engine.generate_batch([BOS, 1], max_tokens=4)
    assert sorted((cache.batch_size, cache.max_seq_len) for cache in made) == [
        (1, 1), (1, 2), (1, 3), (1, 6), (2, 6), (2, 7),
    ]  # fmt: skip
    for cache in made:
        assert len(cache.v_cache) == len(engine.model.value_layers) < len(cache.k_cache)
        assert cache.history.strategy == strategy


def test_more_tokens_than_rotary_positions_are_refused_before_any_is_made():
    engine = bov_engine()
    with pytest.raises(ValueError, match="2 tokens of prompt and 640 more pass the 640 positions"):
        engine.generate([BOS, 1], max_tokens=640)
    with pytest.raises(ValueError, match="200 tokens of prompt and 500 more"):
        engine.generate_many([[BOS] * 200, [BOS]], max_tokens=500)
    with pytest.raises(ValueError, match="must be an int"):
        engine.generate([BOS], max_tokens=2.5)
    engine.generate([BOS, 1], max_tokens=639)


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), 1e-40, -1.0])
def test_senseless_temperatures_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        sample_next_token(torch.tensor([[1.0, 14.0]]), torch.Generator(), temperature)


def test_an_engine_refuses_an_unknown_strategy():
    with pytest.raises(ValueError, match="'quick'"):
        bov_engine(strategy="quick")


def test_rows_of_other_caches_are_refused():
    caches = [cache(), cache()]
    for one in caches:
        one.advance(2)
    target = cache(batch_size=3)
    with pytest.raises(ValueError, match="2 caches for 3 rows"):
        target.prefill_rows(caches)
    assert target.get_pos() == 0 and target.cache_seqlens.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="cache 2 of 3 is empty"):
        target.prefill_rows([*caches, cache()])
    with pytest.raises(ValueError, match="cache 3 of 3"):
        target.prefill_rows([*caches, *caches])
    filled = cache(batch_size=2)
    filled.advance(1)
    with pytest.raises(ValueError, match="empty KV cache"):
        filled.prefill_rows(caches)
    assert filled.get_pos() == 1
    with pytest.raises(ValueError, match="prefill from"):
        other = cache(heads=2)
        other.advance(1)
        cache(batch_size=1).prefill_rows([other])
    with pytest.raises(ValueError, match="layers with V"):
        cache().prefill(KVCache(1, 3, 10, 4, 2, "cpu", torch.float32, value_layers=(0,)))
