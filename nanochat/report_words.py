"""Numbers of a report as short text, for the screen and the pages alike."""


def count(value) -> str:
    """12345678 -> 12.3M; "-" for None."""
    if value is None:
        return "-"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"


def number(value, digits, sign="") -> str:
    return "-" if value is None else f"{value:{sign}.{digits}f}"


def power(value) -> str:
    """1.5e18 -> "1.5e18"."""
    return f"{value:.3g}".replace("e+", "e")


def plural(n: int, word: str) -> str:
    return f"one {word}" if n == 1 else f"{n} {word}s"


def p_value(p) -> str:
    if p is None:
        return "-"
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.01 else f"{p:.3f}" if p < 0.9995 else "1"


def interval(stat) -> str:
    """The 95 % interval of a Paired, or why there is none."""
    if stat is None:
        return "-"
    return "one seed" if stat.low is None else f"{stat.low:+.4f} to {stat.high:+.4f}"


def gibibytes(size) -> str:
    return "-" if size is None else f"{size / 2**30:.2f}"


def percent_more(ours, theirs) -> str:
    """ "3.3 % fewer", "0.2 % more" or "as many"."""
    change = 100 * (ours / theirs - 1)
    if abs(change) < 0.05:
        return "as many"
    return f"{abs(change):.1f} % {'fewer' if change < 0 else 'more'}"
