"""All tasks of CORE on one model: centred scores with intervals, kept task by task, continued by a rerun.

CORE (arXiv 2406.11794) is the mean over tasks of (accuracy - r) / (1 - r), r being the accuracy of guessing.
"""

import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from nanochat.common import atomic_write, jsonable, print0, progress, write_json
from nanochat.core_bundle import (
    TASK_LISTS,
    V1,
    bundle_folder,
    choose_tasks,
    find_bundle,
    lacks,
    read_baselines,
    read_items,
    table_sha256,
    task_identity,
)
from nanochat.core_compare import CORE, ITEMS, core_interval, read_lines, summarise
from nanochat.core_eval import answer_task, check_max_len, context_of, on_all_ranks, rank_and_ranks
from nanochat.core_score import NORMS
from nanochat.metrics import config_hash


@dataclass(frozen=True)
class Settings:
    """What is evaluated and how; None or -1 = not limited. Field names are the flags', --core- left out."""

    tasks: str = "bundle"
    norm: str | None = None  # None: byte for paper21, token for everything else
    baselines: str = "bundle"
    max_len: int | None = None
    eval_bundle: str | None = None

    def __post_init__(self):
        if self.norm not in (None, *NORMS):
            raise ValueError(f"--core-norm {self.norm!r}: use {' or '.join(NORMS)}")
        check_max_len(self.max_len)

    @property
    def norm_used(self) -> str:
        return self.norm or ("byte" if self.tasks == "paper21" else "token")


class Store:
    """core.json and items.jsonl of one folder, on rank 0.

    items.jsonl: a header line (kind header, and what the answers depend on), then for each finished task its items
    (kind item: task, index, gold, prediction, losses, correct, flags) and one line of kind task that ends it. `index`
    counts in the shuffled order, which the few-shot draw depends on.
    Files of other settings, or of another checkpoint, are kept under names with the first 8 digits of their hash, and
    taken up again when those settings return.
    """

    def __init__(self, folder, identity: dict):
        self.folder = Path(folder)
        self.header = {"kind": "header", **jsonable(identity)}
        self.lines = {}  # label -> its lines, the task's own last
        self._make_room()
        for line in self._read(self.folder / ITEMS)[1:]:
            self.lines.setdefault(line["task"], []).append(line)
        self.lines = {label: lines for label, lines in self.lines.items() if lines[-1]["kind"] == "task"}

    def _read(self, path) -> list[dict]:
        """Lines of an items file, [] where there is none or it is damaged, which one line says."""
        if not path.exists():
            return []
        try:
            return read_lines(path)
        except ValueError as error:
            print(f"{error}; written anew")
            return []

    def _make_room(self):
        """Move another identity's files aside and this one's back."""
        earlier = self._read(self.folder / ITEMS)
        if earlier and earlier[0] == self.header:
            return
        if earlier:
            self._rename("", _suffix(earlier[0]))
            print(f"{self.folder / ITEMS}: of other settings or weights; kept as items{_suffix(earlier[0])}.jsonl")
        self._rename(_suffix(self.header), "")

    def _rename(self, old, new):
        for name in (CORE, ITEMS):
            stem, ending = name.split(".")
            if (path := self.folder / f"{stem}{old}.{ending}").exists():
                os.replace(path, self.folder / f"{stem}{new}.{ending}")

    def all_lines(self) -> list[dict]:
        """Lines of all finished tasks."""
        return [line for lines in self.lines.values() for line in lines]

    def add(self, lines):
        """Keep a finished task: its item lines, its task line last."""
        self.lines[lines[-1]["task"]] = lines
        with atomic_write(self.folder / ITEMS, "w") as f:
            for line in (self.header, *self.all_lines()):
                f.write(json.dumps(jsonable(line), allow_nan=False) + "\n")  # ASCII: no text in it can end a line

    def write(self, summary):
        write_json(self.folder / CORE, {**self.header, **summary, "kind": "core"})


@contextmanager
def alone(folder):
    """Keep a second evaluation out of `folder`: they would write over each other's files. ValueError when one runs."""
    lock = FileLock(Path(folder, ".core.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{folder}: another process evaluates CORE there; wait for its end") from None
    except NotImplementedError:
        print(f"{folder}: this file system has no locks, so nothing keeps a second evaluation out", flush=True)
    try:
        yield
    finally:
        lock.release()


def _suffix(header) -> str:
    return f"_{config_hash(header)[:8]}"


# ---------------------------------------------------------------------------- one task


def _item_line(label, result, tokenizer) -> dict:
    answer = result.answer
    predicted = tokenizer.decode(answer.predicted) if result.gold is None else answer.predicted
    return {
        "kind": "item", "task": label, "index": result.index, "gold": result.gold, "prediction": predicted,
        "losses": list(answer.losses), "correct": answer.correct, "flags": list(result.flags),
    }  # fmt: skip


def _run_task(model, tokenizer, task, settings: Settings, max_per_task) -> list[dict]:
    """Item lines of a task and the line that ends it."""
    start = time.perf_counter()
    data = _read_alike(task, max_per_task)

    def watch(results):
        return progress(results, desc=task.label, unit="item", leave=False)

    results = answer_task(model, tokenizer, data, task.meta, settings.norm_used, settings.max_len, watch)
    lines = [_item_line(task.label, result, tokenizer) for result in results]
    seconds = time.perf_counter() - start
    return [*lines, {"kind": "task", "task": task.label, "n": len(lines), **task_identity(task), "seconds": seconds}]


def _read_alike(task, max_per_task) -> list[dict]:
    """read_items on every rank; ValueError on all of them when one cannot."""
    try:
        data, problem = read_items(task, max_per_task), None
    except ValueError as error:
        data, problem = [], str(error)
    problems = [said for said in on_all_ranks(lambda: [problem]) if said]
    if problems:
        raise ValueError(problems[0])
    return data


def _task_summary(task, lines, baseline) -> dict:
    """Row of core.json's `tasks`: core_compare.summarise, the shots, the flags that items have, the seconds."""
    *items, end = lines
    flags = [flag for item in items for flag in item["flags"]]
    return summarise(task.label, [item["correct"] for item in items], baseline) | {
        "task_type": task.kind, "num_fewshot": task.shots, "data_sha256": end["data_sha256"],
        "flags": {flag: flags.count(flag) for flag in dict.fromkeys(flags)}, "seconds": end["seconds"],
    }  # fmt: skip


# ---------------------------------------------------------------------------- all of them


def core_identity(settings: Settings, max_per_task, context) -> dict:
    """The settings that single answers depend on; tasks and baselines only say which are taken and how they count."""
    return {"norm": settings.norm_used, "max_per_task": max(max_per_task, -1), "context": context}


def check_settings(settings):
    """Raise the ValueError of settings that cannot be met, as far as that shows without a download; on all ranks."""
    if on_all_ranks(lambda: [settings.eval_bundle is not None or lacks(bundle_folder()) is None])[0]:
        chosen(settings)


def chosen(settings):
    """(bundle, tasks, labels it lacks, baselines) of the settings, on all ranks; ValueError where one names nothing."""
    bundle = Path(on_all_ranks(lambda: [str(find_bundle(settings.eval_bundle))])[rank_and_ranks()[0]])
    tasks, missing = choose_tasks(bundle, settings.tasks)
    return bundle, tasks, missing, read_baselines(bundle, settings.baselines, [task.label for task in tasks])


def evaluate_core(model, tokenizer, device, max_per_task=-1, *, settings=None, store=None, say=print0) -> dict:
    """Evaluate all tasks on all ranks; `device` is the model's, `store` (rank 0) keeps what is finished.

    `say` gets one line per task.
    Returns upstream's results and centered_results {label: value} and core_metric, and what core.json holds besides:
    tasks (core_compare.summarise, flags), core_interval, core_tasks, norm, max_per_task, context, baselines,
    bundle_sha256, missing_tasks (labels of the list that the bundle lacks), failed_tasks {label: why}, flags, and
    standard: a named list, whole and by its own rules, with the baselines of DCLM's first table.
    A task whose file cannot be used is left out; core_metric is then None.
    Raises ValueError for settings that cannot be met, RankFailure when a rank fails: finished tasks are kept.
    """
    settings = settings or Settings()
    bundle, tasks, missing, baselines = chosen(settings)
    kept = on_all_ranks(lambda: store.all_lines() if store else [])
    found, failed = {}, {}

    def keep_summary():
        summary = _summary(settings, tasks, found, missing, failed, baselines, max_per_task)
        summary["context"] = context_of(model, settings.max_len)
        if store:
            store.write(summary)
        return summary

    for task in tasks:
        try:
            lines = _kept(kept, task)
            if lines is None:
                lines = _run_task(model, tokenizer, task, settings, max_per_task)
                if store:
                    store.add(lines)
        except ValueError as error:
            failed[task.label] = str(error)
            say(f"{task.label} failed: {error}")
            continue
        found[task.label] = row = _task_summary(task, lines, baselines[task.label])
        low, high = row["accuracy_interval"]
        said = "".join(f", {count} {flag}" for flag, count in row["flags"].items())
        say(f"{task.label} ({task.shots}-shot): accuracy {row['accuracy']:.4f} [{low:.3f}, {high:.3f}], centred "
            f"{row['centered']:.4f}, {row['seconds']:.1f} s{said}")  # fmt: skip
        keep_summary()
    if not found:
        raise ValueError(f"no task of {bundle} could be evaluated; first: {next(iter(failed.values()))}")
    return keep_summary()


def _kept(lines, task):
    """A finished task's lines when they answer the same questions."""
    own = [line for line in lines if line["task"] == task.label]
    whole = own and own[-1]["n"] == len(own) - 1
    return own if whole and task_identity(task).items() <= own[-1].items() else None


def _summary(settings, tasks, found, missing, failed, baselines, max_per_task) -> dict:
    complete = len(found) == len(tasks)
    whole = complete and max_per_task < 1
    flags = {flag: 0 for row in found.values() for flag in row["flags"]}
    for row in found.values():
        flags |= {flag: flags[flag] + count for flag, count in row["flags"].items()}
    return {
        "core_metric": sum(row["centered"] for row in found.values()) / len(found) if complete else None,
        "core_interval": core_interval(found) if complete else None,
        "complete": complete,
        "standard": whole and flags.keys() <= {"indistinct"} and _by_a_list(settings, tasks, baselines),
        "results": {label: row["accuracy"] for label, row in found.items()},
        "centered_results": {label: row["centered"] for label, row in found.items()},
        "tasks": found, "missing_tasks": missing, "failed_tasks": failed, "flags": flags,
        "core_tasks": settings.tasks, "norm": settings.norm_used, "max_per_task": max_per_task,
        "baselines": {"name": settings.baselines, "sha256": table_sha256(baselines), "table": baselines},
        "bundle_sha256": table_sha256([task_identity(task) for task in tasks if task.label in found]),
    }  # fmt: skip


def _by_a_list(settings, tasks, baselines) -> bool:
    """Whether these are the tasks and shots of a named list, its norm, and the baselines of DCLM's first table."""
    shots = {task.label: task.shots for task in tasks}
    norms = [Settings(name).norm_used for name, listed in TASK_LISTS.items() if listed == shots]
    return settings.norm_used in norms and all(V1[label] == baselines[label] for label in shots)


def write_csv(path, summary):
    """Upstream's table: task, accuracy, centred score; the last line is CORE, empty while tasks are missing."""
    with atomic_write(path, "w") as f:
        f.write(f"{'Task':<35}, {'Accuracy':<10}, {'Centered':<10}\n")
        for label, accuracy in summary["results"].items():
            f.write(f"{label:<35}, {accuracy:<10.6f}, {summary['centered_results'][label]:<10.6f}\n")
        core = "" if summary["core_metric"] is None else f"{summary['core_metric']:.6f}"
        f.write(f"{'CORE':<35}, {'':<10}, {core:<10}\n")
