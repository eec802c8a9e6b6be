"""The report's other pictures: differences as dots, learned coefficients, repetition, long contexts."""

import math

from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from nanochat.report_context import chance, position_curve, probe_points
from nanochat.report_plots import BASELINE_COLOR, WIDTH, band, legend, plt, unit
from nanochat.report_series import coefficient_course, final_coefficients

SEED_COLOR = "#8a8a8a"
DASH_OF = {"gamma": "-", "lambda": "-", "beta": "--", "alpha": ":"}  # first word of a coefficient's name


def _dash(name):
    return DASH_OF.get(name.partition("_")[0], "-.")


# ---------------------------------------------------------------------------- differences


def draw_dots(section, style):
    """Figure 5(b): each variant's difference to its baseline with its interval, and each seed's; None without any."""
    groups = [sorted((c for c in found if c.stat), key=lambda c: -c.stat.mean) for _, found in section.groups]
    groups = [found for found in reversed(groups) if found]
    rows = [c for found in groups for c in found]
    if not rows:
        return None
    figure, axis = plt.subplots(figsize=(WIDTH, 1.3 + 0.52 * len(rows)), layout="constrained")
    axis.axvline(0, color=BASELINE_COLOR, linewidth=1.4)
    for y, c in enumerate(rows):
        _dot(axis, y, c, style[c.variant.name])
    y = -0.5
    for found in groups[:-1]:
        y += len(found)
        axis.axhline(y, color=BASELINE_COLOR, linewidth=0.8, linestyle=":")
    several = len(section.groups) > 1
    names = [c.variant.label_at_budget if several else c.name for c in rows]
    axis.set_yticks(range(len(rows)), [_broken(name) for name in names])
    axis.set_ylim(-0.7, len(rows) - 0.3)
    axis.set_xlabel("difference to the baseline\nin bits per byte (lower is better)")
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.margins(x=0.08)
    return figure


def _dot(axis, y, c, how):
    ours, theirs, color = c.variant.bpb, c.baseline.bpb, how["color"]
    axis.plot([ours[s] - theirs[s] for s in c.seeds], [y - 0.24] * c.stat.n, ".", color=SEED_COLOR, markersize=6)
    if c.stat.low is not None:
        axis.plot([c.stat.low, c.stat.high], [y, y], color=color, linewidth=2.4, solid_capstyle="butt")
    face = color if c.stat.n > 1 else "white"
    axis.plot([c.stat.mean], [y], how["marker"], color=color, markerfacecolor=face, markersize=8, markeredgewidth=2)
    words = {"textcoords": "offset points", "ha": "center", "fontsize": 9}
    words["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # the line at 0 would cross the number
    axis.annotate(f"{c.stat.mean:+.4f}", (c.stat.mean, y), (0, 7), **words)


def _broken(name, longest=28) -> str:
    """A long name on several lines, broken after commas."""
    lines = [""]
    for part in name.split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        lines = [*lines[:-1], joined] if len(joined) <= longest or not lines[-1] else [*lines, part]
    return ",\n".join(lines)


def draw_repetition(series, style):
    """Difference to the baseline against passes over the text; `series`: {name: comparisons sorted by passes}."""
    figure, axis = plt.subplots(figsize=(WIDTH, 4.6 + 0.12 * len(series)), layout="constrained")
    axis.axhline(0, color=BASELINE_COLOR, linewidth=1.4)
    ticks = sorted({round(c.variant.epochs, 2) for found in series.values() for c in found})
    for i, (name, found) in enumerate(series.items()):
        shift = 2 ** (0.018 * (2 * i - len(series) + 1))  # apart, where several stand at one number of passes
        stats = [c.stat for c in found]
        bars = [[s.mean - (s.mean if s.low is None else s.low) for s in stats],
                [(s.mean if s.high is None else s.high) - s.mean for s in stats]]  # fmt: skip
        passes = [c.variant.epochs * shift for c in found]
        means = [s.mean for s in stats]
        first, last = (round(c.variant.epochs, 2) for c in (found[0], found[-1]))
        whole = len(found) == sum(first <= tick <= last for tick in ticks)
        how = style[name] if whole else style[name] | {"linestyle": "none"}  # none across passes nobody measured
        axis.errorbar(passes, means, yerr=bars, capsize=4, label=name, elinewidth=1.4, **how)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{p:.3g}" for p in ticks])
    axis.minorticks_off()
    axis.set_xlabel("passes over the training text")
    axis.set_ylabel("difference to the baseline\nof as many passes (bits per byte)")
    legend(figure, axis)
    return figure


# ---------------------------------------------------------------------------- coefficients


def draw_final_coefficients(variants, style):
    """Figure 2: layers on x, one line per variant and coefficient, bars over the seeds' range; None without any."""
    found = {v: layers for v in variants if (layers := final_coefficients(v))}
    if not found:
        return None
    lines = [(v, name) for v, layers in found.items() for name in sorted({name for _, name in layers})]
    figure, axis = plt.subplots(figsize=(WIDTH, 4.6 + 0.12 * len(lines)), layout="constrained")
    for i, (variant, name) in enumerate(lines):
        points = [point for (_, other), point in found[variant].items() if other == name]
        shift = 0.24 * (i + 0.5 - len(lines) / 2) / len(lines)  # apart, where several have one value
        bars = [[p.mean - p.low for p in points], [p.high - p.mean for p in points]]
        how = style[variant.name] | {"linestyle": _dash(name), "linewidth": 1.6}
        axis.errorbar(
            [p.x + shift for p in points], [p.mean for p in points], yerr=bars, capsize=3, elinewidth=1.2,
            label=f"{variant.name}: {name}", **how,
        )  # fmt: skip
    axis.axhline(0, color=BASELINE_COLOR, linewidth=0.8)
    layers = sorted({layer for points in found.values() for layer, _ in points})
    axis.set_xticks(layers[:: -(-len(layers) // 16)])
    axis.set_xlabel("layer, counted from 0")
    axis.set_ylabel("coefficient at the end of training")
    legend(figure, axis)
    return figure


def draw_course(variants):
    """One panel per variant with coefficients: mean over seeds per layer, shaded from the smallest to the largest."""
    courses = {v: course for v in variants if (course := coefficient_course(v))}
    if not courses:
        return None
    columns = min(len(courses), 2)
    rows = math.ceil(len(courses) / columns)
    size = (WIDTH, 1.2 + 2.9 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, sharex=True)
    for axis in axes.flat[len(courses) :]:
        axis.set_visible(False)
    curves = [points for course in courses.values() for points in course.values()]
    divisor, label = unit("tokens", max(points[-1].x for points in curves))
    layers = sorted({layer for course in courses.values() for layer, _ in course})
    names = sorted({name for course in courses.values() for _, name in course})
    shade = plt.get_cmap("viridis")
    colors = {layer: shade(0.88 * i / max(1, len(layers) - 1)) for i, layer in enumerate(layers)}
    for i, (axis, (variant, course)) in enumerate(zip(axes.flat, courses.items(), strict=False)):
        for (layer, name), points in course.items():
            band(axis, points, divisor, color=colors[layer], linestyle=_dash(name))
        axis.set_title(_broken(variant.name), fontsize=11)
        if i + columns >= len(courses):
            axis.set_xlabel(label)
            axis.xaxis.set_tick_params(labelbottom=True)
        axis.set_xlim(left=0)
    for axis in axes[:, 0]:
        axis.set_ylabel("coefficient")
    handles = [Line2D([], [], color=colors[layer], label=f"layer {layer}") for layer in layers]
    if len(names) > 1:
        handles += [Line2D([], [], color=BASELINE_COLOR, linestyle=_dash(name), label=name) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), fontsize=10.5)
    return figure


# ---------------------------------------------------------------------------- long contexts


def draw_positions(context, style, baseline_of):
    """Bits per byte by position, one panel per window; below, the differences of `baseline_of`'s keys to its values."""
    size = (WIDTH, 5.6 if baseline_of else 3.8)
    figure, axes = plt.subplots(
        2 if baseline_of else 1, len(context.windows), figsize=size, layout="constrained", squeeze=False, sharex=True,
        sharey="row",
    )  # fmt: skip
    for column, window in zip(axes.T, context.windows, strict=True):
        for variant in context.results:
            band(column[0], position_curve(context, variant, window), label=variant.name, **style[variant.name])
        for variant, baseline in baseline_of.items():
            band(column[1], position_curve(context, variant, window, baseline), **style[variant.name])
            column[1].axhline(0, color=BASELINE_COLOR, linewidth=1.2)
        for axis in column:
            axis.axvline(1, color=SEED_COLOR, linewidth=1, linestyle=":")
        column[0].set_title(f"{window} windows")
        column[-1].set_xlabel("position / training length")
    axes[0, 0].set_ylabel("bits per byte")
    if baseline_of:
        axes[1, 0].set_ylabel("difference to\nthe baseline")
    legend(figure, axes[0, 0])
    return figure


def draw_probes(context, style):
    """Accuracy by length, rows: probes, columns: windows; bars reach over the seeds' intervals, dots show guessing."""
    probes = list(context.some["probes"])
    size = (WIDTH, 1.0 + 2.3 * len(probes))
    figure, axes = plt.subplots(
        len(probes), len(context.windows), figsize=size, layout="constrained", squeeze=False, sharex=True, sharey="row"
    )
    for line, probe in zip(axes, probes, strict=True):
        for axis, window in zip(line, context.windows, strict=True):
            for i, variant in enumerate(context.results):
                points = probe_points(context, probe, variant, window)
                shift = 2 ** (0.06 * (2 * i - len(context.results) + 1))  # apart, where several have one value
                bars = [[p.mean - p.low for p in points], [p.high - p.mean for p in points]]
                axis.errorbar(
                    [p.x * shift for p in points], [p.mean for p in points], yerr=bars, capsize=3, elinewidth=1.2,
                    label=variant.name, **style[variant.name],
                )  # fmt: skip
            axis.axhline(chance(context, probe), color=SEED_COLOR, linewidth=1, linestyle=":")
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set_ylim(bottom=0)
        line[0].set_ylabel(f"{probe}\naccuracy")
    for axis, window in zip(axes[0], context.windows, strict=True):
        axis.set_title(f"{window} windows")
    for axis in axes[-1]:
        axis.set_xlabel("context / training length")
    legend(figure, axes[0, 0])
    return figure
