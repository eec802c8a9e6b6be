"""Tables on the device, in host memory and in a file: the same bits, no byte more than asked for, damage named."""

import ast
import gc
import json
import os
import struct
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from models import build
from nanochat.bov import placement
from nanochat.bov.placement import OnDevice, OnDisk, OnHost, SafetensorsFile, place, verify

V, W = 97, 12
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
BANKED = {"ve_layers": "every:2", "bov_layers": "2,3"}
IDS = torch.arange(12).view(1, 12) * 7 % 50


def any_bits(dtype, *shape, seed=0):
    """A tensor of random bits: NaN and infinity with every payload among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def embedding(weight):
    return nn.Embedding(*weight.shape, _weight=weight)


TABLES = {str(dtype): any_bits(dtype, V, W) for dtype in FLOATS}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file with a table of each dtype between tensors of other shapes."""
    path = tmp_path_factory.mktemp("tables") / "model.safetensors"
    others = {"a": torch.arange(5), "scalar": torch.tensor(2.0), "z": torch.ones(3, 0)}
    save_file(TABLES | others, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def reads(monkeypatch):
    """(offset, bytes) of every read from a file."""
    done, preadv = [], os.preadv

    def spy(fd, views, start):
        done.append((start, sum(map(len, views))))
        return preadv(fd, views, start)

    monkeypatch.setattr(os, "preadv", spy)
    return done


# ---------------------------------------------------------------------------- rows


@pytest.fixture(scope="module", params=FLOATS, ids=lambda dtype: str(dtype).split(".")[1])
def homes(request, path):
    """The table of one dtype and its three homes; the one on disk with a buffer of 5 rows."""
    table = TABLES[str(request.param)].clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "BUFFER_BYTES", 5 * W * table.element_size() + 1)
        disk = OnDisk(path, str(request.param), "cpu")
    return table, OnDevice(embedding(table)), OnHost(embedding(table), "cpu"), disk


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, V - 1)) | st.integers(0, V - 6).map(lambda i: list(range(i, i + 6))))
def test_rows_are_the_tables_bit_for_bit(homes, ids):
    table, *placed = homes
    ids = torch.tensor(ids, dtype=torch.int64)
    for home in placed:
        rows = home.fetch(ids)
        assert (home.vocab, home.width, home.dtype, home.device) == (V, W, table.dtype, torch.device("cpu"))
        assert same_bits(rows, table[ids])
        before = rows.clone()
        home.fetch((ids + 1) % V)
        assert same_bits(rows, before)  # a later fetch leaves earlier rows alone


def test_only_the_device_has_the_weight_at_hand_and_looks_it_up_each_time(homes):
    assert homes[2].weight is None and homes[3].weight is None
    table = OnDevice(embedding(homes[0]))
    assert table.weight is table.embedding.weight
    table.embedding.weight = nn.Parameter(torch.full((V, W), 2.0, dtype=torch.float64))
    assert table.dtype == torch.float64 and (table.fetch(torch.tensor([3])) == 2).all()


@pytest.mark.parametrize("ids", [[V], [3, -1], [0, 2**40]], ids=str)
def test_an_id_outside_the_table_is_no_row_of_its_neighbour(homes, ids):
    for home in homes[2:]:
        with pytest.raises(ValueError, match=rf"token id {ids[-1]} is outside the table's rows 0\.\.96"):
            home.fetch(torch.tensor(ids))


def test_a_table_in_host_memory_counts_once(homes):
    table, _, host, _ = homes
    assert host.table.data_ptr() == table.data_ptr() and not host.pinned


def test_rows_may_land_in_another_dtype(path):
    table = TABLES["torch.bfloat16"]
    rows = OnDisk(path, "torch.bfloat16", "cpu", torch.float32).fetch(torch.tensor([4, 96, 4]))
    assert same_bits(rows, table[[4, 96, 4]].float())


def test_neighbours_are_one_read_and_nothing_else_is_read(path, reads):
    table = OnDisk(path, "torch.float32", "cpu")
    opening = sum(count for _, count in reads)
    assert opening == SafetensorsFile(path)._data  # the header alone
    start, row = table.file.entry("torch.float32").start, W * 4
    reads.clear()
    table.fetch(torch.tensor([8, 40, 7, 9, 40, 96]))
    assert reads == [(start + 7 * row, 3 * row), (start + 40 * row, row), (start + 96 * row, row)]


def test_short_reads_are_continued(path, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, start: preadv(fd, [views[0][:7]], start))
    ids = torch.tensor([5, 6, 1])
    assert same_bits(OnDisk(path, "torch.float16", "cpu").fetch(ids), TABLES["torch.float16"][ids])


def test_a_file_cut_while_it_is_open_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"t": torch.ones(V, W)}, path)
    table = OnDisk(path, "t", "cpu")
    os.truncate(path, path.stat().st_size - 1)
    assert table.fetch(torch.tensor([0])).sum() == W
    with pytest.raises(ValueError, match=r"model\.safetensors: ends early"):
        table.fetch(torch.tensor([V - 1]))


@pytest.mark.parametrize(
    ("key", "message"),
    [("b", "no tensor b among its 6: .*"), ("a", r"a is torch.int64 of shape \[5\]"), ("z", r".* of shape \[3, 0\]")],
)
def test_what_is_no_table_is_refused(path, key, message):
    with pytest.raises(ValueError, match=r"model\.safetensors: " + message):
        OnDisk(path, key, "cpu")


def test_verify_finds_one_wrong_bit(homes):
    table, *placed = homes
    ids = torch.tensor([9, 2, 50]).repeat(1500)  # more than are compared at a time
    for home in placed:
        rows = table[ids].clone()
        verify(home, ids, rows)
        rows.view(torch.uint8)[-1, 5] ^= 1
        with pytest.raises(ValueError, match="row of token 50 "):
            verify(home, ids, rows)


# ---------------------------------------------------------------------------- files


def test_whole_tensors_are_those_of_the_formats_own_library(path):
    file, expected = SafetensorsFile(path), load_file(path)
    assert sorted(file.keys()) == sorted(expected) and file.metadata == {"format": "pt"}
    assert all(same_bits(file.tensor(key).flatten(), expected[key].flatten()) for key in expected)


def test_the_contribution_imports_torch_alone():
    """Late imports too: the standard library, torch, itself, and Triton, without which it does."""
    for path in Path(placement.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                known = name.split(".")[0] in {"torch", "triton", *sys.stdlib_module_names}
                assert known or name.startswith("nanochat.bov"), f"{path.name} imports {name}"


@pytest.mark.parametrize("dtype", placement.DTYPES.values(), ids=placement.DTYPES)
def test_every_dtype_has_the_formats_name(tmp_path, dtype):
    tensor = torch.arange(6).view(2, 3).to(dtype)
    save_file({"t": tensor}, tmp_path / "f")
    assert same_bits(SafetensorsFile(tmp_path / "f").tensor("t"), tensor)


def test_a_file_that_is_no_longer_used_is_closed(path):
    table = OnDisk(path, "torch.float32", "cpu")
    fd = table.file._fd
    os.fstat(fd)
    del table
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(fd)


def entry(**changes):
    """The header entry of a 2 x 4 table of fp32 (32 bytes) with `changes`; None leaves a field out."""
    fields = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]} | changes
    return {name: value for name, value in fields.items() if value is not None}


def file_bytes(header, data=bytes(32), length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_the_plain_entry_is_fine(tmp_path):
    (tmp_path / "f").write_bytes(file_bytes({"t": entry()}))
    assert OnDisk(tmp_path / "f", "t", "cpu").fetch(torch.tensor([1])).tolist() == [[0, 0, 0, 0]]


ATTACKS = {
    "empty": (b"", "0 bytes are no safetensors file"),
    "seven-bytes": (bytes(7), "7 bytes"),
    "no-header": (bytes(8), "not JSON"),
    "huge-length": (file_bytes({"t": entry()}, length=2**64 - 1), "claims a header of 18446744073709551615 bytes"),
    "length-past-end": (file_bytes({"t": entry()}, length=500), "claims a header of 500 bytes in a file of 1"),
    "not-json": (file_bytes(b"{'t': 1}"), "not JSON"),
    "not-utf8": (file_bytes(b'{"\xff\xfe": 1}'), "not JSON"),
    "utf16": (file_bytes('{"t": 1}'.encode("utf-16")), "not JSON"),
    "nested": (file_bytes(b"[" * 200_000), "not JSON"),
    "list": (file_bytes([entry()]), "not a JSON object"),
    "repeated-key": (file_bytes(b'{"t": 1, "t": 2}'), "a key occurs twice"),
    "metadata": (file_bytes({"__metadata__": {"step": 3}}), "__metadata__ is not a dictionary of strings"),
    "entry-is-a-number": (file_bytes({"t": 3}), "t lacks dtype, shape or data_offsets"),
    "no-shape": (file_bytes({"t": entry(shape=None)}), "t lacks"),
    "dtype-unknown": (file_bytes({"t": entry(dtype="F33")}), "t has dtype 'F33'; known are F64"),
    "dtype-is-a-list": (file_bytes({"t": entry(dtype=["F32"])}), "t has dtype"),
    "dtype-of-other-size": (file_bytes({"t": entry(dtype="BF16")}), r"t has 32 bytes, its shape \[2, 4\] in BF16 16"),
    "shape-negative": (file_bytes({"t": entry(shape=[-2, -4])}), r"t has the shape \[-2, -4\]"),
    "shape-fraction": (file_bytes({"t": entry(shape=[2.0, 4])}), "t has the shape"),
    "shape-boolean": (file_bytes({"t": entry(shape=[True, 8])}), "t has the shape"),
    "shape-text": (file_bytes({"t": entry(shape="24")}), "t has the shape"),
    "shape-overflows": (file_bytes({"t": entry(shape=[2**62, 2**62])}), "t has the shape"),
    "shape-overflows-empty": (file_bytes({"t": entry(shape=[0, 2**70], data_offsets=[0, 0])}), "t has the shape"),
    "shape-endless": (file_bytes({"t": entry(shape=[1] * 100_000, data_offsets=[0, 4])}), "t has the shape"),
    "shape-too-large": (file_bytes({"t": entry(shape=[2, 5])}), "t has 32 bytes, its shape"),
    "offsets-outside": (file_bytes({"t": entry(data_offsets=[8, 40])}), r"\[8, 40\] of 32 bytes: the file is cut off"),
    "offsets-negative": (file_bytes({"t": entry(data_offsets=[-32, 0])}), r"\[-32, 0\] of 32 bytes"),
    "offsets-reversed": (file_bytes({"t": entry(data_offsets=[32, 0])}), r"\[32, 0\] of 32 bytes"),
    "offsets-three": (file_bytes({"t": entry(data_offsets=[0, 16, 32])}), r"\[0, 16, 32\] of 32 bytes"),
    "offsets-fraction": (file_bytes({"t": entry(data_offsets=[0, 32.0])}), "of 32 bytes"),
    "truncated": (file_bytes({"t": entry()})[:-1], r"\[0, 32\] of 31 bytes: the file is cut off"),
}


@pytest.mark.parametrize(("content", "message"), ATTACKS.values(), ids=ATTACKS)
def test_damaged_files_are_named_and_explained(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: .*" + message):
        SafetensorsFile(path)


def test_missing_files_and_folders_are_named(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ValueError, match=f"{path}: no such file"):
            SafetensorsFile(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_to_the_header_gets_past_the_checks(path, tmp_path_factory, data):
    """Whatever bytes change: a ValueError, or tensors that lie inside the file and have their shape's size."""
    content, data_start = bytearray(path.read_bytes()), SafetensorsFile(path)._data
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, data_start - 1))] = data.draw(st.sampled_from(b'0159{}[]",:-.eF\x00\xff'))
    damaged = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    damaged.write_bytes(content)
    try:
        file = SafetensorsFile(damaged)
    except ValueError as error:
        assert str(damaged) in str(error)
        return
    for key in file.keys():
        assert file.tensor(key).nbytes == file.entry(key).nbytes


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(path, tmp_path_factory, share):
    content = path.read_bytes()
    cut = tmp_path_factory.getbasetemp() / "cut.safetensors"
    cut.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"cut\.safetensors: "):
        SafetensorsFile(cut)


# ---------------------------------------------------------------------------- models


def saved(model, path):
    save_file({key: tensor.clone() for key, tensor in model.state_dict().items()}, path)
    return path


@pytest.mark.parametrize("axes", [{}, {"bov_shared": True}, {"bov_coeff": "head"}], ids=["own", "shared", "head"])
def test_every_placement_computes_the_same_bits(tmp_path, axes):
    model = build(**BANKED, **axes).eval()
    path, expected = saved(model, tmp_path / "f"), model(IDS)
    table = model.value_embeds["2"].weight.detach().clone()
    for where, home in (("host", OnHost), ("mmap", OnDisk), ("host", OnHost), ("mmap", OnDisk), ("device", OnDevice)):
        place(model, where, path)
        banks = [block.attn.bank for block in model.transformer.h]
        assert all(type(bank.rows) is home for bank in banks[2:])
        assert (banks[2].rows is banks[3].rows) == ("bov_shared" in axes)
        assert torch.equal(model(IDS), expected), where
        assert all(model.value_embeds[str(bank.spec.table)].weight.is_meta == (where == "mmap") for bank in banks[2:])
        assert not model.value_embeds["1"].weight.is_meta  # upstream's value embedding caches V: it stays
    assert torch.equal(model.value_embeds["2"].weight, table)


def test_the_file_must_hold_the_models_tables(tmp_path):
    model, other = build(**BANKED), build(seed=1, **BANKED)
    with pytest.raises(ValueError, match=r"f: value_embeds\.2\.weight is not the model's .*token 0 "):
        place(model, "mmap", saved(other, tmp_path / "f"))
    with pytest.raises(ValueError, match=r"f: value_embeds\.2\.weight is 64 x 32, the model's \(64, 16\)"):
        place(model, "mmap", saved(build(**BANKED, n_kv_head=4), tmp_path / "f"))
    with pytest.raises(ValueError, match="f: no tensor value_embeds.2.weight"):
        place(model, "mmap", saved(build(), tmp_path / "f"))
    other.value_embeds["2"] = model.value_embeds["2"]
    with pytest.raises(ValueError, match=r"f: value_embeds\.3\.weight is not the model's"):
        place(model, "mmap", saved(other, tmp_path / "f"))
    assert not model.value_embeds["2"].weight.is_meta  # none has moved where one does not fit


@pytest.mark.parametrize(
    ("axes", "arguments", "message"),
    [
        (BANKED, ["gpu"], "--bov-placement 'gpu': use one of device, host, mmap"),
        (BANKED, ["mmap"], "exported model: make one with python -m scripts.bov_export"),
        ({}, ["host"], "no layer of this model does without a V cache"),
        ({"bov_layers": "3", "bov_combine": "add"}, ["mmap", "f"], "no layer of this model"),
    ],
    ids=["unknown", "no-path", "no-bank", "add"],
)
def test_placements_without_meaning_are_explained(axes, arguments, message):
    with pytest.raises(ValueError, match=message):
        place(build(**axes), *arguments)


# ---------------------------------------------------------------------------- CUDA


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("switch", ["1", "0"], ids=["pinned", "NANOCHAT_PIN=0"])
def test_host_placement_frees_the_devices_memory(monkeypatch, switch):
    monkeypatch.setenv("NANOCHAT_PIN", switch)
    module = embedding(any_bits(torch.bfloat16, 4096, 256)).cuda()
    expected, before = module.weight.detach().clone().cpu(), torch.cuda.memory_allocated()
    host = OnHost(module, "cuda")
    assert before - torch.cuda.memory_allocated() == expected.nbytes
    assert host.table.is_pinned() == host.pinned
    assert host.pinned == (switch == "1" and not torch.cuda.get_device_properties(0).is_integrated)
    for n in (0, 1, 8, 9, 500):
        ids = torch.randint(0, 4096, (n,), device="cuda")
        assert host.fetch(ids).is_cuda and same_bits(host.fetch(ids).cpu(), expected[ids.cpu()])
    table = host.table
    del host
    gc.collect()
    assert not table.is_pinned()


# ---------------------------------------------------------------------------- several threads, tensors in order


def test_a_table_on_disk_serves_two_threads(tmp_path):
    weight = torch.arange(4096)[:, None].float().expand(-1, 64).contiguous()
    save_file({"t": weight}, tmp_path / "t.safetensors")
    table, wrong = OnDisk(tmp_path / "t.safetensors", "t", "cpu"), []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(100):
            ids = torch.randint(0, 4096, (200,), generator=generator)
            wrong.extend([] if torch.equal(table.fetch(ids), weight[ids]) else [seed])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("offsets", "size", "message"),
    [
        (((0, 16), (0, 16)), 16, "b begins at byte"),
        (((0, 16), (20, 36)), 36, "b begins"),
        (((0, 16), (16, 32)), 40, "8 bytes"),
    ],
    ids=["overlap", "gap", "bytes-behind"],
)
def test_tensors_of_a_file_follow_each_other(offsets, size, message, tmp_path):
    path = tmp_path / "x.safetensors"
    header = {n: {"dtype": "F32", "shape": [4], "data_offsets": o} for n, o in zip("ab", offsets, strict=True)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(ValueError, match=message):
        SafetensorsFile(path)
