"""All tasks together: scores, files that a rerun continues, two folders compared."""

import json
import math
import random
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import core_items
from nanochat import core_bundle, core_compare, core_eval, core_suite
from nanochat.core_suite import Settings, Store, evaluate_core, write_csv
from test_dataset import server  # noqa: F401

TOKENIZER = core_items.tokenizer()


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
    for label, (kind, count) in core_items.SIZES.items():
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
    assert len(read(tmp_path)[1]) == 1 + sum(count + 1 for _, count in core_items.SIZES.values())


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
    assert [len(found) for found in items.values()] == [count for _, count in core_items.SIZES.values()]


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
