"""The meter, and the formula against what decoding and training really allocate."""

from dataclasses import replace

import pytest
import torch

from nanochat import memory_meter
from nanochat.bov import decode, memory, one_query, placement
from nanochat.bov.memory import Decode
from nanochat.bov.presets import preset
from nanochat.flash_attention import flash_attn_func
from nanochat.gpt import GPTConfig
from nanochat.memory_meter import meter
from scripts import bov_memory
from test_memory import BF16, run

MIB = 2**20

# ---------------------------------------------------------------------------- the meter


def test_meter_counts_what_lives_and_the_most_that_lived():
    kept = torch.zeros(MIB // 4)
    with meter("cpu") as seen:
        a = torch.ones(MIB // 4)
        b = a + 1
        assert seen.live == 2 * MIB
        del a
        assert seen.live == MIB and seen.peak == 2 * MIB
        b.add_(1)
        kept.mul_(2)
        c = b.view(2, -1)[1]
        assert seen.live == MIB, "views, results in place and what was there before are not new"
        del b
        assert seen.live == MIB, "the view keeps the storage"
        del c
    assert seen.live == 0 and seen.peak == 2 * MIB


def test_meter_in_inference_mode():
    with meter("cpu") as seen, torch.inference_mode():
        x = torch.zeros(MIB // 4)
        y = torch.nn.functional.scaled_dot_product_attention(*(x.view(1, 1, -1, 64),) * 3)
        del x
    assert seen.live == memory.storage_bytes([y]) == MIB and seen.peak >= 2 * MIB


def test_storage_bytes_counts_a_storage_once_and_whole():
    x = torch.zeros(100)
    assert memory.storage_bytes([x, x[:3], x.view(10, 10).T]) == 400
    assert memory.storage_bytes([torch.empty(0)]) == 0


# ---------------------------------------------------------------------------- against real decoding


TINY = "--depth 4 --width 32 --head-dim 8 --vocab-size 300 --max-seq-len 256 --measure".split()
MEASURED = {
    "auto, device": "--context 200",
    "auto, few tokens": "--max-seq-len 4100 --context 4100 --window-pattern L --distinct 250",
    "auto, many tokens": "--max-seq-len 4100 --context 4100 --window-pattern L --vocab-size 2600 --distinct 2400",
    "auto, past the windows": "--max-seq-len 4100 --context 4100 --window-pattern S --bov-layers 1,2",
    "auto, host": "--context 200 --batch 3 --placement host",
    "pooled, device": "--context 200 --batch 4 --strategy pooled",
    "pooled, host": "--context 200 --batch 3 --placement host --strategy pooled",
    "gather, device": "--context 200 --strategy gather",
    "gather, host": "--context 300 --placement host --strategy gather",
    "fused, device": "--context 300 --batch 2 --strategy fused",
    "fused, mmap": "--context 300 --placement mmap --strategy fused",
    "mmap, every token": "--context 300 --batch 2 --placement mmap --distinct bound",
    "past the windows": "--context 600 --batch 2 --strategy pooled",
    "pool of the smallest size": "--context 2 --placement host",
    "window layers only": "--context 600 --bov-layers 1,2 --strategy pooled",
    "shared": "--context 200 --bov-shared --window-pattern L --strategy pooled",
    "shared, host": "--context 200 --bov-shared --window-pattern L --placement host",
    "GQA": "--context 200 --kv-heads 2 --batch 2 --window-pattern L --strategy pooled",
    "MQA, every layer": "--context 100 --kv-heads 1 --bov-layers all",
    "add": "--context 200 --preset fig5b/add_v",
    "gated tables beside banks": "--context 200 --preset upstream --bov-layers 2,3 --ranks 2",
    "ve_gated baseline": "--context 200 --preset table3/ve_gated",
    "baseline": "--context 200 --preset paper/baseline --ranks 4",
    "no smear, per head, MLP": "--context 200 --smear false --bov-coeff head --mlp-hidden 40",
}
ONLY_SIDE_BY_SIDE = {"temporaries", "step_temporaries"}


@pytest.mark.parametrize("flags", MEASURED.values(), ids=MEASURED)
def test_formula_equals_what_is_allocated(capsys, flags):
    lines, found = run(capsys, *TINY, *flags.split())
    assert found["formula"].keys() == found["measured"].keys()
    assert all(type(value) is int for side in found.values() for value in side.values())
    differing = {key for key, value in found["formula"].items() if value != found["measured"][key]}
    assert differing <= ONLY_SIDE_BY_SIDE
    marked = {line.split()[1] for line in lines if line.endswith("differs")}
    assert bool(marked) == bool(differing), "a difference is marked in the table"


def test_a_pool_is_made_for_a_quarter_more_tokens_at_most_all(capsys):
    flags = [*TINY, *"--context 200 --batch 4 --window-pattern L --placement host --distinct".split()]
    some, many = (run(capsys, *flags, count)[1]["measured"]["pool"] for count in ("160", "260"))
    assert some == 2 * (160 + 40 + 64) * 32 * 4 and many == 2 * 320 * 32 * 4
    assert run(capsys, *flags, "160", "--bov-shared")[1]["measured"]["pool"] == some // 2


def test_auto_counts_tokens_from_a_length_on(capsys):
    """Slots are there once `auto` has to know the number of distinct tokens, whatever it then chooses."""
    flags = [*TINY, *"--window-pattern L --max-seq-len 5000 --vocab-size 2600 --context".split()]
    for context, distinct, slots, way in (
        (4000, 9, 0, "fused"),
        (4096, 9, 8 * 4096, "pooled"),
        (4096, 2500, 8 * 4096, "fused"),
    ):
        lines, found = run(capsys, *flags, str(context), "--distinct", str(distinct))
        assert found["measured"]["slots"] == slots
        assert f"2,3 by {way} (--strategy auto, cpu" in lines[1]


DTYPES = {"fp32": torch.float32, "bf16": BF16, "fp16": torch.float16}
HEADS = {"MHA": (4, 4, 32), "GQA": (8, 2, 16), "MQA of 20": (20, 1, 8)}


@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("way", ["cached", "gather", "fused", "pooled"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_temporaries_of_an_attention_layer(dtype, way, heads, batch, monkeypatch):
    """By its largest tensors, within an eighth of what is allocated."""
    monkeypatch.setattr(one_query, "PIECE", 2**15)  # several pieces
    (N, H, D), T, V, strategy = heads, 700, 640, "auto" if way == "cached" else way
    axes = preset("paper/bov") | {"bov_layers": "none" if way == "cached" else "0", "window_pattern": "L"}
    sizes = bov_memory.sizes_of(GPTConfig(1024, V, 1, N, H, N * D, **axes))
    table = placement.OnDevice(torch.nn.Embedding(V, H * D, dtype=torch.float32 if dtype == torch.float16 else dtype))
    q, k = torch.zeros(batch, 1, N, D, dtype=dtype), torch.zeros(batch, H, T, D, dtype=dtype).transpose(1, 2)
    for window, distinct in ((1024, 30), (1024, 600), (128, 600)):
        history = decode.History(batch, T, "cpu", strategy)
        history.append((torch.arange(batch * T) % distinct).view(batch, T))
        options = dict(coeff=None, window=window, strategy=strategy, dense=flash_attn_func)
        if way == "pooled":  # pool and bags are kept
            decode.attend(q, k, table, history, **options)
        with torch.inference_mode(), meter("cpu") as seen:
            if way == "cached":
                flash_attn_func(q, k, k, causal=True, window_size=(window, 0))
            else:
                decode.attend(q, k, table, history, **options)
        use = Decode(batch, T, dtype, distinct, strategy=strategy)
        formula = memory.attention_temporaries(replace(sizes, windows=(window,)), use, 0)
        assert formula == pytest.approx(seen.peak, rel=0.125)


def test_gather_makes_the_values_of_all_positions_pooled_nothing_like_it(capsys):
    flags = [*TINY, *"--context 2000 --max-seq-len 2048 --window-pattern L --distinct 20 --strategy".split()]
    gather, pooled, fused = (run(capsys, *flags, name)[1] for name in ("gather", "pooled", "fused"))
    values = 2000 * 32 * 4
    for side in ("formula", "measured"):
        assert gather[side]["temporaries"] >= values
        assert max(pooled[side]["temporaries"], fused[side]["temporaries"]) < 0.6 * values


def test_measuring_finds_what_the_formula_leaves_out(monkeypatch, capsys):
    """A cache that also keeps something it does not name is caught: it lands in `pool`."""

    class Hoarder(memory_meter.KVCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.hoard = torch.zeros(1000)

    monkeypatch.setattr(memory_meter, "KVCache", Hoarder)
    found = run(capsys, *TINY, "--context", "200")[1]
    assert found["measured"]["pool"] == found["formula"]["pool"] + 4000
