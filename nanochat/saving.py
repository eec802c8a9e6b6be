"""Saving a run, and going on with one: what is kept, what is refused, what is cleaned up.

`run` is a nanochat.train.Run everywhere. Every rank calls every function here.
"""

import math
import os
from dataclasses import asdict

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

from nanochat import metrics
from nanochat.checkpoint_files import (
    check_step,
    delete_leftovers,
    delete_step,
    keep_newest,
    list_steps,
    meta_path,
    newest_whole_step,
    optimizer_path,
    read_meta,
    require_step,
    save_checkpoint,
    write_meta,
)
from nanochat.checkpoint_manager import check_keys, flag_of, load_checkpoint, load_optimizer_shards
from nanochat.common import COMPUTE_DTYPE, first_line, jsonable, print0
from nanochat.dataloader import merge_states
from nanochat.gpt import config_to_dict

# ---------------------------------------------------------------------------- which run is it


def identity(config, plan, args, data: dict, tokenizer_hash: str) -> dict:
    """What decides a run's result; neither paths, names, ranks nor the device batch are part of it."""
    own = {k: v for k, v in asdict(plan).items() if k not in ("device_batch_size", "world_size", "grad_accum_steps")}
    text = {"source": data["source"]}  # of the text itself where it is known: shards differ between parquet versions
    text |= {split: data[f"{split}_text_sha"] or data[f"{split}_sha"] for split in ("train", "val")}
    text |= {"train_part": args.train_part} if args.train_part != 1 else {}
    return jsonable({
        "config": config_to_dict(config), "plan": own, "data": text, "tokenizer": tokenizer_hash, "seed": args.seed,
        "muon": args.muon, "dtype": str(COMPUTE_DTYPE), "eval_tokens": args.eval_tokens,
    })  # fmt: skip


def differences(saved: dict, own: dict) -> str:
    """The fields in which two identities differ, with both values and, for the model's, the flag."""
    lines = []
    for name in sorted(saved.keys() | own.keys()):
        a, b = saved.get(name), own.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            for k in sorted(a.keys() | b.keys()):
                flag = f" ({flag_of(k)})" if name == "config" else ""
                lines += [f"{name}.{k}: {a.get(k)} there, {b.get(k)} here{flag}"] if a.get(k) != b.get(k) else []
        elif a != b:
            lines.append(f"{name}: {a} there, {b} here")
    return "; ".join(lines)


# ---------------------------------------------------------------------------- going on


def choose_step(args, folder, rank: int, world_size: int) -> int | None:
    """The saved step to go on from, None to begin; rank 0 claims the folder, looks and tells the others.

    ValueError rather than begin over another run's checkpoints, for a chosen step that is damaged, and while another
    process trains in the folder.
    """
    found = [None]
    if rank == 0:
        claim(folder)
        found = [_look(args, folder)]
    if world_size > 1:
        dist.broadcast_object_list(found)
    return found[0]


WAIT = 120.0  # seconds for another process to end, which a scheduler may have told to
_claimed = {}  # folder -> lock, held until this process ends


def claim(folder):
    """Keep other trainers out of `folder`: two would delete each other's files."""
    if str(folder) in _claimed:
        return
    os.makedirs(folder, exist_ok=True)
    lock = FileLock(os.path.join(folder, ".lock"))
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print0(f"waiting for another process that trains in {folder}", flush=True)
            lock.acquire(timeout=WAIT)
    except Timeout:
        raise ValueError(
            f"{folder}: another process trains there; wait for its end, or give another --model-tag"
        ) from None
    except NotImplementedError:
        print0(f"{folder}: this file system has no locks, so nothing keeps a second trainer out", flush=True)
        return
    _claimed[str(folder)] = lock


def _look(args, folder) -> int | None:
    step = args.resume_from_step
    if step >= 0:
        require_step(folder, step)
        check_step(folder, step, optimizer=True, hashes=True)
        return step
    steps = list_steps(folder)
    if steps and args.resume != "auto":
        raise ValueError(
            f"{folder} holds checkpoints (newest: step {steps[-1]}): continue with --resume auto or "
            "--resume-from-step, or give another --model-tag, or delete the folder"
        )
    return newest_whole_step(folder, optimizer=True, hashes=True)


def restore(run, step: int):
    """Weights, optimizer, data position, random state and clocks of a saved step, on any number of ranks."""
    model_data, _, meta = load_checkpoint(run.folder, step, run.device, checked=True)
    forced = _check_identity(run, meta)
    try:
        ranks, position = meta["ranks"], meta["dataloader_state_dict"]
        seconds, waited, best = (
            meta["loop_state"][k] for k in ("total_training_time", "loader_seconds", "min_val_bpb")
        )
        numbers = all(isinstance(value, int | float) for value in (ranks, seconds, waited, best or 0))
        if not numbers or not isinstance(position, dict):
            raise TypeError("numbers and a data position")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{meta_path(run.folder, step)} lacks {error}: choose another step") from error
    if step > run.plan.num_iterations:
        raise ValueError(f"{run.folder}: step {step} is beyond the run's {run.plan.num_iterations} steps")
    own = run.model.state_dict()
    try:
        check_keys(model_data, own)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{run.folder}: step {step} does not fit the model of the flags: {error}") from error
    run.model.load_state_dict(model_data, strict=True)
    _restore_optimizer(run, step, ranks)
    run.step, run.saved, run.loader_state = step, step, position
    run.seconds, run.waited = seconds, waited
    run.min_val_bpb = math.inf if best is None else best
    try:
        run.log.cut(step)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{run.log.path} is damaged ({first_line(error)}); move it away to go on without it"
        ) from error
    if forced:
        run.log.log("forced", step=step, differs=forced)
    tidy(run)
    print0(f"continuing {run.folder.name} at step {step} of {run.plan.num_iterations}")


def _check_identity(run, meta) -> str:
    """ValueError naming what differs from the run that was saved; with --force-resume it is said and returned."""
    if "config_hash" not in meta or not isinstance(meta.get("identity"), dict):
        raise ValueError(
            f"{run.folder} was not written by this trainer and cannot be continued; give another --model-tag"
        )
    if meta["config_hash"] == run.hash:
        return ""
    found = differences(meta["identity"], run.identity)
    if not run.args.force_resume:
        raise ValueError(
            f"{run.folder} holds a run of other settings ({found}): give the same flags, another --model-tag, "
            "or delete the folder; --force-resume goes on all the same"
        )
    print0(f"--force-resume: going on although {found}")
    return found


def _restore_optimizer(run, step, ranks):
    if ranks == run.world_size:
        states = [load_checkpoint(run.folder, step, run.device, load_optimizer=True, rank=run.rank, checked=True)[1]]
    else:
        states = load_optimizer_shards(run.folder, step, run.device)
    try:
        run.optimizer.load(states)
        torch.set_rng_state(states[0]["rng_state"].cpu())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        problem = error if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
        path = optimizer_path(run.folder, step, run.rank)
        raise ValueError(f"{path} is not the optimizer state of this model: {problem}") from error


def tidy(run):
    """Delete what kills left, and the steps after run.step: they belong to a course that is given up."""
    if run.world_size > 1:
        dist.barrier()  # every rank has read what it needs
    if run.rank == 0:
        later = [step for step in list_steps(run.folder) if step > run.step]
        if later:
            print0(f"deleting the later steps {', '.join(map(str, later))} of {run.folder}")
        for step in later:
            delete_step(run.folder, step)
        delete_leftovers(run.folder)


# ---------------------------------------------------------------------------- saving


def save(run):
    """A checkpoint of the present step, unless it has one; then --keep-last.

    Raises FloatingPointError, and writes nothing, for weights gone bad, and OSError naming a file that cannot be
    written; the steps before stand in either case.
    """
    if run.saved != run.step:
        _save(run)
    if run.rank == 0 and run.args.keep_last > 0:
        keep_newest(run.folder, run.args.keep_last)


def _save(run):
    bad = [name for name, p in run.model.named_parameters() if not p.isfinite().all()]
    if bad:
        raise FloatingPointError(
            f"not saved: at step {run.step} {', '.join(bad[:5])} hold values that are not finite; earlier checkpoints "
            f"in {run.folder} stand"
        )
    run.log.sync()
    optimizer = run.optimizer.state_for_save() | {"rng_state": torch.get_rng_state()}
    save_checkpoint(run.folder, run.step, run.model.state_dict(), optimizer, _metadata(run), rank=run.rank)
    run.saved = run.step


def _metadata(run) -> dict:
    states = [run.loader_state]
    if run.world_size > 1:
        states = [None] * run.world_size
        dist.all_gather_object(states, run.loader_state)
    return {
        "step": run.step, "val_bpb": None, "ranks": run.world_size, "model_config": config_to_dict(run.config),
        "user_config": dict(vars(run.args)), "device_batch_size": run.args.device_batch_size,
        "max_seq_len": run.args.max_seq_len, "total_batch_size": run.plan.total_batch_size,
        "dataloader_state_dict": merge_states(states) if run.loader_state is not None else None,
        "loop_state": {
            "min_val_bpb": run.min_val_bpb, "total_training_time": run.seconds, "loader_seconds": run.waited
        },
        "config_hash": run.hash, "identity": run.identity,
    }  # fmt: skip


def note_evaluation(run):
    """The result of an evaluation into the metadata of the checkpoint of the same step, if it was saved."""
    if run.rank == 0 and meta_path(run.folder, run.step).exists():
        write_meta(run.folder, run.step, read_meta(run.folder, run.step) | {"val_bpb": run.val_bpb})


def finished_step_is_whole(folder, done) -> bool:
    """False, and said, when the checkpoint that DONE.json tells of lies there and is not as large as it was."""
    step = done["step"]
    try:
        if step in list_steps(folder):  # a record may outlive its checkpoint
            check_step(folder, step)
    except ValueError as error:
        print0(f"finished before, but {error}")
        return False
    return True


def read_done(folder) -> dict | None:
    """DONE.json of a finished run, None when there is none; ValueError naming a file that is damaged."""
    try:
        done = metrics.read_done(folder)
        if done is not None and not (isinstance(done, dict) and {"config_hash", "step", "val_bpb"} <= done.keys()):
            raise ValueError("not the end of a run")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder}/DONE.json cannot be used ({first_line(error)}); delete it to train on") from error
    return done
