"""Evaluate a trained base model: CORE, bits per byte, samples of its text, and what it does with long contexts.

python -m scripts.base_eval --model-tag d12 --eval bpb,sample
python -m scripts.base_eval --model-tag d12 --eval core --core-tasks paper21
python -m scripts.base_eval --model-tag d12 --eval bpb,context --source text:'books/*.txt'
torchrun --nproc_per_node=8 -m scripts.base_eval --model-tag d24 --device-batch-size 16
python -m scripts.base_eval --audit-paper

bpb and samples go to base_eval/<tag>_<step>.json in the base directory, beside those that an earlier run of other modes
wrote there for the same checkpoint, tokenizer, dtype and validation shard. CORE goes to core.json and items.jsonl in
the checkpoint's folder, task by task, so that a rerun continues, and as upstream's table to base_eval/<tag>_<step>.csv;
context goes to context.json in the checkpoint's folder.
"""

import argparse
import json
import math
import os
import sys
from contextlib import nullcontext
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
from nanochat.context_eval import ITEMS, evaluate_context
from nanochat.core_audit import audit
from nanochat.core_eval import RankFailure, context_of
from nanochat.core_score import NORMS
from nanochat.core_suite import Settings, Store, alone, check_settings, core_identity, evaluate_core, write_csv
from nanochat.dataloader import one_pass_loader, tokenizing_distributed_data_loader_bos_bestfit
from nanochat.dataset import shard_sha256, split_paths
from nanochat.engine import Engine
from nanochat.gpt import config_to_dict
from nanochat.loss_eval import evaluate_bpb
from nanochat.metrics import config_hash
from nanochat.paper import PAPER, read_paper
from nanochat.text_rows import document_batches, read_source
from nanochat.tokenizer import get_token_bytes

MODES = ("core", "bpb", "sample", "context")
MADE_FROM = ("checkpoint_sha256", "model_config_sha256", "tokenizer_sha256", "compute_dtype")  # every part
# part -> its keys in the file
PARTS = {"bpb": ("bpb", "split_tokens", "val_sha256"), "source_bpb": ("source_bpb",), "samples": ("samples",)}
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


def evaluate_source(model, tokenizer, device, batch_size, split_tokens, source):
    """{source, bpb, split_tokens} of --source: each document on its own, cut at the context, every byte counted."""
    rows = (batch_size, model.config.sequence_len, device)
    batches = document_batches(read_source(source), tokenizer, *rows, split_tokens)
    print0(f"bpb of {source}", flush=True)
    with progress(batches, desc="source bpb", unit="batch") as shown:
        bpb = evaluate_bpb(model, shown, None, get_token_bytes(device=device))
    if math.isinf(bpb):
        raise ValueError(f"--source {source}: no byte of text to score; give other text or more --split-tokens")
    return {"source": source, "bpb": bpb, "split_tokens": split_tokens}


def long_batches(model, tokenizer, device, batch_size, split_tokens, source):
    """Function of a row's length that gives the batches of --eval context: of --source, else of the validation split.

    Rows are 4 times as long as in training, so batches have a quarter of their rows.
    """
    batch_size = max(1, batch_size // 4)

    def batches(length):
        if source is not None:
            return document_batches(read_source(source), tokenizer, batch_size, length, device, split_tokens)
        loader = one_pass_loader(tokenizer, batch_size, length, "val", device=device)
        most = len(loader)
        if split_tokens >= 0:
            most = min(most, -(-split_tokens // (batch_size * length * get_dist_info()[3])))
        return islice(loader, most)

    return batches


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
    except (ValueError, TypeError, RecursionError) as error:
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
        "--max-per-task", type=int, default=-1,
        help=f"examples per CORE task, -1 = all; of context per probe and length, -1 = {ITEMS} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--device-batch-size", type=int, default=32, help="rows per batch and rank for bpb (default: %(default)s)"
    )
    parser.add_argument(
        "--split-tokens", type=int, default=40 * 2**19,
        help="tokens per split for bpb, -1 = one pass over val alone (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--device-type", default="", help="cuda, cpu or mps (default: what there is)")
    parser.add_argument(
        "--source", default=None, help="bpb and context of text:GLOB or hf:NAME[:SPLIT[:COLUMN]], each document on its "
        "own, instead of the base directory's splits (default: those)",
    )  # fmt: skip
    core = parser.add_argument_group("CORE")
    core.add_argument(
        "--core-tasks", default="bundle", help="bundle (what its core.yaml says, as upstream), dclm22, paper21 (the "
        "paper's tasks and shots), or labels with commas between them (default: %(default)s)",
    )  # fmt: skip
    core.add_argument(
        "--core-norm", choices=NORMS, default=None, help="choices compare their loss per token (upstream) or per byte "
        "(the paper) (default: byte for paper21, else token)",
    )  # fmt: skip
    core.add_argument(
        "--core-baselines", default="bundle", help="accuracies of guessing: bundle (its table), v1 (DCLM's first), "
        "current (DCLM's corrected), or a CSV file (default: %(default)s)",
    )  # fmt: skip
    core.add_argument(
        "--core-max-len", type=int, default=None, help="crop prompts to so many tokens from the left (default: the "
        "positions of the rotary table)",
    )  # fmt: skip
    core.add_argument(
        "--eval-bundle", default=None, metavar="DIR",
        help="a bundle on this machine (default: eval_bundle in the base directory, fetched when missing)",
    )  # fmt: skip
    core.add_argument(
        "--audit-paper", action="store_true",
        help="only recompute the paper's CORE numbers from its tables (default: evaluate a model)",
    )  # fmt: skip
    return parser.parse_args(argv)


def core_settings(args) -> Settings:
    return Settings(args.core_tasks, args.core_norm, args.core_baselines, args.core_max_len, args.eval_bundle)


def run_core(args, model, tokenizer, device, checkpoint_dir, made_from):
    """Evaluate CORE into core.json, items.jsonl and the CSV file; `made_from`: identity on rank 0, {} elsewhere.

    Raises ValueError, after all else is written, when a task could not be evaluated; at once when another process
    evaluates the same checkpoint.
    """
    settings = core_settings(args)
    with alone(checkpoint_dir) if made_from else nullcontext():
        store = None
        if made_from:
            own = core_identity(settings, args.max_per_task, context_of(model, settings.max_len))
            store = Store(checkpoint_dir, made_from | own)
        summary = evaluate_core(model, tokenizer, device, args.max_per_task, settings=settings, store=store)
    if made_from:
        name = f"{made_from['model_tag']}_{made_from['step']:06d}.csv"
        write_csv(os.path.join(get_base_dir(), "base_eval", name), summary)
    if summary["missing_tasks"]:
        print0(f"not in the bundle, so left out of CORE: {', '.join(summary['missing_tasks'])}")
    if summary["failed_tasks"]:
        told = "; ".join(f"{label}: {why}" for label, why in summary["failed_tasks"].items())
        raise ValueError(f"CORE is incomplete, a rerun evaluates only what is missing. {told}")
    low, high = summary["core_interval"]
    print0(f"CORE {summary['core_metric']:.4f} [{low:.4f}, {high:.4f}] over {len(summary['tasks'])} tasks, per "
           f"{summary['norm']}{'' if summary['standard'] else ', not the standard score of a named list'}")  # fmt: skip
    print0(f"results: {os.path.join(checkpoint_dir, 'core.json')}")


def run_context(args, model, tokenizer, device, checkpoint_dir, made_from):
    """Evaluate long contexts into context.json."""
    batches = long_batches(model, tokenizer, device, args.device_batch_size, args.split_tokens, args.source)
    items = args.max_per_task if args.max_per_task > 0 else ITEMS
    result = evaluate_context(model, tokenizer, get_token_bytes(device=device), batches, items)
    if made_from:
        about = {"kind": "context", **made_from, "source": args.source or "validation split"}
        path = os.path.join(checkpoint_dir, "context.json")
        write_json(path, about | result)
        print(f"results: {path}")


def main(argv=None):
    args = parse_args(argv)
    if args.audit_paper:
        paper = read_paper()
        if not paper:
            raise ValueError(f"--audit-paper: {PAPER} is missing; run it in a checkout of the project")
        print("\n".join(audit(paper)))
        return
    modes = eval_modes(args.eval)
    settings = core_settings(args)  # refuses before anything is loaded
    _, rank, _, _, device = compute_init(args.device_type or autodetect_device_type())
    checkpoint_dir, step = resolve_checkpoint("base", args.model_tag, args.step)
    if "core" in modes:
        check_settings(settings)  # not after hours of other modes
    model, tokenizer, _ = build_model(checkpoint_dir, step, device, "eval")
    tag = os.path.basename(checkpoint_dir)
    made_from = identity(checkpoint_dir, step, model, tokenizer) if rank == 0 else {}
    results = dict(made_from)
    print0(f"{tag}, step {step}: {', '.join(modes)}")
    if "sample" in modes and rank == 0:
        results["samples"] = evaluate_samples(model, tokenizer)
        for kind, texts in results["samples"].items():
            print(f"\n{kind} samples")
            for text in texts:
                print(f"- {text}")
    if "bpb" in modes and args.source is not None:
        found = evaluate_source(model, tokenizer, device, args.device_batch_size, args.split_tokens, args.source)
        results["source_bpb"] = found
        print0(f"{args.source} bpb: {found['bpb']:.6f}")
    elif "bpb" in modes:
        bpb = evaluate_splits(model, tokenizer, device, args.device_batch_size, args.split_tokens)
        results |= {
            "bpb": bpb,
            "split_tokens": args.split_tokens,
            "val_sha256": shard_sha256(split_paths("val")[0]),
        }
        for split, value in bpb.items():
            print0(f"{split} bpb: {value:.6f}")
    if rank == 0 and results.keys() != made_from.keys():
        path = os.path.join(get_base_dir(), "base_eval", f"{tag}_{step:06d}.json")
        write_json(path, with_earlier(results, read_results(path), validation_sha256()))
        print(f"results: {path}")
    if "context" in modes:
        run_context(args, model, tokenizer, device, checkpoint_dir, made_from)
    if "core" in modes:
        run_core(args, model, tokenizer, device, checkpoint_dir, made_from)
    compute_cleanup()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, RankFailure) as error:
        message = f"base_eval: {error}"
    except KeyboardInterrupt:
        message = "\nbase_eval: stopped"
    else:
        message = None
    if is_ddp_requested():
        if message:
            print(message, file=sys.stderr)
        leave(1 if message else 0)
    sys.exit(message)
