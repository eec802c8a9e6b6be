"""The patch series on a checkout of upstream nanochat: set NANOCHAT_UPSTREAM to one with its history.

The checkout is only read: everything happens in clones. Their scripts run in processes of their own, eagerly, on a CPU.
"""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from patches import apply, diff, series

ROOT = Path(__file__).parent.parent
UPSTREAM = os.path.abspath(os.environ["NANOCHAT_UPSTREAM"]) if os.environ.get("NANOCHAT_UPSTREAM") else None
BASE = series.upstream()["base"]
# From the first with today's model on; what they need beyond this package's own environment decides whether they run.
OTHERS = ["a825e63", "1cd94d7", "94b73ad", "0f83057", "f10bd75", "ca366eb", "eb16d01"]

pytestmark = pytest.mark.skipif(not UPSTREAM, reason="set NANOCHAT_UPSTREAM to a checkout of upstream nanochat")


def git(folder, *words):
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def clone(folder, commit, patched=True):
    """A clone of the checkout at a commit, with the series in it."""
    git(folder.parent, "clone", "-q", "--no-checkout", UPSTREAM, folder.name)
    git(folder, "checkout", "-q", "--detach", commit)
    if patched:
        assert apply.main([str(folder)]) == 0
    return folder


def python(checkout, *words, base):
    """Run Python in a checkout; skips where the checkout needs a package that is not installed."""
    env = {k: v for k, v in os.environ.items() if k not in ("NANOCHAT_UPSTREAM", "NANOCHAT_DTYPE", "PYTHONPATH")}
    env |= {
        "NANOCHAT_BASE_DIR": str(base),
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
    }
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=500)
    missing = re.findall(r"No module named '(?!nanochat|scripts|tasks)\w+'", done.stderr)
    if done.returncode and missing:
        pytest.skip(f"this upstream wants more packages: {missing[-1]}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stderr + done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    if subprocess.run(["git", "cat-file", "-e", f"{BASE}^{{commit}}"], cwd=UPSTREAM, capture_output=True).returncode:
        pytest.skip(f"NANOCHAT_UPSTREAM has no commit {BASE[:7]}: git fetch --unshallow there")
    return tmp_path_factory.mktemp("patched")


@pytest.fixture(scope="module")
def plain(home):
    return clone(home / "plain", BASE, patched=False)


@pytest.fixture(scope="module")
def patched(home):
    return clone(home / "patched", BASE)


# ---------------------------------------------------------------------------- the tree


def test_applies_directly_and_comes_out_to_the_byte(home, capsys):
    folder = clone(home / "tree", BASE)
    assert "is applied directly" in capsys.readouterr().out
    last = {change.path: change.new for patch in series.variants()[0] for change in patch.files}
    assert dict(zip(last, git(folder, "hash-object", *last).split(), strict=True)) == last
    assert git(folder, "status", "--porcelain")
    assert diff.main([str(folder), "--stat"]) == 0
    assert apply.main([str(folder), "--reverse"]) == 0
    assert git(folder, "status", "--porcelain", "--ignored") == ""


# ---------------------------------------------------------------------------- the default model

FINGERPRINT = """
import hashlib, json, sys
import torch
from nanochat.engine import Engine
from nanochat.gpt import GPT, GPTConfig
torch.use_deterministic_algorithms(True)
found = {}
def note(name, tensor):
    found[name] = hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
class Tokenizer:
    encode_special = staticmethod(lambda text: -1)
    get_bos_token_id = staticmethod(lambda: -1)
torch.manual_seed(7)
with torch.device("meta"):
    model = GPT(GPTConfig(sequence_len=300, vocab_size=250, n_layer=5, n_head=4, n_kv_head=2, n_embd=64))
model.to_empty(device="cpu")
model.init_weights()
note("random stream", torch.rand(5))
for name, value in model.state_dict().items():
    note(name, value)
generator = torch.Generator().manual_seed(1)
for parameter in model.parameters():
    parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
ids, targets = torch.randint(250, (2, 2, 200), generator=generator)
optimizer = model.setup_optimizer(weight_decay=0.1)
for step in range(3):
    loss = model(ids, targets)
    loss.backward()
    note(f"loss {step}", loss)
    for name, parameter in model.named_parameters():
        note(f"gradient {step} {name}", parameter.grad)
    optimizer.step()
    model.zero_grad(set_to_none=True)
note("logits", model(ids))
rows, _ = Engine(model, Tokenizer()).generate_batch(ids[0, :20].tolist(), num_samples=2, max_tokens=20, seed=5)
found["text"] = rows
groups = [[g["kind"], g["lr"], g["weight_decay"], len(g["params"])] for g in optimizer.param_groups]
counts = [model.estimate_flops(), model.estimate_decode_flops(99), model.estimate_prefill_flops(99)]
counts += [model.kv_bytes_per_token(), model.kv_read_bytes(99)]
print(json.dumps([found, groups, model.num_scaling_params(), counts]))
"""


def test_default_model_is_the_same_to_the_bit(plain, patched, home):
    """Init, the random stream after it, losses, gradients, updates, logits, text, counts and the order of keys."""
    one, two = (python(folder, "-c", FINGERPRINT, base=home).splitlines()[-1] for folder in (plain, patched))
    assert one == two and len(json.loads(one)[0]) > 150


def test_tests_of_upstream_and_of_the_series_pass(patched, home):
    names = sorted(path.name for path in (patched / "tests").glob("test_*.py"))
    assert "test_bov.py" in names and len(names) > 4
    output = python(patched, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", base=home)
    assert " passed" in output and "failed" not in output


# ---------------------------------------------------------------------------- a small model, from data to chat


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=50)


@pytest.fixture(scope="module")
def base_dir(home, patched):
    """Shards of nonsense, upstream's tokenizer trained on them, and conversations where its tasks look for them."""
    folder, pick = home / "base", random.Random(0)
    words = ["".join(pick.choice("abcdefghijklmnop") for _ in range(pick.randint(2, 7))) for _ in range(300)]
    for shard in ("shard_00000", "shard_06542"):
        rows = [{"text": " ".join(pick.choices(words, k=40)) + "."} for _ in range(400)]
        write(folder / "base_data_climbmix" / f"{shard}.parquet", rows)
    talk = [{"role": role, "content": words[0]} for role in ("user", "assistant")]
    question = {"question": words[1], "choices": words[2:6], "answer": 2, "subject": "none"}
    sum_ = {"question": words[6], "answer": "it is <<1+1=2>>2\n#### 2"}
    for task, splits, row, count in (
        ("HuggingFaceTB--smol-smoltalk/default", ("train", "test"), {"messages": talk}, 100),
        ("cais--mmlu/all", ("auxiliary_train", "test"), question, 5200),
        ("openai--gsm8k/main", ("train", "test"), sum_, 420),
    ):
        for split in splits:
            place = folder / "task_data" / task / split
            write(place / "00000.parquet", [row] * count)
            (place / "manifest.json").write_text(json.dumps(["00000.parquet"]))
    python(patched, "-m", "scripts.tok_train", "--vocab-size", "512", base=folder)
    return folder


SMALL = "--depth 4 --aspect-ratio 16 --head-dim 16 --max-seq-len 64 --device-batch-size 4 --total-batch-size 256"
QUIET = "--eval-every=-1 --core-metric-every=-1 --save-every=-1 --device-type cpu"


def train(checkout, base, tag, steps, *flags):
    words = f"-m scripts.base_train {SMALL} {QUIET} --num-iterations {steps} --sample-every {steps} --model-tag {tag}"
    return python(checkout, *words.split(), *flags, base=base)


AXES = {
    "bank alone": ["--bov-layers", "last:1/3"],
    "paper": ["--preset", "paper/bov"],
    "no smear, x0 beside V": ["--preset", "table1/13", "--smear", "false"],
    "explicit layers": [
        "--preset",
        "paper/baseline",
        "--bov-layers",
        "1,3",
        "--bov-coeff",
        "head",
        "--mlp-hidden",
        "96",
    ],
}


@pytest.fixture(scope="module", params=AXES)
def trained(request, patched, base_dir):
    """(folder of the checkpoint after 20 steps, what base_train said) of one point on the axes."""
    tag = request.param.replace(" ", "_").replace(",", "")
    said = train(patched, base_dir, tag, 20, *AXES[request.param])
    return base_dir / "base_checkpoints" / tag, said


# Loads a checkpoint, saves logits of the full forward beside it, prints how far decoding is from it.
DECODE = """
import json, sys
import torch
from nanochat.checkpoint_manager import load_model
from nanochat.engine import KVCache
from pathlib import Path
folder = Path(sys.argv[1])
model, tokenizer, meta = load_model("base", torch.device("cpu"), "eval", model_tag=folder.name)
c = model.config
ids = torch.randint(c.vocab_size, (2, 60), generator=torch.Generator().manual_seed(3))
shape = (2, c.n_kv_head, 60, c.n_embd // c.n_head, c.n_layer)
cache = KVCache(*shape, "cpu", torch.float32, value_layers=model.value_layers)
with torch.no_grad():
    full = model(ids)
    parts = [model(ids[:, :40], kv_cache=cache)] + [model(ids[:, t : t + 1], kv_cache=cache) for t in range(40, 60)]
torch.save((ids, full), sys.argv[2])
print(json.dumps([(torch.cat(parts, dim=1) - full).abs().max().item(), full.std().item(), len(cache.v_cache)]))
"""


def test_trains_and_decodes_to_its_full_forward(trained, patched, base_dir, tmp_path):
    folder, said = trained
    losses = [float(line.split("loss: ")[1].split()[0]) for line in said.splitlines() if line.startswith("step ")]
    assert len(losses) == 20 and losses[-1] < losses[0]
    output = python(patched, "-c", DECODE, folder, tmp_path / "logits.pt", base=base_dir)
    difference, spread, kept = json.loads(output.splitlines()[-1])
    assert difference < 1e-5 and spread > 0.01
    cached = json.loads((folder / "meta_000020.json").read_text())["model_config"]["bov_combine"] == "add"
    assert kept == (4 if cached else 2)


# Loads a checkpoint by the package in the working directory and compares with logits saved elsewhere.
COMPARE = """
import json, sys
import torch
from nanochat import checkpoint_manager
class Tokenizer:
    get_vocab_size = staticmethod(lambda: 512)
checkpoint_manager.get_tokenizer = Tokenizer
model, _, _ = checkpoint_manager.build_model(sys.argv[1], 20, torch.device("cpu"), "eval")
ids, logits = torch.load(sys.argv[2])
with torch.no_grad():
    print(json.dumps((model(ids) - logits).abs().max().item()))
"""

# Our package: loads that checkpoint and saves it as its own.
SAVE_AGAIN = """
import sys
import torch
from nanochat import checkpoint_manager
from nanochat.gpt import config_to_dict
class Tokenizer:
    get_vocab_size = staticmethod(lambda: 512)
checkpoint_manager.get_tokenizer = Tokenizer
model, _, _ = checkpoint_manager.build_model(sys.argv[1], 20, torch.device("cpu"), "eval")
meta = {"step": 20, "model_config": config_to_dict(model.config)}
checkpoint_manager.save_checkpoint(sys.argv[2], 20, model.state_dict(), None, meta)
"""


def test_checkpoints_go_both_ways_with_equal_logits(trained, patched, base_dir, tmp_path, monkeypatch):
    folder, _ = trained
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    python(patched, "-c", DECODE, folder, tmp_path / "logits.pt", base=base_dir)
    here = {"NANOCHAT_DTYPE": "float32", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ours = [sys.executable, "-c"]
    words = dict(cwd=ROOT, env=os.environ | here, capture_output=True, text=True, check=True)
    found = subprocess.run([*ours, COMPARE, str(folder), str(tmp_path / "logits.pt")], **words).stdout
    assert json.loads(found.splitlines()[-1]) < 1e-5
    subprocess.run([*ours, SAVE_AGAIN, str(folder), str(tmp_path / "saved")], **words)
    found = python(patched, "-c", COMPARE, tmp_path / "saved", tmp_path / "logits.pt", base=base_dir)
    assert json.loads(found.splitlines()[-1]) < 1e-5


def test_evaluates_finetunes_and_chats(trained, patched, base_dir):
    folder, _ = trained
    tag = folder.name
    on_cpu = f"--model-tag {tag} --device-type cpu"
    words = f"-m scripts.base_eval {on_cpu} --eval bpb --split-tokens 1024 --device-batch-size 4"
    assert "val bpb:" in python(patched, *words.split(), base=base_dir)
    # upstream ends at the fourth batch, after three steps
    words = f"-m scripts.chat_sft {on_cpu} --num-iterations 4 --eval-every=-1 --eval-tokens 512 --chatcore-every=-1"
    python(patched, *words.split(), base=base_dir)
    tuned = base_dir / "chatsft_checkpoints" / tag
    before, after = (json.loads(path.read_text()) for path in (folder / "meta_000020.json", next(tuned.glob("meta_*"))))
    assert before["model_config"] == after["model_config"] and after["step"] == 3
    said = python(patched, *f"-m scripts.chat_cli {on_cpu} -p hello".split(), base=base_dir)
    assert "Assistant:" in said and "Traceback" not in said


# ---------------------------------------------------------------------------- other commits


@pytest.mark.parametrize("commit", OTHERS)
def test_other_upstream_trains_decodes_and_is_restored(commit, home, base_dir, capsys):
    """A clean merge is not yet a working one: the plain trunk must train there and sample."""
    folder = clone(home / commit, commit)
    assert "three-way merge" in capsys.readouterr().out
    assert diff.main([str(folder), "--stat"]) == 0
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("changed files"))
    assert int(row[-2]) + int(row[-1]) <= 120 and int(row[-1]) <= 10
    said = train(folder, base_dir, f"at_{commit}", 3, "--preset", "paper/bov")
    assert "step 00002/00003" in said and "loss: nan" not in said
    chosen = "(decoding or init or flops) and (bov or upstream or baseline)"
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_bov.py", "-k", chosen]
    assert "failed" not in python(folder, *words, base=base_dir)
    for path in folder.rglob("__pycache__"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    assert apply.main([str(folder), "--reverse"]) == 0
    assert git(folder, "status", "--porcelain") == ""
