"""A model ready for use in one folder: model.safetensors, config.json, tokenizer/.

No weight in it is unused. Matrices, embeddings and tables are stored in one dtype; vectors (coefficients, lambdas) keep
theirs. A table's row is contiguous, so that `--bov-placement mmap` reads rows from this very file. With gamma folded,
a bank layer's value is the stored row itself.
"""

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from nanochat.bov.placement import SafetensorsFile, check_placement, place, placed_tables
from nanochat.checkpoint_manager import check_keys
from nanochat.common import print0, seal, seal_holds, write_json
from nanochat.gpt import GPT, config_from_dict, config_to_dict
from nanochat.metrics import git_commit
from nanochat.tokenizer import RustBPETokenizer, save_token_bytes

FORMAT, VERSION = "nanochat-bov", 2  # since 2 with the hashes of the weights
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer"
STORED = (torch.float32, torch.bfloat16, torch.float16)
REMEDY = "make it again with python -m scripts.bov_export"

# ---------------------------------------------------------------------------- writing


def export_model(model, tokenizer, out, *, fold_gamma, dtype, step=None, source=None) -> dict:
    """Write `model` and its tokenizer to the folder `out`; returns what config.json holds.

    fold_gamma: multiply the rows of a table by its layer's coefficient where that alone stands between row and value
    (table, replace, scalar or head); elsewhere nothing is folded. dtype: one of STORED. step and source: where the
    model comes from, for config.json. An earlier export in `out` is replaced; a kill meanwhile leaves a folder that
    load_exported refuses.
    Raises ValueError when `out` holds anything else, when layers with different coefficients share a table, when a
    weight is not finite in `dtype`, and when the tokenizer is not the model's.
    """
    out = Path(os.path.normpath(out))  # no way past the check through new/..
    assert dtype in STORED, dtype
    if tokenizer.get_vocab_size() != model.config.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the model {model.config.vocab_size}")
    _check_folder(out)
    state, config, folded = fold(model) if fold_gamma else (model.state_dict(), model.config, {})
    state = {key: _stored(key, tensor, dtype) for key, tensor in state.items()}
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "model_config": config_to_dict(config),
        "padded_vocab_size": model.transformer.wte.num_embeddings,
        "dtype": str(dtype).removeprefix("torch."),
        "folded": folded,
        "tokenizer_sha256": tokenizer.sha256(),
        "sha256": {key: tensor_sha256(tensor) for key, tensor in state.items()},
        "source": source,
        "step": step,
        "commit": git_commit(),
    }
    facts = seal(facts)
    (out / CONFIG).unlink(missing_ok=True)
    _write_weights(out / WEIGHTS, state)
    tokenizer.save(out / TOKENIZER)
    save_token_bytes(tokenizer, out / TOKENIZER)
    write_json(out / CONFIG, facts)
    return facts


def _check_folder(out):
    """ValueError unless `out` is new, empty, or an export of ours, possibly an interrupted one."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")
    weights = out / WEIGHTS
    ours = weights.exists() and SafetensorsFile(weights).metadata.get("writer") == FORMAT
    for name in sorted(os.listdir(out)) if out.exists() else ():
        leftover = name.startswith(".") and name.endswith(".tmp")
        if not (leftover or (ours and name in (WEIGHTS, CONFIG, TOKENIZER))):
            raise ValueError(f"--out {out} holds {name}, which is not an export's: name a new folder")


@torch.no_grad()
def fold(model):
    """(state, config, {"layer.coefficient": values}) of an equal model whose tables hold coefficient * row.

    The product is made in fp32. Unchanged, with an empty dict, where a model has nothing to fold.
    Raises ValueError when layers with different coefficients share a table.
    """
    state, config, folded = model.state_dict(), model.config, {}
    for key, banks in placed_tables(model).items():
        layers = [i for i, block in enumerate(model.transformer.h) if block.attn.bank in banks]
        attentions = [model.transformer.h[i].attn for i in layers]
        names = list(banks[0].spec.coefficients(attentions[0].n_kv_head))
        if not names:
            continue
        (name,) = names
        first, *others = (attn.get_parameter(name) for attn in attentions)
        if not all(torch.equal(first, other) for other in others):
            raise ValueError(
                f"--fold-gamma: layers {', '.join(map(str, layers))} share one table (bov_shared) and have different "
                f"{name}, which cannot be folded into it: export without --fold-gamma"
            )
        rows = state[key].float().view(-1, attentions[0].n_kv_head, attentions[0].head_dim)
        state[key] = (rows * first.float().view(-1, 1)).view(state[key].shape)
        for i in layers:
            folded[f"{i}.{name}"] = state.pop(f"transformer.h.{i}.attn.{name}").tolist()
        config = dataclasses.replace(config, bov_coeff="fixed")
    return state, config, folded


def _stored(key, tensor, dtype):
    """A weight as the file holds it; ValueError when it is not finite there."""
    if tensor.is_meta:
        raise ValueError(f"{key} is not in memory: load the model with --bov-placement device to export it")
    tensor = tensor.detach().to("cpu", dtype if tensor.ndim > 1 else tensor.dtype).contiguous()
    if not torch.isfinite(tensor).all():
        advice = "use --dtype bf16" if dtype == torch.float16 else "the model is damaged"
        raise ValueError(f"{key} has numbers that are not finite in {str(dtype).removeprefix('torch.')}: {advice}")
    return tensor


def tensor_sha256(tensor) -> str:
    """sha256 over dtype, shape and bytes of a contiguous CPU tensor."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _write_weights(path, state):
    """save_file, under a temporary name until the file is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file(state, temporary, metadata={"format": "pt", "writer": FORMAT})
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------------------- reading


def load_exported(folder, device, *, placement="device"):
    """(model in eval mode, tokenizer, config.json's content) of an exported folder.

    Matrices stay in the dtype they are stored in; embeddings and tables get the compute dtype, as from a checkpoint.
    placement (see bov/placement.py): with host the tables of bank layers never reach `device`, with mmap never memory.
    Every weight that is read is compared with its hash; with mmap the tables are not.
    Raises ValueError naming what is missing, damaged, of another version, or does not belong together.
    """
    folder, device = Path(folder), torch.device(device)
    facts = _read_config(folder / CONFIG)
    tokenizer = RustBPETokenizer.from_directory(folder / TOKENIZER)
    model = _on_meta(facts, folder / CONFIG)
    size, expected = tokenizer.get_vocab_size(), model.config.vocab_size
    if size != expected or tokenizer.sha256() != facts["tokenizer_sha256"]:
        wrong = f"{size} tokens, the model {expected}" if size != expected else "not the tokens it was exported with"
        raise ValueError(f"{folder / TOKENIZER} has {wrong}: {REMEDY}")
    check_placement(model, placement, folder / WEIGHTS)
    file = SafetensorsFile(folder / WEIGHTS)
    own = model.state_dict()
    try:
        check_keys(file.entries, own)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}; {REMEDY}") from error
    _fill(model, file, facts["sha256"], device, {"host": "cpu", "mmap": "meta"}.get(placement, device))
    place(model, placement, file.path)
    return model.eval(), tokenizer, facts


def _read_config(path) -> dict:
    """config.json with every field that loading needs; ValueError naming the file."""
    if not path.exists():
        raise ValueError(f"{path} is missing: {path.parent} is no complete export; {REMEDY}")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); {REMEDY}") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"{path} is not the config of an export (format {FORMAT}): {REMEDY}")
    if facts.get("version") != VERSION:
        raise ValueError(f"{path} has format version {facts.get('version')!r}; this code reads {VERSION}: {REMEDY}")
    missing = sorted({"model_config", "padded_vocab_size", "tokenizer_sha256", "sha256", "seal"} - facts.keys())
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; {REMEDY}")
    if not seal_holds(facts) or not isinstance(facts["sha256"], dict):
        raise ValueError(f"{path} is not what was written: {REMEDY}")
    return facts


def _on_meta(facts, path):
    """The model without memory; initialising it there draws nothing and decides the dtypes."""
    padded = facts["padded_vocab_size"]
    try:
        config = config_from_dict(facts["model_config"])
        if type(padded) is not int or padded < config.vocab_size:
            raise ValueError(f"padded_vocab_size {padded!r} is less than vocab_size {config.vocab_size}")
        with torch.device("meta"):
            model = GPT(config, pad_vocab_size_to=padded)
            model.init_weights()
    except (ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path}: {str(error)[:300]}; {REMEDY}") from error
    return model


def _fill(model, file, hashes, device, tables):
    """Read every weight, one after the other, to `device`; those of placed_tables to the device `tables`."""
    own, placed, cast, state = model.state_dict(), placed_tables(model), set(), {}
    for key, entry in file.entries.items():
        if entry.dtype not in STORED:
            raise ValueError(f"{file.path}: {key} is {entry.dtype}, not a weight; {REMEDY}")
        embedding = key == "transformer.wte.weight" or key.startswith("value_embeds.")
        dtype = own[key].dtype if embedding else entry.dtype
        if dtype != entry.dtype:
            cast.add(f"{entry.dtype} to {dtype}")
        if key in placed and torch.device(tables).type == "meta":
            state[key] = own[key]
            continue
        tensor = file.tensor(key)
        if tensor_sha256(tensor) != hashes.get(key):
            raise ValueError(f"{file.path}: {key} is not what was exported (its sha256 differs); {REMEDY}")
        state[key] = tensor.to(tables if key in placed else device, dtype)
    model.load_state_dict(state, assign=True)
    model.reset_rotary()
    if cast:
        print0(f"embeddings and tables cast from {', '.join(sorted(cast))}", file=sys.stderr)
