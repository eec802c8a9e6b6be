"""Models from checkpoints: ours, upstream's, those of the paper's authors. The files are checkpoint_files.py's."""

import os
import re

import torch

from nanochat.authors_checkpoints import authors_config, authors_state
from nanochat.checkpoint_files import (
    check_step,
    find_last_step,
    list_steps,
    meta_path,
    model_path,
    optimizer_path,
    read_meta,
    read_tensors,
    require_step,
    save_checkpoint,
    say,
    shards,
)
from nanochat.common import first_line, get_base_dir
from nanochat.gpt import GPT, config_from_dict
from nanochat.tokenizer import get_tokenizer

__all__ = [
    "build_model", "check_keys", "find_largest_model", "find_last_step", "flag_of", "list_steps", "load_checkpoint",
    "load_model", "load_model_from_dir", "load_optimizer_shards", "load_optimizer_state", "meta_path", "model_path",
    "optimizer_path", "resolve_checkpoint", "save_checkpoint",
]  # fmt: skip

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


# ---------------------------------------------------------------------------- finding


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
        say(f"no model tag given, using {model_tag}")
    checkpoint_dir = os.path.join(checkpoints_dir, model_tag)
    if not os.path.isdir(checkpoint_dir):
        tags = sorted(os.listdir(checkpoints_dir)) if os.path.isdir(checkpoints_dir) else []
        raise FileNotFoundError(f"no model {model_tag!r} in {checkpoints_dir}; there are: {', '.join(tags) or 'none'}")
    return checkpoint_dir, find_last_step(checkpoint_dir) if step is None else step


# ---------------------------------------------------------------------------- loading


def load_checkpoint(checkpoint_dir, step, device, load_optimizer=False, rank=0, checked=False):
    """(model state, optimizer state of `rank` or None, metadata) of one step.

    Files are compared with their sizes and hashes first, unless they have been `checked` before.
    Raises FileNotFoundError listing the steps there are, or the shards, and ValueError naming a file that is damaged.
    """
    require_step(checkpoint_dir, step)
    if not checked:
        check_step(checkpoint_dir, step, hashes=True)
    meta_data = read_meta(checkpoint_dir, step)
    model_data = read_tensors(model_path(checkpoint_dir, step), device)
    if not load_optimizer:
        return model_data, None, meta_data
    path = optimizer_path(checkpoint_dir, step, rank)
    if not path.exists():
        ranks = ", ".join(map(str, shards(checkpoint_dir, step))) or "none"
        raise FileNotFoundError(f"{path}: no optimizer shard of rank {rank}; there are shards of ranks: {ranks}")
    return model_data, read_tensors(path, device), meta_data


def load_optimizer_shards(checkpoint_dir, step, device) -> list:
    """The optimizer state of every rank that wrote `step`, in rank order, for a run on another number of ranks.

    Raises FileNotFoundError when there is none or a rank is missing.
    """
    found = shards(checkpoint_dir, step)
    if list(found) != list(range(len(found))) or not found:
        raise FileNotFoundError(
            f"{checkpoint_dir}: step {step} has optimizer shards of ranks {list(found)}, not of all from 0 on"
        )
    return [read_tensors(path, device) for path in found.values()]


def load_optimizer_state(source, device, rank, model_tag=None, step=None):
    """The optimizer shard of one rank, or None when the checkpoint has none."""
    checkpoint_dir, step = resolve_checkpoint(source, model_tag, step)
    path = optimizer_path(checkpoint_dir, step, rank)
    if not path.exists():
        say(f"no optimizer state: {path}")
        return None
    return read_tensors(path, device)


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
    try:
        model = model_from_state(model_data, meta_data, device)
    except (ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        problem = error if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(
            f"{model_path(checkpoint_dir, step)} and {meta_path(checkpoint_dir, step).name}: {problem}"
        ) from error
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
    state = {key.removeprefix("_orig_mod."): value for key, value in model_data.items()}
    if not all(isinstance(value, torch.Tensor) for value in state.values()) or config.n_layer > max(len(state), 1):
        raise ValueError(f"not the weights of a model of {config.n_layer} layers")
    with torch.device("meta"):
        model = GPT(config)
    own = model.state_dict()
    if model_type is not None:
        state = authors_state(state, config, own)
    _add_neutral(state, own, device)
    check_keys(state, own)  # before memory is asked for
    model.to_empty(device=device)
    model.init_weights()
    model.load_state_dict(_cast_tables(state, model.state_dict()), assign=True)
    return model


def _add_neutral(state, own, device):
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
        state[key] = torch.full_like(own[key], neutral[key], device=device)
    if missing:
        say(f"the checkpoint lacks {', '.join(missing)}: set to values without effect")


def _cast_tables(state, own):
    """`state` with embeddings and value tables in the dtype the model gives them."""
    tables = [key for key in state if key == "transformer.wte.weight" or key.startswith("value_embeds.")]
    changed = sorted(
        {f"{state[key].dtype} to {own[key].dtype}" for key in tables if state[key].dtype != own[key].dtype}
    )
    if changed:
        say(f"embeddings and tables cast from {', '.join(changed)}")
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
    if axis is None:
        return "no field of model_config explains it"
    flags = re.sub(r"\w+_\w+|trunk|smear", lambda field: flag_of(field[0]), axis)
    return f"see {axis} in model_config, set by {flags}"


# fields of GPTConfig that no flag of the same name sets
FLAGS = {
    "n_layer": "--depth", "n_embd": "--aspect-ratio and --head-dim", "n_head": "--aspect-ratio and --head-dim",
    "n_kv_head": "--kv-heads", "sequence_len": "--max-seq-len", "vocab_size": "the tokenizer",
}  # fmt: skip


def flag_of(field: str) -> str:
    """The flag of base_train that sets a field of GPTConfig."""
    return FLAGS.get(field, "--" + field.replace("_", "-"))


def load_model_from_dir(checkpoints_dir, device, phase, model_tag=None, step=None):
    """build_model for a tag under `checkpoints_dir`; tag None = the largest model, step None = the newest."""
    checkpoint_dir, step = _resolve_dir(checkpoints_dir, model_tag, step)
    say(f"loading {checkpoint_dir}, step {step}")
    return build_model(checkpoint_dir, step, device, phase)


def load_model(source, *args, **kwargs):
    """load_model_from_dir in the folder of a source: base, sft or rl."""
    if source not in SOURCES:
        raise ValueError(f"model source {source!r}: use one of {', '.join(SOURCES)}")
    return load_model_from_dir(os.path.join(get_base_dir(), SOURCES[source]), *args, **kwargs)
