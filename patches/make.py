"""Make the series anew, from real commits one after the other.

    python -m patches.make CHECKOUT                    after a change in nanochat/bov/, or on a new upstream:
                                                       HEAD of CHECKOUT becomes the base
    python -m patches.make CHECKOUT --branch bov       write the series into CHECKOUT as commits, for git rebase -i
    python -m patches.make CHECKOUT --from COMMIT      take the commits COMMIT..HEAD as the series, COMMIT as its base
    python -m patches.make CHECKOUT --from COMMIT --older   take the one commit after COMMIT as a patch of older/

A commit's subject is the name of its patch, its body the prose. The first patch always holds nanochat/bov/ as it lies
here. Hunks have no context and land by the line numbers of their new side, so a series is only ever made whole.
"""

import argparse
import json
import re
import sys

from patches.series import HERE, HUNK, OLDER, parse, upstream, variants
from patches.workspace import Refused, Workspace, add_files, git, root_of

FIRST = "0001-bank-of-values"
AUTHOR = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "nanochat-bov"), ("EMAIL", "bov@localhost"), ("DATE", "2026-07-04T00:00:00Z"))
}


def own_files() -> dict[str, bytes]:
    """{path: content} of nanochat/bov/ as it lies here, without what Python leaves behind."""
    root = HERE.parent
    found = sorted(path for path in (root / "nanochat" / "bov").rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def without_own(workspace, tree) -> str:
    workspace.load(tree)
    old = workspace.git("ls-files", "nanochat/bov").stdout.split()
    if old:
        workspace.git("update-index", "--force-remove", *old)
    return workspace.tree()


def commits_of_series(workspace, base) -> list[tuple[str, str, str]]:
    """(name, prose, tree) after each patch of the present series, put on the tree `base`."""
    if workspace.blob(base, "nanochat/bov/__init__.py"):
        raise Refused("HEAD has the series in it: check out a commit of upstream, or give --from")
    series, found, tree = variants()[0], [], base
    workspace.make_base_blobs(series)
    for patch in series:
        name = patch.name.removesuffix(".patch")
        tree = add_files(workspace, tree, own_files()) if name == FIRST else workspace.apply(tree, patch)
        found.append((name, patch.prose.partition("\n")[2].strip(), tree))
    return found


def commits_of_branch(workspace, start) -> list[tuple[str, str, str]]:
    """(name, prose, tree) of the commits start..HEAD, nanochat/bov/ being ours in all of them."""
    found = []
    order = git(workspace.checkout, "rev-list", "--reverse", "--first-parent", f"{start}..HEAD").stdout.split()
    for commit in order:
        subject, _, body = git(workspace.checkout, "log", "-1", "--format=%B", commit).stdout.partition("\n")
        if not re.fullmatch(r"\d{4}-[a-z-]+", subject.strip()):
            raise Refused(f"commit {commit[:12]}: the subject {subject!r} is not the name of a patch, such as {FIRST}")
        tree = git(workspace.checkout, "rev-parse", f"{commit}^{{tree}}").stdout.strip()
        if found or subject.strip() == FIRST:
            tree = add_files(workspace, without_own(workspace, tree), own_files())
        found.append((subject.strip(), body.strip(), tree))
    if not found:
        raise Refused(f"no commits between {start} and HEAD")
    return found


def text_of(workspace, name, prose, before, after) -> str:
    """A patch file: its name, prose, and the diff without context or section headings."""
    words = ["-U0", "--inter-hunk-context=0", "--full-index", "--no-renames", "--no-color", "--no-ext-diff"]
    diff = workspace.git("diff", *words, before, after).stdout
    lines = [found[0] if (found := HUNK.match(line)) else line for line in diff.split("\n")]
    return f"{name}\n\n{prose}\n\n" + "\n".join(lines)


def blobs_before(patches) -> dict[str, str]:
    """{path: blob} of the upstream files that patches start from."""
    found = {}
    for patch in patches:
        for change in patch.files:
            found.setdefault(change.path, None if change.creates else change.old)
    return {path: blob for path, blob in found.items() if blob}


def write_series(workspace, base, commits, older=False):
    """Write the patches of `commits`, made on the commit `base`, and upstream.json."""
    before, texts = git(workspace.checkout, "rev-parse", f"{base}^{{tree}}").stdout.strip(), {}
    for name, prose, tree in commits:
        texts[f"{OLDER}/{name}.patch" if older else f"{name}.patch"] = text_of(workspace, name, prose, before, tree)
        before = tree
    patches = [parse(name, text) for name, text in texts.items()]
    known = upstream() if (HERE / "upstream.json").exists() else {"older": {}}
    if older:
        known["older"] |= {patches[0].name: blobs_before(patches)}
    else:
        known |= {"base": base, "blobs": blobs_before(patches)}
        for path in HERE.glob("[0-9]*.patch"):
            path.unlink()
    (HERE / OLDER).mkdir(exist_ok=True)
    for name, text in texts.items():
        (HERE / name).write_text(text, encoding="utf-8")
    order = {key: known[key] for key in ("base", "blobs", "older")}
    (HERE / "upstream.json").write_text(json.dumps(order, indent=2) + "\n", encoding="utf-8")
    for patch in patches:
        lines = [(len(h.added), len(h.removed)) for c in patch.files for h in c.hunks]
        print(f"{patch.name}: {sum(a for a, _ in lines)} lines inserted, {sum(r for _, r in lines)} removed")


def write_branch(workspace, base, commits, branch):
    """The commits as a new branch of the checkout."""
    parent = base
    for name, prose, tree in commits:
        words = ["commit-tree", tree, "-p", parent, "-m", f"{name}\n\n{prose}"]
        parent = workspace.git(*words, **AUTHOR).stdout.strip()
    workspace.git("update-ref", "refs/heads/made", parent)
    git(workspace.checkout, "fetch", "-q", str(workspace.folder), f"refs/heads/made:refs/heads/{branch}")
    print(f"the series is the branch {branch} of {workspace.checkout}, on {base[:12]}")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="folder of a git checkout of upstream nanochat")
    parser.add_argument("--branch", help="write the series into the checkout as this new branch, and no patches")
    parser.add_argument("--from", dest="start", help="the series is the commits from here to HEAD")
    parser.add_argument("--older", action="store_true", help="with --from: make a patch of older/")
    args = parser.parse_args(argv)
    try:
        if args.older and not args.start:
            raise Refused("--older needs --from COMMIT")
        checkout = root_of(args.checkout)
        base = git(checkout, "rev-parse", f"{args.start or 'HEAD'}^{{commit}}").stdout.strip()
        with Workspace(checkout) as workspace:
            if args.start:
                commits = commits_of_branch(workspace, base)
            else:
                commits = commits_of_series(workspace, git(checkout, "rev-parse", f"{base}^{{tree}}").stdout.strip())
            if args.branch:
                write_branch(workspace, base, commits, args.branch)
            else:
                write_series(workspace, base, commits, args.older)
        return 0
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
