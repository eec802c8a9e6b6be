"""runs/gpu_check.sh and its parts, in miniature on a CPU: what agrees passes, what is broken on purpose does not."""

import itertools
import json
import math
import os
import subprocess
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanochat import flash_attention, train
from nanochat.bench import equality, parts, train_check
from nanochat.bov import decode
from nanochat.checkpoint_manager import load_checkpoint, save_checkpoint
from nanochat.engine import KVCache
from scripts import base_train, gpu_check

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
FLAGS = [
    "--device-type", "cpu", "--depth", "2", "--aspect-ratio", "16", "--head-dim", "16", "--max-seq-len", "32",
    "--vocab-size", "300", "--device-batch-size", "4", "--total-batch-size", "128", "--no-compile", "--muon", "paper",
]  # fmt: skip


def setting(*more, steps=3):
    args = base_train.parser().parse_args([*FLAGS, "--num-iterations", "8", *more])
    return parts.Setting(args, [*FLAGS, *more], steps)


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    return tmp_path


def wrong(rows) -> set:
    return {row["check"] for row in rows if not row["passed"]}


# ---------------------------------------------------------------------------- equality


def test_the_largest_difference_counts_and_nan_never_passes():
    found, wanted = equality.Differences(), torch.tensor([1.0, -4.0])
    found.add("a", "small", wanted + 0.001, wanted, tolerance=0.1)
    found.add("a", "large", wanted + 1, wanted, tolerance=0.1)
    found.add("a", "small again", wanted, wanted, tolerance=0.1)
    found.add("b", "nan", wanted * math.nan, wanted)
    a, b = found.rows()
    assert a == {"check": "a", "difference": 0.25, "cases": 3, "at": "large", "tolerance": 0.1, "passed": False}
    assert not b["passed"]


def attention_rows(monkeypatch, break_it=None):
    monkeypatch.setattr(equality, "LENGTH", 70)
    monkeypatch.setattr(equality, "WINDOWS", (-1, 37))
    if break_it:
        break_it(monkeypatch)
    found = equality.Differences()
    with equality.backend("sdpa"):
        equality.check_attention(found, CPU, 1, 16, "sdpa")
    return found.rows()


def one_key_too_many(patch):
    original = flash_attention._sdpa
    patch.setattr(flash_attention, "_sdpa", lambda q, k, v, left: original(q, k, v, left if left < 0 else left + 1))


def heads_in_another_order(patch):
    original = flash_attention._sdpa
    patch.setattr(flash_attention, "_sdpa", lambda q, k, v, left: original(q, k, v.flip(1), left))


@pytest.mark.parametrize("break_it", [None, one_key_too_many, heads_in_another_order])
def test_attention_that_is_wrong_is_found(break_it, monkeypatch):
    rows = attention_rows(monkeypatch, break_it)
    names = {f"attention sdpa{what}" for what in ("", ", gradients", ", chunk", ", KV cache")}
    assert {row["check"] for row in rows} == names
    assert wrong(rows) == (names if break_it else set())
    if break_it:  # so large that bf16's tolerance would show it too
        assert min(row["difference"] for row in rows) > 0.1


@pytest.mark.parametrize(
    "device, dtype, fa3, expected",
    [
        ("cuda", torch.bfloat16, True, ["fa3", "varlen", "sdpa"]),
        ("cuda", torch.bfloat16, False, ["varlen", "sdpa"]),
        ("cuda", torch.float32, True, ["sdpa"]),
        ("cpu", torch.bfloat16, False, ["sdpa"]),
    ],
)
def test_every_back_end_that_can_run_is_checked(device, dtype, fa3, expected, monkeypatch):
    monkeypatch.setattr(equality, "COMPUTE_DTYPE", dtype)
    monkeypatch.setattr(flash_attention, "HAS_FA3", fa3)
    assert equality.backends(torch.device(device)) == expected


def test_torchs_own_kernels_are_checked_without_fa3_which_comes_back(monkeypatch):
    calls, before = [], flash_attention.BACKEND
    monkeypatch.setattr(flash_attention, "HAS_FA3", True)
    monkeypatch.setattr(equality, "restore_flash_attention_impl", lambda: calls.append("off"))
    monkeypatch.setattr(equality, "activate_flash_attention_impl", calls.append)
    with equality.backend("varlen"):
        assert flash_attention.BACKEND == "varlen" and calls == ["off"]
    assert flash_attention.BACKEND == before and calls == ["off", "FA3"]


def test_bank_layers_decoded_from_wrong_tokens_are_found(monkeypatch):
    monkeypatch.setattr(equality, "LENGTH", 40)
    checks = []
    for _ in range(2):
        found = equality.Differences()
        equality.check_decoding(found, CPU, 1, 16)
        checks.append(found.rows())
        append = KVCache.append_ids
        monkeypatch.setattr(KVCache, "append_ids", lambda cache, idx, append=append: append(cache, (idx + 1) % 1000))
    banks = {f"decoding {strategy}" for strategy in decode.STRATEGIES}
    assert {row["check"] for row in checks[0]} == banks | {"decoding with V"}
    assert wrong(checks[0]) == set() and wrong(checks[1]) == banks


@pytest.mark.parametrize("factor", [1.0, 1.01], ids=["the same", "1 % more"])
def test_a_compiled_model_is_compared_with_itself_as_written(factor, monkeypatch):
    monkeypatch.setattr(equality, "LENGTH", 40)
    monkeypatch.setattr(equality, "compile_model", lambda model, device: (lambda *xy: model(*xy) * factor, None))
    found = equality.Differences()
    seconds = equality.check_compiled(found, CPU, 1, 16)["compile_seconds"]
    assert list(seconds) == list(equality.PRESETS)
    assert wrong(found.rows()) == ({"compiled, loss", "compiled, gradients"} if factor != 1 else set())
    (gradients,) = (row for row in found.rows() if row["check"] == "compiled, gradients")
    assert gradients["cases"] > 4 * 20  # every parameter of every preset, none with a gradient of zero


def test_a_section_that_breaks_is_named_and_the_others_go_on(monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel image")

    for name in ("check_attention", "check_decoding"):
        monkeypatch.setattr(equality, name, lambda found, *_, name=name: found.note(name, "", 0.0))
    monkeypatch.setattr(equality, "check_layer", broken)
    precision = torch.get_float32_matmul_precision()
    *_, last = equality.equality(setting())
    torch.set_float32_matmul_precision(precision)
    assert [row["passed"] for row in last["checks"]] == [True, False, True]
    assert parts.verdict(last, 0, None) == {"status": "failed", "reason": "bank layer"}


# ---------------------------------------------------------------------------- training and resuming


def test_training_measures_both_variants_and_their_memory(base):
    (found,) = train_check.training(setting())
    assert wrong(found["checks"]) == set() and len(found["checks"]) == 8
    for row in found["variants"].values():
        low, high = row["tokens_per_second"]["quartiles"]
        assert 0 < low <= row["tokens_per_second"]["median"] <= high
        assert 0 < row["optimizer_share"]["median"] < 1
        memory = row["memory"]
        kept = memory["allocated"]["weights"] + memory["allocated"]["optimizer"]
        assert kept <= memory["live_between_steps"] < kept + memory["allocated"]["gradients"]
        assert memory["peak"] > kept + memory["allocated"]["gradients"]
        assert len(row["losses"]) == 2 + 3 + 3  # first and second, warm-up, timed
    tables = found["variants"]["bov"]["parameters"]["value_tables"]
    assert tables > 0 == found["variants"]["baseline"]["parameters"]["value_tables"]
    json.dumps(found)


def test_a_device_batch_that_does_not_fit_is_halved(base, monkeypatch, capsys):
    step = train.train_step

    def small_memory(run):
        if run.args.device_batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore")
        return step(run)

    monkeypatch.setattr(train, "train_step", small_memory)
    (found,) = train_check.training(setting(steps=2))
    assert found["device_batch_size"] == 2 and found["variants"]["bov"]["micro_steps"] == 2
    assert found["did_not_fit"] == "device batch 4: CUDA out of memory. Tried to allocate 1 GiB."


def test_on_cuda_the_optimizer_is_timed_between_events(monkeypatch):
    clock = itertools.count()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1000.0 * (end.at - self.at)

    def step(run):
        for _ in range(2):  # before and after the optimizer's part
            side._mark()
        return 2.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(train, "train_step", step)
    side = train_check.Trained.__new__(train_check.Trained)
    side.run, side._marks = SimpleNamespace(device=torch.device("cuda")), []
    side.losses, side.optimizer_seconds = [], []
    assert side.step() == 3.0 and side.optimizer_seconds == [1.0] and side.losses == [2.5]


def test_a_run_that_resumes_without_its_moments_is_found(base, monkeypatch):
    base_train_process = train_check._base_train

    def forgetful(given, folder, *more):
        if more:
            weights, optimizer, meta = load_checkpoint(folder, train_check.SAVED, CPU, load_optimizer=True)
            for moments in optimizer["state"].values():
                for tensor in moments.values():
                    tensor.zero_()
            save_checkpoint(folder, train_check.SAVED, weights, optimizer, meta)
        return base_train_process(given, folder, *more)

    monkeypatch.setattr(train_check, "_base_train", forgetful)
    *_, found = train_check.resume(setting())
    step, loss, weights = found["checks"]
    assert step["passed"] and loss["difference"] == 0.0 and not weights["passed"]
    assert weights["difference"] > 2 * train_check.TOLERANCES["cuda"][1]  # CUDA's would show it too
    assert len(found["relative_loss_differences"]) == train_check.LAST - train_check.SAVED


# ---------------------------------------------------------------------------- parts


GOOD, BAD = {"check": "good", "passed": True}, {"check": "bad", "passed": False}


@pytest.mark.parametrize(
    "found, code, over, status, reason",
    [
        ({"checks": [GOOD]}, 0, None, "passed", None),
        ({"checks": [GOOD, BAD]}, 0, None, "failed", "bad"),
        ({"checks": [BAD], "error": "E: x"}, 1, None, "failed", "bad; E: x"),
        ({"checks": [BAD]}, -9, 5.0, "failed", "bad"),
        ({"checks": [GOOD]}, -9, 5.0, "skipped", "not done within its 5 s"),
        ({}, -9, 5.0, "skipped", "not done within its 5 s"),
        ({"checks": [GOOD]}, -11, None, "failed", "its process ended with code -11"),
        ({}, 0, None, "failed", "its process ended with code 0"),
    ],
)
def test_verdict(found, code, over, status, reason):
    assert parts.verdict(found, code, over) == {"status": status, "reason": reason}


@pytest.mark.parametrize(
    "budget, expected", [(0.2, "skipped"), (3600, "failed")], ids=["over its budget", "with an error"]
)
def test_a_part_that_does_not_end_well(budget, expected, base):
    broken = setting("--window-pattern", "X")  # ValueError as soon as a model is built
    result = parts.run_part("training", broken, budget, os.environ, base / "out.json")
    assert result["status"] == expected
    assert expected == "skipped" or "window_pattern='X'" in result["error"]


def test_time_that_a_part_leaves_goes_to_the_later_ones(base, monkeypatch, capsys):
    budgets, saves, flags = {}, [], {}

    def run_part(name, part_setting, budget, env, out):
        budgets[name], flags[name] = budget, part_setting.flags
        assert env["NANOCHAT_BASE_DIR"] == str(out.parent) and env["TORCHINDUCTOR_CACHE_DIR"].startswith(
            str(out.parent)
        )
        assert env.get("NANOCHAT_DTYPE") == "float32"  # as these tests set it, and equality_fp32 for itself
        return {"status": "passed", "reason": None, "seconds": 0, "checks": [GOOD], "device_batch_size": 2}

    monkeypatch.setattr(parts, "run_part", run_part)
    results = parts.run_parts(setting(), list(parts.PARTS), 100.0, lambda results: saves.append(len(results)))
    assert list(results) == list(parts.PARTS) and saves == [1, 2, 3, 4]
    wanted = {"equality": 25, "equality_fp32": 100 * 0.2 / 0.75, "training": 100 * 0.35 / 0.55, "resume": 100}
    assert budgets == pytest.approx(wanted, rel=0.05)
    assert flags["training"] == FLAGS and flags["resume"] == [*FLAGS, "--device-batch-size", "2"]
    assert list(base.iterdir()) == []


# ---------------------------------------------------------------------------- the command and the script


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--parts", "speed"], "--parts speed: use all or some of equality"),
        (["--steps", "1"], "--steps 1 must be at least 2"),
        (["--out", "/nowhere/at/all.json"], "--out /nowhere/at/all.json"),
        (["--", "--depth", "0"], "--depth 0"),
        (["--", "--device-batch-size", "3", "--total-batch-size", "1000"], "--total-batch-size 1,000"),
    ],
)
def test_flags_that_cannot_be_run_end_with_one_line(flags, message):
    with pytest.raises(SystemExit, match=f"gpu_check: {message}"):
        gpu_check.main([*flags] if "--" in flags else [*flags, "--", *FLAGS])


def test_a_part_that_failed_is_named_in_the_exit_and_in_the_file(tmp_path, monkeypatch, capsys):
    def run_parts(given, names, limit, save):
        assert given.args.num_iterations == 2 + 3 + 30 and given.flags[-1] == "--total-batch-size=128"
        results = {}
        for name, status in zip(names, ("passed", "failed"), strict=True):
            results[name] = {"status": status, "reason": None if status == "passed" else "why", "checks": [GOOD]}
            save(results)
            assert not json.loads(out.read_text())["passed"]  # not before all have
        return results

    out = tmp_path / "r.json"
    monkeypatch.setattr(parts, "run_parts", run_parts)
    with pytest.raises(SystemExit, match="not passed: resume"):
        gpu_check.main(["--parts", "equality,resume", "--out", str(out), "--", *FLAGS, "--seed", "7"])
    found = json.loads(out.read_text())
    assert found["seed"] == 7 and found["parts"]["resume"]["reason"] == "why" and found["versions"]["torch"]
    assert "failed  resume: why" in capsys.readouterr().out


@pytest.mark.parametrize("smoke", ["0", "1"], ids=["full", "smoke"])
def test_the_script_shows_its_command_and_runs_nothing(smoke, tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("DRY_RUN", "SMOKE", "SEED", "STEPS", "LIMIT")}
    env |= {"DRY_RUN": "1", "SMOKE": smoke, "NANOCHAT_PYTHON": "/nowhere", "NANOCHAT_BASE_DIR": str(tmp_path / "x")}
    done = subprocess.run(["bash", str(ROOT / "runs/gpu_check.sh")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "x").exists()
    (line,) = (line for line in done.stdout.splitlines() if "scripts.gpu_check" in line)
    words = line.split()
    assert ("runs/results" in line) == (smoke == "0") and "--limit 460" in line
    own, flags = words[: words.index("--")], words[words.index("--") + 1 :]
    assert gpu_check.parser().parse_args(own[4:]).limit < 480
    args = base_train.parser().parse_args(flags)
    assert isinstance(args, Namespace) and args.device_type == ("cpu" if smoke == "1" else "cuda")
