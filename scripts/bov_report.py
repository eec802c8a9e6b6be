"""Compare training runs: tables on the screen, report.md, report.html and PNG pictures in a folder.

    python -m scripts.bov_report RUN_DIR... [--out DIR] [--baseline NAME] [--sample NAME=FILE] [--title TEXT]

A RUN_DIR is a checkpoint folder (base_checkpoints/TAG). Read are metrics.jsonl, DONE.json, core.json with
its items.jsonl, and context.json, nothing else.
"""

import argparse
from pathlib import Path

from nanochat.common import get_base_dir, run_script
from nanochat.paper import read_paper
from nanochat.report import load_run, row
from nanochat.report_findings import AT
from nanochat.report_page import gather, write
from nanochat.report_tables import result_table, run_table, screen
from nanochat.report_variants import baseline_runs


def read_sample(argument: str, names) -> tuple[str, str]:
    """NAME=FILE -> (name, text); ValueError where there is no such run or file."""
    name, equals, file = argument.partition("=")
    if not equals or name not in names:
        raise ValueError(f"--sample {argument}: write NAME=FILE, NAME one of {', '.join(names)}")
    if not Path(file).is_file():
        raise ValueError(f"--sample {argument}: there is no file {file}")
    return name, Path(file).read_text(encoding="utf-8", errors="replace").strip()


def on_screen(facts) -> str:
    """A table of the runs and, where runs are compared, one of the variants per budget."""
    baselines = baseline_runs(facts.sections)
    shown = [screen(run_table([row(run, baselines.get(run.name)) for run in facts.runs]))]
    if not all(run.finished for run in facts.runs):
        shown.append("* unfinished: the newest evaluation is shown")
    shown += [f"at {AT[s.budget]}:\n{screen(result_table(s))}" for s in facts.sections]
    return "\n\n".join(shown)


def report(folders, out, baseline=None, samples=(), title=None) -> tuple[str, list[str]]:
    """Write the report of the runs in `folders` into `out`; returns (the tables for the screen, names of pictures)."""
    runs = [load_run(folder) for folder in folders]
    names = [run.name for run in runs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two runs have the same folder name ({', '.join(twice)}); give a run once, or rename one")
    facts = gather(runs, read_paper(), baseline, [read_sample(sample, names) for sample in samples], title)
    return on_screen(facts), write(facts, out)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Compare training runs: tables, report.md, report.html, PNG pictures")
    parser.add_argument("run_dir", nargs="+", help="checkpoint folders")
    parser.add_argument("--out", default=None, help="folder of the report (default: report/ in NANOCHAT_BASE_DIR)")
    parser.add_argument(
        "--baseline", default=None, help="folder name of a run: measure against its variant (default: by preset)"
    )
    parser.add_argument("--sample", action="append", default=[], metavar="NAME=FILE", help="a run's text sample")
    parser.add_argument("--title", default=None, help="heading of the report")
    args = parser.parse_args(argv)
    out = Path(args.out or Path(get_base_dir()) / "report")
    shown, pictures = report(args.run_dir, out, args.baseline, args.sample, args.title)
    print(f"\n{shown}\n")
    for kind, name in [("report", "report.md"), ("report", "report.html"), *(("picture", name) for name in pictures)]:
        print(f"{kind}: {out / name}")


if __name__ == "__main__":
    run_script("bov_report", main)
