"""The glue both hosts call. A host is a GPT module with upstream nanochat's names; the names touched here are

model.config, model.transformer.{wte, h}, model.value_embeds, block.attn.{c_q, c_v, ve_gate, n_kv_head, head_dim},
model.{resid_lambdas, x0_lambdas, backout_lambda, smear_lambda, smear_gate}.

Shapes: B batch, T time, C n_embd, H kv heads, D head dim, V padded vocab.
"""

import argparse

import torch
import torch.nn as nn

from nanochat.bov import decode, values
from nanochat.bov.layers import GRAMMAR, is_explicit, parse_layers
from nanochat.bov.placement import OnDevice
from nanochat.bov.presets import preset
from nanochat.bov.spec import ValueSpec, layer_specs

# field of GPTConfig = flag: (default = upstream's model, help)
AXES = {
    "trunk": ("full", "full: resid/x0 lambdas and backout; plain: none of them, the paper's baseline"),
    "smear": (True, "mix the previous token's embedding into the current one"),
    "ve_layers": ("every:2", f"layers with upstream's gated additive value embedding: {GRAMMAR}"),
    "bov_layers": ("none", f"layers with a bank: {GRAMMAR}"),
    "bov_source": ("table", "where the value comes from: table, x0 (x0 W_V), first (layer 0's value), residual"),
    "bov_combine": ("replace", "replace x W_V by the source, or add to it"),
    "bov_coeff": ("scalar", "learned scalar, fixed, one per kv head, or a gate on the input"),
    "bov_shared": (False, "one table for all bank layers"),
    "mlp_hidden": (0, "hidden width of the MLP; 0 = 4 * n_embd"),
}


class Bank:
    """What one layer needs to make its value: its spec, its table, and layer 0's record for source `first`.

    A plain object: parameters stay on the attention module and on model.value_embeds. `rows` is where the rows come
    from while decoding (placement.py). With source `first` it holds layer 0's value during a forward: such a model runs
    one forward at a time.
    """

    def __init__(self, spec: ValueSpec, table=None, rows=None, origin=None):
        self.spec, self.table, self.rows, self.origin = spec, table, rows, origin
        self.records = self.releases = False
        self.first = None

    def source(self, idx, x0, kv_cache=None):
        """The `ve` argument of the layer: idx (B, T), x0 (B, T, C) -> (B, T, H*D), (B, T, C) for x0, or None.

        None also where the cache keeps no V of the layer: see `value`.
        """
        if self.spec.source == "table":
            if not self.spec.caches_value and kv_cache is not None and kv_cache.history is not None:
                return None
            if self.rows.weight is None:
                if self.table.training and torch.is_grad_enabled():
                    raise ValueError("value tables are placed off the device: place(model, 'device') before training")
                return self.rows.fetch(idx.flatten()).view(*idx.shape, -1).to(x0.dtype)
            return self.table(idx).to(x0.dtype)
        if self.spec.source == "x0":
            return nn.functional.rms_norm(x0, (x0.size(-1),))
        if self.spec.source == "first":
            first = self.origin.first
            if self.releases:
                self.origin.first = None
            return first
        return None


def value(attn, x, ve):
    """The value of the layer's new tokens: x (B, T, C) normed input, ve from Bank.source -> (B, T, H, D).

    None where the cache keeps no V of the layer: then `attend` takes the place of attention over a cache.
    """
    bank, spec = attn.bank, attn.bank.spec
    if ve is None and spec.source == "table":
        return None
    shape = (*x.shape[:2], attn.n_kv_head, attn.head_dim)
    own = attn.c_v(x).view(shape) if spec.source == "residual" or spec.combine == "add" else None
    if bank.records:
        bank.first = own
    if spec.source == "residual":
        own, source = None, own
    else:
        source = (attn.c_v(ve) if spec.source == "x0" else ve).view(shape)
    coefficients = {name: attn.get_parameter(name) for name in spec.coefficients(attn.n_kv_head)}
    gates = values.gate(x, attn.ve_gate.weight) if spec.gated else None
    return values.mix(spec, own, source, coefficients, gates)


def attend(attn, q, k, kv_cache, window, dense):
    """Attention of a layer whose V is not cached: q (B, T, N, D), k (B, T, H, D) of the new tokens -> (B, T, N, D).

    Writes k into the cache. window: (left, right); dense: the host's flash_attn_func.
    """
    history, bank = kv_cache.history, attn.bank
    keys = history.write(kv_cache.get_layer_cache(attn.layer_idx)[0], k)
    coeff = next((attn.get_parameter(name) for name in bank.spec.coefficients(attn.n_kv_head)), None)
    options = dict(coeff=coeff, window=window[0], strategy=history.strategy, dense=dense)
    return decode.attend(q, keys, bank.rows, history, **options)


def enter_block(model, i, x, x0):
    """The residual that enters block i, blended with x0 in the full trunk: x, x0 (B, T, C) -> (B, T, C)."""
    if model.resid_lambdas is None:
        return x
    return model.resid_lambdas[i] * x + model.x0_lambdas[i] * x0


def axes_of(config) -> dict:
    """The axes of a GPTConfig as a dict."""
    return {name: vars(config)[name] for name in AXES}


def install(model) -> None:
    """Give each layer of a freshly built model the parts its spec needs, and only those.

    Sets attn.bank, attn.c_v (None without need), attn.ve_gate, the coefficients, model.value_embeds, and to None what
    the trunk and smear axes switch off. Raises ValueError on contradictory axes.
    """
    for name in _switched_off(model.config):
        setattr(model, name, None)
    specs = layer_specs(model.config.n_layer, axes_of(model.config))
    blocks, wte = model.transformer.h, model.transformer.wte
    tables, rows = nn.ModuleDict(), {None: None}
    for block, spec in zip(blocks, specs, strict=True):
        attn = block.attn
        if spec.table is not None and str(spec.table) not in tables:
            tables[str(spec.table)] = _table(wte, attn)
            rows[spec.table] = OnDevice(tables[str(spec.table)])
        if not spec.projects:
            attn.c_v = None
        attn.ve_gate = _gate(attn) if spec.gated else None
        for name, (size, _) in spec.coefficients(attn.n_kv_head).items():
            attn.register_parameter(name, nn.Parameter(torch.empty(size, device=wte.weight.device)))
        table = None if spec.table is None else tables[str(spec.table)]
        origin = blocks[0].attn.bank if spec.source == "first" else None
        attn.bank = Bank(spec, table, rows[spec.table], origin)
    users = [block.attn.bank for block in blocks if block.attn.bank.spec.source == "first"]
    if users:
        blocks[0].attn.bank.records = users[-1].releases = True
    model.value_embeds = tables


def _empty(kind, *sizes, like, **options):
    """A module on the device of `like` whose weights are not yet written: building it draws no random number."""
    return kind(*sizes, device="meta", **options).to_empty(device=like.device)


def _linear(attn, n_in, n_out):
    """A matmul of the host's own Linear class."""
    return _empty(type(attn.c_q), n_in, n_out, like=attn.c_q.weight, bias=False)


def _scalar(model, name):
    """A throwaway for one part of the trunk or the smear."""
    attn, wte = model.transformer.h[0].attn, model.transformer.wte
    if name == "smear_gate":
        return _linear(attn, SMEAR_CHANNELS, 1)
    size = model.config.n_layer if name in ("resid_lambdas", "x0_lambdas") else 1
    return nn.Parameter(torch.empty(size, device=wte.weight.device))


def _gate(attn):
    return _linear(attn, values.GATE_CHANNELS, attn.n_kv_head)


def _table(wte, attn):
    return _empty(nn.Embedding, wte.num_embeddings, attn.n_kv_head * attn.head_dim, like=wte.weight)


TRUNK_SCALARS = ("resid_lambdas", "x0_lambdas", "backout_lambda")
SMEAR_PARTS = ("smear_lambda", "smear_gate")
SMEAR_CHANNELS = 24


def _switched_off(config) -> tuple[str, ...]:
    """Attributes of the model that its axes leave out."""
    return (() if config.trunk == "full" else TRUNK_SCALARS) + (() if config.smear else SMEAR_PARTS)


def _lend_layers(model) -> tuple[int, ...]:
    return parse_layers(AXES["ve_layers"][0], model.config.n_layer)


@torch.no_grad()
def lend(model) -> dict:
    """Before the host draws its weights: complete the model to upstream's shape with throwaway parts.

    The host then draws upstream's own sequence, so a parameter shared by two variants starts bit-equal under one seed.
    Returns what `settle` needs.
    """
    kept = {"tables": model.value_embeds, "gates": [block.attn.ve_gate for block in model.transformer.h]}
    upstream = _lend_layers(model)
    for name in _switched_off(model.config):
        setattr(model, name, _scalar(model, name))
    for p, start in ((model.smear_lambda, 0.0), (model.smear_gate.weight, 0.0), (model.backout_lambda, 0.2)):
        p.fill_(start)  # upstream before 9822cc7 leaves them as memory was; later it draws over this
    tables = nn.ModuleDict()
    for i, block in enumerate(model.transformer.h):
        attn = block.attn
        if attn.c_v is None:
            attn.c_v = _linear(attn, attn.c_q.in_features, attn.n_kv_head * attn.head_dim)
        if i in upstream:
            own = str(i) in model.value_embeds
            tables[str(i)] = model.value_embeds[str(i)] if own else _table(model.transformer.wte, attn)
            attn.ve_gate = attn.ve_gate or _gate(attn)
        else:
            attn.ve_gate = None
    model.value_embeds = tables
    return kept


@torch.no_grad()
def settle(model, kept: dict) -> None:
    """After the host drew its weights, before it casts embeddings: draw and align what is ours, drop what was lent."""
    upstream = _lend_layers(model)
    model.value_embeds = kept["tables"]
    for name in _switched_off(model.config):
        setattr(model, name, None)
    attentions = [block.attn for block in model.transformer.h]
    for i, (attn, gate) in enumerate(zip(attentions, kept["gates"], strict=True)):
        attn.ve_gate = gate
        if gate is not None and i not in upstream:
            nn.init.uniform_(gate.weight, 0.0, 0.02)
    bound = 3**0.5 * model.config.n_embd**-0.5
    for i, attn in enumerate(attentions):
        spec = attn.bank.spec
        if spec.table == i and spec.aligned:
            attn.bank.table.weight.copy_(values.aligned_table(model.transformer.wte.weight, attn.c_v.weight))
        elif spec.table == i and i not in upstream:
            nn.init.uniform_(attn.bank.table.weight, -bound, bound)
        for name, (_, start) in spec.coefficients(attn.n_kv_head).items():
            attn.get_parameter(name).fill_(start)
        if not spec.projects:
            attn.c_v = None


# ---------------------------------------------------------------------------- what the host asks


def value_layers(model) -> tuple[int, ...]:
    """Layers whose values must be cached while decoding."""
    return tuple(i for i, block in enumerate(model.transformer.h) if block.attn.bank.spec.caches_value)


def absent_projection_params(model) -> int:
    """Elements of the W_V that bank layers lack; counted for the scaling rules alone, as the paper's authors do."""
    absent = [b.attn for b in model.transformer.h if b.attn.c_v is None]
    return sum(attn.c_q.in_features * attn.n_kv_head * attn.head_dim for attn in absent)


def extra_matmul_params(model) -> int:
    """Elements of W_V that run a second time per token (x0+add)."""
    return sum(
        b.attn.bank.spec.extra_projections * b.attn.c_v.weight.numel() for b in model.transformer.h if b.attn.c_v
    )


def present(*parts) -> list:
    """Parameters of those parts (a parameter, a module, or None where the axes left it out) that are there."""
    found = []
    for part in parts:
        found += list(part.parameters()) if isinstance(part, nn.Module) else [] if part is None else [part]
    return found


# What each coefficient is to AdamW: rate (of scalar_lr, except where it is absolute), betas, weight decay.
COEFFICIENT_RATES = {
    "alpha_v": (0.01, False, (0.8, 0.95), 0.05),
    "beta_v": (1.0, False, (0.96, 0.95), 0.0),
    "gamma_v": (1.0, False, (0.96, 0.95), 0.0),
    "lambda_v": (0.005, True, (0.8, 0.95), 0.0),
}


def coefficient_groups(model, scalar_lr) -> list[dict]:
    """AdamW groups, in upstream's form, of the learned coefficients that the model has."""
    groups = []
    for name, (rate, absolute, betas, decay) in COEFFICIENT_RATES.items():
        params = [p for key, p in model.named_parameters() if key.endswith(f"attn.{name}")]
        rule = dict(kind="adamw", lr=rate if absolute else rate * scalar_lr, betas=betas, eps=1e-10, weight_decay=decay)
        groups += [dict(params=params, **rule)] if params else []
    return groups


def num_coefficients(model) -> int:
    """Elements of all learned coefficients."""
    return sum(p.numel() for group in coefficient_groups(model, 1.0) for p in group["params"])


def num_scalars(model) -> int:
    """Elements of what is neither matrix nor table: what there is of trunk and smear, and the coefficients."""
    trunk = present(model.resid_lambdas, model.x0_lambdas, model.backout_lambda, model.smear_lambda, model.smear_gate)
    return sum(p.numel() for p in trunk) + num_coefficients(model)


def coefficients(model) -> dict[str, list[float]]:
    """Learned coefficients by name, `{layer}.{gamma_v|lambda_v|alpha_v|beta_v}` -> values."""
    found = {}
    for i, block in enumerate(model.transformer.h):
        for name in block.attn.bank.spec.coefficients(block.attn.n_kv_head):
            found[f"{i}.{name}"] = block.attn.get_parameter(name).detach().float().tolist()
    return found


# ---------------------------------------------------------------------------- command line and metadata


def _boolean(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r}: use true or false")
    return words[text.lower()]


def add_flags(parser) -> None:
    """--preset and one flag per axis; a flag that is not given stays None."""
    group = parser.add_argument_group("value axes (docs: README, 'The axes')")
    group.add_argument("--preset", default=None, help="a named point on the axes, e.g. paper/bov; explicit flags win")
    for name, (default, help_text) in AXES.items():
        kind = _boolean if isinstance(default, bool) else type(default)
        extra = {"nargs": "?", "const": True} if isinstance(default, bool) else {}
        group.add_argument(
            "--" + name.replace("_", "-"), type=kind, default=None, help=f"{help_text} (default {default})", **extra
        )


def preset_name(args) -> str | None:
    """The preset that the flags name, with "(changed)" where explicit flags move the model off it."""
    if args.preset is None:
        return None
    changed = any(
        preset(args.preset).get(name, AXES[name][0]) != value for name, value in axes_from_flags(args).items()
    )
    return f"{args.preset} (changed)" if changed else args.preset


def axes_from_flags(args) -> dict:
    """All axes: defaults, then the preset, then what was given explicitly. Raises ValueError on contradictions."""
    axes = {name: default for name, (default, _) in AXES.items()}
    axes |= preset(args.preset) if args.preset else {}
    return axes | {name: vars(args)[name] for name in AXES if vars(args)[name] is not None}


def axes_at_depth(args, depth: int) -> dict:
    """axes_from_flags, but for a model that the flags only compare with, of another depth than args.depth.

    Explicit layer lists and the MLP's width belong to the model's own depth: elsewhere they are left out.
    """
    axes = axes_from_flags(args)
    if depth == args.depth:
        return axes
    listed = {name: "none" for name in ("ve_layers", "bov_layers") if is_explicit(axes[name])}
    return axes | listed | {"mlp_hidden": 0}
