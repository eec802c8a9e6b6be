"""infer_bench and its rooms: the JSON contract, caches filled without a forward, ways that agree, the suite."""

import json
import math
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from models import build
from nanochat import checkpoint_manager
from nanochat.bench import layer as decode_layer
from nanochat.bench import resident as decode_mmap
from nanochat.bench import sides as decode_bench
from nanochat.bench import suite as decode_suite
from nanochat.bench.layer import Layer, Shape, largest_allocation, largest_result
from nanochat.bench.sides import IdSource, Side, bank_attention, interleave, ratio, spare_positions
from nanochat.bov import decode
from nanochat.engine import KVCache
from nanochat.export import export_model
from nanochat.flash_attention import flash_attn_with_kvcache
from nanochat.gpt import config_to_dict
from scripts.infer_bench import main

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
VOCAB = 320
SHAPE = ["--depth", "3", "--width", "32", "--head-dim", "8", "--vocab-size", str(VOCAB), "--no-compile"]
TINY = [*SHAPE, "--device-type", "cpu", "--preset", "paper/bov"]

# Keys of upstream's last line at 92d63d4.
UPSTREAM = {
    "source", "step", "model_config", "gpu", "peak_bandwidth_bytes_per_sec", "total_vram_bytes", "num_params",
    "param_dtypes", "weight_bytes", "kv_bytes_per_token", "kv_read_bytes_per_step", "context_mid",
    "peak_flops_per_sec", "decode_flops_per_token", "ceiling_bs1_tok_per_sec", "max_full_context_rows",
    "prompt_tokens", "decode_tokens", "temperature", "sweep", "prefill",
}  # fmt: skip
UPSTREAM_PREFILL = {"tok_per_sec", "mfu_percent", "time_sec"}
UPSTREAM_ROW = {
    "batch_size", "ttft_sec", "tpot_sec", "tok_per_sec", "mbu_percent", "mfu_percent", "peak_vram_bytes",
    "decode_steps",
}  # fmt: skip


def last_line(capsys):
    """The last line of the output as strict JSON: NaN and Infinity are refused."""

    def refuse(word):
        raise AssertionError(f"{word} in the last line")

    return json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=refuse)


def ids_of(batch, length, seed=0, vocab=VOCAB):
    return IdSource("zipf", vocab, seed).draw(batch, length)


# ---------------------------------------------------------------------------- the command


def test_generation_ends_with_upstreams_keys(capsys):
    main([*TINY, "--prompt-tokens", "9", "--decode-tokens", "5", "--batch-sizes", "1,3"])
    found = last_line(capsys)
    assert UPSTREAM <= found.keys() and UPSTREAM_PREFILL <= found["prefill"].keys()
    assert [row["batch_size"] for row in found["sweep"]] == [1, 3]
    for row in found["sweep"]:
        assert UPSTREAM_ROW <= row.keys() and row["decode_steps"] == 4
        assert row["tok_per_sec"] > 0 and row["mbu_percent"] is None  # no known peak of a CPU
    assert found["peak_bandwidth_bytes_per_sec"] is None and found["ceiling_bs1_tok_per_sec"] is None
    assert found["prompt_tokens"] == 9 and found["context_mid"] == 11 and found["bank_layers"] == [2]


def test_contexts_compare_three_sides(capsys, tmp_path):
    out = tmp_path / "found.json"
    main([*TINY, "--contexts", "30,600", "--batch-sizes", "2", "--rounds", "3", "--seed", "7", "--out", str(out)])
    found = last_line(capsys)
    assert UPSTREAM <= found.keys() and json.loads(out.read_text()) == found
    assert [(row["context"], row["batch_size"]) for row in found["contexts"]] == [(30, 2), (600, 2)]
    for row in found["contexts"]:
        assert list(row["sides"]) == ["model", "v_cache", "baseline"]
        assert list(row["ratios"]) == ["v_cache / model", "baseline / model"]
        assert row["distinct"] == _distinct(row)
        for side in row["sides"].values():
            assert side["cache_bytes"]["measured"] == side["cache_bytes"]["formula"]
            assert side["bank_attention_ms"]["median"] > 0 and side["tok_per_sec"] > 0
        sizes = {name: side["cache_bytes"]["measured"] for name, side in row["sides"].items()}
        assert sizes["v_cache"] == sizes["baseline"]
    assert "seed 7" in found["ids"]


def _distinct(row):
    length = row["context"] + spare_positions(row["context"], 3)
    return IdSource("zipf", VOCAB, 7).draw(row["batch_size"], length)[:, : row["context"]].unique().numel()


def test_model_without_banks_is_compared_with_baseline_alone(capsys):
    main([*SHAPE, "--device-type", "cpu", "--contexts", "20", "--rounds", "2"])
    found = last_line(capsys)
    (row,) = found["contexts"]
    assert list(row["sides"]) == ["model", "baseline"] and row["sides"]["model"]["bank_attention_ms"] is None
    assert found["source"] == "random weights, upstream"


def test_shares_of_a_known_peak(capsys, monkeypatch):
    monkeypatch.setattr("scripts.infer_bench.get_peak_bandwidth", lambda name: 1e12)
    monkeypatch.setattr("scripts.infer_bench.get_peak_flops", lambda name: 1e13)
    main([*TINY, "--prompt-tokens", "9", "--decode-tokens", "5", "--batch-sizes", "2"])
    found = last_line(capsys)
    (row,) = found["sweep"]
    moved = found["weight_read_bytes_per_step"] + 2 * found["kv_read_bytes_per_step"]
    assert row["mbu_percent"] == pytest.approx(100 * moved / row["tpot_sec"] / 1e12, abs=0.006)
    flops = 2 * found["decode_flops_per_token"]
    assert row["mfu_percent"] == pytest.approx(100 * flops / row["tpot_sec"] / 1e13, abs=6e-5)
    ceiling = 1e12 / (found["weight_read_bytes_per_step"] + found["kv_read_bytes_per_step"])
    assert found["ceiling_bs1_tok_per_sec"] == pytest.approx(ceiling, abs=0.06)


@pytest.fixture
def base_dir(tmp_path, monkeypatch):
    """A base directory with a tokenizer and a checkpoint."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    decode_mmap.stand_in_tokenizer(VOCAB).save(str(tmp_path / "tokenizer"))
    model = build(vocab_size=VOCAB, bov_layers="last:1/3", trunk="plain", ve_layers="none")
    meta = {"step": 3, "model_config": config_to_dict(model.config)}
    folder = tmp_path / "base_checkpoints" / "tiny"
    checkpoint_manager.save_checkpoint(folder, 3, model.state_dict(), None, meta)
    return tmp_path


def test_checkpoint_cuts_the_prompt_to_its_context(base_dir, capsys):
    flags = ["-i", "base", "-g", "tiny", "--device-type", "cpu", "--no-compile", "--decode-tokens", "4"]
    main([*flags, "--batch-sizes", "2"])
    found = last_line(capsys)
    assert (found["source"], found["step"], found["prompt_tokens"]) == ("base", 3, 12)


@pytest.mark.parametrize("placement", ["device", "host", "mmap"])
def test_export_at_every_placement(placement, base_dir, capsys):
    model, tokenizer, _ = checkpoint_manager.load_model("base", CPU, phase="eval", model_tag="tiny")
    export_model(model, tokenizer, base_dir / "out", fold_gamma=True, dtype=torch.float32)
    flags = ["--export", str(base_dir / "out"), "--bov-placement", placement, "--device-type", "cpu", "--no-compile"]
    main([*flags, "--contexts", "40", "--rounds", "2"])
    found = last_line(capsys)
    side = found["contexts"][0]["sides"]["model"]
    assert side["cache_bytes"]["measured"] == side["cache_bytes"]["formula"]
    assert found["bov_placement"] == placement


def test_a_file_that_cannot_be_written_takes_no_measurement_with_it(tmp_path, capsys):
    out = tmp_path / "x.json"

    def run(*args, **options):
        out.mkdir()
        return []

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="x.json"):
        patch.setattr("scripts.infer_bench.Sweep.run", run)
        main([*TINY, "--contexts", "20", "--out", str(out)])
    assert UPSTREAM <= last_line(capsys).keys()


def test_a_suite_refuses_a_vocabulary_before_it_measures(capsys):
    with pytest.raises(ValueError, match="--vocab-size 100: the mmap part"):
        main([*TINY, "--vocab-size", "100", "--suite", "attention,mmap", "--contexts", "20", "--rounds", "2"])
    assert "pooled" not in capsys.readouterr().out


def test_ids_of_a_text(base_dir, capsys):
    (base_dir / "text.txt").write_text("words and more words, " * 40)
    main([*TINY, "--contexts", "25", "--rounds", "2", "--ids", str(base_dir / "text.txt")])
    found = last_line(capsys)
    assert "text.txt" in found["ids"] and 1 < found["contexts"][0]["distinct"] <= 12


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model-tag", "x", "--depth", "3"], "--model-tag with a shape"),
        (["--export", "x", "--model-tag", "y"], "--export with --model-tag"),
        (["--suite", "--export", "x"], "--suite with --export"),
        (["--suite", "--bov-placement", "host"], "--suite with --bov-placement"),
        (["--suite", "--preset", "paper/baseline", *SHAPE], "--suite compares layers without a V cache"),
        (["--rounds", "1"], "--rounds"),
        (["--device-type", "mps"], "CUDA devices and CPUs"),
        ([*TINY, "--contexts", "20", "--ids", "/nowhere.txt"], "--ids /nowhere.txt"),
        ([*TINY, "--bov-placement", "mmap"], "bov_export"),
        ([*TINY, "--decode-tokens", "8", "--width", "0"], "--width 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals(flags, message, base_dir):
    with pytest.raises(ValueError, match=message):
        main(flags)


@pytest.mark.parametrize("flags", [["--contexts", "0"], ["--contexts", "1,x"], ["--suite", "steps,speed"]], ids=str)
def test_flags_that_do_not_parse(flags, capsys):
    with pytest.raises(SystemExit):
        main(flags)
    assert flags[0] in capsys.readouterr().err


def test_compile_trouble_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("scripts.infer_bench.compile_fused", lambda dynamic: "no C++ compiler found")
    shape = [flag for flag in TINY if flag != "--no-compile"]
    main([*shape, "--contexts", "20", "--rounds", "2"])
    assert "not compiled (no C++ compiler found)" in capsys.readouterr().out.splitlines()[0]


# ---------------------------------------------------------------------------- ids


def test_zipf_ids_follow_their_law():
    ids = ids_of(4, 20000, vocab=100)
    counts = ids.flatten().bincount(minlength=100).double()
    expected = ids.numel() / torch.arange(1, 101) / sum(1 / k for k in range(1, 101))
    assert ((counts - expected).abs() < 5 * expected.sqrt()).all()
    assert torch.equal(ids, ids_of(4, 20000, vocab=100)) and not torch.equal(ids, ids_of(4, 20000, 1, vocab=100))


@pytest.mark.parametrize(
    "vocab, rows, message",
    [(VOCAB, 3, "60 tokens, 3 rows of 30 need 90"), (100, 1, "more tokens than the model's 100")],
    ids=["too short", "other vocabulary"],
)
def test_text_that_does_not_do(vocab, rows, message, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("z" * 60)
    tokenizer = SimpleNamespace(encode=lambda text: [ord(letter) for letter in text])
    with pytest.raises(ValueError, match=message):
        IdSource(str(text), vocab, 0, tokenizer).draw(rows, 30)


# ---------------------------------------------------------------------------- caches and sides


@pytest.fixture(scope="module")
def model():
    return build(vocab_size=VOCAB, sequence_len=200, bov_layers="1,3", trunk="plain", ve_layers="none").eval()


def test_filled_cache_is_in_the_state_that_a_forward_leaves(model):
    ids = ids_of(2, 30)
    options = dict(value_layers=model.value_layers, strategy="pooled")
    caches = [KVCache(2, 2, 40, 8, 4, CPU, torch.float32, **options) for _ in range(2)]
    with torch.inference_mode():
        model(ids, kv_cache=caches[0])
        decode_bench.fill_cache(caches[1], ids, torch.Generator().manual_seed(0))
    a, b = caches
    assert a.get_pos() == b.get_pos() == 30 and torch.equal(a.cache_seqlens, b.cache_seqlens)
    assert torch.equal(a.history.ids, b.history.ids) and torch.equal(a.history.lengths, b.history.lengths)
    for one, other in ((a.k_cache, b.k_cache), (a.v_cache, b.v_cache)):
        assert torch.equal(one.ne(0).any(-1), other.ne(0).any(-1))  # filled at the same places
    norms = [cache.k_cache[:, :, :30].norm(dim=-1) for cache in caches]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-3, atol=1e-3)


def test_fill_repeats_beyond_what_it_draws(monkeypatch):
    monkeypatch.setattr(decode_bench, "DRAWN", 8)
    cache = torch.zeros(2, 25, 3, 4)
    decode_bench.fill_positions(cache, 21, torch.Generator().manual_seed(0))
    assert torch.equal(cache[:, 8:16], cache[:, :8]) and torch.equal(cache[0, 16:21], cache[1, :5])
    assert cache[:, :21].ne(0).all() and cache[:, 21:].eq(0).all()


def test_side_goes_back_where_its_cache_is_full(model):
    decode_bench.set_context(model, 44)
    side = Side(model, ids_of(2, 44), 40, seed=0, strategy="pooled")
    positions = [side.cache.get_pos()]
    for _ in range(7):
        side.timed_step()
        positions.append(side.cache.get_pos())
    assert positions == [41, 42, 43, 44, 42, 43, 44, 42]
    assert side.cache.history.distinct == ids_of(2, 44)[:, :42].unique().numel()


def test_sides_that_cache_v_or_not_take_the_same_step(model):
    """On caches that a forward filled: K and V then belong together."""
    decode_bench.set_context(model, 60)
    ids, logits = ids_of(2, 60), []
    for options in ({}, {"value_layers": None}, {"value_layers": None, "upstream": True}):
        side = Side(model, ids, 40, seed=0, **options)
        side.cache.reset()
        with torch.inference_mode():
            model(ids[:, :40], kv_cache=side.cache)
        logits.append(side.step())
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kept", ["needed", None], ids=["without V", "V cached"])
def test_bank_attention_counts_each_bank_layer_once(model, kept, monkeypatch):
    decode_bench.set_context(model, 44)
    side = Side(model, ids_of(1, 44), 40, seed=0, strategy="gather", value_layers=kept)
    monkeypatch.setattr(decode_bench, "clocked", lambda device, call: (1.0, call()))
    assert bank_attention(side, (1, 3), steps=9)["quartiles"] == [2000.0, 2000.0]


@pytest.mark.parametrize("window", [-1, 0, 5, 100])
@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_upstreams_attention_equals_ours(window, n_kv_head):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, heads, 8, generator=generator) for heads in (4, n_kv_head, n_kv_head))
    caches = [torch.randn(2, 20, n_kv_head, 8, generator=generator) for _ in range(2)]
    outputs = [
        attend(q, *(c.clone() for c in caches), k=k, v=v, cache_seqlens=15, causal=True, window_size=(window, 0))
        for attend in (decode_bench.upstream_attend, flash_attn_with_kvcache)
    ]
    torch.testing.assert_close(*outputs)


def test_rounds_are_paired():
    clocks = {"a": iter([9, 9, 9, 2, 6, 4]), "b": iter([9, 9, 9, 1, 1, 2])}
    times = interleave({name: clock.__next__ for name, clock in clocks.items()}, rounds=3, seed=0)
    assert times == {"a": [2, 6, 4], "b": [1, 1, 2]}
    assert ratio(times, "a", "b") == {"median": 2.0, "quartiles": [2.0, 4.0]}


def test_order_of_sides_changes():
    seen = []
    sides = {name: lambda name=name: seen.append(name) or 1.0 for name in "abc"}
    interleave(sides, rounds=12, seed=0)
    rounds = [tuple(seen[i : i + 3]) for i in range(9, len(seen), 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds) and len(set(rounds)) > 2


# ---------------------------------------------------------------------------- one layer


SHAPES = {"1 query head per kv head": Shape(2, 2, 8, VOCAB), "grouped": Shape(4, 2, 8, VOCAB)}
CPU_WAYS = list(decode_layer.WAYS)


def layer_of(shape, ways=None, batch=2, context=50, steps=6):
    return Layer(shape, ids_of(batch, context + steps), context, ways or CPU_WAYS, CPU, seed=1)


def naive(layer, i):
    """The output of step i from its definition: (B, 1, N, D)."""
    length, groups = layer.context + i + 1, layer.shape.n_head // layer.shape.n_kv_head
    new = layer.new_k[: i + 1, :, 0].transpose(0, 1)
    k = torch.cat((layer.k[:, : layer.context], new), 1).repeat_interleave(groups, 2).transpose(1, 2)
    rows = layer.table.weight[layer.ids[:, :length]].view(len(k), length, layer.shape.n_kv_head, -1)
    v = decode_layer.GAMMA * rows.repeat_interleave(groups, 2).transpose(1, 2)
    p = (layer.q[i].transpose(1, 2) @ k.mT / layer.shape.head_dim**0.5).softmax(-1)
    return (p @ v).transpose(1, 2)


@pytest.mark.parametrize("way", [*CPU_WAYS, "parts"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_way_computes_attention(shape, way):
    layer = layer_of(shape, ["pooled"] if way == "parts" else [way])
    with torch.inference_mode():
        for i in range(3):
            y = layer.pooled_parts()[0] if way == "parts" else layer.step(way)
            torch.testing.assert_close(y, naive(layer, i), rtol=1e-4, atol=1e-5)


def test_ways_that_disagree_are_no_benchmark():
    layer = layer_of(SHAPES["grouped"])
    assert max(layer.check().values()) < 1e-5
    with torch.inference_mode():
        layer.histories["gather"].ids.fill_(1)
    with pytest.raises(RuntimeError, match="gather differs from upstream"):
        layer.check()


@pytest.mark.parametrize("way, makes", [("pooled", False), ("fused", False), ("gather", True)])
def test_hook_tells_whether_a_step_makes_t_times_d(way, makes):
    """In fp32, where the pass over K is one matmul; T * D is one head's V."""
    context = 1500
    layer = layer_of(Shape(2, 2, 64, VOCAB), [way], batch=1, context=context)
    layer.step(way)
    seen = largest_result(lambda: layer.step(way))
    assert (seen.elements >= context * 64) == makes, seen.operation
    assert (largest_allocation(lambda: layer.step(way)) >= 4 * context * 64) == makes


def test_hook_does_not_count_views():
    x = torch.randn(100, 100)
    assert largest_result(lambda: x.t()[:50].expand(7, 50, 100).sum(0).view(-1)).elements == 5000
    assert largest_result(lambda: x.add_(1)).elements == 0


def test_parts_sum_up_what_pooled_does():
    layer = layer_of(SHAPES["grouped"], ["pooled"])
    _, spent = layer.pooled_parts()
    assert tuple(spent) == decode_layer.PARTS and all(seconds > 0 for seconds in spent.values())


# ---------------------------------------------------------------------------- the suite


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Every section in miniature, through the command."""
    out = tmp_path_factory.mktemp("suite") / "decode.json"
    patch = pytest.MonkeyPatch()
    patch.setattr(decode_mmap, "TOKENS", 8)
    patch.setattr(decode_mmap, "BLOCK", 4)
    patch.setattr(decode_suite, "FLUSH_BYTES", {"cpu": 64})
    patch.setattr(decode, "POOLED_FROM", 64)
    main([*TINY, "--suite", "--contexts", "40,300", "--rounds", "2", "--out", str(out)])
    patch.undo()
    return SimpleNamespace(found=json.loads(out.read_text()), picture=out.with_suffix(".png"))


def test_suite_writes_every_section_and_a_picture(suite):
    assert set(decode_suite.SECTIONS) < suite.found.keys()
    assert {"commit", "versions", "cpu", "seed", "ids", "threads", "compiled", "settings"} < suite.found.keys()
    assert suite.picture.read_bytes().startswith(b"\x89PNG")


def test_suite_attention(suite):
    small, large = suite.found["attention"]
    assert [row["context"] for row in (small, large)] == [40, 300]
    assert list(large["ms"]) == CPU_WAYS and set(large["pooled_parts_ms"]) == set(decode_layer.PARTS)
    assert {f"{way} / pooled" for way in CPU_WAYS if way != "pooled"} < large["ratios"].keys()
    row_bytes, ids = 4 * 8 * 4, IdSource("zipf", VOCAB, 42).draw(1, 300 + 2 + 6 + 2 + 3)[:, :300]
    assert large["distinct"] == ids.unique().numel()
    assert large["bytes_read"] == {"cached": 600 * row_bytes, "pooled": (300 + large["distinct"]) * row_bytes}
    assert math.isclose(large["bound"], 600 / (300 + large["distinct"]))


def test_suite_steps_layout_bytes(suite):
    for section, pair in (("steps", "banks / baseline"), ("layout", "upstream / baseline")):
        rows = suite.found[section]
        assert [(r["pattern"], r["context"]) for r in rows] == [("L", 40), ("L", 300), ("SSSL", 40), ("SSSL", 300)]
        assert all(pair in row["ratios"] for row in rows)
    caches = suite.found["bytes"]["caches"]
    assert all(row["measured"] == row["formula"] for row in caches)
    assert [row["v_bytes_of_bank_layers"] > 0 for row in caches] == 4 * [False, True, True]
    pooled = [row for row in caches if row["side"] == "banks" and row["context"] == 300]
    assert all(row["measured"]["slots"] > 0 for row in pooled)
    assert set(suite.found["bytes"]["largest"]) == {"context", "limit_elements", "pooled", "fused", "gather"}


def test_suite_mmap(suite):
    found = suite.found["mmap"]
    tables = {where: loaded["tables_in_memory"] for where, loaded in found["resident_loaded"].items()}
    assert tables == {"device": found["tables_bytes"], "mmap": 0} and found["tables_bytes"] == VOCAB * 32 * 4
    assert all(sizes["RssAnon"] > 1e7 for sizes in found["resident"].values()) and "mmap / device" in found["ratios"]


def test_suite_growth(suite):
    growth = suite.found["growth"]
    assert [row["context"] for row in growth["by_context"]] == [40, 300]
    assert [row["kinds"] for row in growth["by_distinct"]] == [64, VOCAB]
    for row in growth["by_distinct"]:
        assert row["distinct"] <= row["kinds"] and row["v_side_ms"] > 0


def test_suite_says_what_it_reaches(suite):
    texts = [aim["aim"] for aim in suite.found["aims"]]
    assert "step, all-L, T 300: banks / baseline at most" in texts
    assert all(aim["met"] for aim in suite.found["aims"] if "cache bytes" in aim["aim"])


def test_aims_are_those_of_the_issue():
    ratios = {"upstream / pooled": 1.9, "gather / pooled": 9, "sdpa / cached": 1.1}
    attention = {"batch": 1, "context": 131072, "share_of_bound": {"alone": 0.9}}
    attention["ratios"] = {name: {"median": value} for name, value in ratios.items()}
    step = {"pattern": "L", "batch": 1, "context": 32768, "ratios": {"banks / baseline": {"median": 1.05}}}
    small = step | {"context": 64}
    found = decode_suite.aims({"attention": [attention, {"skipped": "no room"}], "steps": [step, small]})
    assert [aim["met"] for aim in found] == [False, True, True, True, False, True]


def setting_of(**more):
    config = build(randomise=False, vocab_size=VOCAB, bov_layers="last:1/3").config
    ids = IdSource("zipf", VOCAB, 0)
    return decode_suite.Setting(config=config, device=CPU, ids=ids, seed=0, rounds=2, contexts=(64,), **more)


def test_sides_of_the_suite_are_what_their_names_say():
    models = decode_suite.Models(setting_of())
    ids = ids_of(1, 66)
    models.set(66, "L")
    sides = {name: models.side(name, ids, 64) for name in ("banks", "v_cache", "baseline", "upstream")}
    assert {name: side.cache.history is not None for name, side in sides.items()} == {
        "banks": True, "v_cache": False, "baseline": False, "upstream": False,
    }  # fmt: skip
    assert {name for name, side in sides.items() if side.cache.k_cache.is_contiguous()} == {"upstream"}
    assert sides["upstream"].model is sides["baseline"].model is not sides["banks"].model


@pytest.mark.parametrize(
    "name, value, message",
    [("deadline", -1.0, "--budget"), ("free", 1000, "are free")],
    ids=["out of time", "out of memory"],
)
def test_cases_that_cannot_be_measured_are_left_out(name, value, message, monkeypatch, capsys):
    if name == "free":
        monkeypatch.setattr(decode_suite, "available_bytes", lambda device: value)
    setting = setting_of(**({name: value} if name == "deadline" else {}))
    results = decode_suite.run_suite(setting, ("attention", "steps", "growth"), save=lambda results: None)
    rows = [*results["attention"], *results["steps"], *results["growth"]["by_context"]]
    assert all(message in row["skipped"] for row in rows) and message in capsys.readouterr().out
    assert decode_suite.aims(results) == []


def test_stand_in_tokenizer_has_any_size():
    for size in (265, 300, 2000):
        assert decode_mmap.stand_in_tokenizer(size).get_vocab_size() == size
    with pytest.raises(ValueError, match="--vocab-size 264"):
        decode_mmap.stand_in_tokenizer(264)


# ---------------------------------------------------------------------------- the GPU script


@pytest.mark.parametrize("smoke", ["0", "1"], ids=["full", "smoke"])
def test_gpu_script_shows_its_command_and_runs_nothing(smoke, tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("DRY_RUN", "SMOKE")}
    env |= {"DRY_RUN": "1", "SMOKE": smoke, "NANOCHAT_PYTHON": "/nowhere", "NANOCHAT_BASE_DIR": str(tmp_path / "x")}
    done = subprocess.run(["bash", str(ROOT / "runs/decode_gpu.sh")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "scripts.infer_bench --suite" in done.stdout and not (tmp_path / "x").exists()
    assert ("--device-type cpu" in done.stdout) == (smoke == "1")
