"""Kills the paper's runner at random moments, starts it again, and compares its record with an undisturbed run's.

    python -m tests.kill_runner --kills 20 --out runs/results/kill_runner.json

runs/bov_d24.sh in miniature (SMOKE=1): two ranks, two variants. Each kill is a SIGKILL to the shell alone; what it had
started must end by itself. Data and tokenizer are made once. A mended run must end with the same losses, bits per byte
and weights.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nanochat.common import write_json
from nanochat.metrics import git_commit, read_metrics

ROOT = Path(__file__).resolve().parent.parent
RUNS = 2  # trainings of the script
LONGEST = 900  # seconds of one undisturbed run, on a busy machine


def start(base: Path, log):
    env = os.environ | {"SMOKE": "1", "NANOCHAT_PYTHON": sys.executable, "NANOCHAT_BASE_DIR": str(base)}
    return subprocess.Popen(
        ["bash", str(ROOT / "runs/bov_d24.sh")], env=env, stdout=log, stderr=log, start_new_session=True
    )


def record(base: Path) -> dict:
    """What decides whether two runs are the same: per run losses and evaluations by step, and the weights' hash."""
    found = {}
    for folder in sorted((base / "base_checkpoints").iterdir()):
        entries = read_metrics(folder / "metrics.jsonl")
        found[folder.name] = {
            "losses": {e["step"]: e["loss"] for e in entries if e["kind"] == "train"},
            "val_bpb": {e["step"]: e["val_bpb"] for e in entries if e["kind"] == "eval"},
            "weights": json.loads((folder / "DONE.json").read_text())["checkpoint_sha256"],
        }
    return found


def steps_done(base: Path) -> int:
    """Training steps on record over all runs."""
    return sum(1 for path in base.glob("base_checkpoints/*/metrics.jsonl") for _ in path.open())


def undisturbed(base: Path, log) -> float:
    began = time.monotonic()
    code = start(base, log).wait(timeout=LONGEST)
    if code:
        raise SystemExit(f"the undisturbed run ended with {code}; see {log.name}")
    return time.monotonic() - began


def disturbed(base: Path, log, kills: int, seconds: float, draw) -> list[dict]:
    """Kill `kills` times, each after a random part of an undisturbed run; finished runs are wiped and begun anew."""
    history = []
    while len(history) < kills:
        runner = start(base, log)
        after = draw.uniform(0.5, 0.8 * seconds)
        try:
            code = runner.wait(timeout=after)
            if code:
                raise SystemExit(f"a restarted run ended with {code}; see {log.name}")
            shutil.rmtree(base / "base_checkpoints")
        except subprocess.TimeoutExpired:
            os.kill(runner.pid, signal.SIGKILL)
            runner.wait()
            history.append({"seconds": round(after, 2), "lines_on_record": steps_done(base)})
            if len(list(base.glob("base_checkpoints/*/DONE.json"))) == RUNS:  # else later kills miss the trainings
                shutil.rmtree(base / "base_checkpoints")
            print(
                f"kill {len(history)} after {after:.1f} s, {history[-1]['lines_on_record']} lines on record", flush=True
            )
    code = start(base, log).wait(timeout=LONGEST)
    if code:
        raise SystemExit(f"the last run ended with {code}; see {log.name}")
    return history


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--kills", type=int, default=20)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", default=None, help="JSON file of the result")
    args = p.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        calm, shaken = Path(folder, "calm"), Path(folder, "shaken")
        with open(Path(folder, "log.txt"), "w+") as log:
            try:
                undisturbed(calm, log)  # with set-up, data and tokenizer
                wanted = record(calm)
                shutil.copytree(calm, shaken, ignore=shutil.ignore_patterns("base_checkpoints", "report", ".runner*"))
                shutil.rmtree(calm / "base_checkpoints")
                seconds = undisturbed(calm, log)
                history = disturbed(shaken, log, args.kills, seconds, random.Random(args.seed))
                same = record(shaken) == wanted == record(calm)
            except BaseException:
                log.flush()
                print(Path(log.name).read_text()[-3000:], file=sys.stderr)
                raise
    found = {"commit": git_commit(), "seed": args.seed, "undisturbed_seconds": round(seconds, 1), "kills": history}
    if args.out:
        write_json(args.out, found | {"same_record": same})
    print(f"{len(history)} kills; losses, evaluations and weights {'are the same' if same else 'DIFFER'}")
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
