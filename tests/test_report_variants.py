"""bov_report over seeds: which runs are one variant, which baseline is theirs, the paper beside."""

import json

import pytest

from nanochat import report_findings
from nanochat.bov.presets import PRESETS
from nanochat.paper import read_paper
from nanochat.report import load_run, row
from nanochat.report_figures import draw_final_coefficients, draw_repetition
from nanochat.report_page import gather, repetition
from nanochat.report_paper import AGREES, DISAGREES, OPEN, TABLES, beside, groups_of, orderings
from nanochat.report_plots import styles
from nanochat.report_series import bpb_curve, costs, final_coefficients, gap_curve
from nanochat.report_stats import paired
from nanochat.report_tables import result_table, screen
from nanochat.report_variants import baseline_runs, budgets, compare, group, is_baseline
from report_runs import BATCH, RATES, STEPS, Shelf, write_run
from scripts import bov_report

# ---------------------------------------------------------------------------- variants


def test_seeds_of_one_header_are_one_variant_whatever_the_folders_are_called(tmp_path):
    names = ("x", "baseline_b", "zebra_s9")
    folders = [write_run(tmp_path / name, "paper/bov", 1.4, seed=i) for i, name in enumerate(names)]
    folders.append(write_run(tmp_path / "bov_s4", "paper/baseline", 1.4, seed=4))
    variants = group([load_run(folder) for folder in folders])
    assert [v.label for v in variants] == ["paper/bov", "paper/baseline"]
    assert [[run.seed for run in v.runs] for v in variants] == [[0, 1, 2], [4]]


@pytest.mark.parametrize(
    "other, label",
    [
        ({"data": {"train_part": 0.25}}, "paper/bov, train_part 0.25"),
        ({"lr": {"value_table": RATES["value_table"] / 2}}, "paper/bov, value-table lr x0.5"),
        ({"lr": {name: 4 * rate for name, rate in RATES.items()}}, "paper/bov, lr x4"),
        ({"lr": {"matrix": 0.006}}, "paper/bov, matrix lr x3"),
        ({"table_weight_decay": 0.1}, "paper/bov, table decay 0.1"),
        ({"config": {"mlp_hidden": 640}, "changed": True}, "paper/bov, mlp_hidden 640"),
        ({"steps": 700}, "paper/bov, 5.73M tokens"),
        ({"weight_decay": 0.3}, "paper/bov, weight decay 0.3"),
    ],
    ids=lambda value: value.removeprefix("paper/bov, ") if isinstance(value, str) else "",
)
def test_label_says_what_differs_within_a_preset(tmp_path, other, label):
    shelf = Shelf(tmp_path).add(values=[1.4, 1.4]).add("paper/bov", [1.39, 1.38]).add("paper/bov", [1.3], **other)
    labels = [v.label for v in shelf.variants()]
    assert len(labels) == 3 and labels[0] == "paper/baseline" and labels[2] == label
    assert labels[1] == ("paper/bov, 4.1M tokens" if "tokens" in label else "paper/bov")


def test_what_follows_from_the_machine_makes_no_variant(tmp_path):
    shelf = Shelf(tmp_path).add("paper/bov", [1.4], train_bytes_per_rank=1).add("paper/bov", [1.4], seeds=[1])
    assert len(shelf.variants()) == 1


def test_what_no_label_names_still_keeps_variants_apart(tmp_path):
    shelf = Shelf(tmp_path).add("paper/bov", [1.4]).add("paper/bov", [1.4], data={"train_sha": "f" * 64})
    labels = [v.label for v in shelf.variants()]
    assert len(set(labels)) == 2


def test_the_first_finished_run_of_a_seed_counts_and_it_is_said(tmp_path):
    shelf = Shelf(tmp_path).add("paper/bov", [1.4], done=False).add("paper/bov", [1.5]).add("paper/bov", [1.6])
    (variant,) = shelf.variants()
    assert variant.bpb == {0: 1.5}
    assert "several runs of one seed" in " ".join(report_findings.limits([variant], []))


# ---------------------------------------------------------------------------- budgets and baselines


def compared(shelf, name=None):
    """[(budget, variant, baseline, seeds)] of a shelf."""
    sections = compare(shelf.variants(), name)
    return [(s.budget, c.variant.label, c.baseline.label, c.seeds) for s in sections for c in s.comparisons]


def test_difference_is_paired_by_seed(tmp_path):
    shelf = Shelf(tmp_path).add(values=[1.40, 1.50, 1.30]).add("paper/bov", [1.38, 1.49, 1.26, 1.0])
    (section,) = compare(shelf.variants())
    (found,) = section.comparisons
    assert found.seeds == (0, 1, 2) and found.stat == paired([1.38, 1.49, 1.26], [1.40, 1.50, 1.30])
    assert "pairs" in result_table(section)["heads"] and found.holm == found.stat.p


def test_budgets_are_read_from_the_plan(tmp_path):
    cost = {"flops_per_token": 60_000_000}
    shelf = Shelf(tmp_path).add(values=[1.4])
    shelf.add("paper/bov", [1.39]).add("paper/bov", [1.38], steps=517).add("paper/bov", [1.37], steps=600)
    base, tokens, flops, neither = shelf.variants()
    assert abs(flops.flops - base.flops) < max(base.flops / STEPS, flops.flops / 517)
    assert [budgets(v, base) for v in (tokens, flops, neither)] == [{"tokens"}, {"flops"}, set()]
    same = Shelf(tmp_path / "same").add(values=[1.4]).add("table1/9", [1.39], **cost).variants()
    assert budgets(same[1], same[0]) == {"tokens", "flops"}


def test_no_difference_across_budgets(tmp_path):
    shelf = Shelf(tmp_path).add(values=[1.4]).add("paper/bov", [1.37], steps=600)
    assert compared(shelf) == []
    runs = [load_run(folder) for folder in shelf.folders]
    assert baseline_runs(compare(group(runs))) == {}
    assert "no pair of finished runs" in report_findings.findings([])[0]


def test_three_budgets_stand_apart(tmp_path):
    wide = {"config": {"mlp_hidden": 2560}, "changed": True, "flops_per_token": 80_000_000}
    shelf = Shelf(tmp_path).add(values=[1.4, 1.41]).add(values=[1.36, 1.37], **wide)
    shelf.add("paper/bov", [1.38, 1.39]).add("paper/bov", [1.37, 1.38], steps=517)
    assert compared(shelf) == [
        ("flops", "paper/bov, 4.24M tokens", "paper/baseline", (0, 1)),
        ("tokens", "paper/baseline, mlp_hidden 2560", "paper/baseline", (0, 1)),
        ("tokens", "paper/bov, 4.1M tokens", "paper/baseline", (0, 1)),
        ("params", "paper/bov, 4.1M tokens", "paper/baseline, mlp_hidden 2560", (0, 1)),
    ]
    facts = gather([load_run(folder) for folder in shelf.folders], {})
    said = report_findings.findings(facts.sections)
    assert "with the same training FLOPs and after 3.4 % more tokens" in said[0]
    assert any("more parameters, tables counted" in line or "as many parameters" in line for line in said)


def test_equal_parameters_means_equal(tmp_path):
    narrow = {"config": {"mlp_hidden": 1300}, "changed": True, "flops_per_token": 60_100_000}
    shelf = Shelf(tmp_path).add(values=[1.36], **narrow).add("paper/bov", [1.38])
    assert compared(shelf) == []


def test_same_cost_per_token_is_one_budget_unless_others_use_both(tmp_path):
    cost = {"flops_per_token": 60_000_000}
    alone = Shelf(tmp_path / "a").add(values=[1.4]).add("table1/9", [1.39], **cost)
    assert [budget for budget, *_ in compared(alone)] == ["tokens"]
    flops = Shelf(tmp_path / "b").add(values=[1.4]).add("table1/9", [1.39], **cost).add("paper/bov", [1.38], steps=517)
    assert [found[:2] for found in compared(flops)] == [("flops", "table1/9"), ("flops", "paper/bov")]
    flops.add("fig5b/shared", [1.38])
    assert [found[:2] for found in compared(flops)] == [
        ("flops", "table1/9"), ("flops", "paper/bov"), ("tokens", "table1/9"), ("tokens", "fig5b/shared")
    ]  # fmt: skip


def test_baseline_of_the_same_part_of_the_text_and_the_same_rates(tmp_path):
    part, low = {"data": {"train_part": 0.25}}, {"lr": {"matrix": RATES["matrix"] / 2}}
    shelf = Shelf(tmp_path).add(values=[1.40]).add(values=[1.41], **low).add(values=[1.45], **part)
    shelf.add("paper/bov", [1.39]).add("paper/bov", [1.38], **low).add("paper/bov", [1.47], **part)
    assert [found[1:3] for found in compared(shelf)] == [
        ("paper/bov", "paper/baseline"),
        ("paper/bov, matrix lr x0.5", "paper/baseline, matrix lr x0.5"),
        ("paper/bov, train_part 0.25", "paper/baseline, train_part 0.25"),
    ]


def test_absent_train_part_is_the_whole_text(tmp_path):
    shelf = Shelf(tmp_path).add(values=[1.4]).add("paper/bov", [1.39], data={"train_part": 1.0})
    assert len(compared(shelf)) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"data": {"train_part": 0.5}},
        {"val": "w" * 64},
        {"data": {"train_sha": "e" * 64}},
        {"total_batch_size": 2 * BATCH},
        {"config": {"n_layer": 7}},
    ],
    ids=["part of the text", "held-out text", "training text", "batch", "depth"],
)
def test_no_baseline_from_another_setting(tmp_path, more):
    assert compared(Shelf(tmp_path).add(values=[1.4]).add("paper/bov", [1.39], **more)) == []


def test_baselines_preset_changed_in_more_than_the_mlp_is_none(tmp_path):
    shelf = Shelf(tmp_path).add(config={"mlp_hidden": 2560}, changed=True).add(config={"smear": False}, changed=True)
    assert [is_baseline(v) for v in shelf.variants()] == [True, False]


def test_named_baseline_brings_its_variant(tmp_path):
    shelf = Shelf(tmp_path).add(values=[1.40, 1.42]).add("paper/bov", [1.39, 1.40]).add("fig5b/shared", [1.5, 1.6])
    name = shelf.folders[3].name
    assert [found[1:] for found in compared(shelf, name)] == [
        ("paper/baseline", "paper/bov", (0, 1)),
        ("fig5b/shared", "paper/bov", (0, 1)),
    ]


def test_unfinished_runs_count_in_no_mean(tmp_path):
    shelf = Shelf(tmp_path).add(values=[1.40, 1.42]).add("paper/bov", [1.39]).add("paper/bov", [1.0], [1], done=False)
    (section,) = compare(shelf.variants())
    assert section.comparisons[0].seeds == (0,) and "1 of 2" in screen(result_table(section))
    runs = [load_run(folder) for folder in shelf.folders]
    against = baseline_runs([section])
    assert [row(run, against.get(run.name))["difference"] for run in runs] == [None, None, pytest.approx(-0.01), None]


# ---------------------------------------------------------------------------- series over seeds


def test_curves_are_mean_and_range_of_the_seeds(tmp_path):
    shelf = Shelf(tmp_path).add(values=[1.40, 1.44]).add("paper/bov", [1.39, 1.37])
    base, bov = shelf.variants()
    last = bpb_curve(base, "tokens")[-1]
    assert (last.x, last.mean, last.low, last.high) == (STEPS * BATCH, pytest.approx(1.42), 1.40, 1.44)
    (section,) = compare([base, bov])
    gap = gap_curve(section.comparisons[0])[-1]
    assert (gap.mean, gap.low, gap.high) == tuple(map(pytest.approx, (-0.04, -0.07, -0.01)))


def test_coefficients_and_costs_over_seeds(tmp_path):
    (bov,) = Shelf(tmp_path).add("paper/bov", [1.39, 1.37]).variants()
    found = final_coefficients(bov)
    assert [key for key in found] == [(4, "gamma_v"), (5, "gamma_v")] and found[5, "gamma_v"].mean > 9
    assert costs(bov)["params"] == 15_000_000 and costs(bov)["epochs"] == pytest.approx(1.86)


def test_repetition_from_the_fewest_passes_to_the_most(tmp_path):
    shelf = Shelf(tmp_path)
    for part, passes, gap in ((1.0, 0.9, -0.02), (0.25, 3.6, 0.01), (0.5, 1.8, 0.0)):
        more = {"data": {"train_part": part}, "expected_epochs": passes}
        shelf.add(values=[1.4, 1.41], **more).add("paper/bov", [1.4 + gap, 1.41 + gap], **more)
    shelf.add("fig5b/shared", [1.39, 1.4], expected_epochs=0.9)
    slow = {"lr": {"value_table": RATES["value_table"] / 4}, "data": {"train_part": 0.25}, "expected_epochs": 3.6}
    shelf.add("paper/bov", [1.4], **slow)
    (section,) = compare(shelf.variants())
    series = repetition(section)
    assert list(series) == ["paper/bov", "paper/bov, value-table lr x0.25"]
    found = [(c.variant.epochs, round(c.stat.mean, 6)) for c in series["paper/bov"]]
    assert found == [(0.9, -0.02), (1.8, 0), (3.6, 0.01)]
    assert "-0.0200 at 0.90 passes" in report_findings.repetition_words(series)[0]


def test_no_line_across_passes_that_nobody_measured(tmp_path):
    shelf = Shelf(tmp_path)
    for part, passes in ((1.0, 0.9), (0.5, 1.8), (0.25, 3.6)):
        more = {"data": {"train_part": part}, "expected_epochs": passes}
        shelf.add(values=[1.4, 1.41], **more).add("paper/bov", [1.39, 1.4], **more)
        if part != 0.5:
            shelf.add("fig5b/shared", [1.38, 1.39], **more)
    (section,) = compare(shelf.variants())
    series = repetition(section)
    figure = draw_repetition(series, styles(series))
    drawn = {box.get_label(): box.lines[0].get_linestyle() for box in figure.axes[0].containers}
    assert drawn == {"paper/bov": "-", "fig5b/shared": "None"}


def test_pictures_of_coefficients_name_the_layers(tmp_path):
    variants = Shelf(tmp_path).add("paper/bov", [1.39, 1.37]).variants()
    figure = draw_final_coefficients(variants, styles(["paper/bov"]))
    assert list(figure.axes[0].get_xticks()) == [4, 5]


def test_no_repetition_among_equal_passes(tmp_path):
    (section,) = compare(Shelf(tmp_path).add(values=[1.4]).add("paper/bov", [1.39]).variants())
    assert repetition(section) == {}


# ---------------------------------------------------------------------------- words


def test_words_follow_the_statistics(tmp_path):
    shelf = Shelf(tmp_path).add(values=[1.40, 1.42, 1.44])
    shelf.add("paper/bov", [1.38, 1.4005, 1.421]).add("fig5b/shared", [1.40, 1.45, 1.41])
    said = report_findings.findings(compare(shelf.variants()))
    assert "0.0195 below `paper/baseline` (1.4200)" in said[0] and "Over 3 seeds the 95 % interval" in said[0]
    assert "after Holm's correction" in said[0] and "not to be told from it by these seeds: `fig5b/shared`" in said[1]


def test_one_seed_is_said_instead_of_an_interval(tmp_path):
    sections = compare(Shelf(tmp_path).add(values=[1.40]).add("paper/bov", [1.38]).variants())
    assert "One seed, so there is no interval" in report_findings.findings(sections)[0]
    text = screen(result_table(sections[0]))
    assert text.count("one seed") == 3 and "nan" not in text.lower()


# ---------------------------------------------------------------------------- the paper

PAPER = read_paper()
D12 = {
    "config": {
        "n_layer": 12, "n_embd": 768, "n_head": 6, "n_kv_head": 6, "vocab_size": 32768, "sequence_len": 2048,
        "window_pattern": "SSSL",
    },
    "data": {"source": "climbmix"}, "total_flops": 1.5e18, "total_batch_size": 2**19, "weight_decay": 0.28,
    "lr": {"matrix": 0.02},
}  # fmt: skip


def rows_of(variants):
    return beside(groups_of(variants, compare(variants)), PAPER)


def test_paper_is_there_and_names_presets():
    assert set(TABLES) <= PAPER.keys()
    assert {r["preset"] for name in TABLES for r in PAPER[name]["rows"]} <= PRESETS.keys()


def test_the_papers_configuration_is_set_beside_its_number(tmp_path):
    shelf = Shelf(tmp_path).add(values=[0.86, 0.85], **D12).add("table3/x0", [0.846, 0.842], **D12)
    found = {r.variant.preset: r for r in rows_of(shelf.variants()) if r.table == "table1"}
    assert found["paper/baseline"].bpb == 0.854 and found["table3/x0"].bpb == 0.845  # also as table1/9
    assert all(not r.differs and r.where == "Table 1, p. 3" for r in found.values())
    assert (found["table3/x0"].rank, found["table3/x0"].rank_here, found["paper/baseline"].rank) == (1, 1, 2)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"config": D12["config"] | {"n_layer": 24}}, "24 layers, not 12"),
        ({"config": D12["config"] | {"vocab_size": 4096}}, "vocab size 4096, not 32768"),
        ({"config": D12["config"] | {"sequence_len": 1024}}, "sequence len 1024, not 2048"),
        ({"data": {"source": "sotu"}}, "source sotu, not climbmix"),
        ({"data": {"source": "climbmix", "train_part": 0.5}}, "train part 0.5, not 1"),
        ({"total_flops": 1.5e18 * 1.02}, "not 1.5e18 FLOPs"),
        ({"config": D12["config"] | {"n_embd": 384, "n_head": 3, "n_kv_head": 3}},
         "n embd 384, not 768; n head 3, not 6; n kv head 3, not 6"),
        ({"config": D12["config"] | {"window_pattern": "L"}}, "window pattern L, not SSSL"),
        ({"total_batch_size": 2**18}, "total batch size 262144, not 524288"),
        ({"lr": {"matrix": 0.08}}, "matrix lr 0.08, not 0.02"),
        ({"weight_decay": 0.1}, "weight decay 0.1, not 0.28"),
        ({"muon": "upstream"}, "muon upstream, not paper"),
        ({"dtype": "torch.float32"}, "dtype float32, not bfloat16"),
    ],
    ids=[
        "layers", "vocabulary", "context", "text", "part of it", "FLOPs", "width", "windows", "batch", "rates", "decay",
        "optimizer", "dtype",
    ],
)  # fmt: skip
def test_any_other_configuration_is_not_comparable(tmp_path, change, reason):
    shelf = Shelf(tmp_path)
    for preset in ("paper/baseline", "table1/9"):
        shelf.add(preset, [0.85], **D12 | change)
    reasons = {r.differs for r in rows_of(shelf.variants()) if r.table == "table1"}
    assert reasons == {reason}


def test_orderings_agree_disagree_or_stay_open(tmp_path):
    cost = {"flops_per_token": 60_000_000}
    shelf = Shelf(tmp_path).add(values=[1.400, 1.420, 1.440])
    shelf.add("table1/9", [1.380, 1.401, 1.421], **cost)  # below the baseline, as in the paper
    shelf.add("table1/3", [1.390, 1.411, 1.431], **cost)  # below it too, above it in the paper
    shelf.add("table1/13", [1.380, 1.402, 1.420], **cost)  # as table1/9 in the paper: no claim
    shelf.add("table1/6", [1.370, 1.420, 1.415], **cost)
    found = {
        (o.better.name, o.worse.name): o.verdict for o in orderings(rows_of(shelf.variants())) if o.table == "table1"
    }
    assert found["table1/9", "paper/baseline"] == AGREES
    assert found["paper/baseline", "table1/3"] == DISAGREES
    assert found["table1/9", "table1/6"] == OPEN
    assert len(found) == 5 * 4 / 2 - 1 and not {("table1/9", "table1/13"), ("table1/13", "table1/9")} & found.keys()


def test_one_seed_decides_no_ordering(tmp_path):
    shelf = Shelf(tmp_path).add(values=[1.5]).add("paper/bov", [1.3])
    assert {o.verdict for o in orderings(rows_of(shelf.variants()))} == {OPEN}


def test_figure_2_beside_what_was_learned_here(tmp_path):
    variants = Shelf(tmp_path).add("table1/9", [1.4]).variants()
    said = report_findings.coefficient_claims(variants, PAPER)
    assert (
        "in the last layer above 10" in said[0] and "`table1/9` learned 5.34 to 9.68, 9.68 in the last layer" in said[0]
    )


@pytest.mark.parametrize(
    "preset, words",
    [
        ("paper/baseline", "V"),
        ("paper/bov", "E_v[i], last:1/3, learned"),
        ("table1/12", "V + x0 W_V, last:1/3, fixed"),
        ("table3/v1_all", "V1, all, fixed"),
        ("table3/ve_gated", "V + E_v[i], every:2, gated"),
        ("fig5b/shared", "E_v[i], last:1/3, learned, one table for all"),
    ],
)
def test_values_in_the_papers_words(tmp_path, preset, words):
    (variant,) = Shelf(tmp_path).add(preset).variants()
    assert variant.values == words


# ---------------------------------------------------------------------------- incomplete records


@pytest.mark.parametrize("part", ["plan", "config", "data", "seed", "preset", "eval_tokens"])
def test_headers_of_other_versions_are_read(tmp_path, part):
    shelf = Shelf(tmp_path).add(values=[1.4]).add("paper/bov", [1.39])
    for folder in shelf.folders:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        head = {name: value for name, value in json.loads(lines[0]).items() if name != part}
        (folder / "metrics.jsonl").write_text(json.dumps(head) + "\n" + "".join(lines[1:]))
    facts = gather([load_run(folder) for folder in shelf.folders], PAPER)
    assert "1.3900" in bov_report.on_screen(facts)
    assert report_findings.limits(facts.variants, facts.sections) and rows_of(facts.variants) is not None
