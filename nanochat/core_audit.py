"""Can the paper's CORE numbers be recomputed from what it prints? Per-task accuracies and baselines against aggregates.

Reads runs/paper.toml. Table 3 has all 21 tasks of three models; Table 2 only some, so its CORE stays unchecked.
"""

from nanochat.core_bundle import BASELINES, PAPER21
from nanochat.core_compare import centre
from nanochat.paper import LABELS, TASK_COLUMNS, task_table


def _unsure(value) -> float:
    """Half a unit of the last digit printed, of two or three."""
    return 0.005 if round(value, 2) == value else 0.0005


def recompute(accuracies: dict, baselines: dict) -> tuple[float, float]:
    """(mean centred score, how far rounding of the accuracies may move it) of {label: accuracy}."""
    scores = [centre(value, baselines[label]) for label, value in accuracies.items()]
    errors = [_unsure(value) / (1 - 0.01 * baselines[label]) for label, value in accuracies.items()]
    return sum(scores) / len(scores), sum(errors) / len(errors)


def audit(paper: dict) -> list[str]:
    """Lines that say what agrees, what does not, and what cannot be recomputed."""
    return [*_audit_table3(paper["table3"]), "", *_audit_table2(paper["table2"])]


def _audit_table3(table):
    tasks = task_table(table)
    lines = [f"Equal FLOPs ({table['where']}): {len(tasks)} of {len(PAPER21)} tasks are printed, as raw accuracies."]
    reported = {row["preset"]: row["core"] for row in table["rows"]}
    for column, preset in enumerate(TASK_COLUMNS["table3"]):
        accuracies = {label: values[column] for label, values in tasks.items()}
        lines.append(f"  {preset}: reported CORE {reported[preset]:.3f}")
        for name, baselines in BASELINES.items():
            value, error = recompute(accuracies, baselines)
            agrees = abs(value - reported[preset]) <= error + 0.0005
            lines.append(
                f"    baselines {name}: {value:.4f} (the digits printed leave +-{error:.4f}): "
                f"{'agrees' if agrees else 'does not agree'}"
            )
    others = [row["preset"] for row in table["rows"] if row["preset"] not in TASK_COLUMNS["table3"]]
    lines.append(f"  Without per-task numbers, so not to be recomputed: {', '.join(others)}.")
    return lines


def _audit_table2(table):
    tasks = task_table(table)
    changes = {label: bov - standard for label, (standard, bov) in tasks.items()}
    changes |= {LABELS[name]: change for name, change in table["task_differences"].items()}
    standard, bov = (row["core"] for row in table["rows"])
    known = sum(change / (1 - 0.01 * BASELINES["v1"][label]) for label, change in changes.items()) / len(PAPER21)
    down = [label for label, change in changes.items() if change < 0]
    lines = [
        f"Equal tokens ({table['where']}): {len(tasks)} tasks are known as accuracies and "
        f"{len(table['task_differences'])} as differences, of {table['tasks_of']}.",
        f"  CORE {standard:.3f} and {bov:.3f} cannot be recomputed.",
        f"  Of the difference {bov - standard:+.3f} the known tasks make {known:+.4f}; the other "
        f"{table['tasks_of'] - len(changes)} would have to make {bov - standard - known:+.4f}.",
        f"  {table['tasks_up']} of {table['tasks_of']} tasks are said to rise; {len(down)} are known to fall: "
        + ("the numbers fit." if len(down) <= table["tasks_of"] - table["tasks_up"] else "the numbers do not fit."),
    ]
    return lines
