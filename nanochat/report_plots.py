"""The report's curves as PNG files, one budget per picture: tokens, FLOPs, wall time; and the bank's coefficients."""

import math

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from nanochat.report import coefficients, curve, difference_curve  # noqa: E402

BASELINE_COLOR = "#444444"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f00")
DASHES = ("-", "--", ":", "-.")
STYLE = {
    "font.size": 12, "axes.titlesize": 13, "axes.labelsize": 12, "legend.fontsize": 11, "figure.dpi": 130,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "lines.linewidth": 2, "lines.markersize": 4.5, "legend.frameon": False,
}  # fmt: skip


def unit(x: str, largest: float) -> tuple[float, str]:
    """(divisor, axis label) of a budget ("tokens", "flops" or "seconds") whose largest value is `largest`."""
    if x == "tokens":
        units = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
        divisor, word = next((pair for pair in units if largest >= pair[0]), units[-1])
        return divisor, f"training tokens ({word})"
    if x == "flops":
        power = math.floor(math.log10(largest)) if largest > 0 else 0
        return 10.0**power, f"training FLOPs ($10^{{{power}}}$)"
    units = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
    divisor, word = next((pair for pair in units if largest >= 2 * pair[0]), units[-1])
    return divisor, f"training time ({word}, evaluations left out)"


def styles(runs, baselines) -> dict:
    """run name -> colour and dash: grey for baselines, the others in order."""
    grey = {run.name for run in baselines.values()}
    others = [run.name for run in runs if run.name not in grey]
    n = len(COLORS)
    style = {name: {"color": COLORS[i % n], "linestyle": DASHES[i // n % len(DASHES)]} for i, name in enumerate(others)}
    return style | {name: {"color": BASELINE_COLOR} for name in grey}


def draw_all(runs, baselines, folder) -> list[str]:
    """Write bpb_{tokens,flops,seconds}.png and coefficients.png into `folder`; returns the names of those written."""
    written = []
    with plt.rc_context(STYLE):
        for x in ("tokens", "flops", "seconds"):
            if any(curve(run, x) for run in runs):
                figure = draw_bpb(runs, baselines, x)
                written.append(_save(figure, folder, f"bpb_{x}.png"))
        if any(coefficients(e) for run in runs for e in run.evals):
            written.append(_save(draw_coefficients(runs), folder, "coefficients.png"))
    return written


def _save(figure, folder, name):
    figure.savefig(folder / name)
    plt.close(figure)
    return name


def draw_bpb(runs, baselines, x):
    """bpb against a budget; against tokens also the difference to the baseline, below and on the same axis."""
    gaps = _gaps(runs, baselines) if x == "tokens" else {}
    size = {"figsize": (8, 6.6), "height_ratios": (3, 1.4)} if gaps else {"figsize": (8, 4.8)}
    figure, axes = plt.subplots(2 if gaps else 1, 1, sharex=True, layout="constrained", squeeze=False, **size)
    divisor, label = unit(x, max(point[0] for run in runs for point in curve(run, x)))
    style = styles(runs, baselines)
    top = axes[0, 0]
    for run in runs:
        _line(top, curve(run, x), divisor, label=run.name, **style[run.name])
    top.set_ylabel("validation bits per byte\n(lower is better)")
    top.legend()
    if gaps:
        below = axes[1, 0]
        below.axhline(0, color=BASELINE_COLOR, linewidth=1.2)
        for name, points in gaps.items():
            _line(below, points, divisor, **style[name])
        below.set_ylabel("difference\nto baseline")
        below.yaxis.set_major_locator(MaxNLocator(5))
    axes[-1, 0].set_xlabel(label)
    axes[-1, 0].set_xlim(left=0)
    return figure


def _gaps(runs, baselines):
    pairs = ((run, baselines.get(run.seed)) for run in runs)
    gaps = {run.name: difference_curve(run, base) for run, base in pairs if base is not None and base is not run}
    return {name: points for name, points in gaps.items() if points}


def _line(axis, points, divisor, **how):
    if points:
        axis.plot([p[0] / divisor for p in points], [p[1] for p in points], marker="o", **how)


def draw_coefficients(runs):
    """One panel per run with coefficients: mean over heads per layer, shaded from the smallest to the largest head."""
    runs = [run for run in runs if any(coefficients(e) for e in run.evals)]
    columns = min(len(runs), 3)
    lines = math.ceil(len(runs) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(max(8, 4.6 * columns), 4.4 * lines), layout="constrained", squeeze=False
    )
    divisor, label = unit("tokens", max(e["tokens"] for run in runs for e in run.evals))
    for axis in axes.flat[len(runs) :]:
        axis.set_visible(False)
    for axis, run in zip(axes.flat, runs, strict=False):
        _coefficient_panel(axis, run, divisor)
        axis.set_title(run.name)
        axis.set_xlabel(label)
        axis.set_ylabel("coefficient")
    return figure


def _coefficient_panel(axis, run, divisor):
    evals = [(e["tokens"] / divisor, coefficients(e)) for e in run.evals if e.get("coeffs")]
    keys = list(evals[-1][1])
    layers = sorted({layer for layer, _ in keys})
    names = sorted({name for _, name in keys})
    shade = plt.get_cmap("viridis")
    for layer, name in keys:
        points = [(tokens, found[layer, name]) for tokens, found in evals if (layer, name) in found]
        color = shade(0.85 * layers.index(layer) / max(1, len(layers) - 1))
        axis.plot(
            [tokens for tokens, _ in points], [sum(v) / len(v) for _, v in points],
            color=color, linestyle=DASHES[names.index(name) % len(DASHES)], label=f"layer {layer} {name}",
        )  # fmt: skip
        if any(len(v) > 1 for _, v in points):
            lows, highs = [min(v) for _, v in points], [max(v) for _, v in points]
            axis.fill_between([tokens for tokens, _ in points], lows, highs, color=color, alpha=0.15, linewidth=0)
    axis.set_xlim(left=0)
    axis.legend(fontsize=9 if len(keys) > 6 else 11)
