"""A temporary repository in which the series is tried out. It borrows a checkout's objects and writes nothing there."""

import os
import subprocess
import tempfile
from pathlib import Path

from patches.series import EMPTY, Patch, upstream

# From this version on `git apply --3way` merges; before, it first tried to apply by line number.
MERGES_FIRST = (2, 32)


class Refused(Exception):
    """The series cannot be applied; the message says where and why."""


def git(folder, *words, stdin=None, check=True, **env):
    """Run git in `folder`; returns the finished process, its output as text. Refused with git's words on failure."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"LC_ALL": "C"} | env
    done = subprocess.run(["git", *words], cwd=folder, env=clean, input=stdin, capture_output=True)
    done.stdout, done.stderr = (text.decode("utf-8", "surrogateescape") for text in (done.stdout, done.stderr))
    if check and done.returncode:
        raise Refused(f"git {words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done


def root_of(checkout) -> Path:
    """The checkout as an absolute path; Refused unless it is the top of a git working tree that has a commit."""
    folder = Path(checkout).resolve()
    if not folder.is_dir():
        raise Refused(f"{checkout}: no such folder")
    top = git(folder, "rev-parse", "--show-toplevel", check=False)
    if top.returncode or Path(top.stdout.strip()).resolve() != folder:
        raise Refused(f"{checkout} is not the top folder of a git checkout")
    if git(folder, "rev-parse", "--verify", "-q", "HEAD^{tree}", check=False).returncode:
        raise Refused(f"{checkout} has no commit")
    return folder


class Workspace:
    """Context manager. `tree` names trees by their ids; the working tree holds the files of the series alone."""

    # Somebody's own settings (whitespace, line ends, prefixes) must not change what lands.
    SETTINGS = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

    def __init__(self, checkout: Path):
        self.checkout = checkout

    def __enter__(self):
        self._home = tempfile.TemporaryDirectory(prefix="bov-patches-")
        self.folder = Path(self._home.name)
        self.git("init", "-q")
        objects = git(self.checkout, "rev-parse", "--git-path", "objects").stdout.strip()
        borrowed = self.folder / ".git" / "objects" / "info" / "alternates"
        borrowed.write_text(f"{(self.checkout / objects).resolve()}\n", encoding="utf-8")
        self.git("config", "core.autocrlf", "false")
        return self

    def __exit__(self, *_):
        self._home.cleanup()

    def git(self, *words, **options):
        return git(self.folder, *words, **options, **self.SETTINGS)

    # ------------------------------------------------------------------------ trees

    def load(self, tree):
        """Let index and working tree be `tree`, of whose files only those already in the working tree are written."""
        self.git("read-tree", "--reset", tree)

    def tree(self) -> str:
        return self.git("write-tree").stdout.strip()

    def snapshot(self, files) -> str:
        """The tree of the checkout's HEAD with `files` as they lie in its working tree now."""
        self.load(git(self.checkout, "rev-parse", "HEAD^{tree}").stdout.strip())
        for name in files:
            if (self.checkout / name).is_file():
                # the checkout's own settings say what its line ends are in a blob; the blob is written here
                here = {"GIT_OBJECT_DIRECTORY": str(self.folder / ".git" / "objects")}
                blob = git(self.checkout, "hash-object", "-w", "--", name, **here).stdout.strip()
                self.git("update-index", "--add", "--cacheinfo", f"100644,{blob},{name}")
            else:
                self.git("update-index", "--force-remove", name)
        return self.tree()

    def blob(self, tree, path) -> str | None:
        """Blob id of a file in a tree, None without one."""
        found = self.git("rev-parse", "--verify", "-q", f"{tree}:{path}", check=False).stdout.strip()
        return found or None

    def text(self, tree, path) -> str:
        return self.git("show", f"{tree}:{path}").stdout

    # ------------------------------------------------------------------------ the series

    def make_base_blobs(self, patches):
        """Have every blob that a three-way merge of `patches` starts from: upstream's own, and those between patches.

        Refused when the checkout lacks a base file: git would then apply by line number alone and say nothing.
        """
        version = git(self.checkout, "version").stdout.split()[2]
        if tuple(int(part) for part in version.split(".")[:2]) < MERGES_FIRST:
            raise Refused(f"git {version} cannot merge this safely: 2.32 or newer is needed where upstream has moved")
        known = upstream()
        for patch in patches:
            for path, blob in (known["older"].get(patch.name) or known["blobs"]).items():
                if git(self.checkout, "cat-file", "-e", blob, check=False).returncode:
                    raise Refused(
                        f"{path}: the version that {patch.name} was made for (blob {blob[:12]}) is not in this "
                        "checkout, so nothing can be merged. Get upstream's history (git fetch --unshallow), or just: "
                        f"git fetch https://github.com/karpathy/nanochat {known['base']}"
                    )
        self._put_on(known["blobs"], [patch for patch in patches if patch.name not in known["older"]])
        for patch in patches:
            if patch.name in known["older"]:
                self._put_on(known["older"][patch.name], [patch])

    def _put_on(self, blobs, patches):
        """Apply patches to the very blobs that they were made on, which writes those that they lead to."""
        index = {"GIT_INDEX_FILE": str(self.folder / ".git" / "base-index")}
        self.git("read-tree", "--empty", **index)
        for path, blob in blobs.items():
            self.git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}", **index)
        for patch in patches:
            self.git("apply", "--cached", "--unidiff-zero", "--whitespace=nowarn", str(patch.path), **index)

    def apply(self, tree, patch: Patch, reverse=False) -> str:
        """`patch` applied to a tree, or taken back; returns the new tree.

        Directly where the ids of all its files match, else by three-way merge (call make_base_blobs before). Refused,
        naming hunk and reason, when that conflicts.
        """
        self._check_out(tree, patch)
        before = {c.path: (c.new if reverse else c.old) for c in patch.files}
        exact = all((self.blob(tree, path) or EMPTY) == blob for path, blob in before.items())
        how = ["--index"] if exact else ["--3way"]
        for path, blob in {} if exact else before.items():  # without it git would fall back to line numbers
            assert blob == EMPTY or not self.git("cat-file", "-e", blob, check=False).returncode, (patch.name, path)
        words = ["apply", *how, "--unidiff-zero", "--whitespace=nowarn", *(["--reverse"] if reverse else [])]
        done = self.git(*words, str(patch.path), check=False)
        conflicts = self.git("ls-files", "--unmerged").stdout
        if done.returncode or conflicts:
            raise Refused(self._why(patch, done.stderr))
        return self.tree()

    def _check_out(self, tree, patch):
        for change in patch.files:
            (self.folder / change.path).unlink(missing_ok=True)
        self.load(tree)
        here = [change.path for change in patch.files if self.blob(tree, change.path)]
        if here:
            self.git("checkout-index", "--index", "--force", "--", *here)

    def _why(self, patch, words) -> str:
        """Every hunk that conflicts, from the marks that git left; git's own words without marks."""
        found = []
        for change in patch.files:
            path = self.folder / change.path
            if path.is_file():
                found += conflicts_of(patch.name, change, path.read_text(encoding="utf-8", errors="replace"))
        return "\n".join(found) or f"{patch.name}: {words.strip() or 'git apply failed'}"


def conflicts_of(name, change, text) -> list[str]:
    """One line per conflict in a file with git's marks: which hunk, and what the checkout has there."""
    found, mine, side = [], [], None
    for line in text.splitlines():
        if line.startswith("<<<<<<<"):
            side, mine, wanted = "mine", [], []
        elif line.startswith("=======") and side == "mine":
            side = "wanted"
        elif line.startswith(">>>>>>>") and side == "wanted":
            side = None
            found.append(_describe(name, change, mine, wanted))
        elif side:
            (mine if side == "mine" else wanted).append(line)
    return found


def _describe(name, change, mine, wanted):
    lines = set(wanted)
    hunks = [(n, h) for n, h in enumerate(change.hunks, 1) if lines & {s for s in (*h.added, *h.removed) if s.strip()}]
    which = ", ".join(f"hunk {n} (line {h.start} of the base)" for n, h in hunks) or "a hunk"
    have = next((line.strip() for line in mine if line.strip()), "nothing there")
    want = next((line.strip() for _, h in hunks for line in (*h.added, *h.removed) if line.strip()), "")
    return f"{name}: {change.path}, {which} ({want!r}): upstream has moved here, the checkout has {have!r}"


def add_files(workspace, tree, files: dict[str, bytes]) -> str:
    """`tree` with these files; returns the new tree."""
    workspace.load(tree)
    for path, content in files.items():
        blob = workspace.git("hash-object", "-w", "--stdin", stdin=content).stdout.strip()
        workspace.git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}")
    return workspace.tree()
