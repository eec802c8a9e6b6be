"""Killing a run: at every write, fsync, rename and deletion of its files, and at random moments; and a full disk."""

import builtins
import errno
import io
import os
import random
import shutil
import signal
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from chaos_run import Child, Ended, checkpoints, forked, new_base, same, trains
from nanochat.checkpoint_files import newest_whole_step

# ---------------------------------------------------------------------------- every operation on files


class Operations:
    """Counts the operations on files under `base`, and at number `at` calls `act(half)`; `half` writes half the bytes.

    Operations: write (as the kernel sees it), fsync, rename, unlink. Recorded per operation: its kind, the file, and
    the newest step that was whole before.
    """

    def __init__(self, base, at=None, act=None):
        self.base, self.at, self.act, self.seen = str(base), at, act, []

    def point(self, kind, path, half=lambda: None):
        path = os.fspath(path)
        if not path.startswith(self.base):
            return
        number = len(self.seen)
        self.seen.append((kind, os.path.basename(path), self._newest() if self.at is None else None))
        if number == self.at:
            self.act(half)

    def _newest(self):
        try:
            return newest_whole_step(checkpoints(self.base))
        except ValueError:
            return None

    @contextmanager
    def watched(self):
        """Within it os and open are the counting ones."""
        outer, names, real_open = self, {}, builtins.open
        real = {name: getattr(os, name) for name in ("fsync", "replace", "unlink", "remove", "fdopen")}

        class Raw(io.FileIO):
            def write(self, data):
                outer.point("write", names[self.fileno()], lambda: super(Raw, self).write(data[: len(data) // 2]))
                return super().write(data)

        def opened(file, mode, encoding):
            where = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
            raw = Raw(file, mode.replace("b", "").replace("t", ""))
            names[raw.fileno()] = where
            buffered = io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding=encoding or "utf-8")

        def counting_open(file, mode="r", buffering=-1, encoding=None, *args, **kwargs):
            if set(mode) & set("wa") and not set(mode) & set("+x") and str(file).startswith(outer.base):
                return opened(file, mode, encoding)
            return real_open(file, mode, buffering, encoding, *args, **kwargs)

        def fdopen(fd, mode="r", *args, encoding=None, **kwargs):
            if "w" in mode:
                return opened(fd, mode, encoding)
            return real["fdopen"](fd, mode, *args, encoding=encoding, **kwargs)

        def fsync(fd):
            outer.point("fsync", os.readlink(f"/proc/self/fd/{fd}"))
            real["fsync"](fd)

        def replace(source, target, **kwargs):
            outer.point("rename", target)
            real["replace"](source, target, **kwargs)

        def unlink(path, **kwargs):
            outer.point("unlink", path)
            real["unlink"](path, **kwargs)

        new = dict(fsync=fsync, replace=replace, unlink=unlink, remove=unlink, fdopen=fdopen)
        try:
            builtins.open = counting_open
            for name, function in new.items():
                setattr(os, name, function)
            yield self
        finally:
            builtins.open = real_open
            for name, function in real.items():
                setattr(os, name, function)


def list_operations(corpus, folder) -> list:
    """(kind, file, newest whole step before it) of every operation of the tiny run, in order."""
    base, out = new_base(corpus, folder, "counted"), Path(folder, "operations.txt")

    @contextmanager
    def around():
        operations = Operations(base)
        with operations.watched():
            yield
        out.write_text(repr(operations.seen))

    end = forked(trains(base, around=around))
    if end.code != 0:
        raise ValueError(f"the counted run failed:\n{end.output}")
    return eval(out.read_text(), {"__builtins__": {}})


def die(half):
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(half):
    half()
    os.kill(os.getpid(), signal.SIGKILL)


def full_disk(half):
    half()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def disturb(corpus, folder, number, act) -> tuple[Ended, Path]:
    """The tiny run with `act` at operation `number`."""
    base = new_base(corpus, folder, f"at_{number}_{act.__name__}")
    operations = Operations(base, at=number, act=act)
    return forked(trains(base, around=operations.watched)), base


def newest_whole(base) -> int:
    """The newest step whose every file has its size and hash; 0 for none."""
    try:
        return newest_whole_step(checkpoints(base), optimizer=True, hashes=True) or 0
    except ValueError:
        return 0


def kill_points(corpus, folder, expected, operations, step=1) -> dict:
    """Every `step`-th operation as a kill point: what is whole afterwards, and whether the run ends as undisturbed."""
    counts, failures = Counter(), []
    cases = [(i, act) for i, (kind, *_) in enumerate(operations)
             for act in ((die, die_half_way) if kind == "write" else (die,))]  # fmt: skip
    for number, act in cases[::step]:
        kind, name, before = operations[number]
        end, base = disturb(corpus, folder, number, act)
        kept = newest_whole(base)
        again = forked(trains(base))
        counts[f"{kind}, half way" if act is die_half_way else kind] += 1
        where = f"operation {number} ({kind} {name}, {act.__name__})"
        if end.code != -signal.SIGKILL:
            failures.append({"what": "not reached", "where": where, "output": end.output[-300:]})
        elif kept < (before or 0):
            failures.append({"what": "lost", "where": where, "kept": kept, "before": before})
        elif again.code != 0 or same(base, expected):
            problem = same(base, expected)
            failures.append(
                {"what": "ends otherwise", "where": where, "differs": problem, "output": again.output[-300:]}
            )
        shutil.rmtree(base)
    return {
        "operations": len(operations), "by_kind": dict(Counter(kind for kind, *_ in operations)),
        "kill_points": len(cases), "tried": sum(counts.values()), "tried_by_kind": dict(counts),
        "lost_or_corrupt": sum(f["what"] == "lost" for f in failures),
        "same_final_weights": sum(counts.values()) - len(failures), "failures": failures,
    }  # fmt: skip


def disk_full(corpus, folder, expected, operations, step=1) -> dict:
    """No room at every `step`-th write of the run: it must end with one line and an error code, and lose nothing."""
    tried, failures = 0, []
    cases = [i for i, (kind, *_) in enumerate(operations) if kind in ("write", "fsync")]
    for number in cases[::step]:
        kind, name, before = operations[number]
        end, base = disturb(corpus, folder, number, full_disk)
        kept, again = newest_whole(base), forked(trains(base))
        tried += 1
        where = f"operation {number} ({kind} {name})"
        harmless = end.code == 0 and not same(base, expected)  # a folder that could not be synced
        clear = end.code == 1 and "No space left on device" in end.output and not end.traceback
        if not (clear or harmless):
            failures.append({"what": "not clear", "where": where, "code": end.code, "output": end.output[-500:]})
        elif kept < (before or 0):
            failures.append({"what": "lost", "where": where, "kept": kept, "before": before})
        elif again.code != 0 or same(base, expected):
            failures.append({"what": "ends otherwise", "where": where, "output": again.output[-300:]})
        shutil.rmtree(base)
    return {"points": len(cases), "tried": tried, "clear_and_intact": tried - len(failures), "failures": failures}


# ---------------------------------------------------------------------------- random moments


def random_kills(corpus, folder, expected, kills=30, seed=0) -> dict:
    """SIGKILL at random moments of a real run, started again until it ends; then runs anew until there were `kills`."""
    generator, done, runs, failures, length = random.Random(seed), 0, 0, [], expected["seconds"]
    while done < kills:
        base = new_base(corpus, folder, f"random_{runs}")
        for _ in range(200):
            patience = generator.uniform(0.05, 0.8) * length if done < kills else None
            end = Child(trains(base)).wait(kill_after=patience)
            if end.code != -signal.SIGKILL:
                break
            done += 1
        runs += 1
        if end.code != 0 or same(base, expected):
            failures.append(
                {"run": runs, "code": end.code, "differs": same(base, expected), "output": end.output[-500:]}
            )
        shutil.rmtree(base)
    return {"kills": done, "runs_ended": runs, "same_final_weights": runs - len(failures), "failures": failures}
