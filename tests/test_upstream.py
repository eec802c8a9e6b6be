"""Upstream nanochat and the authors' fork beside this package: their tests, their weights, our weights in theirs.

NANOCHAT_UPSTREAM and NANOCHAT_AUTHORS point to checkouts. Both packages are called nanochat, so each side runs in a
process of its own and hands over a checkpoint folder that also holds ids and logits.
"""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat import optim
from scripts import train_bench

HERE = Path(__file__).parent
OURS = HERE.parent
UPSTREAM, AUTHORS = os.environ.get("NANOCHAT_UPSTREAM"), os.environ.get("NANOCHAT_AUTHORS")
needs_upstream = pytest.mark.skipif(not UPSTREAM, reason="set NANOCHAT_UPSTREAM to a checkout of upstream nanochat")
needs_authors = pytest.mark.skipif(not AUTHORS, reason="set NANOCHAT_AUTHORS to a checkout of the authors' fork")

# Types of the authors' registry that are no point on our axes: other inputs, other architectures, detached gradients.
OUTSIDE = {
    *(f"gpt_base_add_init_{name}" for name in ("res", "res_detach", "res_v_detach", "qkv", "res_learn", "qkv_learn")),
    *(f"gpt_base_add_init_{name}" for name in ("qkv_shared_learn", "proj_learn")),
    *(f"gpt_base_add_init_pre_norm_{part}_only_learn" for part in ("attn", "mlp")),
    *("gpt_base_v_exclude_self", "gpt_base_v_from_x0_exclude_self", "attn_res", "attn_res_sink"),
}

COMMON = """
import json, sys
from pathlib import Path
import torch
folder = Path(sys.argv[1])
SHAPE = dict(sequence_len=300, vocab_size=200, n_layer=6, n_head=4, n_kv_head=2, n_embd=64)
IDS = torch.randint(200, (2, 260), generator=torch.Generator().manual_seed(3))

def fill(model):  # no parameter at zero, none as the constructor left it
    model.to_empty(device="cpu")
    model.init_weights()
    generator = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        size = 0.8 if "wte" in name or "value_embeds" in name else 0.15
        mean = 1.0 if p.ndim == 1 else 0.0
        p.data.copy_(torch.randn(p.shape, generator=generator) * size + mean)

def logits(model):
    with torch.no_grad():
        return model.eval()(IDS)
"""

UPSTREAM_SAVES = """
from dataclasses import asdict
from nanochat.checkpoint_manager import save_checkpoint
from nanochat.gpt import GPT, GPTConfig
config = GPTConfig(**SHAPE)
with torch.device("meta"):
    model = GPT(config)
fill(model)
save_checkpoint(folder, 7, model.state_dict(), None, {"step": 7, "model_config": asdict(config)})
torch.save(logits(model), folder / "logits.pt")
"""

# Their save_checkpoint would import a tokenizer package that nothing else here needs; the two files are what it writes.
AUTHORS_SAVE = """
from dataclasses import asdict
from nanochat.model_registry import MODELS, get_model
for model_type in MODELS:
    Config, Model = get_model(model_type)
    config = Config(**SHAPE)
    with torch.device("meta"):
        model = Model(config)
    fill(model)
    meta = {"step": 7, "model_type": model_type, "model_config": asdict(config)}
    place = folder / model_type
    place.mkdir()
    torch.save(model.state_dict(), place / "model_000007.pt")
    (place / "meta_000007.json").write_text(json.dumps(meta))
    torch.save(logits(model), place / "logits.pt")
"""

WE_SAVE = """
from nanochat.checkpoint_manager import save_checkpoint
from nanochat.gpt import GPT, GPTConfig, config_to_dict
with torch.device("meta"):
    model = GPT(GPTConfig(**SHAPE))
fill(model)
save_checkpoint(folder, 7, model.state_dict(), None, {"step": 7, "model_config": config_to_dict(model.config)})
torch.save(logits(model), folder / "logits.pt")
"""

# Prints {folder: largest difference of the logits, or the refusal}.
WE_LOAD = """
from nanochat import checkpoint_manager
class Tokenizer:
    get_vocab_size = staticmethod(lambda: 200)
checkpoint_manager.get_tokenizer = Tokenizer
found = {}
for path in sorted(folder.rglob("logits.pt")):
    try:
        model, _, _ = checkpoint_manager.build_model(path.parent, 7, "cpu", "eval")
        found[path.parent.name] = (logits(model) - torch.load(path)).abs().max().item()
    except ValueError as error:
        found[path.parent.name] = str(error)
print(json.dumps(found))
"""

UPSTREAM_LOADS = """
from nanochat import checkpoint_manager
class Tokenizer:
    get_vocab_size = staticmethod(lambda: 200)
checkpoint_manager.get_tokenizer = Tokenizer
model, _, _ = checkpoint_manager.build_model(str(folder), 7, torch.device("cpu"), "eval")
print(json.dumps({folder.name: (logits(model) - torch.load(folder / "logits.pt")).abs().max().item()}))
"""


def run(checkout, *command, cwd):
    environment = os.environ | {"PYTHONPATH": str(checkout), "NANOCHAT_DTYPE": "float32", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, *command], env=environment, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def script(checkout, code, folder):
    return run(checkout, "-c", COMMON + code, str(folder), cwd=folder)


def last_json(output):
    return json.loads(output.strip().splitlines()[-1])


# ---------------------------------------------------------------------------- upstream


@needs_upstream
@pytest.mark.parametrize("name", ["engine", "attention_fallback", "tokenizer", "optim"])
def test_upstreams_own_tests_pass_against_this_package(tmp_path, name):
    text = Path(UPSTREAM, "tests", f"test_{name}.py").read_text(encoding="utf-8")
    if name == "optim":  # it asks for CUDA, which the tests themselves do not need
        changed = text.replace("torch.cuda.is_available()", "True").replace('DEVICE = "cuda"', 'DEVICE = "cpu"')
        assert changed != text
        text = changed
    (tmp_path / f"test_theirs_{name}.py").write_text(text, encoding="utf-8")
    output = run(OURS, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), cwd=tmp_path)
    assert " passed" in output


@needs_upstream
def test_upstreams_checkpoint_gives_the_same_logits_here(tmp_path):
    script(UPSTREAM, UPSTREAM_SAVES, tmp_path)
    (difference,) = last_json(script(OURS, WE_LOAD, tmp_path)).values()
    assert difference < 1e-4


@needs_upstream
def test_our_default_checkpoint_gives_the_same_logits_in_upstream(tmp_path):
    script(OURS, WE_SAVE, tmp_path)
    (difference,) = last_json(script(UPSTREAM, UPSTREAM_LOADS, tmp_path)).values()
    assert difference < 1e-4


# ---------------------------------------------------------------------------- the authors' fork


@needs_authors
def test_every_checkpoint_type_of_the_authors_loads_equal_or_is_refused(tmp_path):
    script(AUTHORS, AUTHORS_SAVE, tmp_path)
    found = last_json(script(OURS, WE_LOAD, tmp_path))
    refused = {name: result for name, result in found.items() if isinstance(result, str)}
    assert set(refused) == OUTSIDE, refused
    assert all("model_type" in message for message in refused.values())
    wrong = {name: result for name, result in found.items() if name not in refused and not result < 1e-4}
    assert not wrong and len(found) - len(refused) >= 30


# ---------------------------------------------------------------------------- names and flags


def flags_of(script):
    """{--flag: (type, default, action)} of every add_argument in a script, read without running it."""
    found = {}
    for node in ast.walk(ast.parse(Path(script).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and a.value.startswith("--")]
            wanted = [k for k in node.keywords if k.arg in ("type", "default", "action")]
            given = {k.arg: eval(ast.unparse(k.value), dict(vars(optim))) for k in wanted}
            kind = given.get("type", type(given.get("default")) if isinstance(given.get("default"), str) else str)
            for name in names:
                found[name] = (kind, given.get("default"), given.get("action"))
    return found


@needs_upstream
@pytest.mark.parametrize("script", ["base_train", "base_eval", "tok_train", "tok_eval"])
def test_upstreams_flags_are_ours_with_the_same_types_and_defaults(script):
    ours, theirs = (flags_of(Path(root, "scripts", f"{script}.py")) for root in (OURS, UPSTREAM))
    assert {name: ours.get(name) for name in theirs} == theirs


ELSEWHERE = {"nanochat.fp8", "nanochat.execution"}  # not part of this host


@needs_upstream
def test_every_name_that_upstreams_scripts_and_tests_import_exists():
    missing = set()
    for path in [*Path(UPSTREAM, "scripts").glob("base_*.py"), *Path(UPSTREAM, "scripts").glob("tok_*.py"),
                 *Path(UPSTREAM, "scripts").glob("chat_*.py"), *Path(UPSTREAM, "tests").glob("*.py")]:  # fmt: skip
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanochat."):
                if node.module in ELSEWHERE:
                    continue
                module = importlib.import_module(node.module)
                missing |= {f"{node.module}.{a.name}" for a in node.names if a.name not in dir(module)}
    assert not missing


@needs_upstream
def test_training_steps_lose_the_same_as_upstreams():
    """Over 15 steps; from then on rounding errors of either side grow several times a step."""
    config = dict(sequence_len=64, vocab_size=256, n_layer=3, n_head=2, n_kv_head=2, n_embd=128)
    losses = []
    for root in (train_bench.ROOT, UPSTREAM):
        side = train_bench.Side(root, "float32", "eager", config, rows=4, threads=1)
        losses.append(side.run(15)["losses"])
        side.close()
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert losses[0][-1] < losses[0][0] - 0.1
