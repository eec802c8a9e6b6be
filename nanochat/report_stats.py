"""A report's statistics as functions of numbers: mean and spread over seeds, paired differences, Holm's correction."""

import math
import statistics
from dataclasses import dataclass

from scipy.stats import t as student_t

CONFIDENCE = 0.95
IDENTICAL = 1e-12  # spread of the differences, in parts of the largest value, below which it is rounding alone


@dataclass(frozen=True)
class Paired:
    """Mean of n differences; interval and p are None for one pair, p also where all pairs differ by the same."""

    n: int
    mean: float
    low: float | None
    high: float | None
    p: float | None

    @property
    def sign(self) -> int:
        """-1 or 1 where the interval lies below or above 0, else 0; 0 for one pair."""
        if self.low is None:
            return 0
        return -1 if self.high < 0 else int(self.low > 0)


def mean_sd(values) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1); None for the spread of one value. ValueError for no value."""
    values = list(values)
    if not values:
        raise ValueError("the mean of no value")
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def paired(ours, theirs, confidence: float = CONFIDENCE) -> Paired:
    """ours - theirs, pair by pair: mean, t interval of that confidence, p-value of the two-sided paired t-test.

    Values of one unit in the same order of seeds. ValueError for no pair or for lists of different lengths.
    """
    ours, theirs = list(ours), list(theirs)
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} values against {len(theirs)}: pairs have two members")
    mean, sd = mean_sd(a - b for a, b in zip(ours, theirs, strict=True))
    n = len(ours)
    if sd is None:
        return Paired(n, mean, None, None, None)
    if sd <= IDENTICAL * max(map(abs, ours + theirs)):
        return Paired(n, mean, mean, mean, None)
    error = sd / math.sqrt(n)
    half = error * float(student_t.ppf((1 + confidence) / 2, n - 1))
    return Paired(n, mean, mean - half, mean + half, float(2 * student_t.sf(abs(mean) / error, n - 1)))
