"""The record of a run: metrics.jsonl while it trains, DONE.json when it has finished, wandb and the terminal beside."""

import hashlib
import json
import math
import os
import platform
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

from nanochat.common import (
    COMPUTE_DTYPE,
    DummyWandb,
    atomic_write,
    get_peak_flops,
    jsonable,
    print0,
    progress,
    write_json,
)


def git_commit() -> str | None:
    """The commit of this code, with "+" when tracked files differ from it; None outside a repository."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + "+" * bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder, *words):
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def versions() -> dict:
    return {"python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform()}


def device_name(device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()})"


def peak_bytes(device) -> int:
    """Most memory ever in use: allocated on CUDA, resident in the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def config_hash(facts: dict) -> str:
    """Identity of a run: sha256 of what decides its result (no path, run name or number of ranks among it)."""
    return hashlib.sha256(json.dumps(jsonable(facts), sort_keys=True).encode()).hexdigest()


class Metrics:
    """metrics.jsonl of one run, one JSON object per line, each written through at once. Ranks but 0 write nothing."""

    def __init__(self, folder, rank, wandb_run):
        self.path, self.rank, self.wandb = Path(folder, "metrics.jsonl"), rank, wandb_run

    def start(self, header: dict):
        """Begin a new file with its header line."""
        if self.rank == 0:
            Path(self.path.parent, "DONE.json").unlink(missing_ok=True)
            with atomic_write(self.path, "w") as f:
                f.write(_line({"kind": "header", **header}))

    def cut(self, step: int):
        """On resume at `step`: drop what comes after it, its evaluation too, since a save precedes that."""
        if self.rank == 0:
            Path(self.path.parent, "DONE.json").unlink(missing_ok=True)
            kept = [entry for entry in read_metrics(self.path) if _is_before(entry, step)]
            with atomic_write(self.path, "w") as f:
                f.writelines(map(_line, kept))

    def log(self, kind: str, **fields):
        if self.rank == 0:
            with self._open() as f:
                f.write(_line({"kind": kind, **fields}))
            self._to_wandb({f"{kind}/{name}": value for name, value in fields.items()})

    def sync(self):
        """What was logged is on the disk: a power cut leaves no checkpoint without the lines before it."""
        if self.rank == 0:
            with self._open() as f:
                os.fsync(f.fileno())

    @contextmanager
    def _open(self):
        try:
            with open(self.path, "a", encoding="utf-8") as f:
                yield f
        except OSError as error:  # a full disk gives no name when it writes
            raise OSError(error.errno, f"not written: {error.strerror}", str(self.path)) from error

    def _to_wandb(self, values):
        try:
            self.wandb.log(values)
        except Exception as error:  # whatever wandb raises, the run goes on
            print0(f"wandb failed ({error}); metrics.jsonl stays complete without it")
            self.wandb = DummyWandb()


def _is_before(entry, step) -> bool:
    return entry["kind"] == "header" or entry["step"] < step or (entry["step"] == step and entry["kind"] == "train")


def _line(entry) -> str:
    return json.dumps(jsonable(entry), allow_nan=False) + "\n"


def read_metrics(path) -> list[dict]:
    """The entries of a metrics.jsonl; empty when there is no file. A half-written last line is left out."""
    if not Path(path).exists():
        return []
    entries = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            print0(f"{path}: line {number} is not complete; left out")
    return entries


def read_done(folder) -> dict | None:
    """DONE.json of a finished run, else None. Raises ValueError naming the file when it is no JSON."""
    path = Path(folder, "DONE.json")
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete it to train again") from error


def write_done(folder, **fields):
    write_json(Path(folder, "DONE.json"), fields)


def start_wandb(name: str, rank: int, config: dict):
    """A wandb run for --run NAME on rank 0; a dummy for "dummy", other ranks, or when wandb cannot start."""
    if name == "dummy" or rank != 0:
        return DummyWandb()
    try:
        import wandb

        return wandb.init(project="nanochat", name=name, config=config)
    except Exception as error:  # whatever wandb raises, the run goes on
        print0(f"wandb could not start ({error}); metrics.jsonl is complete without it")
        return DummyWandb()


def header(config: dict, preset: str | None, plan: dict, data: dict, tokenizer: str, seed: int, eval_tokens: int,
           muon: str, device) -> dict:  # fmt: skip
    """The first line of metrics.jsonl."""
    return {
        "commit": git_commit(), "versions": versions(), "device": device_name(device), "dtype": str(COMPUTE_DTYPE),
        "ranks": int(os.environ.get("WORLD_SIZE", 1)), "preset": preset, "config": config, "plan": plan, "data": data,
        "tokenizer_sha256": tokenizer, "seed": seed, "eval_tokens": eval_tokens, "muon": muon,
    }  # fmt: skip


class Reporter:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, run):
        self.run, self.steps = run, run.plan.num_iterations
        self.bar = progress(total=self.steps, initial=run.step, desc=run.folder.name, unit="step")
        self.every = max(1, self.steps // 50)
        self.peak = get_peak_flops(device_name(run.device)) if run.device.type == "cuda" else math.inf
        self.recent = []

    def say(self, line: str):
        if self.bar.disable:
            print0(line, flush=True)
        elif self.run.rank == 0:
            self.bar.write(line)

    def step(self, loss: float, seconds: float):
        run = self.run
        self.recent = [*self.recent[-19:], seconds]
        pace = sorted(self.recent)[len(self.recent) // 2]
        rate = run.plan.total_batch_size / seconds
        mfu = run.summary["flops_per_token"] * rate / (self.peak * run.world_size)
        self.bar.update()
        self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} tok/s", refresh=False)
        if self.bar.disable and (run.step % self.every == 0 or run.step == self.steps):
            left = pace * (self.steps - run.step)
            line = f"step {run.step}/{self.steps}  loss {loss:.4f}  {rate:,.0f} tok/s"
            line += f"  MFU {mfu:.1%}" if mfu else ""
            self.say(f"{line}  about {left / 60:.1f} min left")
