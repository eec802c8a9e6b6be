"""CORE of two checkpoints, item by item: a variant's run against its baseline's run of the same seed and budget.

The items are the random part, the two trainings are fixed: intervals and p-values say nothing about other seeds.
"""

from dataclasses import dataclass

from nanochat.bov.presets import PRESETS
from nanochat.core_compare import compare_folders
from nanochat.paper import task_differences
from nanochat.report_findings import AT, LEVEL, equals, quoted
from nanochat.report_paper import differs
from nanochat.report_tables import table
from nanochat.report_variants import Comparison
from nanochat.report_words import number, p_value, plural

TABLE_AT = {"flops": "table3", "tokens": "table2"}  # budget -> the paper's table at that budget
DETAILED = 3  # pairs whose tasks a page lists


@dataclass(frozen=True)
class Pair:
    """Two runs and what their items say; `paper` {label: the paper's difference}, `differs` from its setting how."""

    comparison: Comparison
    seed: object
    found: dict  # core_compare.compare_folders
    paper: dict
    differs: str

    @property
    def name(self) -> str:
        """The pair in the report's words."""
        ours, theirs = (quoted(v.label_at_budget) for v in (self.comparison.variant, self.comparison.baseline))
        return f"{ours} against {theirs} at {AT[self.comparison.budget]}, seed {self.seed}"


def find_pairs(sections, paper) -> tuple[list[Pair], list[str]]:
    """(the pairs that both have a CORE result, BoV first; why others could not be compared)."""
    pairs, refused = [], []
    for c in (c for section in sections for c in section.comparisons):
        for seed in c.seeds:
            ours, theirs = (v.finished[seed] for v in (c.variant, c.baseline))
            if ours.core is None or theirs.core is None:
                continue
            try:
                found = compare_folders(theirs.folder, ours.folder)
            except ValueError as error:
                refused.append(f"{quoted(ours.name)} against {quoted(theirs.name)}: {error}")
            else:
                pairs.append(Pair(c, seed, found, *_paper(c, ours, paper)))
    return sorted(pairs, key=lambda pair: pair.comparison.variant.axes != PRESETS["paper/bov"]), refused


def _paper(c: Comparison, run, paper) -> tuple[dict, str]:
    """(what the paper prints for this pair, how this one is not comparable to it)."""
    name = TABLE_AT.get(c.budget)
    printed = task_differences(paper, name, c.variant.name, c.baseline.name)
    if not printed:
        return {}, ""
    reasons = [differs(c.variant, paper, name)]
    reasons += [f"tasks and shots of {run.core['core_tasks']}, not of paper21"] * (run.core["core_tasks"] != "paper21")
    reasons += [f"scored per {run.core['norm']}, not per byte"] * (run.core["norm"] != "byte")
    reasons += [f"at most {run.core['max_per_task']} items of a task"] * (run.core["max_per_task"] > 0)
    return printed, "; ".join(filter(None, reasons))


# ---------------------------------------------------------------------------- in words


def sentence(pair: Pair) -> str:
    """CORE of the pair with its interval, p-value, and the tasks that went up and down."""
    c, core, found = pair.comparison, pair.found["core"], pair.found
    side = "below" if core["difference"] < 0 else "above"
    low, high = core["interval"]
    beyond = "" if core["p_value"] < LEVEL else ": these items do not tell the two apart"
    return (
        f"CORE of {quoted(c.variant.label_at_budget)} is {core['b']:.4f}, {abs(core['difference']):.4f} {side} "
        f"{quoted(c.baseline.label_at_budget)} ({core['a']:.4f}), at {AT[c.budget]}, seed {pair.seed}. Over the items "
        f"of {plural(len(found['tasks']), 'task')} the 95 % interval is {low:+.4f} to {high:+.4f}, "
        f"p {equals(core['p_value'])}{beyond}. "
        f"Tasks up: {len(found['gains'])}, down: {len(found['regressions'])}."
    )


def sides(pair: Pair) -> list[str]:
    """Gains and losses, as two lists of the same form; what could not be compared, and how the paper's case differs."""
    said = [f"{side}: {_tasks(pair, labels)}." for side, labels in
            (("Up", pair.found["gains"]), ("Down", pair.found["regressions"]))]  # fmt: skip
    level = [label for label, task in pair.found["tasks"].items() if not task["difference"]]
    if level:
        said.append(f"As many right in both: {', '.join(level)}.")
    said += [f"Left out is {label}: {why}." for label, why in pair.found["left_out"].items()]
    if not pair.found["same_tokenizer"]:
        said.append("The two were trained with different tokenizers.")
    theirs, ours = pair.found["contexts"]
    if ours != theirs:
        said.append(f"Prompts were cropped to {ours} tokens, the baseline's to {theirs}.")
    if pair.differs:
        said.append(f"The paper's differences are not comparable: {pair.differs}.")
    return said


def _tasks(pair, labels) -> str:
    found = pair.found["tasks"]
    words = [
        f"{label} ({found[label]['difference']:+.3f}{', beyond chance' if found[label]['p_holm'] < LEVEL else ''})"
        for label in labels
    ]
    return ", ".join(words) or "none"


# ---------------------------------------------------------------------------- tables


def _counted(pair, side) -> str:
    labels = pair.found[side]
    return f"{len(labels)} ({sum(pair.found['tasks'][label]['p_holm'] < LEVEL for label in labels)})"


def _span(values, digits) -> str:
    return " to ".join(f"{value:+.{digits}f}" for value in values)


CORE_COLUMNS = (
    ("variant", "<", lambda p: quoted(p.comparison.variant.label_at_budget)),
    ("CORE", ">", lambda p: number(p.found["core"]["b"], 4)),
    ("against", "<", lambda p: quoted(p.comparison.baseline.label_at_budget)),
    ("its CORE", ">", lambda p: number(p.found["core"]["a"], 4)),
    ("budget", "<", lambda p: p.comparison.budget),
    ("seed", ">", lambda p: str(p.seed)),
    ("difference", ">", lambda p: number(p.found["core"]["difference"], 4, "+")),
    ("95 % interval", ">", lambda p: _span(p.found["core"]["interval"], 4)),
    ("p", ">", lambda p: p_value(p.found["core"]["p_value"])),
    ("up", ">", lambda p: _counted(p, "gains")),
    ("down", ">", lambda p: _counted(p, "regressions")),
)
TASK_COLUMNS = (
    ("task", "<", lambda r: r["label"]),
    ("baseline", ">", lambda r: number(r["a"], 4)),
    ("variant", ">", lambda r: number(r["b"], 4)),
    ("difference", ">", lambda r: number(r["difference"], 4, "+")),
    ("95 % interval", ">", lambda r: _span(r["interval"], 3)),
    ("won / lost / tied", ">", lambda r: f"{r['wins']} / {r['losses']} / {r['ties']}"),
    ("p", ">", lambda r: p_value(r["p_value"])),
    ("p (Holm)", ">", lambda r: p_value(r["p_holm"])),
    ("paper", ">", lambda r: number(r["paper"], 3, "+")),
)


def core_table(pairs) -> dict:
    """One line per pair."""
    return table(CORE_COLUMNS, pairs)


def task_table(pair: Pair) -> dict:
    """The tasks of a pair, from the largest gain to the largest loss."""
    tasks = sorted(pair.found["tasks"].items(), key=lambda item: -item[1]["difference"])
    return table(TASK_COLUMNS, [{"label": label, "paper": pair.paper.get(label), **task} for label, task in tasks])
