"""The transformer: upstream nanochat's model, whose value axes (nanochat/bov) make it the paper's.

Rotary positions, QK norm, relu^2 MLP, RMSNorm without weight, untied head, soft-capped logits, sliding windows.
Shapes: B batch, T time, C n_embd, H kv heads, N query heads, D head dim, V vocab (padded to a multiple of 64).
"""

from dataclasses import asdict, dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat.bov import host
from nanochat.bov.compiled import Fused
from nanochat.common import COMPUTE_DTYPE
from nanochat.flash_attention import flash_attn
from nanochat.head import head_logits, head_loss
from nanochat.linear import Linear
from nanochat.optim import MuonAdamW, param_groups

ROTARY_BASE = 100000
QK_SCALE = 1.2  # on q and on k, after their norm


@dataclass
class GPTConfig:
    sequence_len: int = 2048
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    window_pattern: str = "SSSL"  # tiled over layers, S quarter context, L full; the last layer is always L
    # the value axes: see nanochat/bov/host.py
    trunk: str = "full"
    smear: bool = True
    ve_layers: str = "every:2"
    bov_layers: str = "none"
    bov_source: str = "table"
    bov_combine: str = "replace"
    bov_coeff: str = "scalar"
    bov_shared: bool = False
    mlp_hidden: int = 0

    def __post_init__(self):
        for f in fields(self):
            if type(vars(self)[f.name]) is not type(f.default):
                raise ValueError(f"{f.name}={vars(self)[f.name]!r}: must be of type {type(f.default).__name__}")
        for name in ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd"):
            if vars(self)[name] < 1:
                raise ValueError(f"{name}={vars(self)[name]}: must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is not a multiple of n_kv_head={self.n_kv_head}")
        if self.smear and self.n_embd < host.SMEAR_CHANNELS:
            raise ValueError(
                f"n_embd={self.n_embd}: the smear reads {host.SMEAR_CHANNELS} channels; raise --depth or "
                "--aspect-ratio, or give --smear false"
            )
        if not self.window_pattern or set(self.window_pattern.upper()) - set("SL"):
            raise ValueError(f"window_pattern={self.window_pattern!r}: use the letters S and L")
        if self.mlp_hidden < 0:
            raise ValueError(f"mlp_hidden={self.mlp_hidden}: use 0 (= 4 * n_embd) or a width")


def config_to_dict(config: GPTConfig) -> dict:
    """The config without axes at their defaults, so that upstream reads the metadata of a default model."""
    return {k: v for k, v in asdict(config).items() if k not in host.AXES or v != host.AXES[k][0]}


def config_from_dict(values: dict) -> GPTConfig:
    """Inverse of config_to_dict; ValueError naming keys that are no field of GPTConfig."""
    unknown = sorted(set(values) - {f.name for f in fields(GPTConfig)})
    if unknown:
        raise ValueError(f"model_config has fields this version does not know: {', '.join(unknown)}")
    return GPTConfig(**values)


@Fused
def norm(x):
    """RMSNorm over the last dimension, without weight."""
    return F.rms_norm(x, (x.size(-1),))


def apply_rotary_emb(x, cos, sin):
    """Rotate the two halves of each head by -theta: x (B, T, *, D), cos and sin (1, T, 1, D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


@Fused
def position_and_norm(x, cos, sin):
    """What queries and keys pass through: rotary, norm, * 1.2. x (B, T, *, D), cos and sin (1, T, 1, D/2)."""
    x = apply_rotary_emb(x, cos, sin)
    return F.rms_norm(x, (x.size(-1),)) * QK_SCALE


@Fused
def blend(a, x, b, y):
    return a * x + b * y


@Fused
def relu_squared(x):
    return F.relu(x).square()


class CausalSelfAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.n_head, self.n_kv_head, self.n_embd = config.n_head, config.n_kv_head, config.n_embd
        self.head_dim = config.n_embd // config.n_head
        kv_dim = self.n_kv_head * self.head_dim
        self.c_q = Linear(self.n_embd, self.n_embd, bias=False)
        self.c_k = Linear(self.n_embd, kv_dim, bias=False)
        self.c_v = Linear(self.n_embd, kv_dim, bias=False)
        self.c_proj = Linear(self.n_embd, self.n_embd, bias=False)
        self.ve_gate = self.bank = None  # set by host.install

    def forward(self, x, ve, cos_sin, window_size, kv_cache):
        """x (B, T, C) normed, ve the source of the value (Bank.source), window (left, right) -> (B, T, C)."""
        B, T, _ = x.shape
        q = self.c_q(x).view(B, T, self.n_head, self.head_dim)
        k = self.c_k(x).view(B, T, self.n_kv_head, self.head_dim)
        v = host.value(self, x, ve)
        q, k = position_and_norm(q, *cos_sin), position_and_norm(k, *cos_sin)
        if kv_cache is None:
            y = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=window_size)
        elif v is None:
            y = host.attend(self, q, k, kv_cache, window_size, flash_attn.flash_attn_func)
        else:
            caches = (cache[:, : kv_cache.get_pos() + T] for cache in kv_cache.get_layer_cache(self.layer_idx))
            new = dict(k=k, v=v, cache_seqlens=kv_cache.offset)
            y = flash_attn.flash_attn_with_kvcache(q, *caches, **new, causal=True, window_size=window_size)
        return self.c_proj(y.reshape(B, T, self.n_embd))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden = config.mlp_hidden or 4 * config.n_embd
        self.c_fc = Linear(config.n_embd, hidden, bias=False)
        self.c_proj = Linear(hidden, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(relu_squared(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer_idx)
        self.mlp = MLP(config)

    def forward(self, x, ve, cos_sin, window_size, kv_cache):
        x = x + self.attn(norm(x), ve, cos_sin, window_size, kv_cache)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Build under torch.device("meta"), then to_empty(device), then init_weights(): the constructor draws nothing."""

    def __init__(self, config, pad_vocab_size_to=64):
        super().__init__()
        self.config = config
        self.window_sizes = window_sizes(config)
        padded_vocab = -(-config.vocab_size // pad_vocab_size_to) * pad_vocab_size_to
        blocks = [Block(config, i) for i in range(config.n_layer)]
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(padded_vocab, config.n_embd), "h": nn.ModuleList(blocks)}
        )  # fmt: skip
        self.lm_head = Linear(config.n_embd, padded_vocab, bias=False)
        self.resid_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.smear_gate = Linear(host.SMEAR_CHANNELS, 1, bias=False)
        self.smear_lambda = nn.Parameter(torch.empty(1))
        self.backout_lambda = nn.Parameter(torch.empty(1))
        host.install(self)  # sets to None what the axes leave out
        self.rotary_seq_len = config.sequence_len * 10
        cos, sin = self._rotary(self.rotary_seq_len)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    # ------------------------------------------------------------------------ init

    @torch.no_grad()
    def init_weights(self):
        """Write every parameter and buffer, drawing in upstream's order with upstream's parts, whatever the axes."""
        lent = host.lend(self)
        nn.init.normal_(self.transformer.wte.weight, mean=0.0, std=0.8)
        nn.init.normal_(self.lm_head.weight, mean=0.0, std=0.001)
        bound = 3**0.5 * self.config.n_embd**-0.5  # uniform with standard deviation n_embd**-0.5
        for block in self.transformer.h:
            for linear in (block.attn.c_q, block.attn.c_k, block.attn.c_v):
                nn.init.uniform_(linear.weight, -bound, bound)
            nn.init.zeros_(block.attn.c_proj.weight)
            nn.init.uniform_(block.mlp.c_fc.weight, -0.4 * bound, 0.4 * bound)
            nn.init.zeros_(block.mlp.c_proj.weight)
        self._init_scalars()
        for table in self.value_embeds.values():
            nn.init.uniform_(table.weight, -bound, bound)
        for block in self.transformer.h:
            if block.attn.ve_gate is not None:
                nn.init.uniform_(block.attn.ve_gate.weight, 0.0, 0.02)
        host.settle(self, lent)
        self.reset_rotary()
        if COMPUTE_DTYPE != torch.float16:
            for table in (self.transformer.wte, *self.value_embeds.values()):
                table.to(COMPUTE_DTYPE)

    def _init_scalars(self):
        n_layer = self.config.n_layer
        depths = [i / max(n_layer - 1, 1) for i in range(n_layer)]
        self.resid_lambdas.copy_(torch.tensor([1.15 - 0.10 * depth for depth in depths]))
        self.x0_lambdas.copy_(torch.tensor([0.20 - 0.15 * depth for depth in depths]))
        self.backout_lambda.fill_(0.2)
        self.smear_lambda.zero_()
        nn.init.uniform_(self.smear_gate.weight, 0.0, 0.02)

    def reset_rotary(self):
        """Write the rotary table on the model's device."""
        self.cos, self.sin = self._rotary(self.rotary_seq_len)

    def _rotary(self, length):
        """cos and sin of position * frequency, each (1, length, 1, D/2), in the compute dtype."""
        head_dim = self.config.n_embd // self.config.n_head
        device = self.get_device()
        channel = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
        position = torch.arange(length, dtype=torch.float32, device=device)
        angle = torch.outer(position, 1.0 / (ROTARY_BASE ** (channel / head_dim)))[None, :, None, :]
        return angle.cos().to(COMPUTE_DTYPE), angle.sin().to(COMPUTE_DTYPE)

    def get_device(self):
        return self.transformer.wte.weight.device

    # ------------------------------------------------------------------------ forward

    def forward(self, idx, targets=None, kv_cache=None, loss_reduction="mean"):
        """idx (B, T) -> logits (B, T, vocab_size) in fp32, or with targets (B, T; -1 ignored) the cross-entropy.

        Raises ValueError when the sequence runs past the rotary table (10 * sequence_len positions).
        """
        x = self.trunk(idx, kv_cache)
        if targets is None:
            return head_logits(x, self.lm_head.weight, self.config.vocab_size)
        return head_loss(x, self.lm_head.weight, targets, self.config.vocab_size, loss_reduction)

    def trunk(self, idx, kv_cache=None):
        """Everything before the head: idx (B, T) -> normed residual (B, T, C)."""
        T = idx.size(1)
        cos_sin = self._positions(T, kv_cache)
        x = embedding = norm(
            self.transformer.wte(idx).to(COMPUTE_DTYPE)
        )  # an unknown id raises before the cache changes
        if kv_cache is not None:
            kv_cache.check(T)
            kv_cache.append_ids(idx)
        if self.config.smear:
            x = self._smear(x, kv_cache)
        x0, middle = x, None
        for i, block in enumerate(self.transformer.h):
            if self.resid_lambdas is not None:
                x = blend(self.resid_lambdas[i], x, self.x0_lambdas[i], x0)
            x = block(x, block.attn.bank.source(idx, x0, kv_cache), cos_sin, self.window_sizes[i], kv_cache)
            if i == self.config.n_layer // 2:
                middle = x
        if kv_cache is not None:
            kv_cache.advance(T)
            if self.config.smear:
                kv_cache.prev_embedding = embedding[:, -1:].clone()
        if self.backout_lambda is not None:
            x = x - self.backout_lambda.to(x.dtype) * middle
        return norm(x)

    def _positions(self, T, kv_cache):
        """cos and sin (1 or B, T, 1, D/2) of the next T positions."""
        start = 0 if kv_cache is None else kv_cache.get_pos()
        if start + T > self.cos.size(1):
            raise ValueError(f"position {start + T} is past the rotary table of {self.cos.size(1)}; shorten the text")
        if kv_cache is None or isinstance(kv_cache.offset, int):
            return self.cos[:, start : start + T], self.sin[:, start : start + T]
        at = kv_cache.offset[:, None] + torch.arange(T, device=kv_cache.offset.device)
        return self.cos[0, at], self.sin[0, at]

    def _smear(self, x, kv_cache):
        """Add a gated share of the previous token's embedding: x (B, T, C). The cache has the last embedding."""
        previous = None if kv_cache is None else kv_cache.prev_embedding
        if previous is None:
            if x.size(1) == 1:
                return x
            return torch.cat((x[:, :1], self._smeared(x[:, 1:], x[:, :-1])), dim=1)
        return self._smeared(x, torch.cat((previous, x[:, :-1]), dim=1))

    def _smeared(self, x, previous):
        gate = self.smear_lambda.to(x.dtype) * torch.sigmoid(self.smear_gate(x[..., : host.SMEAR_CHANNELS]))
        return x + gate * previous

    @torch.inference_mode()
    def generate(self, tokens, max_tokens, temperature=1.0, top_k=None, seed=42):
        """Yield tokens one by one from full forwards: the slow reference of Engine.generate for one row of ids."""
        if not tokens:
            raise ValueError("the prompt is empty: give at least one token, for instance <|bos|>")
        device = self.get_device()
        generator = torch.Generator(device=device).manual_seed(seed)
        ids = torch.tensor([tokens], dtype=torch.long, device=device)
        for _ in range(max_tokens):
            logits = self(ids)[:, -1]
            if top_k is not None and top_k > 0:
                lowest = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < lowest, -torch.inf)
            if temperature > 0:
                token = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
            else:
                token = logits.argmax(dim=-1, keepdim=True)
            ids = torch.cat((ids, token), dim=1)
            yield token.item()

    # ------------------------------------------------------------------------ accounting

    @property
    def max_positions(self) -> int:
        """Positions of the rotary table: what a text may have at most."""
        return self.cos.size(1)

    @property
    def value_layers(self):
        """Layers whose values a decoder must cache."""
        return host.value_layers(self)

    def num_matmul_params(self):
        """Elements of all matmul weights, the smear gate's 24 among them."""
        return sum(m.weight.numel() for m in self.modules() if isinstance(m, Linear))

    def estimate_flops(self):
        """Training FLOPs per token: 6 per matmul element and use, 12 * n_embd per attended position and layer.

        As in the paper the smear gate (144) is left out.
        """
        matmul = self.num_matmul_params() + host.extra_matmul_params(self)
        matmul -= host.SMEAR_CHANNELS if self.config.smear else 0
        attended = sum(min(window, self.config.sequence_len) for window, _ in self.window_sizes)
        return 6 * matmul + 12 * self.config.n_embd * attended

    def estimate_decode_flops(self, context_len):
        """Forward FLOPs of one decoded token at a context length."""
        attended = sum(min(window, context_len) for window, _ in self.window_sizes)
        return 2 * (self.num_matmul_params() + host.extra_matmul_params(self)) + 4 * self.config.n_embd * attended

    def estimate_prefill_flops(self, num_tokens):
        """Forward FLOPs of a prompt: position t attends to min(t, window) tokens."""
        attended = 0
        for window, _ in self.window_sizes:
            ramp = min(window, num_tokens)
            attended += ramp * (ramp + 1) // 2 + (num_tokens - ramp) * ramp
        matmul = self.num_matmul_params() + host.extra_matmul_params(self)
        return 2 * matmul * num_tokens + 4 * self.config.n_embd * attended

    def _kv_row_bytes(self):
        """Bytes of one token's K (or V) in one layer."""
        return self.config.n_kv_head * (self.config.n_embd // self.config.n_head) * COMPUTE_DTYPE.itemsize

    def kv_bytes_per_token(self):
        """Bytes of K, and of V where a layer must cache it, of one token in all layers; token ids apart."""
        return (self.config.n_layer + len(self.value_layers)) * self._kv_row_bytes()

    def kv_read_bytes(self, context_len):
        """Bytes of K and cached V that one decode step reads per row at a context length."""
        rows = [min(window, context_len) for window, _ in self.window_sizes]
        return (sum(rows) + sum(rows[i] for i in self.value_layers)) * self._kv_row_bytes()

    def num_scaling_params(self):
        """Parameter counts by kind: wte, value_embeds, lm_head, transformer_matrices, scalars, total."""
        counts = {"wte": 0, "value_embeds": 0, "lm_head": 0, "transformer_matrices": 0, "scalars": 0}
        for name, p in self.named_parameters():
            if name == "transformer.wte.weight":
                kind = "wte"
            elif name.startswith("value_embeds."):
                kind = "value_embeds"
            elif name == "lm_head.weight":
                kind = "lm_head"
            else:
                matrix = name.startswith("transformer.h.") and p.ndim == 2
                kind = "transformer_matrices" if matrix else "scalars"
            counts[kind] += p.numel()
        return counts | {"total": sum(counts.values())}

    # ------------------------------------------------------------------------ optimizer

    def setup_optimizer(
        self,
        unembedding_lr=0.004,
        embedding_lr=0.2,
        matrix_lr=0.02,
        weight_decay=0.0,
        scalar_lr=0.5,
        muon="upstream",
        **tables,
    ):
        """MuonAdamW over all parameters; learning rates before the 1/sqrt(n_embd/768) scaling of the Adam groups.

        `tables`: table_lr_scale and table_weight_decay, see optim.param_groups.
        """
        groups = param_groups(
            self.named_parameters(),
            n_embd=self.config.n_embd,
            unembedding_lr=unembedding_lr,
            embedding_lr=embedding_lr,
            matrix_lr=matrix_lr,
            scalar_lr=scalar_lr,
            weight_decay=weight_decay,
            muon=muon,
            **tables,
        )
        return MuonAdamW(groups)


def window_sizes(config):
    """(left, right) window per layer: L = sequence_len, S = a quarter rounded up to 128; the last layer is L."""
    long = config.sequence_len
    short = -(-long // 4 // 128) * 128
    pattern = config.window_pattern.upper()
    sizes = [(long if pattern[i % len(pattern)] == "L" else short, 0) for i in range(config.n_layer)]
    sizes[-1] = (long, 0)
    return sizes
