"""Muon for the block matrices, AdamW for everything else, with the optimizer state sharded over ranks.

Matrices are (rows, cols) = (out, in); a stack of K equal matrices is (K, rows, cols). On W ranks gradients arrive
whole and are averaged; each rank updates the part it owns and gathers the rest. One rank sends no messages.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from nanochat.bov.host import COEFFICIENT_RATES
from nanochat.common import COMPUTE_DTYPE

# ---------------------------------------------------------------------------- which parameter goes where


@dataclass(frozen=True)
class Row:
    """One line of the parameter table: names that match `pattern` whole get learning rate `factor` * the named rate."""

    name: str
    pattern: str
    rate: str  # unembedding | embedding | matrix | scalar | one (factor is then the rate itself)
    factor: float = 1.0
    by_width: bool = False  # times (n_embd / 768) ** -0.5
    betas: tuple[float, float] | None = None  # None: Muon
    weight_decay: float = 0.0  # Muon's comes from the caller


TABLE_LR_SCALE, TABLE_WEIGHT_DECAY = 0.5, 0.01  # of value tables: times the embedding's rate; decay
BLOCK = r"transformer\.h\.\d+\."
TABLE = (
    Row("lm_head", r"lm_head\.weight", "unembedding", 1.0, True, (0.8, 0.96), 0.01),
    Row("wte", r"transformer\.wte\.weight", "embedding", 1.0, True, (0.8, 0.995), 0.001),
    Row(
        "value_embeds",
        r"value_embeds\.\d+\.weight",
        "embedding",
        TABLE_LR_SCALE,
        True,
        (0.8, 0.995),
        TABLE_WEIGHT_DECAY,
    ),
    Row("resid", r"resid_lambdas", "scalar", 0.01, False, (0.8, 0.95), 0.05),
    Row("x0", r"x0_lambdas", "scalar", 1.0, False, (0.96, 0.95)),
    *(
        Row(name, rf"{BLOCK}attn\.{name}", "one" if absolute else "scalar", rate, False, betas, decay)
        for name, (rate, absolute, betas, decay) in COEFFICIENT_RATES.items()
    ),
    Row("smear", r"smear_gate\.weight|smear_lambda|backout_lambda", "one", 0.2, False, (0.8, 0.95)),
    Row("muon", rf"{BLOCK}.*\.weight", "matrix"),
)
ADAM_EPS = 1e-10
VARIANTS = ("upstream", "paper")


def param_groups(
    named_parameters, *, n_embd, unembedding_lr, embedding_lr, matrix_lr, scalar_lr, weight_decay, muon="upstream",
    table_lr_scale=TABLE_LR_SCALE, table_weight_decay=TABLE_WEIGHT_DECAY,
) -> list[dict]:  # fmt: skip
    """Optimizer groups of a model's named parameters: one per non-empty AdamW row of TABLE, one Muon group per shape.

    Rates are those of a model of width 768 (`n_embd` scales lm_head, wte and tables); `weight_decay` is Muon's alone;
    `table_lr_scale` and `table_weight_decay` are those of value tables, the rate in units of the embedding's.
    Raises ValueError when a name matches no row or several, when Muon would get anything but a matrix, or when `muon`
    is not one of VARIANTS.
    """
    if muon not in VARIANTS:
        raise ValueError(f"--muon {muon!r}: use one of {', '.join(VARIANTS)}")
    rates = dict(unembedding=unembedding_lr, embedding=embedding_lr, matrix=matrix_lr, scalar=scalar_lr, one=1.0)
    members = _match(named_parameters)
    groups = []
    for row in TABLE:
        if row.name == "value_embeds":
            row = replace(row, factor=table_lr_scale, weight_decay=table_weight_decay)
        lr = rates[row.rate] * row.factor * ((n_embd / 768) ** -0.5 if row.by_width else 1.0)
        if row.betas is not None:
            rule = dict(kind="adamw", lr=lr, betas=row.betas, eps=ADAM_EPS, weight_decay=row.weight_decay)
            groups += [_group(row.name, members[row.name], rule)] if members[row.name] else []
            continue
        by_shape = defaultdict(list)
        for name, p in members[row.name]:
            by_shape[tuple(p.shape)].append((name, p))
        rule = dict(kind="muon", lr=lr, momentum=0.95, ns_steps=5, beta2=0.9, weight_decay=weight_decay, variant=muon)
        groups += [_group(f"{row.name} {s[0]}x{s[1]}", by_shape[s], rule) for s in sorted(by_shape)]
    return groups


def _match(named_parameters) -> dict[str, list]:
    """{row name: [(parameter name, parameter)]} in the model's order; ValueError unless each name has one row."""
    members, wrong = {row.name: [] for row in TABLE}, []
    for name, p in named_parameters:
        rows = [row for row in TABLE if re.fullmatch(row.pattern, name)]
        if len(rows) != 1 or (rows[0].betas is None and p.ndim != 2):
            wrong.append(f"{name} {tuple(p.shape)} matches {[row.name for row in rows] or 'no row'}")
        else:
            members[rows[0].name].append((name, p))
    if wrong:
        raise ValueError(
            "every parameter needs exactly one row of nanochat.optim.TABLE (Muon: matrices only): " + "; ".join(wrong)
        )
    return members


def _group(name, members, rule) -> dict:
    return dict(name=name, names=[n for n, _ in members], params=[p for _, p in members], initial_lr=rule["lr"], **rule)


# ---------------------------------------------------------------------------- the two updates

# Polar Express (arXiv 2505.16932): odd quintics a x + b x^3 + c x^5 for 5 steps, safety factor 2e-2, cushion 2.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_factor(x, steps=5):
    """Approximate polar factor U V^T of each matrix of `x` (K, rows, cols), whose Frobenius norms must be at most 1."""
    tall = x.size(-2) > x.size(-1)
    for a, b, c in POLAR_EXPRESS[:steps]:
        gram = x.mT @ x if tall else x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, poly, beta=a) if tall else torch.baddbmm(x, poly, x, beta=a)
    return x


def muon_update(params, grads, momentum_buffer, second_momentum_buffer, *, lr, momentum, beta2, weight_decay, steps,
                equalize):  # fmt: skip
    """One Muon step in place on `params` (K, rows, cols): Nesterov momentum, polar factor, NorMuon, cautious decay.

    `second_momentum_buffer` is (K, rows, 1), or (K, 1, cols) for wide matrices. `equalize` scales rows to their mean
    norm before the iteration (MuonEq, arXiv 2603.28254) and the result to norm sqrt(min(rows, cols)) after it (Muon+,
    arXiv 2602.21545). NorMuon: arXiv 2510.05491. The iteration runs in bf16 when that is the compute dtype.
    """
    rows, cols = params.shape[-2:]
    rate = lr * max(1.0, rows / cols) ** 0.5
    momentum_buffer.lerp_(grads, 1 - momentum)
    x = torch.lerp(grads, momentum_buffer, momentum)
    if COMPUTE_DTYPE == torch.bfloat16:
        x = x.bfloat16()

    row_norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=params.dtype)
    norm = row_norm.norm(dim=-2, keepdim=True)
    scale = norm / rows**0.5 / row_norm.clamp_min(1e-6) if equalize else torch.ones_like(row_norm)
    norm = (scale * row_norm).norm(dim=-2, keepdim=True)
    x = polar_factor(x * (scale / (norm * 1.01 + 1e-6)).to(x.dtype), steps).to(params.dtype)

    # Mean square of each neuron of the longer side; the factor that keeps the whole norm while equalising them.
    side = -1 if rows >= cols else -2
    width = x.size(side)
    mean_sq = x.square().mean(dim=side, keepdim=True)
    if equalize:
        norm = (mean_sq.sum(dim=(-2, -1), keepdim=True) * width).sqrt().clamp_min(1e-6)
        restore = min(rows, cols) ** 0.5 / norm
        mean_sq = mean_sq * restore.square()
    else:
        restore = 1.0
    second_momentum_buffer.lerp_(mean_sq.to(second_momentum_buffer.dtype), 1 - beta2)
    inverse = second_momentum_buffer.clamp_min(1e-10).rsqrt()
    before = (mean_sq.sum(dim=(-2, -1), keepdim=True) * width).sqrt()
    after = (mean_sq * width * inverse.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    update = x.mul_(restore * inverse * (before / after.clamp_min(1e-10)) * rate)

    if weight_decay:  # only where the update and the weight have the same sign
        agree = torch.mul(update, params).ge_(0)
        params.addcmul_(params, agree, value=-rate * weight_decay)
    params.sub_(update)


# ---------------------------------------------------------------------------- one group during one step

SMALL = 1024  # AdamW tensors below this many elements are replicated, not sharded
PIECE = {"cpu": 2**19}  # elements of a Muon stack updated at once: on CPU the temporaries must stay in cache
PIECE_ELSEWHERE = 2**26


def _is_sharded(numel, world) -> bool:
    return world > 1 and numel >= SMALL


def _chunk(count, world) -> int:
    """Matrices per rank of a Muon group of `count`; the last ranks may own fewer, padded with zeros."""
    return -(-count // world)


def _adamw_state(part) -> dict:
    step = torch.zeros((), dtype=torch.float32, device=part.device)
    return dict(step=step, exp_avg=torch.zeros_like(part), exp_avg_sq=torch.zeros_like(part))


def _muon_state(p, chunk) -> dict:
    rows, cols = p.shape
    factored = (chunk, rows, 1) if rows >= cols else (chunk, 1, cols)
    return dict(momentum_buffer=p.new_zeros(chunk, rows, cols), second_momentum_buffer=p.new_zeros(factored))


class _AdamWJob:
    """AdamW for the tensors of one group. Buffers of running collectives live as long as the job."""

    def __init__(self, group, state, rank, world):
        self.group, self.state, self.gathers, self.parts = group, state, [], []
        for p in group["params"]:
            part, grad, work = p, p.grad.contiguous(), None
            if _is_sharded(p.numel(), world):
                part = p.chunk(world)[rank]
                whole, grad = grad, torch.empty_like(part)
                work = dist.reduce_scatter_single(grad, whole, op=dist.ReduceOp.AVG, async_op=True)
                self.parts.append((p, part, grad, work, whole))
                continue
            if world > 1:
                work = dist.all_reduce(grad, op=dist.ReduceOp.AVG, async_op=True)
            self.parts.append((p, part, grad, work, None))

    def update(self):
        group = self.group
        beta1, beta2 = group["betas"]
        for p, part, grad, work, whole in self.parts:
            if work is not None:
                work.wait()
            state = self.state[p]
            if not state:
                state.update(_adamw_state(part))
            # The fused kernel is one pass in fp32 arithmetic, also over bf16 tensors, and needs no compiler.
            adamw(
                [part], [grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]], fused=True,
                amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"], eps=group["eps"],
                weight_decay=group["weight_decay"],
            )  # fmt: skip
            if whole is not None:
                own = part.clone()
                self.gathers.append((dist.all_gather_single(p.data, own, async_op=True), own))

    def finish(self):
        for work, _ in self.gathers:
            work.wait()


class _MuonJob:
    """Muon for one group of K equal matrices; rank r owns numbers r * chunk up to (r + 1) * chunk."""

    def __init__(self, group, state, rank, world):
        params = group["params"]
        chunk = _chunk(len(params), world)
        self.group, self.state, self.chunk, self.work = group, state, chunk, None
        self.own = params[rank * chunk : (rank + 1) * chunk]
        self.own_grads = [p.grad for p in self.own]
        self.alone = world == 1
        if not self.alone:
            p = params[0]
            self.everything = p.new_zeros(chunk * world, *p.shape)
            self.mine = p.new_empty(chunk, *p.shape)
            torch._foreach_copy_(list(self.everything[: len(params)]), [p.grad for p in params])
            self.own_grads = list(self.mine[: len(self.own)])
            self.work = dist.reduce_scatter_single(self.mine, self.everything, op=dist.ReduceOp.AVG, async_op=True)

    def update(self):
        if self.work is not None:
            self.work.wait()
        group, first = self.group, self.group["params"][0]
        state = self.state[first]
        if not state:
            state.update(_muon_state(first, self.chunk))
        size = max(1, PIECE.get(first.device.type, PIECE_ELSEWHERE) // first.numel())
        for i in range(0, len(self.own), size):
            j = min(i + size, len(self.own))
            stack = _stack(self.own[i:j])
            muon_update(
                stack, _stack(self.own_grads[i:j]), state["momentum_buffer"][i:j], state["second_momentum_buffer"][i:j],
                lr=group["lr"], momentum=group["momentum"], beta2=group["beta2"], weight_decay=group["weight_decay"],
                steps=group["ns_steps"], equalize=group["variant"] == "upstream",
            )  # fmt: skip
            if j - i > 1:
                torch._foreach_copy_(self.own[i:j], list(stack))
        if not self.alone:
            if self.own:
                torch._foreach_copy_(self.own_grads, self.own)
            self.work = dist.all_gather_single(self.everything, self.mine, async_op=True)

    def finish(self):
        if not self.alone:
            self.work.wait()
            params = self.group["params"]
            torch._foreach_copy_(params, list(self.everything[: len(params)]))


def _stack(tensors):
    """(K, rows, cols); a single tensor is a view of itself, so that an update in place reaches it."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


JOBS = {"adamw": _AdamWJob, "muon": _MuonJob}

# ---------------------------------------------------------------------------- the optimizer


class MuonAdamW(torch.optim.Optimizer):
    """AdamW and Muon groups in one optimizer, sharded over the ranks of the default process group, if there is one.

    Groups are dicts with `params`, `kind` and lr, betas, eps, weight_decay ("adamw") or lr, momentum, ns_steps, beta2,
    weight_decay ("muon": one shape per group; `variant` "upstream" or "paper"). `names`, the parameters' names, serve
    messages and saved state. Raises ValueError for an unknown kind or variant, mixed shapes in a Muon group, and a
    tensor whose rows the ranks cannot share evenly. A checkpoint of one rank has the keys of upstream nanochat's.
    """

    def __init__(self, param_groups: list[dict]):
        super().__init__(param_groups, defaults={})
        distributed = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        for i, group in enumerate(self.param_groups):
            group.setdefault("names", [f"groups[{i}].params[{j}]" for j in range(len(group["params"]))])
            if group["kind"] == "muon":
                group.setdefault("variant", "upstream")
            _check_group(group, self.world)

    @torch.no_grad()
    def step(self):
        """One update of every parameter from its `.grad`, which is averaged over ranks (and overwritten where small).

        Raises ValueError naming the parameters that have no gradient, before anything is changed or sent.
        """
        missing = [n for g in self.param_groups for n, p in zip(g["names"], g["params"], strict=True) if p.grad is None]
        if missing:
            raise ValueError(f"no gradient for {', '.join(missing)}: remove what the loss does not use from the model")
        jobs = [JOBS[group["kind"]](group, self.state, self.rank, self.world) for group in self.param_groups]
        for job in jobs:
            job.update()
        for job in jobs:
            job.finish()

    def state_for_save(self) -> dict:
        """This rank's `state_dict()` plus `layout`, which `reshard` needs to cut it anew."""
        shapes = [list(p.shape) for group in self.param_groups for p in group["params"]]
        return {**self.state_dict(), "layout": dict(world_size=self.world, rank=self.rank, shapes=shapes)}

    def load(self, states: list[dict]):
        """Continue from what `state_for_save` gave on any number of ranks, or from upstream's one-rank file.

        `states` holds every rank's dict, or this rank's alone when the number of ranks is unchanged. Raises ValueError
        when ranks are missing or the groups belong to another model.
        """
        layouts = [_layout(state) for state in states]
        if [(own["world_size"], own["rank"]) for own in layouts] == [(self.world, self.rank)]:
            self.load_state_dict(states[0])
        else:
            self.load_state_dict(reshard(states, self.world, self.rank))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict):
        """As torch's, for this rank's dict; fields that upstream's groups lack keep their present values."""
        saved = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in saved]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(f"optimizer state of another model: it has groups of {sizes} parameters")
        merged = []
        for group, old in zip(self.param_groups, saved, strict=True):
            if old.get("names", group["names"]) != group["names"]:
                other = sorted(set(old["names"]) ^ set(group["names"])) or "the order of parameters"
                raise ValueError(f"optimizer state of another model: they differ in {other}")
            merged.append({**group, **old})
        super().load_state_dict({**state_dict, "param_groups": merged})
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                if "step" in state:
                    state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device)


def _check_group(group, world):
    if group["kind"] not in JOBS:
        raise ValueError(f"optimizer group kind {group['kind']!r}: use one of {', '.join(JOBS)}")
    if group["kind"] == "muon":
        if group["variant"] not in VARIANTS:
            raise ValueError(f"Muon variant {group['variant']!r}: use one of {', '.join(VARIANTS)}")
        if len({p.shape for p in group["params"]}) > 1 or any(p.ndim != 2 for p in group["params"]):
            raise ValueError(f"a Muon group holds matrices of one shape, not {', '.join(group['names'])}")
        return
    for name, p in zip(group["names"], group["params"], strict=True):
        _check_rows(name, p.shape, world)


def _check_rows(name, shape, world):
    if _is_sharded(math.prod(shape), world) and shape[0] % world:
        raise ValueError(f"{name} has {shape[0]} rows, which {world} ranks cannot share evenly: use other ranks")


# ---------------------------------------------------------------------------- saved state on another number of ranks


def _layout(state) -> dict:
    return state.get("layout", dict(world_size=1, rank=0, shapes=None))


def reshard(states: list[dict], world_size: int, rank: int) -> dict:
    """The exact state dict of `rank` among `world_size`, cut from the dicts that all ranks of a run saved.

    Raises ValueError when a rank's dict is missing, or when the new ranks cannot share a tensor's rows evenly.
    """
    states = sorted(states, key=lambda state: _layout(state)["rank"])
    layouts = [_layout(state) for state in states]
    old = layouts[0]["world_size"] if layouts else 0
    if [(own["world_size"], own["rank"]) for own in layouts] != [(old, r) for r in range(old)] or not states:
        raise ValueError(
            f"the optimizer state was saved by {old} ranks, but the files here are {len(states)}, of ranks "
            f"{[own['rank'] for own in layouts]}: resuming on {world_size} ranks needs one of each"
        )
    groups, out = states[0]["param_groups"], {}
    for group in groups:
        if group["kind"] == "muon":
            first = group["params"][0]
            parts = [state["state"].get(first, {}) for state in states]
            out[first] = {k: _recut_stack([part[k] for part in parts], group, world_size, rank) for k in parts[0]}
            continue
        for j, i in enumerate(group["params"]):
            parts = [state["state"].get(i, {}) for state in states]
            if not parts[0]:
                continue
            shape = parts[0]["exp_avg"].shape if old == 1 else torch.Size(layouts[0]["shapes"][i])
            _check_rows(group.get("names", group["params"])[j], shape, world_size)
            out[i] = {
                k: v if k == "step" else _recut_rows([part[k] for part in parts], shape, world_size, rank)
                for k, v in parts[0].items()
            }
    layout = dict(world_size=world_size, rank=rank, shapes=layouts[0]["shapes"])
    return {"state": {i: state for i, state in out.items() if state}, "param_groups": groups, "layout": layout}


def _recut_rows(parts, shape, world, rank):
    """Rows of an AdamW moment: `parts` are the old ranks' rows, or equal copies of the whole."""
    whole = torch.cat(parts) if _is_sharded(shape.numel(), len(parts)) else parts[0]
    return whole.chunk(world)[rank].clone() if _is_sharded(shape.numel(), world) else whole.clone()


def _recut_stack(parts, group, world, rank):
    """Matrices of a Muon buffer (chunk, rows, cols), padded with zeros at the end."""
    count = len(group["params"])
    chunk = _chunk(count, world)
    whole = torch.cat(parts)[:count]
    out = whole.new_zeros(chunk, *whole.shape[1:])
    own = whole[rank * chunk : (rank + 1) * chunk]
    out[: len(own)] = own
    return out
