"""The evaluation bundle: fetched, checked and unpacked; its tasks, items and random baselines.

Layout, as upstream's: core.yaml (tasks), eval_data/**.jsonl (items), eval_meta_data.csv (random baselines in percent).
"""

import csv
import hashlib
import json
import os
import random
import shutil
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import yaml
from filelock import FileLock

from nanochat.common import file_sha256, first_line, get_base_dir
from nanochat.core_prompts import FIELDS, check_items
from nanochat.download import download

BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
COMMAND = "python -m scripts.base_eval --eval core"
CONFIG, BASELINE_TABLE, DATA = "core.yaml", "eval_meta_data.csv", "eval_data"
SHUFFLE_SEED = 1337  # of the items, before --max-per-task takes the first of them

# Shots of the two task lists: DCLM's 22, which upstream's bundle names, and the 21 of the paper's authors.
DCLM22 = {
    "hellaswag_zeroshot": 0, "jeopardy": 10, "bigbench_qa_wikidata": 10, "arc_easy": 10, "arc_challenge": 10,
    "copa": 0, "commonsense_qa": 10, "piqa": 10, "openbook_qa": 0, "lambada_openai": 0, "hellaswag": 10, "winograd": 0,
    "winogrande": 0, "bigbench_dyck_languages": 10, "agi_eval_lsat_ar": 3, "bigbench_cs_algorithms": 10,
    "bigbench_operators": 10, "bigbench_repeat_copy_logic": 10, "squad": 10, "coqa": 0, "boolq": 10,
    "bigbench_language_identification": 10,
}  # fmt: skip
PAPER21 = {label: shots for label, shots in DCLM22.items() if label != "hellaswag_zeroshot"}
PAPER21 |= {"arc_easy": 25, "arc_challenge": 25, "winogrande": 5}
TASK_LISTS = {"dclm22": DCLM22, "paper21": PAPER21}

# Random baselines in percent: DCLM's first table, which the bundle holds, and the table with DCLM's corrections.
V1 = dict.fromkeys(DCLM22, 0.0) | {
    "arc_easy": 25.0, "arc_challenge": 25.0, "hellaswag": 25.0, "hellaswag_zeroshot": 25.0, "openbook_qa": 25.0,
    "copa": 50.0, "piqa": 50.0, "winograd": 50.0, "winogrande": 50.0, "commonsense_qa": 20.0, "agi_eval_lsat_ar": 20.0,
    "boolq": 62.0, "bigbench_language_identification": 9.1,
}  # fmt: skip
CURRENT = V1 | {"commonsense_qa": 40.3, "agi_eval_lsat_ar": 25.0, "bigbench_language_identification": 25.0}
BASELINES = {"v1": V1, "current": CURRENT}


# ---------------------------------------------------------------------------- where it comes from


def bundle_folder() -> Path:
    """Where a fetched bundle is, or will be."""
    return Path(get_base_dir(), "eval_bundle")


def find_bundle(directory=None) -> Path:
    """The folder of a whole bundle: `directory`, or the base directory's, fetched and unpacked where it is not whole.

    Raises ValueError naming what is missing in `directory`, or why the download failed.
    """
    if directory is not None:
        problem = lacks(Path(directory))
        if problem:
            raise ValueError(f"--eval-bundle {directory}: {problem}")
        return Path(directory)
    target = bundle_folder()
    archive = target.with_suffix(".zip")
    with FileLock(f"{archive}.lock"):
        if problem := lacks(target, archive):
            if target.exists():
                print(f"{problem}: the bundle is put there anew, what was there kept as {target}.replaced", flush=True)
            if not archive.exists() or _broken(archive):
                print(f"fetching the evaluation bundle from {BUNDLE_URL}", flush=True)
                download(BUNDLE_URL, str(archive), command=COMMAND, check=check_archive)
            unpack(archive, target)
    return target


def lacks(directory: Path, archive=None) -> str | None:
    """What keeps a folder from being a whole bundle, None when it is one; sizes are those of `archive` where it is."""
    for name in (CONFIG, BASELINE_TABLE):
        if not (directory / name).is_file():
            return f"{directory / name} is missing"
    try:
        tasks = read_tasks(directory)
    except ValueError as error:
        return str(error)
    for task in tasks:
        if not task.path.is_file():
            return f"{task.path} is missing"
    for name, size in (_sizes(archive) if archive is not None else {}).items():
        path = directory.parent / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{path} is missing or has not the size it has in {archive}"
    return None


def _sizes(archive) -> dict[str, int]:
    """Bytes of each file of the bundle in a zip file; {} where there is no whole one."""
    try:
        with zipfile.ZipFile(archive) as z:
            files = [member for member in z.infolist() if not member.is_dir()]
    except (OSError, zipfile.BadZipFile):
        return {}
    return {member.filename: member.file_size for member in files if member.filename.startswith("eval_bundle/")}


def check_archive(path):
    """ValueError unless `path` is a zip file whose checksums are right and which holds a bundle."""
    try:
        with zipfile.ZipFile(path) as z:
            damaged = z.testzip()
            names = z.namelist()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise ValueError(f"{path}: not a whole zip file ({error})") from error
    if damaged:
        raise ValueError(f"{path}: {damaged} in it is damaged")
    if f"eval_bundle/{CONFIG}" not in names:
        raise ValueError(f"{path}: holds no eval_bundle/{CONFIG}")


def _broken(path) -> bool:
    try:
        check_archive(path)
    except ValueError:
        return True
    return False


def unpack(archive, target: Path):
    """Put the bundle of `archive` in place of `target`, whole or not at all; what was there is kept as .replaced."""
    for left in target.parent.glob(".eval_bundle.*"):
        shutil.rmtree(left)  # of a process that was killed here
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".eval_bundle.") as folder:
        with zipfile.ZipFile(archive) as z:
            z.extractall(folder)
        fresh = Path(folder, "eval_bundle")
        problem = lacks(fresh)
        if problem:
            raise ValueError(f"{archive}: {problem}; delete it and run {COMMAND} again")
        if target.exists():
            earlier = target.with_name(f"{target.name}.replaced")
            if earlier.exists():
                os.rename(earlier, Path(folder, "earlier"))
            os.rename(target, earlier)
        os.rename(fresh, target)


# ---------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Task:
    label: str
    path: Path
    kind: str  # a key of core_prompts.FIELDS
    shots: int
    delimiter: str

    @property
    def meta(self) -> dict:
        """The task as core_prompts and upstream's evaluate_task take it."""
        return {"task_type": self.kind, "num_fewshot": self.shots, "continuation_delimiter": self.delimiter}


def read_tasks(bundle) -> list[Task]:
    """The tasks of a bundle's core.yaml in its order. ValueError names the file where it is not one."""
    path = Path(bundle, CONFIG)
    try:
        tasks = [_task(bundle, entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["icl_tasks"]]
    except (OSError, yaml.YAMLError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a list of CORE tasks ({type(error).__name__}: {first_line(error)})") from error
    if not tasks:
        raise ValueError(f"{path}: lists no task")
    labels = [task.label for task in tasks]
    if twice := [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
        raise ValueError(f"{path}: {twice[0]} is there {labels.count(twice[0])} times; every label once")
    return tasks


def _task(bundle, entry) -> Task:
    """The task of an entry of core.yaml. ValueError says what of it is no task."""
    label, uri, kind, shots = (entry[key] for key in ("label", "dataset_uri", "icl_task_type", "num_fewshot"))
    delimiter = entry.get("continuation_delimiter", " ")
    for name, value in (("label", label), ("dataset_uri", uri), ("continuation_delimiter", delimiter)):
        if not isinstance(value, str):
            raise ValueError(f"{label}: {name} {value!r} is no text")
    if kind not in list(FIELDS):
        raise ValueError(f"{label} has icl_task_type {kind!r}; known are {', '.join(FIELDS)}")
    if not isinstance(shots, list) or type(shots[0]) is not int or shots[0] < 0:
        raise ValueError(f"{label}: num_fewshot {shots!r}, not a list that begins with a number of shots")
    return Task(label, Path(bundle, DATA, uri), kind, shots[0], delimiter)


def choose_tasks(bundle, which) -> tuple[list[Task], list[str]]:
    """(tasks to evaluate, labels of the list that the bundle lacks) for --core-tasks.

    bundle: what core.yaml says; dclm22, paper21: that list with its own shots; else labels with commas between them.
    Raises ValueError for an unknown label or when nothing is left.
    """
    there = {task.label: task for task in read_tasks(bundle)}
    if which == "bundle":
        return list(there.values()), []
    if which in TASK_LISTS:
        shots = TASK_LISTS[which]
        missing = [label for label in shots if label not in there]
        tasks = [
            Task(label, there[label].path, there[label].kind, count, there[label].delimiter)
            for label, count in shots.items()
            if label in there
        ]
        if not tasks:
            raise ValueError(f"--core-tasks {which}: {bundle} has none of its tasks")
        return tasks, missing
    labels = [label.strip() for label in which.split(",")]
    unknown = [label for label in labels if label not in there]
    if unknown:
        raise ValueError(
            f"--core-tasks {unknown[0]!r}: use bundle, {', '.join(TASK_LISTS)}, or of {bundle}: {', '.join(there)}"
        )
    return [there[label] for label in dict.fromkeys(labels)], []


def read_items(task: Task, max_per_task=-1) -> list[dict]:
    """The items of a task in upstream's shuffled order, the first `max_per_task` of them (-1: all).

    Raises ValueError naming the file when it holds no items or items of another kind.
    """
    try:
        with open(task.path, encoding="utf-8") as f:
            data = [json.loads(line) for line in f if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{task.path}: cannot be read ({first_line(error)})") from error
    if not data:
        raise ValueError(f"{task.path}: holds no items")
    check_items(data, task.kind, task.path)
    random.Random(SHUFFLE_SEED).shuffle(data)
    return data[:max_per_task] if max_per_task > 0 else data


# ---------------------------------------------------------------------------- baselines


def read_baselines(bundle, which, labels) -> dict[str, float]:
    """{label: accuracy of guessing, in percent} of `labels` for --core-baselines: bundle, v1, current or a CSV file.

    Raises ValueError naming the table and the label it lacks.
    """
    if which in BASELINES:
        table, name = BASELINES[which], f"--core-baselines {which}"
    else:
        path = Path(bundle, BASELINE_TABLE) if which == "bundle" else Path(which)
        table, name = _read_table(path), str(path)
    absent = [label for label in labels if label not in table]
    if absent:
        raise ValueError(f"{name}: no random baseline of {absent[0]}")
    return {label: table[label] for label in labels}


def _read_table(path):
    try:
        with open(path, encoding="utf-8", newline="") as f:
            table = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(f)}
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"--core-baselines {path}: no table with the columns 'Eval Task' and 'Random baseline' ({error})"
        ) from error
    wrong = [label for label, percent in table.items() if not 0 <= percent < 100]
    if wrong:
        raise ValueError(f"{path}: the baseline of {wrong[0]} is {table[wrong[0]]}, not a percentage under 100")
    return table


def table_sha256(table) -> str:
    """Hash of a mapping that JSON can write, whatever its order."""
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def task_identity(task: Task) -> dict:
    """What decides a task's questions, its items by the hash of their file."""
    return {"label": task.label, **task.meta, "data_sha256": file_sha256(task.path)}
