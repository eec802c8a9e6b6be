"""Faults around a run: a server that fails, files that may not be read or written, a rank that fails."""

import ctypes
import hashlib
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import torch

from bad_server import Server, answer, cut, cut_chunked, hang_up, jump, nonsense, whole
from chaos_run import RUN, Child, checkpoints, forked, new_base, same, trains, weights_digest
from nanochat import checkpoint_files, dataloader, train
from nanochat.checkpoint_files import list_steps
from nanochat.download import download
from scripts import base_train

# ---------------------------------------------------------------------------- downloads

# kind -> the server's answer, given the whole body and a place in it
FAULTS = {
    "404": lambda body, at: answer(404), "403": lambda body, at: answer(403), "429": lambda body, at: answer(429),
    "500": lambda body, at: answer(500), "503": lambda body, at: answer(503, Retry_After=0), "cut": cut,
    "short body": lambda body, at: whole(body[:at]), "wrong content": lambda body, at: whole(bytes(len(body))),
    "cut in chunks": cut_chunked, "hangs up": lambda body, at: hang_up, "no HTTP": lambda body, at: nonsense,
    "resumes elsewhere": lambda body, at: jump(body), "refuses to resume": lambda body, at: answer(416),
    "longer body": lambda body, at: whole(body + b"more"), "redirected": lambda body, at: answer(302, Location="/f"),
}  # fmt: skip
FINAL = ("404", "403")


def downloads(folder, faults=100, seed=0) -> dict:
    """`faults` bad answers in sequences of 1 to 3, before the server recovers: the whole file, or an error by name."""
    generator, server, failures, injected, seen = random.Random(seed), Server(), [], 0, set()
    body = generator.randbytes(200_000)
    sha = {"X_Linked_Etag": f'"{hashlib.sha256(body).hexdigest()}"'}
    ends = {"whole after recovery": 0, "named error": 0}
    try:
        while injected < faults:
            names = [generator.choice(sorted(FAULTS)) for _ in range(generator.randint(1, 3))]
            server.plays["/f"] = [FAULTS[name](body, generator.randrange(len(body))) for name in names] + [
                whole(body, **sha)
            ]
            path = Path(folder, f"download_{injected}")
            try:
                download(f"{server.url}/f", str(path), command="the command", pause=0, check=checked(body))
                good = path.read_bytes() == body and not Path(f"{path}.part").exists()
                ends["whole after recovery"] += good
            except ValueError as error:
                good = str(path) in str(error) and "the command" in str(error) and not path.exists()
                good = good and any(name in FINAL for name in names)
                ends["named error"] += good
            except Exception as error:
                good = False
                names.append(f"{type(error).__name__}: {error}")
            if not good:
                failures.append({"answers": names})
            injected += len(names)
            seen |= set(names)
    finally:
        server.close()
    return {"faults": injected, "kinds": sorted(seen & FAULTS.keys()), "ends": ends, "failures": failures}


def checked(body):
    def check(part):
        if Path(part).read_bytes() != body:
            raise ValueError("not the whole file")

    return check


# ---------------------------------------------------------------------------- disk and permissions


def without_override():
    """As root, obey file permissions from here on: give up CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3; effective, permitted, ...
    found = libc.capget(header, sets)
    for i in (0, 1):
        sets[i] &= ~0b110
    if found or libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "the capabilities cannot be given up")


def closed(relative, mode):
    """Changes the mode of a path under the base directory."""
    return relative, lambda base: os.chmod(Path(base, relative), mode)


def in_the_way(relative):
    """A file where a folder is needed."""

    def put(base):
        shutil.rmtree(Path(base, relative), ignore_errors=True)
        Path(base, relative).write_text("in the way")

    return relative, put


def no_place_for_checkpoints(base):
    shutil.rmtree(Path(base, "base_checkpoints"))
    os.chmod(base, 0o555)


# what -> (the path under the base directory that the message must name, what is done to it)
PERMISSIONS = {
    "base directory read-only": ("base_checkpoints", no_place_for_checkpoints),
    "checkpoint folder read-only": closed("base_checkpoints/t", 0o555),
    "checkpoint folder unreadable": closed("base_checkpoints/t", 0o000),
    "weights unreadable": closed("base_checkpoints/t/model_000004.pt", 0o000),
    "optimizer unreadable": closed("base_checkpoints/t/optim_000004_rank0.pt", 0o000),
    "metadata unreadable": closed("base_checkpoints/t/meta_000004.json", 0o000),
    "metrics unreadable": closed("base_checkpoints/t/metrics.jsonl", 0o000),
    "tokenizer unreadable": closed("tokenizer/tokenizer.json", 0o000),
    "byte counts unreadable": closed("tokenizer/token_bytes.pt", 0o000),
    "training shard unreadable": closed("base_data_climbmix/shard_00000.parquet", 0o000),
    "validation shard unreadable": closed("base_data_climbmix/shard_06542.parquet", 0o000),
    "data folder unreadable": closed("base_data_climbmix", 0o000),
    "a file for the checkpoints": in_the_way("base_checkpoints"),
    "a file for the run's folder": in_the_way("base_checkpoints/t"),
    "a file for the data folder": in_the_way("base_data_climbmix"),
    "a file for the tokenizer": in_the_way("tokenizer"),
}


def permissions(corpus, folder, names=tuple(PERMISSIONS)) -> dict:
    """A run that is to go on from step 4 where something may not be read or written: one line with its name."""
    start, failures, ends = Path(folder, "stopped"), [], {}
    shutil.copytree(corpus, start)
    end = forked(trains(start, "--save-every", "4"), timeout=300)
    if end.code != 0:
        raise ValueError(f"the run before failed:\n{end.output}")
    for path in checkpoints(start).glob("*_000006*"):
        path.unlink()
    (checkpoints(start) / "DONE.json").unlink()
    for name in names:
        base = Path(folder, "permissions")
        shutil.copytree(start, base)
        wanted, spoil = PERMISSIONS[name]
        spoil(base)
        end = forked(obeying(base))
        ends[name] = (end.output.strip().splitlines() or [""])[-1].replace(str(base), "BASE")
        if end.code != 1 or end.traceback or wanted not in ends[name]:
            failures.append({"what": name, "code": end.code, "output": end.output[-600:]})
        subprocess.run(["chmod", "-R", "u+rwX", base], check=True)
        shutil.rmtree(base)
    return {"faults": len(names), "ends": ends, "failures": failures}


def obeying(base):
    def function():
        without_override()
        trains(base)()

    return function


def file_limits(corpus, folder, expected, sizes=(0, 1000, 5000, 20_000, 60_000)) -> dict:
    """The kernel refuses to let files grow beyond a size (RLIMIT_FSIZE): one line, nothing lost, goes on afterwards."""
    failures = []
    for size in sizes:
        base = new_base(corpus, folder, f"limit_{size}")

        def limited(size=size, base=base):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            trains(base)()

        end = forked(limited)
        again = forked(trains(base))
        clear = end.code == 1 and "File too large" in end.output and not end.traceback
        if not clear or again.code != 0 or same(base, expected):
            failures.append({"size": size, "code": end.code, "output": end.output[-400:], "after": again.output[-300:]})
        shutil.rmtree(base)
    return {"sizes": list(sizes), "clear_and_intact": len(sizes) - len(failures), "failures": failures}


# ---------------------------------------------------------------------------- two ranks


def at_call(number, module, name, act):
    """Makes call `number` of `module.name` run `act` first."""
    real, calls = getattr(module, name), []

    def counted(*args, **kwargs):
        calls.append(0)
        if len(calls) == number:
            act(*args)
        return real(*args, **kwargs)

    setattr(module, name, counted)


def fail(kind, text):
    def act(*args):
        raise kind(text)

    return act


def spoil_gradient(run, *_):
    parameter = dict(run.model.named_parameters())["value_embeds.2.weight"]
    parameter.register_hook(lambda grad: grad.index_fill(0, torch.tensor([5]), float("nan")))


def spoil_weights(run, *_):
    run.model.lm_head.weight.data[:] = float("inf")


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)


FULL = fail(OSError, "No space left on device")
BAD_GRADIENT = "not finite at step 3: rank {}: the gradient of group value_embeds (value_embeds.2.weight)"
# what -> (what happens to one rank, what the output of every rank must contain)
RANK_FAULTS = {
    "save": (lambda: at_call(2, checkpoint_files, "_save", FULL), "No space left"),
    "gradient": (lambda: at_call(3, train, "train_step", spoil_gradient), BAD_GRADIENT),
    "SIGKILL": (lambda: at_call(4, train, "train_step", die), ""),
    "SIGTERM": (lambda: at_call(4, train, "train_step", terminate), ""),
    "model": (lambda: at_call(2, checkpoint_files, "write_json", FULL), "No space left"),
    "data": (lambda: at_call(22, dataloader, "read_row_group", fail(ValueError, "a damaged shard")), "a damaged shard"),
    "evaluation": (lambda: at_call(2, train, "evaluate_bpb", fail(RuntimeError, "out of memory")), "out of memory"),
    "step": (lambda: at_call(3, train, "train_step", fail(RuntimeError, "CUDA error: unspecified")), "CUDA error"),
    "loss": (lambda: at_call(4, train, "train_step", spoil_weights), "rank {}: the loss (nan)"),
    "tokenizer": (lambda: at_call(1, train, "get_tokenizer", fail(ValueError, "no tokenizer there")), "no tokenizer"),
}  # fmt: skip
ONLY_RANK_0 = ("model",)


def rank(base, number, port, fault=None, more=()):
    """A function for a child: one of two ranks of the tiny run, with `fault` set up first."""

    def function():
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port), "NANOCHAT_BASE_DIR": str(base)}  # fmt: skip
        torch.set_num_threads(1)
        if fault is not None:
            RANK_FAULTS[fault][0]()
        base_train.main([*RUN, "--device-batch-size", "2", "--resume", "auto", *more])

    return function


def two_ranks(base, fault=None, faulty=1, timeout=300.0):
    """(how rank 0 ended, how rank 1 ended, seconds between the first end and the last)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    children = [Child(rank(base, i, port, fault if i == faulty else None)) for i in (0, 1)]
    ends, times = [None, None], [0.0, 0.0]
    while None in ends:
        for i, child in enumerate(children):
            if ends[i] is None and (end := child.poll(timeout)) is not None:
                ends[i], times[i] = end, time.monotonic()
        time.sleep(0.005)
    return (*ends, abs(times[0] - times[1]))


def rank_failures(corpus, folder, faults=tuple(RANK_FAULTS)) -> dict:
    """Each fault on either rank: both end, with an error code and the first error, and the run goes on afterwards."""
    failures, gaps, tried = [], {}, 0
    base = new_base(corpus, folder, "two_ranks")
    *ends, _ = two_ranks(base)
    if any(end.code for end in ends):
        raise ValueError(f"two ranks failed undisturbed:\n{ends[0].output}\n{ends[1].output}")
    digest = weights(base)
    for fault in faults:
        for faulty in (0,) if fault in ONLY_RANK_0 else (0, 1):
            base = new_base(corpus, folder, f"ranks_{fault}_{faulty}")
            *ends, gap = two_ranks(base, fault, faulty)
            wanted = RANK_FAULTS[fault][1].format(faulty)
            codes = [end.code for end in ends]
            good = codes == [0, 0] if fault == "SIGTERM" else None not in codes and 0 not in codes
            good = good and (fault == "SIGKILL" or all(wanted in end.output for end in ends))
            steps = list_steps(checkpoints(base))
            *again, _ = two_ranks(base)
            good = good and [end.code for end in again] == [0, 0] and weights(base) == digest
            tried, gaps[f"{fault} on rank {faulty}"] = tried + 1, round(gap, 2)
            if not good:
                outputs = [end.output[-700:] for end in ends]
                failures.append({"fault": fault, "rank": faulty, "codes": codes, "steps": steps, "outputs": outputs,
                                 "after": [end.output[-300:] for end in again]})  # fmt: skip
            shutil.rmtree(base)
    return {"faults": tried, "seconds_between_the_ends": gaps, "longest": max(gaps.values()), "failures": failures}


def weights(base):
    try:
        return weights_digest(checkpoints(base), 6)
    except ValueError as error:
        return str(error)
