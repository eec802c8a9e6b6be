"""The series as data: patches in order, the files and hunks of each, and the upstream files it was made for.

A patch is prose, then a diff without context whose index lines carry full blob ids. The order is that of the names. A
patch in older/ stands in for the one of the same name where upstream is older than the code that one changes.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
OLDER = "older"
EMPTY = "0" * 40  # git's blob id for "no such file"

INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: (\d+))?")
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """Lines `removed` after line `start - 1` of the old file, and `added` in their place."""

    start: int
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True)
class FileChange:
    """What one patch does to one file: blob ids before and after (EMPTY for none), and the hunks."""

    path: str
    old: str
    new: str
    hunks: tuple[Hunk, ...]

    @property
    def creates(self) -> bool:
        return self.old == EMPTY


@dataclass(frozen=True)
class Patch:
    """One file of the series. `name` is its file name below patches/, `prose` what stands above the diff."""

    name: str
    prose: str
    files: tuple[FileChange, ...]

    @property
    def path(self) -> Path:
        return HERE / self.name


def parse(name: str, text: str) -> Patch:
    """A Patch from its text. ValueError, naming file and line, for context lines and all else not of the form."""
    prose, mark, diff = text.partition("diff --git ")
    changes, path, blobs, hunks = [], None, None, []

    def close():
        if path is not None:
            if blobs is None or not (hunks or blobs[0] == EMPTY):
                raise ValueError(f"{name}: {path} has no index line with full blob ids, or no hunks")
            changes.append(FileChange(path, *blobs, tuple(Hunk(s, tuple(r), tuple(a)) for s, _, _, r, a in hunks)))

    for number, line in enumerate((mark + diff).splitlines(), start=prose.count("\n") + 1):
        owed = hunks and (len(hunks[-1][3]) < hunks[-1][1] or len(hunks[-1][4]) < hunks[-1][2])
        if owed and line[:1] in ("-", "+"):
            hunks[-1][3 if line[0] == "-" else 4].append(line[1:])
        elif line.startswith("diff --git a/"):
            close()
            path, blobs, hunks = line.split(" b/", 1)[1], None, []
        elif found := INDEX.fullmatch(line):
            blobs = found[1], found[2]
        elif found := HUNK.fullmatch(line):
            start, removed, _, added = (1 if n is None else int(n) for n in found.groups())
            hunks.append((start if removed else start + 1, removed, added, [], []))
        elif owed or not re.match(r"(---|\+\+\+) |new file mode ", line):
            raise ValueError(f"{name}, line {number}: not part of a diff without context: {line!r}")
    close()
    return Patch(name, prose.strip(), tuple(changes))


def read(path: Path) -> Patch:
    return parse(path.relative_to(HERE).as_posix(), path.read_text(encoding="utf-8"))


def variants() -> list[list[Patch]]:
    """The series, and the same with every patch of older/ in place of its namesake."""
    series = [read(path) for path in sorted(HERE.glob("[0-9]*.patch"))]
    older = {path.name: read(path) for path in (HERE / OLDER).glob("*.patch")}
    return [series] + ([[older.get(patch.name, patch) for patch in series]] if older else [])


def upstream() -> dict:
    """patches/upstream.json: {"base": commit, "blobs": {path: id}, "older": {patch: {path: id}}}."""
    return json.loads((HERE / "upstream.json").read_text(encoding="utf-8"))


def paths(patches) -> dict[str, bool]:
    """{path: whether the series creates it} of every file that it touches."""
    found = {}
    for patch in patches:
        for change in patch.files:
            found.setdefault(change.path, change.creates)
    return found
