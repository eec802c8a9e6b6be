"""Memory as allocated: a meter of what operations allocate, and with it the bytes of decoding and of a training step.

The keys are those of the formula, nanochat/bov/memory.py. Everything runs as written: a compiled pass allocates less.
Shapes: B batch, S positions allocated, N query heads, D head dim.
"""

import os
import tempfile
import weakref

import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanochat.bench.sides import cache_bytes
from nanochat.bov import decode as bov_decode
from nanochat.bov import kernels, memory, placement
from nanochat.bov.memory import Decode, storage_bytes
from nanochat.common import COMPUTE_DTYPE
from nanochat.engine import KVCache
from nanochat.flash_attention import flash_attn
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import reshard
from nanochat.plan import memory_sizes, meta_model

SEED = 42

# ---------------------------------------------------------------------------- the meter


class Meter(TorchDispatchMode):
    """While active: bytes of the results of operations on `device` that are alive (`live`), and the most that were
    (`peak`). What kernels allocate and free inside is not seen, nor are views, results in place and what was there.
    """

    def __init__(self, device):
        super().__init__()
        self.device = torch.device(device)
        self.live = self.peak = 0
        self._known = set()

    def restart_peak(self):
        """Let `peak` begin anew from what is alive now."""
        self.peak = self.live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device.type:
                storage = tensor.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._count(storage)
        return out

    def _count(self, storage):
        self._known.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, key, size):
        self._known.discard(key)
        self.live -= size


class AllocatorMeter:
    """The same from the CUDA allocator: bytes that were asked for, before it rounds them up; kernels' own included."""

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        torch.cuda.synchronize(self.device)
        self._start = self._requested("current")
        self.restart_peak()
        return self

    def __exit__(self, *error):
        pass

    def _requested(self, when):
        return torch.cuda.memory_stats(self.device)[f"requested_bytes.all.{when}"]

    def restart_peak(self):
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def live(self) -> int:
        return self._requested("current") - self._start

    @property
    def peak(self) -> int:
        return self._requested("peak") - self._start


def meter(device):
    """A context manager with `live`, `peak` and `restart_peak` for allocations on `device`."""
    device = torch.device(device)
    return AllocatorMeter(device) if device.type == "cuda" else Meter(device)


# ---------------------------------------------------------------------------- what is measured


def measure(config: GPTConfig, decode: Decode, ids, ranks: int = 1) -> dict[str, int]:
    """Allocated bytes under the keys of the formula; ids (B, S) on the device that is measured.

    K and V hold zeros: positions count as filled with `ids`, then two tokens are decoded for real, and another model
    takes one training step. Raises ValueError for what cannot be measured, or not here.
    """
    check_measurable(config, decode, ids.device)
    return measure_decoding(config, decode, ids) | measure_training(config, ids.device, ranks)


def check_measurable(config: GPTConfig, decode: Decode, device):
    """ValueError, naming the flag, for what `measure` cannot do on this device."""
    if decode.context < 2:
        raise ValueError("--measure decodes two tokens: --context must be at least 2")
    if decode.policy == "ring":
        raise ValueError("--measure with --window-policy ring: the cache here keeps every position")
    if decode.dtype != COMPUTE_DTYPE:
        name = str(decode.dtype).removeprefix("torch.")
        raise ValueError(f"--measure computes in {COMPUTE_DTYPE} here: set NANOCHAT_DTYPE={name} or leave out --dtype")
    if decode.strategy == "fused" and device.type == "cuda" and (reason := kernels.available(device)):
        raise ValueError(f"--measure with --strategy fused: {reason}")
    sizes = memory_sizes(meta_model(config))
    parts = memory.decode_bytes(sizes, decode)
    decoding = memory.held(parts) + parts["host_tables"] + parts["step_temporaries"]
    training = parts["weights"] + parts["tables"] + sum(memory.train_bytes(sizes, decode.dtype).values())
    need, room = max(decoding, training) / 2**30, device_bytes(device) / 2**30
    if need > 0.9 * room:
        raise ValueError(f"--measure needs {need:.2f} GiB of the {room:.2f} of this {device.type}: choose less")


def device_bytes(device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def build(config: GPTConfig, device) -> GPT:
    """A model with seeded random weights."""
    model = meta_model(config).to_empty(device=device)
    torch.manual_seed(SEED)
    model.init_weights()
    return model


def measure_decoding(config: GPTConfig, decode: Decode, ids) -> dict:
    """Bytes of the weights, the cache and one step; ids (B, S) on the device."""
    model = build(config, ids.device)
    tables = {f"value_embeds.{i}.weight": table.weight for i, table in model.value_embeds.items()}
    known = {id(weight) for weight in tables.values()}
    found = {
        "weights": storage_bytes(p for p in model.parameters() if id(p) not in known),
        "rotary": storage_bytes(model.buffers()),
    }
    with tempfile.TemporaryDirectory() as folder:
        away = place_tables(model, decode.placement, tables, os.path.join(folder, "tables.safetensors"))
        found["tables"] = storage_bytes(weight for key, weight in tables.items() if key not in away)
        found["host_tables"] = sum(away.values())
        del tables
        decode_tokens(model, decode, ids[:, -4:])  # kernels get their workspaces
        return found | decode_tokens(model, decode, ids)


def place_tables(model: GPT, where: str, tables: dict, path: str) -> dict:
    """Bytes in host memory of each table that is placed off the device; `path`: a file that mmap may write and read."""
    if where == "device":
        return {}
    users = placement.placed_tables(model)
    if where == "mmap":
        save_file({key: tables[key].detach() for key in users}, path)
    with meter("cpu") as seen:
        placement.place(model, where, path)
    if where == "mmap":
        return {key: seen.live // len(users) for key in users}
    return {key: storage_bytes([banks[0].rows.table]) for key, banks in users.items()}


@torch.inference_mode()
def decode_tokens(model: GPT, decode: Decode, ids) -> dict:
    """Bytes of a cache in which all but the last two of ids (B, S) count as there, and of decoding these two."""
    config, (B, S) = model.config, ids.shape
    head_dim = config.n_embd // config.n_head
    with meter(ids.device) as seen:
        cache = KVCache(
            B, config.n_kv_head, S, head_dim, config.n_layer, ids.device, COMPUTE_DTYPE,
            value_layers=model.value_layers, strategy=decode.strategy,
        )  # fmt: skip
        cache.append_ids(ids[:, :-2])
        cache.advance(S - 2)
        if config.smear:
            cache.prev_embedding = torch.zeros(B, 1, config.n_embd, dtype=COMPUTE_DTYPE, device=ids.device)
        model(ids[:, -2:-1], kv_cache=cache)
        before = seen.live
        seen.restart_peak()
        model(ids[:, -1:], kv_cache=cache)
        found = cache_bytes(cache) | {"pool": 0, "step_temporaries": seen.peak - before}
        found["pool"] = seen.live - sum(found[name] for name in memory.HELD if name in found)  # all that has no name
    query = torch.zeros(B, 1, config.n_head, head_dim, dtype=COMPUTE_DTYPE, device=ids.device)
    layers = zip(model.transformer.h, model.window_sizes, strict=True)
    return found | {"temporaries": max(attention_peak(block.attn, window, query, cache) for block, window in layers)}


def attention_peak(attn, window, query, cache: KVCache) -> int:
    """Bytes that one layer's attention of query (B, 1, N, D) over the whole cache allocates at its peak."""
    keys, values = cache.get_layer_cache(attn.layer_idx)
    end = cache.get_pos()
    with meter(query.device) as seen:
        if values is None:
            coeff = next((attn.get_parameter(n) for n in attn.bank.spec.coefficients(attn.n_kv_head)), None)
            options = dict(strategy=cache.history.strategy, dense=flash_attn.flash_attn_func)
            bov_decode.attend(
                query, keys[:, :end], attn.bank.rows, cache.history, coeff=coeff, window=window[0], **options
            )
        else:
            flash_attn.flash_attn_func(query, keys[:, :end], values[:, :end], causal=True, window_size=window)
        return seen.peak


def measure_training(config: GPTConfig, device, ranks: int) -> dict:
    """Bytes of gradients and optimizer state after one training step on a few tokens; `ranks` > 1: of rank 0's part."""
    model = build(config, device)
    optimizer = model.setup_optimizer()
    ids = torch.arange(8, device=device).view(1, -1) % config.vocab_size
    model(ids, ids).backward()
    optimizer.step()
    state = optimizer.state if ranks == 1 else reshard([optimizer.state_for_save()], ranks, 0)["state"]
    return {
        "gradients": storage_bytes(p.grad for p in model.parameters()),
        "optimizer": storage_bytes(t for tensors in state.values() for t in tensors.values()),
    }
