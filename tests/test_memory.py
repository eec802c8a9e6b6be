"""Bytes by formula against the paper's numbers, against built models, and against what decoding really allocates."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import SMALL, build, legal_points
from nanochat.bov import decode, memory, placement
from nanochat.bov.memory import Decode
from nanochat.bov.presets import preset
from nanochat.checkpoint_manager import save_checkpoint
from nanochat.common import COMPUTE_DTYPE
from nanochat.gpt import GPTConfig, config_to_dict
from nanochat.optim import reshard
from scripts import bov_memory

BF16 = torch.bfloat16
MIB = 2**20


def paper(depth=12, vocab_size=32768, name="paper/bov", **fields):
    heads = depth // 2
    shape = dict(n_layer=depth, n_embd=64 * depth, n_head=heads, n_kv_head=heads, vocab_size=vocab_size)
    return bov_memory.sizes_of(GPTConfig(**(shape | preset(name) | fields)))


def at(context, batch=1, distinct=1, **more):
    return Decode(batch, context, BF16, distinct, **more)


def point(source, combine, coeff, shared=False, **fields):
    axes = {"bov_layers": "last:1/2", "bov_source": source, "bov_combine": combine, "bov_coeff": coeff}
    return SMALL | axes | {"ve_layers": "none", "trunk": "plain", "bov_shared": shared} | fields


# ---------------------------------------------------------------------------- the paper's numbers


@pytest.mark.parametrize("depth, baseline, bov", [(12, 36_864, 30_720), (24, 147_456, 122_880)])
def test_kv_bytes_per_token(depth, baseline, bov):
    sizes = paper(depth)
    for s, expected in ((sizes, bov), (sizes.standard, baseline), (paper(depth, name="paper/baseline"), baseline)):
        parts = memory.decode_bytes(s, at(1))
        assert parts["k"] + parts["v"] == expected
    assert memory.decode_bytes(sizes, at(1))["ids"] == 4


@pytest.mark.parametrize("depth", [12, 24])
@pytest.mark.parametrize("tokens, percent", [(262_144, 7.0), (1_048_576, 14.3)])
def test_figure_5a(depth, tokens, percent):
    shares = memory.shares(paper(depth, 151_936), at(tokens))
    assert round(100 * shares["kv"], 1) == percent
    assert shares["v"] == pytest.approx(2 * shares["kv"])


def test_limits_name_their_denominator():
    sizes = paper()
    assert memory.limits(sizes) == {"v": pytest.approx(1 / 3), "kv": pytest.approx(1 / 6)}
    far = memory.shares(sizes, at(10**12))
    assert far["v"] == pytest.approx(1 / 3, abs=1e-6) and far["kv"] == pytest.approx(1 / 6, abs=1e-6)


def test_tables_of_d12_and_d24():
    assert memory.table_bytes(paper(), BF16) == 201_326_592
    assert memory.table_bytes(paper(24), BF16) == 2 * 402_653_184


@pytest.mark.parametrize("context, batch", [(32768, 1), (512, 64), (262_144, 3)])
def test_break_even_is_the_vocabulary(context, batch):
    even = memory.break_even(paper(), at(context, batch))
    assert even["tables"] == 32768
    assert even["all"] < even["tables"], "the W_V that is gone outweighs ids and slots"


def test_break_even_against_a_ring():
    """An S layer of the paper's d12 keeps 512 positions: its table pays from 64 rows on."""
    only_s = paper(bov_layers="8,9,10")
    assert memory.break_even(only_s, at(2048, policy="ring"))["tables"] == 64 * 2048
    only_l = paper(bov_layers="11")
    assert memory.break_even(only_l, at(2048, policy="ring"))["tables"] == 32768
    assert [s.is_window(i) for s in [paper()] for i in s.bank_layers] == [True, True, True, False]
    deep = paper(24)
    assert sum(deep.is_window(i) for i in deep.bank_layers) == 6


def test_ring_keeps_the_window_alone():
    sizes = paper()
    parts = memory.decode_bytes(sizes, at(2048, policy="ring"))
    assert parts["k"] == (9 * 512 + 3 * 2048) * 768 * 2
    assert parts["v"] == (6 * 512 + 2 * 2048) * 768 * 2


def test_a_shared_table_pays_four_times_earlier():
    assert memory.break_even(paper(bov_shared=True), at(8192))["tables"] == 32768 / 4


def test_without_banks_nothing_is_saved():
    for name in ("upstream", "paper/baseline", "fig5b/add_v", "table3/x0"):
        sizes = paper(name=name)
        assert set(memory.shares(sizes, at(2048)).values()) == {0.0}, name
        assert set(memory.break_even(sizes, at(2048)).values()) == {math.inf}, name
        parts = memory.decode_bytes(sizes, at(2048))
        assert not any(parts[key] for key in ("ids", "slots", "slot_map", "pool")), name


def test_zipf_expectation_equals_the_mean_of_draws():
    weights = 1 / torch.arange(1, 1001, dtype=torch.float64)
    draws = torch.multinomial(weights.expand(200, -1), 500, replacement=True, generator=torch.manual_seed(0))
    counted = [len(row.unique()) for row in draws]
    assert memory.zipf_distinct(1000, 500) == pytest.approx(sum(counted) / len(counted), rel=0.01)
    assert memory.zipf_distinct(1, 7) == 1 and memory.zipf_distinct(10, 10**6) == pytest.approx(10)


# ---------------------------------------------------------------------------- what moves which way

DECODES = st.builds(
    dict,
    batch=st.integers(1, 64), context=st.integers(1, 9000), distinct=st.integers(1, 5000),
    policy=st.sampled_from(memory.POLICIES), placement=st.sampled_from(placement.PLACEMENTS),
    strategy=st.sampled_from(decode.STRATEGIES), device=st.sampled_from(memory.DEVICES),
    dtype=st.sampled_from((BF16, torch.float16, torch.float32)),
)  # fmt: skip
MODELS = st.builds(
    lambda name, kv, vocab_size: GPTConfig(**(SMALL | {"vocab_size": vocab_size, "n_kv_head": kv} | preset(name))),
    st.sampled_from(("paper/bov", "fig5b/shared", "fig5b/add_v", "table3/ve_gated", "upstream", "fig5b/every_layer")),
    st.sampled_from((1, 2, 4)),
    st.integers(2, 3000),
)


def decode_of(options, **changes):
    options = options | changes
    return Decode(**options | {"distinct": min(options["distinct"], options["batch"] * options["context"])})


@settings(max_examples=150, deadline=None)
@given(MODELS, DECODES, st.integers(1, 3000))
def test_more_text_never_needs_less(config, options, more):
    sizes = bov_memory.sizes_of(config)
    parts = memory.decode_bytes(sizes, decode_of(options))
    for name in ("batch", "context"):
        longer = memory.decode_bytes(sizes, decode_of(options, **{name: options[name] + more}))
        for key in ("k", "v", "ids", "state"):
            assert longer[key] >= parts[key], (name, key)
        cut = name == "context" and options["placement"] == "device"  # window layers that begin to cut need no slots
        assert longer["slots"] >= parts["slots"] or cut
        assert longer["weights"] == parts["weights"] and longer["tables"] == parts["tables"]


@settings(max_examples=150, deadline=None)
@given(MODELS, DECODES)
def test_orders_that_always_hold(config, options):
    sizes = bov_memory.sizes_of(config)
    parts = memory.decode_bytes(sizes, decode_of(options))
    assert all(isinstance(value, int) and value >= 0 for value in parts.values())
    assert parts["v"] <= parts["k"]
    assert (parts["v"] < parts["k"]) == bool(sizes.bank_layers)
    full = memory.decode_bytes(sizes, decode_of(options, policy="full"))
    assert parts["k"] <= full["k"] and parts["v"] <= full["v"]
    on_device = memory.decode_bytes(sizes, decode_of(options, placement="device"))
    bank_tables = len(sizes.bank_tables) * sizes.vocab * sizes.kv_dim * memory.stored("table", options["dtype"])
    placed = options["placement"] != "device"
    assert on_device["tables"] - parts["tables"] == (bank_tables if placed else 0)
    if options["placement"] != "mmap":
        assert parts["host_tables"] == (bank_tables if placed else 0)
    else:
        assert parts["host_tables"] <= len(sizes.bank_tables) * 2**18, "no more than a read buffer per table"
    assert 0 <= parts["pool"] - memory.kept_places(sizes, decode_of(options)) <= bank_tables
    assert bool(parts["slots"]) == bool(parts["slot_map"])
    if options["strategy"] in ("gather", "fused") and not placed:
        assert parts["slots"] == parts["pool"] == 0
    assert parts["slots"] or not parts["pool"]
    if placed and sizes.bank_layers:
        assert parts["slots"] and parts["pool"]


@settings(max_examples=60, deadline=None)
@given(MODELS, DECODES)
def test_above_break_even_a_model_saves(config, options):
    sizes = bov_memory.sizes_of(config)
    options |= {"placement": "device"}
    decode = decode_of(options)
    even = memory.break_even(sizes, decode)["tables"]
    saved = memory.shares(sizes, decode)["v"]
    tokens = decode.batch * decode.context
    assert (saved > 0) == (tokens > even)


@settings(max_examples=60, deadline=None)
@given(MODELS, DECODES)
def test_above_break_even_less_is_held(config, options):
    """Of as many distinct tokens in any batch: from the batch on that `all` names, and in no smaller one."""
    sizes = bov_memory.sizes_of(config)
    options |= {"distinct": min(options["distinct"], options["context"])}
    even = memory.break_even(sizes, decode_of(options))["all"]
    batches = range(1, 9) if math.isinf(even) else {1, *(math.ceil(even / options["context"]) + i for i in (-1, 1, 2))}
    for batch in batches:
        there = decode_of(options, batch=max(1, batch))
        own, standard = (memory.held(memory.decode_bytes(s, there)) for s in (sizes, sizes.standard))
        own -= memory.kept_places(sizes, there)
        assert (own < standard) == (there.batch * there.context > even)


@settings(max_examples=40, deadline=None)
@given(MODELS, DECODES)
def test_paying_batch_is_the_first_from_which_a_model_saves(config, options):
    options |= {"distinct": 1}
    sizes, decode = bov_memory.sizes_of(config), decode_of(options)

    def saves(batch):
        there = decode_of(options, batch=batch)
        return memory.held(memory.decode_bytes(sizes, there)) < memory.held(memory.decode_bytes(sizes.standard, there))

    batch = memory.paying_batch(sizes, decode, lambda tokens: 1)
    if batch is None:
        assert not saves(memory.MOST_ROWS)
    else:
        assert saves(batch) and (batch == 1 or not saves(batch - 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 20000), st.integers(1, 1000))
def test_distinct_tokens_grow_within_their_bound(vocab_size, tokens, more):
    few, many = (memory.zipf_distinct(vocab_size, count) for count in (tokens + 1, tokens + 1 + more))
    assert 1 - 1e-9 <= few <= many + 1e-9
    assert many <= min(vocab_size, tokens + 1 + more) + 1e-6


# ---------------------------------------------------------------------------- against built models

CONFIGS = {
    "upstream": SMALL,
    "baseline": SMALL | preset("paper/baseline"),
    "bov": SMALL | preset("paper/bov"),
    "no smear, MLP, MQA": SMALL | preset("paper/bov") | {"smear": False, "mlp_hidden": 40, "n_kv_head": 1},
    "bank over gated": SMALL | {"bov_layers": "2,3"},
    **{" ".join(map(str, p)): point(*p) for p in legal_points()},
}


def split(model):
    tables = [table.weight for table in model.value_embeds.values()]
    known = {id(t) for t in tables}
    return [p for p in model.parameters() if id(p) not in known], tables


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_weights_equal_a_built_model(fields):
    model = build(randomise=False, **fields)
    sizes = bov_memory.sizes_of(model.config)
    weights, tables = split(model)
    assert memory.weight_bytes(sizes, COMPUTE_DTYPE) == memory.storage_bytes(weights)
    assert memory.table_bytes(sizes, COMPUTE_DTYPE) == memory.storage_bytes(tables)
    assert memory.decode_bytes(sizes, Decode(1, 1, COMPUTE_DTYPE, 1))["rotary"] == memory.storage_bytes(
        [model.cos, model.sin]
    )
    assert sizes.bank_layers == tuple(i for i in range(4) if i not in model.value_layers)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", ["upstream", "bov", "table add head True", "no smear, MLP, MQA"])
def test_gradients_and_optimizer_equal_a_training_step(name, ranks):
    model = build(**CONFIGS[name])
    optimizer = model.setup_optimizer()
    ids = torch.arange(12).view(2, 6)
    model(ids, ids).backward()
    optimizer.step()
    own = reshard([optimizer.state_for_save()], ranks, 0)["state"] if ranks > 1 else optimizer.state
    states = [t for state in own.values() for t in state.values()]
    expected = memory.train_bytes(bov_memory.sizes_of(model.config), COMPUTE_DTYPE, ranks)
    assert expected["gradients"] == memory.storage_bytes(p.grad for p in model.parameters())
    assert expected["optimizer"] == memory.storage_bytes(states)


def test_ranks_that_cannot_share():
    with pytest.raises(ValueError, match="3 ranks cannot share its 32768 rows"):
        memory.optimizer_bytes(paper(), BF16, 3)
    with pytest.raises(ValueError, match="--ranks 0"):
        memory.optimizer_bytes(paper(), BF16, 0)


# ---------------------------------------------------------------------------- the command


def run(capsys, *flags):
    """(printed lines, JSON of the last one)."""
    bov_memory.main([*flags, "--json"])
    lines = capsys.readouterr().out.splitlines()
    return lines[:-1], json.loads(lines[-1])


def test_report_names_every_denominator(capsys):
    lines, found = run(capsys, *"--vocab-size 151936 --context 262144 --dtype bfloat16 --strategy gather".split())
    text = "\n".join(lines)
    assert "of K+V of all layers" in text and "of V of all layers" in text and "weights + tables + cache" in text
    row = next(line for line in lines if line.startswith("  of K+V"))
    assert row.split()[-3:] == ["7.0%", "7.1%", "16.7%"]
    assert "151,936 tokens" in text
    assert set(found["measured"].values()) == {None}
    assert found["formula"]["tables"] == 4 * 151_936 * 768 * 2


def test_lists_give_one_report_each_and_json_last(capsys):
    bov_memory.main("--depth 4 --batch 1,3 --context 10,20 --json".split())
    lines = capsys.readouterr().out.splitlines()
    parts = [json.loads(line)["formula"] for line in lines if line.startswith("{")]
    row = 4 * 2 * 128 * COMPUTE_DTYPE.itemsize
    assert [part["k"] // row for part in parts] == [10, 20, 30, 60]
    assert lines[-1].startswith("{")


def test_ring_report(capsys):
    lines, _ = run(capsys, *"--window-policy ring --batch 64".split())
    assert any("an S layer" in line and "512 positions" in line and "batch 64 on" in line for line in lines)
    assert any("an L layer" in line and "batch 16 on" in line for line in lines)


def test_break_even_counts_everything_held(capsys):
    """d12 at 32,768 tokens: V and tables are equal, the W_V that is gone is saved, and a pool outweighs it."""
    flags = "--context 32768 --window-pattern L --dtype bfloat16 --device-type cpu".split()
    U = 8549
    pool, row, projections, slot_map = 4 * (U + U // 4 + 64) * 768 * 2, 4 * 768 * 2, 4 * 768 * 768 * 4, 12 * 32768
    places = 4 * 6 * 4 * (U + 1)  # of each layer and head: where each row is, and the first
    for more, pools in (("auto", pool), ("fused", 0), ("auto --placement mmap", pool)):
        lines, found = run(capsys, *flags, "--strategy", *more.split())
        text, parts = "\n".join(lines), found["formula"]
        assert [parts[key] for key in ("pool", "slots", "slot_map")] == [
            pools + places * (pools > 0), *((8 * 32768, slot_map) if pools else (0, 0)),
        ]  # fmt: skip
        assert f"less from batch {2 if more == 'auto' else 1} on" in text
        if "mmap" in more:
            assert "tables = V no longer cached" not in text
            continue
        tokens = 32768 * row + pools - projections + (slot_map if pools else 0)
        tokens /= row - (12 if pools else 4) - 4 / 32768  # of each: an id, a slot; of each row, its length
        assert (
            "of          32,768 tokens" in text
            and f"{math.ceil(tokens):,} tokens{' of 8,549 distinct' if pools else ''}\n" in text
        )


POOLED = "a pool for each pooled table, none with --strategy fused"


@pytest.mark.parametrize(
    "flags, said",
    {
        "auto": f"8,9,10 by fused; 11 by pooled (--strategy auto, cpu; {POOLED})",
        "pooled": f"8,9,10 by gather; 11 by pooled (--strategy pooled, cpu; {POOLED})",
        "fused": "8,9,10,11 by fused (--strategy fused, cpu; no pool)",
        "fused --placement host": "8,9,10,11 by fused (--strategy fused, cpu; a pool for each placed table)",
        "auto --preset upstream": "none (--strategy auto, cpu; no pool)",
    }.items(),
)
def test_report_says_how_layers_decode_and_who_has_a_pool(flags, said, capsys):
    found = run(capsys, *"--context 32768 --device-type cpu --strategy".split(), *flags.split())
    assert found[0][1] == f"        layers without a V cache: {said}"
    assert bool(found[1]["formula"]["pool"]) == ("a pool" in said)


def test_distinct_tokens_say_where_they_come_from(capsys):
    for word, number, origin in (("zipf", 1043, "Zipf"), ("bound", 2048, "most"), ("77", 77, "given")):
        lines, _ = run(capsys, "--distinct", word)
        use = next(line for line in lines if line.startswith("use"))
        assert f"{number:,} distinct tokens (" in use and origin in use


def test_model_of_a_checkpoint(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    model = build(**CONFIGS["bov"])
    folder = tmp_path / "base_checkpoints" / "tiny"
    meta = {"model_config": config_to_dict(model.config)}
    save_checkpoint(folder, 7, model.state_dict(), None, meta)
    found = run(capsys, "--model-tag", "tiny", "--context", "20")[1]["formula"]
    weights, tables = split(model)
    assert found["weights"] == memory.storage_bytes(weights) and found["tables"] == memory.storage_bytes(tables)
    with pytest.raises(FileNotFoundError, match="--step 8.*steps 7"):
        bov_memory.main(["--model-tag", "tiny", "--step", "8"])
    with pytest.raises(ValueError, match="--model-tag with --depth, --preset"):
        bov_memory.main(["--model-tag", "tiny", "--depth", "3", "--preset", "upstream"])
    with pytest.raises(ValueError, match="--context 161 is past the 160 rotary positions"):
        bov_memory.main(["--model-tag", "tiny", "--context", "161"])


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--preset paper/bank", "--preset 'paper/bank': use one of"),
        ("--depth 0", "--depth 0"),
        ("--width 0", "--width 0"),
        ("--width 64 --aspect-ratio 2", "give one"),
        ("--step 3", "--step without --model-tag"),
        ("--context 30000 --max-seq-len 2048", "past the 20480 rotary positions.*--max-seq-len"),
        ("--distinct 2049", "--distinct '2049': use zipf, bound or a number from 1 to 2048"),
        ("--distinct few", "--distinct 'few'"),
        ("--ranks 3", "3 ranks cannot share its 32768 rows"),
        ("--bov-layers 12", "layer 12 is not one of"),
        ("--measure --window-policy ring", "--measure with --window-policy ring"),
        ("--measure --dtype float16", "--measure computes in .*NANOCHAT_DTYPE=float16"),
        ("--measure --context 1", "--context must be at least 2"),
        ("--measure --depth 400", "--measure needs .* choose less"),
    ],
)
def test_errors_for_people(flags, message):
    with pytest.raises(ValueError, match=message):
        bov_memory.main(flags.split())


@pytest.mark.parametrize(
    "flags", ["--batch -1", "--batch 0", "--context 1,x", "--placement disk", "--dtype int8", "--device-type tpu"]
)
def test_flags_that_argparse_refuses(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        bov_memory.main(flags.split())
    assert stop.value.code == 2 and flags.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--model-tag d12", "--plot with --model-tag"), ("--preset paper/baseline", "without a bank")],
    ids=["checkpoint", "baseline"],
)
def test_nothing_to_plot(flags, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        bov_memory.main([*flags.split(), "--plot", str(tmp_path / "x.png")])
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("name", ["saved.png", "saved"])
def test_plot(name, tmp_path, capsys):
    path = tmp_path / name
    bov_memory.main(["--plot", str(path), "--vocabs", "1000,32768,151936"])
    assert path.read_bytes().startswith(b"\x89PNG") and f"written: {path}" in capsys.readouterr().out
