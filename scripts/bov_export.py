"""Export a trained model: weights as safetensors in one dtype, config and tokenizer in one folder.

python -m scripts.bov_export d12_bov --fold-gamma --dtype bf16 --out out/d12_bov
"""

import argparse
from pathlib import Path

import torch

from nanochat.bov.placement import SafetensorsFile, placed_tables
from nanochat.checkpoint_manager import SOURCES, build_model, resolve_checkpoint
from nanochat.common import run_script
from nanochat.export import WEIGHTS, export_model

DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "fp32": torch.float32, "float32": torch.float32,
}  # fmt: skip


def megabytes(count) -> str:
    return f"{count / 1e6:,.1f} MB"


def folding(facts, asked) -> str:
    """What became of the coefficients, in one line."""
    if facts["folded"]:
        values = [f"{name} {', '.join(f'{v:.4g}' for v in vector)}" for name, vector in facts["folded"].items()]
        return "; ".join(values)
    if asked:
        return "nothing: no layer has a coefficient that alone stands between table row and value"
    return "nothing (--fold-gamma not given)"


def report(out, model, facts, asked) -> str:
    """The lines that tell what was written to `out` and how to use it."""
    file = SafetensorsFile(Path(out, WEIGHTS))
    tables = [file.entry(key).nbytes for key in placed_tables(model)]
    size = megabytes(Path(out, WEIGHTS).stat().st_size)
    lines = [f"wrote {out}", f"  weights  {size} in {len(file.keys())} tensors, {facts['dtype']}"]
    if tables:
        lines.append(f"  tables   {megabytes(sum(tables))} of it in {len(tables)}, whose layers need no V cache")
    lines.append(f"  folded   {folding(facts, asked)}")
    lines.append(f"use it: python -m scripts.bov_sample --export {out}")
    if tables:
        lines.append("        --bov-placement mmap reads table rows from this file, host from the CPU's memory")
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.bov_export", description="Export a trained model")
    parser.add_argument("tag", nargs="?", default=None, help="folder of the checkpoint (default: the largest model)")
    parser.add_argument("--out", required=True, help="folder to write: new, empty, or an earlier export")
    parser.add_argument("--fold-gamma", action="store_true", help="multiply table rows by their layer's coefficient")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="of all but vectors, which stay (default bf16)")
    parser.add_argument("--step", type=int, default=None, help="step to export (default: the newest)")
    parser.add_argument("--source", default="base", choices=SOURCES, help="kind of checkpoint (default base)")
    args = parser.parse_args(argv)
    checkpoint_dir, step = resolve_checkpoint(args.source, args.tag, args.step)
    model, tokenizer, _ = build_model(checkpoint_dir, step, "cpu", "eval")
    origin = dict(step=step, source=f"{args.source}/{Path(checkpoint_dir).name}")
    facts = export_model(model, tokenizer, args.out, fold_gamma=args.fold_gamma, dtype=DTYPES[args.dtype], **origin)
    print(report(args.out, model, facts, args.fold_gamma))


if __name__ == "__main__":
    run_script("bov_export", main)
