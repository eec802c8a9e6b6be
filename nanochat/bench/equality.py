"""Do all ways to compute the same thing agree on this device? Back ends of attention, decoding without V, compiling.

A difference is the largest one between two tensors over the largest value of the one wanted; a scalar's, over itself.
Shapes: B batch, T time, N query heads, H kv heads, D head dim.
"""

import time
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from nanochat import flash_attention
from nanochat.bench.layer import Layer, Shape, ways_on
from nanochat.bench.sides import IdSource, bank_layers, baseline_config, random_model, unit
from nanochat.bov import kernels
from nanochat.bov.decode import STRATEGIES
from nanochat.bov.presets import preset
from nanochat.common import COMPUTE_DTYPE
from nanochat.engine import KVCache
from nanochat.gpt import GPTConfig
from nanochat.linear import Linear
from nanochat.train import compile_model

PRESETS = ("paper/baseline", "paper/bov", "fig5b/shared", "table3/x0")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}[COMPUTE_DTYPE]
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 3e-2}[COMPUTE_DTYPE]  # of whole models
BATCH, LENGTH, CHUNK = 2, 300, 7  # LENGTH: past two blocks of 128 and no multiple of anything
HEADS = ((4, 4), (6, 2))  # query heads, kv heads
WINDOWS = (-1, 128, 37)
DECODED = 12  # tokens decoded one by one


class Differences:
    """Of each comparison the largest difference met, where it was, and whether it is within its tolerance."""

    def __init__(self):
        self._rows = {}

    def add(self, what: str, case: str, found, wanted, tolerance=TOLERANCE):
        """Compare two tensors of one shape; NaN counts as infinite."""
        wanted = wanted.double()
        self.note(what, case, ((found.double() - wanted).abs().max() / wanted.abs().max()).item(), tolerance)

    def note(self, what: str, case: str, difference: float, tolerance=TOLERANCE):
        """Take a difference that was computed elsewhere."""
        difference = difference if difference == difference else float("inf")
        row = self._rows.setdefault(what, {"check": what, "difference": -1.0, "cases": 0})
        row["cases"] += 1
        if difference > row["difference"]:
            row |= {"difference": difference, "at": case, "tolerance": tolerance, "passed": difference <= tolerance}

    def failed(self, what: str, error: Exception):
        self._rows[what] = {"check": what, "error": f"{type(error).__name__}: {error}", "passed": False}

    def rows(self) -> list[dict]:
        return [dict(row) for row in self._rows.values()]


# ---------------------------------------------------------------------------- attention


@contextmanager
def backend(name: str):
    """flash_attention through one of its back ends for the duration; "varlen" means torch's own kernels."""
    without_fa3 = name == "varlen" and flash_attention.HAS_FA3
    if without_fa3:
        restore_flash_attention_impl()
    flash_attention._override_impl = name
    flash_attention._resolve_use_fa3()
    try:
        yield
    finally:
        if without_fa3:
            activate_flash_attention_impl("FA3")
        flash_attention._override_impl = None
        flash_attention._resolve_use_fa3()


def backends(device) -> list[str]:
    """The back ends that can run on a device in the compute dtype."""
    flash = device.type == "cuda" and COMPUTE_DTYPE != torch.float32
    return ["fa3"] * (flash and flash_attention.HAS_FA3) + ["varlen"] * flash + ["sdpa"]


def reference(q, k, v, left):
    """Attention written out in fp64: q (B, Tq, N, D), k and v (B, Tk, H, D), the last query at the last key."""
    q, k, v = q.double(), *(t.double().repeat_interleave(q.size(2) // t.size(2), dim=2) for t in (k, v))
    Tq, Tk = q.size(1), k.size(1)
    age = torch.arange(Tk - Tq, Tk, device=q.device)[:, None] - torch.arange(Tk, device=q.device)
    hidden = (age < 0) | (age > (Tk if left < 0 else left))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) / q.size(3) ** 0.5
    return torch.einsum("bnqk,bknd->bqnd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def check_attention(found: Differences, device, seed: int, head_dim: int, label: str):
    """Outputs and gradients of whole sequences, chunks behind a prefix, and a KV cache, against `reference`."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(length, heads):
        return unit(BATCH, length, heads, head_dim, generator=generator)

    for heads, kv_heads in HEADS:
        for left in WINDOWS:
            case = f"{heads} heads of {kv_heads}, window {left}"
            q, k, v = (draw(LENGTH, n).requires_grad_() for n in (heads, kv_heads, kv_heads))
            dy = draw(LENGTH, heads)
            y = flash_attention.flash_attn_func(q, k, v, causal=True, window_size=(left, 0))
            wanted = reference(q, k, v, left)
            found.add(f"attention {label}", case, y, wanted)
            gradients = torch.autograd.grad(y, (q, k, v), dy), torch.autograd.grad(wanted, (q, k, v), dy.double())
            for name, own, other in zip("qkv", *gradients, strict=True):
                found.add(f"attention {label}, gradients", f"d{name}, {case}", own, other)
            with torch.no_grad():
                chunk = flash_attention.flash_attn_func(q[:, -CHUNK:], k, v, causal=True, window_size=(left, 0))
                found.add(f"attention {label}, chunk", case, chunk, wanted[:, -CHUNK:])
                for new in (1, CHUNK):
                    _check_cache(found, label, f"{new} new, {case}", q[:, -new:], k, v, left)


def _check_cache(found, label, case, q, k, v, left):
    """flash_attn_with_kvcache with rows of one length, then of two."""
    new = q.size(1)
    for lengths in ([LENGTH] * BATCH, [LENGTH - 50 * row for row in range(BATCH)]):
        caches = [torch.zeros_like(t) for t in (k, v)]
        for cache, t in zip(caches, (k, v), strict=True):
            for row, length in enumerate(lengths):
                cache[row, : length - new] = t[row, : length - new]
        filled = torch.tensor(lengths, device=q.device, dtype=torch.int32) - new
        rows = range(BATCH)
        last = [torch.stack([t[row, lengths[row] - new : lengths[row]] for row in rows]) for t in (k, v)]
        same = len(set(lengths)) == 1
        y = flash_attention.flash_attn_with_kvcache(
            q, *caches, *last, cache_seqlens=LENGTH - new if same else filled, causal=True, window_size=(left, 0)
        )
        wanted = torch.cat([reference(*(t[r : r + 1] for t in (q, k[:, : lengths[r]], v[:, : lengths[r]])), left)
                            for r in rows])  # fmt: skip
        found.add(f"attention {label}, KV cache", f"{case}, lengths {lengths}", y, wanted)


# ---------------------------------------------------------------------------- decoding without a V cache


def small_config(name: str, head_dim: int, n_layer: int) -> GPTConfig:
    """A preset at a small shape: grouped heads, a padded vocabulary, windows shorter than the sequence."""
    shape = GPTConfig(sequence_len=LENGTH, vocab_size=1000, n_layer=n_layer, n_head=4, n_kv_head=2,
                      n_embd=4 * head_dim, window_pattern="SSL")  # fmt: skip
    return replace(baseline_config(shape), **preset(name))


def check_layer(found: Differences, device, seed: int, head_dim: int):
    """One bank layer by every way to decode, against a cached V."""
    for heads, kv_heads in HEADS:
        shape = Shape(heads, kv_heads, head_dim, 1000)
        ids = IdSource("zipf", shape.vocab, seed).draw(BATCH, 2 * LENGTH + 2)
        ways = ways_on(device)
        for way, difference in Layer(shape, ids, 2 * LENGTH, ways, device, seed).check().items():
            if way != ways[0]:
                found.note(f"bank layer {way}", f"{heads} heads of {kv_heads}, against {ways[0]}", difference)


@torch.inference_mode()
def check_decoding(found: Differences, device, seed: int, head_dim: int):
    """Logits of tokens decoded one by one after a prompt, by every strategy, against one full forward."""
    for name in PRESETS:
        config = small_config(name, head_dim, n_layer=6)
        model = random_model(config, device, seed, LENGTH)
        ids = IdSource("zipf", config.vocab_size, seed).draw(BATCH, LENGTH).to(device)
        wanted = model(ids)[:, -DECODED - 1 :]
        banks = bool(bank_layers(model))
        for strategy in STRATEGIES if banks else ("auto",):
            if strategy != "fused" or device.type == "cpu" or kernels.available(device) is None:
                found.add(f"decoding {strategy if banks else 'with V'}", name, _decode(model, ids, strategy), wanted)


def _decode(model, ids, strategy):
    """Logits (B, 1 + DECODED, V) of the last prompt token and of DECODED more."""
    config = model.config
    cache = KVCache(
        BATCH, config.n_kv_head, LENGTH, config.n_embd // config.n_head, config.n_layer, ids.device, COMPUTE_DTYPE,
        value_layers=model.value_layers, strategy=strategy,
    )  # fmt: skip
    logits = [model(ids[:, :-DECODED], kv_cache=cache)[:, -1:]]
    logits += [model(ids[:, at : at + 1], kv_cache=cache) for at in range(LENGTH - DECODED, LENGTH)]
    return torch.cat(logits, dim=1)


# ---------------------------------------------------------------------------- compiled against eager


def _step(model, call, ids):
    """(loss, gradients by name, seconds) of one forward and backward."""
    start = time.perf_counter()
    loss = call(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    value = loss.item()  # waits for the device
    return value, gradients, time.perf_counter() - start


def check_compiled(found: Differences, device, seed: int, head_dim: int) -> dict:
    """Loss and gradients of the model as train.compile_model gives it against the model as written.

    On a CPU the compiled one attends over blocks. Returns {"compile_seconds": {preset: seconds of the first step}}, or
    {"not_compiled_because": why}.
    """
    models, eager, seconds = {}, {}, {}
    ids = IdSource("zipf", 1000, seed).draw(BATCH, LENGTH + 1).to(device)
    for name in PRESETS:  # all before any is compiled: on a CPU compiling changes parts that all models share
        model = random_model(small_config(name, head_dim, n_layer=3), device, seed, LENGTH).train()
        for linear in (m for m in model.modules() if isinstance(m, Linear)):
            linear.float()  # master weights as in training
        models[name], eager[name] = model, _step(model, model, ids)
    for name, model in models.items():
        call, problem = compile_model(model, device)
        if problem:
            return {"not_compiled_because": problem}
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # else it would silently run as written
            loss, gradients, seconds[name] = _step(model, call, ids)
        found.note("compiled, loss", name, abs(loss / eager[name][0] - 1))
        for key, gradient in gradients.items():
            found.add("compiled, gradients", f"{key}, {name}", gradient, eager[name][1][key], GRADIENT_TOLERANCE)
    return {"compile_seconds": seconds}


# ---------------------------------------------------------------------------- the part


def equality(setting):
    """All of them, section by section; yields what is found so far. Products of fp32 are not rounded to TF32."""
    device, seed = setting.device, setting.args.seed
    head_dim = 128 if device.type == "cuda" else 32
    torch.set_float32_matmul_precision("highest")
    found, facts = Differences(), {"dtype": str(COMPUTE_DTYPE).removeprefix("torch.")}
    if reason := kernels.available(device):
        facts["triton_left_out"] = reason

    def attend(name):
        with backend(name):
            check_attention(found, device, seed, head_dim, name)

    sections = {f"attention {name}": lambda name=name: attend(name) for name in backends(device)}
    sections["bank layer"] = lambda: check_layer(found, device, seed, head_dim)
    sections["decoding"] = lambda: check_decoding(found, device, seed, head_dim)
    if not setting.args.no_compile:
        sections["compiled"] = lambda: facts.update(check_compiled(found, device, seed, head_dim))
    for name, section in sections.items():
        try:
            section()
        except Exception as error:  # the other sections can still say something
            found.failed(name, error)
        yield facts | {"checks": found.rows()}
