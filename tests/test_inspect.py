"""What bov_inspect finds: mixtures against the heads' own outputs, rows, movement, and the command around them."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models import build, legal_points, randomise_
from nanochat import checkpoint_manager as cm
from nanochat import inspect_bank as bank
from nanochat.gpt import config_to_dict
from nanochat.inspect_plots import label
from nanochat.tokenizer import SPECIAL_TOKENS, RustBPETokenizer
from nanochat.train import fresh_model
from scripts import bov_export, bov_inspect
from tiny import make_corpus

BOV = {"bov_layers": "last:1/2", "trunk": "plain", "ve_layers": "none"}
IDS = [7, 3, 3, 9, 7, 1, 3, 20, 9, 9, 41, 5]  # 8 distinct tokens

# ---------------------------------------------------------------------------- mixtures

MODELS = {
    "scalar": {},
    "head": {"bov_coeff": "head"},
    "fixed": {"bov_coeff": "fixed"},
    "shared": {"bov_shared": True},
    "shared-head": {"bov_shared": True, "bov_coeff": "head"},
    "one-kv-head": {"n_kv_head": 1, "bov_coeff": "head"},
    "no-gqa": {"n_kv_head": 4, "bov_coeff": "head"},
    "full-trunk": {"trunk": "full", "ve_layers": "every:2"},
}


@pytest.mark.parametrize("window", [-1, 3, 16], ids="window {}".format)
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_mixtures_add_up_to_one_and_to_what_the_heads_gave(fields, window):
    model = build(**(BOV | fields))
    model.window_sizes = [(window, 0)] * 4
    found = bank.mixtures(model, IDS)
    assert [m.layer for m in found] == [2, 3]
    for m in found:
        assert m.tokens == [7, 3, 9, 1, 20, 41, 5] and m.weights.shape == (4, 7) and m.window == window
        torch.testing.assert_close(m.weights.sum(1), torch.ones(4))
        torch.testing.assert_close(m.shares.sum(1), torch.ones(4), atol=1e-4, rtol=0)
        torch.testing.assert_close(m.attribution, m.output, atol=1e-5, rtol=0)
        assert m.exact and m.output.abs().max() > 0.01
        seen = torch.tensor([token in IDS[-window - 1 :] if window >= 0 else True for token in m.tokens])
        assert torch.equal(m.weights > 0, seen.expand(4, 7))


@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("name", ["scalar", "head", "one-kv-head", "no-gqa"])
def test_a_weight_is_the_slope_of_a_heads_output_by_the_row_of_its_token(name, window):
    """Independent of any softmax here: the output is linear in the rows of its own layer."""
    model = build(**(BOV | MODELS[name]))
    model.window_sizes = [(window, 0)] * 4
    before = bank.mixtures(model, IDS)[1]
    attn = model.transformer.h[3].attn
    for u, token in enumerate(before.tokens):
        with torch.no_grad():
            attn.bank.table.weight[token] += 1
        slope = bank.mixtures(model, IDS)[1].output - before.output
        with torch.no_grad():
            attn.bank.table.weight[token] -= 1
        gamma = before.coefficient.repeat_interleave(4 // attn.n_kv_head)
        expected = (gamma * before.weights[:, u])[:, None].expand_as(slope)
        torch.testing.assert_close(slope, expected, atol=1e-5, rtol=1e-4)


def test_looking_changes_nothing():
    model, ids = build(**BOV), torch.tensor([IDS])
    logits, state = model(ids), {key: value.clone() for key, value in model.state_dict().items()}
    bank.mixtures(model, IDS), bank.value_norms(model, [IDS])
    assert torch.equal(model(ids), logits)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_hooks_are_gone_after_a_forward_that_failed():
    model = build(**BOV)
    for look in (bank.mixtures, lambda model, ids: bank.value_norms(model, [ids])):
        with pytest.raises(ValueError, match="past the rotary table"):
            look(model, IDS * 20)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_check_fails_where_the_output_is_another():
    m = bank.mixtures(build(**BOV), IDS)[0]
    assert m.exact and not dataclasses.replace(m, output=m.output + 0.01).exact


@pytest.mark.parametrize(
    "fields",
    [{"bov_combine": "add"}, {"bov_coeff": "gate"}, {"bov_source": "x0"}, {"bov_source": "first"}],
    ids=lambda fields: "-".join(fields.values()),
)
def test_no_mixture_is_claimed_where_values_are_no_multiples_of_rows(fields):
    with pytest.raises(ValueError, match="bov_source=table, bov_combine=replace"):
        bank.mixtures(build(**(BOV | fields)), IDS)


def test_a_single_token_reads_itself():
    (m, _) = bank.mixtures(build(**BOV), [7])
    assert m.weights.tolist() == [[1.0]] * 4 and m.exact


# ---------------------------------------------------------------------------- norms


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_values_of_text_have_the_lengths_of_the_rows_of_its_tokens(fields):
    model = build(**(BOV | fields))
    over_text = bank.value_norms(model, [IDS[:5], IDS[5:]])
    for i in (2, 3):
        torch.testing.assert_close(over_text[i], bank.row_norms(model, i)[IDS])
    assert bank.row_norms(model, 1) is None


def test_values_of_other_layers_are_measured_from_the_residual():
    model = build(**BOV, smear=False)
    norms = bank.value_norms(model, [IDS])[0]
    x = torch.nn.functional.rms_norm(model.transformer.wte.weight[IDS], (32,))
    x = torch.nn.functional.rms_norm(x, (32,)) @ model.transformer.h[0].attn.c_v.weight.T
    torch.testing.assert_close(norms, x.norm(dim=1))


@pytest.mark.parametrize("point", legal_points(), ids=lambda p: "-".join(map(str, p)))
def test_value_norms_at_every_point_of_the_axes(point):
    fields = dict(zip(("bov_source", "bov_combine", "bov_coeff", "bov_shared"), point, strict=True))
    norms = bank.value_norms(build(**(BOV | fields)), [IDS])
    assert [len(n) for n in norms] == [len(IDS)] * 4 and all((n > 0).all() for n in norms)


# ---------------------------------------------------------------------------- rows


def test_tables_are_listed_once_with_all_layers_that_read_them():
    both = bank.tables(build(**BOV, vocab_size=51))
    assert [(t.key, t.layers) for t in both] == [("value_embeds.2.weight", (2,)), ("value_embeds.3.weight", (3,))]
    assert both[0].rows.shape == (51, 16)  # without the padding
    (shared,) = bank.tables(build(**BOV, bov_shared=True))
    assert shared.layers == (2, 3) and shared.key == "value_embeds.2.weight"
    assert bank.tables(build(**BOV, bov_source="x0")) == []


@given(st.integers(0, 9), st.integers(1, 30))
def test_nearest_leaves_the_token_itself_out_and_goes_down(token, k):
    rows = torch.randn(10, 6, generator=torch.Generator().manual_seed(token))
    found = bank.nearest(rows, token, k)
    assert len(found) == min(k, 9) and token not in dict(found)
    assert [c for _, c in found] == sorted((c for _, c in found), reverse=True)


def test_the_nearest_row_is_the_one_in_the_same_direction():
    rows = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    rows[13] = 2.5 * rows[4]
    (best,) = bank.nearest(rows, 4, 1)
    assert best == (13, pytest.approx(1.0))


SPECIALS = [46, 47, 48]  # stand for tokens that no text holds


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_an_untrained_model_has_not_moved(fields):
    model = build(seed=5, randomise=False, **(BOV | fields))
    starts, agreement = bank.starting_rows(model, 5, torch.float32, SPECIALS)
    assert agreement == pytest.approx(1) and len(starts) == len(bank.tables(model))
    for table, start in zip(bank.tables(model), starts, strict=True):
        assert not bank.movement(table.rows, start).any()


def test_movement_is_the_distance_in_lengths_of_the_start():
    model = build(seed=5, randomise=False, **BOV)
    with torch.no_grad():
        model.value_embeds["3"].weight[7] *= -0.5
        model.value_embeds["3"].weight[SPECIALS] *= 0.9  # weight decay alone
    starts, _ = bank.starting_rows(model, 5, torch.float32, SPECIALS)
    moved = bank.movement(bank.tables(model)[1].rows, starts[1])
    assert moved[7] == pytest.approx(1.5) and moved[46] == pytest.approx(0.1) and not moved[8:46].any()


def test_a_start_is_rounded_as_the_run_stored_it():
    model = build(seed=5, randomise=False, **BOV)
    with torch.no_grad():
        for table in model.value_embeds.values():
            table.weight.copy_(table.weight.bfloat16())
    starts, _ = bank.starting_rows(model, 5, torch.bfloat16, SPECIALS)
    assert not bank.movement(bank.tables(model)[0].rows, starts[0]).any()


def test_rows_that_decay_has_turned_in_bf16_are_known_again():
    model = build(seed=5, randomise=False, **BOV)
    with torch.no_grad():
        for table in model.value_embeds.values():
            rows = table.weight.bfloat16()
            for _ in range(2000):  # of a rate times decay of 0.0035 the smaller elements of a binade see nothing
                rows = (rows.float() * (1 - 0.0035)).bfloat16()
            table.weight.copy_(rows)
    _, agreement = bank.starting_rows(model, 5, torch.bfloat16, SPECIALS)
    assert 0.95 < agreement < 0.99


def test_another_seed_is_found_out_and_the_random_state_stays():
    model = build(seed=5, randomise=False, **BOV)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="seed 6 does not give the weights"):
        bank.starting_rows(model, 6, torch.float32, SPECIALS)
    assert torch.equal(torch.get_rng_state(), state)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60))
def test_every_row_is_in_one_bin_and_those_never_seen_in_their_own(counts):
    counts = torch.tensor(counts)
    moved = torch.arange(len(counts)).float()
    bins = bank.by_frequency(moved, counts)
    assert sum(b["count"] for b in bins) == len(counts)
    for b in bins:
        inside = moved[(counts >= b["low"]) & (counts <= b["high"])]
        assert len(inside) == b["count"] and b["mean"] == pytest.approx(inside.mean().item())
        assert b["median"] == pytest.approx(inside.double().quantile(0.5).item())
        assert b["high"] == max(0, 2 * b["low"] - 1)
    assert (0 in counts) == (bins[0]["low"] == 0)


# ---------------------------------------------------------------------------- the command

TEXT = [f"war and peace {i}: gold is 你好 $ {i} war" for i in range(60)]


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory):
    """Data, a tokenizer, and checkpoints: trained (as if), untrained, baseline, gated, x0, and of an unknown seed."""
    folder = make_corpus(tmp_path_factory.mktemp("base"), TEXT[:50], TEXT[50:], merges=20, rows=25)
    models = {
        "moved": {}, "start": {}, "baseline": {"bov_layers": "none"}, "gated": {"bov_coeff": "gate"},
        "x0": {"bov_source": "x0"}, "head": {"bov_coeff": "head"}, "foreign": {}, "otherseed": {},
        "parted": {},
    }  # fmt: skip
    for tag, fields in models.items():
        model = build(randomise=False, vocab_size=256 + 9 + 20, **(BOV | fields))
        model = fresh_model(model.config, torch.device("cpu"), 3)
        if tag != "start":
            randomise_(model)
            with torch.no_grad():
                for table in model.value_embeds.values():
                    table.weight[:100] += 0.3 * torch.randn(100, 16)
        meta = {"step": 2, "model_config": config_to_dict(model.config)}
        meta |= {"user_config": {} if tag == "foreign" else {"seed": 4 if tag == "otherseed" else 3}}
        if tag == "parted":
            meta["user_config"]["train_part"] = 0.5
        cm.save_checkpoint(folder / "base_checkpoints" / tag, 2, model.state_dict(), None, meta)
    return folder


@pytest.fixture
def here(base_dir, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base_dir))
    return base_dir


def inspect(tmp_path, *options):
    """Run the command; what its JSON holds."""
    bov_inspect.main([*options, "--out", str(tmp_path / "out"), "--json", str(tmp_path / "found.json")])
    return json.loads((tmp_path / "found.json").read_text())


FIELDS = {
    "name", "step", "model_config", "counted", "norm_text", "layers", "movement", "words", "prompt", "pictures",
}  # fmt: skip
SPREAD = {"count", "mean", "q25", "median", "q75"}


def test_json_holds_everything_and_the_screen_and_file_say_the_same(here, tmp_path, capsys):
    found = inspect(tmp_path, "moved", "--words", "war, zzz", "--prompt", "war and peace: war", "--top", "3")
    assert set(found) == FIELDS and found["name"] == "moved" and found["step"] == 2
    assert [layer["layer"] for layer in found["layers"]] == [0, 1, 2, 3]
    plain, table = found["layers"][0], found["layers"][2]
    assert plain["row_norms"] is None and set(plain["text_norms"]) == SPREAD and plain["coefficients"] == {}
    assert set(table["row_norms"]) == SPREAD and list(table["coefficients"]) == ["gamma_v"]
    assert [t["table"] for t in found["movement"]["tables"]] == ["value_embeds.2.weight", "value_embeds.3.weight"]
    for t in found["movement"]["tables"]:
        assert set(t["rows"]) == SPREAD and sum(b["count"] for b in t["bins"]) == t["rows"]["count"]
    assert found["counted"] == {"text": "training text", "tokens": found["counted"]["tokens"], "cut": False}
    prompt = found["prompt"]
    assert [layer["layer"] for layer in prompt["layers"]] == [2, 3]
    for layer in prompt["layers"]:
        assert layer["exact"] and layer["difference"] < 1e-5
        for weights in layer["weights"]:
            assert len(weights) == len(prompt["distinct"]) and sum(weights) == pytest.approx(1, abs=1e-5)
    assert sum(token["count"] for token in prompt["distinct"]) == len(prompt["tokens"])
    shown = capsys.readouterr().out
    assert shown.startswith((tmp_path / "out" / "inspect.txt").read_text())
    assert shown.count("rounding (up to") == 2 and "times seen" in shown and "(cosine 1.0000)" in shown


def test_pictures_are_png_files(here, tmp_path, capsys):
    found = inspect(tmp_path, "head", "--prompt", " ".join(TEXT)[:120])
    assert found["pictures"] == ["movement.png", "mixture_layer2.png", "mixture_layer3.png"]
    for name in found["pictures"]:
        content = (tmp_path / "out" / name).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 5000
        assert f"picture: {tmp_path / 'out' / name}" in capsys.readouterr().out or name != "movement.png"


def test_words_of_one_token_and_of_several(here, tmp_path, capsys):
    one, several, special = inspect(tmp_path, "moved", "--words", "war, zzz,<|bos|>", "--top", "4")["words"]
    assert [t["text"] for t in one["tokens"]] == [" war"] and one["tokens"][0]["count"] == 50
    assert "".join(t["text"] for t in several["tokens"]) == " zzz" and len(several["tokens"]) > 1
    assert [t["text"] for t in special["tokens"]] == ["<|bos|>"] and special["tokens"][0]["count"] == 50
    for word in (one, several, special):
        for token in word["tokens"]:
            assert [near["layers"] for near in token["nearest"]] == [[2], [3]]
            for near in token["nearest"]:
                assert len(near["rows"]) == 4 and token["id"] not in [row["id"] for row in near["rows"]]
    shown = capsys.readouterr().out
    assert f"zzz is {len(several['tokens'])} tokens" in shown and "war is" not in shown


def test_an_untrained_checkpoint_has_not_moved(here, tmp_path):
    found = inspect(tmp_path, "start")
    for table in found["movement"]["tables"]:
        assert table["rows"]["mean"] == 0 and table["unmoved"] == table["rows"]["count"]


@pytest.mark.parametrize(
    ("tag", "why"), [("foreign", "seed of the initial weights is not recorded"), ("otherseed", "seed 4 does not give")]
)
def test_movement_is_left_out_where_the_start_is_unknown(here, tmp_path, capsys, tag, why):
    found = inspect(tmp_path, tag)
    assert why in found["movement"]["missing"] and found["pictures"] == []
    assert f"not measured: {found['movement']['missing']}" in capsys.readouterr().out


def test_text_of_ones_own_is_counted_and_measured(here, tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("gold gold gold", encoding="utf-8")
    found = inspect(tmp_path, "moved", "--text", str(file), "--words", "gold,peace")
    tokenizer = RustBPETokenizer.from_directory(here / "tokenizer")
    ids = tokenizer.encode("gold gold gold", prepend="<|bos|>")
    assert found["counted"] == {"text": "own.txt", "tokens": len(ids), "cut": False}
    assert found["norm_text"] == {"text": "own.txt", "tokens": len(ids)}
    assert found["movement"]["tables"][0]["bins"][0]["low"] == 0
    gold, peace = found["words"]
    assert gold["tokens"][0]["count"] == ids.count(gold["tokens"][0]["id"]) > 0 and peace["tokens"][0]["count"] == 0


def test_without_data_and_text_the_rest_is_there(here, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nanochat.dataset.get_data_dir", lambda: str(tmp_path / "nowhere"))
    found = inspect(tmp_path, "moved", "--words", "war")
    assert "--text FILE" in found["counted"]["missing"] and found["norm_text"] is None
    assert found["movement"]["tables"][0]["bins"] is None and found["movement"]["tables"][0]["rows"]["mean"] > 0
    assert found["layers"][2]["row_norms"] and found["layers"][2]["text_norms"] is None
    assert found["words"][0]["tokens"][0]["count"] is None and found["pictures"] == []


def test_only_the_text_that_the_run_read_is_counted(here, tmp_path):
    counted = inspect(tmp_path, "parted")["counted"]
    rows = RustBPETokenizer.from_directory(here / "tokenizer").encode(TEXT[:25], prepend="<|bos|>")
    assert counted["tokens"] == sum(map(len, rows)) and "0.5 of the training text" in counted["text"]


def test_counting_ends_at_the_limit(here):
    tokenizer = RustBPETokenizer.from_directory(here / "tokenizer")
    parts = [["war", "peace"], ["gold"], ["gold"]]
    all_of_it, total, cut = bank.count_tokens(parts, tokenizer, -1)
    assert not cut and total == all_of_it.sum() and all_of_it[tokenizer.get_bos_token_id()] == 4
    some, fewer, cut = bank.count_tokens(parts, tokenizer, 3)
    assert cut and 3 <= fewer < total and some[tokenizer.get_bos_token_id()] == 2


@pytest.mark.parametrize("fold", [[], ["--fold-gamma"]], ids=["as it is", "folded"])
def test_an_export_reads_as_the_checkpoint_does(here, tmp_path, fold):
    bov_export.main(["head", "--dtype", "float32", *fold, "--out", str(tmp_path / "export")])
    options = ("--prompt", "war and peace", "--words", "war")
    own = inspect(tmp_path, "head", *options)
    exported = inspect(tmp_path, "--export", str(tmp_path / "export"), *options)
    assert exported["name"] == "export" and "not recorded" in exported["movement"]["missing"]
    for a, b in zip(own["prompt"]["layers"], exported["prompt"]["layers"], strict=True):
        assert b["exact"]
        torch.testing.assert_close(torch.tensor(a["weights"]), torch.tensor(b["weights"]))
    for a, b in zip(own["layers"], exported["layers"], strict=True):
        assert a["coefficients"] == b["coefficients"] and b["folded"] == bool(fold and b["coefficients"])
        assert a["row_norms"] == pytest.approx(b["row_norms"])


@pytest.mark.parametrize("tag", ["gated", "x0"])
def test_banks_of_other_kinds_are_shown_as_far_as_they_go(here, tmp_path, tag):
    found = inspect(tmp_path, tag)
    assert all(layer["row_norms"] is None and layer["text_norms"] for layer in found["layers"])
    assert ("missing" in found["movement"]) == (tag == "x0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["none"], "no model 'none' .* there are: .*moved"),
        (["moved", "--step", "9"], "complete steps: 2"),
        (["baseline"], "baseline has no bank layer"),
        (["moved", "--prompt", ""], "--prompt is empty"),
        (["moved", "--prompt", "x" * 999], "past the rotary table"),
        (["gated", "--prompt", "war"], "no head of this model is a mixture"),
        (["x0", "--words", "war"], "--words: this model has no table"),
        (["moved", "--words", "war,,gold"], "an empty word"),
        (["moved", "--words", "<|nobody|>"], r"no special token '<\|nobody\|>'"),
        (["moved", "--text", "nowhere.txt"], "nowhere.txt"),
        (["moved", "--top", "0"], "--top 0"),
        (["moved", "--count-tokens", "0"], "--count-tokens 0"),
        (["moved", "--export", "x"], "leave out CHECKPOINT"),
        (["--export", "nowhere"], "nowhere"),
    ],
    ids=lambda value: "_".join(value)[:30] if isinstance(value, list) else "",
)
def test_refuses(here, tmp_path, options, message):
    with pytest.raises((ValueError, OSError), match=message):
        bov_inspect.main([*options, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_texts_that_are_none_are_refused(here, tmp_path):
    for content, message in ((b"\xff\xfe\x00", "is not UTF-8 text"), (b" \n", "is empty")):
        (tmp_path / "bad.txt").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            bov_inspect.main(["moved", "--text", str(tmp_path / "bad.txt"), "--out", str(tmp_path / "out")])
    with pytest.raises(ValueError, match="is a file"):
        bov_inspect.main(["moved", "--out", str(tmp_path / "bad.txt")])


def test_errors_are_one_line_and_a_status(base_dir):
    command = [sys.executable, "-m", "scripts.bov_inspect", "none"]
    environment = os.environ | {"NANOCHAT_BASE_DIR": str(base_dir)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parent.parent)
    assert done.returncode == 1 and done.stderr.startswith("bov_inspect: no model 'none'"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_error(base_dir, tmp_path):
    files = ["--out", str(tmp_path / "out"), "--json", str(tmp_path / "found.json")]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bov_inspect", "moved", *files], stdout=write, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"NANOCHAT_BASE_DIR": str(base_dir)}, cwd=Path(__file__).parent.parent, check=False,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 0 and "Broken" not in done.stderr and (tmp_path / "found.json").exists()


# ---------------------------------------------------------------------------- words on the screen and in pictures


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" war", "␣war"), ("\n\n", "\\n\\n"), ("$x$", r"\$x\$"), ("你", r"\u4f60"), ("é", "é"), ("\x00", r"\u0000")],
    ids=["space", "lines", "formula", "no glyph", "accent", "control"],
)
def test_labels_of_pictures(text, shown):
    assert label(text) == shown


def test_bytes_that_are_no_character_and_line_ends_are_shown(here):
    tokenizer = RustBPETokenizer.from_directory(here / "tokenizer")
    first = tokenizer.enc.encode_single_token(b"\xe4")
    assert bov_inspect.quoted(bov_inspect.token_text(tokenizer, first)) == r"'\xe4'"
    assert bov_inspect.quoted("a\n\t\x00") == r"'a\n\t\u0000'"
    assert [bov_inspect.token_text(tokenizer, tokenizer.encode_special(s)) for s in SPECIAL_TOKENS] == SPECIAL_TOKENS
