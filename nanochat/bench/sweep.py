"""Single decode steps, context by context: a model, the same with a V cache, and paper/baseline of its shape."""

from dataclasses import dataclass

import torch

from nanochat.bench.sides import (
    IdSource,
    Side,
    available_bytes,
    bank_attention,
    bank_layers,
    baseline_config,
    cache_bytes,
    formula_bytes,
    interleave,
    milliseconds,
    random_model,
    ratio,
    set_context,
    spare_positions,
)
from nanochat.metrics import peak_bytes

TITLES = (
    ("context", 8), ("batch", 6), ("U", 7), ("side", 9), ("tok/s", 9), ("ms/step", 9), ("quartiles", 17),
    ("attn ms", 8), ("cache bytes", 14), ("by formula", 14),
)  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """What all rows of the table share. placement: where the model's tables are."""

    ids: IdSource
    seed: int
    rounds: int
    strategy: str
    placement: str

    def run(self, model, contexts, batches) -> list[dict]:
        """A row per context and batch, each printed when it is measured.

        Raises ValueError when the model's rotary table is too short.
        """
        room = max(contexts) + spare_positions(max(contexts), self.rounds)
        if room > model.cos.size(1):
            raise ValueError(
                f"--contexts {max(contexts)}: the model's rotary table ends at {model.cos.size(1)} positions"
            )
        layers = bank_layers(model)
        sides = {"model": (model, {})}
        if layers:
            sides["v_cache"] = (model, {"value_layers": None})
        sides["baseline"] = (random_model(baseline_config(model.config), model.get_device(), self.seed, room), {})
        print(f"ids      {self.ids}; attn ms: of layers {','.join(map(str, layers)) or 'none'} alone, per step")
        print(" ".join(f"{title:>{width}}" for title, width in TITLES) + "  side / model")
        rows = []
        for context in contexts:
            for batch in batches:
                rows.append(self._row(sides, layers, context, batch))
                print_row(rows[-1])
        return rows

    def _row(self, sides, layers, context, batch) -> dict:
        case, device = {"context": context, "batch_size": batch}, sides["model"][0].get_device()
        needed, free = self._needed(sides, context, batch), available_bytes(device)
        if needed > 0.85 * free:
            return case | {"skipped": f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        ids = self.ids.draw(batch, context + spare_positions(context, self.rounds))
        running, found = {}, {}
        for name, (model, options) in sides.items():
            set_context(model, ids.size(1))  # past it a long layer would leave keys out
            running[name] = side = Side(model, ids, context, seed=self.seed, strategy=self.strategy, **options)
            placement = self.placement if name == "model" else "device"
            formula = formula_bytes(side, ids[:, : context + 1].unique().numel(), placement)
            found[name] = {"cache_bytes": {"measured": cache_bytes(side.cache)["total"], "formula": formula["total"]}}
        times = interleave({name: side.timed_step for name, side in running.items()}, self.rounds, self.seed)
        for name, side in running.items():
            ms = milliseconds(times[name])
            attention = bank_attention(side, layers, max(3, self.rounds // 2)) if layers else None
            speed = {"ms_per_step": ms, "tok_per_sec": round(1e3 * batch / ms["median"], 1)}
            found[name] = speed | {"bank_attention_ms": attention} | found[name]
        return case | {
            "distinct": ids[:, :context].unique().numel(),
            "sides": found,
            "ratios": {f"{name} / model": ratio(times, name, "model") for name in running if name != "model"},
            "peak_bytes": peak_bytes(device),
        }

    def _needed(self, sides, context, batch) -> float:
        """Bytes of K and V of all sides, and of one layer's gathered V."""
        per_token = 0
        for model, options in sides.values():
            layers, kept = model.config.n_layer, options.get("value_layers", model.value_layers)
            row = model.kv_bytes_per_token() // (layers + len(model.value_layers))
            per_token += row * (layers + (layers if kept is None else len(kept)))
        return 1.1 * batch * context * (per_token + row)


def print_row(row):
    start = f"{row['context']:>8} {row['batch_size']:>6}"
    if "skipped" in row:
        print(f"{start}  left out: {row['skipped']}", flush=True)
        return
    for name, side in row["sides"].items():
        ms, attention, size = side["ms_per_step"], side["bank_attention_ms"], side["cache_bytes"]
        quartiles = "{:.4g}-{:.4g}".format(*ms["quartiles"])
        other = row["ratios"].get(f"{name} / model")
        times = "" if other is None else "  {:.3f} ({:.3f}-{:.3f})".format(other["median"], *other["quartiles"])
        cells = [
            f"{row['distinct']:>7,}", f"{name:>9}", f"{side['tok_per_sec']:>9,.1f}", f"{ms['median']:>9.4g}",
            f"{quartiles:>17}", f"{'-':>8}" if attention is None else f"{attention['median']:>8.3g}",
            f"{size['measured']:>14,}", f"{size['formula']:>14,}",
        ]  # fmt: skip
        print(f"{start} {' '.join(cells)}{times}", flush=True)
