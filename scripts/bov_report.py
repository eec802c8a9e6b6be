"""Compare training runs: one table on the screen, report.md and PNG curves in a folder.

    python -m scripts.bov_report RUN_DIR... [--out DIR] [--baseline NAME] [--sample NAME=FILE]

A RUN_DIR is a checkpoint folder (base_checkpoints/TAG). Read are metrics.jsonl, DONE.json and core.json, nothing else.
"""

import argparse
import sys
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from nanochat.common import atomic_write, get_base_dir
from nanochat.report import find_baseline, load_run, rows
from nanochat.report_plots import draw_all

PICTURES = {
    "bpb_tokens.png": "Validation bits per byte and the difference to the baseline against training tokens",
    "bpb_flops.png": "Validation bits per byte against training FLOPs",
    "bpb_seconds.png": "Validation bits per byte against training time",
    "coefficients.png": "Learned coefficients per bank layer over training",
}

# ---------------------------------------------------------------------------- cells


def count(value) -> str:
    """12345678 -> 12.3M."""
    if value is None:
        return "-"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"


def number(value, digits, sign="") -> str:
    return "-" if value is None else f"{value:{sign}.{digits}f}"


def gammas(row) -> str:
    """Newest coefficient of each bank layer: "4: 8.21, 5: 9.40"; the mean where heads differ."""
    found = row["coefficients"]
    several = len({name for _, name in found}) > 1
    cells = [f"{layer}{' ' + name if several else ''}: {sum(v) / len(v):.2f}" for (layer, name), v in found.items()]
    return ", ".join(cells) or "-"


# heading, alignment, cell
COLUMNS = (
    ("run", "<", lambda r: r["name"] + ("" if r["finished"] else " *")),
    ("preset", "<", lambda r: r["preset"]),
    ("seed", ">", lambda r: str(r["seed"])),
    ("params", ">", lambda r: count(r["params"])),
    ("without tables", ">", lambda r: count(r["params_without_tables"])),
    ("FLOPs /token", ">", lambda r: count(r["flops_per_token"])),
    ("tokens", ">", lambda r: count(r["tokens"])),
    ("epochs", ">", lambda r: number(r["epochs"], 2)),
    ("val bpb", ">", lambda r: number(r["val_bpb"], 4)),
    ("vs base", ">", lambda r: number(r["difference"], 4, "+")),
    ("CORE", ">", lambda r: number(r["core"], 4)),
    ("tok/s", ">", lambda r: count(r["tok_per_sec"])),
    ("peak GiB", ">", lambda r: "-" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**30:.2f}"),
    ("coefficient by layer", "<", gammas),
)


def cells(table) -> tuple[list, list, list]:
    """(headings, alignments, lines) without the columns that are empty in every line."""
    columns = [(head, align, [cell(row) for row in table]) for head, align, cell in COLUMNS]
    columns = [column for column in columns if any(text != "-" for text in column[2])]
    heads, aligns, texts = zip(*columns, strict=True)
    return list(heads), list(aligns), [list(line) for line in zip(*texts, strict=True)]


def screen_table(table) -> str:
    """Rows as aligned text: two lines of heading where that makes a column narrower."""
    heads, aligns, lines = cells(table)
    split = [head.rpartition(" ")[::2] for head in heads]
    grid = [[first for first, _ in split], [second for _, second in split], *lines]
    widths = [max(len(line[i]) for line in grid) for i in range(len(heads))]
    shown = ["  ".join(f"{c:{a}{w}}" for c, a, w in zip(line, aligns, widths, strict=True)).rstrip() for line in grid]
    shown.insert(2, "  ".join("-" * w for w in widths))
    return "\n".join(shown)


def markdown_table(table) -> str:
    heads, aligns, lines = cells(table)
    rule = ["---:" if a == ">" else "---" for a in aligns]
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, rule, *lines])


# ---------------------------------------------------------------------------- words


def findings(table) -> list[str]:
    """One sentence per comparison, with the budget it was made at."""
    said = []
    by_name = {row["name"]: row for row in table}
    for row in table:
        if row["difference"] is None:
            continue
        base = by_name[row["baseline"]]
        side = "below" if row["difference"] < 0 else "above"
        said.append(
            f"`{row['name']}` stands at {row['val_bpb']:.4f} bpb, {abs(row['difference']):.4f} {side} `{base['name']}` "
            f"({base['val_bpb']:.4f}), {_budget(row, base)}."
        )
    return said or ["There is no pair of runs to compare: no baseline with the same seed and the same held-out text."]


def _budget(row, base):
    tokens = "after the same number of tokens"
    if row["tokens"] != base["tokens"]:
        tokens = f"after {count(row['tokens'])} tokens against {count(base['tokens'])}"
    if not row["flops"] or not base["flops"]:
        return tokens
    change = 100 * (row["flops"] / base["flops"] - 1)
    return f"{tokens} and with {abs(change):.1f} % {'fewer' if change < 0 else 'more'} training FLOPs"


def limits(table) -> list[str]:
    """How far the numbers reach: epochs, seeds, scale."""
    said = [_epochs(table)]
    seeds = {row["seed"] for row in table}
    if len(seeds) == 1:
        said.append(
            "There is one seed. Two seeds of the same model differ too, by an amount that these runs cannot show, "
            "so a small difference may be chance."
        )
    params, tokens = (max((row[key] or 0) for row in table) for key in ("params_without_tables", "tokens"))
    if params < 100e6:
        said.append(
            f"The largest model has {count(params)} parameters without its tables and saw {count(tokens)} tokens; "
            "the paper's models have 135M and 780M and saw 2B to 100B. "
            "At this scale nothing is proved about the paper's numbers, whether the two agree or not."
        )
    return said


def _epochs(table):
    known = [row["epochs"] for row in table if row["epochs"] is not None]
    if not known:
        return "It is not recorded how often the training text was read."
    low, high = min(known), max(known)
    often = f"{high:.2f} times" if round(low, 2) == round(high, 2) else f"{low:.2f} to {high:.2f} times"
    if high <= 1.01:
        return (
            f"The training text was read {often}: nothing was seen twice. "
            "That case suits a Bank of Values; on text that repeats, its lead can shrink or vanish."
        )
    return f"The training text was read {often}: it repeats, and repetition can favour one model over the other."


def provenance(runs) -> str:
    """Where each run came from, as a markdown table."""
    lines = ["| run | commit | device | dtype | data | held-out shard | tokenizer |", "|---|---|---|---|---|---|---|"]
    for run in runs:
        h, data = run.header, run.header.get("data") or {}
        hashes = (h.get("commit"), data.get("val_sha"), h.get("tokenizer_sha256"))
        commit, val, tokenizer = (str(value or "-")[:12] for value in hashes)
        device, dtype, source = (str(v or "-") for v in (h.get("device"), h.get("dtype"), data.get("source")))
        dtype = dtype.removeprefix("torch.")
        lines.append(f"| {run.name} | {commit} | {device} | {dtype} | {source} | {val} | {tokenizer} |")
    return "\n".join(lines)


# ---------------------------------------------------------------------------- the report


def render_markdown(runs, table, pictures, samples) -> str:
    """report.md; `pictures` are file names beside it, `samples` (name, text) pairs."""
    environment = Environment(
        loader=PackageLoader("nanochat", "templates"), undefined=StrictUndefined, keep_trailing_newline=True
    )  # fmt: skip
    return environment.get_template("report.md.j2").render(
        title="Bank of Values against standard attention" if len(table) > 1 else f"Run {table[0]['name']}",
        table=markdown_table(table),
        unfinished=[f"`{r['name']}` (step {r['step']} of {r['steps']})" for r in table if not r["finished"]],
        findings=findings(table),
        limits=limits(table),
        pictures=[(name, PICTURES[name]) for name in pictures],
        samples=samples,
        provenance=provenance(runs),
    )


def read_sample(argument: str, names) -> tuple[str, str]:
    """NAME=FILE -> (name, text); ValueError where there is no such run or file."""
    name, equals, file = argument.partition("=")
    if not equals or name not in names:
        raise ValueError(f"--sample {argument}: write NAME=FILE, NAME one of {', '.join(names)}")
    if not Path(file).is_file():
        raise ValueError(f"--sample {argument}: there is no file {file}")
    return name, Path(file).read_text(encoding="utf-8", errors="replace").strip()


def report(folders, out, baseline=None, samples=()) -> str:
    """Write the report of the runs in `folders` into `out`; returns the screen table."""
    runs = [load_run(folder) for folder in folders]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"two runs have the same folder name ({', '.join(names)}); rename one")
    texts = [read_sample(sample, names) for sample in samples]
    baselines = find_baseline(runs, baseline)
    table = rows(runs, baselines)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    pictures = draw_all(runs, baselines, out)
    with atomic_write(out / "report.md", "w") as f:
        f.write(render_markdown(runs, table, pictures, texts))
    return screen_table(table)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Compare training runs: table, report.md, PNG curves")
    parser.add_argument("run_dir", nargs="+", help="checkpoint folders")
    parser.add_argument("--out", default=None, help="folder of the report (default: report/ in NANOCHAT_BASE_DIR)")
    parser.add_argument(
        "--baseline", default=None, help="folder name of the run to measure against (default: by preset)"
    )
    parser.add_argument("--sample", action="append", default=[], metavar="NAME=FILE", help="a run's text sample")
    args = parser.parse_args(argv)
    out = Path(args.out or Path(get_base_dir()) / "report")
    try:
        shown = report(args.run_dir, out, args.baseline, args.sample)
    except ValueError as error:
        sys.exit(f"bov_report: {error}")
    print(f"\n{shown}\n")
    if " *" in shown:
        print("* unfinished: the newest evaluation is shown\n")
    print(f"report: {out / 'report.md'}")
    for picture in sorted(out.glob("*.png")):
        print(f"curves: {picture}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nbov_report: stopped")
