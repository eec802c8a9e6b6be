"""Rows of tokens from parquet shards: every row begins with BOS, documents packed best-fit, order free of ranks.

Row groups, counted over all shards and epochs, are dealt to S virtual streams: stream s reads groups s, s + S,
s + 2S, ... and packs its documents into rows of its own. Row g of the run is the next row of stream g mod S, and rank
r of W takes the rows with g mod W = r. S follows from the data alone, so any W that divides S sees the same rows, and
the streams' positions resume a run on any such number of ranks.

Packing as upstream's: the largest document in the buffer that fits what is left of the row, else the shortest one
cropped to it; what a crop cuts off is discarded. A stream uses up one epoch before it reads on into the next.

Shapes: B rows per batch, T inputs per row; a packed row holds T + 1 tokens.
"""

import queue
import threading
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from math import inf

import numpy as np
import torch

from nanochat.common import get_dist_info
from nanochat.dataset import data_identity, open_shard, read_row_group, split_paths

MAX_STREAMS = 64
PREFETCH = 4  # batches made ahead
JOIN_SECONDS = 60  # for a batch that is being made

# ---------------------------------------------------------------------------- what is dealt


@dataclass(frozen=True)
class Deal:
    """How one split is dealt: `groups` (shard, row group) in order, documents in all, streams, buffer per stream."""

    split: str
    paths: tuple
    groups: tuple
    documents: int
    streams: int
    buffer: int


def deal(split, buffer_size=1000, streams=None, part=1.0) -> Deal:
    """The Deal of "train" or "val"; `buffer_size` documents are held by all streams together.

    Streams: the largest power of two up to 64 that leaves each a row group and 8 documents, unless given.
    `part`: only the first so many of the row groups, at least one.
    """
    if not 0 < part <= 1:
        raise ValueError(f"--train-part {part}: above 0 and at most 1")
    paths = tuple(split_paths(split))
    metadata = [open_shard(path).metadata for path in paths]
    groups = tuple((i, j) for i, shard in enumerate(metadata) for j in range(shard.num_row_groups))
    groups = groups[: max(1, round(part * len(groups)))]
    documents = sum(metadata[i].row_group(j).num_rows for i, j in groups)
    if documents == 0:
        raise ValueError(f"{paths[0]}: no documents in split {split}; give it text")
    most = min(MAX_STREAMS, len(groups), max(1, documents // 8))
    streams = streams or 1 << (most.bit_length() - 1)
    buffer = max(4, min(buffer_size // streams, documents // (4 * streams)))
    return Deal(split, paths, groups, documents, streams, buffer)


class Stream:
    """One stream's documents and its packer.

    `index`: which stream of `plan`; `epochs`: stop after so many (None: go on for ever); `state`: a position() to go
    on from. Counts `documents_read`, `tokens_read` and `tokens_kept`.
    """

    def __init__(self, index, plan, tokenizer, T, *, threads=4, chunk=128, epochs=None, state=None):
        self.index, self.plan, self.tokenizer, self.capacity = index, plan, tokenizer, T + 1
        self.threads, self.chunk, self.epochs = threads, chunk, epochs
        self.group, self.document = index, 0  # the next document to enter the buffer
        self.texts = None  # of self.group, once read
        self.ahead = []  # tokens of the documents from self.document on
        self.buffer = []  # sorted (length, group, document)
        self.tokens = {}  # (group, document) -> int32 array
        self.last = (index, 0)  # the document used last
        self.documents_read = self.tokens_read = self.tokens_kept = 0
        if state is not None:
            self._restore(state)

    def position(self):
        """JSON-ready: the next document, and those that wait in the buffer, as [row group, document] counters."""
        waiting = sorted(key for _, *key in self.buffer)
        return {"next": [self.group, self.document], "buffer": waiting, "last": list(self.last)}

    def close(self):
        """Read no further document; row() packs those in the buffer and then ends."""
        self.epochs = self._epoch(self.group)

    def _restore(self, state):
        (self.group, self.document), self.last = state["next"], tuple(state["last"])
        wanted = {}
        for group, document in state["buffer"]:
            wanted.setdefault(group, []).append(document)
        for group, documents in wanted.items():
            texts = self._read(group)
            for document, row in zip(documents, self._encode(texts.take(documents).to_pylist()), strict=True):
                self._keep(group, document, row)

    def _read(self, group):
        shard, row_group = self.plan.groups[group % len(self.plan.groups)]
        return read_row_group(self.plan.paths[shard], row_group)

    def _encode(self, texts):
        rows = self.tokenizer.encode(texts, prepend=self.tokenizer.get_bos_token_id(), num_threads=self.threads)
        return [np.array(row, dtype=np.int32) for row in rows]

    def _keep(self, group, document, row):
        insort(self.buffer, (len(row), group, document))
        self.tokens[group, document] = row
        self.documents_read += 1
        self.tokens_read += len(row)

    def _epoch(self, group):
        return group // len(self.plan.groups)

    def _fill(self, last_group):
        """Read documents until the buffer is full or the epoch of what it holds ends; not beyond `last_group`."""
        while len(self.buffer) < self.plan.buffer:
            epoch = self._epoch(self.group)
            if epoch == self.epochs or (self.buffer and epoch != self._epoch(self.buffer[0][1])):
                return
            if self.group > last_group:
                raise ValueError(self.too_little())
            if self.texts is None:
                self.texts = self._read(self.group)
            if self.document >= len(self.texts):
                self.group, self.document, self.texts = self.group + self.plan.streams, 0, None
                continue
            if not self.ahead:
                self.ahead = self._encode(self.texts.slice(self.document, self.chunk).to_pylist())[::-1]
            self._keep(self.group, self.document, self.ahead.pop())
            self.document += 1

    def row(self, out):
        """Pack the next row into `out` (T + 1,); False when the last epoch has no full row left.

        Raises ValueError when a whole epoch of this stream does not fill one row.
        """
        at, last_group = 0, self.group + len(self.plan.groups) + self.plan.streams
        while at < self.capacity:
            self._fill(last_group)
            if not self.buffer:
                return False
            at += self._place(out[at:])
        self.tokens_kept += self.capacity
        return True

    def _place(self, space):
        """Put the best document into `space`; returns how many tokens of it found room."""
        fits = bisect_right(self.buffer, (len(space), inf)) - 1
        which = bisect_left(self.buffer, (self.buffer[fits][0],)) if fits >= 0 else 0
        _, *self.last = self.buffer.pop(which)
        row = self.tokens.pop(tuple(self.last))[: len(space)]
        space[: len(row)] = row
        return len(row)

    def too_little(self):
        return (
            f"{self.plan.paths[0]}: split {self.plan.split} has not one full row of {self.capacity} tokens in stream "
            f"{self.index} of {self.plan.streams}; give it more text or lower --max-seq-len"
        )


# ---------------------------------------------------------------------------- endless, over ranks


def tokenizing_distributed_data_loader_with_state_bos_bestfit(
    tokenizer, B, T, split, tokenizer_threads=4, tokenizer_batch_size=128, device="cuda", resume_state_dict=None,
    buffer_size=1000, part=1.0,
):  # fmt: skip
    """Endless iterator of (inputs, targets, state): (B, T) int64 on `device`, this rank's share of the rows.

    `split` is train or val; `tokenizer_threads` and `tokenizer_batch_size` (documents) only change the speed;
    `buffer_size` documents wait in all packers together; `part`: see deal. `state` is JSON-ready, stands for
    everything up to and including its batch, and holds upstream's pq_idx, rg_idx and epoch (from 1).
    `resume_state_dict` is what merge_states makes of all ranks' states. Batches are made ahead in a thread.
    Raises ValueError, on the call or instead of a batch: no or damaged data, a number of ranks that does not divide
    the streams, a state of other data (naming the field).
    """
    _check_sizes(B, T)
    _, rank, _, world_size = get_dist_info()
    plan = deal(split, buffer_size, part=part)
    if plan.streams % world_size:
        valid = ", ".join(str(1 << i) for i in range(plan.streams.bit_length()))
        raise ValueError(
            f"{world_size} ranks cannot share the {len(plan.groups)} row groups of split {split} ({plan.paths[0]}): "
            f"use {valid} ranks, or write the shards with more and smaller row groups"
        )
    identity = {
        "split": split, "data_sha256": data_identity()[f"{split}_sha"], "tokenizer_sha256": tokenizer.sha256(),
        "T": T, "streams": plan.streams, "buffer": plan.buffer, "groups": len(plan.groups),
    }  # fmt: skip
    mine = range(rank, plan.streams, world_size)
    saved = _check_state(resume_state_dict, identity, mine) if resume_state_dict else {"row": 0, "streams": {}}

    def batches():
        streams = {
            i: Stream(
                i, plan, tokenizer, T, threads=tokenizer_threads, chunk=tokenizer_batch_size,
                state=saved["streams"].get(str(i)),
            )
            for i in mine
        }  # fmt: skip
        positions = {str(i): stream.position() for i, stream in streams.items()}
        row = saved["row"]
        while True:
            rows = np.empty((B, T + 1), dtype=np.int64)
            first = row + (rank - row) % world_size
            order = [(first + b * world_size) % plan.streams for b in range(B)]
            for out, index in zip(rows, order, strict=True):
                streams[index].row(out)
            positions.update((str(index), streams[index].position()) for index in set(order))
            row += B * world_size
            stream = streams[order[-1]]
            shard, row_group = plan.groups[stream.last[0] % len(plan.groups)]
            epoch = stream.last[0] // len(plan.groups) + 1
            state = {"pq_idx": shard, "rg_idx": row_group, "epoch": epoch, "row": row, "streams": dict(positions)}
            yield _pair(rows), {**state, "identity": identity}

    return _endless(batches, torch.device(device))


def tokenizing_distributed_data_loader_bos_bestfit(*args, **kwargs):
    """The same without the state: endless iterator of (inputs, targets)."""
    batches = tokenizing_distributed_data_loader_with_state_bos_bestfit(*args, **kwargs)
    return ((inputs, targets) for inputs, targets, _ in batches)


def merge_states(states):
    """One state from those that all ranks hold after the same step; it resumes on any number of ranks.

    Raises ValueError when they stand at different rows or different data.
    """
    first = states[0]
    for field in ("row", "identity"):
        if any(state[field] != first[field] for state in states):
            raise ValueError(f"the ranks' data states differ in {field}: they must be saved after the same step")
    streams = {index: position for state in states for index, position in state["streams"].items()}
    streams = {index: streams[index] for index in sorted(streams, key=int)}
    return {**first, "epoch": max(state["epoch"] for state in states), "streams": streams}


def _check_state(state, identity, mine):
    missing = [field for field in ("row", "streams", "identity") if field not in state]
    if missing:
        raise ValueError(f"data state without {missing[0]}: upstream's states cannot be resumed exactly; start anew")
    for field, value in identity.items():
        found = state["identity"].get(field)
        if found != value:
            raise ValueError(f"data state of another run: {field} was {found}, is {value}; resume with the same data")
    absent = [i for i in mine if str(i) not in state["streams"]]
    if absent:
        raise ValueError(f"data state without stream {absent[0]}: merge_states joins the states of all ranks")
    return state


def _endless(batches, device):
    """Move batches to the device as they come out of the thread that makes them."""
    for pair, state in _in_thread(batches):
        inputs, targets = _to_device(pair, device)
        yield inputs, targets, state


def _in_thread(make):
    """Iterate make() in a thread, PREFETCH items ahead. Its exceptions come out here; closing ends the thread first.

    A thread that Python finds inside a library's C++ code when it exits makes the process abort.
    """
    ready, stop = queue.Queue(PREFETCH), threading.Event()

    def put(item):
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                pass

    def work():
        try:
            for item in make():
                put((item, None))
                if stop.is_set():
                    return
        except BaseException as error:
            put((None, error))

    thread = threading.Thread(target=work, name="dataloader", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            yield item
    finally:
        stop.set()
        thread.join(JOIN_SECONDS)


def _pair(rows):
    """(2, B, T) inputs and targets of packed rows, contiguous, for one copy to the device."""
    return torch.from_numpy(np.stack([rows[:, :-1], rows[:, 1:]]))


def _to_device(pair, device):
    if device.type == "cuda":
        pair = pair.pin_memory().to(device, non_blocking=True)
    else:
        pair = pair.to(device)
    return pair[0], pair[1]


def _check_sizes(B, T):
    if B < 1 or T < 1:
        raise ValueError(f"--device-batch-size {B} and --max-seq-len {T} must be at least 1")


# ---------------------------------------------------------------------------- once


class OnePassLoader:
    """Every full packed row of a split exactly once; may be iterated again and again.

    Yields (inputs, targets), (B, T) int64; rank r of W gets rows r, r + W, ...; all ranks get len(self) batches, and
    what they lack is rows of BOS with target -1. `num_rows` over all ranks; `discard` is the part of the split's
    tokens that packing threw away. Rows do not depend on the number of ranks.
    """

    def __init__(self, tokenizer, B, T, split, device="cuda", tokenizer_threads=4, buffer_size=1000):
        _check_sizes(B, T)
        _, rank, _, world_size = get_dist_info()
        plan = deal(split, buffer_size, streams=1)
        stream = Stream(0, plan, tokenizer, T, threads=tokenizer_threads, epochs=1)
        mine, row, self.num_rows = [], np.empty(T + 1, dtype=np.int32), 0
        while stream.row(row):
            if self.num_rows % world_size == rank:
                mine.append(row.copy())
            self.num_rows += 1
        if self.num_rows == 0:
            raise ValueError(stream.too_little())
        self.discard = 1 - stream.tokens_kept / stream.tokens_read
        self.rows = np.array(mine, dtype=np.int32).reshape(-1, T + 1)
        self.B, self.T, self.device, self.bos = B, T, torch.device(device), tokenizer.get_bos_token_id()
        self.per_rank = -(-self.num_rows // world_size)

    def __len__(self):
        return -(-self.per_rank // self.B)

    def __iter__(self):
        for start in range(0, len(self) * self.B, self.B):
            rows = self.rows[start : start + self.B].astype(np.int64)
            pair = torch.empty((2, self.B, self.T), dtype=torch.long)
            pair[0], pair[1] = self.bos, -1
            pair[:, : len(rows)] = _pair(rows)
            yield _to_device(pair, self.device)


def one_pass_loader(tokenizer, B, T, split, device="cuda"):
    return OnePassLoader(tokenizer, B, T, split, device)


# ---------------------------------------------------------------------------- what packing costs


def packing_report(tokenizer, T, split="train", max_rows=None, part=1.0):
    """What one epoch of a split gives at context T, measured on all of it or on the documents of `max_rows` rows.

    {documents, tokens_per_document (BOS included), discard (part of the tokens thrown away), rows_per_epoch,
    tokens_per_epoch (rows * T), fresh_rows (rows of a run before its first stream repeats a document), exact}.
    Where `max_rows` cuts the epoch short the counts are extrapolated from the documents read by then, all of which are
    packed first, and fresh_rows is None.
    """
    _check_sizes(1, T)
    plan = deal(split, part=part)
    streams = [Stream(i, plan, tokenizer, T, epochs=1) for i in range(plan.streams)]
    row, rows, fresh_rows, exact, live = np.empty(T + 1, dtype=np.int32), 0, None, True, list(streams)
    while live:
        if rows == max_rows and exact:
            exact = False
            for stream in streams:
                stream.close()
        stream = live.pop(0)
        if stream.row(row):
            rows += 1
            live.append(stream)
        elif fresh_rows is None:
            fresh_rows = rows
    if rows == 0:
        raise ValueError(streams[0].too_little())
    tokens = sum(stream.tokens_read for stream in streams)
    share = sum(stream.documents_read for stream in streams) / plan.documents
    rows_per_epoch = rows if exact else round(rows / share)
    return {
        "documents": plan.documents,
        "tokens_per_document": tokens / (share * plan.documents),
        "discard": 1 - rows * (T + 1) / tokens,
        "rows_per_epoch": rows_per_epoch,
        "tokens_per_epoch": rows_per_epoch * T,
        "fresh_rows": fresh_rows if exact else None,
        "exact": exact,
    }
