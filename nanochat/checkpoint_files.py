"""The files of saved steps: model_000123.pt, optim_000123_rank0.pt, and meta_000123.json, written last.

The metadata are the manifest too: `files` holds size and sha256 of the others, and they are sealed themselves. A step
is complete when its model and its metadata are there; a kill while saving leaves the step before it the newest.
"""

import hashlib
import json
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from nanochat.common import (
    atomic_write,
    file_sha256,
    first_line,
    is_ddp_initialized,
    print0,
    seal,
    seal_holds,
    write_json,
)

FORMAT = 1  # of the metadata; what lacks the field was written before it, or by upstream


def model_path(checkpoint_dir, step) -> Path:
    return Path(checkpoint_dir, f"model_{step:06d}.pt")


def meta_path(checkpoint_dir, step) -> Path:
    return Path(checkpoint_dir, f"meta_{step:06d}.json")


def optimizer_path(checkpoint_dir, step, rank) -> Path:
    return Path(checkpoint_dir, f"optim_{step:06d}_rank{rank}.pt")


def say(message):
    """Notices go to stderr: stdout belongs to the caller's results."""
    print0(message, file=sys.stderr)


# ---------------------------------------------------------------------------- saving


def save_checkpoint(checkpoint_dir, step, model_data, optimizer_data, meta_data, rank=0):
    """Write one step: each rank its optimizer shard, if it has one, then rank 0 the model and, last, the metadata.

    Under torchrun every rank calls it and returns when the step is complete. A step saved before is replaced. NaN and
    infinity become null in the metadata. Raises OSError naming the file where the disk is full or closed to us.
    """
    world_size = dist.get_world_size() if is_ddp_initialized() else 1
    if rank == 0:
        meta_path(checkpoint_dir, step).unlink(missing_ok=True)
    shard = optimizer_path(checkpoint_dir, step, rank)
    if optimizer_data is None:
        shard.unlink(missing_ok=True)
        written = [{}]
    else:
        written = [{shard.name: _save(shard, optimizer_data)}]
    if world_size > 1:
        own, written = written[0], [None] * world_size
        dist.all_gather_object(written, own)
    if rank == 0:
        for path in (path for owner, path in shards(checkpoint_dir, step).items() if owner >= world_size):
            path.unlink()  # of a run on more ranks
        model = model_path(checkpoint_dir, step)
        files = {model.name: _save(model, model_data)}
        for entries in written:
            files |= entries
        write_meta(checkpoint_dir, step, {**meta_data, "format": FORMAT, "files": files})
        say(f"saved step {step} to {checkpoint_dir}")
    if world_size > 1:
        dist.barrier()


def write_meta(checkpoint_dir, step, meta):
    write_json(meta_path(checkpoint_dir, step), seal(meta))


class _Measured:
    """A file for torch.save that counts and hashes what passes, and keeps the error that torch would replace."""

    def __init__(self, file):
        self.file, self.bytes, self.sha256, self.error = file, 0, hashlib.sha256(), None

    def write(self, data):
        self.sha256.update(data)
        self.bytes += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self):
        self.file.flush()


def _save(path, data) -> dict:
    """Write one file; its entry in the manifest."""
    with atomic_write(path) as f:
        file = _Measured(f)
        try:
            torch.save(data, file)
        except Exception:
            if file.error is not None:
                raise file.error from None
            raise
    return {"bytes": file.bytes, "sha256": file.sha256.hexdigest()}


# ---------------------------------------------------------------------------- finding


def shards(checkpoint_dir, step) -> dict[int, Path]:
    """{rank: path} of the optimizer shards of one step."""
    found = {}
    for path in Path(checkpoint_dir).glob(f"optim_{step:06d}_rank*.pt"):
        if match := re.fullmatch(r"optim_\d+_rank(\d+)\.pt", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def list_steps(checkpoint_dir) -> list[int]:
    """Complete steps in ascending order; empty for a folder that is not there."""
    names = os.listdir(checkpoint_dir) if os.path.isdir(checkpoint_dir) else []
    models = {int(match[1]) for name in names if (match := re.fullmatch(r"model_(\d{6,})\.pt", name))}
    metas = {int(match[1]) for name in names if (match := re.fullmatch(r"meta_(\d{6,})\.json", name))}
    return sorted(models & metas)


def newest_whole_step(checkpoint_dir, **how) -> int | None:
    """The newest complete step that check_step(..., **how) finds whole; None when no step is complete.

    Steps that are passed over are said. Raises ValueError when there are steps and none is whole.
    """
    problems = []
    for step in reversed(list_steps(checkpoint_dir)):
        try:
            check_step(checkpoint_dir, step, **how)
        except ValueError as error:
            say(f"passing over step {step}: {error}")
            problems.append(str(error))
        else:
            return step
    if problems:
        raise ValueError(f"{checkpoint_dir} has no whole checkpoint ({problems[0]}): delete the folder to begin anew")
    return None


def find_last_step(checkpoint_dir) -> int:
    """Newest complete step whose model has the size it was saved with. Raises FileNotFoundError when none is there."""
    step = newest_whole_step(checkpoint_dir)
    if step is None:
        raise FileNotFoundError(
            f"no complete checkpoint (model_*.pt with meta_*.json) in {checkpoint_dir}: train first"
        )
    return step


# ---------------------------------------------------------------------------- checking


def require_step(checkpoint_dir, step):
    """FileNotFoundError listing the steps there are, when `step` is not one of them."""
    if step not in list_steps(checkpoint_dir):
        steps = ", ".join(map(str, list_steps(checkpoint_dir))) or "none"
        raise FileNotFoundError(f"no complete step {step} in {checkpoint_dir}; complete steps: {steps}")


def check_step(checkpoint_dir, step, *, optimizer=False, hashes=False):
    """ValueError naming the first file of a complete step that is missing or not as it was written.

    Sizes are compared, with `hashes` also sha256, of the model and, with `optimizer`, of all shards. Steps without a
    manifest, older ones and upstream's, pass.
    """
    meta = read_meta(checkpoint_dir, step)
    if hashes and not seal_holds(meta):
        raise ValueError(f"{meta_path(checkpoint_dir, step)} is not what was saved: delete this step or choose another")
    for name, entry in meta.get("files", {}).items():
        if not optimizer and name != model_path(checkpoint_dir, step).name:
            continue
        path = Path(checkpoint_dir, os.path.basename(name))
        size = path.stat().st_size if path.exists() else None
        if size != entry["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes instead of {entry['bytes']}"
        elif hashes and file_sha256(path) != entry["sha256"]:
            found = "is not what was saved (its sha256 differs)"
        else:
            continue
        raise ValueError(f"{path} {found}: delete this step or choose another")


def read_meta(checkpoint_dir, step) -> dict:
    """The metadata of one step; ValueError naming the file that is damaged or of a newer version."""
    path = meta_path(checkpoint_dir, step)
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({first_line(error)}): delete this step or choose another") from error
    if not isinstance(meta, dict):
        raise ValueError(f"{path} holds no object: delete this step or choose another")
    if meta.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{path} has format {meta['format']!r}, this version reads {FORMAT}: use the code it is from")
    files = meta.get("files", {})
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys() for entry in files.values()
    ):
        raise ValueError(f"{path}: `files` is no list of sizes and hashes: delete this step or choose another")
    return meta


def read_tensors(path, device):
    """What torch.save wrote to `path`, tensors and plain containers only; nothing in it is run. ValueError names it."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch, zip and pickle raise many kinds
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {first_line(error)}): delete this step or choose another"
        ) from error


# ---------------------------------------------------------------------------- deleting


def delete_step(checkpoint_dir, step):
    """The metadata first, so that a kill in between leaves no step that looks complete."""
    meta_path(checkpoint_dir, step).unlink(missing_ok=True)
    for path in [*shards(checkpoint_dir, step).values(), model_path(checkpoint_dir, step)]:
        path.unlink(missing_ok=True)


def delete_leftovers(checkpoint_dir):
    """Remove what kills left: temporary files and the files of incomplete steps. Nobody may be saving there."""
    complete, left = set(list_steps(checkpoint_dir)), []
    for path in Path(checkpoint_dir).glob("*"):
        match = re.fullmatch(r"(?:model|optim|meta)_(\d{6,})(?:_rank\d+)?\.(?:pt|json)", path.name)
        if (match and int(match[1]) not in complete) or re.fullmatch(r"\..*\.tmp", path.name):
            left.append(path)
            path.unlink()
    if left:
        say(f"deleted what a stopped save left in {checkpoint_dir}: {', '.join(sorted(p.name for p in left))}")


def keep_newest(checkpoint_dir, count):
    """Delete all but the newest `count` complete steps, once the newest is read back as it was saved (ValueError)."""
    steps = list_steps(checkpoint_dir)
    older = steps[:-count]
    if older:
        check_step(checkpoint_dir, steps[-1], optimizer=True, hashes=True)
    for step in older:
        delete_step(checkpoint_dir, step)
