"""bov_report on CORE items and long contexts of made-up runs."""

import json
import re

import pytest

from nanochat import report_context, report_items
from nanochat.paper import PAPER, read_paper, task_differences
from nanochat.report import load_run
from nanochat.report_variants import compare, group
from report_runs import BOV, write_run
from scripts import bov_report

BASELINES = {"copa": 50.0, "squad": 0.0, "piqa": 50.0}
NO_TASKS = {"task_type": "multiple_choice", "num_fewshot": 0, "continuation_delimiter": " ", "data_sha256": "d"}
ITEM = {"kind": "item", "flags": []}


def write_core(folder, outcomes, norm="byte", tokenizer="t", context=2560, **core):
    """core.json and items.jsonl as base_eval writes them; outcomes: {task: one 0 or 1 per item}."""
    head = {"kind": "header", "norm": norm, "context": context, "tokenizer_sha256": tokenizer}
    lines = [head]
    for label, right in outcomes.items():
        lines += [{**ITEM, "task": label, "index": i, "correct": bool(x)} for i, x in enumerate(right)]
        lines.append({"kind": "task", "task": label, "n": len(right), "seconds": 0.1, **NO_TASKS})
    (folder / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    accuracies = {label: sum(right) / len(right) for label, right in outcomes.items()}
    own = {"norm": norm, "core_tasks": "paper21", "max_per_task": -1, "core_metric": 0.1, "results": accuracies}
    (folder / "core.json").write_text(json.dumps(own | {"baselines": {"table": BASELINES}} | core))
    return folder


def write_context(folder, shift=0.0, accuracy=0.4, T=256, items=40, **more):
    """context.json whose bits per byte are 2 - position / T + shift, in 16 buckets up to 4 T."""
    positions = [
        {"from": a, "to": a + T // 4, "bpb": 2 - a / T + shift, "bytes": 100 + a} for a in range(0, 4 * T, T // 4)
    ]
    rows = [
        {"length": int(x * T), "n": items, "accuracy": accuracy, "accuracy_interval": [0.2, 0.6], "chance": 0.1}
        for x in (0.25, 1, 4)
    ]
    rows[0] |= {"n": 0, "accuracy": None, "accuracy_interval": None}  # too short for the probe
    windows = ("trained", "unlimited")
    result = {"sequence_len": T, "source": "validation split", "items": items, "seed": 1}
    result["positions"] = dict.fromkeys(windows, positions)
    result["probes"] = {"passkey": dict.fromkeys(windows, rows), "recall": dict.fromkeys(windows, rows)}
    (folder / "context.json").write_text(json.dumps(result | more))
    return folder


def sections_of(*folders):
    return compare(group([load_run(folder) for folder in folders]))


@pytest.fixture
def pair(tmp_path):
    base = write_core(write_run(tmp_path / "a"), {"copa": [1, 0, 1, 0] * 5, "squad": [1] * 8 + [0] * 4})
    bov = write_run(tmp_path / "b", "paper/bov", BOV)
    return base, write_core(bov, {"copa": [1] * 20, "squad": [1] * 6 + [0] * 6})


# ---------------------------------------------------------------------------- CORE


def test_a_pair_of_runs_is_compared_item_by_item(pair):
    (found,), refused = report_items.find_pairs(sections_of(*pair), read_paper())
    assert refused == []
    # copa 0.5 -> 1, centred 0 -> 1; squad 8/12 -> 6/12
    assert found.found["core"]["difference"] == pytest.approx((1 - 1 / 6) / 2)
    assert found.found["gains"] == ["copa"] and found.found["regressions"] == ["squad"]
    up, down, *_ = report_items.sides(found)
    assert up == "Up: copa (+0.500, beyond chance)." and down == "Down: squad (-0.167)."
    said = report_items.sentence(found)
    assert "CORE of `paper/bov` is 0.7500, 0.4167 above `paper/baseline` (0.3333)" in said
    assert "Tasks up: 1, down: 1." in said


def test_the_papers_difference_stands_beside_ours_with_what_differs(pair):
    (found,), _ = report_items.find_pairs(sections_of(*pair), read_paper())
    block = report_items.task_table(found)
    lines = {line[0]: dict(zip(block["heads"], line, strict=True)) for line in block["lines"]}
    assert list(lines) == ["copa", "squad"]
    assert lines["squad"]["paper"] == "+0.025"  # Table 2, equal tokens: 0.531 - 0.506
    assert lines["squad"]["won / lost / tied"] == "0 / 2 / 10"
    assert "6 layers, not 24" in found.differs and "not comparable" in report_items.sides(found)[-1]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"core_tasks": "dclm22"}, "tasks and shots of dclm22, not of paper21"),
        ({"norm": "token"}, "scored per token, not per byte"),
        ({"max_per_task": 20}, "at most 20 items of a task"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_keeps_a_core_from_the_papers_is_named(pair, setting, said):
    (usual,), _ = report_items.find_pairs(sections_of(*pair), read_paper())
    for folder in pair:
        write_core(folder, {"copa": [1, 0] * 10}, **setting)
    (found,), _ = report_items.find_pairs(sections_of(*pair), read_paper())
    assert said in found.differs and said not in usual.differs


@pytest.mark.parametrize(
    ("right", "side", "told_apart"),
    [(20, "above", True), (11, "above", False), (9, "below", False), (0, "below", True)],
)
def test_a_difference_has_its_side_and_whether_the_items_show_it(pair, right, side, told_apart):
    for folder, count in zip(pair, (10, right), strict=True):
        write_core(folder, {"copa": [1] * count + [0] * (20 - count)})
    (found,), _ = report_items.find_pairs(sections_of(*pair), {})
    said = report_items.sentence(found)
    assert f" {side} `paper/baseline`" in said and ("do not tell the two apart" not in said) == told_apart
    up, down = (f"{len(found.found[name])}" for name in ("gains", "regressions"))
    assert said.endswith(f"Tasks up: {up}, down: {down}.") and int(up) + int(down) == 1


def test_beyond_chance_is_judged_by_the_corrected_p_and_tables_have_both_sides(pair):
    write_core(pair[0], {"copa": [0] * 6 + [1] * 6, "piqa": [0] * 12, "squad": [1] + [0] * 11})
    write_core(pair[1], {"copa": [1] * 12, "piqa": [1] * 12, "squad": [0] * 12})
    (found,), _ = report_items.find_pairs(sections_of(*pair), {})
    # sign tests: 2 / 2^12, 2 / 2^6 and 1; Holm takes them 3, 2 and 1 times
    assert report_items.sides(found)[0] == "Up: piqa (+1.000, beyond chance), copa (+0.500)."
    rows = {
        line[0]: dict(zip(block["heads"], line, strict=True))
        for block in (report_items.task_table(found), report_items.core_table([found]))
        for line in block["lines"]
    }
    assert (rows["copa"]["p"], rows["copa"]["p (Holm)"]) == ("0.031", "0.062")
    assert rows["piqa"]["p (Holm)"] == "0.0015" and rows["piqa"]["won / lost / tied"] == "12 / 0 / 0"
    whole = rows["`paper/bov`"]
    assert (whole["CORE"], whole["its CORE"], whole["difference"]) == ("0.6667", "-0.3056", "+0.9722")
    assert (whole["up"], whole["down"]) == ("2 (1)", "1 (0)")
    low, high = map(float, whole["95 % interval"].split(" to "))
    assert low < 0.9722 < high


def test_pages_hold_both_sides_and_the_first_pair_is_bovs(pair, tmp_path):
    other = write_core(write_run(tmp_path / "c", "table3/x0", BOV), {"copa": [0] * 20, "squad": [1] * 12})
    bov_report.report([pair[0], other, pair[1]], tmp_path / "out")
    for name in ("report.md", "report.html"):
        page = (tmp_path / "out" / name).read_text()
        assert page.index("paper/bov</code> against" if "html" in name else "`paper/bov` against") < page.index("Up:")
        assert page.count("Up: ") == page.count("Down: ") == 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: write_core(f, {"copa": [1] * 20, "squad": [1] * 12}, norm="token"), "per byte.* per token"),
        (lambda f: (f / "items.jsonl").unlink(), "items.jsonl: no items of a CORE evaluation"),
        (lambda f: write_core(f, {"piqa": [1]}), "share no task"),
    ],
    ids=["other norm", "no items", "other tasks"],
)
def test_what_cannot_be_compared_is_said_and_the_report_made(pair, tmp_path, damage, said):
    damage(pair[1])
    found, refused = report_items.find_pairs(sections_of(*pair), {})
    assert not found and len(refused) == 1
    assert re.search(said, refused[0])
    bov_report.report(pair, tmp_path / "out")
    assert "Not compared" in (tmp_path / "out" / "report.md").read_text()


def test_tasks_that_only_one_has_and_other_tokenizers_and_contexts_are_said(pair):
    def said():
        (found,), _ = report_items.find_pairs(sections_of(*pair), {})
        return " ".join(report_items.sides(found))

    assert not re.search("Left out|tokenizers|cropped", said())
    write_core(pair[1], {"copa": [1] * 20, "piqa": [1]}, tokenizer="u", context=64)
    assert "Left out is piqa" in said() and "Left out is squad" in said() and "different tokenizers" in said()
    assert "Prompts were cropped to 64 tokens, the baseline's to 2560." in said()


def test_damaged_core_json_names_the_file(pair):
    (pair[1] / "core.json").write_text("{")
    with pytest.raises(ValueError, match=r"b/core\.json: cannot be read"):
        load_run(pair[1])


def test_results_of_another_step_are_left_out_and_named(pair, capsys):
    path = pair[1] / "core.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"checkpoint_sha256": "of step 128", "step": 128}))
    assert load_run(pair[1]).core is None and load_run(pair[0]).core is not None
    assert "core.json: of step 128" in capsys.readouterr().out


def test_the_papers_task_differences():
    paper = read_paper()
    equal_flops = task_differences(paper, "table3", "table3/ve_gated", "paper/baseline")
    assert len(equal_flops) == 21 and equal_flops["squad"] == pytest.approx(0.039)
    equal_tokens = task_differences(paper, "table2", "paper/bov", "paper/baseline")
    assert len(equal_tokens) == 10 and equal_tokens["arc_challenge"] == -0.003
    assert task_differences(paper, "table2", "table3/x0", "paper/baseline") == {}
    assert task_differences({}, "table2", "paper/bov", "paper/baseline") == {}


def test_a_damaged_file_of_the_papers_numbers_is_named(tmp_path):
    assert PAPER.is_file() and read_paper(tmp_path / "none.toml") == {}
    (tmp_path / "paper.toml").write_text("[table1")
    with pytest.raises(ValueError, match="paper.toml: cannot be read"):
        read_paper(tmp_path / "paper.toml")


# ---------------------------------------------------------------------------- long contexts


@pytest.fixture
def contexts(tmp_path):
    """Three seeds of baseline and BoV; BoV's bits are 0.01, 0.02 and 0.03 lower at every position."""
    folders = []
    for seed in range(3):
        folders.append(write_context(write_run(tmp_path / f"a{seed}", seed=seed), 0.1 * seed))
        bov = write_run(tmp_path / f"b{seed}", "paper/bov", BOV, seed=seed)
        folders.append(write_context(bov, 0.1 * seed - 0.01 * (seed + 1), 0.5))
    return folders


def test_parts_weigh_buckets_by_bytes_and_pair_the_seeds(contexts):
    variants = group([load_run(folder) for folder in contexts])
    context = report_context.collect(variants)
    base, bov = context.results
    block = report_context.position_table(context, {bov: base})
    lines = {line[0]: dict(zip(block["heads"], line, strict=True)) for line in block["lines"][:3]}
    # buckets at 128 and 192 of T = 256: bpb 1.5 and 1.25, bytes 228 and 292; seeds add 0, 0.1, 0.2
    expected = (1.5 * 228 + 1.25 * 292) / 520 + 0.1
    assert lines["`paper/baseline`"]["0.5 to 1 T"] == f"{expected:.4f}"
    assert lines["`paper/bov` minus `paper/baseline`"]["2 to 4 T"] == "-0.0200 \u00b1 0.0248"
    curve = report_context.position_curve(context, bov, "trained", base)
    assert [round(p.mean, 6) for p in curve] == [-0.02] * 16 and curve[-1].x == 3.875


def test_buckets_without_text_are_left_out(contexts):
    for folder in contexts:
        found = json.loads((folder / "context.json").read_text())
        for rows in found["positions"].values():
            for row in rows[7:]:  # 1.75 T and beyond
                row |= {"bytes": 0, "bpb": None}
        (folder / "context.json").write_text(json.dumps(found))
    context = report_context.collect(group([load_run(folder) for folder in contexts]))
    base, bov = context.results
    block = report_context.position_table(context, {bov: base})
    lines = {line[0]: dict(zip(block["heads"], line, strict=True)) for line in block["lines"][:3]}
    # buckets at 256, 320 and 384 of T = 256: bpb 1, 0.75 and 0.5, bytes 356, 420 and 484
    expected = (356 + 0.75 * 420 + 0.5 * 484) / 1260 + 0.1
    assert lines["`paper/baseline`"]["1 to 2 T"] == f"{expected:.4f}" and "2 to 4 T" not in block["heads"]
    assert lines["`paper/bov` minus `paper/baseline`"]["1 to 2 T"].startswith("-0.0200")
    assert len(report_context.position_curve(context, bov, "trained", base)) == 7


def test_probes_show_the_mean_over_seeds_and_leave_out_lengths_that_are_too_short(contexts):
    context = report_context.collect(group([load_run(folder) for folder in contexts]))
    block = report_context.probe_table(context)
    assert block["heads"] == ("probe", "chance", "windows", "variant", "1 T", "4 T")
    assert len(block["lines"]) == 2 * 2 * 2 and block["lines"][0][-1] == "0.40 (0.20 to 0.60)"


@pytest.mark.parametrize("setting", [{"T": 512}, {"items": 7}, {"source": "text:a"}, {"seed": 2}], ids="-".join)
def test_contexts_of_another_setting_are_not_beside_the_others(contexts, setting):
    write_context(contexts[0], **setting)
    context = report_context.collect(group([load_run(folder) for folder in contexts]))
    assert context.T == 256 and context.left_out == ["`a0`"]


def test_a_context_of_another_length_is_named_in_the_report(contexts, tmp_path):
    write_context(contexts[-1], T=512)
    pictures = bov_report.report(contexts, tmp_path / "out")[1]
    assert {"context_positions.png", "context_probes.png"} <= set(pictures)
    assert "not beside these: `b2`" in (tmp_path / "out" / "report.md").read_text()


def test_without_contexts_nothing_is_said(pair, tmp_path):
    assert report_context.collect(group([load_run(pair[0])])) is None
    bov_report.report(pair, tmp_path / "out")
    assert "Long contexts" not in (tmp_path / "out" / "report.md").read_text()
