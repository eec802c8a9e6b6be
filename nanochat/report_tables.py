"""The tables of a report: rows of facts to blocks of text cells, for the screen and the pages alike.

Names stand between backticks; a "-" is a value that nobody recorded.
"""

import math

from nanochat.report_findings import quoted
from nanochat.report_series import costs, final_coefficients
from nanochat.report_stats import mean_sd
from nanochat.report_words import count, gibibytes, interval, number, p_value, power


def table(columns, rows) -> dict:
    """A table block from (heading, alignment, cell) and rows; columns without a value in any row are left out."""
    found = [(head, align, [cell(row) for row in rows]) for head, align, cell in columns]
    found = [column for column in found if any(text != "-" for text in column[2])]
    heads, aligns, cells = zip(*found, strict=True)
    return {"kind": "table", "heads": heads, "aligns": aligns, "lines": list(zip(*cells, strict=True))}


def _gammas(row) -> str:
    """Newest coefficient of each bank layer: "4: 8.21, 5: 9.40"; the mean where heads differ."""
    found = row["coefficients"]
    several = len({name for _, name in found}) > 1
    cells = [f"{layer}{' ' + name if several else ''}: {sum(v) / len(v):.2f}" for (layer, name), v in found.items()]
    return ", ".join(cells) or "-"


RUN_COLUMNS = (
    ("run", "<", lambda r: quoted(r["name"]) + ("" if r["finished"] else " *")),
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
    ("peak GiB", ">", lambda r: gibibytes(r["peak_bytes"])),
    ("coefficient by layer", "<", _gammas),
)


def run_table(rows) -> dict:
    return table(RUN_COLUMNS, rows)


def _result(variant, comparison=None, several=False) -> dict:
    mean, sd = mean_sd(variant.bpb.values()) if variant.bpb else (None, None)
    done, begun = len(variant.bpb), len({run.seed for run in variant.runs})
    name = variant.label_at_budget if several else comparison.name if comparison else variant.name
    return {
        "name": quoted(name), "bpb": mean, "sd": "one seed" if done == 1 else number(sd, 4),
        "seeds": str(done) if done == begun else f"{done} of {begun}", "stat": comparison and comparison.stat,
        "holm": comparison and comparison.holm,
    }  # fmt: skip


RESULT_COLUMNS = (
    ("variant", "<", lambda r: r["name"]),
    ("mean bpb", ">", lambda r: number(r["bpb"], 4)),
    ("sd", ">", lambda r: r["sd"]),
    ("seeds", ">", lambda r: r["seeds"]),
    ("difference", ">", lambda r: number(r["stat"] and r["stat"].mean, 4, "+")),
    ("95 % interval", ">", lambda r: interval(r["stat"])),
    ("pairs", ">", lambda r: str(r["stat"].n) if r["stat"] else "-"),
    ("p", ">", lambda r: p_value(r["stat"] and r["stat"].p)),
    ("p (Holm)", ">", lambda r: p_value(r["holm"])),
)


def result_table(section) -> dict:
    """Each baseline and below it what is measured against it; Holm's p where there are several comparisons."""
    several = len(section.groups) > 1
    rows = []
    for base, found in section.groups:
        ordered = sorted(found, key=lambda c: (c.stat is None, c.stat and c.stat.mean))
        rows += [_result(base, several=several), *(_result(c.variant, c, several) for c in ordered)]
    hidden = {"p (Holm)"} if len(section.comparisons) < 2 else set()
    if all(c.stat is None or c.stat.n == len(c.variant.bpb) for c in section.comparisons):
        hidden.add("pairs")
    return table([column for column in RESULT_COLUMNS if column[0] not in hidden], rows)


def lone_table(variants) -> dict:
    ordered = sorted(variants, key=lambda v: mean_sd(v.bpb.values())[0] if v.bpb else math.inf)
    return table(RESULT_COLUMNS[:4], [_result(v) | {"name": quoted(v.label)} for v in ordered])


COST_COLUMNS = (
    ("variant", "<", lambda r: quoted(r["label"])),
    ("values", "<", lambda r: r["values"]),
    ("parameters", ">", lambda r: count(r["params"])),
    ("without tables", ">", lambda r: count(r["params_without_tables"])),
    ("FLOPs /token", ">", lambda r: count(r["flops_per_token"])),
    ("FLOPs", ">", lambda r: "-" if r["flops"] is None else power(r["flops"])),
    ("tokens", ">", lambda r: count(r["tokens"])),
    ("epochs", ">", lambda r: number(r["epochs"], 2)),
    ("tok/s", ">", lambda r: count(r["tok_per_sec"])),
    ("peak GiB", ">", lambda r: gibibytes(r["peak_bytes"])),
    ("CORE", ">", lambda r: number(r["core"], 4)),
)


def cost_table(variants) -> dict:
    return table(COST_COLUMNS, [costs(v) | {"label": v.label, "values": v.values} for v in variants])


def coefficient_table(variants) -> dict | None:
    """Rows: variant and coefficient; columns: layers; the mean over seeds and their range."""
    rows = []
    for variant in variants:
        found = final_coefficients(variant)
        for name in sorted({name for _, name in found}):
            rows.append((variant.label, name, {layer: point for (layer, n), point in found.items() if n == name}))
    if not rows:
        return None
    layers = sorted({layer for _, _, points in rows for layer in points})
    columns = [("variant", "<", lambda r: quoted(r[0])), ("coefficient", "<", lambda r: r[1])]
    columns += [(f"layer {layer}", ">", lambda r, layer=layer: _spread(r[2].get(layer))) for layer in layers]
    return table(columns, rows)


def _spread(point) -> str:
    if point is None:
        return "-"
    return f"{point.mean:.2f}" + (f" ({point.low:.2f} to {point.high:.2f})" if point.high > point.low else "")


def _core(row):
    return costs(row.variant)["core"]


PAPER_COLUMNS = (
    ("variant", "<", lambda r: quoted(r.variant.label)),
    ("in the paper", "<", lambda r: r.where.partition(";")[0]),
    ("as", "<", lambda r: r.words),
    ("paper's bpb", ">", lambda r: f"{r.bpb:.3f}"),
    ("place", ">", lambda r: str(r.rank)),
    ("our bpb", ">", lambda r: number(r.ours, 4)),
    ("our place", ">", lambda r: number(r.rank_here, 0)),
    ("paper's CORE", ">", lambda r: number(r.core, 3) if _core(r) is not None else "-"),
    ("our CORE", ">", lambda r: number(_core(r), 3)),
    ("difference", "<", lambda r: "not comparable" if r.differs else number(r.ours and r.ours - r.bpb, 4, "+")),
)


def paper_table(rows) -> dict:
    return table(PAPER_COLUMNS, rows)


ORDER_COLUMNS = (
    ("paper: lower bpb", "<", lambda o: quoted(o.better.name)),
    ("than", "<", lambda o: quoted(o.worse.name)),
    ("table", ">", lambda o: o.table.removeprefix("table")),
    ("paper's gap", ">", lambda o: f"-{o.gap:.3f}"),
    ("ours", ">", lambda o: number(o.stat and o.stat.mean, 4, "+")),
    ("95 % interval", ">", lambda o: interval(o.stat)),
    ("here", "<", lambda o: o.verdict),
)


def order_table(orderings) -> dict:
    return table(ORDER_COLUMNS, orderings)


def repetition_table(series) -> dict:
    columns = (
        ("variant", "<", lambda c: quoted(c.variant.name)),
        ("passes", ">", lambda c: f"{c.variant.epochs:.2f}"),
        ("tokens", ">", lambda c: count(c.variant.first.plan.get("total_tokens"))),
        ("baseline's bpb", ">", lambda c: number(mean_sd(c.baseline.bpb[s] for s in c.seeds)[0], 4)),
        ("its bpb", ">", lambda c: number(mean_sd(c.variant.bpb[s] for s in c.seeds)[0], 4)),
        ("difference", ">", lambda c: number(c.stat.mean, 4, "+")),
        ("95 % interval", ">", lambda c: interval(c.stat)),
        ("seeds", ">", lambda c: str(c.stat.n)),
    )
    return table(columns, [c for found in series.values() for c in found])


def screen(block) -> str:
    """A table as aligned text: two lines of heading where that makes a column narrower."""
    split = [head.rpartition(" ")[::2] for head in block["heads"]]
    lines = [[cell.replace("`", "") for cell in line] for line in block["lines"]]
    grid = [[first for first, _ in split], [second for _, second in split], *lines]
    widths = [max(len(line[i]) for line in grid) for i in range(len(split))]
    shown = [
        "  ".join(f"{c:{a}{w}}" for c, a, w in zip(line, block["aligns"], widths, strict=True)).rstrip()
        for line in grid
    ]
    shown.insert(2, "  ".join("-" * w for w in widths))
    return "\n".join(shown)


def provenance_table(runs) -> dict:
    """Where each run came from."""
    columns = (
        ("run", "<", lambda r: quoted(r.name)),
        ("commit", "<", lambda r: _commit(r.header.get("commit") or "-")),
        ("device", "<", lambda r: _short(r.header.get("device"), 60)),
        ("dtype", "<", lambda r: _short(r.header.get("dtype"), 60).removeprefix("torch.")),
        ("data", "<", lambda r: _short(r.data.get("source"), 60)),
        ("held-out shard", "<", lambda r: _short(r.data.get("val_sha"))),
        ("tokenizer", "<", lambda r: _short(r.header.get("tokenizer_sha256"))),
    )
    return table(columns, runs)


def _commit(value) -> str:
    return value[:12] + "+" * value.endswith("+")  # "+": tracked files differed from the commit


def _short(value, length=12) -> str:
    return str(value or "-")[:length]
