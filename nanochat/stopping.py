"""Stopping on a signal: finish the step, save, say how to go on. `run` is a nanochat.train.Run everywhere."""

import os
import signal
import threading
import time
from contextlib import suppress
from itertools import islice

import torch
import torch.distributed as dist

from nanochat.common import print0, progress
from nanochat.saving import save

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TOGETHER = 1.0  # seconds; within them a signal is the same one again, as from a scheduler and from torchrun
SIGNAL_CHECK = 16  # batches of an evaluation between two questions to the other ranks


def listen(run):
    """The first SIGINT, SIGTERM or SIGHUP asks the loop to save and stop; one more, later, ends the process at once.

    A thread is told of each when it arrives. The main thread hears of it only behind the library call it is in, which
    may last longer than TOGETHER, or for ever. A SIGHUP that is ignored, as under nohup, stays so.
    """
    arrived, written = os.pipe()
    os.set_blocking(written, False)
    threading.Thread(target=_note, args=(run, arrived), name="signals", daemon=True).start()
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # what a child is sent is its own
    for number in STOPPING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def _note(run, arrived):
    first = None
    while True:
        number, now = os.read(arrived, 1)[0], time.monotonic()
        if number not in STOPPING:
            continue
        if first is None:
            first = now
            run.stop.append(number)
            with suppress(OSError):  # the terminal may be what is gone
                print0("\nstopping soon, saving first (again to stop at once)", flush=True)
        elif now - first > TOGETHER:
            os._exit(128 + number)


def stop_requested(run) -> int:
    """The signal that any rank received, 0 for none; all ranks get the same answer."""
    signals = torch.tensor([run.stop[0] if run.stop else 0], device=run.device)
    if run.world_size > 1:
        dist.all_reduce(signals, op=dist.ReduceOp.MAX)
    return int(signals.item())


def stop(run):
    """Save, say how to go on, and end: with 0 after SIGTERM, which schedulers send, else with 128 + the number."""
    number = stop_requested(run)
    save(run)
    print0(f"stopped at step {run.step}, resumable: the same command with --resume auto continues", flush=True)
    raise SystemExit(0 if number == signal.SIGTERM else 128 + number)


def interruptible(run, batches, steps: int):
    """The batches of an evaluation under a progress bar; a signal between two of them stops the run."""
    batches = progress(islice(batches, steps), total=steps, desc="validation", unit="batch", leave=False)
    for i, batch in enumerate(batches):
        if (run.world_size == 1 or i % SIGNAL_CHECK == 0) and stop_requested(run):
            stop(run)
        yield batch
