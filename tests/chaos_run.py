"""What the chaos sections share: forked children, one tiny run, and its results.

Children are forked from a process that has imported everything, for importing takes longer than the run itself.
"""

import gc
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from nanochat import metrics
from nanochat.checkpoint_files import list_steps, model_path, newest_whole_step, read_tensors
from nanochat.plan import plan_run
from nanochat.train import fresh_model
from scripts import base_train
from tiny import TINY, link_corpus

RUN = [*TINY, "--no-compile", "--num-iterations", "6", "--eval-every", "3", "--save-every", "2", "--keep-last", "2",
       "--preset", "paper/bov"]  # fmt: skip

# ---------------------------------------------------------------------------- children


@dataclass
class Ended:
    """How a child ended: exit code, or minus the signal; None when it had to be killed because it hung."""

    code: int | None
    output: str
    seconds: float

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output


class Child:
    """`function()` in a forked process of its own session; what it prints arrives through a pipe."""

    def __init__(self, function):
        self.started, self.killed, self.output = time.monotonic(), False, b""
        sys.stdout.flush()
        sys.stderr.flush()
        self.pipe, end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _be(function, end)
        os.close(end)
        os.set_blocking(self.pipe, False)

    def poll(self, timeout=300.0, kill_after=None) -> Ended | None:
        """Its end, None while it lives; after `timeout` seconds it has hung, after `kill_after` it gets SIGKILL."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        passed = time.monotonic() - self.started
        code = os.waitstatus_to_exitcode(status) if pid else None
        self._drain()
        if not pid and passed <= timeout:
            if kill_after is not None and passed > kill_after and not self.killed:
                os.kill(self.pid, signal.SIGKILL)
                self.killed = True
            return None
        if not pid:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.pipe)
        return Ended(code, self.output.decode("utf-8", "replace"), passed)

    def wait(self, timeout=300.0, kill_after=None) -> Ended:
        while (end := self.poll(timeout, kill_after)) is None:
            time.sleep(0.003)
        return end

    def _drain(self):
        try:
            while data := os.read(self.pipe, 1 << 16):
                self.output += data
        except BlockingIOError:
            pass


def _be(function, pipe):
    """The life of a child; it does not return."""
    code = 0
    try:
        os.setsid()
        for fd in (1, 2):
            os.dup2(pipe, fd)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(fd), "w", buffering=1) for fd in (1, 2))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        function()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def forked(function, timeout=300.0) -> Ended:
    return Child(function).wait(timeout)


# ---------------------------------------------------------------------------- the run


def warm():
    """Import here what a run would import in every child; some of it comes with the first model alone."""
    config, plan = plan_run(base_train.parser().parse_args(RUN), 320, 1)
    fresh_model(config, torch.device("cpu"), 0).setup_optimizer(**plan.optimizer_args)
    gc.collect()
    gc.freeze()  # children would copy what their collector touches


def trains(base, *more, around=None):
    """A function for a child: the tiny run in `base` from where it is, inside the context `around()`."""

    def function():
        os.environ["NANOCHAT_BASE_DIR"] = str(base)
        torch.set_num_threads(1)
        if around is None:
            base_train.main([*RUN, "--resume", "auto", *more])
        else:
            with around():
                base_train.main([*RUN, "--resume", "auto", *more])

    return function


def new_base(corpus, folder, name) -> Path:
    return link_corpus(corpus, Path(folder, name))


def checkpoints(base) -> Path:
    return Path(base, "base_checkpoints", "t")


def weights_digest(folder, step) -> str:
    """sha256 over names and bytes of the saved weights."""
    state, digest = read_tensors(model_path(folder, step), "cpu"), hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def strict_json(text):
    def refuse(word):
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def facts(base) -> dict:
    """What must not depend on how a run got to its end: final weights, losses, validation, the steps that are kept."""
    folder = checkpoints(base)
    entries = [strict_json(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    strict_json((folder / "DONE.json").read_text())
    for step in list_steps(folder):
        strict_json((folder / f"meta_{step:06d}.json").read_text())
    step = newest_whole_step(folder, optimizer=True, hashes=True)
    return {
        "weights": weights_digest(folder, step), "steps": list_steps(folder),
        "losses": [entry["loss"] for entry in entries if entry["kind"] == "train"],
        "bpb": [entry["val_bpb"] for entry in entries if entry["kind"] == "eval"],
        "leftovers": sorted(path.name for path in folder.iterdir() if path.name.endswith(".tmp")),
        "done": metrics.read_done(folder)["step"],
    }  # fmt: skip


def undisturbed(corpus, folder) -> dict:
    """The facts of the run that nothing disturbs; ValueError when it fails."""
    base = new_base(corpus, folder, "undisturbed")
    end = forked(trains(base))
    if end.code != 0:
        raise ValueError(f"the undisturbed run failed:\n{end.output}")
    return facts(base) | {"seconds": end.seconds}


def same(base, expected) -> str:
    """ "" when the run in `base` ended as the undisturbed one did, else the fields that differ."""
    try:
        found = facts(base)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ", ".join(key for key in found if found[key] != expected[key])
