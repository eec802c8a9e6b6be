"""context.json of variants side by side: bits per byte by position, and what a probe finds at each distance.

A bucket or length is named in units of T, the length of the training's rows.
"""

import statistics
from collections import Counter
from dataclasses import dataclass

from nanochat.report_findings import quoted
from nanochat.report_series import Point
from nanochat.report_stats import paired
from nanochat.report_tables import table
from nanochat.report_variants import Variant
from nanochat.report_words import number

SETTING = ("sequence_len", "source", "items", "seed")  # results that differ in these are not put side by side
EDGES = (0, 0.25, 0.5, 1, 2, 4)  # of T, in the table; the picture has every bucket


@dataclass(frozen=True)
class Context:
    """The results of one setting: {variant: {training seed: context.json}}, and the runs of other settings."""

    T: int
    results: dict[Variant, dict]
    left_out: list[str]

    @property
    def windows(self) -> list[str]:
        return list(self.some["positions"])

    @property
    def some(self) -> dict:
        return next(iter(next(iter(self.results.values())).values()))


def collect(variants) -> Context | None:
    """The results of the setting that most finished runs have; None without any."""
    found = [(v, s, run) for v in variants for s, run in v.finished.items() if run.context]
    if not found:
        return None
    settings = Counter(_setting(run) for _, _, run in found)
    (usual, _), *_ = settings.most_common()
    results = {}
    for variant, seed, run in found:
        if _setting(run) == usual:
            results.setdefault(variant, {})[seed] = run.context
    return Context(usual[0], results, [quoted(run.name) for _, _, run in found if _setting(run) != usual])


def _setting(run):
    return tuple(run.context.get(name) for name in SETTING)


# ---------------------------------------------------------------------------- bits per byte by position


def _within(rows, low, high) -> float | None:
    """Bits per byte of the buckets inside [low, high) positions together."""
    inside = [row for row in rows if low <= row["from"] and row["to"] <= high and row["bytes"]]
    size = sum(row["bytes"] for row in inside)
    return sum(row["bpb"] * row["bytes"] for row in inside) / size if size else None


def _differences(context, variant, baseline, window, low, high):
    """Paired over the seeds that both have, None where there is none."""
    seeds = [s for s in context.results[variant] if s in context.results[baseline]]
    both = [
        [_within(context.results[v][s]["positions"][window], low, high) for s in seeds] for v in (variant, baseline)
    ]
    pairs = [pair for pair in zip(*both, strict=True) if None not in pair]
    return paired(*map(list, zip(*pairs, strict=True))) if pairs else None


def position_table(context: Context, baseline_of: dict) -> dict:
    """Rows: variants, and their differences to the baseline, per window; columns: parts of the context."""
    T, parts = context.T, list(zip(EDGES, EDGES[1:], strict=False))
    rows = []
    for window in context.windows:
        for variant, seeds in context.results.items():
            means = {}
            for low, high in parts:
                values = [_within(found["positions"][window], low * T, high * T) for found in seeds.values()]
                means[high] = number(None if None in values else statistics.fmean(values), 4)
            rows.append((quoted(variant.label), window, means))
        for variant, baseline in baseline_of.items():
            stats = {high: _differences(context, variant, baseline, window, low * T, high * T) for low, high in parts}
            words = {high: _with_interval(stat) for high, stat in stats.items()}
            rows.append((f"{quoted(variant.label)} minus {quoted(baseline.label)}", window, words))
    columns = [("variant", "<", lambda r: r[0]), ("windows", "<", lambda r: r[1])]
    columns += [(f"{low:g} to {high:g} T", ">", lambda r, high=high: r[2][high]) for low, high in parts]
    return table(columns, rows)


def _with_interval(stat) -> str:
    if stat is None:
        return "-"
    return f"{stat.mean:+.4f}" + ("" if stat.low is None else f" \u00b1 {stat.high - stat.mean:.4f}")


def position_curve(context: Context, variant, window, baseline=None) -> list[Point]:
    """bpb, or its difference to a baseline's, by position over T; mean and range of the seeds."""
    points = []
    for i, row in enumerate(context.some["positions"][window]):
        values = []
        for seed, found in context.results[variant].items():
            own = found["positions"][window][i]["bpb"]
            other = 0.0 if baseline is None else None
            if baseline is not None and seed in context.results[baseline]:
                other = context.results[baseline][seed]["positions"][window][i]["bpb"]
            if None not in (own, other):
                values.append(own - other)
        if values:
            middle = (row["from"] + row["to"]) / 2 / context.T
            points.append(Point(middle, statistics.fmean(values), min(values), max(values)))
    return points


# ---------------------------------------------------------------------------- probes


def probe_points(context: Context, probe, variant, window) -> list[Point]:
    """Accuracy by length over T: mean of the seeds, and from the lowest to the highest end of their intervals."""
    found = [result["probes"][probe][window] for result in context.results[variant].values()]
    points = []
    for rows in zip(*found, strict=True):
        if all(row["n"] for row in rows):
            ends = [end for row in rows for end in row["accuracy_interval"]]
            mean = statistics.fmean(row["accuracy"] for row in rows)
            points.append(Point(rows[0]["length"] / context.T, mean, min(ends), max(ends)))
    return points


def chance(context: Context, probe) -> float:
    return context.some["probes"][probe][context.windows[0]][0]["chance"]


def probe_table(context: Context) -> dict:
    """Rows: probe, window, variant; columns: lengths."""
    rows = []
    for probe in context.some["probes"]:
        digits = 2 if chance(context, probe) >= 0.01 else 4
        for window in context.windows:
            for variant in context.results:
                points = {
                    p.x: f"{p.mean:.{digits}f} ({p.low:.{digits}f} to {p.high:.{digits}f})"
                    for p in probe_points(context, probe, variant, window)
                }
                rows.append((probe, f"{chance(context, probe):.3g}", window, quoted(variant.label), points))
    heads = ("probe", "chance", "windows", "variant")
    columns = [(head, "<", lambda r, i=i: r[i]) for i, head in enumerate(heads)]
    for length in sorted({x for *_, points in rows for x in points}):
        columns.append((f"{length:g} T", ">", lambda r, length=length: r[4].get(length, "-")))
    return table(columns, rows)
