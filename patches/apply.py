"""Put the series into a checkout of upstream nanochat, or take it out again.

    python -m patches.apply CHECKOUT            apply; nothing is committed
    python -m patches.apply CHECKOUT --check    say whether and how it would apply, change nothing
    python -m patches.apply CHECKOUT --reverse  take it out, to the byte

Everything happens in a temporary repository first. The checkout is written to once, after the whole series went in and
every file of it compiles; then `git diff` in the checkout shows what was done. What it held is kept until that is done:
a run that fails puts it back, and after one that was killed the next run does.
"""

import argparse
import os
import sys
from dataclasses import dataclass

from patches.journal import Journal
from patches.series import paths, upstream, variants
from patches.workspace import Refused, Workspace, git, root_of


@dataclass(frozen=True)
class Outcome:
    """Trees before and after, whether blob ids matched, and the patches of older/ that were used."""

    before: str
    after: str
    exact: bool
    older: tuple[str, ...]


def forward(workspace, before) -> Outcome:
    """The series on the tree `before`; Refused as Workspace.apply, or when the result does not compile."""
    files, blobs = paths(variants()[0]), upstream()["blobs"]
    taken = [path for path, new in files.items() if new and workspace.blob(before, path)]
    if taken:
        raise Refused(f"{taken[0]} is there already: is the series applied? (--reverse takes it out)")
    exact = all(workspace.blob(before, path) == blob for path, blob in blobs.items())
    refusals = []
    for patches in variants()[: 1 if exact else None]:
        tree, done = before, 0  # done: patches that went in
        try:
            if not exact:
                workspace.make_base_blobs(patches)
            for patch in patches:
                tree = workspace.apply(tree, patch)
                done += 1
            _compile(workspace, tree, files)
        except Refused as refusal:
            refusals.append((-done, len(refusals), refusal))
            continue
        older = tuple(p.name for p in patches if p.name in upstream()["older"])
        return Outcome(before, tree, exact, older)
    raise min(refusals)[2]


def backward(workspace, before) -> Outcome:
    """The series taken out of the tree `before`. Refused unless applying it again would give the very same tree."""
    files = paths(variants()[0])
    if not any(new and workspace.blob(before, path) for path, new in files.items()):
        raise Refused("the series is not in this checkout")
    for path, blob in _last_blobs(variants()[0]).items():
        if path.startswith("nanochat/bov/") and workspace.blob(before, path) != blob:
            raise Refused(
                f"{path} is not the one of this series: take it out with the version of this repository that put it "
                "in, or restore that file first"
            )
    if (rest := _new_files_alone(workspace, before)) is not None:
        return Outcome(before, rest, True, ())
    refusals = []
    for patches in variants():
        tree = before
        try:
            exact = all(workspace.blob(before, path) == blob for path, blob in _last_blobs(patches).items())
            if not exact:
                workspace.make_base_blobs(patches)
            for patch in reversed(patches):
                tree = workspace.apply(tree, patch, reverse=True)
            if forward(workspace, tree).after == before:
                return Outcome(before, tree, exact, ())
            raise Refused("taken out and put in again it would not be the same: its lines were changed since")
        except Refused as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _new_files_alone(workspace, before):
    """The tree without the new files where no hook is in (git stash leaves that behind), None where hooks are."""
    workspace.load(before)
    for path, new in paths(variants()[0]).items():
        if new:
            workspace.git("update-index", "--force-remove", path)
    rest = workspace.tree()
    try:
        return rest if forward(workspace, rest).after != before else None
    except Refused:
        return None


def _last_blobs(patches):
    return {change.path: change.new for patch in patches for change in patch.files}


def _compile(workspace, tree, files):
    for path in files:
        if path.endswith(".py"):
            try:
                compile(workspace.text(tree, path), path, "exec", dont_inherit=True)
            except SyntaxError as error:
                raise Refused(f"{path}, line {error.lineno}: the merged file is not Python ({error.msg})") from error


# ---------------------------------------------------------------------------- the checkout


def refuse_dirty(checkout):
    """Refused when tracked files differ from HEAD, or when a new file of the series would overwrite one."""
    for path, new in paths(variants()[0]).items():
        if new and os.path.lexists(checkout / path):
            raise Refused(
                f"{path} is there already: is the series applied? --reverse takes it out; after a git stash, "
                "git stash pop brings its other lines back"
            )
        odd = [p for p in (checkout / path).parents if p.is_relative_to(checkout) and p != checkout]
        odd = [p for p in odd if os.path.lexists(p) and (p.is_symlink() or not p.is_dir())]
        if odd or (not new and (checkout / path).is_symlink()):
            raise Refused(f"{odd[0] if odd else checkout / path} is not a plain {'folder' if odd else 'file'}")
    dirty = git(checkout, "status", "--porcelain", "--untracked-files=no").stdout.splitlines()
    if dirty:
        raise Refused(
            f"the checkout has uncommitted changes ({dirty[0].strip()}, {len(dirty)} in all): commit or stash them"
        )


def write(workspace, outcome):
    """Bring the checkout's working tree from outcome.before to outcome.after, or leave it as it was."""
    words = ["diff", "--binary", "--full-index", "--no-renames", outcome.before, outcome.after]
    change = workspace.git(*words).stdout.encode("utf-8", "surrogateescape")
    journal = Journal(workspace.checkout)
    journal.keep(paths(variants()[0]))
    try:
        git(workspace.checkout, "apply", "--whitespace=nowarn", "-", stdin=change)
    except BaseException:
        journal.restore()
        raise
    journal.drop()


def recover(checkout, check):
    """Put back what a run that was killed while it wrote had kept."""
    journal = Journal(checkout)
    if check and journal.file.exists():
        raise Refused("an earlier run was killed while it wrote: run again without --check to put back what was there")
    if journal.restore():
        print("an earlier run was killed while it wrote: the checkout is again as it was before that run")


def say(checkout, outcome, reverse, check):
    done = {(False, False): "applied", (True, False): "taken out", (False, True): "would apply"}
    word = done.get((reverse, check), "could be taken out")
    how = "directly: its files are those of the base" if outcome.exact else "by three-way merge"
    print(f"the series {'is ' if not check else ''}{word} {how} ({checkout})")
    for name in outcome.older:
        print(f"  with {name} in place of its namesake")
    if not reverse and not check:
        print("  look at it with: git diff; test it with: python -m pytest tests/test_bov.py")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="folder of a git checkout of upstream nanochat")
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--reverse", action="store_true", help="take the series out")
    args = parser.parse_args(argv)
    try:
        checkout = root_of(args.checkout)
        recover(checkout, args.check)
        if not args.reverse:
            refuse_dirty(checkout)
        with Workspace(checkout) as workspace:
            before = workspace.snapshot(paths(variants()[0]))
            outcome = (backward if args.reverse else forward)(workspace, before)
            if not args.check:
                write(workspace, outcome)
        say(checkout, outcome, args.reverse, args.check)
        return 0
    except Refused as refusal:
        print(f"nothing was changed.\n{refusal}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was changed", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
