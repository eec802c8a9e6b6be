"""The paper's numbers (runs/paper.toml) beside ours, and whether its orderings hold here."""

from dataclasses import dataclass
from itertools import combinations

from nanochat.bov.presets import PRESETS
from nanochat.report_stats import Paired, mean_sd
from nanochat.report_variants import Section, Variant, pair_seeds
from nanochat.report_words import power

TABLES = ("table1", "table2", "table3")
TOLERANCE = 0.01  # of the paper's FLOPs or tokens
SETTING = {
    "source": "climbmix", "train_part": 1.0, "vocab_size": 32768, "sequence_len": 2048, "window_pattern": "SSSL",
    "muon": "paper", "dtype": "bfloat16",
}  # fmt: skip
AGREES, DISAGREES, OPEN = "agrees", "disagrees", "cannot be told"


@dataclass(frozen=True)
class Row:
    """A variant beside a row of one of the paper's tables; `differs` says why the two cannot be compared, "" = can."""

    variant: Variant
    table: str
    where: str
    words: str  # the row as the paper describes it
    bpb: float
    core: float | None
    ours: float | None
    differs: str
    rank: int  # the paper's, among the rows found here; equal numbers share one
    rank_here: int | None


@dataclass(frozen=True)
class Ordering:
    """Two variants the paper puts in an order: `better` below `worse` by `gap` bpb; `stat` is ours, better - worse."""

    table: str
    better: Variant
    worse: Variant
    gap: float
    stat: Paired | None
    verdict: str


def same_point(variant: Variant, preset: str) -> bool:
    """Whether the variant's preset is this one or another name of the same point on the axes."""
    own = {run.preset for run in variant.runs}
    return any(name == preset or name in PRESETS and PRESETS[name] == PRESETS.get(preset) for name in own)


def differs(variant: Variant, paper: dict, name: str) -> str:
    """How a variant's configuration is not that of the paper's table `name`, in words; "" where it is."""
    table, plan, own = paper[name], variant.first.plan, _setting(variant.first)
    layers, theirs = own.get("n_layer", "?"), table["n_layer"]
    found = [] if layers == theirs else [f"{layers} layers, not {theirs}"]
    budget, ours = ("flops", variant.flops) if "flops" in table else ("tokens", plan.get("total_tokens"))
    if not ours or abs(ours / table[budget] - 1) > TOLERANCE:
        found.append(f"not {power(table[budget])} {budget.replace('flops', 'FLOPs')}")
    wanted = SETTING | (paper["source"]["models"][str(theirs)] if layers == theirs else {})
    found += [
        f"{name.replace('_', ' ')} {_short(own.get(name))}, not {_short(value)}"
        for name, value in wanted.items()
        if not _same(own.get(name), value)
    ]
    return "; ".join(found)


def _setting(run) -> dict:
    """What SETTING and the paper's models are compared with."""
    own = run.config | {name: run.plan.get(name) for name in ("total_batch_size", "weight_decay")}
    own |= {"matrix_lr": (run.plan.get("lr") or {}).get("matrix"), "muon": run.header.get("muon")}
    own |= {"source": run.data.get("source"), "train_part": run.data.get("train_part", 1.0)}
    return own | {"dtype": str(run.header.get("dtype")).removeprefix("torch.")}


def _same(own, theirs) -> bool:
    if isinstance(own, float) and isinstance(theirs, float):
        return abs(own / theirs - 1) <= TOLERANCE
    return own == theirs


def _short(value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def groups_of(variants, sections: list[Section]) -> list[list[Variant]]:
    """What is measured against one baseline at one budget, with it; then each variant that stands alone."""
    found = [[base, *(c.variant for c in compared)] for section in sections for base, compared in section.groups]
    return found + [[v] for v in variants if not any(v in group for group in found)]


def beside(groups, paper: dict) -> list[Row]:
    """The variants whose preset is a row of one of the paper's tables, table by table, in the paper's order there.

    Of each table, the group in which most rows are the paper's configuration, then most rows. Left out are variants
    that differ from their preset by more than its name tells, and a row alone that cannot be compared.
    """
    found = []
    for name in TABLES:
        tables = [_rows(name, paper, group) for group in groups if name in paper]
        best = max(tables, key=lambda rows: (sum(not row.differs for row in rows), len(rows)), default=[])
        found += best if len(best) > 1 or not all(row.differs for row in best) else []
    return found


def _rows(name, paper, group) -> list[Row]:
    table = paper[name]
    plain = [v for v in group if v.name == v.preset]
    pairs = [(row, v) for row in table["rows"] for v in plain if same_point(v, row.get("preset"))]
    pairs.sort(key=lambda pair: pair[0]["bpb"])
    means = [mean_sd(v.bpb.values())[0] if v.bpb else None for _, v in pairs]
    numbers, known = [row["bpb"] for row, _ in pairs], sorted(mean for mean in means if mean is not None)
    return [
        Row(v, name, table["where"], _words(row), row["bpb"], row.get("core"), mean, differs(v, paper, name),
            1 + numbers.index(row["bpb"]), None if mean is None else 1 + known.index(mean))
        for (row, v), mean in zip(pairs, means, strict=True)
    ]  # fmt: skip


def _words(row) -> str:
    parts = [row[key] for key in ("output", "layers", "coefficient") if row.get(key, "-") != "-"]
    return row.get("scheme") or ", ".join(parts) or row["preset"].removeprefix("paper/")


def orderings(rows: list[Row]) -> list[Ordering]:
    """Each pair of one table that the paper orders, disagreements first. Equal numbers in the paper are no claim."""
    pairs = [(a, b) for a, b in combinations(rows, 2) if a.table == b.table and a.bpb != b.bpb]
    found = [_ordering(*sorted(pair, key=lambda row: row.bpb)) for pair in pairs]
    return sorted(found, key=lambda o: (TABLES.index(o.table), (DISAGREES, AGREES, OPEN).index(o.verdict), -o.gap))


def _ordering(better: Row, worse: Row) -> Ordering:
    _, stat = pair_seeds(better.variant, worse.variant)
    verdict = {-1: AGREES, 0: OPEN, 1: DISAGREES}[stat.sign if stat else 0]
    return Ordering(better.table, better.variant, worse.variant, round(worse.bpb - better.bpb, 6), stat, verdict)
