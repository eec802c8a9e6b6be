"""What a checkout held before it is written to, kept in its .git folder until the writing is done.

A run that fails puts everything back; after one that was killed the next run does.
"""

import base64
import json
import os

from patches.workspace import Refused, git


class Journal:
    """The files `paths` of a checkout: keep() before writing, then drop(), or restore() when that failed."""

    def __init__(self, checkout):
        self.checkout = checkout
        self.file = checkout / git(checkout, "rev-parse", "--git-path", "bov-apply.json").stdout.strip()

    def keep(self, paths):
        """Note what `paths` hold, on disk before this returns."""
        kept = {}
        for path in paths:
            place = self.checkout / path
            there = place.is_file()
            kept[path] = [place.stat().st_mode, base64.b64encode(place.read_bytes()).decode()] if there else None
        part = self.file.with_suffix(".part")
        with open(part, "w", encoding="utf-8") as f:
            json.dump(kept, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, self.file)

    def drop(self):
        self.file.unlink()

    def restore(self) -> bool:
        """Put back what was kept, if anything was; True when there was a journal.

        Raises Refused, keeping the journal, when a file cannot be written.
        """
        if not self.file.exists():
            return False
        try:
            for path, held in json.loads(self.file.read_text(encoding="utf-8")).items():
                self._put(self.checkout / path, held)
        except OSError as error:
            raise Refused(
                f"{error}. What the checkout held is in {self.file}: make room and run the same command again"
            ) from error
        self.drop()
        return True

    def _put(self, place, held):
        if held is None:
            if place.is_file():
                place.unlink()
            folder = place.parent
            while folder != self.checkout and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
                folder = folder.parent
            return
        mode, content = held[0], base64.b64decode(held[1])
        if not place.is_file() or place.read_bytes() != content:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        place.chmod(mode)
