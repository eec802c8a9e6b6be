"""The Triton kernels of "fused" against attention written out position by position.

Functions named check_* run the kernels: in a process under Triton's interpreter (it must be on before triton is
imported), and directly where there is a GPU. Without either they are skipped, visibly.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat.bov import kernels

INTERPRETED = kernels.triton is not None and kernels.INTERPRETED
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(kernels.triton is None, reason="triton is not installed")

# ---------------------------------------------------------------------------- problems and their reference

PROBLEM = {
    "lengths": st.lists(st.one_of(st.integers(0, 20), st.integers(0, 200)), min_size=1, max_size=3),
    "heads": st.sampled_from([(1, 1), (2, 1), (3, 2), (1, 6), (1, 17)]),  # H, G
    "D": st.sampled_from([2, 16, 20, 64, 100]),
    "V": st.sampled_from([1, 2, 7, 300]),  # few tokens repeat often
    "window": st.one_of(st.just(-1), st.integers(0, 20), st.integers(0, 220)),
    "coeff": st.sampled_from([None, "scalar", "head"]),
    "layout": st.sampled_from(["cache", "upstream", "strided"]),
    "splits": st.sampled_from([1, 1, 2, 3, 6]),
    "seed": st.integers(0, 99),
}
FULL = {"lengths": [300, 7], "heads": (2, 3), "D": 20, "V": 7, "window": -1, "coeff": "head", "layout": "cache"}
FULL |= {"splits": 3, "seed": 0}


def make(p, dtype=torch.float32):
    """Arguments of fused on DEVICE: behind each row's length K is NaN, and the table rows around V are NaN too."""
    generator = torch.Generator().manual_seed(p["seed"])
    B, (H, G), D, V = len(p["lengths"]), p["heads"], p["D"], p["V"]
    S = max(p["lengths"]) + 5
    k = 2 * torch.randn(B, H, S, D, generator=generator)
    ids = torch.randint(0, V, (B, S), generator=generator, dtype=(torch.int32, torch.int64)[p["seed"] % 2])
    for row, length in enumerate(p["lengths"]):
        k[row, :, length:] = torch.nan
        ids[row, length:] = V
    table = torch.full((V + 2, H * D), torch.nan)
    table[1:-1] = torch.randn(V, H * D, generator=generator)
    q = torch.randn(B, 1, H * G, D, generator=generator)
    coeff = {"scalar": torch.tensor([-1.5]), "head": torch.randn(H, generator=generator), None: None}[p["coeff"]]
    k, table, q = (x.to(DEVICE, dtype) for x in (k, table, q))
    k = k.transpose(1, 2)
    if p["layout"] == "upstream":
        k = k.contiguous()
    elif p["layout"] == "strided":
        k, q, table, ids = every_other(k), every_other(q), every_other(table), every_other(ids)
    rows = torch.nn.Parameter(table)[1:-1].unflatten(1, (H, D))
    if p["layout"] == "cache":  # a pool: head by head
        rows = rows.detach().transpose(0, 1).contiguous().transpose(0, 1)
    lengths = torch.tensor(p["lengths"], dtype=torch.int32, device=DEVICE)
    coeff = None if coeff is None else coeff.to(DEVICE)
    k = k[:, : max(1, max(p["lengths"]))]
    return (q, k, rows, ids.to(DEVICE), lengths), {"coeff": coeff, "window": p["window"]}


def every_other(x):
    """The same values as a view whose last dimension has stride 2."""
    wide = torch.zeros(*x.shape, 2, dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


def reference(q, k, rows, ids, lengths, coeff, window):
    """Softmax attention in float64, one key at a time -> (B, 1, N, D)."""
    q, k, rows = (x.detach().cpu().double().numpy() for x in (q, k, rows))
    (B, _, N, D), H = q.shape, k.shape[2]
    y = np.zeros((B, 1, N, D))
    for b in range(B):
        newest = int(lengths[b]) - 1
        seen = [t for t in range(newest + 1) if window < 0 or newest - t <= window]
        for n in range(N):
            h = n // (N // H)
            scores = np.array([q[b, 0, n] @ k[b, t, h] / D**0.5 for t in seen])
            weights = np.exp(scores - scores.max(initial=0))
            for t, p in zip(seen, weights / weights.sum(), strict=True):
                y[b, 0, n] += p * rows[int(ids[b, t]), h]
            y[b, 0, n] *= 1 if coeff is None else float(coeff.expand(H)[h])
    return torch.from_numpy(y)


def compare(p, dtype, tolerance):
    """Run fused on the problem with the number of splits it names; the error is relative to the largest value."""
    arguments, options = make(p, dtype)
    with mock.patch.object(kernels, "split_count", return_value=p["splits"]), torch.inference_mode():
        y = kernels.fused(*arguments, **options)
    assert (y.dtype, y.shape) == (dtype, arguments[0].shape)
    expected = reference(*arguments, **options)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=0, atol=tolerance * max(1, expected.abs().max().item()))


# ---------------------------------------------------------------------------- checks that run the kernels


@settings(max_examples=20, deadline=None)
@given(st.fixed_dictionaries(PROBLEM))
@example(FULL | {"lengths": [256, 257]})  # whole tiles and one key more
@example(FULL | {"splits": 1, "layout": "strided"})  # several tiles in one split
@example(FULL | {"lengths": [3], "splits": 6})  # splits without keys
@example(FULL | {"lengths": [0, 5]})
@example(FULL | {"window": 256, "V": 1})
@example(FULL | {"window": 1, "D": 100, "heads": (1, 17)})
def check_fp32(p):
    compare(p, torch.float32, 1e-5)


@settings(max_examples=8, deadline=None)
@given(st.fixed_dictionaries(PROBLEM))
def check_fp16(p):
    compare(p, torch.float16, 5e-3)


@settings(max_examples=8, deadline=None)
@given(st.fixed_dictionaries(PROBLEM))
def check_bf16(p):
    compare(p, torch.bfloat16, 2e-2)


def check_splits_agree():
    """However many splits, and with those that fused chooses itself for a GPU of 132 multiprocessors."""
    arguments, options = make(FULL | {"lengths": [1500, 700]})
    outputs = []
    for splits in (1, 2, 7, 24, None):
        chosen = mock.patch.object(kernels, "split_count", return_value=splits) if splits else mock.MagicMock()
        with chosen, mock.patch.object(kernels, "_processors", return_value=132):
            outputs.append(kernels.fused(*arguments, **options))
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=0, atol=2e-6)


def check_memory():
    """Every tensor that fused makes is smaller than the (T, D) values of one head."""
    arguments, options = make(FULL | {"lengths": [1500]})
    sizes = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            for x in (made,) if isinstance(made, torch.Tensor) else ():
                sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.itemsize
            return made

    with Watch():
        y = kernels.fused(*arguments, **options)
    for x in (*arguments, options["coeff"]):
        sizes.pop(x.untyped_storage().data_ptr(), None)
    assert y.data_ptr() in sizes and max(sizes.values()) < 1500 * 20


CHECKS = [name for name in list(globals()) if name.startswith("check_")]


@pytest.fixture(scope="module")
def child():
    """What pytest says of the checks in a process under Triton's interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-o", "python_functions=check_*", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run([*command, __file__], cwd=root, env=environment, capture_output=True, text=True)
    return f"{done.stdout}\n{done.stderr}\nexit status {done.returncode}"


@needs_triton
@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(child, name):
    assert re.search(rf"^PASSED .*::{name}$", child, re.MULTILINE), child[-6000:]


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter is on")
@pytest.mark.skipif(kernels.available("cuda") is not None, reason=f"{kernels.available('cuda')}")
@pytest.mark.parametrize("name", CHECKS)
def test_on_gpu(name):
    globals()[name]()


# ---------------------------------------------------------------------------- without running a kernel


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 300_000), st.integers(1, 200))
def test_split_count(rows, heads, length, processors):
    splits = kernels.split_count(rows, heads, length, processors)
    assert 1 <= splits <= kernels.MAX_SPLITS
    if splits > 1:
        assert length // splits >= kernels.SPLIT_KEYS
        assert rows * heads * splits <= kernels.PROGRAMS * processors
    one_more = splits + 1
    assert (
        one_more > kernels.MAX_SPLITS
        or length // one_more < kernels.SPLIT_KEYS
        or rows * heads * one_more > kernels.PROGRAMS * processors
    ), "more splits would still have room"


@pytest.mark.parametrize(
    "rows, heads, length, splits",
    [(1, 6, 100, 1), (1, 6, 2048, 8), (1, 6, 131072, 88), (1, 1, 262144, 128), (64, 12, 262144, 1), (1, 6, 513, 2)],
)
def test_split_count_on_132_multiprocessors(rows, heads, length, splits):
    assert kernels.split_count(rows, heads, length, 132) == splits


class NoDriver:
    @property
    def active(self):
        raise RuntimeError("no C compiler\nwas found")


@pytest.mark.parametrize(
    "device, triton, cuda, capability, reason",
    [
        ("cuda", None, True, (9, 0), "triton is not installed"),
        ("cpu", NoDriver, True, (9, 0), "Triton compiles for GPUs, not for cpu"),
        ("cuda", NoDriver, False, (9, 0), "torch sees no CUDA device"),
        ("cuda", NoDriver, True, (7, 5), "compute capability is under 8.0"),
        ("cuda", NoDriver, True, (9, 0), "cannot load its GPU driver: no C compiler was found"),
    ],
    ids=["no triton", "cpu", "no gpu", "old gpu", "no driver"],
)
def test_available_says_why_not(monkeypatch, device, triton, cuda, capability, reason):
    module = triton and SimpleNamespace(runtime=SimpleNamespace(driver=triton()))
    monkeypatch.setattr(kernels, "triton", module)
    monkeypatch.setattr(kernels, "INTERPRETED", False, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    said = kernels.available.__wrapped__(device)
    assert reason in said and "\n" not in said


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter is on")
def test_fused_refuses_where_it_cannot_run():
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="decode strategy fused: .*; use auto, gather or pooled"):
        kernels.fused(
            q, q, torch.zeros(3, 2, 4), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1), coeff=None, window=-1
        )


# ---------------------------------------------------------------------------- compiling needs no GPU

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(kernel, capability, types, constants):
    """The kernel compiled down to machine code of that compute capability; what is not named is an int32."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n in types or "_" in n}
    return kernels.triton.compile(
        ASTSource(kernel, signature, positions, aligned), target=GPUTarget("cuda", capability, 32)
    )


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter is on")
@pytest.mark.parametrize("capability, shared", [(80, 164), (90, 227)])
@pytest.mark.parametrize(
    "dtype, G, D, window",
    [(torch.bfloat16, 1, 128, None), (torch.float16, 5, 80, 1), (torch.float32, 1, 128, None)],
    ids=["bf16", "fp16-gqa-d80-window1", "fp32"],
)
def test_compiles_and_fits(capability, shared, dtype, G, D, window):
    """Loads of 16 bytes; in 16 bits PROGRAMS of them fit a multiprocessor's shared memory (KB, CUDA's guide)."""
    name = TYPES[dtype]
    types = {n: f"*{name}" for n in ("Q", "K", "W")} | {"Ids": "*i64" if window else "*i32", "Lengths": "*i32"}
    types |= {"Out": "*fp32", "Lse": "*fp32", "scale": "fp32"}
    constants = {n: 1 for n in ("q_dim", "k_dim", "w_dim", "ids_key")} | {"G": G, "D": D}
    constants |= kernels._tiles(dtype, G, D) | ({} if window is None else {"window": window})
    code = compiled(kernels._attend_split, capability, types, constants)
    half = dtype != torch.float32
    assert (kernels.PROGRAMS if half else 1) * code.metadata.shared < shared * 1024
    assert "cp.async.cg" in code.asm["ptx"] and ("mma" in code.asm["ptx"]) == half

    types = {"Out": "*fp32", "Lse": "*fp32", "Y": f"*{name}", "Coeff": "*fp32"}
    constants = {"G": G, "D": D, "SPLITS": kernels.MAX_SPLITS, "COLS": kernels.COLUMNS}
    for absent in ({}, {"Coeff": None}):
        assert compiled(kernels._combine_splits, capability, types, constants | absent).asm["cubin"]
