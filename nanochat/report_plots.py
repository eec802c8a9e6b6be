"""The report's curves of bpb against tokens, FLOPs and wall time: mean over seeds, range of the seeds as a band."""

import math

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from nanochat.report_series import bpb_curve, gap_curve  # noqa: E402

BASELINE_COLOR = "#444444"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f00", "#882255", "#7a4fd0")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH = 7.2  # inches: on a phone the letters are still legible
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


def styles(names, grey=()) -> dict:
    """name -> colour, dash and marker, the same in every picture: the names in `grey` are grey, BoV comes first."""
    others = sorted((name for name in dict.fromkeys(names) if name not in grey), key="paper/bov".__ne__)
    style = {
        name: {
            "color": COLORS[i % len(COLORS)],
            "linestyle": DASHES[i // len(COLORS) % len(DASHES)],
            "marker": MARKERS[i % len(MARKERS)],
        }
        for i, name in enumerate(others)
    }
    greys = {name: {"color": BASELINE_COLOR, "linestyle": DASHES[i % 4], "marker": "."} for i, name in enumerate(grey)}
    return style | greys


def save(figure, folder, name):
    figure.savefig(folder / name)
    plt.close(figure)


def draw_bpb(names, comparisons, x, style):
    """A figure of bpb against x ("tokens", "flops", "seconds") of variants; None without two evaluations.

    names: {variant: its name in the legend and in `style`}. Below, where x is tokens, the difference of each of the
    `comparisons` to its baseline at equal tokens.
    """
    curves = {v: points for v in names if (points := bpb_curve(v, x))}
    if all(len(points) < 2 for points in curves.values()):
        return None
    gaps = {c: points for c in comparisons if (points := gap_curve(c))} if x == "tokens" else {}
    rows = -(-len(curves) // 2)
    size = (WIDTH, (6.8 if gaps else 4.3) + 0.24 * rows)
    figure, axes = plt.subplots(2 if gaps else 1, 1, figsize=size, layout="constrained", squeeze=False, sharex=True)
    top = axes[0, 0]
    divisor, label = unit(x, max(points[-1].x for points in curves.values()))
    for variant, points in curves.items():
        end = f"{points[-1].mean:.4f}" if variant.finished else "(unfinished)"
        band(top, points, divisor, label=f"{names[variant]}  {end}", **style[names[variant]])
    top.set_ylim(*_zoom(list(curves.values())))
    top.set_ylabel("validation bits per byte\n(lower is better)")
    if gaps:
        axes[1, 0].axhline(0, color=BASELINE_COLOR, linewidth=1.2)
        for comparison, points in gaps.items():
            band(axes[1, 0], points, divisor, **style[comparison.variant.name])
        axes[1, 0].set_ylabel("difference to\nthe baseline")
        axes[1, 0].yaxis.set_major_locator(MaxNLocator(6))
    axes[-1, 0].set_xlabel(label)
    axes[-1, 0].set_xlim(left=0)
    legend(figure, top)
    return figure


def legend(figure, axis):
    """Below the figure, from the line that ends highest to the one that ends lowest."""
    handles, labels = axis.get_legend_handles_labels()
    lines = [handle if isinstance(handle, Line2D) else handle.lines[0] for handle in handles]
    order = sorted(range(len(labels)), key=lambda i: -lines[i].get_ydata()[-1])
    columns = 1 if len(labels) == 1 or max(map(len, labels)) > 46 else 2
    figure.legend(
        [handles[i] for i in order], [labels[i] for i in order], loc="outside lower center", ncols=columns,
        fontsize=10.5,
    )  # fmt: skip


def band(axis, points, divisor=1.0, **how):
    """A line through the means, and the range of the seeds behind it."""
    if points:
        xs = [p.x / divisor for p in points]
        axis.plot(xs, [p.mean for p in points], **how)
        if any(p.high > p.low for p in points):
            lows, highs = [p.low for p in points], [p.high for p in points]
            axis.fill_between(xs, lows, highs, color=how["color"], alpha=0.12, linewidth=0)


def _zoom(curves) -> tuple[float, float]:
    """Limits that leave out the steep first fifth, so that the ends of the curves come apart."""
    last = max(points[-1].x for points in curves)
    kept = [p for points in curves for p in points if p.x >= 0.2 * last or len(points) < 3]
    low, high = min(p.low for p in kept), max(p.high for p in kept)
    room = 0.05 * (high - low) or 0.01
    return low - room, high + room
