"""The report's statistics against scipy and numbers worked out by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nanochat.core_compare import holm
from nanochat.report_stats import mean_sd, paired

bits = st.floats(0.5, 3.0).map(lambda value: round(value, 4))
pairs = st.lists(st.tuples(bits, bits), min_size=2, max_size=8)


@settings(deadline=None)
@given(pairs)
def test_paired_equals_scipys_test(values):
    ours, theirs = map(list, zip(*values, strict=True))
    found = paired(ours, theirs)
    differences = [round(a - b, 4) for a, b in values]
    assert found.n == len(values) and found.mean == pytest.approx(sum(differences) / len(values), abs=1e-9)
    if len(set(differences)) == 1:  # scipy's test answers NaN here
        assert found.p is None and found.low == found.high == found.mean
        return
    expected = stats.ttest_rel(ours, theirs)
    low, high = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)


def test_paired_by_hand():
    found = paired([1.0, 2.0, 3.0], [1.1, 2.3, 3.2])  # differences -0.1, -0.3, -0.2: mean -0.2, sd 0.1, t(2) = 4.302653
    half = 4.302652729 * 0.1 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((-0.2 - half, -0.2 + half))
    assert found.sign == 0 and paired([1.0, 2.0, 3.0], [2.1, 3.3, 4.2]).sign == -1


@pytest.mark.parametrize(
    "ours, theirs, sign", [([1.4], [1.5], 0), ([1.4, 1.4], [1.5, 1.5], -1), ([1.0, 2.0], [1.0, 2.0], 0)]
)
def test_no_spread_is_never_nan(ours, theirs, sign):
    found = paired(ours, theirs)
    assert found.p is None and math.isfinite(found.mean) and found.sign == sign
    assert (found.low is None) == (len(ours) == 1)


def test_pairs_need_partners():
    with pytest.raises(ValueError, match="2 values against 1"):
        paired([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no value"):
        paired([], [])


def test_spread_is_the_sample_standard_deviation():
    assert mean_sd([1.0, 2.0, 4.0]) == (pytest.approx(7 / 3), pytest.approx(math.sqrt(7 / 3)))
    assert mean_sd([2.5]) == (2.5, None)


def test_holm_by_hand():
    assert holm([0.01, None, 0.04, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_holm_keeps_the_order_and_lies_between_one_test_and_bonferroni(values):
    found = holm(values)
    assert all(p <= q <= min(1, p * len(values)) + 1e-12 for p, q in zip(values, found, strict=True))
    ranked = sorted(range(len(values)), key=values.__getitem__)
    assert [found[i] for i in ranked] == sorted(found)
