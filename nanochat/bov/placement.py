"""Where the tables of bank layers live while decoding: on the compute device, in host memory, or in a file.

A table (Table below) answers one question, rows by token id; the pool of decode.py asks once per distinct token, so a
slow home costs each token its first appearance only. Only tables of layers that cache no V are placed.
Shapes: H kv heads, D head dim, V padded vocab, U distinct tokens, n ids asked for.
"""

import ctypes
import json
import math
import os
import threading
import weakref
from typing import NamedTuple, Protocol

import torch
import torch.nn as nn
import torch.nn.functional as F

PLACEMENTS = ("device", "host", "mmap")

# ---------------------------------------------------------------------------- safetensors files

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
MAX_HEADER = 100_000_000  # bytes, the limit of the format's own library
MAX_DIMS = 8


class Entry(NamedTuple):
    """One tensor of a file: `start` and `nbytes` say where in the file it lies."""

    dtype: torch.dtype
    shape: tuple
    start: int
    nbytes: int


class SafetensorsFile:
    """The tensors of a safetensors file, each read on demand with pread into fresh memory; nothing is mapped.

    `path`; `metadata` {str: str}; `entries` {key: Entry}. Raises ValueError naming the file when it is missing, is not
    of the format, contradicts itself or its own size, or ends early while it is read.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        if not os.path.isfile(self.path):
            self._fail("no such file")
        try:
            self._fd = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            self._fail(error.strerror)
        weakref.finalize(self, os.close, self._fd)
        size = os.fstat(self._fd).st_size
        header = self._header(size)
        self.metadata = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict) or not all(type(text) is str for text in self.metadata.values()):
            self._fail("__metadata__ is not a dictionary of strings")
        self.entries = {key: self._entry(key, value, size) for key, value in header.items()}
        self._check_order(size)

    def _check_order(self, size):
        """The format has no gaps, no overlap and nothing behind the last tensor."""
        end = self._data
        for key, entry in sorted(self.entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
            if entry.start != end:
                self._fail(f"{key} begins at byte {entry.start}, the tensor before it ends at {end}")
            end += entry.nbytes
        if end != size:
            self._fail(f"{size - end} bytes behind the last tensor")

    def _fail(self, problem):
        raise ValueError(f"{self.path}: {problem}")

    def _header(self, size) -> dict:
        """Parsed JSON header of a file of `size` bytes; leaves `self._data`, where the tensors begin."""
        if size < 8:
            self._fail(f"{size} bytes are no safetensors file")
        length = int.from_bytes(self._bytes(0, 8), "little")
        if length > min(size - 8, MAX_HEADER):
            self._fail(f"claims a header of {length} bytes in a file of {size}: cut off, or no safetensors file")
        self._data = 8 + length
        try:
            header = json.loads(self._bytes(8, length).decode("utf-8"), object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            self._fail(f"the header is not JSON ({error})")
        if not isinstance(header, dict):
            self._fail("the header is not a JSON object")
        return header

    def _entry(self, key, value, size) -> Entry:
        """The checked description of one tensor of a file of `size` bytes."""
        if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
            self._fail(f"{key} lacks dtype, shape or data_offsets")
        shape, offsets = value["shape"], value["data_offsets"]
        if not isinstance(value["dtype"], str) or value["dtype"] not in DTYPES:
            self._fail(f"{key} has dtype {value['dtype']!r}; known are {', '.join(DTYPES)}")
        dtype = DTYPES[value["dtype"]]
        if not _sizes(shape) or len(shape) > MAX_DIMS or math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**63:
            self._fail(f"{key} has the shape {str(shape)[:80]}")
        if not _sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - self._data:
            self._fail(f"{key} is said to lie at {str(offsets)[:80]} of {size - self._data} bytes: the file is cut off")
        nbytes = math.prod(shape) * dtype.itemsize
        if offsets[1] - offsets[0] != nbytes:
            self._fail(f"{key} has {offsets[1] - offsets[0]} bytes, its shape {shape} in {value['dtype']} {nbytes}")
        return Entry(dtype, tuple(shape), self._data + offsets[0], nbytes)

    def _bytes(self, start, length) -> bytearray:
        found = bytearray(length)
        self.read(start, memoryview(found))
        return found

    def read(self, start, view):
        """Fill the writable memoryview `view` with the bytes of the file from `start` on."""
        while len(view):
            try:
                count = os.preadv(self._fd, [view], start)
            except OSError as error:
                self._fail(f"cannot be read ({error.strerror})")
            if count == 0:
                self._fail("ends early: it was cut off after it was opened")
            view, start = view[count:], start + count

    def keys(self) -> list[str]:
        return list(self.entries)

    def entry(self, key) -> Entry:
        """The entry of one tensor; ValueError when the file has none of that name."""
        if key not in self.entries:
            self._fail(f"no tensor {key} among its {len(self.entries)}: {', '.join(self.keys()[:5])} ...")
        return self.entries[key]

    def tensor(self, key) -> torch.Tensor:
        """One whole tensor on the CPU."""
        entry = self.entry(key)
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(entry.start, _memory(tensor))
        return tensor


def _without_repeats(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _sizes(value) -> bool:
    """Whether `value` is a list of whole numbers from 0 on."""
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _memory(tensor):
    """A writable memoryview of a contiguous CPU tensor, valid while the tensor lives."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


# ---------------------------------------------------------------------------- tables


class Table(Protocol):
    """What decoding knows of a table.

    vocab: rows V; width: H * D; device and dtype: where rows land, and as what; weight: (V, H * D) on that device, or
    None when it is not there. fetch: ids (n,) int64 on any device, in any order, repeats allowed -> rows (n, H * D).
    """

    vocab: int
    width: int
    dtype: torch.dtype
    device: torch.device
    weight: torch.Tensor | None

    def fetch(self, ids) -> torch.Tensor: ...


class OnDevice:
    """A table that stays where the model has it: an nn.Embedding, whose weight is looked up at each use."""

    def __init__(self, embedding):
        self.embedding = embedding
        self.vocab, self.width = embedding.num_embeddings, embedding.embedding_dim

    @property
    def weight(self):
        return self.embedding.weight

    @property
    def dtype(self):
        return self.weight.dtype

    @property
    def device(self):
        return self.weight.device

    def fetch(self, ids):
        return F.embedding(ids.to(self.device), self.weight)


FEW_ROWS = 8  # up to here each row is copied from the pinned table itself


class OnHost:
    """A table in CPU memory whose rows land on `device`; an embedding on another device moves, and frees that memory.

    pin: page-lock the table where `device` is CUDA, in place, so that it counts once. None = yes, unless NANOCHAT_PIN=0
    or the GPU shares the CPU's memory. Raises ValueError when the system refuses to lock so much.
    """

    weight = None

    def __init__(self, embedding, device, pin=None):
        self.device = torch.device(device)
        self.vocab, self.width = embedding.num_embeddings, embedding.embedding_dim
        embedding.to("cpu")
        self.table = embedding.weight.detach()
        self.pinned = self.device.type == "cuda" and (_wants_pinning(self.device) if pin is None else pin)
        if self.pinned:
            _pin(self, self.table)

    @property
    def dtype(self):
        return self.table.dtype

    def fetch(self, ids):
        ids = _checked(ids, self.vocab)
        if self.pinned and len(ids) <= FEW_ROWS:
            rows = torch.empty(len(ids), self.width, dtype=self.dtype, device=self.device)
            for row, i in zip(rows, ids.tolist(), strict=True):
                row.copy_(self.table[i], non_blocking=True)
            return rows
        rows = torch.empty(len(ids), self.width, dtype=self.dtype, pin_memory=self.pinned)
        torch.index_select(self.table, 0, ids, out=rows)
        return rows.to(self.device, non_blocking=self.pinned)


def _wants_pinning(device) -> bool:
    shared = torch.cuda.get_device_properties(device).is_integrated
    return os.environ.get("NANOCHAT_PIN", "1") != "0" and not shared


def _pin(owner, tensor):
    """Page-lock a tensor for as long as `owner` lives. Registering needs no copy and rounds no size up."""
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if code != 0:
        raise ValueError(f"{tensor.nbytes} bytes of a table cannot be pinned (CUDA error {code}): set NANOCHAT_PIN=0")
    weakref.finalize(owner, cudart.cudaHostUnregister, tensor.data_ptr())


BUFFER_BYTES = 1 << 18


class OnDisk:
    """A table in a safetensors file: rows are read with pread when asked for, and never more than those.

    Rows land on `device` as `dtype` (None = as stored). Ids that follow one another are one read of up to 256 KiB.
    Raises ValueError naming the file when the tensor is missing or is no table of floats.
    """

    weight = None

    def __init__(self, path, key, device, dtype=None):
        self.file, self.key, self.device = SafetensorsFile(path), key, torch.device(device)
        entry = self.file.entry(key)
        if len(entry.shape) != 2 or 0 in entry.shape or not entry.dtype.is_floating_point:
            raise ValueError(f"{path}: {key} is {entry.dtype} of shape {list(entry.shape)}, not a table of rows")
        self.vocab, self.width = entry.shape
        self.dtype = dtype or entry.dtype
        self._start, self._row_bytes = entry.start, self.width * entry.dtype.itemsize
        self._buffer = torch.empty(max(1, BUFFER_BYTES // self._row_bytes), self.width, dtype=entry.dtype)
        self._view = _memory(self._buffer)
        self._lock = threading.Lock()  # one buffer for all threads

    def fetch(self, ids):
        ids, order = _checked(ids, self.vocab).sort()
        rows = torch.empty(len(ids), self.width, dtype=self.dtype, device=self.device)
        with self._lock:
            for part, places in zip(ids.split(len(self._buffer)), order.split(len(self._buffer)), strict=True):
                rows.index_copy_(0, places.to(self.device), self._read(part).to(self.device, self.dtype))
        return rows

    def _read(self, ids):
        """The rows of ascending ids, no more than the buffer has; one read per run of neighbours."""
        distinct = list(dict.fromkeys(ids.tolist()))
        size, begin = self._row_bytes, 0
        for end in range(1, len(distinct) + 1):
            if end == len(distinct) or distinct[end] != distinct[end - 1] + 1:
                self.file.read(self._start + distinct[begin] * size, self._view[begin * size : end * size])
                begin = end
        if len(distinct) == len(ids):
            return self._buffer[: len(ids)]
        return self._buffer[ids.unique_consecutive(return_inverse=True)[1]]


def _checked(ids, vocab):
    """ids (n,) on the CPU; ValueError for one that is no row of the table."""
    ids = ids.to("cpu")
    if len(ids):
        low, high = (int(extreme) for extreme in ids.aminmax())
        if low < 0 or high >= vocab:
            raise ValueError(f"token id {low if low < 0 else high} is outside the table's rows 0..{vocab - 1}")
    return ids


def verify(table, ids, rows):
    """Fetch again what a pool holds and compare every bit: ids (U,), rows (U, H * D) in the table's dtype.

    Raises ValueError naming the first token whose row differs.
    """
    for some, held in zip(ids.split(4096), rows.split(4096), strict=True):
        fresh = table.fetch(some).detach()
        wrong = (fresh.view(torch.uint8) != held.to(fresh.device).contiguous().view(torch.uint8)).any(-1)
        if wrong.any():
            raise ValueError(f"the row of token {int(some[wrong.to(some.device)][0])} is not the one in the table")


# ---------------------------------------------------------------------------- models


def placed_tables(model) -> dict:
    """{key in the state dict: banks that read it} for every table that can be placed: of layers without a V cache."""
    users = {}
    for block in model.transformer.h:
        bank = block.attn.bank
        if not bank.spec.caches_value:
            users.setdefault(f"value_embeds.{bank.spec.table}.weight", []).append(bank)
    return users


def check_placement(model, where, path=None):
    """ValueError, naming the flag, for a `where` not in PLACEMENTS, without tables to place, or mmap without a file."""
    if where not in PLACEMENTS:
        raise ValueError(f"--bov-placement {where!r}: use one of {', '.join(PLACEMENTS)}")
    if where != "device" and not placed_tables(model):
        raise ValueError(f"--bov-placement {where}: no layer of this model does without a V cache; use device")
    if where == "mmap" and path is None:
        raise ValueError("--bov-placement mmap reads an exported model: make one with python -m scripts.bov_export")


def place(model, where, path=None):
    """Let the bank layers of a loaded model read their tables from `where`, one of PLACEMENTS, from now on.

    host: the tables leave the device's memory. mmap: they leave memory (their parameters stay, on the meta device) and
    rows come from `path`, a safetensors file under the model's own keys. device: they come back.
    Raises ValueError as check_placement does, and for a file whose tables are not those of the model.
    """
    check_placement(model, where, path)
    device, users = model.transformer.wte.weight.device, placed_tables(model)
    if where == "mmap":  # every table is checked before one moves
        files = {key: _on_disk(path, key, banks[0].table, device) for key, banks in users.items()}
    for key, banks in users.items():
        if where == "mmap":
            home, banks[0].table.weight = files[key], _frozen(banks[0].table.weight.to("meta"))
        else:
            home = _in_memory(banks, where, device)
        for bank in banks:
            bank.rows = home


def _frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


def _in_memory(banks, where, device):
    """The home of a table in the memory of `device` or of the host, brought there if need be."""
    table = banks[0].table
    if table.weight.is_meta:
        table.weight = _frozen(banks[0].rows.fetch(torch.arange(table.num_embeddings)))
    for bank in banks:
        bank.rows = None  # lets go of memory pinned before
    return OnHost(table, device) if where == "host" else OnDevice(table.to(device))


def _on_disk(path, key, table, device):
    """The home of a table in a file; ValueError unless it has the table's shape and, where they are in memory, rows."""
    home = OnDisk(path, key, device, table.weight.dtype)
    if (home.vocab, home.width) != tuple(table.weight.shape):
        raise ValueError(f"{path}: {key} is {home.vocab} x {home.width}, the model's {tuple(table.weight.shape)}")
    if not table.weight.is_meta:
        try:
            verify(home, torch.arange(home.vocab), table.weight.detach())
        except ValueError as error:
            raise ValueError(f"{path}: {key} is not the model's ({error}): load the exported model itself") from error
    return home
