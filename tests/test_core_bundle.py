"""The bundle of CORE's items: fetched, repaired, named; the lists of tasks, and the accuracies of guessing."""

import io
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import yaml

import core_items
from nanochat import core_bundle
from nanochat.core_bundle import CURRENT, V1
from test_dataset import answer as play
from test_dataset import server  # noqa: F401

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
