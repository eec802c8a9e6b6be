"""Checkpoints: round trips, kills while saving, damaged and mismatched files, older and foreign formats."""

import json
import math
import os
import time
from multiprocessing import Manager

import pytest
import torch
import torch.distributed as dist

import nanochat.checkpoint_files as cf
import nanochat.checkpoint_manager as cm
from nanochat.authors_checkpoints import authors_config
from nanochat.bov.host import AXES, axes_of
from nanochat.bov.presets import preset
from nanochat.bov.spec import layer_specs
from nanochat.common import COMPUTE_DTYPE, file_sha256
from nanochat.gpt import GPT, GPTConfig, config_to_dict
from ranks import spawn

SHAPE = dict(sequence_len=32, vocab_size=70, n_layer=3, n_head=2, n_kv_head=1, n_embd=32)


class Tokenizer:
    def __init__(self, size):
        self.size = size

    def get_vocab_size(self):
        return self.size


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch):
    monkeypatch.setattr(cm, "get_tokenizer", lambda: Tokenizer(SHAPE["vocab_size"]))


def make(**axes):
    """A small model in which every parameter matters."""
    torch.manual_seed(7)
    with torch.device("meta"):
        model = GPT(GPTConfig(**SHAPE, **axes))
    model.to_empty(device="cpu")
    model.init_weights()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "c_proj" in name or p.numel() < 100:
                p.add_(0.2 * torch.randn_like(p))
    return model.eval()


def save(folder, model, step=3, **meta):
    meta = {"step": step, "model_config": config_to_dict(model.config), **meta}
    cm.save_checkpoint(folder, step, model.state_dict(), None, meta)


def rewrite_meta(folder, change, step=3):
    path = cm.meta_path(folder, step)
    meta = json.loads(path.read_text())
    change(meta)
    meta.pop("seal")
    path.write_text(json.dumps(meta))


def logits(model):
    ids = torch.arange(12).view(1, 12) * 5 % SHAPE["vocab_size"]
    with torch.no_grad():
        return model(ids)


# ---------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", ["upstream", "paper/baseline", "paper/bov", "fig5b/shared", "table1/4", "table1/13"])
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")], ids=["str", "device"])
def test_round_trip_is_exact(tmp_path, name, device):
    model = make(**preset(name))
    save(tmp_path, model)
    loaded, tokenizer, meta = cm.build_model(tmp_path, 3, device, "eval")
    assert loaded.config == model.config and not loaded.training and meta["step"] == 3
    assert tokenizer.get_vocab_size() == 70
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    assert torch.equal(logits(model), logits(loaded))


def test_loaded_model_trains(tmp_path):
    """Parameters replaced by the loader are those that the forward reads, tables included."""
    save(tmp_path, make(**preset("paper/bov")))
    loaded, _, _ = cm.build_model(tmp_path, 3, "cpu", "train")
    assert loaded.training
    loaded(torch.arange(16).view(2, 8), targets=torch.ones(2, 8, dtype=torch.long)).backward()
    assert all(p.grad is not None for p in loaded.parameters())


def test_default_model_has_upstreams_metadata(tmp_path):
    save(tmp_path, make())
    meta = json.loads((tmp_path / "meta_000003.json").read_text())
    assert set(meta["model_config"]) == {*SHAPE, "window_pattern"}
    assert sorted(os.listdir(tmp_path)) == ["meta_000003.json", "model_000003.pt"]


def test_metadata_is_json_whatever_the_loss(tmp_path):
    save(tmp_path, make(), val_bpb=math.inf, loop={"loss": math.nan, "steps": (1, 2)})
    meta = json.loads((tmp_path / "meta_000003.json").read_text(), parse_constant=pytest.fail)
    assert meta["val_bpb"] is None and meta["loop"] == {"loss": None, "steps": [1, 2]}


# ---------------------------------------------------------------------------- kills and damage


class Killed(BaseException):
    pass


@pytest.mark.parametrize("killed_in", ["optimizer", "model", "meta"])
@pytest.mark.parametrize("step", [3, 4], ids=["same-step", "next-step"])
def test_kill_while_saving_never_leaves_a_mixed_step(tmp_path, monkeypatch, killed_in, step):
    data = {"w": torch.ones(3)}
    cm.save_checkpoint(tmp_path, 2, data, data, {"step": 2})
    cm.save_checkpoint(tmp_path, 3, data, data, {"step": 3})
    written, real_save = [], torch.save

    def save_half(value, f):
        written.append(value)
        if len(written) == {"optimizer": 1, "model": 2}.get(killed_in):
            f.write(b"half a file")
            raise Killed
        real_save(value, f)

    def no_meta(path, value):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(torch, "save", save_half)
        patch.setattr(cf, "write_json", no_meta)
        cm.save_checkpoint(tmp_path, step, {"w": torch.zeros(3)}, data, {"step": step})
    newest = cm.find_last_step(tmp_path)
    assert newest == (2 if step == 3 else 3)
    assert torch.equal(cm.load_checkpoint(tmp_path, newest, "cpu", load_optimizer=True)[0]["w"], torch.ones(3))
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    cm.save_checkpoint(tmp_path, step, {"w": torch.zeros(3)}, data, {"step": step})
    assert cm.find_last_step(tmp_path) == step


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def claim_wider(path):
    meta = path.with_name("meta_000003.json")
    meta.write_text(meta.read_text().replace('"n_head": 2', '"n_head": 4'))


@pytest.mark.parametrize(
    ("damage", "manifest", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), True, r"has 1000 bytes instead of \d+"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), False, "cannot be read"),
        (lambda path: flip(path, -30_000), True, "its sha256 differs"),
        (lambda path: path.write_bytes(b""), False, "cannot be read"),
        (lambda path: torch.save([1, 2], path), False, "AttributeError"),
        (lambda path: torch.save({"w": "text"}, path), False, "not the weights of a model"),
        (claim_wider, True, "is not what was saved"),
    ],
    ids=["cut", "cut, no manifest", "a bit flipped", "empty", "a list", "text", "metadata"],
)  # fmt: skip
def test_damaged_weights_name_the_file(damage, manifest, message, tmp_path):
    save(tmp_path, make())
    damage(cm.model_path(tmp_path, 3))
    if not manifest:
        rewrite_meta(tmp_path, lambda meta: meta.pop("files"))
    with pytest.raises(ValueError, match=rf"000003.*{message}"):
        cm.build_model(tmp_path, 3, "cpu", "eval")


def test_the_manifest_describes_every_file_and_a_missing_shard_matters_to_training_alone(tmp_path):
    model = make()
    meta = {"model_config": config_to_dict(model.config)}
    cm.save_checkpoint(tmp_path, 3, model.state_dict(), {"lr": 1.0}, meta)
    files = json.loads(cm.meta_path(tmp_path, 3).read_text())["files"]
    found = {p.name: {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in tmp_path.glob("*.pt")}
    assert files == found and len(files) == 2
    cm.optimizer_path(tmp_path, 3, 0).unlink()
    assert cm.find_last_step(tmp_path) == 3 and cm.build_model(tmp_path, 3, "cpu", "eval")
    with pytest.raises(ValueError, match="optim_000003_rank0.pt is missing"):
        cf.check_step(tmp_path, 3, optimizer=True)


def test_the_newest_step_that_is_whole_counts(tmp_path, capsys):
    for step in (3, 4, 5):
        cm.save_checkpoint(tmp_path, step, {"w": torch.ones(5)}, None, {})
    cm.model_path(tmp_path, 5).write_bytes(b"PK")
    cm.meta_path(tmp_path, 4).write_text("{")
    assert cm.find_last_step(tmp_path) == 3
    assert "passing over step 5: " in capsys.readouterr().err
    cm.model_path(tmp_path, 3).unlink()
    with pytest.raises(ValueError, match="no whole checkpoint .*model_000005.pt has 2 bytes"):
        cm.find_last_step(tmp_path)


def test_keeping_the_newest_deletes_nothing_unless_the_newest_is_whole(tmp_path):
    for step in (2, 3, 4, 5):
        cm.save_checkpoint(tmp_path, step, {"w": torch.ones(5)}, {}, {})
    flip(cm.model_path(tmp_path, 5), -1)
    with pytest.raises(ValueError, match="model_000005.pt is not what was saved"):
        cf.keep_newest(tmp_path, 1)
    assert cm.list_steps(tmp_path) == [2, 3, 4, 5]
    flip(cm.model_path(tmp_path, 5), -1)
    cf.keep_newest(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == [
        "meta_000004.json", "meta_000005.json", "model_000004.pt", "model_000005.pt",
        "optim_000004_rank0.pt", "optim_000005_rank0.pt",
    ]  # fmt: skip


def test_leftovers_of_stopped_saves_go_and_whole_steps_stay(tmp_path, capsys):
    cm.save_checkpoint(tmp_path, 3, {"w": torch.ones(5)}, {}, {})
    kept = {*os.listdir(tmp_path), "metrics.jsonl", "notes.tmp", "model_final.pt"}
    left = {"model_000004.pt", "optim_000004_rank0.pt", "optim_000005_rank12.pt", ".model_000004.pt.ab_c.tmp"}
    for name in (kept | left) - set(os.listdir(tmp_path)):
        (tmp_path / name).touch()
    cf.delete_leftovers(tmp_path)
    assert set(os.listdir(tmp_path)) == kept
    said = capsys.readouterr().err
    assert all(name in said for name in left)


class Payload:
    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_in_the_weights_is_not_run(tmp_path):
    payload = Payload()
    payload.path = str(tmp_path / "executed")
    save(tmp_path, make())
    torch.save({"w": payload}, cm.model_path(tmp_path, 3))
    rewrite_meta(tmp_path, lambda meta: meta.pop("files"))
    with pytest.raises(ValueError, match="cannot be read"):
        cm.load_checkpoint(tmp_path, 3, "cpu")
    assert not os.path.exists(payload.path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "no model_config"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds no object"),
        ('{"format": 2}', "format 2, this version reads 1"),
        ('{"files": {"model_000003.pt": 7}}', "`files`"),
        ('{"model_config": {"n_layer": "3"}}', "n_layer='3'"),
        ('{"model_config": {"n_layer": 1000000000}}', "not the weights of a model of 1000000000 layers"),
        ('{"model_config": {"vocab_size": 1000000000000}}', "do not belong together"),
        ('{"model_config": 3}', "TypeError"),
    ],
    ids=["syntax", "empty", "deep", "list", "newer", "files", "type", "layers", "vocabulary", "number"],
)  # fmt: skip
def test_damaged_metadata_names_the_file(tmp_path, text, message):
    save(tmp_path, make())
    cm.meta_path(tmp_path, 3).write_text(text)
    with pytest.raises(ValueError, match=rf"meta_000003\.json.*{message}"):
        cm.build_model(tmp_path, 3, "cpu", "eval")


# ---------------------------------------------------------------------------- finding


def test_newest_step_is_the_newest_complete_one(tmp_path):
    for step in (5, 20, 1_000_000):
        cm.save_checkpoint(tmp_path, step, {}, None, {})
    for name in ("model_2000000.pt", "meta_3000000.json", "model_x.pt", "model_7.pt", "meta_7.json"):
        (tmp_path / name).touch()
    assert cm.find_last_step(tmp_path) == 1_000_000
    for missing in (19, 2_000_000):
        with pytest.raises(FileNotFoundError, match=rf"no complete step {missing} .*: 5, 20, 1000000"):
            cm.load_checkpoint(tmp_path, missing, "cpu")


def test_largest_model_is_the_deepest_complete_one_and_ties_go_to_the_newest(tmp_path):
    for age, tag in enumerate(["d4_new", "d4", "d10", "zebra"]):
        cm.save_checkpoint(tmp_path / tag, 1, {}, None, {})
        os.utime(cm.meta_path(tmp_path / tag, 1), (1e9 - age, 1e9 - age))
    (tmp_path / "d99").mkdir()
    assert cm.find_largest_model(tmp_path) == "d10"
    cm.meta_path(tmp_path / "d10", 1).unlink()
    assert cm.find_largest_model(tmp_path) == "d4_new"


def test_load_model_resolves_tag_and_step(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no model with a complete checkpoint"):
        cm.load_model("base", "cpu", "eval")
    for step in (3, 9):
        save(tmp_path / "base_checkpoints" / "d3", make(), step)
    assert cm.load_model("base", "cpu", phase="eval")[2]["step"] == 9
    assert cm.load_model("base", "cpu", phase="eval", model_tag="d3", step=3)[2]["step"] == 3
    for arguments, error, message in (
        (dict(step=4), FileNotFoundError, "complete steps: 3, 9"),
        (dict(model_tag="d5"), FileNotFoundError, "no model 'd5' .* there are: d3"),
    ):
        with pytest.raises(error, match=message):
            cm.load_model("base", "cpu", phase="eval", **arguments)
    with pytest.raises(ValueError, match="use one of base, sft, rl"):
        cm.load_model("bass", "cpu", phase="eval")
    with pytest.raises(ValueError, match="train or eval"):
        cm.load_model("base", "cpu", phase="test")


# ---------------------------------------------------------------------------- optimizer shards


def test_optimizer_shards_by_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    folder = tmp_path / "base_checkpoints" / "d3"
    for rank in (1, 0):
        cf._save(cm.optimizer_path(folder, 4, rank), {"lr": 0.1, "state": [torch.full((2,), float(rank))]})
    cf._save(cm.model_path(folder, 4), {})
    cf.write_json(cm.meta_path(folder, 4), {})
    assert cm.load_checkpoint(folder, 4, "cpu", load_optimizer=True, rank=1)[1]["state"][0].tolist() == [1, 1]
    assert [shard["state"][0][0].item() for shard in cm.load_optimizer_shards(folder, 4, "cpu")] == [0, 1]
    assert cm.load_optimizer_state("base", "cpu", rank=1)["lr"] == 0.1
    assert cm.load_optimizer_state("base", "cpu", rank=2) is None
    with pytest.raises(FileNotFoundError, match="rank 2; there are shards of ranks: 0, 1"):
        cm.load_checkpoint(folder, 4, "cpu", load_optimizer=True, rank=2)
    cm.optimizer_path(folder, 4, 0).unlink()
    with pytest.raises(FileNotFoundError, match=r"ranks \[1\]"):
        cm.load_optimizer_shards(folder, 4, "cpu")


@pytest.mark.parametrize("optimizer", [{"lr": 1.0}, None], ids=["with-optimizer", "without"])
def test_saving_again_on_fewer_ranks_leaves_no_old_shard(tmp_path, optimizer):
    for rank in (0, 1, 2):
        cf._save(cm.optimizer_path(tmp_path, 4, rank), {})
    cm.save_checkpoint(tmp_path, 4, {}, optimizer, {})
    assert [name for name in os.listdir(tmp_path) if "rank" in name] == ["optim_000004_rank0.pt"] * (
        optimizer is not None
    )


def _save_late(rank, folder, found):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    time.sleep(rank)
    cm.save_checkpoint(folder / "d3", 4, {}, {"rank": rank}, {}, rank=rank)
    if rank == 0:
        found["shards"] = [shard["rank"] for shard in cm.load_optimizer_shards(folder / "d3", 4, "cpu")]
    dist.destroy_process_group()


def test_a_step_is_complete_only_with_the_shards_of_all_ranks(tmp_path):
    """Rank 0 has saved when rank 1, which comes a second later, has."""
    with Manager() as manager:
        found = manager.dict()
        spawn(_save_late, (tmp_path, found))
        assert found["shards"] == [0, 1]
    assert cm.find_last_step(tmp_path / "d3") == 4


# ---------------------------------------------------------------------------- config against weights


@pytest.mark.parametrize(
    ("saved", "claimed", "message"),
    [
        ({}, {"trunk": "plain"}, r"resid_lambdas is not in the model \(see trunk "),
        ({}, {"smear": False}, r"smear_lambda is not in the model \(see smear "),
        ({}, {"ve_layers": "none"}, r"ve_gate.*ve_layers, bov_layers"),
        ({"ve_layers": "none"}, {}, r"value_embeds.* is missing .*ve_layers"),
        ({}, {"bov_layers": "2"}, r"gamma_v is missing .*bov_coeff"),
        (
            preset("paper/bov"),
            {**preset("paper/bov"), "bov_coeff": "fixed"},
            r"gamma_v is not in the model .*bov_coeff",
        ),
        ({}, {"mlp_hidden": 8}, r"c_fc\.weight is \(128, 32\) in the checkpoint and \(8, 32\)"),
        ({}, {"n_layer": 2}, r"h\.2\..* is not in the model .*n_layer.* and \d+ more"),
    ],
    ids=["trunk", "smear", "ve_layers", "no-ve", "bank", "coefficient", "mlp_hidden", "n_layer"],
)
def test_config_that_contradicts_the_weights_is_explained(tmp_path, saved, claimed, message):
    save(tmp_path, make(**saved))

    def claim(meta):
        meta["model_config"] = {**SHAPE, "window_pattern": "SSSL", **claimed}

    rewrite_meta(tmp_path, claim)
    with pytest.raises(ValueError, match=message):
        cm.build_model(tmp_path, 3, "cpu", "eval")


def test_unknown_config_field_is_named(tmp_path):
    save(tmp_path, make())
    rewrite_meta(tmp_path, lambda meta: meta["model_config"].update(future_field=1))
    with pytest.raises(ValueError, match="future_field"):
        cm.build_model(tmp_path, 3, "cpu", "eval")


def test_tokenizer_of_another_run_is_refused(tmp_path, monkeypatch):
    save(tmp_path, make())
    monkeypatch.setattr(cm, "get_tokenizer", lambda: Tokenizer(71))
    with pytest.raises(ValueError, match="has 71 tokens and the model .* 70"):
        cm.build_model(tmp_path, 3, "cpu", "eval")


def test_only_tables_change_their_dtype(tmp_path, capsys):
    """On whatever device: embeddings as at initialisation, all else as saved, and the change is said."""
    model = make(**preset("paper/bov"))
    other = torch.bfloat16 if COMPUTE_DTYPE == torch.float32 else torch.float32
    tables = [k for k in model.state_dict() if "wte" in k or "value_embeds" in k]
    state = {k: v.to(other) if k in tables else v for k, v in model.state_dict().items()}
    state["lm_head.weight"] = state["lm_head.weight"].bfloat16()
    cm.save_checkpoint(tmp_path, 3, state, None, {"model_config": config_to_dict(model.config)})
    loaded = cm.build_model(tmp_path, 3, "cpu", "eval")[0].state_dict()
    assert len(tables) == 2 and all(loaded[k].dtype == COMPUTE_DTYPE for k in tables)
    assert all(loaded[k].dtype == v.dtype and torch.equal(loaded[k], v) for k, v in state.items() if k not in tables)
    assert f"cast from {other} to {COMPUTE_DTYPE}" in capsys.readouterr().err


# ---------------------------------------------------------------------------- older checkpoints


def test_older_checkpoint_gets_full_windows_and_neutral_scalars(tmp_path):
    model = make()
    state = {f"_orig_mod.{k}": v for k, v in model.state_dict().items()}
    absent = ("resid_lambdas", "x0_lambdas", "backout_lambda", "smear_lambda", "smear_gate.weight")
    for key in absent:
        del state[f"_orig_mod.{key}"]
    cm.save_checkpoint(tmp_path, 3, state, None, {"model_config": SHAPE})
    loaded, _, _ = cm.build_model(tmp_path, 3, "cpu", "eval")
    assert loaded.config.window_pattern == "L"
    plain = make(trunk="plain", smear=False)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k not in absent})
    assert torch.allclose(logits(loaded), logits(plain), atol=1e-6)


# ---------------------------------------------------------------------------- the authors' files

TYPES = {
    "table1/1": {},
    "table1/2": {"v_scale_learn", "learn_init_coeffs"},
    "table1/3": {"v_from_v1", "on_every_layer"},
    "table1/4": {"v_from_v1", "learn_init_coeffs", "on_every_two_layers"},
    "table1/5": {"v_from_v1"},
    "table1/6": {"v_from_v1", "learn_init_coeffs"},
    "table1/7": {"v_from_x0", "learn_init_coeffs", "on_every_two_layers"},
    "table1/8": {"v_from_x0"},
    "table1/9": {"v_from_x0", "learn_init_coeffs"},
    "table1/10": {"add_init_v"},
    "table1/11": {"add_init_v", "learn_init_coeffs"},
    "table1/12": {"add_init_res_v"},
    "table1/13": {"add_init_res_v", "learn_init_coeffs"},
    "table3/ve_gated": {"add_init_value_emb_nanogpt", "on_every_two_layers"},
    "paper/bov": {"v_from_value_emb", "learn_init_coeffs"},
    "fig5b/shared": {"v_from_value_emb", "learn_init_coeffs", "value_emb_shared"},
    "fig5b/no_coeff": {"v_from_value_emb"},
    "fig5b/every_layer": {"v_from_value_emb", "learn_init_coeffs", "on_every_layer"},
    "fig5b/add_v": {"add_init_value_emb", "learn_init_coeffs"},
    "fig5b/add_v_fixed": {"add_init_value_emb"},
}
ALL_FLAGS = {flag for flags in TYPES.values() for flag in flags} | {"on_last_two_thirds_layers", "add_init_res"}


@pytest.mark.parametrize("name", TYPES)
def test_authors_flags_are_the_preset(name):
    theirs = {**SHAPE, "n_layer": 12, "window_pattern": "SSSL", **{flag: flag in TYPES[name] for flag in ALL_FLAGS}}
    config = GPTConfig(**authors_config("gpt_base_variant" if TYPES[name] else "gpt_base", theirs))
    expected = {axis: default for axis, (default, _) in AXES.items()} | preset(name)
    assert layer_specs(12, axes_of(config)) == layer_specs(12, expected)
    assert (config.trunk, config.smear, config.window_pattern) == ("plain", True, "SSSL")


def test_authors_full_trunk_and_head_coefficients():
    assert authors_config("gpt", {**SHAPE, "use_lambdas": True}) == SHAPE
    assert authors_config("gpt_nolambda", {**SHAPE, "use_lambdas": False}) == {**SHAPE, "trunk": "plain"}
    head = authors_config(
        "gpt_base_v_from_v1_scaling_vec", {**SHAPE, "v_from_v1": True, "learn_init_scaling_vec": True}
    )
    assert head["bov_coeff"] == "head" and head["bov_source"] == "first"


@pytest.mark.parametrize(
    ("model_type", "flags", "message"),
    [
        ("gpt_base_add_init_res", ["add_init_res"], "uses add_init_res"),
        ("gpt_base_x", ["v_from_x0", "v_exclude_self"], "uses v_exclude_self"),
        ("gpt_base_v_from_x0", [], "exactly one of .*: none"),
        ("gpt_base_x", ["v_from_x0", "v_from_v1"], "v_from_v1, v_from_x0"),
        ("attn_res", [], "another architecture"),
    ],
)
def test_authors_variant_outside_the_axes_is_named(model_type, flags, message):
    with pytest.raises(ValueError, match=message):
        authors_config(model_type, {**SHAPE, **dict.fromkeys(flags, True)})


def save_theirs(folder, model, flags, **more):
    """`model` as the authors' code saves it: a c_v also where it is unused (`more`: further weights)."""
    unused = [i for i, block in enumerate(model.transformer.h) if block.attn.c_v is None]
    state = model.state_dict() | {f"transformer.h.{i}.attn.c_v.weight": torch.full((16, 32), math.nan) for i in unused}
    config = {**SHAPE, "window_pattern": "SSSL", **{flag: flag in flags for flag in ALL_FLAGS}}
    cm.save_checkpoint(folder, 3, state | more, None, {"model_type": "gpt_base_variant", "model_config": config})


@pytest.mark.parametrize("name", ["paper/bov", "table1/3", "table1/9"])
def test_authors_folder_loads_without_their_unused_weights(tmp_path, name):
    model = make(**preset(name))
    save_theirs(tmp_path, model, TYPES[name])
    loaded, _, _ = cm.build_model(tmp_path, 3, "cpu", "eval")
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(logits(loaded), logits(model))


def test_authors_shared_table_is_kept_once_and_its_copies_must_agree(tmp_path):
    model = make(**preset("fig5b/shared") | {"bov_layers": "last:2/3"})
    flags = TYPES["fig5b/shared"] | {"on_last_two_thirds_layers"}
    table = model.value_embeds["1"].weight.detach()
    save_theirs(tmp_path, model, flags, **{"value_embeds.2.weight": table.clone()})
    loaded, _, _ = cm.build_model(tmp_path, 3, "cpu", "eval")
    assert list(loaded.value_embeds) == ["1"] and torch.equal(logits(loaded), logits(model))
    save_theirs(tmp_path, model, flags, **{"value_embeds.2.weight": table + 1})
    with pytest.raises(ValueError, match=r"value_embeds\.2\.weight differs from value_embeds\.1"):
        cm.build_model(tmp_path, 3, "cpu", "eval")
