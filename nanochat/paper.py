"""The paper's numbers: runs/paper.toml, and the names its tables give to tasks and variants."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAPER = Path(__file__).parents[1] / "runs" / "paper.toml"

# the paper's names -> labels of the bundle
LABELS = {
    "SQuAD": "squad", "CoQA": "coqa", "BoolQ": "boolq", "Dyck": "bigbench_dyck_languages",
    "LSAT-AR": "agi_eval_lsat_ar", "CS-Alg": "bigbench_cs_algorithms",
    "Operators": "bigbench_operators", "Repeat-Copy": "bigbench_repeat_copy_logic",
    "Jeopardy": "jeopardy", "WikiData": "bigbench_qa_wikidata", "ARC-E": "arc_easy", "ARC-C": "arc_challenge",
    "COPA": "copa", "CSQA": "commonsense_qa", "CommonsenseQA": "commonsense_qa", "PIQA": "piqa", "OBQA": "openbook_qa",
    "LAMBADA": "lambada_openai", "HellaSwag": "hellaswag", "Winograd": "winograd", "Winogrande": "winogrande",
    "LangID": "bigbench_language_identification",
}  # fmt: skip
# table -> presets, in the order of its tasks' values
TASK_COLUMNS = {
    "table2": ("paper/baseline", "paper/bov"),
    "table3": ("paper/baseline", "paper/bov", "table3/ve_gated"),
}


def read_paper(path=PAPER) -> dict:
    """runs/paper.toml; empty where the code stands without it. ValueError where it is damaged."""
    if not Path(path).is_file():
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error


def task_table(table) -> dict[str, list[float]]:
    """{label: accuracies} of one of the paper's task tables."""
    return {LABELS[name]: values for name, values in table["tasks"].items()}


def task_differences(paper: dict, name: str, preset: str, baseline: str) -> dict[str, float]:
    """{label: accuracy of `preset` minus that of `baseline`} by table `name`; empty where it has not both."""
    columns = TASK_COLUMNS.get(name, ())
    if name not in paper or preset not in columns or baseline not in columns:
        return {}
    ours, theirs = columns.index(preset), columns.index(baseline)
    found = {label: values[ours] - values[theirs] for label, values in task_table(paper[name]).items()}
    if (baseline, preset) == TASK_COLUMNS["table2"]:
        found |= {LABELS[task]: change for task, change in paper[name].get("task_differences", {}).items()}
    return found
