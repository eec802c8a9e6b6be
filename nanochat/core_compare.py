"""How sure a CORE score is, and what two models' items say about each other.

Intervals are bootstrap percentiles (95 %) with the items of each task drawn anew and the tasks kept; they say how far
the choice of items alone may have moved a number, nothing about other seeds or training runs. A task's own p-value is
the exact sign test on the items that one model has right and the other wrong (McNemar); Holm's correction covers all
tasks compared. CORE's p-value gives each such item to either model at random.
"""

import json
import zlib
from math import comb
from pathlib import Path

import numpy as np

from nanochat.common import first_line

DRAWS = 10_000
SEED = 20260602
CORE, ITEMS = "core.json", "items.jsonl"


def centre(accuracy, baseline):
    """0 for guessing, 1 for all right: `accuracy` as a fraction (or an array of them), `baseline` in percent."""
    return (accuracy - 0.01 * baseline) / (1.0 - 0.01 * baseline)


def interval(draws) -> list[float]:
    """[low, high]: the middle 95 % of draws (R,)."""
    return [float(value) for value in np.percentile(draws, (2.5, 97.5))]


def _generator(label):
    """One stream of numbers per task, so that no task's interval depends on the others."""
    return np.random.default_rng([SEED, zlib.crc32(label.encode())])


# ---------------------------------------------------------------------------- one model


def accuracy_draws(label, correct: int, n: int):
    """Accuracies (DRAWS,) of `n` items drawn with replacement from those of a task, `correct` of them right."""
    return _generator(label).binomial(n, correct / n, DRAWS) / n


def summarise(label, outcomes, baseline) -> dict:
    """n, correct, accuracy, baseline (percent), centered, and their intervals, from one bool per item."""
    n, correct = len(outcomes), sum(outcomes)
    draws = accuracy_draws(label, correct, n)
    return {
        "n": n, "correct": correct, "accuracy": correct / n, "accuracy_interval": interval(draws),
        "baseline": baseline, "centered": centre(correct / n, baseline),
        "centered_interval": interval(centre(draws, baseline)),
    }  # fmt: skip


def core_interval(tasks: dict) -> list[float]:
    """Interval of the mean centred score of tasks {label: what summarise gave}."""
    draws = [centre(accuracy_draws(label, t["correct"], t["n"]), t["baseline"]) for label, t in tasks.items()]
    return interval(np.mean(draws, axis=0))


# ---------------------------------------------------------------------------- two models


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact p-value of `wins` against `losses` when either were as likely."""
    n, k = wins + losses, min(wins, losses)
    return min(1.0, 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n)


def holm(p_values) -> list[float | None]:
    """Holm's step-down correction, in the given order; None stays None and counts as no test."""
    tests = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected, least = [None] * len(p_values), 0.0
    for rank, (p, i) in enumerate(tests):
        least = max(least, min(1.0, (len(tests) - rank) * p))
        corrected[i] = least
    return corrected


def compare_outcomes(a: dict, b: dict, baselines: dict) -> dict:
    """Model b against model a, item by item: {label: one bool per item, in the same order}; baselines in percent.

    Returns tasks {label: n, a, b, difference (b - a, raw accuracy), interval, wins (b right, a wrong), losses, ties,
    p_value, p_holm}; core {a, b, difference, interval, p_value}; gains and regressions, labels by size of difference.
    Raises ValueError when the two are not of the same items.
    """
    if a.keys() != b.keys() or any(len(a[label]) != len(b[label]) for label in a) or not a:
        raise ValueError("the two models have not answered the same items: compare results of the same tasks and sizes")
    tasks, by_chance, resampled = {}, [], []
    for label in a:
        n, weight = len(a[label]), 1 / (1 - 0.01 * baselines[label])
        wins, losses = (
            sum(x and not y for x, y in zip(*pair, strict=True))
            for pair in ((b[label], a[label]), (a[label], b[label]))
        )
        rng = _generator(label)
        drawn = rng.multinomial(n, [wins / n, losses / n, 1 - (wins + losses) / n], DRAWS)
        draws = (drawn[:, 0] - drawn[:, 1]) / n
        resampled.append(weight * draws)
        by_chance.append(weight * (2 * rng.binomial(wins + losses, 0.5, DRAWS) - wins - losses) / n)
        tasks[label] = {
            "n": n, "a": sum(a[label]) / n, "b": sum(b[label]) / n, "difference": (wins - losses) / n,
            "interval": interval(draws), "wins": wins, "losses": losses, "ties": n - wins - losses,
            "p_value": sign_test(wins, losses),
        }  # fmt: skip
    for task, p in zip(tasks.values(), holm([task["p_value"] for task in tasks.values()]), strict=True):
        task["p_holm"] = p
    return {"core": _core_difference(tasks, baselines, resampled, by_chance), "tasks": tasks} | _sides(tasks)


def _core_difference(tasks, baselines, resampled, by_chance):
    scores = {
        side: sum(centre(task[side], baselines[label]) for label, task in tasks.items()) / len(tasks) for side in "ab"
    }
    difference, chance = scores["b"] - scores["a"], np.abs(np.mean(by_chance, axis=0))
    return scores | {
        "difference": difference,
        "interval": interval(np.mean(resampled, axis=0)),
        "p_value": float((1 + np.sum(chance >= abs(difference) - 1e-12)) / (1 + DRAWS)),
    }


def _sides(tasks):
    """Tasks that went up and tasks that went down, the largest change first."""
    by_size = sorted(tasks, key=lambda label: -abs(tasks[label]["difference"]))
    return {
        "gains": [label for label in by_size if tasks[label]["difference"] > 0],
        "regressions": [label for label in by_size if tasks[label]["difference"] < 0],
    }


# ---------------------------------------------------------------------------- from files

# What a line of items.jsonl has at least, by its kind, and each value's type.
FORM = {
    "item": {"task": str, "index": int, "correct": bool, "flags": list},
    "task": {
        "task": str, "n": int, "task_type": str, "num_fewshot": int, "continuation_delimiter": str,
        "data_sha256": str, "seconds": float,
    },
}  # fmt: skip


def read_lines(path) -> list[dict]:
    """The lines of an items file, its header first. ValueError where it cannot be read or is not such a file."""
    try:
        header, *lines = (json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines())
        if not isinstance(header, dict) or header["kind"] != "header" or not all(map(_has_form, lines)):
            raise ValueError("a line of another kind")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: no items of a CORE evaluation ({type(error).__name__}: {first_line(error)})"
        ) from error
    return [header, *lines]


def _has_form(line) -> bool:
    form = FORM[line["kind"]]
    return all(type(line[key]) is kind for key, kind in form.items()) and set(map(type, line.get("flags", ()))) <= {str}


def _core(folder) -> tuple[dict, dict]:
    """(accuracies, baselines) by label of a folder's core.json."""
    path = Path(folder, CORE)
    try:
        core = json.loads(path.read_text(encoding="utf-8"))
        baselines = {label: float(core["baselines"]["table"][label]) for label in core["results"]}
        if not all(0 <= percent < 100 for percent in baselines.values()):
            raise ValueError("a baseline that is no percentage under 100")
        return dict(core["results"]), baselines
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path}: no result of CORE ({type(error).__name__}: {first_line(error)}); run base_eval --eval core"
        ) from error


def read_items(folder) -> tuple[dict, dict, dict]:
    """(header, {label: task line}, {label: one bool per item}) of the tasks of a folder's core.json; see core_suite.

    Raises ValueError naming the file where it is missing or not such a file.
    """
    path = Path(folder, ITEMS)
    try:
        header, *lines = read_lines(path)
        if not header.keys() >= {"norm", "context", "tokenizer_sha256"}:
            raise ValueError(f"{path}: its header lacks norm, context or tokenizer_sha256")
    except ValueError as error:
        raise ValueError(f"{error}; run base_eval --eval core") from error
    listed, _ = _core(folder)
    tasks = {line["task"]: line for line in lines if line["kind"] == "task" and line["task"] in listed}
    outcomes = {label: [] for label in tasks}
    for line in lines:
        if line["kind"] == "item" and line["task"] in tasks:
            outcomes[line["task"]].append(line["correct"])
    return header, tasks, outcomes


def compare_folders(a, b) -> dict:
    """compare_outcomes of two folders with items.jsonl, baselines as a's core.json used them.

    Adds left_out {label: why a task is not in the comparison}, same_tokenizer, and contexts, the tokens of a prompt at
    most in a and in b. Raises ValueError when the two were
    scored by different norms or share no task.
    """
    (header_a, tasks_a, items_a), (header_b, tasks_b, items_b) = read_items(a), read_items(b)
    if header_a["norm"] != header_b["norm"]:
        raise ValueError(f"{a} was scored per {header_a['norm']}, {b} per {header_b['norm']}: they cannot be compared")
    left_out = {label: "only one of the two has it" for label in sorted(tasks_a.keys() ^ tasks_b.keys())}
    asked = ("task_type", "num_fewshot", "continuation_delimiter", "data_sha256", "n")
    for label in tasks_a.keys() & tasks_b.keys():
        other = [key for key in asked if tasks_a[label][key] != tasks_b[label][key]]
        if other:
            left_out[label] = f"another {', '.join(other)}"
    both = [label for label in tasks_a if label in tasks_b and label not in left_out]
    if not both:
        raise ValueError(f"{a} and {b} share no task with the same items and shots")
    _, baselines = _core(a)
    result = compare_outcomes(*({label: items[label] for label in both} for items in (items_a, items_b)), baselines)
    return result | {
        "left_out": left_out,
        "same_tokenizer": header_a["tokenizer_sha256"] == header_b["tokenizer_sha256"],
        "contexts": (header_a["context"], header_b["context"]),
    }
