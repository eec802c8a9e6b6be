"""bov_report on made-up runs: what is read, what is computed, what is said."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.report import coefficients, difference_curve, final_bpb, find_baseline, load_run, rows
from nanochat.report_plots import unit
from scripts import bov_report

STEPS, BATCH = 500, 8192
BASELINE = {125: 1.666, 250: 1.534, 375: 1.454, 500: 1.421}
BOV = {125: 1.653, 250: 1.500, 375: 1.425, 500: 1.396}


def gamma(step, layer):
    return [1 + (layer - 3) * 4.5 * (1 - math.exp(-step / 150))]


def header(preset, seed=42, val="v" * 64, expected_epochs=1.86, **plan):
    bank = preset == "paper/bov"
    return {
        "kind": "header", "commit": "a" * 40, "versions": {"torch": "2.13.0"}, "device": "cpu",
        "dtype": "torch.bfloat16", "preset": preset, "seed": seed, "config": {"n_layer": 6},
        "tokenizer_sha256": "t" * 64, "data": {"source": "sotu", "val_sha": val, "train_sha": "d" * 64},
        "plan": {
            "num_params": {"total": 15_000_000, "without_tables": 9_800_000} if bank else
            {"total": 10_000_000, "without_tables": 10_000_000},
            "flops_per_token": 58_000_000 if bank else 60_000_000,
            "num_iterations": STEPS, "total_tokens": STEPS * BATCH,
            "expected_epochs": expected_epochs, "bov_layers": [4, 5] if bank else [], **plan,
        },
    }  # fmt: skip


def write_run(folder, preset="paper/baseline", bpb=BASELINE, done=True, speed=5000.0, **more):
    """A checkpoint folder without checkpoints."""
    head = header(preset, **more)
    flops = head["plan"]["flops_per_token"]
    lines = [head]
    for step in range(0, max(bpb) + 1, 25):
        tokens = step * BATCH
        at = {"step": step, "tokens": tokens, "flops": flops * tokens, "seconds": tokens / speed}
        if step:
            lines.append({"kind": "train", **at, "loss": 5.0, "lr_mult": 1.0, "tok_per_sec": speed + step % 50})
        if step in bpb or step == 0:
            coeffs = {f"{i}.gamma_v": gamma(step, i) for i in head["plan"]["bov_layers"]} | {"x0_lambdas": [0.1]}
            value = bpb.get(step, 2.9)
            lines.append({"kind": "eval", **at, "val_bpb": value, "coeffs": coeffs, "peak_bytes": 2**30})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done:
        record = {"config_hash": "c", "step": max(bpb), "val_bpb": bpb[max(bpb)], "checkpoint_sha256": "s"}
        (folder / "DONE.json").write_text(json.dumps(record))
    return folder


@pytest.fixture
def pair(tmp_path):
    return write_run(tmp_path / "baseline_s42"), write_run(tmp_path / "bov_s42", "paper/bov", BOV, speed=5500.0)


def table_of(*folders, baseline=None):
    runs = [load_run(folder) for folder in folders]
    return rows(runs, find_baseline(runs, baseline))


# ---------------------------------------------------------------------------- reading


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_killed_writer_costs_at_most_the_last_line(tmp_path_factory, data):
    folder = write_run(tmp_path_factory.mktemp("run") / "r", "paper/bov", BOV)
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[: data.draw(st.integers(first, len(whole)))])
    left = path.read_bytes().splitlines()
    run = load_run(folder)
    expected = [json.loads(line) for line in whole.splitlines() if line in left]
    assert [run.header, *sorted(run.train + run.evals, key=expected.index)] == expected


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "no metrics.jsonl"),
        ("", "no header"),
        ('{"kind": "train", "step": 1}\n', "no header"),
        ('{"kind": "header"}\n[1]\n', "another file"),
    ],
    ids=["no file", "empty", "no header", "no object"],
)
def test_unreadable_run_is_named(tmp_path, content, message):
    folder = tmp_path / "some_run"
    folder.mkdir()
    if content is not None:
        (folder / "metrics.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_run(folder)
    assert "some_run" in str(error.value)


def test_folder_names_must_differ(tmp_path):
    folders = write_run(tmp_path / "a" / "bov"), write_run(tmp_path / "b" / "bov")
    with pytest.raises(ValueError, match="same folder name"):
        bov_report.report(folders, tmp_path / "out")


# ---------------------------------------------------------------------------- numbers


def test_row_holds_what_was_recorded(pair):
    base, bov = table_of(*pair)
    assert bov["val_bpb"] == 1.396 and base["val_bpb"] == 1.421
    assert bov["difference"] == pytest.approx(-0.025) and base["difference"] is None
    assert bov["tokens"] == STEPS * BATCH and bov["flops"] == 58_000_000 * STEPS * BATCH
    assert bov["params"] == 15_000_000 and bov["params_without_tables"] == 9_800_000
    assert bov["epochs"] == pytest.approx(1.86) and bov["peak_bytes"] == 2**30
    assert bov["coefficients"] == {(4, "gamma_v"): gamma(500, 4), (5, "gamma_v"): gamma(500, 5)}
    assert 5500 <= bov["tok_per_sec"] <= 5525


def test_unfinished_run_counts_what_it_has_seen(tmp_path):
    (row,) = table_of(write_run(tmp_path / "half", bpb={125: 1.666, 250: 1.534}, done=False))
    assert not row["finished"] and row["val_bpb"] == 1.534
    assert row["tokens"] == 250 * BATCH and row["epochs"] == pytest.approx(0.93)


def test_run_before_its_first_step(tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps(header("paper/bov")) + "\n")
    (row,) = table_of(folder)
    assert row["val_bpb"] is None and row["tokens"] == 0 and row["coefficients"] == {}
    assert "new *" in bov_report.report([folder], tmp_path / "out")


def test_missing_evaluation_is_passed_over(tmp_path):
    folder = write_run(tmp_path / "nan", bpb={250: 1.5, 500: None}, done=False)
    assert final_bpb(load_run(folder)) == 1.5


def test_coefficients_sorted_by_layer_without_model_wide_ones():
    found = coefficients({"coeffs": {"10.alpha_v": [1.0], "9.lambda_v": [1.0, 2.0], "x0_lambdas": [0.1]}})
    assert list(found.items()) == [((9, "lambda_v"), [1.0, 2.0]), ((10, "alpha_v"), [1.0])]


def test_baseline_of_the_same_seed(tmp_path):
    folders = [write_run(tmp_path / f"base{s}", bpb={500: 1.4 + s / 100}, seed=s) for s in (1, 2)]
    folders += [write_run(tmp_path / f"bov{s}", "paper/bov", {500: 1.39 + s / 50}, seed=s) for s in (1, 2, 3)]
    table = table_of(*folders)
    assert [row["baseline"] for row in table] == [None, None, "base1", "base2", None]
    assert [row["difference"] for row in table[2:]] == [pytest.approx(0.0), pytest.approx(0.01), None]


def test_named_baseline(pair):
    base, bov = table_of(*pair, baseline="bov_s42")
    assert base["difference"] == pytest.approx(0.025) and bov["difference"] is None
    with pytest.raises(ValueError, match="--baseline nobody"):
        table_of(*pair, baseline="nobody")


def test_other_held_out_text_is_never_compared(tmp_path):
    folders = write_run(tmp_path / "base"), write_run(tmp_path / "bov", "paper/bov", BOV, val="w" * 64)
    runs = [load_run(folder) for folder in folders]
    assert table_of(*folders)[1]["difference"] is None
    assert difference_curve(runs[1], runs[0]) == []
    assert "no pair of runs" in bov_report.findings(table_of(*folders))[0]


def test_difference_curve_only_at_equal_tokens(tmp_path):
    base = load_run(write_run(tmp_path / "base"))
    bov = load_run(write_run(tmp_path / "bov", "paper/bov", {100: 1.8, 125: 1.653, 500: 1.396}))
    assert difference_curve(bov, base) == [(125 * BATCH, pytest.approx(-0.013)), (500 * BATCH, pytest.approx(-0.025))]


# ---------------------------------------------------------------------------- words and files


@pytest.mark.parametrize(
    "value, text",
    [(None, "-"), (0, "0"), (999, "999"), (1000, "1K"), (2_202_009, "2.2M"), (7.45e8, "745M"), (999_600, "1M")],
)
def test_count(value, text):
    assert bov_report.count(value) == text


@pytest.mark.parametrize(
    "epochs, word", [(0.98, "nothing was seen twice"), (1.86, "it repeats"), (None, "not recorded")]
)
def test_report_says_how_often_the_text_was_read(tmp_path, epochs, word):
    table = table_of(write_run(tmp_path / "base", expected_epochs=epochs))
    assert word in " ".join(bov_report.limits(table))


def test_report_says_one_seed_and_small_scale_only_where_true(tmp_path):
    one = table_of(write_run(tmp_path / "one"))
    two = table_of(tmp_path / "one", write_run(tmp_path / "two", seed=43))
    assert "one seed" in " ".join(bov_report.limits(one)) and "nothing is proved" in " ".join(bov_report.limits(one))
    assert "one seed" not in " ".join(bov_report.limits(two))


def test_whole_report(pair, tmp_path, capsys):
    sample = tmp_path / "sample.txt"
    sample.write_text("My fellow citizens,\n```\nthe state | of the union\n")
    out = tmp_path / "out"
    bov_report.main([*map(str, pair), "--out", str(out), "--sample", f"bov_s42={sample}"])
    screen = capsys.readouterr().out
    assert str(out / "report.md") in screen
    text = (out / "report.md").read_text()
    for part in (
        "1.3960",
        "-0.0250",
        "0.0250 below `baseline_s42`",
        "3.3 % fewer",
        "4: 5.34, 5: 9.68",
        "read 1.86 times",
    ):
        assert part in text, part
    assert "1.3960" in screen and "-0.0250" in screen
    assert "    the state | of the union" in text
    assert str(tmp_path) not in text
    for name in ("bpb_tokens", "bpb_flops", "bpb_seconds", "coefficients"):
        assert f"({name}.png)" in text
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_markdown_table_is_rectangular(pair):
    lines = bov_report.markdown_table(table_of(*pair)).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("sample", ["bov_s42", "nobody=x", "bov_s42=/no/such/file"])
def test_bad_sample_is_a_plain_error(pair, tmp_path, sample):
    with pytest.raises(SystemExit, match="--sample"):
        bov_report.main([*map(str, pair), "--out", str(tmp_path / "out"), "--sample", sample])


@pytest.mark.parametrize(
    "x, largest, divisor, word",
    [
        ("tokens", 8e4, 1e3, "thousands"), ("tokens", 2.2e6, 1e6, "millions"), ("tokens", 8e9, 1e9, "billions"),
        ("flops", 1.2e14, 1e14, "{14}"), ("seconds", 0.5, 1, "seconds"), ("seconds", 800, 60, "minutes"),
        ("seconds", 9e4, 3600, "hours"),
    ],
)  # fmt: skip
def test_axes_name_their_unit(x, largest, divisor, word):
    factor, label = unit(x, largest)
    assert factor == pytest.approx(divisor) and word in label
