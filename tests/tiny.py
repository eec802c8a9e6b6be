"""A tiny corpus with its tokenizer, and the flags of a run on it that takes a second."""

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import seal
from nanochat.tokenizer import RustBPETokenizer, save_token_bytes

TEXT = [f"Document {i} counts {i * 7 % 31} apples, {i * 3 % 17} pears and one tree. " * (1 + i % 4) for i in range(400)]
TINY = [
    "--depth", "3", "--aspect-ratio", "16", "--head-dim", "8", "--max-seq-len", "32", "--device-batch-size", "4",
    "--total-batch-size", "256", "--device-type", "cpu", "--eval-every", "4", "--eval-tokens", "-1",
    "--core-metric-every", "-1", "--sample-every", "-1", "--model-tag", "t",
]  # fmt: skip
PARTS = ("tokenizer", "base_data_climbmix")


def make_corpus(folder, train=TEXT[:360], val=TEXT[360:], merges=40, rows=20, manifest=False):
    """A tokenizer and shards in row groups of `rows` in `folder`; with `manifest` source.json lists their hashes."""
    folder = Path(folder)
    tokenizer = RustBPETokenizer.train_from_iterator(iter([*train, *val]), 256 + 9 + merges)
    tokenizer.save(str(folder / "tokenizer"))
    save_token_bytes(tokenizer, str(folder / "tokenizer"))
    data = folder / "base_data_climbmix"
    data.mkdir()
    for name, part in (("shard_00000", train), ("shard_06542", val)):
        pq.write_table(pa.table({"text": part}), data / f"{name}.parquet", row_group_size=rows)
    if manifest:
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in data.glob("*.parquet")}
        facts = {"source": "text:tiny", "train_text_sha256": "train", "val_text_sha256": "val", "files": files}
        (data / "source.json").write_text(json.dumps(seal(facts)))
    return folder


def link_corpus(corpus, base):
    """A base directory of its own that shares the corpus."""
    Path(base).mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        Path(base, name).symlink_to(Path(corpus, name))
    return Path(base)
