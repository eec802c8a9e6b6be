"""A sample of tests/chaos.py: kills inside a save, a full disk, damaged files, a rank that fails, signals."""

import errno
import hashlib
import os
import random
import signal
import sys
import time

import pytest

import chaos_faults
import chaos_files
import chaos_kills
from chaos_run import Child, checkpoints, forked, new_base, same, strict_json, trains, undisturbed, warm
from nanochat import saving, stopping
from nanochat.checkpoint_manager import list_steps
from nanochat.common import atomic_write, write_json
from tiny import make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    warm()
    return make_corpus(tmp_path_factory.mktemp("corpus"), manifest=True)


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    return undisturbed(corpus, tmp_path_factory.mktemp("expected"))


@pytest.fixture(scope="module")
def operations(corpus, tmp_path_factory):
    return chaos_kills.list_operations(corpus, tmp_path_factory.mktemp("operations"))


def find(operations, kind, name):
    return next(i for i, (k, n, _) in enumerate(operations) if k == kind and name in n)


# ---------------------------------------------------------------------------- files


def test_the_run_writes_every_file_of_a_save_under_another_name_and_the_metadata_last(operations):
    first = find(operations, "unlink", "meta_000004.json")
    save = operations[first:]
    assert operations[first - 1][:2] == ("fsync", "metrics.jsonl")
    save = save[: find(save, "rename", "meta_000004.json") + 2]
    renamed = [name for kind, name, _ in save if kind == "rename"]
    assert renamed == ["optim_000004_rank0.pt", "model_000004.pt", "meta_000004.json"]
    assert all(name.endswith(".tmp") for kind, name, _ in save if kind == "write")
    for i, (kind, name, _) in enumerate(save):
        if kind == "rename":  # synced before, its folder after
            assert save[i - 1][0] == "fsync" and name in save[i - 1][1] and save[i + 1][:2] == ("fsync", "t")
    deleted = [name for kind, name, _ in operations if kind == "unlink" and "000002" in name]
    assert deleted[-3:] == ["meta_000002.json", "optim_000002_rank0.pt", "model_000002.pt"]  # --keep-last


@pytest.mark.parametrize(
    ("kind", "name", "act"),
    [
        ("rename", "model_000004.pt", chaos_kills.die),
        ("write", "meta_000004.json", chaos_kills.die_half_way),
        ("unlink", "model_000002.pt", chaos_kills.die),
    ],
    ids=["model not renamed", "half the metadata", "half deleted"],
)
def test_a_kill_loses_nothing_and_the_run_ends_with_the_same_weights(
    kind, name, act, corpus, tmp_path, operations, expected
):
    number = find(operations, kind, name)
    end, base = chaos_kills.disturb(corpus, tmp_path, number, act)
    assert end.code == -signal.SIGKILL and chaos_kills.newest_whole(base) >= operations[number][2]
    again = forked(trains(base))
    assert again.code == 0, again.output
    assert same(base, expected) == ""


def test_a_full_disk_ends_with_one_line_and_the_last_checkpoint_stands(corpus, tmp_path, operations, expected):
    number = find(operations, "write", "model_000004.pt") + 5
    end, base = chaos_kills.disturb(corpus, tmp_path, number, chaos_kills.full_disk)
    assert end.code == 1 and not end.traceback
    assert end.output.splitlines()[-1].startswith("base_train: [Errno 28] not written: No space left on device: ")
    assert "model_000004.pt" in end.output and list_steps(checkpoints(base)) == [2]
    assert forked(trains(base)).code == 0 and same(base, expected) == ""


def test_an_error_while_writing_names_the_file_and_leaves_nothing(tmp_path):
    path = tmp_path / "sub" / "file"
    with pytest.raises(OSError, match="not written: No space left on device: .*sub/file'"), atomic_write(path) as f:
        f.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(path.parent.iterdir())
    (tmp_path / "in_the_way").touch()
    with pytest.raises(FileExistsError, match="in_the_way/file"), atomic_write(tmp_path / "in_the_way" / "file"):
        pass


def test_json_has_no_nan_whatever_is_written(tmp_path):
    write_json(tmp_path / "a.json", {"x": float("nan"), 3: [float("-inf"), {"y": (1.5, float("inf"))}]})
    text = (tmp_path / "a.json").read_text()
    assert strict_json(text) == {"x": None, "3": [None, {"y": [1.5, None]}]}


@pytest.mark.parametrize(
    "name", ["checkpoint folder read-only", "weights unreadable", "a file for the checkpoints", "tokenizer unreadable"]
)
def test_what_may_not_be_read_or_written_is_named(name, corpus, tmp_path):
    found = chaos_faults.permissions(corpus, tmp_path, [name])
    assert not found["failures"]


@pytest.fixture(scope="module")
def formats(corpus, tmp_path_factory):
    return chaos_files.prepare(corpus, tmp_path_factory.mktemp("formats"))


@pytest.mark.parametrize(
    ("form", "damage"),
    [
        ("source.json", "a field is null"),
        ("validation shard", "512 bytes zeroed"),
        ("tokenizer.pkl", "hostile inside"),
        ("token_bytes.pt", "hostile builtin"),
        ("model without manifest", "hostile key"),
        ("metadata", "deep"),
    ],
    ids=lambda value: value,
)
def test_damaged_and_hostile_files_are_refused_by_name(form, damage, formats, tmp_path):
    expected = chaos_files.read_whole(formats, tmp_path, form)
    how, end = chaos_files.read_damaged(formats, tmp_path, form, damage, random.Random(3), expected)
    assert how in chaos_files.GOOD[:2], end.output


def test_there_are_many_kinds_of_damage_and_each_changes_the_file(formats, tmp_path):
    generator = random.Random(3)
    kinds = chaos_files.all_kinds(formats, tmp_path, generator)
    assert len(set(kinds)) == len(kinds) >= 60
    for form in chaos_files.FORMATS:
        data = chaos_files.place(formats, tmp_path, form)[1].read_bytes()
        damages = chaos_files.damages_of(form, data, generator, tmp_path / "ran")
        assert {name for name, content in damages.items() if content == data} <= {"512 bytes zeroed"}


# ---------------------------------------------------------------------------- signals


class Run:
    def __init__(self):
        self.stop = []


def busy(seconds):
    """Inside a library's C code, where Python handles no signal."""
    start = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(seconds * 100_000 / (time.monotonic() - start)))


def signalled(second, then):
    """A function for a child: a SIGTERM that is noticed, another `second` seconds later, `then()` meanwhile."""

    def function():
        run, pid = Run(), os.getpid()
        stopping.listen(run)
        os.kill(pid, signal.SIGTERM)
        while not run.stop:
            time.sleep(0.001)
        if os.fork() == 0:
            time.sleep(second)
            os.kill(pid, signal.SIGTERM)
            os._exit(0)
        then()
        print("came back with", run.stop)

    return function


def test_a_second_signal_within_a_moment_is_the_same_one_again_however_busy_the_process_is(monkeypatch):
    """A scheduler and torchrun both send one, and a step in between may be long."""
    monkeypatch.setattr(stopping, "TOGETHER", 0.5)
    end = forked(signalled(0.1, lambda: busy(1.0)))
    assert end.code == 0 and "came back with [15]" in end.output, end.output


def test_a_second_signal_later_ends_the_process_at_once_however_busy_it_is(monkeypatch):
    monkeypatch.setattr(stopping, "TOGETHER", 0.05)
    end = forked(signalled(0.2, lambda: busy(30.0)))
    assert end.code == 128 + signal.SIGTERM and "came back" not in end.output


def test_a_child_of_the_run_is_not_the_run():
    def function():
        run = Run()
        stopping.listen(run)
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            os._exit(0)
        os.waitpid(child, 0)
        assert not run.stop

    assert forked(function).code == 0


def test_under_nohup_a_lost_terminal_stops_nothing():
    def function():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        run = Run()
        stopping.listen(run)
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.1)
        assert not run.stop

    assert forked(function).code == 0


def test_sigterm_ends_with_0_and_the_word_resumable(corpus, tmp_path, expected):
    base = new_base(corpus, tmp_path, "stopped")
    child = Child(trains(base))
    while not list_steps(checkpoints(base)):
        assert child.poll() is None
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGTERM)
    end = child.wait()
    assert end.code == 0 and ("resumable" in end.output or (checkpoints(base) / "DONE.json").exists()), end.output
    assert forked(trains(base)).code == 0 and same(base, expected) == ""


def test_a_log_that_nobody_reads_any_more_stops_nothing(corpus, tmp_path, expected):
    """tee was killed, or the terminal is gone."""
    base = new_base(corpus, tmp_path, "unread")

    def function():
        read, write = os.pipe()
        os.close(read)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(write, stream.fileno())
        trains(base)()

    assert forked(function).code == 0 and same(base, expected) == ""


def test_two_trainers_do_not_share_a_folder(corpus, tmp_path, expected, monkeypatch):
    """The second would delete what the first is writing."""
    monkeypatch.setattr(saving, "WAIT", 0.2)
    base = new_base(corpus, tmp_path, "shared")

    def holds():
        saving.claim(checkpoints(base))
        time.sleep(600)

    first = Child(holds)
    while not (checkpoints(base) / ".lock").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    end = forked(trains(base))
    assert end.code == 1 and "another process trains there" in end.output and not end.traceback
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert forked(trains(base)).code == 0 and same(base, expected) == ""


# ---------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("fault", ["save", "gradient", "SIGKILL", "SIGTERM"])
def test_one_rank_ends_all_with_the_first_error(fault, corpus, tmp_path):
    *ends, gap = chaos_faults.two_ranks(new_base(corpus, tmp_path, "two"), fault, faulty=1)
    outputs = [end.output for end in ends]
    assert [end.code for end in ends] == {"SIGTERM": [0, 0], "SIGKILL": [1, -signal.SIGKILL]}.get(fault, [1, 1]), (
        outputs
    )
    assert gap < 30
    if fault in ("save", "gradient"):
        assert all(chaos_faults.RANK_FAULTS[fault][1].format(1) in output for output in outputs), outputs
