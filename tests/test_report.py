"""bov_report on made-up runs: what is read, what is computed, what is said."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import report_findings, report_words
from nanochat.report import coefficients, difference_curve, final_bpb, load_run, row
from nanochat.report_page import as_html, as_markdown, unbroken
from nanochat.report_plots import unit
from nanochat.report_tables import run_table, screen
from nanochat.report_variants import baseline_runs, compare, group
from report_runs import BATCH, BOV, STEPS, Shelf, gamma, header, write_run
from scripts import bov_report

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def pair(tmp_path):
    return write_run(tmp_path / "baseline_s42"), write_run(tmp_path / "bov_s42", "paper/bov", BOV, speed=5500.0)


def table_of(*folders, baseline=None):
    runs = [load_run(folder) for folder in folders]
    against = baseline_runs(compare(group(runs), baseline))
    return [row(run, against.get(run.name)) for run in runs]


def limits_of(*folders):
    variants = group([load_run(folder) for folder in folders])
    return " ".join(report_findings.limits(variants, compare(variants)))


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
        (b'{"kind": "header"}\n\xff\xfe\n', "not text at byte 19"),
    ],
    ids=["no file", "empty", "no header", "no object", "no text"],
)
def test_unreadable_run_is_named(tmp_path, content, message):
    folder = tmp_path / "some_run"
    folder.mkdir()
    if content is not None:
        (folder / "metrics.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message) as error:
        load_run(folder)
    assert "some_run" in str(error.value)


def test_folder_names_must_differ(tmp_path):
    folders = write_run(tmp_path / "a" / "bov"), write_run(tmp_path / "b" / "bov"), write_run(tmp_path / "other")
    with pytest.raises(ValueError, match=r"same folder name \(bov\)"):
        bov_report.report(folders, tmp_path / "out")


# ---------------------------------------------------------------------------- numbers


def test_row_holds_what_was_recorded(pair):
    base, bov = table_of(*pair)
    assert bov["val_bpb"] == 1.396 and base["val_bpb"] == 1.421
    assert bov["difference"] == pytest.approx(-0.025) and base["difference"] is None
    assert bov["tokens"] == STEPS * BATCH and bov["flops"] == 58_000_000 * STEPS * BATCH
    assert bov["params"] == 15_000_000 and bov["params_without_tables"] == 10_000_000
    assert bov["epochs"] == pytest.approx(1.86) and bov["peak_bytes"] == 2**30
    assert bov["coefficients"] == {(4, "gamma_v"): gamma(500, 4), (5, "gamma_v"): gamma(500, 5)}
    assert 5500 <= bov["tok_per_sec"] <= 5525


def test_unfinished_run_counts_what_it_has_seen(tmp_path):
    (found,) = table_of(write_run(tmp_path / "half", bpb={125: 1.666, 250: 1.534}, done=False))
    assert not found["finished"] and found["val_bpb"] == 1.534
    assert found["tokens"] == 250 * BATCH and found["epochs"] == pytest.approx(0.93)


def test_run_before_its_first_step(tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps(header("paper/bov")) + "\n")
    (found,) = table_of(folder)
    assert found["val_bpb"] is None and found["tokens"] == 0 and found["coefficients"] == {}
    assert "new *" in bov_report.report([folder], tmp_path / "out")[0]


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
    assert "no pair of finished runs" in report_findings.findings(compare(group(runs)))[0]


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
    assert report_words.count(value) == text


@pytest.mark.parametrize(
    "epochs, word", [(0.98, "nothing was seen twice"), (1.86, "it repeats"), (None, "not recorded")]
)
def test_report_says_how_often_the_text_was_read(tmp_path, epochs, word):
    assert word in limits_of(write_run(tmp_path / "base", expected_epochs=epochs))


def test_report_says_one_seed_and_small_scale_only_where_true(tmp_path):
    one = Shelf(tmp_path / "one").add(values=[1.4]).add("paper/bov", [1.39]).folders
    two = Shelf(tmp_path / "two").add(values=[1.4, 1.41]).add("paper/bov", [1.39, 1.39]).folders
    assert "one seed" in limits_of(*one) and "nothing is proved" in limits_of(*one)
    assert "one seed" not in limits_of(*two) and "2 seeds" in limits_of(*two)


def test_report_says_where_the_precision_is_not_the_papers(tmp_path):
    half = write_run(tmp_path / "half", "paper/bov", BOV)
    whole = write_run(tmp_path / "whole", "paper/bov", BOV, dtype="torch.float32")
    assert "computed in" not in limits_of(half)
    assert "The runs were computed in float32, the paper's in bfloat16" in limits_of(whole)
    assert "Some runs were computed in float32" in limits_of(half, whole)


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
        "0.0250 below `paper/baseline`",
        "3.3 % fewer",
        "4: 5.34, 5: 9.68",
        "read 1.86 times",
        "one seed",
        "not comparable",
    ):
        assert part in text, part
    assert "1.3960" in screen and "-0.0250" in screen
    assert "    the state | of the union" in text
    assert str(tmp_path) not in text
    pictures = re.findall(r"\]\((.*)\)", text)
    assert "equal_tokens_bpb_by_tokens.png" in pictures and "coefficients.png" in pictures
    for name in pictures:
        assert (out / name).read_bytes().startswith(b"\x89PNG") and str(out / name) in screen


def test_training_time_is_compared_on_one_device_alone(pair, tmp_path):
    out = tmp_path / "one"
    bov_report.report(pair, out)
    assert (out / "equal_tokens_bpb_by_seconds.png").exists()
    lines = (pair[1] / "metrics.jsonl").read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"device": "a GPU"})
    (pair[1] / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    out = tmp_path / "two"
    bov_report.report(pair, out)
    assert not (out / "equal_tokens_bpb_by_seconds.png").exists()
    assert (
        "Not drawn against training time: the runs are of several devices, a GPU; cpu."
        in (out / "report.md").read_text()
    )


def test_tables_are_rectangular(pair):
    block = run_table(table_of(*pair))
    assert {len(line) for line in block["lines"]} == {len(block["heads"])} == {len(block["aligns"])}
    assert len(screen(block).splitlines()) == 3 + 2


class Page(HTMLParser):
    """Start tags with attributes, and the text between tags."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def test_html_stands_alone_and_runs_nothing(pair, tmp_path):
    hostile = '<script>alert("1")</script> & <img src=x onerror=alert(2)> `x` | *y*'
    evil = write_run(tmp_path / "<script>alert(3)<_script>", "paper/bov", BOV, seed=43)
    sample = tmp_path / "sample.txt"
    sample.write_text(hostile)
    out = tmp_path / "out"
    bov_report.report([*pair, evil], out, samples=[f"bov_s42={sample}"], title=hostile)
    text = (out / "report.html").read_text()
    page = Page(text)
    assert not page.all("script") and not page.all("link") and not page.all("iframe")
    assert page.all("img") and all(img["src"].startswith("data:image/png;base64,") for img in page.all("img"))
    assert all(img["alt"] for img in page.all("img"))
    assert not re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?:https?:)?//", text)
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    targets = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {link["href"].removeprefix("#") for link in page.all("a")} <= targets
    shown = "".join(page.words)
    assert 'alert("1")' in shown and "onerror=alert(2)" in shown and "<script>alert(3)<_script>" in shown
    assert "<script" not in re.sub("`[^`]*`", "", (out / "report.md").read_text().split("## Samples")[0])


def test_both_pages_hold_the_same_tables(pair, tmp_path):
    out = tmp_path / "out"
    bov_report.report(pair, out)
    lines = [line for line in (out / "report.md").read_text().splitlines() if line.startswith("|")]
    page = Page((out / "report.html").read_text())
    assert len(page.all("tr")) == len([line for line in lines if not line.startswith("| ---")])
    assert len(page.all("table")) == len(lines) - len(page.all("tr"))


def test_intervals_keep_to_one_line():
    assert unbroken("0.32 (-0.0229 to +0.0109)") == "0.32 (-0.0229\u00a0to\u00a0+0.0109)"
    assert unbroken("-0.1 \u00b1 0.2") == "-0.1\u00a0\u00b1\u00a00.2"
    assert unbroken("layers 4 to 5, going to bed") == "layers 4\u00a0to\u00a05, going to bed"


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_no_text_becomes_markup(text):
    page = Page(str(as_html(text)))
    assert {tag for tag, _ in page.tags} <= {"code", "em"}
    assert "<" not in re.sub("`[^`]*`", "", as_markdown(text.replace("`", "")))


def test_a_folder_that_cannot_be_written_is_a_plain_error(pair, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        bov_report.main([*map(str, pair), "--out", str(tmp_path / "file")])


def test_a_reader_that_leaves_is_no_error(pair, tmp_path):
    command = [sys.executable, "-m", "scripts.bov_report", *map(str, pair), "--out", str(tmp_path / "out")]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode == 0 and "Broken" not in done.stderr and (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("sample", ["bov_s42", "nobody=x", "bov_s42=/no/such/file"])
def test_bad_sample_is_a_plain_error(pair, tmp_path, sample):
    with pytest.raises(ValueError, match="--sample"):
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
