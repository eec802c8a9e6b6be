"""scripts/paper_plan.py and runs/paper.toml: matched widths, hours, and the paper's numbers beside the scripts'."""

import re

import pytest

from nanochat.bov.presets import PRESETS
from nanochat.plan import meta_model, plan_run
from scripts import paper_plan
from scripts.base_train import parser
from test_runs import ROOT, dry_run, plans

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = None

# ---------------------------------------------------------------------------- plans


@pytest.mark.parametrize("target", [135e6, 200e6, 233_570_333, 500e6])
def test_matched_width_is_the_nearest_multiple(target):
    total, layers, width = 135_266_329, 12, 768
    hidden = paper_plan.matched_mlp_hidden(total, target, layers, width, tolerance=1)

    def off(h):
        return abs(total + (h - 4 * width) * 2 * layers * width - target)

    assert hidden % 128 == 0 and off(hidden) <= min(off(hidden - 128), off(hidden + 128))


def test_matched_width_counts_what_the_model_counts():
    hidden = paper_plan.matched_mlp_hidden(135_266_329, 233_570_333, 12, 768)
    flags = ["--preset", "paper/baseline", "--depth", "12", "--target-flops", "1.5e18", "--mlp-hidden", str(hidden)]
    config, _ = plan_run(parser().parse_args(flags), 32768, 1)
    total = meta_model(config).num_scaling_params()["total"]
    assert total == 135_266_329 + (hidden - 3072) * 2 * 12 * 768
    assert abs(total / 233_570_333 - 1) <= 0.005


def test_matched_width_that_misses_is_refused():
    with pytest.raises(ValueError, match="--mlp-hidden .* misses"):
        paper_plan.matched_mlp_hidden(850_000, 967_000, 3, 128)


def test_hours_from_flops():
    assert paper_plan.hours(8 * 1e15 * 0.4 * 3600, gpus=8, peak=1e15) == pytest.approx(1)


# ---------------------------------------------------------------------------- the paper's numbers


@pytest.fixture(scope="module")
def paper():
    if tomllib is None:
        tomli = pytest.importorskip("tomli")
        return tomli.loads((ROOT / "runs/paper.toml").read_text())
    return tomllib.loads((ROOT / "runs/paper.toml").read_text())


def test_every_row_names_a_preset(paper):
    rows = [row for table in ("table1", "table2", "table3", "figure2") for row in paper[table]["rows"]]
    names = [row["preset"] for row in rows] + paper["figure5b"]["presets"]
    assert len(paper["table1"]["rows"]) == 13 and set(names) <= set(PRESETS)


def test_every_table_has_its_page(paper):
    for name, table in paper.items():
        assert name == "source" or re.search(r"p\. \d+", table["where"]), name


def test_budgets_of_the_scripts_are_the_papers(paper):
    for depth, table in ((12, "table1"), (24, "table3")):
        text = (ROOT / f"runs/bov_d{depth}.sh").read_text()
        assert float(re.search(r"^FLOPS=(\S+)", text, re.M)[1]) == paper[table]["flops"]
        assert paper[table]["n_layer"] == depth
    assert float(re.search(r"^TOKENS=(\S+)", text, re.M)[1]) == paper["table2"]["tokens"]


def test_flops_of_equal_tokens_follow_from_the_plan(paper):
    found = plans(dry_run(24, "tokens"))
    for row, plan in zip(paper["table2"]["rows"], found, strict=True):
        assert plan["total_flops"] == pytest.approx(row["flops"], rel=2e-3)
