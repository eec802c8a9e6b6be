"""Made-up checkpoint folders for the report's tests: metrics.jsonl and DONE.json as the trainer writes them."""

import json
import math

from nanochat.bov.layers import parse_layers
from nanochat.bov.presets import PRESETS
from nanochat.report import load_run
from nanochat.report_variants import group

STEPS, BATCH, LAYERS, TABLE = 500, 8192, 6, 2_500_000
BASELINE = {125: 1.666, 250: 1.534, 375: 1.454, 500: 1.421}
BOV = {125: 1.653, 250: 1.500, 375: 1.425, 500: 1.396}
RATES = {"matrix": 0.002, "embedding": 0.05, "unembedding": 0.0014, "scalar": 0.04, "value_table": 0.025}


def gamma(step, layer):
    return [1 + (layer - 3) * 4.5 * (1 - math.exp(-step / 150))]


def header(preset="paper/baseline", seed=42, val="v" * 64, expected_epochs=1.86, steps=STEPS, flops_per_token=None,
           lr=(), config=(), data=(), changed=False, dtype="torch.bfloat16", muon="paper", **plan):  # fmt: skip
    """A header; `lr`, `config`, `data` and further keywords replace single fields of the header's parts."""
    axes = PRESETS[preset] | dict(config)
    bank = list(parse_layers(axes.get("bov_layers", "none"), LAYERS))
    tables = TABLE * len(bank) if axes.get("bov_source", "table") == "table" else 0
    base = 10_000_000 + 2 * LAYERS * 320 * max(0, axes.get("mlp_hidden", 1280) - 1280)
    cost = flops_per_token or 60_000_000 - 1_000_000 * len(bank)
    return {
        "kind": "header", "commit": "a" * 40, "versions": {"torch": "2.13.0"}, "device": "cpu",
        "dtype": dtype, "muon": muon, "preset": preset + " (changed)" * changed, "seed": seed,
        "config": {"n_layer": LAYERS, "n_embd": 320, "vocab_size": 4096, "sequence_len": 256, **axes},
        "tokenizer_sha256": "t" * 64, "eval_tokens": -1,
        "data": {"source": "sotu", "val_sha": val, "train_sha": "d" * 64, **dict(data)},
        "plan": {
            "num_params": {"total": base + tables, "without_tables": base}, "flops_per_token": cost,
            "num_iterations": steps, "total_batch_size": BATCH, "total_tokens": steps * BATCH,
            "total_flops": steps * BATCH * cost, "lr": RATES | dict(lr), "weight_decay": 0.16,
            "expected_epochs": expected_epochs, "bov_layers": bank, **plan,
        },
    }  # fmt: skip


def write_run(folder, preset="paper/baseline", bpb=BASELINE, done=True, speed=5000.0, **more):
    """A checkpoint folder without checkpoints; a number as `bpb` is the last evaluation's, others follow from it."""
    head = header(preset, **more)
    if not isinstance(bpb, dict):
        last = head["plan"]["num_iterations"]
        bpb = {last * quarter // 4: bpb + 0.1 * (4 - quarter) for quarter in (1, 2, 3, 4)}
    lines = [head]
    for step in sorted({*range(0, max(bpb) + 1, 25), *bpb}):
        tokens = step * BATCH
        at = {"step": step, "tokens": tokens, "flops": head["plan"]["flops_per_token"] * tokens}
        at["seconds"] = tokens / speed
        if step:
            lines.append({"kind": "train", **at, "loss": 5.0, "lr_mult": 1.0, "tok_per_sec": speed + step % 50})
        if step in bpb or step == 0:
            coeffs = {f"{i}.gamma_v": gamma(step, i) for i in head["plan"]["bov_layers"]} | {"x0_lambdas": [0.1]}
            value = bpb.get(step, 2.9)
            lines.append({"kind": "eval", **at, "val_bpb": value, "coeffs": coeffs, "peak_bytes": 2**30})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done:
        record = {"config_hash": "c", "step": max(bpb), "val_bpb": bpb[max(bpb)], "checkpoint_sha256": "s"}
        (folder / "DONE.json").write_text(json.dumps(record))
    return folder


class Shelf:
    """Writes runs under one folder, one after the other, and hands them back as variants."""

    def __init__(self, root):
        self.root, self.folders = root, []

    def add(self, preset="paper/baseline", values=(1.4,), seeds=None, **more):
        """One run per value, of the seeds 0, 1, ... unless given."""
        for seed, value in zip(seeds or range(len(values)), values, strict=True):
            folder = self.root / f"run{len(self.folders):03d}"
            self.folders.append(write_run(folder, preset, value, seed=seed, **more))
        return self

    def variants(self):
        return group([load_run(folder) for folder in self.folders])
