"""One picture of the suite's growth section: time against context, and pooled's V side against distinct tokens."""

from matplotlib.ticker import LogLocator

from nanochat.report_plots import BASELINE_COLOR, COLORS, STYLE, plt

LINES = {  # way: (label, colour, dash)
    "upstream": ("V cached, upstream's layout", BASELINE_COLOR, ":"),
    "cached": ("V cached, our layout", BASELINE_COLOR, "-"),
    "gather": ("gather", COLORS[4], "-"),
    "pooled": ("pooled", COLORS[0], "-"),
    "fused": ("fused", COLORS[2], "-"),
}
V_SIDE = {
    "scatter": ("scatter: sum p by token", COLORS[1], "--"),
    "product": ("product with the rows", COLORS[5], "--"),
}


def draw_growth(growth, path):
    """Write the PNG for a growth section {"by_context": rows, "by_distinct": rows}; rows left out are not drawn."""
    by_context = [row for row in growth["by_context"] if "skipped" not in row]
    by_distinct = [row for row in growth["by_distinct"] if "skipped" not in row]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
        _contexts(left, by_context)
        _distinct(right, by_distinct)
        figure.savefig(path)
        plt.close(figure)


def _contexts(axis, rows):
    contexts = [row["context"] for row in rows]
    for way, (label, color, dash) in LINES.items():
        if rows and way in rows[0]["ms"]:
            medians = [row["ms"][way]["median"] for row in rows]
            axis.plot(contexts, medians, marker="o", color=color, linestyle=dash, label=label)
    v_side = [row["pooled_parts_ms"]["scatter"] + row["pooled_parts_ms"]["product"] for row in rows]
    axis.plot(contexts, v_side, marker="o", color=COLORS[0], linestyle="--", label="of pooled: V side alone")
    _scales(axis, contexts)
    axis.set_xlabel("cached positions T")
    axis.set_ylabel("one bank layer's attention, one new token (ms)")
    axis.set_title("Time against context")
    axis.legend()


def _distinct(axis, rows):
    distinct = [row["distinct"] for row in rows]
    axis.plot(distinct, [row["v_side_ms"] for row in rows], marker="o", color=COLORS[0], label="V side of pooled")
    for part, (label, color, dash) in V_SIDE.items():
        times = [row["pooled_parts_ms"][part] for row in rows]
        axis.plot(distinct, times, marker="o", color=color, linestyle=dash, label=label)
    _scales(axis, distinct)
    axis.set_xlabel("distinct tokens U among the cached")
    axis.set_ylabel("time (ms)")
    axis.set_title(f"V side against distinct tokens, T = {rows[0]['context']:,}" if rows else "V side")
    axis.legend()


def _scales(axis, values):
    """Logarithmic axes; every power of two or four among `values` is written out."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    if values:
        low, high = min(values).bit_length() - 1, max(values).bit_length()
        ticks = [2**k for k in range(low, high + 1, 1 if high - low < 6 else 2)]
        axis.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
        axis.minorticks_off()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
