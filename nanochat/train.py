"""Training: plan -> build -> loop -> save, as plain functions. scripts/base_train.py only parses flags.

Shapes: B batch, T time.
"""

import gc
import json
import math
import shutil
import signal
import time
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from nanochat import STARTED, flash_attention, metrics
from nanochat.bov import host
from nanochat.bov.compiled import compile_fused, cpp_compiler
from nanochat.checkpoint_manager import (
    find_last_step,
    list_steps,
    load_checkpoint,
    load_optimizer_shards,
    meta_path,
    model_path,
    save_checkpoint,
)
from nanochat.common import (
    COMPUTE_DTYPE,
    COMPUTE_DTYPE_REASON,
    autodetect_device_type,
    compute_init,
    file_sha256,
    get_base_dir,
    jsonable,
    print0,
    progress,
    write_json,
)
from nanochat.dataloader import (
    merge_states,
    one_pass_loader,
    packing_report,
    tokenizing_distributed_data_loader_bos_bestfit,
    tokenizing_distributed_data_loader_with_state_bos_bestfit,
)
from nanochat.dataset import data_identity
from nanochat.engine import Engine
from nanochat.gpt import GPT, GPTConfig, config_to_dict
from nanochat.loss_eval import evaluate_bpb
from nanochat.plan import meta_model, plan_run, plan_summary
from nanochat.schedule import Plan, lr_multiplier, muon_momentum, weight_decay_at
from nanochat.tokenizer import get_token_bytes, get_tokenizer

CPU_COMPILE_STEPS = 100
EPOCH_SAMPLE_ROWS = 512  # packed to estimate the tokens of an epoch

# ---------------------------------------------------------------------------- build


@dataclass
class Run:
    """Everything one rank holds while it trains."""

    args: object
    config: GPTConfig
    plan: Plan
    device: torch.device
    rank: int
    world_size: int
    folder: Path
    tokenizer: object
    token_bytes: torch.Tensor
    model: GPT
    compiled: object  # the model as called in training; the model itself when not compiled
    optimizer: object
    log: metrics.Metrics
    hash: str
    summary: dict
    val_sha: str  # of the validation shard
    one_pass: bool  # evaluate on one pass at most
    loader: object = None
    loader_state: dict | None = None
    val_pass: object = None  # the validation split once, packed when first needed
    step: int = 0
    seconds: float = 0.0  # of training steps, without evaluation and saving
    waited: float = 0.0  # of them spent waiting for the loader, since this process began
    evaluated: float = 0.0  # seconds of evaluation, since this process began
    val_bpb: float | None = None
    min_val_bpb: float = math.inf
    stop: list = field(default_factory=list)  # signals received


def fresh_model(config: GPTConfig, device, seed: int) -> GPT:
    """A model with every weight written, the same under one seed."""
    model = meta_model(config).to_empty(device=device)
    torch.manual_seed(seed)
    model.init_weights()
    return model


def choose_compile(args, device, plan: Plan) -> tuple[bool, str]:
    """(compile?, one line that says why)."""
    if args.no_compile:
        return False, "running eagerly: --no-compile"
    if device.type == "cuda":
        found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        return bool(found), "compiling the model" if found else "running eagerly: no C compiler found"
    if cpp_compiler() is None:
        return False, "running eagerly: no C++ compiler found"
    if plan.num_iterations < CPU_COMPILE_STEPS:
        return False, f"running eagerly: compiling would not pay in under {CPU_COMPILE_STEPS} steps"
    return True, "compiling the element-wise parts"


def compile_model(model: GPT, device):
    """(the model as called in training, None or why it runs eagerly after all).

    Compiled whole on CUDA; on a CPU only its element-wise parts are.
    """
    if device.type == "cuda":
        return torch.compile(model, dynamic=False), None
    return model, compile_fused()


def _folder(args) -> Path:
    return Path(get_base_dir(), "base_checkpoints", args.model_tag or f"d{args.depth}")


def identity(config, plan: Plan, args, data: dict, tokenizer_hash: str) -> dict:
    """What decides a run's result; neither paths, names, ranks nor the device batch are part of it."""
    own = {k: v for k, v in asdict(plan).items() if k not in ("device_batch_size", "world_size", "grad_accum_steps")}
    text = {"source": data["source"]}  # of the text itself where it is known: shards differ between parquet versions
    text |= {split: data[f"{split}_text_sha"] or data[f"{split}_sha"] for split in ("train", "val")}
    text |= {"train_part": args.train_part} if args.train_part != 1 else {}
    return {
        "config": config_to_dict(config), "plan": own, "data": text, "tokenizer": tokenizer_hash, "seed": args.seed,
        "muon": args.muon, "dtype": str(COMPUTE_DTYPE), "eval_tokens": args.eval_tokens,
    }  # fmt: skip


def build(args) -> Run | None:
    """Set up one rank; None when this very run has finished already. Raises ValueError naming the flag at fault."""
    device_type = args.device_type or autodetect_device_type()
    _, rank, _, world_size, device = compute_init(device_type, seed=args.seed)
    if COMPUTE_DTYPE == torch.float16:
        raise ValueError("NANOCHAT_DTYPE=float16 cannot train: gradients underflow; use bfloat16 or float32")
    tokenizer = get_tokenizer()
    if args.vocab_size not in (None, tokenizer.get_vocab_size()):
        raise ValueError(f"--vocab-size {args.vocab_size}: the tokenizer has {tokenizer.get_vocab_size()} tokens")
    config, plan = plan_run(args, tokenizer.get_vocab_size(), world_size)
    data = data_identity() | {"train_part": args.train_part}
    packing = packing_report(tokenizer, args.max_seq_len, "train", max_rows=EPOCH_SAMPLE_ROWS, part=args.train_part)
    summary = plan_summary(config, plan, packing["tokens_per_epoch"]) | {"packing": packing}
    folder, run_hash = _folder(args), metrics.config_hash(identity(config, plan, args, data, tokenizer.sha256()))
    done = metrics.read_done(folder)
    if args.resume == "auto" and done and done["config_hash"] == run_hash:
        print0(f"{folder.name}: finished before, validation bpb {done['val_bpb']}")
        return None
    model = fresh_model(config, device, args.seed)
    optimizer = model.setup_optimizer(**plan.optimizer_args, muon=args.muon)
    wandb_run = metrics.start_wandb(args.run, rank, vars(args))
    run = Run(
        args, config, plan, device, rank, world_size, folder, tokenizer, get_token_bytes(device), model, model,
        optimizer, metrics.Metrics(folder, rank, wandb_run), run_hash, summary, data["val_sha"],
        one_pass=data["source"] != "climbmix",
    )  # fmt: skip
    resume_step = _resume_step(args, folder)
    if resume_step is None:
        run.log.start(
            metrics.header(config_to_dict(config), host.preset_name(args), summary, data, tokenizer.sha256(), args.seed,
                           args.eval_tokens, device)
        )  # fmt: skip
    else:
        restore(run, resume_step)
    run.loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(
        tokenizer, args.device_batch_size, args.max_seq_len, "train", device=device, resume_state_dict=run.loader_state,
        part=args.train_part,
    )  # fmt: skip
    compiled, reason = choose_compile(args, device, plan)
    if compiled:
        run.compiled, problem = compile_model(model, device)
        reason = f"running eagerly: the C++ compiler failed ({problem})" if problem else reason
    print0(f"{flash_attention.describe(args.max_seq_len)}; {COMPUTE_DTYPE} ({COMPUTE_DTYPE_REASON}); {reason}")
    return run


def _resume_step(args, folder) -> int | None:
    """The saved step to go on from, None to begin; ValueError rather than begin over another run's checkpoints."""
    steps = list_steps(folder)
    if args.resume_from_step >= 0:
        return args.resume_from_step
    if steps and args.resume != "auto":
        raise ValueError(
            f"{folder} holds checkpoints (newest: step {steps[-1]}): continue with --resume auto or "
            "--resume-from-step, or give another --model-tag, or delete the folder"
        )
    return find_last_step(folder) if steps else None


def restore(run: Run, step: int):
    """Weights, optimizer, data position, random state and clocks of a saved step, on any number of ranks."""
    model_data, _, meta = load_checkpoint(run.folder, step, run.device)
    if "config_hash" not in meta:
        raise ValueError(
            f"{run.folder} was not written by this trainer and cannot be continued; give another --model-tag"
        )
    if meta["config_hash"] != run.hash:
        raise ValueError(
            f"{run.folder} holds a run of other settings ({_differences(meta['identity'], run)}): give the same flags, "
            "another --model-tag, or delete the folder"
        )
    run.model.load_state_dict(model_data, strict=True)
    if meta["ranks"] == run.world_size:
        states = [load_checkpoint(run.folder, step, run.device, load_optimizer=True, rank=run.rank)[1]]
    else:
        states = load_optimizer_shards(run.folder, step, run.device)
    run.optimizer.load(states)
    torch.set_rng_state(states[0]["rng_state"].cpu())
    loop = meta["loop_state"]
    run.step, run.loader_state = step, meta["dataloader_state_dict"]
    run.seconds, run.waited = loop["total_training_time"], loop["loader_seconds"]
    run.min_val_bpb = math.inf if loop["min_val_bpb"] is None else loop["min_val_bpb"]
    run.log.cut(step)
    _forget_later_steps(run, step)
    print0(f"continuing {run.folder.name} at step {step} of {run.plan.num_iterations}")


def _forget_later_steps(run: Run, step: int):
    """Steps after the one that is continued belong to a course that is given up, like the metrics after it."""
    later = [other for other in list_steps(run.folder) if other > step]
    if run.world_size > 1:
        dist.barrier()  # every rank has looked
    if later and run.rank == 0:
        print0(f"deleting the later steps {', '.join(map(str, later))} of {run.folder}")
        for other in later:
            for path in run.folder.glob(f"*_{other:06d}[._]*"):
                path.unlink()


def _differences(saved: dict, run: Run) -> str:
    """The fields in which a saved run's identity differs from this one's, with both values."""
    own = jsonable(identity(run.config, run.plan, run.args, data_identity(), run.tokenizer.sha256()))
    lines = []
    for name in sorted(saved.keys() | own.keys()):
        a, b = saved.get(name), own.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            keys = [k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
            lines += [f"{name}.{k}: {a.get(k)} there, {b.get(k)} here" for k in keys]
        elif a != b:
            lines.append(f"{name}: {a} there, {b} here")
    return "; ".join(lines)


# ---------------------------------------------------------------------------- loop


def train_step(run: Run) -> float:
    """One optimizer step over plan.total_batch_size tokens; returns the mean loss over micro-batches and ranks."""
    plan, total = run.plan, torch.zeros((), device=run.device)
    for _ in range(plan.grad_accum_steps):
        start = time.perf_counter()
        x, y, run.loader_state = next(run.loader)
        run.waited += time.perf_counter() - start
        loss = run.compiled(x, y) / plan.grad_accum_steps
        loss.backward()
        total += loss.detach()
    factor = lr_multiplier(run.step, plan)
    for group in run.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
        if group["kind"] == "muon":
            group["momentum"] = muon_momentum(run.step, plan)
            group["weight_decay"] = weight_decay_at(run.step, plan)
    run.optimizer.step()
    run.model.zero_grad(set_to_none=True)
    if run.world_size > 1:
        dist.all_reduce(total)
        total /= run.world_size
    run.step += 1
    return total.item()


def _interruptible(run: Run, batches, steps: int):
    """The batches under a progress bar; on one rank a signal between two of them saves and ends the process."""
    for batch in progress(islice(batches, steps), total=steps, desc="validation", unit="batch", leave=False):
        if run.stop and run.world_size == 1:
            stop(run)
        yield batch


def stop(run: Run):
    """After a signal: save, say how to go on, and end with 128 + its number."""
    save(run)
    print0(f"stopped at step {run.step}; the same command with --resume auto continues", flush=True)
    raise SystemExit(128 + _stop_requested(run))


def _validation(run: Run):
    """(batches, how many of them) for --eval-tokens of the validation split, -1 for one pass over it.

    Never more than one pass, except on ClimbMix, whose validation shard is smaller than upstream's default.
    """
    rows, length, wanted = run.args.device_batch_size, run.args.max_seq_len, run.args.eval_tokens
    per_batch = rows * length * run.world_size
    if run.one_pass or wanted < 0:
        run.val_pass = run.val_pass or one_pass_loader(run.tokenizer, rows, length, "val", run.device)
        if not 0 <= wanted < len(run.val_pass) * per_batch:
            return run.val_pass, len(run.val_pass)
    endless = tokenizing_distributed_data_loader_bos_bestfit(run.tokenizer, rows, length, "val", device=run.device)
    return endless, max(1, wanted // per_batch)


def evaluate(run: Run) -> float:
    """Validation bits per byte of the present weights; FloatingPointError when that is not a number."""
    start = time.perf_counter()
    batches, steps = _validation(run)
    run.model.eval()
    bpb = evaluate_bpb(run.compiled, _interruptible(run, batches, steps), steps, run.token_bytes)
    run.model.train()
    if math.isnan(bpb):
        raise FloatingPointError(f"validation is not a number at step {run.step}; earlier checkpoints stand")
    run.val_bpb, run.min_val_bpb = bpb, min(bpb, run.min_val_bpb)
    seconds = time.perf_counter() - start
    run.evaluated += seconds
    tokens = run.step * run.plan.total_batch_size
    run.log.log(
        "eval", step=run.step, tokens=tokens, flops=tokens * run.summary["flops_per_token"], seconds=run.seconds,
        val_bpb=bpb, coeffs=host.coefficients(run.model), peak_bytes=metrics.peak_bytes(run.device),
        eval_seconds=seconds,
    )  # fmt: skip
    _note_in_metadata(run)
    return bpb


def _note_in_metadata(run: Run):
    """The result of an evaluation into the metadata of the checkpoint of the same step, if it was saved."""
    path = meta_path(run.folder, run.step)
    if run.rank == 0 and path.exists():
        write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"val_bpb": run.val_bpb})


SAMPLE_PROMPTS = ("The President of the United States", "Water is made of", "Two and two make", "Once upon a time")


def sample(run: Run, say):
    """A greedy continuation of a few prompts, on rank 0."""
    if run.rank == 0:
        engine = Engine(run.model, run.tokenizer)
        with torch.compiler.set_stance("force_eager"):  # shapes change with every token
            for prompt in SAMPLE_PROMPTS:
                tokens = run.tokenizer.encode(prompt, prepend=run.tokenizer.get_bos_token_id())
                rows, _ = engine.generate_batch(tokens, num_samples=1, max_tokens=16, temperature=0.0)
                say("  " + run.tokenizer.decode(rows[0]))


def save(run: Run):
    """A checkpoint of the present step; every rank calls it. FloatingPointError, and no file, for weights gone bad."""
    bad = [name for name, p in run.model.named_parameters() if not p.isfinite().all()]
    if bad:
        raise FloatingPointError(
            f"not saved: at step {run.step} {', '.join(bad[:5])} hold values that are not finite; earlier checkpoints "
            f"in {run.folder} stand"
        )
    states = [run.loader_state]
    if run.world_size > 1:
        states = [None] * run.world_size
        dist.all_gather_object(states, run.loader_state)
    meta = {
        "step": run.step, "val_bpb": None, "ranks": run.world_size, "model_config": config_to_dict(run.config),
        "user_config": {k: v for k, v in vars(run.args).items()}, "device_batch_size": run.args.device_batch_size,
        "max_seq_len": run.args.max_seq_len, "total_batch_size": run.plan.total_batch_size,
        "dataloader_state_dict": merge_states(states) if run.loader_state is not None else None,
        "loop_state": {
            "min_val_bpb": run.min_val_bpb, "total_training_time": run.seconds, "loader_seconds": run.waited
        },
        "config_hash": run.hash,
        "identity": identity(run.config, run.plan, run.args, data_identity(), run.tokenizer.sha256()),
    }  # fmt: skip
    optimizer = run.optimizer.state_for_save() | {"rng_state": torch.get_rng_state()}
    save_checkpoint(run.folder, run.step, run.model.state_dict(), optimizer, meta, rank=run.rank)


def finish(run: Run):
    """After the last evaluation: the end line and DONE.json."""
    if run.rank == 0:
        run.log.log(
            "end", step=run.step, seconds=run.seconds, val_bpb=run.val_bpb, min_val_bpb=run.min_val_bpb,
            peak_bytes=metrics.peak_bytes(run.device), loader_seconds=run.waited,
        )  # fmt: skip
        checkpoint = file_sha256(model_path(run.folder, run.step))
        metrics.write_done(
            run.folder,
            config_hash=run.hash,
            step=run.step,
            val_bpb=run.val_bpb,
            checkpoint_sha256=checkpoint,
            val_sha=run.val_sha,
        )
    run.log.wandb.finish()


def _stop_requested(run: Run) -> int:
    """The signal that any rank received, 0 for none; all ranks get the same answer."""
    signals = torch.tensor([run.stop[0] if run.stop else 0], device=run.device)
    if run.world_size > 1:
        dist.all_reduce(signals, op=dist.ReduceOp.MAX)
    return int(signals.item())


def _listen(run: Run):
    """The first SIGINT or SIGTERM asks the loop to save and stop, the second ends the process at once."""

    def note(number, _):
        run.stop.append(number)
        signal.signal(number, signal.SIG_DFL)
        print0("\nstopping soon, saving first (again to stop at once)", flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)


def loop(run: Run):
    """Train to the end of the plan, saving before evaluating; SystemExit after a signal, with a checkpoint saved."""
    args, plan, started_at = run.args, run.plan, run.step
    report = metrics.Reporter(run)
    _listen(run)
    while True:
        last = run.step == plan.num_iterations
        if last or (args.save_every > 0 and run.step % args.save_every == 0 and run.step > started_at):
            save(run)
        if args.eval_every > 0 and (last or run.step % args.eval_every == 0):
            report.say(f"step {run.step}/{plan.num_iterations}  validation {evaluate(run):.4f} bits per byte")
        if args.sample_every > 0 and run.step > 0 and (last or run.step % args.sample_every == 0):
            sample(run, report.say)
        if last:
            break
        start = time.perf_counter()
        loss = train_step(run)
        seconds = time.perf_counter() - start
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {run.step}; the checkpoints in {run.folder} stand")
        run.seconds += seconds
        tokens = run.step * plan.total_batch_size
        run.log.log(
            "train", step=run.step, tokens=tokens, flops=tokens * run.summary["flops_per_token"], seconds=run.seconds,
            loss=loss, lr_mult=lr_multiplier(run.step - 1, plan), tok_per_sec=plan.total_batch_size / seconds,
        )  # fmt: skip
        report.step(loss, seconds)
        if run.step == started_at + 1:  # what set-up left behind is not worth scanning again and again
            gc.collect()
            gc.freeze()
            started = time.perf_counter() - STARTED
            run.log.log("start", step=run.step, startup_seconds=started, of_which_evaluation=run.evaluated)
        if _stop_requested(run):
            report.bar.close()
            stop(run)
    finish(run)
    report.bar.close()
    if run.val_bpb is not None:
        minutes = run.seconds / 60
        print0(f"{run.folder.name}: validation {run.val_bpb:.4f} bits per byte after {minutes:.1f} min of training")


def train(args):
    """The whole of scripts/base_train.py behind its flags. ValueError for what the user can mend."""
    if args.core_metric_every > 0:
        print0("CORE is not evaluated: this version has no CORE evaluation; --core-metric-every is skipped")
    run = build(args)
    if run is not None:
        loop(run)
