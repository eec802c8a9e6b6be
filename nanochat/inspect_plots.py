"""Pictures of a bank: how far rows moved by token frequency, and which tokens each head of a layer reads."""

from functools import lru_cache

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib import font_manager  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter  # noqa: E402

from nanochat.report_plots import BASELINE_COLOR, COLORS, STYLE  # noqa: E402

NEVER = 0.2  # where rows that were never seen stand on the logarithmic axis of counts
FEW_ROWS = 5  # of fewer no median is drawn
MOST_TOKENS = 32  # columns of a heat map
NUMBERS_UP_TO = 16  # columns whose cells have room for numbers


@lru_cache(maxsize=1)
def _drawable() -> frozenset:
    return frozenset(font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap())


def label(text: str) -> str:
    """A token's text for a picture: spaces and line ends visible, what the font lacks as its code, no formulas."""
    text = text.replace(" ", "\u2423").replace("\n", "\\n").replace("\t", "\\t")
    drawn = "".join(c if ord(c) in _drawable() and c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return (drawn if len(drawn) <= 18 else drawn[:17] + "\u2026").replace("$", r"\$")


def draw_movement(path, panels, counted):
    """Write movement against frequency: `panels` of (title, movement (V,), counts (V,), bins of inspect_bank)."""
    with plt.rc_context(STYLE):
        columns = min(len(panels), 3)
        lines = -(-len(panels) // columns)
        size = (max(7.5, 4.8 * columns), 4.4 * lines)
        figure, axes = plt.subplots(
            lines, columns, figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True
        )
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, panel in zip(axes.flat, panels, strict=False):
            _movement_panel(axis, *panel)
        shown = {
            name: handle for axis in axes.flat for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        legend = figure.legend(shown.values(), shown, loc="outside upper center", ncols=len(shown), markerscale=1.4)
        legend.legend_handles[0].set_alpha(0.6)
        for axis in axes[:, 0]:
            axis.set_ylabel("movement of a row\n(1 = its length at the start)")
        for i, axis in enumerate(axes.flat[: len(panels)]):
            if i + columns >= len(panels):
                axis.set_xlabel(f"times the token occurs in\n{counted}")
                axis.xaxis.set_tick_params(labelbottom=True)
        _save(figure, path)


def _movement_panel(axis, title, moved, counts, bins):
    unseen, seen = [b for b in bins if not b["low"]], [b for b in bins if b["low"] and b["count"] >= FEW_ROWS]
    at = counts.double().clamp_min(NEVER).numpy()
    alpha = max(0.03, min(0.18, 800 / len(moved)))
    axis.scatter(at, moved.numpy(), s=5, color=BASELINE_COLOR, alpha=alpha, linewidths=0, rasterized=True, label="rows")
    middles = [(b["low"] * (b["high"] + 1)) ** 0.5 if b["low"] > 1 else 1 for b in seen]
    quartiles = [[b[name] for b in seen] for name in ("q25", "q75")]
    axis.fill_between(middles, *quartiles, color=COLORS[0], alpha=0.22, linewidth=0, label="quartiles")
    axis.plot(
        middles, [b["median"] for b in seen], color=COLORS[0], marker="o", label=f"median of {FEW_ROWS} rows or more"
    )
    for b in unseen:
        bars = [[b["median"] - b["q25"]], [b["q75"] - b["median"]]]
        axis.errorbar([NEVER], [b["median"]], yerr=bars, color=COLORS[1], marker="s", capsize=4, label="never seen")
    axis.axvline(NEVER**0.5, color=BASELINE_COLOR, linewidth=0.8, linestyle=":")
    axis.set_xscale("log")
    axis.set_xlim(NEVER / 1.8, max(2.0, counts.max().item()) * 1.8)
    _count_ticks(axis, counts.max().item())
    top = max(moved.max().item(), 1e-3)
    axis.set_ylim(-0.03 * top, 1.08 * top)
    axis.set_title(title)


def _count_ticks(axis, largest):
    tens = [10**i for i in range(len(str(largest)))]
    names = {
        1: "1",
        10: "10",
        100: "100",
        1000: "1k",
        10**4: "10k",
        10**5: "100k",
        10**6: "1M",
        10**7: "10M",
        10**8: "100M",
    }
    axis.xaxis.set_major_locator(FixedLocator([NEVER, *tens]))
    shown = FuncFormatter(lambda x, _: "never" if x == NEVER else names.get(round(x), f"{x:.0e}"))
    axis.xaxis.set_major_formatter(shown)
    axis.xaxis.set_minor_locator(FixedLocator([ten * digit for ten in tens for digit in range(2, 10)]))
    axis.xaxis.set_minor_formatter(NullFormatter())


def draw_mixture(path, mixture, names, last):
    """Write the weights (heads x tokens) of one layer as a heat map; `names`: the text of each of mixture.tokens.

    last: the text of the token at which the heads read. Beyond MOST_TOKENS, those with the largest weights are shown,
    in the order of the text, and the rest as one column.
    """
    weights, names = mixture.weights, [label(name) for name in names]
    if len(names) > MOST_TOKENS:
        kept = weights.amax(0).topk(MOST_TOKENS - 1).indices.sort().values
        rest = weights.sum(1, keepdim=True) - weights[:, kept].sum(1, keepdim=True)
        names = [names[i] for i in kept.tolist()] + [f"the other {weights.size(1) - len(kept)}"]
        weights = _beside(weights[:, kept], rest)
    N, U = weights.shape
    with plt.rc_context(STYLE | {"axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}):
        size = (max(6.0, 2.2 + (0.48 if U <= NUMBERS_UP_TO else 0.33) * U), max(3.0, 1.9 + 0.42 * N))
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        image = axis.imshow(weights.numpy(), cmap="Blues", vmin=0, aspect="auto")
        axis.set_xticks(range(U), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=10)
        axis.set_yticks(range(N), [str(n) for n in range(N)])
        axis.set_ylabel("query head")
        title = f"layer {mixture.layer}: weight of each token's row at the last token, {label(last)}"
        axis.set_title(title, fontsize=11)
        for n, u in [(n, u) for n in range(N) for u in range(U)] if U <= NUMBERS_UP_TO else ():
            value = weights[n, u].item()
            if value >= 0.005:
                color = "white" if value > 0.55 * weights.max() else "black"
                axis.text(u, n, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
        figure.colorbar(image, ax=axis, label="weight w", pad=0.01, aspect=min(30, 8 + 2 * N))
        _save(figure, path)


def _beside(left, right):
    return left.new_tensor([[*a, *b] for a, b in zip(left.tolist(), right.tolist(), strict=True)])


def _save(figure, path):
    figure.savefig(path)
    plt.close(figure)
