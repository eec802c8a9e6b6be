"""One rank's failure ends all ranks, within a second or two and with the first error.

Ranks wait for each other inside collectives, where no Python runs. So the rank that fails leaves its error in a store
that every rank's watcher asks, and a watcher that finds one ends its process.
"""

import os
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from nanochat.common import get_dist_info, is_ddp_initialized, leave

POLL = 0.3  # seconds
GRACE = 1.2  # seconds that the first to fail waits, so that all others have asked before connections break
PATIENCE = timedelta(seconds=5)  # for the store to answer

_mine = []  # the main thread's connection to the store; the watcher has another


def _key() -> str:
    return f"nanochat/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def _connect():
    """To the store of the process group, which torchrun or rank 0 keeps."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=PATIENCE)


def watch():
    """From now on this process ends when another rank fails; one process alone has nobody to watch."""
    if is_ddp_initialized() and dist.get_world_size() > 1:
        _mine[:] = [_connect()]
        threading.Thread(target=_listen, args=(_connect(), _key()), name="watch", daemon=True).start()


def _listen(store, key):
    while True:
        time.sleep(POLL)
        try:
            if not store.check([key]):
                continue
            message = store.get(key).decode()
        except Exception:  # the store goes with its owner: at the end, or when it was killed
            return
        if not message.startswith(f"rank {get_dist_info()[1]}:"):
            _follow(message)


def _follow(message):
    print(f"rank {get_dist_info()[1]} ends too: {message}", file=sys.stderr, flush=True)
    leave(1)


def end(message: str, trace: str = ""):
    """End this process with `message` (and `trace`), or, if another rank failed before, with that one's; all follow."""
    ddp, rank, _, world_size = get_dist_info()
    if not ddp or world_size == 1:
        sys.exit(trace + message)
    own = f"rank {rank}: {message}"
    try:
        first = _mine[0].compare_set(_key(), "", own).decode() if _mine else own
    except Exception:  # the store is gone, and with it who could be told
        first = own
    if first != own:
        _follow(first)
    print(trace + own, file=sys.stderr, flush=True)
    if _mine:
        time.sleep(GRACE)
    leave(1)
