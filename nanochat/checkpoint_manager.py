"""Checkpoints in upstream's layout: model_000123.pt, optim_000123_rank0.pt, and meta_000123.json, written last.

A step is complete when its model and its metadata are there; a kill while saving leaves the step before it the newest.
"""

import json
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from nanochat.authors_checkpoints import authors_config, authors_state
from nanochat.common import atomic_write, get_base_dir, is_ddp_initialized, print0, write_json
from nanochat.gpt import GPT, config_from_dict
from nanochat.tokenizer import get_tokenizer

SOURCES = {"base": "base_checkpoints", "sft": "chatsft_checkpoints", "rl": "chatrl_checkpoints"}

# parameters by name -> what in the config decides whether they exist
AXIS_OF_KEY = (
    (r"resid_lambdas|x0_lambdas|backout_lambda", "trunk"),
    (r"smear_.*", "smear"),
    (r"value_embeds\..*", "ve_layers, bov_layers, bov_source or bov_shared"),
    (r".*\.attn\.ve_gate\.weight", "ve_layers, bov_layers or bov_coeff"),
    (r".*\.attn\.(gamma_v|lambda_v|alpha_v|beta_v)", "bov_layers, bov_combine or bov_coeff"),
    (r".*\.attn\.c_v\.weight", "bov_layers, bov_source or bov_combine"),
    (r".*\.mlp\..*", "mlp_hidden or n_layer"),
    (r"transformer\.h\..*", "n_layer"),
)


def model_path(checkpoint_dir, step) -> Path:
    return Path(checkpoint_dir, f"model_{step:06d}.pt")


def meta_path(checkpoint_dir, step) -> Path:
    return Path(checkpoint_dir, f"meta_{step:06d}.json")


def optimizer_path(checkpoint_dir, step, rank) -> Path:
    return Path(checkpoint_dir, f"optim_{step:06d}_rank{rank}.pt")


def _say(message):
    """Notices go to stderr: stdout belongs to the caller's results."""
    print0(message, file=sys.stderr)


# ---------------------------------------------------------------------------- saving


def save_checkpoint(checkpoint_dir, step, model_data, optimizer_data, meta_data, rank=0):
    """Write one step: each rank its optimizer shard, if it has one, then rank 0 the model and, last, the metadata.

    Under torchrun every rank calls it: rank 0 waits for all shards before the metadata makes the step complete. A step
    saved before is replaced. NaN and infinity become null in the metadata.
    """
    world_size = dist.get_world_size() if is_ddp_initialized() else 1
    if rank == 0:
        meta_path(checkpoint_dir, step).unlink(missing_ok=True)
    shard = optimizer_path(checkpoint_dir, step, rank)
    if optimizer_data is None:
        shard.unlink(missing_ok=True)
    else:
        _save(shard, optimizer_data)
    if world_size > 1:
        dist.barrier()
    if rank == 0:
        for path in (path for owner, path in _shards(checkpoint_dir, step).items() if owner >= world_size):
            path.unlink()  # of a run on more ranks
        _save(model_path(checkpoint_dir, step), model_data)
        write_json(meta_path(checkpoint_dir, step), meta_data)
        _say(f"saved step {step} to {checkpoint_dir}")


def _save(path, data):
    with atomic_write(path) as f:
        torch.save(data, f)


# ---------------------------------------------------------------------------- finding


def _shards(checkpoint_dir, step) -> dict[int, Path]:
    """{rank: path} of the optimizer shards of one step."""
    found = {}
    for path in Path(checkpoint_dir).glob(f"optim_{step:06d}_rank*.pt"):
        if match := re.fullmatch(r"optim_\d+_rank(\d+)\.pt", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def list_steps(checkpoint_dir) -> list[int]:
    """Complete steps in ascending order; empty for a folder that is not there."""
    names = os.listdir(checkpoint_dir) if os.path.isdir(checkpoint_dir) else []
    models = {int(match[1]) for name in names if (match := re.fullmatch(r"model_(\d{6,})\.pt", name))}
    metas = {int(match[1]) for name in names if (match := re.fullmatch(r"meta_(\d{6,})\.json", name))}
    return sorted(models & metas)


def find_last_step(checkpoint_dir) -> int:
    """Newest complete step. Raises FileNotFoundError when there is none."""
    steps = list_steps(checkpoint_dir)
    if not steps:
        raise FileNotFoundError(
            f"no complete checkpoint (model_*.pt with meta_*.json) in {checkpoint_dir}: train first"
        )
    return steps[-1]


def find_largest_model(checkpoints_dir) -> str:
    """The tag of the deepest d<number> model with a complete step, else of the newest model; ties go to the newest.

    Raises FileNotFoundError when no tag has a complete step.
    """
    tags = os.listdir(checkpoints_dir) if os.path.isdir(checkpoints_dir) else []
    ranked = []
    for tag in tags:
        if steps := list_steps(os.path.join(checkpoints_dir, tag)):
            depth = re.match(r"d(\d+)", tag)
            newest = meta_path(os.path.join(checkpoints_dir, tag), steps[-1]).stat().st_mtime
            ranked.append((int(depth[1]) if depth else -1, newest, tag))
    if not ranked:
        raise FileNotFoundError(f"no model with a complete checkpoint in {checkpoints_dir}: train one first")
    return max(ranked)[2]


def resolve_checkpoint(source, model_tag=None, step=None):
    """(checkpoint folder, step) for a source of SOURCES; tag None = largest model, step None = newest."""
    if source not in SOURCES:
        raise ValueError(f"model source {source!r}: use one of {', '.join(SOURCES)}")
    return _resolve_dir(os.path.join(get_base_dir(), SOURCES[source]), model_tag, step)


def _resolve_dir(checkpoints_dir, model_tag, step):
    if model_tag is None:
        model_tag = find_largest_model(checkpoints_dir)
        _say(f"no model tag given, using {model_tag}")
    checkpoint_dir = os.path.join(checkpoints_dir, model_tag)
    if not os.path.isdir(checkpoint_dir):
        tags = sorted(os.listdir(checkpoints_dir)) if os.path.isdir(checkpoints_dir) else []
        raise FileNotFoundError(f"no model {model_tag!r} in {checkpoints_dir}; there are: {', '.join(tags) or 'none'}")
    return checkpoint_dir, find_last_step(checkpoint_dir) if step is None else step


# ---------------------------------------------------------------------------- loading


def load_checkpoint(checkpoint_dir, step, device, load_optimizer=False, rank=0):
    """(model state, optimizer state of `rank` or None, metadata) of one step.

    Raises FileNotFoundError listing the steps there are, or the shards, and ValueError naming a file that is damaged.
    """
    if step not in list_steps(checkpoint_dir):
        steps = ", ".join(map(str, list_steps(checkpoint_dir))) or "none"
        raise FileNotFoundError(f"no complete step {step} in {checkpoint_dir}; complete steps: {steps}")
    meta_data = _read_meta(meta_path(checkpoint_dir, step))
    model_data = _read(model_path(checkpoint_dir, step), device)
    if not load_optimizer:
        return model_data, None, meta_data
    path = optimizer_path(checkpoint_dir, step, rank)
    if not path.exists():
        ranks = ", ".join(map(str, _shards(checkpoint_dir, step))) or "none"
        raise FileNotFoundError(f"{path}: no optimizer shard of rank {rank}; there are shards of ranks: {ranks}")
    return model_data, _read(path, device), meta_data


def _read(path, device):
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({error}): delete this step or choose another") from error


def _read_meta(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): delete this step or choose another") from error


def load_optimizer_shards(checkpoint_dir, step, device) -> list:
    """The optimizer state of every rank that wrote `step`, in rank order, for a run on another number of ranks.

    Raises FileNotFoundError when there is none or a rank is missing.
    """
    shards = _shards(checkpoint_dir, step)
    if list(shards) != list(range(len(shards))) or not shards:
        raise FileNotFoundError(
            f"{checkpoint_dir}: step {step} has optimizer shards of ranks {list(shards)}, not of all from 0 on"
        )
    return [_read(path, device) for path in shards.values()]


def load_optimizer_state(source, device, rank, model_tag=None, step=None):
    """The optimizer shard of one rank, or None when the checkpoint has none."""
    checkpoint_dir, step = resolve_checkpoint(source, model_tag, step)
    path = optimizer_path(checkpoint_dir, step, rank)
    if not path.exists():
        _say(f"no optimizer state: {path}")
        return None
    return _read(path, device)


def build_model(checkpoint_dir, step, device, phase):
    """(model, tokenizer, metadata) of one step; phase "train" or "eval" sets the module's mode.

    Reads our checkpoints, upstream's, and those of the paper's authors. Embeddings and tables get the compute dtype, as
    at initialisation; every other weight keeps the dtype it was saved in.
    Raises ValueError when weights, config and tokenizer contradict each other, besides what load_checkpoint raises.
    """
    if phase not in ("train", "eval"):
        raise ValueError(f"phase {phase!r}: use train or eval")
    device = torch.device(device)
    model_data, _, meta_data = load_checkpoint(checkpoint_dir, step, device)
    if "model_config" not in meta_data:
        raise ValueError(f"{meta_path(checkpoint_dir, step)} has no model_config: not a checkpoint of a model")
    model = model_from_state(model_data, meta_data, device)
    model.train(phase == "train")
    tokenizer = get_tokenizer()
    if tokenizer.get_vocab_size() != model.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {get_base_dir()}/tokenizer has {tokenizer.get_vocab_size()} tokens and the model of "
            f"{checkpoint_dir} {model.config.vocab_size}: they come from different runs; check NANOCHAT_BASE_DIR"
        )
    return model, tokenizer, meta_data


def model_from_state(model_data, meta_data, device):
    """A GPT on `device` from a state dict and its metadata (model_config, and model_type in the authors' files)."""
    config = dict(meta_data["model_config"])
    model_type = meta_data.get("model_type")
    if model_type is not None:
        config = authors_config(model_type, config)
    config.setdefault("window_pattern", "L")  # checkpoints from before the windows attend to everything
    config = config_from_dict(config)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    own = model.state_dict()
    state = {key.removeprefix("_orig_mod."): value for key, value in model_data.items()}
    if model_type is not None:
        state = authors_state(state, config, own)
    _add_neutral(state, own)
    check_keys(state, own)
    model.load_state_dict(_cast_tables(state, own), assign=True)
    return model


def _add_neutral(state, own):
    """Parameters that older models lack, at the values where they do nothing."""
    neutral = {
        "resid_lambdas": 1.0,
        "x0_lambdas": 0.0,
        "backout_lambda": 0.0,
        "smear_lambda": 0.0,
        "smear_gate.weight": 0.0,
    }
    missing = [key for key in neutral if key in own and key not in state]
    for key in missing:
        state[key] = torch.full_like(own[key], neutral[key])
    if missing:
        _say(f"the checkpoint lacks {', '.join(missing)}: set to values without effect")


def _cast_tables(state, own):
    """`state` with embeddings and value tables in the dtype the model gives them."""
    tables = [key for key in state if key == "transformer.wte.weight" or key.startswith("value_embeds.")]
    changed = sorted(
        {f"{state[key].dtype} to {own[key].dtype}" for key in tables if state[key].dtype != own[key].dtype}
    )
    if changed:
        _say(f"embeddings and tables cast from {', '.join(changed)}")
    return state | {key: state[key].to(own[key].dtype) for key in tables}


def check_keys(state, own):
    """ValueError with the first differing parameters and the config fields that decide about them."""
    problems = [f"{key} is missing in the checkpoint ({_axis_of(key)})" for key in own if key not in state]
    problems += [f"{key} is not in the model ({_axis_of(key)})" for key in state if key not in own]
    problems += [
        f"{key} is {tuple(state[key].shape)} in the checkpoint and {tuple(own[key].shape)} in the model"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError("weights and model_config do not belong together: " + "; ".join(problems[:5]) + more)


def _axis_of(key):
    axis = next((axis for pattern, axis in AXIS_OF_KEY if re.fullmatch(pattern, key)), None)
    return f"see {axis} in model_config" if axis else "no field of model_config explains it"


def load_model_from_dir(checkpoints_dir, device, phase, model_tag=None, step=None):
    """build_model for a tag under `checkpoints_dir`; tag None = the largest model, step None = the newest."""
    checkpoint_dir, step = _resolve_dir(checkpoints_dir, model_tag, step)
    _say(f"loading {checkpoint_dir}, step {step}")
    return build_model(checkpoint_dir, step, device, phase)


def load_model(source, *args, **kwargs):
    """load_model_from_dir in the folder of a source: base, sft or rl."""
    if source not in SOURCES:
        raise ValueError(f"model source {source!r}: use one of {', '.join(SOURCES)}")
    return load_model_from_dir(os.path.join(get_base_dir(), SOURCES[source]), *args, **kwargs)
