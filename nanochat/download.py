"""One file over HTTP: resumed where it broke off, tried again with back-off, checked before it takes its name."""

import os
import random
import re
import time
from email.utils import parsedate_to_datetime

import requests

from nanochat.common import file_sha256

TRY_AGAIN = {408, 425, 429}  # and every 5xx
LONGEST_WAIT = 60.0  # seconds
BLOCK = 1 << 16  # bytes; what a cut connection can lose


class Stopped(Exception):
    """The caller's stop event was set while a download ran."""


class _TryAgain(Exception):
    def __init__(self, reason, wait=0.0):
        super().__init__(reason)
        self.wait = wait


def download(url, path, *, command, check=None, attempts=5, pause=1.0, stop=None, on_bytes=None):
    """Fetch `url` to `path`, whole and checked, or raise; what has arrived waits in `path`.part for the next try.

    Checked are the length, the server's sha256 where it offers one (X-Linked-Etag), and `check(part_path)`, which
    raises ValueError when the content is wrong. `attempts` tries with waits of `pause`, 2 `pause`, 4 `pause` ...
    seconds or what the server asks for (429 and 503, at most a minute). `stop` is a threading.Event;
    `on_bytes(count)` is called as bytes arrive. `command` is what a user runs to try again.
    Raises ValueError naming the file, the address and `command`; Stopped when `stop` was set.
    """
    part = f"{path}.part"
    for attempt in range(attempts):
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            sha256 = _receive(url, part, stop, on_bytes)
            _verify(part, sha256, check)
        except (_TryAgain, requests.RequestException) as error:
            reason = str(error)
            wait = error.wait if isinstance(error, _TryAgain) else 0.0
            if attempt + 1 < attempts:
                _sleep(max(wait, pause * 2**attempt * random.uniform(1.0, 1.25)), stop)
        except _Final as error:
            raise ValueError(f"{path}: {url} answers {error}; check the address, then run {command}") from None
        except OSError as error:
            raise ValueError(
                f"{path}: {error.strerror or error}; make room or mend the folder, then {command}"
            ) from error
        else:
            os.replace(part, path)
            return path
    raise ValueError(f"{path}: {url} failed {attempts} times, last: {reason}; run {command} to go on where it stopped")


class _Final(Exception):
    """An answer that no repetition changes."""


def _sleep(seconds, stop):
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise Stopped


def _receive(url, part, stop, on_bytes):
    """Append what is missing to `part`; returns the server's sha256 or None."""
    have = os.path.getsize(part) if os.path.exists(part) else 0
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with requests.get(url, stream=True, headers=headers, timeout=30) as response:
        sha256 = _offered_sha256(response)
        if response.status_code == 416 and response.headers.get("Content-Range") == f"bytes */{have}":
            return sha256  # the part was whole already
        _check_status(response, part)
        total = _total_length(response, have, part)
        with open(part, "ab" if response.status_code == 206 else "wb") as f:
            for block in response.iter_content(BLOCK):
                if stop is not None and stop.is_set():
                    raise Stopped
                f.write(block)
                if on_bytes is not None:
                    on_bytes(len(block))
            f.flush()
            os.fsync(f.fileno())
    size = os.path.getsize(part)
    if total is not None and size != total:
        if size > total:
            _forget(part)
        raise _TryAgain(f"{size} bytes of {total} arrived")
    return sha256


def _forget(part):
    if os.path.exists(part):
        os.remove(part)


def _check_status(response, part):
    status = response.status_code
    if status in (200, 206):
        return
    if status == 416:
        _forget(part)
        raise _TryAgain("the server refused to resume")
    if status in TRY_AGAIN or status >= 500:
        raise _TryAgain(f"status {status}", _retry_after(response))
    raise _Final(f"status {status}")


def _total_length(response, have, part):
    """Length of the whole file in bytes by the response's headers, None when they do not say."""
    if response.status_code == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if found is None or int(found[1]) != have:
            _forget(part)
            raise _TryAgain("the server resumed at the wrong place")
        return None if found[2] == "*" else int(found[2])
    length = response.headers.get("Content-Length")
    return None if length is None or "Content-Encoding" in response.headers else int(length)


def _offered_sha256(response):
    """The hash that the hub's redirect carries for large files."""
    for answer in (*response.history, response):
        tag = answer.headers.get("X-Linked-Etag", "").strip('"').lower()
        if re.fullmatch(r"[0-9a-f]{64}", tag):
            return tag
    return None


def _retry_after(response):
    """Seconds that the server asks to wait, 0 when it does not ask."""
    value = response.headers.get("Retry-After", "")
    try:
        seconds = float(value) if value.isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except (TypeError, ValueError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_WAIT)


def _verify(part, sha256, check):
    try:
        if sha256 is not None and file_sha256(part) != sha256:
            raise ValueError("the sha256 differs from the server's")
        if check is not None:
            check(part)
    except ValueError as error:
        _forget(part)
        raise _TryAgain(str(error)) from error
