"""What the series changes in a checkout of upstream nanochat: lines per file, then the diff with context.

    python -m patches.diff CHECKOUT             works on an unpatched checkout and on a patched one
    python -m patches.diff CHECKOUT --stat      the table alone

The context comes from the checkout; new files are counted, not printed.
"""

import argparse
import sys

from patches.apply import backward, forward
from patches.series import paths, variants
from patches.workspace import Refused, Workspace, root_of


def trees(workspace) -> tuple[str, str]:
    """The checkout without the series and with it."""
    files = paths(variants()[0])
    now = workspace.snapshot(files)
    if any(new and workspace.blob(now, path) for path, new in files.items()):
        outcome = backward(workspace, now)
        return outcome.after, outcome.before
    outcome = forward(workspace, now)
    return outcome.before, outcome.after


def table(workspace, before, after) -> str:
    """Lines per file: inserted and removed in files that were there, then the new files."""
    rows, new = [], []
    for line in workspace.git("diff", "--numstat", "--no-renames", before, after).stdout.splitlines():
        inserted, removed, path = line.split("\t")
        (rows if workspace.blob(before, path) else new).append((path, int(inserted), int(removed)))
    rows.append(("changed files in all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    lines = [f"{'':36}{'inserted':>9}{'removed':>9}", *(f"{path:36}{i:9}{r:9}" for path, i, r in rows)]
    return "\n".join([*lines, f"{len(new)} new files: {sum(row[1] for row in new)} lines"])


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="folder of a git checkout of upstream nanochat")
    parser.add_argument("--stat", action="store_true", help="the table alone")
    args = parser.parse_args(argv)
    try:
        with Workspace(root_of(args.checkout)) as workspace:
            before, after = trees(workspace)
            print(table(workspace, before, after))
            if not args.stat:
                words = ["--diff-filter=M", "--no-renames", before, after]
                print("\n" + workspace.git("diff", *words).stdout, end="")
        return 0
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
