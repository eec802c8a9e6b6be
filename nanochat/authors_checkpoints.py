"""Checkpoints of the paper authors' fork: its model flags as our axes, its weights under our keys."""

import re

import torch

from nanochat.bov.host import axes_of
from nanochat.bov.layers import parse_layers

# their flag on the value -> (bov_source, bov_combine, bov_coeff that the flag itself decides)
WRITERS = {
    "v_scale_learn": ("residual", "replace", None),
    "v_from_v1": ("first", "replace", None),
    "add_init_v": ("first", "add", None),
    "v_from_x0": ("x0", "replace", None),
    "add_init_res_v": ("x0", "add", None),
    "v_from_value_emb": ("table", "replace", None),
    "add_init_value_emb": ("table", "add", None),
    "add_init_value_emb_nanogpt": ("table", "add", "gate"),
}
# their flag on the layers, first match wins, no match = last third
LAYERS = {
    "on_every_layer": "all",
    "on_every_two_layers": "every:2",
    "on_second_half_layers": "last:1/2",
    "on_last_two_thirds_layers": "last:2/3",
}
COEFFICIENTS = {"learn_init_coeffs": "scalar", "learn_init_scaling_vec": "head"}
KNOWN = {*WRITERS, *LAYERS, *COEFFICIENTS, "value_emb_shared"}
SHARED_FIELDS = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "window_pattern")


def authors_config(model_type: str, model_config: dict) -> dict:
    """Our model_config for a checkpoint whose metadata has `model_type` and `model_config` in the authors' terms.

    Raises ValueError naming the model type or the flags when the variant is not a point on our axes, or when the type
    names a variant whose flags the config lacks.
    """
    config = {name: model_config[name] for name in SHARED_FIELDS if name in model_config}
    flags = {name for name, value in model_config.items() if name not in SHARED_FIELDS and value is True}
    if model_type in ("gpt", "gpt_nolambda"):
        _refuse(model_type, flags - {"use_lambdas"})
        return config if model_config.get("use_lambdas", True) else {**config, "trunk": "plain"}
    if not re.fullmatch(r"gpt_base(_\w+)?", model_type):
        raise ValueError(
            f"model_type {model_type!r} is another architecture: only gpt and gpt_base types have our axes"
        )
    _refuse(model_type, flags - KNOWN)
    config |= {"trunk": "plain", "ve_layers": "none"}
    writers = [name for name in WRITERS if name in flags]
    if not writers and model_type == "gpt_base":
        return config
    if len(writers) != 1:
        found = ", ".join(writers) or "none"
        raise ValueError(
            f"model_type {model_type!r} needs exactly one of {', '.join(WRITERS)} in model_config: {found}"
        )
    source, combine, coeff = WRITERS[writers[0]]
    return config | {
        "bov_layers": next((layers for flag, layers in LAYERS.items() if flag in flags), "last:1/3"),
        "bov_source": source,
        "bov_combine": combine,
        "bov_coeff": coeff or next((kind for flag, kind in COEFFICIENTS.items() if flag in flags), "fixed"),
        "bov_shared": "value_emb_shared" in flags,
    }


def _refuse(model_type, flags):
    if flags:
        raise ValueError(f"model_type {model_type!r} uses {', '.join(sorted(flags))}, which our axes do not have")


def authors_state(state: dict, config, expected) -> dict:
    """Their weights under our keys: without the unused c_v of bank layers, a shared table once.

    `expected` holds the keys of the model to be loaded. Raises ValueError when the copies of a shared table differ.
    """
    state = {
        k: v
        for k, v in state.items()
        if k in expected or not re.fullmatch(r"transformer\.h\.\d+\.attn\.c_v\.weight", k)
    }
    if axes_of(config)["bov_shared"]:
        first, *others = (f"value_embeds.{i}.weight" for i in parse_layers(config.bov_layers, config.n_layer))
        for key in others:
            if key in state and not torch.equal(state.pop(key), state[first]):
                raise ValueError(f"{key} differs from {first}, but the table is shared: the checkpoint is damaged")
    return state
