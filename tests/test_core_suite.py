"""All tasks together: scores, files that a rerun continues, the bundle and what an earlier try left of it."""

import io
import json
import math
import os
import random
import shutil
import zipfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import core_items
from nanochat import core_bundle, core_compare, core_eval, core_suite
from nanochat.core_bundle import CURRENT, V1
from nanochat.core_suite import Settings, Store, evaluate_core, write_csv
from test_dataset import answer as play
from test_dataset import server  # noqa: F401

TOKENIZER = core_items.tokenizer()
SIZES = {"own_mc": ("multiple_choice", 8), "own_schema": ("schema", 9), "own_lm": ("language_modeling", 4)}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return core_items.write_bundle(tmp_path_factory.mktemp("bundle") / "eval_bundle", SIZES)


def evaluate(bundle, store=None, max_per_task=-1, **options):
    chosen = Settings(eval_bundle=str(bundle), **options)
    return evaluate_core(core_items.model("bov"), TOKENIZER, "cpu", max_per_task, settings=chosen, store=store)


@pytest.fixture(scope="module")
def result(bundle):
    return evaluate(bundle)


# ---------------------------------------------------------------------------- scores


def test_scores_are_upstreams_formula_on_upstreams_draw(bundle, result):
    centred = []
    for task in core_bundle.read_tasks(bundle):
        data = [json.loads(line) for line in task.path.read_text().splitlines()]
        random.Random(1337).shuffle(data)
        accuracy = core_eval.evaluate_task(core_items.model("bov"), TOKENIZER, data, "cpu", task.meta)
        r = 0.0 if task.kind == "language_modeling" else 0.25
        centred.append((accuracy - r) / (1 - r))
        assert result["results"][task.label] == accuracy
        assert result["centered_results"][task.label] == pytest.approx(centred[-1])
        assert result["tasks"][task.label]["n"] == len(data)
    assert result["core_metric"] == pytest.approx(sum(centred) / 3)
    assert {"results", "centered_results", "core_metric"} <= result.keys()
    low, high = result["core_interval"]
    assert low < result["core_metric"] < high and not result["standard"]
    assert result["baselines"]["table"] == {"own_mc": 25.0, "own_schema": 25.0, "own_lm": 0.0}


def test_fewer_items_per_task_are_the_first_of_the_draw_and_said(bundle):
    found = evaluate(bundle, max_per_task=2)
    assert {row["n"] for row in found["tasks"].values()} == {2}
    assert found["flags"] == {"fewer_shots": 6} and found["max_per_task"] == 2


def test_a_shorter_context_crops_and_is_recorded(bundle, result):
    found = evaluate(bundle, max_len=24)
    assert found["context"] == 24 and result["context"] == 640 and "cropped" not in result["flags"]
    assert found["flags"]["cropped"] == sum(row["flags"].get("cropped", 0) for row in found["tasks"].values()) > 9
    assert evaluate(bundle, max_len=10**6)["context"] == 640


def test_all_that_answers_depend_on_is_in_their_identity():
    usual = core_suite.core_identity(Settings(), -1, 640)
    assert usual == core_suite.core_identity(Settings("dclm22", baselines="v1"), -5, 640)
    for chosen, items, context in ((Settings(norm="byte"), -1, 640), (Settings(), 5, 640), (Settings(), -1, 20)):
        assert core_suite.core_identity(chosen, items, context) != usual


def test_the_paper_implies_its_norm_and_a_flag_wins():
    norms = [Settings("paper21"), Settings("dclm22"), Settings("bundle"), Settings("paper21", "token")]
    assert [chosen.norm_used for chosen in norms] == ["byte", "token", "token", "token"]
    with pytest.raises(ValueError, match="--core-norm 'word'"):
        Settings(norm="word")


def test_csv_is_upstreams_table(tmp_path, result):
    write_csv(tmp_path / "core.csv", result)
    lines = (tmp_path / "core.csv").read_text().splitlines()
    cells = [[cell.strip() for cell in line.split(",")] for line in lines]
    assert cells[0] == ["Task", "Accuracy", "Centered"] and cells[-1] == ["CORE", "", f"{result['core_metric']:.6f}"]
    assert cells[1:-1] == [
        [label, f"{accuracy:.6f}", f"{result['centered_results'][label]:.6f}"]
        for label, accuracy in result["results"].items()
    ]
    assert {len(line) for line in lines} == {35 + 2 + 10 + 2 + 10}


# ---------------------------------------------------------------------------- files


def store(folder, **identity):
    return Store(folder, {"tokenizer_sha256": "t", "norm": "token", "context": 640, **identity})


def read(folder):
    lines = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    return json.loads((folder / "core.json").read_text()), lines


def without_clock(lines):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_files_hold_every_item(tmp_path, bundle, result):
    evaluate(bundle, store(tmp_path))
    core, (header, *lines) = read(tmp_path)
    assert core["core_metric"] == result["core_metric"] and core["complete"] and core["tokenizer_sha256"] == "t"
    assert header == {"kind": "header", "tokenizer_sha256": "t", "norm": "token", "context": 640}
    for label, (kind, count) in SIZES.items():
        *items, end = [line for line in lines if line["task"] == label]
        assert [line["index"] for line in items] == list(range(count)) and end["kind"] == "task" and end["n"] == count
        assert sum(line["correct"] for line in items) / count == result["results"][label]
        assert all(type(line["prediction"]) is (str if kind == "language_modeling" else int) for line in items)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("failure", [Killed, core_eval.RankFailure, RuntimeError])
def test_finished_tasks_are_kept_and_a_rerun_continues(tmp_path, bundle, monkeypatch, failure):
    evaluate(bundle, store(tmp_path / "whole"))
    answer_task, asked = core_suite.answer_task, []

    def fails_in_the_second(model, tokenizer, data, *rest):
        asked.append(len(data))
        if len(asked) == 2:
            raise failure
        return answer_task(model, tokenizer, data, *rest)

    monkeypatch.setattr(core_suite, "answer_task", fails_in_the_second)
    with pytest.raises(failure):
        evaluate(bundle, store(tmp_path / "cut"))
    core, lines = read(tmp_path / "cut")
    assert core["core_metric"] is None and not core["complete"] and list(core["results"]) == ["own_mc"]
    assert len(lines) == 1 + 8 + 1
    evaluate(bundle, store(tmp_path / "cut"))
    assert asked == [8, 9, 9, 4]
    assert without_clock(read(tmp_path / "cut")[1]) == without_clock(read(tmp_path / "whole")[1])


def test_a_task_whose_file_is_bad_costs_only_itself(tmp_path, bundle, capsys):
    shutil.copytree(bundle, tmp_path / "bundle")
    path = tmp_path / "bundle" / "eval_data" / "own" / "own_schema.jsonl"
    good = path.read_text()
    path.write_text(good.splitlines()[0] + "\n{}\n")
    found = evaluate(tmp_path / "bundle", store(tmp_path))
    assert list(found["failed_tasks"]) == ["own_schema"] and found["core_metric"] is None
    assert (
        list(found["results"]) == ["own_mc", "own_lm"] and "item 2 has no 'context_options'" in capsys.readouterr().out
    )
    path.write_text(good)
    again = evaluate(tmp_path / "bundle", store(tmp_path))
    assert again["core_metric"] is not None and again["failed_tasks"] == {}


@pytest.mark.parametrize("text", ["not json\n", "[" * 200_000], ids=["words", "deep"])
def test_no_task_at_all_is_an_error(tmp_path, bundle, text):
    shutil.copytree(bundle, tmp_path / "bundle")
    for path in (tmp_path / "bundle" / "eval_data" / "own").iterdir():
        path.write_text(text)
    with pytest.raises(ValueError, match="no task of .* could be evaluated"):
        evaluate(tmp_path / "bundle")


def test_changed_items_and_changed_shots_are_answered_anew(tmp_path, bundle, monkeypatch):
    shutil.copytree(bundle, tmp_path / "bundle")
    evaluate(tmp_path / "bundle", store(tmp_path))
    asked, answer_task = [], core_suite.answer_task
    watched = lambda *rest: asked.append(rest[3]["task_type"]) or answer_task(*rest)  # noqa: E731
    monkeypatch.setattr(core_suite, "answer_task", watched)
    path = tmp_path / "bundle" / "eval_data" / "own" / "own_lm.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:3]) + "\n")
    evaluate(tmp_path / "bundle", store(tmp_path))
    assert asked == ["language_modeling"]
    config = tmp_path / "bundle" / "core.yaml"
    config.write_text(config.read_text().replace("- 2", "- 1"))
    evaluate(tmp_path / "bundle", store(tmp_path))
    assert len(asked) == 1 + 3


def test_other_settings_do_not_overwrite_and_come_back(tmp_path, bundle, monkeypatch, capsys):
    evaluate(bundle, store(tmp_path))
    first = read(tmp_path)
    evaluate(bundle, store(tmp_path, norm="byte"), norm="byte")
    assert read(tmp_path)[0]["norm"] == "byte" and "kept as items_" in capsys.readouterr().out
    assert len(list(tmp_path.glob("items_*.jsonl"))) == len(list(tmp_path.glob("core_*.json"))) == 1
    monkeypatch.setattr(core_suite, "answer_task", None)  # nothing is to be answered again
    evaluate(bundle, store(tmp_path))
    assert read(tmp_path)[1] == first[1] and read(tmp_path)[0] == first[0]


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"kind": "header"}\n7\n', '{"kind": "header"}\n{"kind": "item", "task": "own_mc"}\n', "[" * 200_000],
    ids=["empty", "cut", "number", "half item", "deep"],
)
def test_a_damaged_items_file_is_written_anew(tmp_path, bundle, text, result):
    (tmp_path / "items.jsonl").write_text(text)
    assert evaluate(bundle, store(tmp_path))["results"] == result["results"]
    assert len(read(tmp_path)[1]) == 1 + sum(count + 1 for _, count in SIZES.values())


ANYTHING = st.sampled_from([None, [], {}, "x", -1, 1.5, True, [None], 10**400, "[" * 9])


def test_files_with_any_value_anywhere_are_refused_by_name_or_answered_anew(tmp_path, bundle, result, capsys):
    for side in "ab":
        evaluate(bundle, store(tmp_path / side))
    core, lines = read(tmp_path / "b")

    @settings(max_examples=30, deadline=None)
    @given(st.integers(1, len(lines) - 1), st.data(), ANYTHING)
    def check(number, data, value):
        key = data.draw(st.sampled_from(sorted(lines[number])))
        changed = [line | {key: value} if i == number else line for i, line in enumerate(lines)]
        (tmp_path / "b" / "items.jsonl").write_text("\n".join(map(json.dumps, changed)) + "\n")
        table = core["baselines"] | {"table": core["baselines"]["table"] | {"own_mc": value}}
        for again in (core, core | {"baselines": table}):
            (tmp_path / "b" / "core.json").write_text(json.dumps(again))
            for sides in ("ab", "ba"):
                try:
                    core_compare.compare_folders(*(tmp_path / side for side in sides))
                except ValueError as error:
                    assert str(tmp_path) in str(error) or "the same items" in str(error)
        found = evaluate(bundle, store(tmp_path / "b"))
        assert found["results"] == result["results"] or (key, value) == ("correct", True)

    check()


def test_what_a_model_says_never_ends_a_line(tmp_path, bundle, monkeypatch):
    """U+2028, U+0085 and the like end a line for str.splitlines, and a model may say them."""
    tokenizer = core_items.tokenizer()
    monkeypatch.setattr(tokenizer, "decode", lambda tokens: "a\u2028b\x85c\x1c\né")
    chosen = Settings(eval_bundle=str(bundle))
    for asks in (core_suite.answer_task, None):  # the second time nothing is to be answered again
        monkeypatch.setattr(core_suite, "answer_task", asks)
        evaluate_core(core_items.model("bov"), tokenizer, "cpu", settings=chosen, store=store(tmp_path))
    *_, items = core_compare.read_items(tmp_path)
    assert [len(found) for found in items.values()] == [count for _, count in SIZES.values()]


def test_a_task_that_lost_an_item_is_answered_anew(tmp_path, bundle, result):
    evaluate(bundle, store(tmp_path))
    lines = (tmp_path / "items.jsonl").read_text().splitlines()
    (tmp_path / "items.jsonl").write_text("\n".join(lines[:1] + lines[2:]) + "\n")
    again = evaluate(bundle, store(tmp_path))
    assert again["results"] == result["results"] and again["tasks"]["own_mc"]["n"] == 8


def test_two_evaluations_of_one_folder_do_not_run_at_once(tmp_path):
    with core_suite.alone(tmp_path), pytest.raises(ValueError, match="another process evaluates CORE there"):
        with core_suite.alone(tmp_path):
            pass
    with core_suite.alone(tmp_path):
        pass


@pytest.mark.parametrize("norm", ["token", "byte"])
def test_a_model_of_nan_has_no_score(bundle, norm):
    model = core_items.model("bov")
    model.lm_head.weight.data[3] = math.nan
    with pytest.raises(ValueError, match="could be evaluated; first: item 0: the model's loss is NaN"):
        evaluate_core(model, TOKENIZER, "cpu", settings=Settings(eval_bundle=str(bundle), norm=norm))


THREE = ("copa", "winogrande", "lambada_openai")


@pytest.mark.parametrize(
    ("shots", "options", "standard"),
    [
        (0, {"tasks": "dclm22"}, True),
        (0, {}, True),  # the bundle's own list is that list
        (0, {"norm": "byte"}, False),
        (0, {"tasks": "copa,winogrande"}, False),
        (1, {}, False),
        (1, {"tasks": "dclm22"}, True),
    ],
)
def test_standard_is_a_whole_list_by_its_own_rules(tmp_path, monkeypatch, shots, options, standard):
    monkeypatch.setitem(core_suite.TASK_LISTS, "dclm22", dict.fromkeys(THREE, 0))
    sizes = {"copa": ("multiple_choice", 3), "winogrande": ("schema", 3), "lambada_openai": ("language_modeling", 2)}
    folder = core_items.write_bundle(tmp_path / "b", sizes, shots=shots)
    options = {"baselines": "v1"} | options
    assert evaluate(folder, **options)["standard"] == standard
    assert not evaluate(folder, max_per_task=1, **options)["standard"]


def test_other_baselines_are_not_the_standard(tmp_path, monkeypatch, result):
    monkeypatch.setitem(core_suite.TASK_LISTS, "dclm22", {"commonsense_qa": 2})
    folder = core_items.write_bundle(tmp_path / "b", {"commonsense_qa": ("multiple_choice", 4)})
    found = {name: evaluate(folder, baselines=name) for name in ("v1", "current", "bundle")}
    standard = {name: summary["standard"] for name, summary in found.items()}
    assert standard == {"v1": True, "current": False, "bundle": False}
    assert [summary["baselines"]["name"] for summary in found.values()] == list(found)
    assert len({summary["baselines"]["sha256"] for summary in found.values()}) == 3
    assert {summary["bundle_sha256"] for summary in found.values()} == {found["v1"]["bundle_sha256"]}
    assert found["v1"]["bundle_sha256"] != result["bundle_sha256"]


# ---------------------------------------------------------------------------- bundle


def archive(bundle, leave_out=()):
    """Bytes of a zip file of the bundle, as the server has it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for path in sorted(p for p in bundle.rglob("*") if p.is_file() and p.name not in leave_out):
            z.write(path, f"eval_bundle/{path.relative_to(bundle)}")
    return out.getvalue()


@pytest.fixture
def base(tmp_path, monkeypatch, server, bundle):  # noqa: F811
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(core_bundle, "BUNDLE_URL", f"{server.url}/eval_bundle.zip")
    server.plays["/eval_bundle.zip"] = [play(200, archive(bundle))]
    return tmp_path


def same(folder, bundle):
    names = sorted(path.relative_to(bundle) for path in bundle.rglob("*"))
    assert names == sorted(path.relative_to(folder) for path in folder.rglob("*"))
    assert all((folder / n).read_bytes() == (bundle / n).read_bytes() for n in names if (bundle / n).is_file())


def test_the_bundle_is_fetched_once(base, bundle, server):  # noqa: F811
    same(core_bundle.find_bundle(), bundle)
    same(core_bundle.find_bundle(), bundle)
    assert len(server.requests) == 1
    assert sorted(path.name for path in base.iterdir()) == ["eval_bundle", "eval_bundle.zip", "eval_bundle.zip.lock"]


def test_a_cut_download_is_resumed(base, bundle, server):  # noqa: F811
    (base / "eval_bundle.zip.part").write_bytes(archive(bundle)[:500])
    size, rest = len(archive(bundle)), archive(bundle)[500:]
    server.plays["/eval_bundle.zip"] = [play(206, rest, Content_Range=f"bytes 500-{size - 1}/{size}")]
    same(core_bundle.find_bundle(), bundle)
    assert server.ranges() == ["bytes=500-"]


@pytest.mark.parametrize(
    "left",
    ["zip", "half folder", "zip and half folder", "short file", "broken zip", "empty folder", "empty list", "killed"],
)
def test_what_an_earlier_try_left_is_repaired(base, bundle, server, left):  # noqa: F811
    if "zip" in left or left == "short file":
        (base / "eval_bundle.zip").write_bytes(archive(bundle)[: -30 if left == "broken zip" else None])
    if "half folder" in left:
        shutil.copytree(bundle, base / "eval_bundle")
        (base / "eval_bundle" / "eval_data" / "own" / "own_lm.jsonl").unlink()
    if left == "short file":
        shutil.copytree(bundle, base / "eval_bundle")
        (base / "eval_bundle" / "eval_data" / "own" / "own_lm.jsonl").write_text("{}\n")
    if left == "empty folder":
        (base / "eval_bundle").mkdir()
    if left == "empty list":
        shutil.copytree(bundle, base / "eval_bundle")
        (base / "eval_bundle" / "core.yaml").write_text("")
    if left == "killed":  # while it unpacked
        shutil.copytree(bundle, base / ".eval_bundle.x1y2" / "eval_bundle")
    same(core_bundle.find_bundle(), bundle)
    assert len(server.requests) == (left not in ("zip", "zip and half folder", "short file"))
    assert not list(base.glob(".eval_bundle*"))


def test_a_bundle_that_was_edited_is_kept_aside(base, bundle, capsys):
    core_bundle.find_bundle()
    edited = base / "eval_bundle" / "core.yaml"
    for text in ("icl_tasks: []\n", edited.read_text() + "# mine\n"):
        edited.write_text(text)
        same(core_bundle.find_bundle(), bundle)
        assert (base / "eval_bundle.replaced" / "core.yaml").read_text() == text
        assert "kept as" in capsys.readouterr().out


def test_an_archive_without_a_task_s_file_is_refused_and_leaves_nothing(base, bundle, server):  # noqa: F811
    server.plays["/eval_bundle.zip"] = [play(200, archive(bundle, leave_out=["own_lm.jsonl"]))]
    with pytest.raises(ValueError, match="own_lm.jsonl is missing"):
        core_bundle.find_bundle()
    assert not (base / "eval_bundle").exists() and not list(base.glob(".eval_bundle*"))


def test_what_is_no_archive_is_not_kept(base, server, monkeypatch):  # noqa: F811
    monkeypatch.setattr("nanochat.download._sleep", lambda *rest: None)
    server.plays["/eval_bundle.zip"] = [play(200, b"<html>busy</html>")]
    with pytest.raises(ValueError, match="not a whole zip file"):
        core_bundle.find_bundle()
    assert not (base / "eval_bundle").exists() and not (base / "eval_bundle.zip").exists()


def test_a_local_bundle_is_named_when_it_is_not_whole(tmp_path, bundle):
    assert core_bundle.find_bundle(str(bundle)) == bundle
    with pytest.raises(ValueError, match="--eval-bundle .*core.yaml is missing"):
        core_bundle.find_bundle(str(tmp_path))


# ---------------------------------------------------------------------------- tasks and baselines


def test_lists_have_the_shots_of_their_authors():
    assert len(core_bundle.DCLM22) == 22 and len(core_bundle.PAPER21) == 21
    changed = {k: v for k, v in core_bundle.PAPER21.items() if v != core_bundle.DCLM22[k]}
    assert changed == {"arc_easy": 25, "arc_challenge": 25, "winogrande": 5}
    assert core_bundle.DCLM22.keys() - core_bundle.PAPER21 == {"hellaswag_zeroshot"}
    assert core_bundle.DCLM22["hellaswag_zeroshot"] == 0 and V1["hellaswag_zeroshot"] == V1["hellaswag"]


AUTHORS, BUNDLE = os.environ.get("NANOCHAT_AUTHORS"), os.environ.get("NANOCHAT_EVAL_BUNDLE")


@pytest.mark.skipif(not AUTHORS, reason="set NANOCHAT_AUTHORS to a checkout of the paper's authors")
def test_the_papers_list_is_that_of_its_authors():
    listed = yaml.safe_load(Path(AUTHORS, "configs", "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
    assert {task["label"]: task["num_fewshot"][0] for task in listed} == core_bundle.PAPER21


@pytest.mark.skipif(not BUNDLE, reason="set NANOCHAT_EVAL_BUNDLE to an evaluation bundle")
def test_the_first_table_of_baselines_is_the_bundles():
    labels = [task.label for task in core_bundle.read_tasks(BUNDLE)]
    assert core_bundle.read_baselines(BUNDLE, "bundle", labels) == core_bundle.read_baselines(BUNDLE, "v1", labels)


def test_a_list_takes_what_the_bundle_has_with_its_own_shots(tmp_path):
    sizes = {"copa": ("multiple_choice", 3), "winogrande": ("schema", 7), "extra": ("schema", 2)}
    folder = core_items.write_bundle(tmp_path / "b", sizes, shots=1)
    for which, shots in (("paper21", 5), ("dclm22", 0)):
        tasks, missing = core_bundle.choose_tasks(folder, which)
        assert {task.label: task.shots for task in tasks} == {"copa": 0, "winogrande": shots}
        assert len(missing) == len(core_bundle.TASK_LISTS[which]) - 2
    tasks, missing = core_bundle.choose_tasks(folder, "extra, copa")
    assert [(task.label, task.shots) for task in tasks] == [("extra", 1), ("copa", 1)] and missing == []
    with pytest.raises(ValueError, match="--core-tasks 'other'.*copa, winogrande, extra"):
        core_bundle.choose_tasks(folder, "copa,other")


def test_baselines_are_the_table_asked_for(tmp_path, bundle):
    assert core_bundle.read_baselines(bundle, "bundle", ["own_lm", "own_mc"]) == {"own_lm": 0.0, "own_mc": 25.0}
    differing = {label: CURRENT[label] for label in V1 if CURRENT[label] != V1[label]}
    assert differing == {"commonsense_qa": 40.3, "agi_eval_lsat_ar": 25.0, "bigbench_language_identification": 25.0}
    assert core_bundle.read_baselines(bundle, "current", ["boolq"]) == {"boolq": 62.0}
    with pytest.raises(ValueError, match="--core-baselines v1: no random baseline of own_mc"):
        core_bundle.read_baselines(bundle, "v1", ["own_mc"])
    table = tmp_path / "table.csv"
    for text, message in (
        ("a,b\n1,2\n", "no table with the columns"),
        ("Eval Task,Random baseline\nx,100\n", "x is 100"),
        ("Eval Task,Random baseline\nx,nan\n", "x is nan"),
        ("Eval Task,Random baseline\n" + "x" * 200_000 + ",1\n", "no table with the columns"),
    ):
        table.write_text(text)
        with pytest.raises(ValueError, match=message):
            core_bundle.read_baselines(bundle, str(table), ["x"])


ENTRY = {"label": "a", "dataset_uri": "a.jsonl", "num_fewshot": [1], "icl_task_type": "schema"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a list of CORE tasks"),
        ("icl_tasks: 3", "not a list of CORE tasks"),
        ("icl_tasks:\n- {label: a}", "not a list of CORE tasks"),
        ("icl_tasks: [a]", "not a list of CORE tasks"),
        (": :", "not a list of CORE tasks"),
        ("icl_tasks: " + "[" * 5000, "not a list of CORE tasks"),
        ("icl_tasks: []", "lists no task"),
        ([ENTRY, ENTRY], "a is there 2 times"),
        ([ENTRY | {"num_fewshot": 5}], "a: num_fewshot 5"),
        ([ENTRY | {"num_fewshot": "10"}], "a: num_fewshot '10'"),
        ([ENTRY | {"num_fewshot": [-1]}], "a: num_fewshot"),
        ([ENTRY | {"label": 7}], "label 7 is no text"),
        ([ENTRY | {"label": ["a"]}], "is no text"),
        ([ENTRY | {"icl_task_type": ["schema"]}], "known are multiple_choice"),
        ([ENTRY | {"continuation_delimiter": None}], "continuation_delimiter None"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_a_bad_task_list_is_named(tmp_path, text, message):
    (tmp_path / "core.yaml").write_text(text if isinstance(text, str) else yaml.safe_dump({"icl_tasks": text}))
    with pytest.raises(ValueError, match=f"core.yaml: .*{message}"):
        core_bundle.read_tasks(tmp_path)


# ---------------------------------------------------------------------------- two folders


def test_folders_are_compared_task_by_task(tmp_path, bundle):
    evaluate(bundle, store(tmp_path / "a"))
    chosen = Settings(eval_bundle=str(bundle), tasks="own_schema,own_mc")
    other = store(tmp_path / "b", tokenizer_sha256="other")
    evaluate_core(core_items.model("upstream"), TOKENIZER, "cpu", settings=chosen, store=other)
    found = core_compare.compare_folders(tmp_path / "a", tmp_path / "b")
    assert set(found["tasks"]) == {"own_mc", "own_schema"} and not found["same_tokenizer"]
    assert found["left_out"] == {"own_lm": "only one of the two has it"}
    results = [read(tmp_path / side)[0]["results"] for side in "ab"]
    for label, row in found["tasks"].items():
        assert [row["a"], row["b"]] == [result[label] for result in results]
    alike = core_compare.compare_folders(tmp_path / "a", tmp_path / "a")
    assert alike["core"]["difference"] == 0 and alike["core"]["p_value"] == 1 and not alike["left_out"]
    evaluate(bundle, store(tmp_path / "c", norm="byte"), norm="byte")
    with pytest.raises(ValueError, match="per token, .* per byte"):
        core_compare.compare_folders(tmp_path / "a", tmp_path / "c")
    with pytest.raises(ValueError, match="nowhere"):
        core_compare.compare_folders(tmp_path / "a", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("key", "value"),
    [("task_type", "schema"), ("num_fewshot", 9), ("continuation_delimiter", ""), ("data_sha256", "x"), ("n", 7)],
)
def test_a_task_that_was_asked_otherwise_is_left_out_of_a_comparison(tmp_path, bundle, key, value):
    for side in "ab":
        evaluate(bundle, store(tmp_path / side))
    lines = [
        line | {key: value} if line["kind"] == "task" and line["task"] == "own_mc" else line
        for line in read(tmp_path / "b")[1]
    ]
    (tmp_path / "b" / "items.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = core_compare.compare_folders(tmp_path / "a", tmp_path / "b")
    assert found["left_out"] == {"own_mc": f"another {key}"} and set(found["tasks"]) == {"own_schema", "own_lm"}
