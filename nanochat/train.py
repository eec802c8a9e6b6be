"""Training: plan -> build -> loop, as plain functions; saving.py keeps the run. scripts/base_train.py parses flags.

Shapes: B batch, T time.
"""

import gc
import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from nanochat import STARTED, failing, flash_attention, metrics
from nanochat.bov import host
from nanochat.bov.compiled import compile_fused, cpp_compiler
from nanochat.checkpoint_files import meta_path, model_path
from nanochat.common import (
    COMPUTE_DTYPE,
    COMPUTE_DTYPE_REASON,
    autodetect_device_type,
    compute_init,
    file_sha256,
    first_line,
    get_base_dir,
    print0,
)
from nanochat.core_eval import RankFailure
from nanochat.core_suite import evaluate_core
from nanochat.dataloader import (
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
from nanochat.saving import (
    choose_step,
    finished_step_is_whole,
    identity,
    note_evaluation,
    read_done,
    restore,
    save,
    tidy,
)
from nanochat.schedule import Plan, lr_multiplier, muon_momentum, weight_decay_at
from nanochat.stopping import interruptible, listen, stop, stop_requested
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
    identity: dict  # what decides the result, see saving.identity
    hash: str  # of it
    summary: dict
    val_sha: str  # of the validation shard
    one_pass: bool  # evaluate on one pass at most
    loader: object = None
    loader_state: dict | None = None
    val_pass: object = None  # the validation split once, packed when first needed
    step: int = 0
    saved: int | None = None  # the newest step whose checkpoint is complete
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


def build(args) -> Run | None:
    """Set up one rank; None when this very run has finished already. Raises ValueError naming the flag at fault."""
    device_type = args.device_type or autodetect_device_type()
    _, rank, _, world_size, device = compute_init(device_type, seed=args.seed)
    failing.watch()
    if COMPUTE_DTYPE == torch.float16:
        raise ValueError("NANOCHAT_DTYPE=float16 cannot train: gradients underflow; use bfloat16 or float32")
    tokenizer = get_tokenizer()
    if args.vocab_size not in (None, tokenizer.get_vocab_size()):
        raise ValueError(f"--vocab-size {args.vocab_size}: the tokenizer has {tokenizer.get_vocab_size()} tokens")
    config, plan = plan_run(args, tokenizer.get_vocab_size(), world_size)
    data = data_identity() | {"train_part": args.train_part}
    packing = packing_report(tokenizer, args.max_seq_len, "train", max_rows=EPOCH_SAMPLE_ROWS, part=args.train_part)
    summary = plan_summary(config, plan, packing["tokens_per_epoch"]) | {"packing": packing}
    folder, facts = _folder(args), identity(config, plan, args, data, tokenizer.sha256())
    run_hash, done = metrics.config_hash(facts), read_done(folder)
    if args.resume == "auto" and args.resume_from_step < 0 and done and done["config_hash"] == run_hash:
        if finished_step_is_whole(folder, done):
            print0(f"{folder.name}: finished before, validation bpb {done['val_bpb']}")
            return None
    model = fresh_model(config, device, args.seed)
    optimizer = model.setup_optimizer(**plan.optimizer_args, muon=args.muon)
    wandb_run = metrics.start_wandb(args.run, rank, vars(args))
    run = Run(
        args, config, plan, device, rank, world_size, folder, tokenizer, get_token_bytes(device), model, model,
        optimizer, metrics.Metrics(folder, rank, wandb_run), facts, run_hash, summary, data["val_sha"],
        one_pass=data["source"] != "climbmix",
    )  # fmt: skip
    resume_step = choose_step(args, folder, rank, world_size)
    if resume_step is None:
        tidy(run)
        run.log.start(
            metrics.header(config_to_dict(config), host.preset_name(args), summary, data, tokenizer.sha256(), args.seed,
                           args.eval_tokens, args.muon, device)
        )  # fmt: skip
    else:
        restore(run, resume_step)
    run.loader = _training_loader(run)
    compiled, reason = choose_compile(args, device, plan)
    if compiled:
        run.compiled, problem = compile_model(model, device)
        reason = f"running eagerly: the C++ compiler failed ({problem})" if problem else reason
    print0(f"{flash_attention.describe(args.max_seq_len)}; {COMPUTE_DTYPE} ({COMPUTE_DTYPE_REASON}); {reason}")
    return run


def _training_loader(run: Run):
    """Batches from run.loader_state on; with --force-resume and other data, from the beginning."""
    args = run.args

    def loader(state):
        return tokenizing_distributed_data_loader_with_state_bos_bestfit(
            run.tokenizer, args.device_batch_size, args.max_seq_len, "train", device=run.device,
            resume_state_dict=state, part=args.train_part,
        )  # fmt: skip

    if run.loader_state is None:
        return loader(None)
    try:
        return loader(run.loader_state)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if not args.force_resume:
            raise ValueError(
                f"{meta_path(run.folder, run.step)}: {error}; --force-resume starts the data anew"
            ) from error
        print0(f"--force-resume: training data from the beginning ({error})")
        return loader(None)


# ---------------------------------------------------------------------------- loop


def train_step(run: Run) -> float:
    """One optimizer step over plan.total_batch_size tokens; returns the mean loss over micro-batches and ranks.

    FloatingPointError naming step, rank and parameter group when a loss or a gradient is not finite; the weights in
    memory are spoilt then.
    """
    plan, total = run.plan, torch.zeros(2, device=run.device)  # loss, ranks with a gradient that is not finite
    for _ in range(plan.grad_accum_steps):
        start = time.perf_counter()
        x, y, run.loader_state = next(run.loader)
        run.waited += time.perf_counter() - start
        loss = run.compiled(x, y) / plan.grad_accum_steps
        loss.backward()
        total[0] += loss.detach()
    norms = gradient_norms(run.optimizer)
    total[1] = ~norms.isfinite().all()
    own_loss = total[0].clone()
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
        total[0] /= run.world_size
    run.step += 1
    mean_loss, broken = total.tolist()
    if broken or not math.isfinite(mean_loss):
        raise FloatingPointError(_what_broke(run, own_loss.item(), norms.tolist()))
    return mean_loss


def gradient_norms(optimizer) -> torch.Tensor:
    """Euclidean norms of this rank's own gradients, per parameter in the optimizer's order.

    Not finite where a gradient is not, or where it is too large for a sum of squares in fp32.
    """
    norms = []
    for group in optimizer.param_groups:
        grads = [p.grad for p in group["params"] if p.grad is not None]
        norms += [norm.float() for norm in torch._foreach_norm(grads)] if grads else []
    return torch.stack(norms)


def _what_broke(run: Run, loss: float, norms: list[float]) -> str:
    """One line that all ranks agree on: the step, and per rank its loss and the groups whose gradients went bad."""
    norms, bad = iter(norms), []
    for group in run.optimizer.param_groups:
        wrong = [name for name, norm in zip(group["names"], norms, strict=False) if not math.isfinite(norm)]
        bad += [f"the gradient of group {group['name']} ({wrong[0]})"] if wrong else []
    parts = ([f"the loss ({loss})"] if not math.isfinite(loss) else []) + bad[:3]
    parts += [f"{len(bad) - 3} more groups"] if len(bad) > 3 else []
    found = [f"rank {run.rank}: {', '.join(parts)}"] if parts else []
    if run.world_size > 1:
        every = [None] * run.world_size
        dist.all_gather_object(every, found)
        found = [line for lines in every for line in lines]
    return f"not finite at step {run.step}: {'; '.join(found)}. The checkpoints in {run.folder} stand"


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
    bpb = evaluate_bpb(run.compiled, interruptible(run, batches, steps), steps, run.token_bytes)
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
    note_evaluation(run)
    return bpb


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


def score_core(run: Run, say):
    """CORE of the present weights into metrics.jsonl; what prevents it is said, and training goes on.

    A signal stops the run behind the task at work: all of them may take longer than a scheduler waits.
    """
    start = time.perf_counter()

    def between_tasks(line):
        if stop_requested(run):
            stop(run)

    run.model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):  # shapes change with every item
            most = run.args.core_metric_max_per_task
            found = evaluate_core(run.model, run.tokenizer, run.device, most, say=between_tasks)
    except (ValueError, OSError, RankFailure) as error:
        say(f"CORE is not evaluated at step {run.step}: {error}")
        return
    finally:
        run.model.train()
        run.evaluated += time.perf_counter() - start
    run.log.log("core", step=run.step, core_metric=found["core_metric"], results=found["results"], most=most)
    failed = "; ".join(f"{label}: {why}" for label, why in found["failed_tasks"].items())
    value = f"incomplete ({failed})" if failed else f"{found['core_metric']:.4f}"
    say(f"step {run.step}/{run.plan.num_iterations}  CORE {value}")


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
    try:
        run.log.wandb.finish()
    except Exception as error:  # whatever wandb raises, the run is done
        print0(f"wandb failed at the end ({error}); metrics.jsonl is complete without it")


def loop(run: Run):
    """Train to the end of the plan, saving before evaluating; SystemExit after a signal, with a checkpoint saved."""
    args, plan, started_at = run.args, run.plan, run.step
    report = metrics.Reporter(run)
    listen(run)
    while True:
        last = run.step == plan.num_iterations
        if last or (args.save_every > 0 and run.step > 0 and run.step % args.save_every == 0):
            save(run)
        if args.eval_every > 0 and (last or run.step % args.eval_every == 0):
            report.say(f"step {run.step}/{plan.num_iterations}  validation {evaluate(run):.4f} bits per byte")
        if args.sample_every > 0 and run.step > 0 and (last or run.step % args.sample_every == 0):
            sample(run, report.say)
        every = args.core_metric_every  # a run shorter than that never asks for the items
        if 0 < every <= plan.num_iterations and run.step > 0 and (last or run.step % every == 0):
            score_core(run, report.say)
        if last:
            break
        start = time.perf_counter()
        loss = train_step(run)
        seconds = time.perf_counter() - start
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
        if stop_requested(run):
            report.bar.close()
            stop(run)
    finish(run)
    report.bar.close()
    if run.val_bpb is not None:
        minutes = run.seconds / 60
        print0(f"{run.folder.name}: validation {run.val_bpb:.4f} bits per byte after {minutes:.1f} min of training")


def train(args):
    """The whole of scripts/base_train.py behind its flags. ValueError for what the user can mend."""
    try:
        run = build(args)
        if run is not None:
            try:
                loop(run)
            finally:
                run.loader.close()
    except torch.OutOfMemoryError as error:
        rows = args.device_batch_size
        fewer = next((rows // k for k in range(2, rows + 1) if rows % k == 0), None)
        advice = f"--device-batch-size {fewer} needs less for the same run" if fewer else "more ranks need less each"
        raise ValueError(f"{first_line(error)}; {advice}, and --dry-run tells how much") from error
