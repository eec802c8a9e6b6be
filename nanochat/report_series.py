"""What a variant's seeds have in common: mean and range of its curves, coefficients and costs."""

import statistics
from dataclasses import dataclass

from nanochat.report import bank_coefficients, coefficients, curve, difference_curve, row
from nanochat.report_variants import Comparison, Variant


@dataclass(frozen=True)
class Point:
    """Mean over seeds, smallest and largest at x (itself a mean where the seeds' differ, as seconds do)."""

    x: float
    mean: float
    low: float
    high: float


def _point(pairs) -> Point:
    xs, ys = zip(*pairs, strict=True)
    return Point(statistics.fmean(xs), statistics.fmean(ys), min(ys), max(ys))


def bpb_curve(variant: Variant, x: str) -> list[Point]:
    """bpb against x ("tokens", "flops", "seconds") at the evaluations that all its finished runs have."""
    curves = [points for run in variant.shown if (points := curve(run, x))]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    return [_point([points[step] for points in curves]) for step in steps]


def gap_curve(comparison: Comparison) -> list[Point]:
    """Difference to the baseline's bpb against tokens, where the shared seeds of both were all evaluated."""
    ours, theirs = ({r.seed: r for r in reversed(v.shown)} for v in (comparison.variant, comparison.baseline))
    gaps = [dict(difference_curve(ours[seed], theirs[seed])) for seed in ours if seed in theirs]
    gaps = [gap for gap in gaps if gap]
    shared = sorted(set.intersection(*map(set, gaps))) if gaps else []
    return [_point([(tokens, gap[tokens]) for gap in gaps]) for tokens in shared]


def final_coefficients(variant: Variant) -> dict[tuple[int, str], Point]:
    """(layer, name) -> the newest value over seeds, heads averaged; x is the layer."""
    found = [bank_coefficients(run) for run in variant.shown]
    found = [layers for layers in found if layers]
    keys = sorted(set.intersection(*map(set, found))) if found else []
    return {key: _point([(key[0], statistics.fmean(layers[key])) for layers in found]) for key in keys}


def coefficient_course(variant: Variant) -> dict[tuple[int, str], list[Point]]:
    """(layer, name) -> its values against tokens at the evaluations that all seeds have, heads averaged."""
    runs = [{e.get("tokens"): coefficients(e) for e in run.evals if coefficients(e)} for run in variant.shown]
    runs = [evals for evals in runs if evals]
    shared = sorted(set.intersection(*map(set, runs)) - {None}) if runs else []
    keys = sorted({key for evals in runs for at in shared for key in evals[at]})
    return {
        key: [
            _point([(at, statistics.fmean(evals[at][key])) for evals in runs])
            for at in shared
            if all(key in evals[at] for evals in runs)
        ]
        for key in keys
    }


def costs(variant: Variant) -> dict:
    """What a variant is and takes: sizes of the model, then means over its finished runs; None where not recorded."""
    rows = [row(run) for run in variant.shown]
    same = {name: rows[0][name] for name in ("params", "params_without_tables", "flops_per_token")}
    means = {name: _mean([r[name] for r in rows]) for name in ("tokens", "flops", "epochs", "tok_per_sec", "core")}
    return same | means | {"peak_bytes": max((r["peak_bytes"] or 0 for r in rows), default=0) or None}


def _mean(values):
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
