"""Exported models: equal logits, folded coefficients, where the tables lie, and what a damaged folder says."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import build
from nanochat.bov.placement import OnDevice, OnDisk, OnHost, SafetensorsFile
from nanochat.checkpoint_manager import save_checkpoint
from nanochat.common import COMPUTE_DTYPE, seal
from nanochat.engine import KVCache
from nanochat.export import VERSION, export_model, load_exported
from nanochat.gpt import config_to_dict
from nanochat.tokenizer import RustBPETokenizer, save_token_bytes
from scripts.bov_export import main

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VOCAB = 280
IDS = torch.arange(12).view(1, 12) * 37 % VOCAB
BANK = {"bov_layers": "2,3"}
POINTS = {
    "upstream": {},
    "scalar": BANK,
    "scalar-plain": BANK | {"trunk": "plain", "smear": False, "ve_layers": "none"},
    "head": BANK | {"bov_coeff": "head"},
    "fixed": BANK | {"bov_coeff": "fixed"},
    "gate": BANK | {"bov_coeff": "gate"},
    "shared": BANK | {"bov_shared": True},
    "add": BANK | {"bov_combine": "add"},
    "add-head": BANK | {"bov_combine": "add", "bov_coeff": "head"},
    "first": BANK | {"bov_source": "first"},
    "x0": BANK | {"bov_source": "x0"},
    "x0-add": BANK | {"bov_source": "x0", "bov_combine": "add"},
    "residual": BANK | {"bov_source": "residual"},
    "mlp": BANK | {"mlp_hidden": 40},
}
FOLDED = {"scalar", "scalar-plain", "head", "mlp"}
PLACED = FOLDED | {"fixed", "shared"}


@pytest.fixture(scope="module")
def tokenizer():
    text = "the bank of values holds a row for every token, and a row for the bank " * 3
    return RustBPETokenizer.train_from_iterator([text], VOCAB)


@pytest.fixture(autouse=True)
def commit(monkeypatch):
    monkeypatch.setattr("nanochat.export.git_commit", lambda: "abc+")  # asking git takes longer than an export


def make(seed=0, **axes):
    """A model of the tokenizer's size, in which everything matters and each layer has its own coefficients."""
    return build(seed, vocab_size=VOCAB, **axes).eval()


def export(model, tokenizer, out, fold_gamma=False, dtype=torch.float32, **more):
    return export_model(model, tokenizer, out, fold_gamma=fold_gamma, dtype=dtype, **more)


@torch.no_grad()
def logits(model):
    return model(IDS)


# ---------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", POINTS)
def test_unfolded_round_trip_is_exact(tmp_path, tokenizer, name):
    model = make(**POINTS[name])
    facts = export(model, tokenizer, tmp_path / "out", step=7, source="base/d4")
    loaded, own, config = load_exported(tmp_path / "out", "cpu")
    assert torch.equal(logits(loaded), logits(model)) and not loaded.training
    assert loaded.config == model.config and own.sha256() == tokenizer.sha256()
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys() == load_file(tmp_path / "out/model.safetensors").keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert config == json.loads(json.dumps(facts)) and (config["step"], config["source"]) == (7, "base/d4")
    assert (config["padded_vocab_size"], config["dtype"], config["commit"]) == (320, "float32", "abc+")
    assert not config["folded"]


@pytest.mark.parametrize("name", sorted(POINTS.keys() - {"shared"}))
def test_folded_model_has_the_same_logits(tmp_path, tokenizer, name):
    model = make(**POINTS[name])
    facts = export(model, tokenizer, tmp_path / "out", fold_gamma=True)
    loaded, _, _ = load_exported(tmp_path / "out", "cpu")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=0)
    coefficients = [key for key in model.state_dict() if key.endswith(("gamma_v", "lambda_v"))]
    if name in FOLDED:
        assert loaded.config.bov_coeff == "fixed" and not [k for k in loaded.state_dict() if k in coefficients]
        assert facts["folded"] == {
            key.split(".")[2] + "." + key.split(".")[-1]: model.state_dict()[key].tolist() for key in coefficients
        }
        assert len(facts["folded"]) == 2
    else:
        assert loaded.config == model.config and not facts["folded"]
        assert torch.equal(logits(loaded), logits(model))


def test_folded_rows_are_products_in_fp32_rounded_once(tmp_path, tokenizer):
    model = make(**POINTS["head"])
    for block in model.transformer.h[2:]:
        block.attn.lambda_v.data.copy_(torch.tensor([-11.3, 0.07]))
    export(model, tokenizer, tmp_path, fold_gamma=True, dtype=torch.bfloat16)
    stored, rows = load_file(tmp_path / "model.safetensors"), model.value_embeds["3"].weight
    expected = torch.cat((rows[:, :8] * -11.3, rows[:, 8:] * 0.07), dim=1).bfloat16()
    assert torch.equal(stored["value_embeds.3.weight"], expected)
    assert torch.equal(stored["value_embeds.1.weight"], model.value_embeds["1"].weight.bfloat16())  # gated: as it was


def test_a_shared_table_takes_one_coefficient_only(tmp_path, tokenizer):
    model = make(**POINTS["shared"])
    with pytest.raises(ValueError, match="--fold-gamma: layers 2, 3 share one table .* different gamma_v"):
        export(model, tokenizer, tmp_path / "out", fold_gamma=True)
    assert not (tmp_path / "out").exists()
    for block in model.transformer.h[2:]:
        block.attn.gamma_v.data.fill_(1.7)
    assert len(export(model, tokenizer, tmp_path / "out", fold_gamma=True)["folded"]) == 2
    loaded, _, _ = load_exported(tmp_path / "out", "cpu")
    assert list(loaded.value_embeds) == list(model.value_embeds) and loaded.config.bov_shared
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_matrices_stay_in_the_stored_dtype_and_vectors_in_theirs(tmp_path, tokenizer, dtype, capsys):
    model = make(**BANK)
    export(model, tokenizer, tmp_path, dtype=dtype)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values() if tensor.ndim > 1} == {dtype}
    loaded = load_exported(tmp_path, "cpu")[0].state_dict()
    assert f"cast from {dtype} to {COMPUTE_DTYPE}" in capsys.readouterr().err
    for key, tensor in model.state_dict().items():
        table = "wte" in key or "value_embeds" in key
        assert torch.equal(loaded[key].to(dtype), tensor.to(dtype))
        assert loaded[key].dtype == (COMPUTE_DTYPE if table else dtype if tensor.ndim > 1 else torch.float32), key


BF16 = """
import sys, torch
from models import build
from nanochat.export import export_model, load_exported
from nanochat.tokenizer import RustBPETokenizer
tokenizer = RustBPETokenizer.from_directory(sys.argv[1])
model = build(vocab_size=tokenizer.get_vocab_size(), bov_layers="2,3").eval()
ids = torch.arange(12).view(1, 12) * 37 % 280
export_model(model, tokenizer, sys.argv[2], fold_gamma=False, dtype=torch.bfloat16)
with torch.inference_mode():
    for placement in ("device", "host", "mmap"):
        loaded = load_exported(sys.argv[2], "cpu", placement=placement)[0]
        assert loaded.lm_head.weight.dtype == torch.bfloat16 != model.lm_head.weight.dtype
        assert torch.equal(loaded(ids), model(ids)), placement
"""


def test_a_bf16_export_changes_nothing_where_bf16_is_computed(tmp_path, tokenizer):
    tokenizer.save(tmp_path / "tokenizer")
    environment = os.environ | {"NANOCHAT_DTYPE": "bfloat16", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/tests"}
    command = [sys.executable, "-c", BF16, str(tmp_path / "tokenizer"), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, timeout=120)
    assert done.returncode == 0


# ---------------------------------------------------------------------------- placement


@pytest.mark.parametrize("name", sorted(PLACED))
@pytest.mark.parametrize("placement", ["host", "mmap"])
def test_placed_tables_compute_the_same_bits(tmp_path, tokenizer, placement, name):
    model = make(**POINTS[name])
    export(model, tokenizer, tmp_path)
    loaded, _, _ = load_exported(tmp_path, "cpu", placement=placement)
    assert torch.equal(logits(loaded), logits(model))
    for block in loaded.transformer.h:
        bank = block.attn.bank
        if bank.spec.table is None or bank.spec.caches_value:
            assert bank.rows is None or type(bank.rows) is OnDevice  # upstream's value embeddings stay
        else:
            assert type(bank.rows) is (OnHost if placement == "host" else OnDisk)
            assert bank.table.weight.is_meta == (placement == "mmap") and bank.rows.weight is None
    assert len({id(block.attn.bank.rows) for block in loaded.transformer.h[2:]}) == (1 if name == "shared" else 2)


@pytest.mark.parametrize("strategy", ["gather", "fused", "pooled"])
def test_tables_stored_in_another_dtype_decode_to_the_same_bits(tmp_path, tokenizer, strategy):
    export(make(**BANK), tokenizer, tmp_path, dtype=torch.bfloat16)
    found = []
    for placement in ("device", "host", "mmap"):
        model, _, _ = load_exported(tmp_path, "cpu", placement=placement)
        options = dict(value_layers=model.value_layers, strategy=strategy)
        cache = KVCache(1, 2, IDS.size(1), 8, 4, "cpu", COMPUTE_DTYPE, **options)
        with torch.inference_mode():
            found.append(torch.cat([model(part, kv_cache=cache) for part in IDS.split([7, 1, 1, 1, 1, 1], dim=1)], 1))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_mmap_reads_no_row_of_a_table_while_loading(tmp_path, tokenizer, monkeypatch):
    export(make(**BANK), tokenizer, tmp_path)
    file, read, preadv = SafetensorsFile(tmp_path / "model.safetensors"), [], os.preadv

    def spy(fd, views, start):
        read.append((start, start + len(views[0])))
        return preadv(fd, views, start)

    monkeypatch.setattr(os, "preadv", spy)
    loaded, _, _ = load_exported(tmp_path, "cpu", placement="mmap")
    tables = [file.entry(f"value_embeds.{i}.weight") for i in (2, 3)]
    assert not [1 for table in tables for a, b in read if a < table.start + table.nbytes and b > table.start]
    read.clear()
    logits(loaded)
    assert sum(b - a for a, b in read) == 2 * IDS.unique().numel() * 16 * 4


@pytest.mark.parametrize(
    ("axes", "placement", "message"),
    [(BANK, "gpu", "--bov-placement 'gpu'"), ({}, "mmap", "no layer of this model")],
    ids=["unknown", "no-bank"],
)
def test_senseless_placements_are_refused_before_weights_are_read(tmp_path, tokenizer, axes, placement, message):
    export(make(**axes), tokenizer, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        load_exported(tmp_path, "cpu", placement=placement)


def test_what_is_on_disk_only_cannot_be_exported(tmp_path, tokenizer):
    export(make(**BANK), tokenizer, tmp_path / "a")
    loaded, _, _ = load_exported(tmp_path / "a", "cpu", placement="mmap")
    with pytest.raises(ValueError, match=r"value_embeds\.2\.weight is not in memory"):
        export(loaded, tokenizer, tmp_path / "b")


# ---------------------------------------------------------------------------- the folder


def test_an_earlier_export_is_replaced_whole(tmp_path, tokenizer):
    out = tmp_path / "out"
    export(make(**BANK), tokenizer, out)
    (out / ".config.json.abc.tmp").touch()  # what a kill leaves behind
    second = make(seed=1)
    export(second, tokenizer, out)
    assert torch.equal(logits(load_exported(out, "cpu")[0]), logits(second))
    assert sorted(os.listdir(out / "tokenizer")) == ["token_bytes.pt", "tokenizer.json", "tokenizer.tiktoken"]


def foreign(out, kind):
    """A folder `out` that is not ours to write to."""
    out.mkdir()
    if kind == "notes":
        (out / "notes.txt").touch()
    elif kind == "config":
        (out / "config.json").write_text('{"model_type": "llama"}')
    elif kind == "tokenizer":
        (out / "tokenizer").mkdir()
    else:
        save_file({"w": torch.ones(2)}, out / "model.safetensors")


@pytest.mark.parametrize("kind", ["notes", "config", "tokenizer", "weights"])
def test_other_peoples_files_are_left_alone(tmp_path, tokenizer, kind):
    foreign(tmp_path / "out", kind)
    before = {path: path.is_dir() or path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match="--out .*out holds .*name a new folder"):
        export(make(), tokenizer, tmp_path / "out")
    assert {path: path.is_dir() or path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_file_is_no_folder(tmp_path, tokenizer):
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match="out is a file"):
        export(make(), tokenizer, tmp_path / "out")


@pytest.mark.parametrize("killed_in", ["weights", "tokenizer"])
def test_a_kill_while_exporting_leaves_no_folder_that_loads(tmp_path, tokenizer, monkeypatch, killed_in):
    export(make(), tokenizer, tmp_path)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    name = {"weights": "save_file", "tokenizer": "save_token_bytes"}[killed_in]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"nanochat.export.{name}", killed)
        export(make(seed=1), tokenizer, tmp_path)
    with pytest.raises(ValueError, match=r"config\.json is missing: .* is no complete export"):
        load_exported(tmp_path, "cpu")
    export(make(seed=1), tokenizer, tmp_path)
    load_exported(tmp_path, "cpu")
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        (torch.float16, 1e6, r"lm_head\.weight has numbers .* not finite in float16: use --dtype bf16"),
        (torch.bfloat16, float("nan"), r"lm_head\.weight .* the model is damaged"),
    ],
    ids=["fp16-overflow", "nan"],
)
def test_numbers_that_do_not_fit_are_not_written(tmp_path, tokenizer, dtype, value, message):
    model = make()
    model.lm_head.weight.data[3, 5] = value
    with pytest.raises(ValueError, match=message):
        export(model, tokenizer, tmp_path, dtype=dtype)
    assert not os.listdir(tmp_path)


def test_the_tokenizer_must_be_the_models(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="the tokenizer has 280 tokens, the model 50"):
        export(build(), tokenizer, tmp_path)


# ---------------------------------------------------------------------------- damage


def change_config(folder, **fields):
    """The fields replaced, or left out where they are None, and sealed again."""
    path = folder / "config.json"
    facts = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(seal({name: value for name, value in facts.items() if value is not None})))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def change_weights(folder, change):
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def other_tokenizer(folder, vocab_size, text):
    RustBPETokenizer.train_from_iterator([text * 5], vocab_size).save(folder / "tokenizer")


LETTERS = "abcdefghij klmnopqrst uvwxyz zyxwvutsrq ponmlkjihg fedcba"
DAMAGE = {
    "no-config": (lambda f: (f / "config.json").unlink(), r"config\.json is missing: .* make it again"),
    "config-not-json": (lambda f: (f / "config.json").write_text("{"), r"config\.json is not JSON"),
    "config-list": (lambda f: (f / "config.json").write_text("[]"), r"config\.json is not the config of an export"),
    "other-config": (lambda f: change_config(f, format="other"), r"config\.json is not the config of an export"),
    "future": (
        lambda f: change_config(f, version=VERSION + 1),
        f"format version {VERSION + 1}; this code reads {VERSION}",
    ),
    "no-model-config": (lambda f: change_config(f, model_config=None), r"config\.json lacks model_config"),
    "model-config-list": (lambda f: change_config(f, model_config=[1]), r"config\.json: .*make it again"),
    "unknown-field": (lambda f: change_config(f, model_config={"future": 1}), r"config\.json: .*know: future"),
    "padding": (lambda f: change_config(f, padded_vocab_size=0), "padded_vocab_size 0 is less than vocab_size 280"),
    "no-weights": (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors: no such file"),
    "cut-weights": (lambda f: cut(f / "model.safetensors"), r"model\.safetensors: .* the file is cut off"),
    "no-tokenizer": (lambda f: (f / "tokenizer/tokenizer.json").unlink(), r"tokenizer\.json: no tokenizer there"),
    "a-bit-of-weights": (lambda f: flip(f / "model.safetensors", -5), r"safetensors: \S+ is not what was exported"),
    "a-word-of-config": (
        lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace('"2,3"', '"1,3"')),
        r"config\.json is not what was written",
    ),
    "no-hashes": (lambda f: change_config(f, sha256=None), r"config\.json lacks sha256"),
    "other-hashes": (lambda f: change_config(f, sha256={}), r"safetensors: \S+ is not what was exported"),
    "cut-tokenizer": (lambda f: cut(f / "tokenizer/tokenizer.tiktoken"), "is not the file it was written with"),
    "vocabulary": (lambda f: other_tokenizer(f, 279, LETTERS), "tokenizer has 279 tokens, the model 280"),
    "other-words": (lambda f: other_tokenizer(f, VOCAB, LETTERS), "tokenizer has not the tokens it was exported with"),
    "key-missing": (
        lambda f: change_weights(f, lambda s: s.pop("transformer.h.2.attn.gamma_v")),
        r"transformer\.h\.2\.attn\.gamma_v is missing",
    ),
    "key-unknown": (lambda f: change_weights(f, lambda s: s.update(w=torch.ones(2))), "w is not in the model"),
    "shape": (
        lambda f: change_weights(f, lambda s: s.update({"lm_head.weight": torch.ones(3, 32)})),
        r"lm_head\.weight is \(3, 32\) in the checkpoint and \(320, 32\)",
    ),
    "integers": (
        lambda f: change_weights(f, lambda s: s.update({"lm_head.weight": s["lm_head.weight"].to(torch.int8)})),
        r"model\.safetensors: lm_head\.weight is torch.int8, not a weight",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_and_explained(tmp_path, tokenizer, damage, message):
    export(make(**BANK), tokenizer, tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        load_exported(tmp_path, "cpu")
    assert str(tmp_path) in str(raised.value)


# ---------------------------------------------------------------------------- the script


@pytest.fixture
def checkpoint(tmp_path, tokenizer, monkeypatch):
    """A function that saves a model as a checkpoint of tag d4 in a base directory of its own."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    tokenizer.save(tmp_path / "tokenizer")
    save_token_bytes(tokenizer, tmp_path / "tokenizer")

    def save(model, step, source="base_checkpoints"):
        meta = {"step": step, "model_config": config_to_dict(model.config)}
        save_checkpoint(tmp_path / source / "d4", step, model.state_dict(), None, meta)

    return save


def test_the_script_folds_and_says_what_it_wrote(tmp_path, checkpoint, capsys):
    model = make(**BANK)
    checkpoint(model, 5)
    out = tmp_path / "out"
    main(["d4", "--fold-gamma", "--dtype", "bf16", "--out", str(out)])
    text = capsys.readouterr().out
    for piece in (f"wrote {out}", "tensors, bfloat16", "2.gamma_v ", "3.gamma_v ", f"bov_sample --export {out}"):
        assert piece in text
    loaded, _, facts = load_exported(out, "cpu")
    assert (facts["source"], facts["step"], facts["dtype"]) == ("base/d4", 5, "bfloat16")
    torch.testing.assert_close(logits(loaded), logits(model), atol=0.1, rtol=0)


def test_the_script_picks_source_and_step(tmp_path, checkpoint, capsys):
    checkpoint(make(seed=1), 5), checkpoint(make(seed=2), 9), checkpoint(make(seed=3), 5, "chatsft_checkpoints")
    for seed, flags in ((1, ["--step", "5"]), (2, []), (3, ["--source", "sft"])):
        main(["d4", "--fold-gamma", "--dtype", "fp32", "--out", str(tmp_path / "out"), *flags])
        assert torch.equal(logits(load_exported(tmp_path / "out", "cpu")[0]), logits(make(seed=seed)))
        assert "folded   nothing: no layer has a coefficient" in capsys.readouterr().out


def test_the_script_refuses_a_tag_that_is_not_there(tmp_path, checkpoint):
    checkpoint(make(), 5)
    with pytest.raises(FileNotFoundError, match="no model 'd5' .* there are: d4"):
        main(["d5", "--out", str(tmp_path / "out")])


def test_a_way_round_the_folder_is_the_folder_itself(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(ValueError, match="holds config.json"):
        export_model(make(), tokenizer, tmp_path / "new" / "..", fold_gamma=False, dtype=torch.float32)
    assert (tmp_path / "config.json").read_text() == "mine" and not (tmp_path / "new").exists()


def test_the_script_ends_with_one_sentence(tmp_path, checkpoint):
    checkpoint(make(), 5)
    environment = os.environ | {"PYTHONPATH": ROOT}
    command = [sys.executable, "-m", "scripts.bov_export", "--out", "."]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "bov_export: --out . holds base_checkpoints" in done.stderr.splitlines()[-1]


def test_a_reader_that_leaves_ends_the_sample_quietly(tmp_path, tokenizer):
    export(make(**BANK), tokenizer, tmp_path / "out")
    command = f"-m scripts.bov_sample --device-type cpu --max-tokens 150 --export {tmp_path}/out"
    sample = [sys.executable, *command.split()]
    with subprocess.Popen(sample, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        assert "Traceback" not in running.stderr.read() and running.wait(timeout=120) == 0
