"""What a trained bank holds and does: value norms, nearest rows, how far rows moved, and the exact mixture of a head.

A bank layer without a V cache adds up rows of its table alone, so the output of a head at a position is
    o_n = sum_u w_nu gamma E[u],   w_nu = sum of softmax(q k^T / sqrt(D)) over the positions of token u:
which tokens a head reads, and with what weight, is known exactly. Nothing here changes a model: hooks listen.
Shapes: B batch, T time, C n_embd, H kv heads, N query heads, D head dim, V vocab, U distinct tokens.
"""

from dataclasses import dataclass

import torch

from nanochat.bov import host, one_query
from nanochat.bov.spec import PLAIN
from nanochat.gpt import position_and_norm
from nanochat.train import fresh_model

QUARTILES = ("q25", "median", "q75")
SAME_START = 0.9  # cosine; decay in bf16 turns a row down to 0.98, since it moves only its larger elements


@dataclass(frozen=True)
class Table:
    """One table of rows: its key in the state dict, the layers that read it, and its rows (V, H*D), padding cut off."""

    key: str
    layers: tuple[int, ...]
    rows: torch.Tensor


def tables(model) -> list[Table]:
    """Every table of a model, bank's or gated embedding's, in the order of layers."""
    users = {}
    for i, block in enumerate(model.transformer.h):
        if block.attn.bank.spec.table is not None:
            users.setdefault(block.attn.bank.spec.table, []).append(i)
    rows = {key: model.value_embeds[str(key)].weight.detach()[: model.config.vocab_size] for key in users}
    return [Table(f"value_embeds.{key}.weight", tuple(layers), rows[key]) for key, layers in users.items()]


def check_has_banks(model, name):
    """ValueError for a model all of whose values are x W_V."""
    if all(block.attn.bank.spec == PLAIN for block in model.transformer.h):
        raise ValueError(f"{name} has no bank layer (bov_layers=none): train one, for instance with --preset paper/bov")


def mixing_layers(model) -> tuple[int, ...]:
    """Layers whose heads give mixtures of table rows and nothing else."""
    return tuple(i for i, block in enumerate(model.transformer.h) if not block.attn.bank.spec.caches_value)


def coefficient(attn) -> torch.Tensor:
    """What a mixing layer multiplies its rows by, one number per kv head: (H,) in fp32, ones where it is fixed."""
    names = attn.bank.spec.coefficients(attn.n_kv_head)
    ones = torch.ones(attn.n_kv_head)
    return ones * attn.get_parameter(next(iter(names))).detach().float() if names else ones


# ---------------------------------------------------------------------------- norms


def spread(numbers) -> dict[str, float]:
    """Count, mean and quartiles of numbers (n,), n > 0."""
    numbers = numbers.double()
    found = torch.quantile(numbers, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return {"count": len(numbers), "mean": numbers.mean().item(), **dict(zip(QUARTILES, found, strict=True))}


def row_norms(model, layer) -> torch.Tensor | None:
    """Lengths (V,) of table rows times coefficient in a mixing layer; None in others, whose values are no such rows."""
    if layer not in mixing_layers(model):
        return None
    attn = model.transformer.h[layer].attn
    rows = attn.bank.table.weight.detach()[: model.config.vocab_size].float()
    return (rows.unflatten(1, (attn.n_kv_head, -1)) * coefficient(attn)[:, None]).flatten(1).norm(dim=1)


@torch.inference_mode()
def value_norms(model, rows) -> list[torch.Tensor]:
    """Lengths of the values of every layer, coefficient or gate included, over rows of token ids: per layer (tokens,).

    The length is that of a token's whole value, all kv heads together.
    """
    found = [[] for _ in model.transformer.h]

    def listen(attn, args):
        found[attn.layer_idx].append(host.value(attn, *args[:2]).float().flatten(2).norm(dim=2).flatten())

    hooks = [block.attn.register_forward_pre_hook(listen) for block in model.transformer.h]
    try:
        for ids in rows:
            model.trunk(torch.tensor([ids]))
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(norms) for norms in found]


# ---------------------------------------------------------------------------- mixtures


@dataclass(frozen=True)
class Mixture:
    """What the heads of one layer read at the last position of a text.

    tokens: distinct ids in the order of first occurrence (U); weights (N, U), each row adds up to 1; shares (N, U): the
    part of a token's w gamma E along the output, over the output's length, each row adds up to 1 too; attribution
    (N, D) = sum_u w gamma E in fp32; output (N, D): what the forward itself gave; window: keys before the query that it
    sees; coefficient (H,).
    """

    layer: int
    window: int
    coefficient: torch.Tensor
    tokens: list[int]
    weights: torch.Tensor
    shares: torch.Tensor
    attribution: torch.Tensor
    output: torch.Tensor
    limit: float  # what rounding may amount to: coefficient, row, p and output, half a step each at the largest value

    @property
    def difference(self) -> float:
        """Largest distance between an element of the attribution and of the forward's own output."""
        return (self.attribution - self.output).abs().max().item()

    @property
    def exact(self) -> bool:
        return self.difference <= self.limit


@torch.inference_mode()
def mixtures(model, ids) -> list[Mixture]:
    """The mixture of every mixing layer at the last of the token ids (T,), from one ordinary forward.

    Raises ValueError where the model has no mixing layer, and for no ids at all.
    """
    if not ids:
        raise ValueError("--prompt is empty: give at least one token")
    if not mixing_layers(model):
        axes = ", ".join(f"{name}={value}" for name, value in host.axes_of(model.config).items() if "bov" in name)
        raise ValueError(
            f"--prompt: no head of this model is a mixture of table rows alone ({axes}); that takes "
            "bov_source=table, bov_combine=replace, and a coefficient that is no gate"
        )
    heard = _listen(model, ids)
    return [_mixture(model.transformer.h[i].attn, ids, **heard[i]) for i in mixing_layers(model)]


def _listen(model, ids) -> dict[int, dict]:
    """Of each mixing layer: q and k as projected, the arguments of attention, and its output, from one forward."""
    heard, hooks = {}, []
    for i in mixing_layers(model):
        attn, notes = model.transformer.h[i].attn, heard.setdefault(i, {})
        hooks += [
            attn.register_forward_pre_hook(lambda _, args, notes=notes: notes.update(cos_sin=args[2], window=args[3])),
            attn.c_q.register_forward_hook(lambda _, args, out, notes=notes: notes.update(q=out)),
            attn.c_k.register_forward_hook(lambda _, args, out, notes=notes: notes.update(k=out)),
            attn.c_proj.register_forward_pre_hook(lambda _, args, notes=notes: notes.update(y=args[0])),
        ]
    try:
        model.trunk(torch.tensor([ids]))
    finally:
        for hook in hooks:
            hook.remove()
    return heard


def _mixture(attn, ids, *, q, k, y, cos_sin, window) -> Mixture:
    """q (1, T, N*D), k (1, T, H*D) before rotary positions; y (1, T, C) the heads' outputs."""
    T, H, D, left = len(ids), attn.n_kv_head, attn.head_dim, window[0]
    q, k = (position_and_norm(t.unflatten(2, (-1, D)), *cos_sin) for t in (q, k))
    first = max(0, T - 1 - left) if left >= 0 else 0
    grouped = q[:, -1].unflatten(1, (H, -1))  # (1, H, G, D)
    p = one_query.scores(grouped, k[:, first:].transpose(1, 2)).softmax(-1)[0].flatten(0, 1)  # (N, T - first)
    tokens = list(dict.fromkeys(ids))
    place = {token: i for i, token in enumerate(tokens)}
    slots = torch.tensor([place[token] for token in ids[first:]])
    w = p.new_zeros(len(p), len(tokens)).index_add_(1, slots, p)
    gamma = coefficient(attn)
    rows = attn.bank.table.weight.detach()[tokens].float().unflatten(1, (H, D)) * gamma[:, None]  # (U, H, D)
    rows = rows.transpose(0, 1).repeat_interleave(len(p) // H, 0)  # (N, U, D)
    parts = w[..., None] * rows
    o = parts.sum(1)
    shares = torch.einsum("nud,nd->nu", parts, o) / o.square().sum(1, keepdim=True).clamp_min(1e-30)
    limit = max(1e-5, 2 * torch.finfo(y.dtype).eps) * rows.abs().max().item()
    return Mixture(attn.layer_idx, left, gamma, tokens, w, shares, o, y[0, -1].unflatten(0, (-1, D)).float(), limit)


# ---------------------------------------------------------------------------- rows


def nearest(rows, token, k) -> list[tuple[int, float]]:
    """The k rows of (V, H*D) most like the token's own, which is left out: (id, cosine), the most similar first."""
    rows = rows.float()
    cosine = torch.cosine_similarity(rows, rows[token : token + 1], dim=1)
    cosine[token] = -torch.inf
    best = cosine.topk(min(k, len(rows) - 1))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def movement(rows, start) -> torch.Tensor:
    """How far each row (V, H*D) is from its start, in lengths of the starting row: (V,). 0 = where it began."""
    return (rows.float() - start.float()).norm(dim=1) / start.float().norm(dim=1).clamp_min(1e-30)


def starting_rows(model, seed, dtype, untouched) -> tuple[list, float]:
    """The tables as the run under `seed` began, by drawing its initial weights again: ([(V, H*D)], agreement).

    dtype: the run's compute dtype, in which its tables were stored. A draw depends on the kind of device: the CPU's is
    tried, then the GPU's. `untouched`: ids that no text holds, whose rows can only shrink by weight decay; agreement is
    the lowest cosine between such rows and their start. Raises ValueError when it is below SAME_START.
    """
    assert untouched
    agreements = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        drawn = [t.rows.to(dtype).to("cpu", t.rows.dtype) for t in tables(_again(model.config, device, seed))]
        pairs = zip((t.rows for t in tables(model)), drawn, strict=True)
        cosines = [torch.cosine_similarity(a[untouched].double(), b[untouched].double()).min() for a, b in pairs]
        agreements.append(min(cosines).item())
        if agreements[-1] > SAME_START:
            return drawn, agreements[-1]
    raise ValueError(
        f"seed {seed} does not give the weights that this run began with (rows that no text touches agree with cosine "
        f"{max(agreements):.2f}): it was trained on another kind of device or by other code"
    )


def _again(config, device, seed):
    with torch.random.fork_rng():
        return fresh_model(config, torch.device(device), seed)


def by_frequency(moved, counts) -> list[dict]:
    """Movement (V,) by how often a token was counted (V,): never, 1, 2-3, 4-7, ...; bins without a row are left out.

    Each bin: low and high (inclusive counts), and what `spread` says of its rows.
    """
    bins, low = [], 0
    while low <= counts.max():
        high = 2 * low - 1 if low else 0
        inside = (counts >= low) & (counts <= high)
        if inside.any():
            bins.append({"low": low, "high": high, **spread(moved[inside])})
        low = high + 1
    return bins


def count_tokens(documents, tokenizer, limit) -> tuple[torch.Tensor, int, bool]:
    """(counts (V,) int64, tokens counted, whether the text went on) of an iterable of lists of texts.

    Each text begins with <|bos|>, as in training. Counting stops once `limit` tokens are reached, -1 = never.
    """
    counts = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.int64)
    for texts in documents:
        if 0 <= limit <= int(counts.sum()):
            return counts, int(counts.sum()), True
        rows = tokenizer.encode(texts, prepend=tokenizer.get_bos_token_id(), num_threads=2)
        counts += torch.bincount(torch.tensor([token for row in rows for token in row]), minlength=len(counts))
    return counts, int(counts.sum()), False
