"""Evaluate a trained base model: bits per byte on both splits, and samples of its text.

python -m scripts.base_eval --model-tag d12 --eval bpb,sample
torchrun --nproc_per_node=8 -m scripts.base_eval --model-tag d24 --device-batch-size 16

Results go to the screen and to base_eval/<tag>_<step>.json in the base directory, beside those that an earlier run of
other modes wrote there for the same checkpoint, tokenizer, dtype and validation shard.
"""

import argparse
import json
import os
import sys
from itertools import islice

from nanochat.checkpoint_manager import build_model, model_path, resolve_checkpoint
from nanochat.common import (
    COMPUTE_DTYPE,
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    file_sha256,
    get_base_dir,
    get_dist_info,
    is_ddp_requested,
    leave,
    print0,
    progress,
    write_json,
)
from nanochat.dataloader import one_pass_loader, tokenizing_distributed_data_loader_bos_bestfit
from nanochat.dataset import shard_sha256, split_paths
from nanochat.engine import Engine
from nanochat.gpt import config_to_dict
from nanochat.loss_eval import evaluate_bpb
from nanochat.metrics import config_hash
from nanochat.tokenizer import get_token_bytes

MODES = ("core", "bpb", "sample")
MADE_FROM = ("checkpoint_sha256", "model_config_sha256", "tokenizer_sha256", "compute_dtype")  # every part
PARTS = {"bpb": ("bpb", "split_tokens", "val_sha256"), "samples": ("samples",)}  # part -> its keys in the file
PROMPTS = (
    "The largest ocean on Earth is",
    "Water freezes at a temperature of",
    "One, two, three, four,",
    "The opposite of night is",
    "The first president of the United States was",
    "In the morning I like to",
    "If a pen costs 2 dollars, then 3 pens cost",
)


def eval_modes(text):
    """Modes of --eval, in order; ValueError names an unknown one."""
    modes = [mode.strip() for mode in text.split(",")]
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"--eval {mode!r}: use a comma-separated list of {', '.join(MODES)}")
    return modes


def evaluate_samples(model, tokenizer):
    """{"conditioned": one greedy continuation per prompt, "unconditioned": 8 texts at temperature 1}."""
    engine, bos = Engine(model, tokenizer), tokenizer.get_bos_token_id()
    conditioned = []
    for prompt in PROMPTS:
        tokens = tokenizer.encode(prompt, prepend=bos)
        (row,), _ = engine.generate_batch(tokens, max_tokens=16, temperature=0)
        conditioned.append(tokenizer.decode(row[1:]))
    rows, _ = engine.generate_batch([bos], num_samples=8, max_tokens=128, temperature=1.0)
    return {"conditioned": conditioned, "unconditioned": [tokenizer.decode(row[1:]) for row in rows]}


def bpb_steps(split_tokens, batch_size, sequence_len, world_size):
    """Evaluation batches per rank for `split_tokens`, rounded down; ValueError when that is none."""
    per_step = batch_size * sequence_len * world_size
    steps = split_tokens // per_step
    if steps < 1:
        raise ValueError(
            f"--split-tokens {split_tokens}: one batch on all ranks has {per_step} tokens; ask for at least that many, "
            "lower --device-batch-size, or use -1 for one pass over the validation split"
        )
    return steps


def evaluate_splits(model, tokenizer, device, batch_size, split_tokens):
    """{split: bits per byte}; split_tokens -1 = one pass over the validation split alone."""
    token_bytes = get_token_bytes(device=device)
    shape = (batch_size, model.config.sequence_len)
    if split_tokens == -1:
        loader = one_pass_loader(tokenizer, *shape, "val", device=device)
        jobs = {"val": (loader, len(loader))}
    else:
        steps = bpb_steps(split_tokens, *shape, get_dist_info()[3])
        load = tokenizing_distributed_data_loader_bos_bestfit
        jobs = {split: (load(tokenizer, *shape, split, device=device), steps) for split in ("train", "val")}
    results = {}
    for split, (loader, steps) in jobs.items():
        print0(f"{split} bpb over {steps} batches")
        # read to its end, since a bar counts a batch only when the next one is asked for
        with progress(islice(loader, steps), total=steps, desc=f"{split} bpb") as batches:
            results[split] = evaluate_bpb(model, batches, None, token_bytes)
    return results


def identity(checkpoint_dir, step, model, tokenizer):
    """What the results are of: checkpoint, config, tokenizer and dtype."""
    return {
        "model_tag": os.path.basename(checkpoint_dir),
        "step": step,
        "checkpoint_sha256": file_sha256(model_path(checkpoint_dir, step)),
        "model_config_sha256": config_hash(config_to_dict(model.config)),
        "tokenizer_sha256": tokenizer.sha256(),
        "compute_dtype": str(COMPUTE_DTYPE).removeprefix("torch."),
    }


def validation_sha256():
    """sha256 of the validation shard; None where there is none."""
    try:
        return shard_sha256(split_paths("val")[0])
    except ValueError:
        return None


def read_results(path):
    """The results at `path`; {} where there are none or the file is damaged, which one line says."""
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as f:
            return dict(json.load(f))
    except (ValueError, TypeError) as error:
        print(f"{path}: not a file of results ({error}); written anew")
        return {}


def with_earlier(results, earlier, val_sha256):
    """`results` and those parts of `earlier` that this run did not make.

    A part made from another checkpoint, config, tokenizer, dtype or validation shard (val_sha256; None = no shard to
    compare with) is dropped, which one line says.
    """
    present = results if val_sha256 is None else results | {"val_sha256": val_sha256}
    merged = dict(results)
    for part, keys in PARTS.items():
        if part in results or part not in earlier:
            continue
        changed = [key for key in (*MADE_FROM, *keys) if key in present and earlier.get(key) != present[key]]
        if changed:
            print(f"earlier {part} dropped: made with another {', '.join(changed)}")
        else:
            merged |= {key: earlier[key] for key in keys if key in earlier}
    return merged


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.base_eval", description="Evaluate a base model")
    parser.add_argument("--eval", default="core,bpb,sample", help="comma-separated (default: %(default)s)")
    parser.add_argument("--model-tag", default=None, help="folder under base_checkpoints (default: the largest model)")
    parser.add_argument("--step", type=int, default=None, help="step to load (default: the newest)")
    parser.add_argument(
        "--max-per-task", type=int, default=-1, help="examples per CORE task, -1 = all (default: %(default)s)"
    )
    parser.add_argument(
        "--device-batch-size", type=int, default=32, help="rows per batch and rank for bpb (default: %(default)s)"
    )
    parser.add_argument(
        "--split-tokens", type=int, default=40 * 2**19,
        help="tokens per split for bpb, -1 = one pass over val alone (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--device-type", default="", help="cuda, cpu or mps (default: what there is)")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    modes = eval_modes(args.eval)
    _, rank, _, _, device = compute_init(args.device_type or autodetect_device_type())
    checkpoint_dir, step = resolve_checkpoint("base", args.model_tag, args.step)
    model, tokenizer, _ = build_model(checkpoint_dir, step, device, "eval")
    tag = os.path.basename(checkpoint_dir)
    results = identity(checkpoint_dir, step, model, tokenizer) if rank == 0 else {}
    print0(f"{tag}, step {step}: {', '.join(modes)}")
    if "sample" in modes and rank == 0:
        results["samples"] = evaluate_samples(model, tokenizer)
        for kind, texts in results["samples"].items():
            print(f"\n{kind} samples")
            for text in texts:
                print(f"- {text}")
    if "bpb" in modes:
        bpb = evaluate_splits(model, tokenizer, device, args.device_batch_size, args.split_tokens)
        results |= {
            "bpb": bpb,
            "split_tokens": args.split_tokens,
            "val_sha256": shard_sha256(split_paths("val")[0]),
        }
        for split, value in bpb.items():
            print0(f"{split} bpb: {value:.6f}")
    if "core" in modes:
        print0("CORE evaluation is not in this version")
    if rank == 0:
        path = os.path.join(get_base_dir(), "base_eval", f"{tag}_{step:06d}.json")
        write_json(path, with_earlier(results, read_results(path), validation_sha256()))
        print(f"results: {path}")
    compute_cleanup()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"base_eval: {error}")
    except KeyboardInterrupt:
        sys.exit("\nbase_eval: stopped")
    if is_ddp_requested():
        leave()
