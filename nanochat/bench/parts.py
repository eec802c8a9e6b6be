"""The parts of scripts/gpu_check.py, each in a process of its own: what one does to the device the next does not feel.

A part is a generator of growing dicts with a list "checks", whose rows say "passed". python -m nanochat.bench.parts
is the process of one part: it reads what to do from stdin as JSON and writes each dict to a file.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nanochat.common import get_base_dir, write_json

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Setting:
    """args: the flags of base_train as parsed, no size left open; flags: the same as words; steps: of baseline and of
    BoV that are timed.
    """

    args: Namespace
    flags: list[str]
    steps: int

    @property
    def device(self) -> torch.device:
        return torch.device(self.args.device_type)


@dataclass(frozen=True)
class Part:
    share: float  # of the seconds, when all parts run
    env: dict


PARTS = {
    "equality": Part(0.25, {}),
    "equality_fp32": Part(0.2, {"NANOCHAT_DTYPE": "float32"}),
    "training": Part(0.35, {}),
    "resume": Part(0.2, {}),
}


# ---------------------------------------------------------------------------- the parent


def run_parts(setting: Setting, names, limit: float, save) -> dict:
    """Results of parts by name, none later than `limit` seconds from now; `save(results)` after each of them.

    Time that a part leaves goes to the later ones. Compilers start from an empty cache, shared by the parts.
    """
    deadline, results = time.perf_counter() + limit, {}
    with tempfile.TemporaryDirectory(prefix="check_", dir=get_base_dir(), ignore_cleanup_errors=True) as folder:
        env = os.environ | {"NANOCHAT_BASE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "compiled")}
        for i, name in enumerate(names):
            left, shares = deadline - time.perf_counter(), [PARTS[n].share for n in names[i:]]
            budget = max(0.0, left * shares[0] / sum(shares))
            print(f"{name}, at most {budget:.0f} s", flush=True)
            results[name] = run_part(name, setting, budget, env | PARTS[name].env, Path(folder, f"{name}.json"))
            say(name, results[name])
            save(results)
            if name == "training" and "device_batch_size" in results[name]:  # the one that fits
                fits = ["--device-batch-size", str(results[name]["device_batch_size"])]
                setting = replace(setting, flags=[*setting.flags, *fits])
    return results


def run_part(name, setting, budget, env, out: Path) -> dict:
    """One part in its process, killed with all that it started once `budget` seconds are over."""
    message = {"part": name, "out": str(out), **vars(setting), "args": vars(setting.args)}
    start, late = time.perf_counter(), False
    process = subprocess.Popen(
        [sys.executable, "-m", "nanochat.bench.parts"], stdin=subprocess.PIPE, text=True, cwd=ROOT, env=env,
        start_new_session=True,
    )  # fmt: skip
    try:
        process.communicate(json.dumps(message), timeout=budget)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    times = {"seconds": round(time.perf_counter() - start, 1), "budget_seconds": round(budget, 1)}
    return verdict(found, process.returncode, budget if late else None) | times | found


def verdict(found: dict, code: int, over: float | None) -> dict:
    """{"status": passed, failed or skipped, "reason"} of a part that ended with `code`, or was killed at `over` s."""
    wrong = [row["check"] for row in found.get("checks", []) if not row["passed"]]
    wrong += [found["error"]] if "error" in found else []
    if wrong:
        return {"status": "failed", "reason": "; ".join(wrong)}
    if over is not None:
        return {"status": "skipped", "reason": f"not done within its {over:.0f} s"}
    if code != 0 or not found.get("checks"):
        return {"status": "failed", "reason": f"its process ended with code {code}"}
    return {"status": "passed", "reason": None}


def say(name, result):
    """One line, and the checks that did not pass."""
    checks = result.get("checks", [])
    for row in checks:
        if not row["passed"]:
            print(f"  NOT  {json.dumps(row)}")
    reason = f": {result['reason']}" if result["reason"] else f", {len(checks)} checks"
    print(f"  {result['status']}{reason} [{result['seconds']:.0f} s]", flush=True)


def summary(results: dict) -> str:
    """The last lines: what became of every part, and what training measured."""
    lines = [f"{result['status']:>8}  {name}{': ' * bool(result['reason'])}{result['reason'] or ''}"
             for name, result in results.items()]  # fmt: skip
    if "variants" in (found := results.get("training", {})):
        low, high = found["tokens_per_second_bov_over_baseline"]["quartiles"]
        median = found["tokens_per_second_bov_over_baseline"]["median"]
        lines.append(f"BoV trains at {median:.3f} times the baseline's tokens/s (quartiles {low:.3f} to {high:.3f})")
    return "\n".join(lines)


# ---------------------------------------------------------------------------- the child


def child():
    """Run one part; exit code 1 when it raised, with the error in its results."""
    message = json.loads(sys.stdin.read())
    part, out = message.pop("part"), message.pop("out")
    setting = Setting(**message | {"args": Namespace(**message["args"])})
    found = {}
    try:
        for found in _function(part)(setting):
            write_json(out, found)
    except Exception as error:
        traceback.print_exc()
        write_json(out, found | {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def _function(part):
    from nanochat.bench import equality, train_check

    functions = {"training": train_check.training, "resume": train_check.resume}
    return functions.get(part, equality.equality)


if __name__ == "__main__":
    child()
