"""base_eval and bov_sample on a small base directory: what they print, write and refuse."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import core_items
from models import build
from nanochat import checkpoint_manager as cm
from nanochat import core_suite, text_rows
from nanochat.common import file_sha256
from nanochat.engine import Engine
from nanochat.gpt import config_to_dict
from scripts import base_eval, bov_export, bov_sample
from tiny import make_corpus

TEXT = [f"Schöne Grüße {i}: the café opens at {i} o'clock 你好 🙂." for i in range(60)]


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory):
    folder = make_corpus(tmp_path_factory.mktemp("base"), TEXT[:40] * 4, TEXT[40:] * 4, merges=20, rows=160)
    model = build(vocab_size=256 + 9 + 20, bov_layers="last:1/3", trunk="plain", ve_layers="none")
    meta = {"step": 2, "model_config": config_to_dict(model.config)}
    cm.save_checkpoint(folder / "base_checkpoints" / "tiny", 2, model.state_dict(), None, meta)
    return folder


@pytest.fixture
def here(base_dir, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base_dir))
    shutil.rmtree(base_dir / "base_eval", ignore_errors=True)
    return base_dir


# ---------------------------------------------------------------------------- bov_sample


def test_sample_streams_whole_characters_and_keeps_stdout_for_the_text(here, capsys):
    options = ["--max-tokens", "40", "--temperature", "1.5", "--top-k", "0", "--seed", "3", "--device-type", "cpu"]
    bov_sample.main(["--model-tag", "tiny", "--prompt", "Schöne", *options])
    model, tokenizer, _ = cm.load_model("base", "cpu", phase="eval")
    tokens = tokenizer.encode("Schöne", prepend="<|bos|>")
    (row,), _ = Engine(model, tokenizer).generate_batch(tokens, max_tokens=40, temperature=1.5, top_k=0, seed=3)
    shown = capsys.readouterr().out
    assert shown == tokenizer.decode(row[1:]) + "\n" and len(row) > len(tokens)


def test_sample_is_the_same_wherever_tables_lie_and_however_it_decodes(here, tmp_path, capsys):
    options = ["--prompt", "Schöne", "--max-tokens", "30", "--temperature", "0", "--device-type", "cpu"]
    bov_export.main(["tiny", "--dtype", "float32", "--out", str(tmp_path / "export")])
    capsys.readouterr()
    texts = set()
    for flags in (
        ["--model-tag", "tiny", "--decode-strategy", "gather"],
        ["--model-tag", "tiny", "--decode-strategy", "pooled", "--bov-placement", "host"],
        ["--export", str(tmp_path / "export"), "--decode-strategy", "fused"],
        ["--export", str(tmp_path / "export"), "--bov-placement", "mmap"],
    ):
        bov_sample.main([*flags, *options])
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1 and len(texts.pop()) > 30


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--export", "x", "--model-tag", "tiny"], "leave out --model-tag"),
        (["--bov-placement", "mmap"], "run scripts.bov_export"),
        (["--export", "nowhere"], "nowhere"),
    ],
)
def test_sample_refuses_contradicting_sources(flags, message, here):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        bov_sample.main([*flags, "--device-type", "cpu"])


def test_a_character_in_several_tokens_is_shown_when_complete():
    class Scripted:
        def generate(self, tokens, **options):
            for token in (*"é🙂".encode(), 0x41, 0xF0, 256):
                yield [token], [1]

    class Bytes:
        get_bos_token_id = staticmethod(lambda: 256)
        encode_special = staticmethod(lambda text: 257)
        encode = staticmethod(lambda text, prepend: [prepend])
        decode_single_token_bytes = staticmethod(lambda token: bytes([token]))

    pieces = list(bov_sample.stream_text(Scripted(), Bytes(), ""))
    assert pieces == ["", "é", "", "", "", "🙂", "A", "", "\ufffd"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model-tag", "none"], "no model 'none' .* there are: tiny"),
        (["--step", "9"], "complete steps: 2"),
        (["--temperature", "-1"], "temperature -1.0: use 0"),
        (["--prompt", "x" * 999], "pass the .* positions of the model"),
        (["--device-type", "tpu"], "use cuda, mps or cpu"),
    ],
)
def test_sample_refuses(here, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        bov_sample.main(["--device-type", "cpu", *options])


def test_errors_are_one_line_and_a_status(base_dir):
    """As a command: no traceback."""
    root = Path(__file__).parent.parent
    for script in ("bov_sample", "base_eval"):
        command = [sys.executable, "-m", f"scripts.{script}", "--model-tag", "none", "--device-type", "cpu"]
        environment = os.environ | {"NANOCHAT_BASE_DIR": str(base_dir)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
        assert done.returncode == 1 and done.stderr.startswith(f"{script}: no model 'none'"), done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("raised", "said", "code"),
    [
        ("ValueError('--depth 0')", "name: --depth 0", 1),
        ("OSError('disk full')", "name: disk full", 1),
        ("KeyboardInterrupt", "name: stopped", 1),
        ("BrokenPipeError", "", 0),
        ("KeyError('x')", "Traceback", 1),
    ],
)
def test_a_script_ends_in_one_line_unless_it_is_at_fault(raised, said, code):
    program = f"from nanochat.common import run_script\ndef main(): raise {raised}\nrun_script('name', main)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert done.returncode == code and done.stderr.strip().startswith(said), done.stderr
    assert ("Traceback" in done.stderr) == (said == "Traceback") and (done.stderr == "") == (said == "")


# ---------------------------------------------------------------------------- base_eval


def evaluate(*options):
    base_eval.main(["--device-type", "cpu", "--device-batch-size", "2", *options])


def result_path(folder):
    return folder / "base_eval" / "tiny_000002.json"


def result(folder):
    return json.loads(result_path(folder).read_text())


def test_bpb_of_both_splits_is_written_with_the_hash_of_the_data(here, capsys):
    evaluate("--eval", "bpb", "--split-tokens", "100")
    found = result(here)
    assert found["model_tag"] == "tiny" and found["step"] == 2 and found["compute_dtype"] == "float32"
    assert set(found["bpb"]) == {"train", "val"} and all(1 < value < 40 for value in found["bpb"].values())
    assert found["val_sha256"] == file_sha256(here / "base_data_climbmix" / "shard_06542.parquet")
    assert found["checkpoint_sha256"] == file_sha256(here / "base_checkpoints" / "tiny" / "model_000002.pt")
    assert f"val bpb: {found['bpb']['val']:.6f}" in capsys.readouterr().out


def test_one_pass_reads_the_validation_split_alone(here):
    evaluate("--eval", "bpb", "--split-tokens=-1")
    assert set(result(here)["bpb"]) == {"val"}


def test_samples_are_the_prompts_continued(here):
    evaluate("--eval", "sample", "--model-tag", "tiny")
    samples = result(here)["samples"]
    assert len(samples["conditioned"]) == 7 and len(samples["unconditioned"]) == 8
    assert all(text.startswith(prompt) for text, prompt in zip(samples["conditioned"], base_eval.PROMPTS, strict=True))
    assert "bpb" not in result(here)


@pytest.mark.parametrize(("tokens", "splits"), [("100", {"train", "val"}), ("-1", {"val"})], ids=["tokens", "one-pass"])
def test_progress_bars_end_at_the_number_of_batches(here, monkeypatch, capsys, tokens, splits):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    evaluate("--eval", "bpb", f"--split-tokens={tokens}")
    shown = capsys.readouterr()
    steps = dict(re.findall(r"(\w+) bpb over (\d+) batches", shown.out))
    ends = {split: re.findall(rf"{split} bpb: +(\d+)%.*? (\d+)/(\d+) ", shown.err)[-1] for split in steps}
    assert set(steps) == splits and ends == {split: ("100", count, count) for split, count in steps.items()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eval", "bpb,bits"], "--eval 'bits'"),
        (["--eval", "bpb", "--split-tokens", "31"], "one batch on all ranks has 32 tokens"),
        (["--step", "1"], "complete steps: 2"),
    ],
)
def test_eval_refuses(here, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        evaluate(*options)


SAMPLES = {"conditioned": ["a"], "unconditioned": ["b"]}
BPB = ("--eval", "bpb", "--split-tokens", "64")


@pytest.fixture
def quick_samples(monkeypatch):
    monkeypatch.setattr(base_eval, "evaluate_samples", lambda model, tokenizer: SAMPLES)


def change(folder, **values):
    result_path(folder).write_text(json.dumps(result(folder) | values))


@pytest.mark.parametrize("order", [("sample", "bpb"), ("bpb", "sample")], ids="-".join)
def test_runs_of_different_modes_add_up_to_what_one_run_writes(here, quick_samples, order):
    evaluate("--eval", "bpb,sample", "--split-tokens", "64")
    at_once = result(here)
    result_path(here).unlink()
    for mode in order:
        evaluate("--eval", mode, "--split-tokens", "64")
    assert result(here) == at_once and at_once["samples"] == SAMPLES


def test_a_mode_that_runs_again_replaces_all_its_keys(here, quick_samples):
    evaluate(*BPB)
    evaluate("--eval", "sample")
    evaluate("--eval", "bpb", "--split-tokens=-1")
    found = result(here)
    assert set(found["bpb"]) == {"val"} and found["split_tokens"] == -1 and found["samples"] == SAMPLES


@pytest.mark.parametrize("key", [*base_eval.MADE_FROM, "val_sha256"])
def test_bpb_of_another_model_or_other_data_is_dropped_in_one_line(here, quick_samples, capsys, key):
    evaluate(*BPB)
    change(here, **{key: "another"})
    capsys.readouterr()
    evaluate("--eval", "sample")
    found, lines = result(here), capsys.readouterr().out.splitlines()
    assert found["samples"] == SAMPLES and not found.keys() & {"bpb", "split_tokens", "val_sha256"}
    assert [line for line in lines if "dropped" in line] == [f"earlier bpb dropped: made with another {key}"]


@pytest.mark.parametrize(("key", "kept"), [("checkpoint_sha256", False), ("val_sha256", True)])
def test_samples_depend_on_the_model_and_not_on_the_validation_shard(here, quick_samples, key, kept):
    evaluate("--eval", "sample")
    change(here, **{key: "another"})
    evaluate(*BPB)
    assert ("samples" in result(here)) == kept and "bpb" in result(here)


def test_bpb_is_kept_where_there_is_no_data_to_compare_with(here, quick_samples, monkeypatch):
    evaluate(*BPB)
    before = result(here)
    with monkeypatch.context() as m:
        m.setattr("nanochat.dataset.get_data_dir", lambda: str(here / "nowhere"))
        evaluate("--eval", "sample")
    assert result(here) == before | {"samples": SAMPLES}


@pytest.mark.parametrize("text", ['{"bpb": {"val"', "[1, 2]", "7"])
def test_a_damaged_file_does_not_cost_the_evaluation(here, quick_samples, capsys, text):
    result_path(here).parent.mkdir()
    result_path(here).write_text(text)
    evaluate("--eval", "sample")
    assert result(here)["samples"] == SAMPLES and "written anew" in capsys.readouterr().out


def test_a_write_that_fails_leaves_the_earlier_results(here, quick_samples, monkeypatch):
    evaluate(*BPB)
    before = result(here)

    def full(fd):
        raise OSError("disk full")

    monkeypatch.setattr("nanochat.common.os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        evaluate("--eval", "sample")
    assert result(here) == before and list(result_path(here).parent.iterdir()) == [result_path(here)]


def test_help_names_every_default(capsys):
    with pytest.raises(SystemExit):
        base_eval.parse_args(["--help"])
    flags = re.split(r"\n  --", capsys.readouterr().out.split("options:")[1])[1:]
    assert len(flags) == 14 and all(re.search(r"\(default:\s.*\)", flag, re.DOTALL) for flag in flags)


# ---------------------------------------------------------------------------- base_eval: CORE, context, other texts


@pytest.fixture
def bundle(tmp_path):
    sizes = {"own_mc": ("multiple_choice", 4), "own_lm": ("language_modeling", 3)}
    return core_items.write_bundle(tmp_path / "bundle", sizes, shots=1)


@pytest.fixture
def folder(here):
    """The checkpoint's folder, without what an evaluation left."""
    folder = here / "base_checkpoints" / "tiny"
    for name in ("core.json", "items.jsonl", "context.json"):
        (folder / name).unlink(missing_ok=True)
    return folder


def test_core_writes_its_files_and_a_rerun_answers_nothing_again(here, folder, bundle, capsys, monkeypatch):
    evaluate("--eval", "core", "--eval-bundle", str(bundle))
    core = json.loads((folder / "core.json").read_text())
    assert core["model_tag"] == "tiny" and core["step"] == 2 and core["compute_dtype"] == "float32"
    assert core["checkpoint_sha256"] == file_sha256(folder / "model_000002.pt") and core["norm"] == "token"
    assert f"CORE {core['core_metric']:.4f}" in capsys.readouterr().out
    assert (here / "base_eval" / "tiny_000002.csv").read_text().splitlines()[0].startswith("Task")
    assert not result_path(here).exists()  # which is for the other modes
    monkeypatch.setattr("nanochat.core_suite.answer_task", None)
    evaluate("--eval", "core", "--eval-bundle", str(bundle))
    assert json.loads((folder / "core.json").read_text()) == core


def test_core_that_is_incomplete_ends_with_what_failed_after_all_else_is_written(here, folder, bundle):
    (bundle / "eval_data" / "own" / "own_mc.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="CORE is incomplete.*own_mc: .*item 1 has no 'query'"):
        evaluate("--eval", "core,bpb", "--eval-bundle", str(bundle), "--split-tokens", "64")
    assert result(here)["bpb"] and json.loads((folder / "core.json").read_text())["core_metric"] is None
    assert "own_lm" in (here / "base_eval" / "tiny_000002.csv").read_text()


def test_two_ranks_find_what_one_process_finds(here, folder, bundle, tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"Text {i} of the café. " * (i + 1), encoding="utf-8")
    flags = ["--eval", "core,bpb,context", "--eval-bundle", str(bundle), "--source", f"text:{tmp_path}/*.txt"]
    flags += ["--split-tokens=-1", "--max-per-task", "3"]

    def found():
        core, context = (json.loads((folder / name).read_text()) for name in ("core.json", "context.json"))
        rows = [row for windows in ("trained", "unlimited") for row in context["positions"][windows]]
        return core["results"], context["probes"], rows, result(here)["source_bpb"]["bpb"]

    evaluate(*flags)
    core, probes, rows, bpb = found()
    (folder / "items.jsonl").unlink()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    command += ["scripts.base_eval", "--device-type", "cpu", "--device-batch-size", "2", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\nCORE ") == 1
    assert found()[:2] == (core, probes) and found()[3] == pytest.approx(bpb, rel=1e-5)
    assert [row["bytes"] for row in found()[2]] == [row["bytes"] for row in rows] and rows[0]["bytes"] > 0
    for ours, alone in zip(found()[2], rows, strict=True):
        assert ours["bpb"] == pytest.approx(alone["bpb"], rel=1e-5)


def test_core_waits_for_no_other_evaluation(here, folder, bundle):
    with core_suite.alone(folder), pytest.raises(ValueError, match="another process evaluates CORE there"):
        evaluate("--eval", "core", "--eval-bundle", str(bundle))


UPSTREAM = os.environ.get("NANOCHAT_UPSTREAM")
THEIR_SCRIPT = """
import json, runpy, sys
from pathlib import Path
from nanochat.checkpoint_manager import load_model
theirs = runpy.run_path(str(Path(sys.argv[1], "scripts", "base_eval.py")), run_name="theirs")
model, tokenizer, _ = load_model("base", "cpu", phase="eval")
print(json.dumps(theirs["evaluate_core"](model, tokenizer, "cpu")))
"""


@pytest.mark.skipif(not UPSTREAM, reason="set NANOCHAT_UPSTREAM to a checkout of upstream nanochat")
def test_upstreams_script_on_this_package_finds_the_same(here, folder, bundle):
    evaluate("--eval", "core", "--eval-bundle", str(bundle))
    core = json.loads((folder / "core.json").read_text())
    shutil.copytree(bundle, here / "eval_bundle")
    command = [sys.executable, "-c", THEIR_SCRIPT, UPSTREAM]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    finally:
        shutil.rmtree(here / "eval_bundle")
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert theirs["results"] == pytest.approx(core["results"])
    assert theirs["core_metric"] == pytest.approx(core["core_metric"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eval-bundle", "nowhere"], "--eval-bundle nowhere: .*core.yaml is missing"),
        (["--core-tasks", "dclm22"], "--core-tasks dclm22: .* has none of its tasks"),
        (["--core-max-len", "1"], "--core-max-len 1: at least 2"),
        (["--core-baselines", "none.csv"], "--core-baselines none.csv"),
    ],
)
def test_core_refuses_before_other_modes_begin(here, bundle, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate("--eval", "sample,bpb,core", "--split-tokens", "64", "--eval-bundle", str(bundle), *options)
    assert not result_path(here).exists()


def test_the_papers_audit_needs_no_model(capsys):
    pytest.importorskip("tomllib")
    base_eval.main(["--audit-paper"])
    assert "CORE 0.334 and 0.351 cannot be recomputed" in capsys.readouterr().out


def test_context_is_written_beside_the_checkpoint(here, folder, capsys):
    evaluate("--eval", "context", "--max-per-task", "2", "--split-tokens", "200")
    found = json.loads((folder / "context.json").read_text())
    assert found["model_tag"] == "tiny" and found["items"] == 2 and found["sequence_len"] == 16
    for windows in ("trained", "unlimited"):
        assert [row["from"] for row in found["positions"][windows]] == list(range(0, 64, 4))
        assert all(1 < row["bpb"] < 40 for row in found["positions"][windows])
        assert [row["length"] for row in found["probes"]["induction"][windows]] == [4, 8, 16, 32, 64]
    assert "bits per byte by position, unlimited windows" in capsys.readouterr().out


def test_bpb_of_other_texts_counts_every_byte(here, tmp_path):
    (tmp_path / "a.txt").write_text("Schöne Grüße vom Café am Fluß. " * 9, encoding="utf-8")
    (tmp_path / "b.txt").write_text("kurz", encoding="utf-8")
    evaluate("--eval", "bpb", "--source", f"text:{tmp_path}/*.txt", "--split-tokens=-1")
    found = result(here)["source_bpb"]
    model, tokenizer, _ = cm.load_model("base", "cpu", phase="eval")
    nats = size = 0
    for name in ("a.txt", "b.txt"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        tokens, size = tokenizer.encode(text, prepend="<|bos|>"), size + len(text.encode())
        for start in range(0, len(tokens) - 1, 16):
            row = torch.tensor([tokens[start : start + 17]])
            nats += model(row[:, :-1], row[:, 1:], loss_reduction="sum").item()
    assert found["bpb"] == pytest.approx(nats / math.log(2) / size, rel=1e-4) and "bpb" not in result(here)


def test_bpb_of_a_data_set_of_the_hub_is_that_of_the_same_texts_in_files(here, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    texts = ["Schöne Grüße vom Café. " * 9, "kurz und gut", "   ", "one more"]
    (tmp_path / "rows").mkdir()  # `datasets` takes a folder of files for a data set, as it does a name of the hub
    rows = pa.table({"id": list(range(4)), "body": texts})
    pq.write_table(rows, tmp_path / "rows" / "test.parquet")
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    found = []
    for source in (f"hf:{tmp_path}/rows:test:body", f"text:{tmp_path}/*.txt"):
        evaluate("--eval", "bpb", "--source", source, "--split-tokens=-1")
        found.append(result(here)["source_bpb"]["bpb"])
        assert result(here)["source_bpb"]["source"] == source
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    with pytest.raises(ValueError, match="no text column 'text', only id, body"):
        evaluate("--eval", "bpb", "--source", f"hf:{tmp_path}/rows:test")


def test_one_file_is_one_document_and_all_its_bytes_count(here, tmp_path):
    text = "erster Absatz\n\n\n  zweiter Absatz " * 8
    (tmp_path / "a [1] *.txt").write_text(text, encoding="utf-8")
    pattern = f"{tmp_path}/a [[]1] [*].txt"
    assert list(text_rows.read_source(f"text:{pattern}")) == [text]


def test_no_text_is_no_result(here, tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match="--source text:.*1 files and no text in them"):
        evaluate("--eval", "bpb", "--source", f"text:{tmp_path}/*.txt")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="no byte of text to score"):
        evaluate("--eval", "bpb", "--source", f"text:{tmp_path}/*.txt", "--split-tokens", "0")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="--source text:.*b.txt"):
        evaluate("--eval", "bpb", "--source", f"text:{tmp_path}/*.txt")
    assert not result_path(here).exists()


@pytest.mark.parametrize("source", ["sotu", "text:", "books/*.txt", "text:/nowhere/*.txt"])
def test_sources_that_are_none_are_refused(here, source):
    with pytest.raises(ValueError, match=f"--source {re.escape(source)}"):
        evaluate("--eval", "bpb", "--source", source)
