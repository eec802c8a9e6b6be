"""The patch series and its commands, on the series itself and on tiny repositories made here.

What needs a checkout of upstream nanochat is in test_patched_upstream.py.
"""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from patches import apply, diff, make, series, workspace

ROOT = Path(__file__).parent.parent
MAX_CHANGED, MAX_REPLACED = 120, 10

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git on this machine")


def changes(patches):
    return [change for patch in patches for change in patch.files]


def blob_id(content: bytes):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def content_of(change):
    return "".join(f"{line}\n" for hunk in change.hunks for line in hunk.added).encode()


# ---------------------------------------------------------------------------- the series


def test_first_patch_holds_the_bank_of_values_to_the_byte():
    patched = {change.path: content_of(change) for change in series.variants()[0][0].files}
    ours = make.own_files()
    assert patched.keys() == ours.keys(), "run: python -m patches.make CHECKOUT"
    different = [path for path in ours if ours[path] != patched[path]]
    assert not different, "nanochat/bov/ has changed; run: python -m patches.make CHECKOUT"
    assert all(
        change.creates and change.new == blob_id(patched[change.path]) for change in changes(series.variants()[0][:1])
    )


@pytest.mark.parametrize("patches", series.variants(), ids=["series", "older upstream"])
def test_few_lines_of_upstream_change(patches):
    created = {path for path, new in series.paths(patches).items() if new}
    hunks = [hunk for change in changes(patches) if change.path not in created for hunk in change.hunks]
    inserted, removed = (
        sum(len(lines) for lines in side) for side in zip(*((h.added, h.removed) for h in hunks), strict=True)
    )
    assert inserted + removed <= MAX_CHANGED and removed <= MAX_REPLACED
    assert max(len(line) for hunk in hunks for line in hunk.added) <= 120
    assert not any(";" in line.split("#")[0] for hunk in hunks for line in hunk.added)


def test_ids_lead_from_upstream_through_every_patch():
    now = dict(series.upstream()["blobs"])
    for change in changes(series.variants()[0]):
        assert change.old == now.get(change.path, series.EMPTY), change.path
        now[change.path] = change.new


def test_every_patch_says_what_it_does():
    for patch in {p.name: p for patches in series.variants() for p in patches}.values():
        name, _, prose = patch.prose.partition("\n\n")
        assert name == Path(patch.name).stem and len(prose) > 80, patch.name


@pytest.mark.parametrize(
    "line, replacement",
    [("+one", " one"), ("@@ -3,0 +4 @@", "@@ -3,0 +4 @@ def heading():"), ("index " + "0" * 40, "index " + "0" * 7)],
    ids=["context", "section heading", "short id"],
)
def test_patch_of_another_form_is_refused(line, replacement):
    header = f"diff --git a/f b/f\nindex {'0' * 40}..{'1' * 40} 100644\n--- a/f\n+++ b/f\n"
    text = f"x\n\nprose\n\n{header}@@ -3,0 +4 @@\n+one\n"
    assert series.parse("x", text).files[0].hunks == (series.Hunk(4, (), ("one",)),)
    with pytest.raises(ValueError, match="x, line|full blob ids"):
        series.parse("x", text.replace(line, replacement))


# ---------------------------------------------------------------------------- tiny repositories

LINES = [f"line_{n} = {n}" for n in range(1, 41)]
OURS = "nanochat/bov/room.py"


def git(folder, *words):
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder, message="more", **files):
    for name, lines in files.items():
        path = folder / f"{name}.py"
        path.write_text("".join(f"{line}\n" for line in lines))
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)


def edited(lines):
    """The hooks of the tiny series: a line inserted after line 5, line 30 replaced."""
    found = [*lines]
    at = found.index("line_30 = 30")
    found[at : at + 1] = ["line_30 = 300  # hook"]
    found.insert(found.index("line_5 = 5") + 1, "hook = True")
    return found


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An upstream of two files, a series of two patches for it, and an unpatched clone: the clone's folder."""
    here = tmp_path / "ours" / "patches"
    here.mkdir(parents=True)
    room = tmp_path / "ours" / OURS
    room.parent.mkdir(parents=True)
    room.write_text("ROOM = 1\n")
    for module in (series, make):
        monkeypatch.setattr(module, "HERE", here)
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    git(upstream, "init", "-q", "-b", "main")
    commit(upstream, host=LINES, other=["x = 1"])
    git(upstream, "checkout", "-q", "-b", "bov")
    (upstream / OURS).parent.mkdir(parents=True)
    (upstream / OURS).write_text("stale\n")
    commit(upstream, "0001-bank-of-values\n\nThe room.")
    commit(upstream, "0002-hooks\n\nThe hooks.", host=edited(LINES))
    assert make.main([str(upstream), "--from", "main"]) == 0
    git(upstream, "checkout", "-q", "main")
    git(tmp_path, "clone", "-q", str(upstream), "clone")
    return tmp_path / "clone"


def state(folder):
    """Everything in the working tree and what git says of it."""
    files = [path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts]
    content = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return content, git(folder, "status", "--porcelain"), git(folder, "worktree", "list")


def host_lines(folder):
    return (folder / "host.py").read_text().splitlines()


MOVES = {
    "lines inserted above": ["first = 0", "second = 0", *LINES],
    "lines removed between": [line for line in LINES if line not in ("line_12 = 12", "line_13 = 13", "line_14 = 14")],
    "a line rewritten": ["line_20 = 'twenty'" if line == "line_20 = 20" else line for line in LINES],
}


def test_matching_checkout_is_patched_directly_and_restored(tiny, capsys):
    before = state(tiny)
    assert apply.main([str(tiny), "--check"]) == 0 and state(tiny) == before
    assert apply.main([str(tiny)]) == 0
    assert "is applied directly" in capsys.readouterr().out
    assert host_lines(tiny) == edited(LINES) and (tiny / OURS).read_text() == "ROOM = 1\n"
    patched = state(tiny)
    assert apply.main([str(tiny), "--reverse", "--check"]) == 0 and state(tiny) == patched
    assert apply.main([str(tiny), "--reverse"]) == 0 and state(tiny) == before


@pytest.mark.parametrize("committed", [False, True], ids=["in the working tree", "committed"])
@pytest.mark.parametrize("name", MOVES)
def test_moved_checkout_is_merged_and_restored(tiny, name, committed, capsys):
    commit(tiny, host=MOVES[name])
    before = state(tiny)[0]
    assert apply.main([str(tiny)]) == 0
    assert "three-way merge" in capsys.readouterr().out
    assert host_lines(tiny) == edited(MOVES[name])
    if committed:
        commit(tiny)
    assert apply.main([str(tiny), "--reverse"]) == 0
    assert state(tiny)[0] == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, workspace.Refused("no room")], ids=["ctrl-c", "failure"])
def test_writing_that_stops_leaves_the_checkout_as_it_was(tiny, error, monkeypatch, capsys):
    before, real = state(tiny), apply.git

    def half(folder, *words, **options):
        if words[0] == "apply":
            (tiny / "host.py").unlink()
            (tiny / OURS).parent.mkdir(parents=True)
            (tiny / OURS).write_text("half")
            raise error
        return real(folder, *words, **options)

    monkeypatch.setattr(apply, "git", half)
    assert apply.main([str(tiny)]) != 0
    assert "nothing was changed" in capsys.readouterr().err and state(tiny) == before


def test_after_a_kill_the_next_run_puts_back_what_was_there(tiny, capsys):
    before = state(tiny)
    kept = apply.Journal(tiny)
    kept.keep(series.paths(series.variants()[0]))
    (tiny / "host.py").unlink()
    (tiny / OURS).parent.mkdir(parents=True)
    (tiny / OURS).write_text("half")
    broken = state(tiny)
    assert apply.main([str(tiny), "--check"]) == 1 and state(tiny) == broken
    assert "run again without --check" in capsys.readouterr().err
    assert apply.main([str(tiny)]) == 0 and "as it was before that run" in capsys.readouterr().out
    assert host_lines(tiny) == edited(LINES) and not kept.file.exists()
    assert apply.main([str(tiny), "--reverse"]) == 0 and state(tiny) == before


def test_what_a_stash_leaves_behind_is_taken_out(tiny, capsys):
    before = state(tiny)
    assert apply.main([str(tiny)]) == 0
    git(tiny, "stash", "-q")
    assert (tiny / OURS).exists() and host_lines(tiny) == LINES
    assert apply.main([str(tiny)]) == 1 and "git stash pop" in capsys.readouterr().err
    assert apply.main([str(tiny), "--reverse"]) == 0 and state(tiny) == before


@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_in_the_way_of_a_folder_is_named(tiny, kind, capsys):
    place = (tiny / OURS).parent
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        place.write_text("mine")
    else:
        place.symlink_to("/nowhere")
    for flags in ((), ("--check",)):
        assert "is not a plain folder" in refused(tiny, capsys, *flags)


def test_git_alone_would_put_the_hunks_on_wrong_lines(tiny):
    """Why the tool exists: without context, plain git apply goes by line number."""
    commit(tiny, host=MOVES["lines inserted above"])
    git(tiny, "apply", "--unidiff-zero", str(series.HERE / "0002-hooks.patch"))
    right = edited(MOVES["lines inserted above"])
    assert host_lines(tiny) != right and sorted(host_lines(tiny)) == sorted(right)


def refused(tiny, capsys, *flags):
    """The message of a refusal that left everything as it was."""
    before = state(tiny)
    assert apply.main([str(tiny), *flags]) == 1
    assert state(tiny) == before
    return capsys.readouterr().err


def test_conflict_names_hunk_and_reason(tiny, capsys):
    commit(tiny, host=["line_30 = 'mine'" if line == "line_30 = 30" else line for line in LINES])
    message = refused(tiny, capsys)
    assert "0002-hooks.patch: host.py, hunk 2 (line 30 of the base)" in message and "line_30 = 'mine'" in message


def test_missing_file_is_named(tiny, capsys):
    (tiny / "host.py").unlink()
    commit(tiny)
    assert "host.py" in refused(tiny, capsys)


def test_result_that_is_not_python_is_refused(tiny, capsys):
    git(tiny, "checkout", "-q", "-b", "bov")
    commit(tiny, "0001-broken\n\nNo Python.", host=["line_0 = (", *LINES])
    assert make.main([str(tiny), "--from", "HEAD~1"]) == 0
    git(tiny, "checkout", "-q", "main")
    message = refused(tiny, capsys)
    assert "host.py, line 1: the merged file is not Python" in message


def test_shallow_clone_is_refused_once_upstream_has_moved(tiny, capsys):
    commit(tiny, host=MOVES["lines inserted above"])
    git(tiny.parent, "clone", "-q", "--depth", "1", f"file://{tiny}", "shallow")
    message = refused(tiny.parent / "shallow", capsys)
    assert "host.py" in message and "git fetch --unshallow" in message


def test_git_that_does_not_merge_first_is_refused_once_upstream_has_moved(tiny, capsys, monkeypatch):
    monkeypatch.setattr(workspace, "MERGES_FIRST", (99, 0))
    commit(tiny, host=MOVES["lines inserted above"])
    assert "2.32 or newer" in refused(tiny, capsys)
    commit(tiny, host=LINES)
    assert apply.main([str(tiny)]) == 0


def test_shallow_clone_of_the_base_is_patched(tiny):
    git(tiny.parent, "clone", "-q", "--depth", "1", f"file://{tiny}", "shallow")
    assert apply.main([str(tiny.parent / "shallow")]) == 0
    assert host_lines(tiny.parent / "shallow") == edited(LINES)


@pytest.mark.parametrize("staged", [False, True])
def test_dirty_tree_is_refused(tiny, capsys, staged):
    (tiny / "other.py").write_text("x = 2\n")
    if staged:
        git(tiny, "add", "-A")
    assert "other.py" in refused(tiny, capsys)


def test_second_application_and_needless_reversal_are_refused(tiny, capsys):
    assert "not in this checkout" in refused(tiny, capsys, "--reverse")
    assert apply.main([str(tiny)]) == 0
    assert "there already" in refused(tiny, capsys)


def test_file_in_the_way_is_not_overwritten(tiny, capsys):
    (tiny / OURS).parent.mkdir(parents=True)
    (tiny / OURS).write_text("mine = 1\n")
    assert f"{OURS} is there already" in refused(tiny, capsys)


def test_reversal_keeps_edits_elsewhere_and_refuses_lost_ones(tiny, capsys):
    assert apply.main([str(tiny)]) == 0
    lines = [*host_lines(tiny), "", "", "", "mine = 1"]
    (tiny / "host.py").write_text("\n".join(lines) + "\n")
    (tiny / OURS).write_text("ROOM = 2\n")
    assert OURS in refused(tiny, capsys, "--reverse")
    (tiny / OURS).write_text("ROOM = 1\n")
    assert apply.main([str(tiny), "--reverse"]) == 0
    assert host_lines(tiny) == [*LINES, "", "", "", "mine = 1"]


def test_hook_changed_by_hand_is_not_guessed_at(tiny, capsys):
    assert apply.main([str(tiny)]) == 0
    (tiny / "host.py").write_text((tiny / "host.py").read_text().replace("line_30 = 300", "line_30 = 301"))
    assert "host.py" in refused(tiny, capsys, "--reverse")


@pytest.mark.parametrize("place", ["nowhere", "clone/sub", "no_git"])
def test_not_a_checkout(tiny, capsys, place):
    (tiny / "sub").mkdir()
    (tiny.parent / "no_git").mkdir()
    assert apply.main([str(tiny.parent / place)]) == 1
    assert place.split("/")[-1] in capsys.readouterr().err


def test_own_settings_of_git_do_not_matter(tiny):
    for key, value in {"apply.whitespace": "fix", "diff.noprefix": "true", "diff.mnemonicPrefix": "true"}.items():
        git(tiny, "config", key, value)
    commit(tiny, host=["trailing = 1 ", *LINES])
    assert apply.main([str(tiny)]) == 0
    assert host_lines(tiny) == edited(["trailing = 1 ", *LINES])


@pytest.mark.parametrize("name", [None, "lines inserted above"], ids=["base", "moved"])
def test_line_ends_of_another_system_stay(tiny, name):
    if name:
        commit(tiny, host=MOVES[name])
    git(tiny.parent, "clone", "-q", "-c", "core.autocrlf=true", str(tiny), "crlf")
    folder = tiny.parent / "crlf"
    before = state(folder)
    assert b"\r\n" in before[0]["host.py"]
    assert apply.main([str(folder)]) == 0
    assert (folder / "host.py").read_bytes().count(b"\r\n") == len(host_lines(folder))
    assert apply.main([str(folder), "--reverse"]) == 0 and state(folder) == before


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
def test_diff_shows_lines_per_file_and_context(tiny, capsys, applied):
    if applied:
        apply.main([str(tiny)])
        capsys.readouterr()
    before = state(tiny)
    assert diff.main([str(tiny)]) == 0
    shown = capsys.readouterr().out
    assert state(tiny) == before
    assert ["host.py", "2", "1"] in [line.split() for line in shown.splitlines()] and "1 new files: 1 lines" in shown
    assert " line_5 = 5\n+hook = True\n line_6 = 6\n" in shown and "ROOM" not in shown


# ---------------------------------------------------------------------------- making the series


def texts():
    return {path.name: path.read_text() for path in series.HERE.glob("*.patch")}


def test_made_again_is_the_same(tiny):
    before, known = texts(), series.upstream()
    assert make.main([str(tiny)]) == 0
    assert texts() == before and series.upstream() == known


def test_change_in_the_room_changes_the_first_patch_alone(tiny):
    before = texts()
    (series.HERE.parent / OURS).write_text("ROOM = 2\n")
    (series.HERE.parent / OURS).with_name("new.py").write_text("NEW = 1\n")
    assert make.main([str(tiny)]) == 0
    assert {name for name in before if texts()[name] != before[name]} == {"0001-bank-of-values.patch"}
    assert apply.main([str(tiny)]) == 0
    assert (tiny / OURS).read_text() == "ROOM = 2\n" and (tiny / OURS).with_name("new.py").exists()


def test_new_upstream_becomes_the_base(tiny, capsys):
    commit(tiny, host=MOVES["lines inserted above"])
    assert make.main([str(tiny)]) == 0
    assert series.upstream()["base"] == git(tiny, "rev-parse", "HEAD").strip()
    capsys.readouterr()
    assert apply.main([str(tiny)]) == 0 and "directly" in capsys.readouterr().out
    assert host_lines(tiny) == edited(MOVES["lines inserted above"])


def test_series_goes_into_commits_and_comes_back(tiny):
    before = texts()
    assert make.main([str(tiny), "--branch", "bov"]) == 0
    assert git(tiny, "log", "--format=%s", "main..bov").split() == ["0002-hooks", "0001-bank-of-values"]
    git(tiny, "checkout", "-q", "bov")
    assert make.main([str(tiny), "--from", "main"]) == 0
    assert texts() == before


def test_patched_commit_is_no_base(tiny, capsys):
    room = series.HERE.parent / OURS
    room.with_name("__init__.py").touch()
    assert make.main([str(tiny)]) == 0
    assert apply.main([str(tiny)]) == 0
    commit(tiny)
    before = texts()
    assert make.main([str(tiny)]) == 1 and texts() == before
    assert "HEAD has the series" in capsys.readouterr().err


def test_commit_without_the_name_of_a_patch_is_refused(tiny, capsys):
    git(tiny, "checkout", "-q", "-b", "bov")
    commit(tiny, "wip", other=["x = 3"])
    assert make.main([str(tiny), "--from", "main"]) == 1
    assert "'wip' is not the name of a patch" in capsys.readouterr().err


def test_older_upstream_gets_its_own_patch(tiny, capsys):
    git(tiny, "checkout", "-q", "-b", "old")
    old = ["line_30 = 'old'" if line == "line_30 = 30" else line for line in LINES]
    commit(tiny, host=old)
    wanted = ["line_30 = 'old hook'" if line == "line_30 = 'old'" else line for line in old]
    wanted.insert(wanted.index("line_5 = 5") + 1, "hook = True")
    commit(tiny, "0002-hooks\n\nThe same for the old one.", host=wanted)
    assert make.main([str(tiny), "--from", "HEAD~1", "--older"]) == 0
    assert list(json.loads((series.HERE / "upstream.json").read_text())["older"]) == ["older/0002-hooks.patch"]
    git(tiny, "checkout", "-q", "HEAD~1")
    commit(tiny, other=["x = 5"])
    before = state(tiny)[0]
    capsys.readouterr()
    assert apply.main([str(tiny)]) == 0 and "with older/0002-hooks.patch" in capsys.readouterr().out
    assert host_lines(tiny) == wanted
    assert apply.main([str(tiny), "--reverse"]) == 0 and state(tiny)[0] == before
