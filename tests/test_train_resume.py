"""Trainings that go on where they stopped, and those that must not."""

import os
import re
import shutil
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core_items import write_bundle
from nanochat import core_suite, metrics, saving, train
from nanochat.checkpoint_manager import list_steps
from nanochat.tokenizer import RustBPETokenizer, save_token_bytes
from tiny import TEXT
from trainings import assert_same_weights, base, corpus, finished, go, handlers, losses, weights  # noqa: F401


@pytest.mark.parametrize("preset", ["paper/bov", "upstream"])
def test_a_resumed_run_has_the_same_losses_and_weights_to_the_bit(preset, base, monkeypatch):
    flow = ("--preset", preset, "--num-iterations", "8", "--save-every", "3")
    whole = go(*flow)
    expected, expected_evals, final = losses(whole), losses(whole, "eval", "val_bpb"), weights(whole, 8)
    (whole / "DONE.json").unlink()
    for step in (6, 8):
        for name in ("model_{:06d}.pt", "meta_{:06d}.json", "optim_{:06d}_rank0.pt"):
            (whole / name.format(step)).unlink()
    go(*flow, "--resume", "auto")
    assert losses(whole) == expected and losses(whole, "eval", "val_bpb") == expected_evals
    assert_same_weights(weights(whole, 8), final)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 129)], ids=lambda value: str(value)
)
def test_a_signal_saves_and_the_same_command_continues(number, code, base, monkeypatch, capsys):
    whole = go("--num-iterations", "8", "--model-tag", "whole")
    expected = losses(base / "base_checkpoints" / "whole")
    step = train.train_step

    def interrupted(run):
        if run.step == 4:
            os.kill(os.getpid(), number)
        return step(run)

    monkeypatch.setattr(train, "train_step", interrupted)
    with pytest.raises(SystemExit) as end:
        go("--num-iterations", "8")
    assert end.value.code == code and list_steps(whole) == [5]
    assert "resumable: the same command with --resume auto" in capsys.readouterr().out
    monkeypatch.setattr(train, "train_step", step)
    go("--num-iterations", "8", "--resume", "auto")
    assert losses(whole) == expected


def test_a_signal_during_evaluation_saves_and_stops(base, monkeypatch):
    expected = losses(go("--num-iterations", "8", "--model-tag", "whole").parent / "whole")
    score, calls = train.evaluate_bpb, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:  # the evaluation at step 4
            os.kill(os.getpid(), signal.SIGINT)
        return score(*args)

    monkeypatch.setattr(train, "evaluate_bpb", interrupted)
    with pytest.raises(SystemExit) as end:
        go("--num-iterations", "8")
    folder = base / "base_checkpoints" / "t"
    assert end.value.code == 130 and list_steps(folder) == [4]
    go("--num-iterations", "8", "--resume", "auto")
    assert losses(folder) == expected


def test_a_signal_during_core_stops_behind_the_task_at_work(base, monkeypatch):
    """All tasks may take longer than a scheduler waits."""
    write_bundle(base / "eval_bundle", {"own_mc": ("multiple_choice", 4), "own_lm": ("language_modeling", 4)}, shots=1)
    answer, asked = core_suite.answer_task, []

    def interrupted(*args):
        asked.append(args)
        os.kill(os.getpid(), signal.SIGTERM)
        return answer(*args)

    monkeypatch.setattr(core_suite, "answer_task", interrupted)
    with pytest.raises(SystemExit) as end:
        go("--num-iterations", "4", "--core-metric-every", "2")
    folder = base / "base_checkpoints" / "t"
    assert end.value.code == 0 and len(asked) == 1 and list_steps(folder) == [2]
    monkeypatch.setattr(core_suite, "answer_task", answer)
    go("--num-iterations", "4", "--core-metric-every", "2", "--resume", "auto")
    assert losses(folder, "core", "step") == [2, 4]


def test_more_evaluation_tokens_than_there_are_mean_one_pass(base, corpus, monkeypatch):
    identity = train.data_identity()
    monkeypatch.setattr(train, "data_identity", lambda: identity | {"source": "text:mine"})
    one_pass = losses(go("--num-iterations", "1", "--model-tag", "a").parent / "a", "eval", "val_bpb")
    folder = go("--num-iterations", "1", "--model-tag", "b", "--eval-tokens", "99999999").parent / "b"
    capped = losses(folder, "eval", "val_bpb")
    assert capped == one_pass


def test_the_newest_checkpoints_are_kept_and_a_damaged_one_is_passed_over(base, capsys):
    flow = ("--num-iterations", "8", "--save-every", "2", "--keep-last", "2")
    folder = go(*flow)
    expected, final = losses(folder), weights(folder, 8)
    assert list_steps(folder) == [6, 8] and len(list(folder.glob("*.pt"))) == 4
    (folder / "DONE.json").unlink()
    (folder / "model_000008.pt").write_bytes(b"PK")
    (folder / ".model_000010.pt.x.tmp").touch()
    (folder / "optim_000010_rank0.pt").touch()
    go(*flow, "--resume", "auto")
    said = capsys.readouterr()
    assert "passing over step 8: " in said.err and "has 2 bytes instead of" in said.err
    assert "deleting the later steps 8" in said.out and "optim_000010_rank0.pt" in said.err
    assert losses(folder) == expected and list_steps(folder) == [6, 8]
    assert_same_weights(weights(folder, 8), final)
    assert not [path for path in folder.iterdir() if "000010" in path.name]


def test_a_chosen_step_that_is_damaged_is_refused_by_name(finished):
    data = bytearray((finished / "optim_000004_rank0.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (finished / "optim_000004_rank0.pt").write_bytes(data)
    with pytest.raises(ValueError, match=r"optim_000004_rank0\.pt is not what was saved"):
        go("--preset", "paper/bov", "--num-iterations", "8", "--resume-from-step", "4")
    assert list_steps(finished) == [4, 8]


def test_a_step_that_has_a_checkpoint_is_not_written_again(finished, monkeypatch):
    """A kill meanwhile would take the only copy."""
    (finished / "DONE.json").unlink()
    monkeypatch.setattr(saving, "save_checkpoint", lambda *args, **kwargs: pytest.fail("saved again"))
    go("--preset", "paper/bov", "--num-iterations", "8", "--save-every", "4", "--resume", "auto")
    assert (finished / "DONE.json").exists()


FORCED = [
    ("longer run", ["--num-iterations", "10"], "plan.num_iterations: 8 there, 10 here", False),
    ("other seed", ["--seed", "7"], "seed: 42 there, 7 here", False),
    ("other length", ["--max-seq-len", "16"], "config.sequence_len: 32 there, 16 here \\(--max-seq-len\\)", True),
]


@pytest.mark.parametrize(("more", "message", "anew"), [row[1:] for row in FORCED], ids=[row[0] for row in FORCED])
def test_other_settings_are_named_and_force_resume_goes_on(more, message, anew, finished, capsys):
    flow = ["--preset", "paper/bov", "--num-iterations", "8", *more, "--resume", "auto"]
    with pytest.raises(ValueError, match=message + ".*--force-resume"):
        go(*flow)
    assert list_steps(finished) == [4, 8]
    go(*flow, "--resume-from-step", "4", "--force-resume")
    said = capsys.readouterr().out
    assert "--force-resume: going on although" in said and ("training data from the beginning" in said) == anew
    assert list_steps(finished)[0] == 4 and (finished / "DONE.json").exists()


def other_data(folder):
    pq.write_table(pa.table({"text": TEXT[:300]}), folder / "shard_00000.parquet", row_group_size=20)


def other_tokenizer(folder):
    found = RustBPETokenizer.train_from_iterator((text[::-1] for text in TEXT), 256 + 9 + 40)
    found.save(folder)
    save_token_bytes(found, folder)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("base_data_climbmix", other_data, r"data\.train: \w{64} there, \w{64} here"),
        ("tokenizer", other_tokenizer, r"tokenizer: \w{64} there, \w{64} here"),
    ],
    ids=["data", "tokenizer"],
)
def test_other_data_and_another_tokenizer_are_named_and_force_resume_goes_on(
    part, change, message, corpus, finished, capsys
):
    own = finished.parents[1] / part
    own.unlink()  # a link to what all tests share
    shutil.copytree(corpus / part, own)
    change(own)
    flow = ["--preset", "paper/bov", "--num-iterations", "8", "--resume", "auto"]
    with pytest.raises(ValueError, match=message + ".*--force-resume"):
        go(*flow)
    assert list_steps(finished) == [4, 8]
    go(*flow, "--resume-from-step", "4", "--force-resume")
    assert "training data from the beginning" in capsys.readouterr().out and list_steps(finished) == [4, 8]
    (forced,) = [entry for entry in metrics.read_metrics(finished / "metrics.jsonl") if entry["kind"] == "forced"]
    assert forced["step"] == 4 and re.match(message, forced["differs"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--preset", "paper/baseline"], r"value_embeds\.2\.weight is not in the model .*set by --ve-layers"),
        (["--preset", "paper/bov", "--trunk", "full"], r"resid_lambdas is missing .*set by --trunk"),
        (["--preset", "paper/bov", "--depth", "4", "--aspect-ratio", "12"], r"is missing in the checkpoint .*--depth"),
        (["--preset", "paper/bov", "--num-iterations", "3"], "step 8 is beyond the run's 3 steps"),
    ],
    ids=["bank", "trunk", "depth", "shorter run"],
)  # fmt: skip
def test_another_model_is_refused_by_its_first_differing_weights_even_when_forced(more, message, finished):
    with pytest.raises(ValueError, match=message):
        go("--num-iterations", "8", *more, "--resume", "auto", "--force-resume")
    assert list_steps(finished) == [4, 8]
