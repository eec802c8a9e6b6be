"""Memory and speed of a model whose tables stay in a file, in fresh processes: one per placement.

python -m nanochat.bench.resident is such a process: it reads JSON lines from stdin and answers each with one.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import tiktoken
import torch

from nanochat.bench.sides import clocked, milliseconds, random_model, ratio
from nanochat.bov.compiled import compile_fused
from nanochat.bov.placement import placed_tables
from nanochat.common import COMPUTE_DTYPE, compute_init
from nanochat.engine import KVCache
from nanochat.export import export_model, load_exported
from nanochat.tokenizer import BOS, SPECIAL_TOKENS, SPLIT_PATTERN, RustBPETokenizer

ROOT = Path(__file__).resolve().parents[2]
PLACEMENTS = ("device", "mmap")
PROMPT, TOKENS, BLOCK = 64, 256, 16  # tokens read, then decoded, and decoded by one process before it is another's turn


def stand_in_tokenizer(vocab_size):
    """A tokenizer of any size that an export accepts: bytes and pairs of bytes. ValueError below 265."""
    merges = vocab_size - 256 - len(SPECIAL_TOKENS)
    if not 0 <= merges <= 2**16:
        raise ValueError(f"--vocab-size {vocab_size}: the mmap part of the suite takes 265 to 65,801")
    ranks = {bytes([i]): i for i in range(256)} | {i.to_bytes(2, "big"): 256 + i for i in range(merges)}
    specials = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
    return RustBPETokenizer(tiktoken.Encoding("stand-in", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks,
                                              special_tokens=specials), BOS)  # fmt: skip


# ---------------------------------------------------------------------------- the child


def resident_bytes() -> dict[str, int]:
    """RssAnon and RssFile of this process, from Linux."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: 1024 * int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssFile:")}


def table_bytes(model) -> int:
    """Bytes of the tables of bank layers that are in memory."""
    tables = (banks[0].table.weight for banks in placed_tables(model).values())
    return sum(table.nbytes for table in tables if not table.is_meta)


def child():
    """First line {"folder", "placement", "device", "compile", "ids"}, then {"steps": n}; each answered by a line."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed goes to stderr
    start = json.loads(sys.stdin.readline())
    device = compute_init(start["device"])[-1]
    if start["compile"]:
        compile_fused(dynamic=True)
    model = load_exported(start["folder"], device, placement=start["placement"])[0]
    print(json.dumps(resident_bytes() | {"tables_in_memory": table_bytes(model)}), file=answer, flush=True)
    decoder = Decoder(model, torch.tensor([start["ids"]], device=device))
    while line := sys.stdin.readline():
        seconds = [decoder.step() for _ in range(json.loads(line)["steps"])]
        print(json.dumps({"seconds": seconds} | resident_bytes()), file=answer, flush=True)


class Decoder:
    """Reads PROMPT of ids (1, T) in one forward, then one more at every step."""

    @torch.inference_mode()
    def __init__(self, model, ids):
        config = model.config
        self.model, self.ids = model, ids
        self.cache = KVCache(
            batch_size=1, num_heads=config.n_kv_head, seq_len=ids.size(1), head_dim=config.n_embd // config.n_head,
            num_layers=config.n_layer, device=ids.device, dtype=COMPUTE_DTYPE, value_layers=model.value_layers,
        )  # fmt: skip
        model(ids[:, :PROMPT], kv_cache=self.cache)

    @torch.inference_mode()
    def step(self) -> float:
        at = self.cache.get_pos()
        return clocked(self.ids.device, lambda: self.model(self.ids[:, at : at + 1], kv_cache=self.cache))[0]


# ---------------------------------------------------------------------------- the parent


class Process:
    """One running child: it answers its start, then every message, by a line."""

    def __init__(self, **start):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nanochat.bench.resident"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=ROOT,
        )  # fmt: skip
        self.say(start)

    def say(self, message):
        print(json.dumps(message), file=self.process.stdin, flush=True)

    def hear(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the mmap section ended with code {self.process.wait()}")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def mmap(setting) -> dict:
    """Resident memory after loading and after TOKENS decoded tokens, and step time: tables in memory, in the file."""
    context = PROMPT + TOKENS
    config = replace(setting.config, sequence_len=context)
    model = random_model(config, torch.device("cpu"), setting.seed, context)
    tables = table_bytes(model)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = stand_in_tokenizer(config.vocab_size)
        export_model(model, tokenizer, folder, fold_gamma=True, dtype=COMPUTE_DTYPE)
        del model
        start = dict(folder=folder, device=setting.device.type, compile=setting.compiled)
        start["ids"] = setting.ids.draw(1, context)[0].tolist()
        running = {where: Process(placement=where, **start) for where in PLACEMENTS}
        blocks = {where: [] for where in PLACEMENTS}
        loaded = {where: process.hear() for where, process in running.items()}
        for _ in range(TOKENS // BLOCK):
            for where, process in running.items():
                process.say({"steps": BLOCK})
                blocks[where].append(process.hear())
        for process in running.values():
            process.close()
    return _report(tables, loaded, blocks)


def _report(tables, loaded, blocks) -> dict:
    after = {where: {name: blocks[where][-1][name] for name in ("RssAnon", "RssFile")} for where in PLACEMENTS}
    saved = sum(after["device"].values()) - sum(after["mmap"].values())
    times = {where: [s for block in blocks[where][1:] for s in block["seconds"]] for where in PLACEMENTS}
    found = {
        "prompt": PROMPT, "tokens": TOKENS, "tables_bytes": tables,
        "resident_loaded": loaded, "resident": after,
        "saved_bytes": saved, "saved_share": saved / tables,
        "ms": {where: milliseconds(seconds) for where, seconds in times.items()},
        "ratios": {"mmap / device": ratio(times, "mmap", "device")},
    }  # fmt: skip
    print(
        f"  tables {tables / 1e6:.1f} MB; resident with device {sum(after['device'].values()) / 1e6:.1f} MB, with mmap "
        f"{sum(after['mmap'].values()) / 1e6:.1f} MB: lower by {found['saved_share']:.0%} of the tables\n"
        f"  step, ms: device {found['ms']['device']['median']:.4g}, mmap {found['ms']['mmap']['median']:.4g}; "
        f"mmap / device {found['ratios']['mmap / device']['median']:.3f}",
        flush=True,
    )
    return found


if __name__ == "__main__":
    child()
