"""Token streams from a model: the key/value cache, sampling, and generation with the calculator tool.

The engine knows token ids only; the tokenizer serves the tool's markers and its expression text.
Shapes: L layers, B batch rows, T positions, H key/value heads, D head dim, V vocabulary.
"""

import ast
import math
import operator
import re
import warnings
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from nanochat.bov.decode import STRATEGIES, History
from nanochat.common import COMPUTE_DTYPE

# ---------------------------------------------------------------------------- calculator

MAX_EXPRESSION = 1000  # characters; also bounds the digits of a product
BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def use_calculator(expr):
    """Value of an arithmetic expression (+ - * / // and parentheses) or of "text".count("part"); None for all else.

    Only these node types of the parsed expression are ever computed; commas between digits are dropped (1,000).
    """
    quoted = "'" in expr or '"' in expr
    text = (expr if quoted else re.sub(r"(?<=\d),(?=\d)", "", expr)).strip()
    if len(text) > MAX_EXPRESSION:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node = ast.parse(text, mode="eval").body
        return _count(node) if quoted else _number(node)
    except (ArithmeticError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _number(node):
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            result = value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            result = BINARY[type(op)](_number(left), _number(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            result = UNARY[type(op)](_number(operand))
        case _:
            raise ValueError("not arithmetic")
    if not math.isfinite(result):
        raise ValueError("not finite")
    return result


def _count(node):
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(text)), attr="count"),
            args=[ast.Constant(value=str(part))],
            keywords=[],
        ):
            return text.count(part)
    raise ValueError("not a count")


# ---------------------------------------------------------------------------- cache


class KVCache:
    """Keys and values of every layer, plus the state that lets a forward continue where the last one ended.

    `value_layers`: the layers whose V is kept; None keeps all. With layers left out, `history` keeps the token ids once
    for all of them (nanochat/bov/decode.py), and `get_layer_cache` gives None for their V.
    `k_cache`, `v_cache` (L, B, T, H, D) are views of storage (L, B, H, T, D), so that attention reads each head
    contiguously. `cache_seqlens` (B,) int32 counts the filled positions; `get_pos()` is the largest of them, without
    asking the device. `prev_embedding` (B, 1, C) is the last token's embedding, kept for the smear.
    """

    def __init__(
        self, batch_size, num_heads, seq_len, head_dim, num_layers, device, dtype, *, value_layers=None, strategy="auto"
    ):
        self.batch_size, self.max_seq_len = batch_size, seq_len
        self.n_layers, self.n_heads, self.head_dim = num_layers, num_heads, head_dim
        kept = tuple(range(num_layers)) if value_layers is None else tuple(value_layers)
        self._value_index = {layer: i for i, layer in enumerate(kept)}
        row = (batch_size, num_heads, seq_len, head_dim)
        self.k_cache = torch.zeros((num_layers, *row), device=device, dtype=dtype).transpose(2, 3)
        self.v_cache = torch.zeros((len(kept), *row), device=device, dtype=dtype).transpose(2, 3)
        self.history = History(batch_size, seq_len, device, strategy) if len(kept) < num_layers else None
        self.cache_seqlens = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.prev_embedding = None
        self._pos = self._shortest = 0

    def reset(self):
        """Forget everything, also numbers that are not finite; the memory stays."""
        self.k_cache.zero_()
        self.v_cache.zero_()
        self.cache_seqlens.zero_()
        self.prev_embedding = None
        self._pos = self._shortest = 0
        if self.history is not None:
            self.history.reset()

    def get_pos(self) -> int:
        """Filled positions, of the longest row."""
        return self._pos

    @property
    def offset(self):
        """Where each row continues: an int when all rows are equally long, else `cache_seqlens`."""
        return self._pos if self._pos == self._shortest else self.cache_seqlens

    def get_layer_cache(self, layer_idx):
        """(keys, values) of one layer, views of shape (B, T, H, D); values None where they are not kept."""
        index = self._value_index.get(layer_idx)
        return self.k_cache[layer_idx], None if index is None else self.v_cache[index]

    def append_ids(self, idx):
        """Take the token ids idx (B, T) of a forward, once, before its layers run."""
        if self.history is not None:
            self.history.rewind(self._pos)
            self.history.append(idx)

    def check(self, num_tokens):
        """Raises ValueError when `num_tokens` more do not fit; a forward calls it before it writes."""
        if self._pos + num_tokens > self.max_seq_len:
            raise ValueError(
                f"the KV cache holds {self.max_seq_len} positions: {self._pos} are filled and {num_tokens} more do not "
                "fit; make it longer or the prompt shorter"
            )

    def advance(self, num_tokens):
        """Count `num_tokens` more positions as filled; ValueError past the end."""
        self.check(num_tokens)
        self._pos += num_tokens
        self._shortest += num_tokens
        self.cache_seqlens += num_tokens

    def prefill(self, other):
        """Start from the content of `other`, whose one row is repeated over the batch (or which has as many rows).

        Raises ValueError when this cache is not empty, too short, or of another shape.
        """
        self._check_empty()
        self._check_source(other, rows=(1, self.batch_size))
        self._copy(other, slice(None))
        self.cache_seqlens.copy_(other.cache_seqlens.expand_as(self.cache_seqlens))
        self._pos, self._shortest = other._pos, other._shortest
        if self.history is not None:
            self.history.prefill(other.history)
        if other.prev_embedding is not None:
            self.prev_embedding = other.prev_embedding.expand(self.batch_size, -1, -1).clone()

    def prefill_rows(self, others):
        """Start row by row from caches of one row each, whose lengths may differ; an iterable is read as it goes.

        Raises ValueError as `prefill`, and, leaving this cache empty, for an empty cache or another number than rows.
        """
        self._check_empty()
        try:
            self._fill_rows(others)
        except ValueError:
            self.reset()
            raise

    def _fill_rows(self, others):
        lengths, embeddings = [], []
        for row, other in enumerate(others):
            if row == self.batch_size or not other.get_pos():
                raise ValueError(f"prefill_rows: cache {row} of {self.batch_size} is empty or one too many")
            self._check_source(other, rows=(1,))
            self._copy(other, slice(row, row + 1))
            self.cache_seqlens[row] = other.get_pos()
            if self.history is not None:
                self.history.prefill_row(row, other.history)
            lengths.append(other.get_pos())
            embeddings.append(other.prev_embedding)
        if len(lengths) != self.batch_size:
            raise ValueError(f"prefill_rows: {len(lengths)} caches for {self.batch_size} rows")
        self._pos, self._shortest = max(lengths), min(lengths)
        if self.history is not None:
            self.history.settle(lengths)
        if embeddings[0] is not None:
            self.prev_embedding = torch.cat(embeddings)

    def _check_empty(self):
        if self._pos:
            raise ValueError(f"prefill needs an empty KV cache: {self._pos} positions are filled; call reset() first")

    def _check_source(self, other, rows):
        shape, source = ((c.n_layers, c.n_heads, c.head_dim, tuple(c._value_index)) for c in (self, other))
        if shape != source or other.batch_size not in rows:
            raise ValueError(
                f"prefill from (layers, heads, head_dim, layers with V) {source} and {other.batch_size} rows into "
                f"{shape} and {self.batch_size} rows"
            )
        self.check(other.get_pos())

    def _copy(self, other, rows):
        filled = slice(0, other.get_pos())
        self.k_cache[:, rows, filled] = other.k_cache[:, :, filled]
        self.v_cache[:, rows, filled] = other.v_cache[:, :, filled]


# ---------------------------------------------------------------------------- sampling


@torch.inference_mode()
def sample_next_token(logits, rng, temperature=1.0, top_k=None):
    """One token per row: logits (B, V) -> ids (B, 1). Temperature 0 takes the most likely; top_k None or 0 keeps all.

    Raises ValueError for a temperature that is negative, not finite or close to 0, and for a negative top_k.
    """
    if not (temperature == 0 or 1e-4 <= temperature < math.inf):
        raise ValueError(f"temperature {temperature}: use 0 (the most likely token) or a number from 0.0001 on")
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k {top_k} must not be negative")
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if not top_k:
        return torch.multinomial(F.softmax(logits / temperature, dim=-1), num_samples=1, generator=rng)
    best, ids = logits.topk(min(top_k, logits.size(-1)), dim=-1)
    return ids.gather(1, torch.multinomial(F.softmax(best / temperature, dim=-1), num_samples=1, generator=rng))


# ---------------------------------------------------------------------------- generation


@dataclass(frozen=True)
class Markers:
    """Token ids that steer a row: the tool's begin and end, its result's, and the two that end the row."""

    python_start: int
    python_end: int
    output_start: int
    output_end: int
    terminal: frozenset

    @classmethod
    def of(cls, tokenizer):
        names = ("python_start", "python_end", "output_start", "output_end", "assistant_end")
        *tool, assistant_end = (tokenizer.encode_special(f"<|{name}|>") for name in names)
        return cls(*tool, terminal=frozenset((assistant_end, tokenizer.get_bos_token_id())))


@dataclass
class Row:
    """What one sample is in the middle of: a tool call being written (`expression`), a result still to be forced."""

    forced: deque = field(default_factory=deque)
    expression: list | None = None
    completed: bool = False

    def take(self, sampled, markers, tokenizer):
        """(token, mask) that the row takes: the next forced token (mask 0) before the sampled one (mask 1)."""
        token, mask = (self.forced.popleft(), 0) if self.forced else (sampled, 1)
        self.completed |= token in markers.terminal
        if token == markers.python_start:
            self.expression = []
        elif token == markers.python_end:
            self._call(markers, tokenizer)
        elif self.expression is not None:
            self.expression.append(token)
        return token, mask

    def _call(self, markers, tokenizer):
        result = use_calculator(tokenizer.decode(self.expression)) if self.expression else None
        self.expression = None
        if result is not None:
            self.forced.extend((markers.output_start, *tokenizer.encode(str(result)), markers.output_end))


def _traits(model):
    """(vocabulary without padding rows, positions at most, layers whose V must be cached) of a model.

    (inf, inf, None) where a foreign model states none.
    """
    positions = getattr(model, "max_positions", math.inf)
    return getattr(model.config, "vocab_size", math.inf), positions, getattr(model, "value_layers", None)


class Engine:
    """Generation with one prefill of each prompt and one cached step per token.

    strategy: how layers without a V cache decode, see nanochat/bov/decode.py.
    """

    def __init__(self, model, tokenizer, *, strategy="auto"):
        if strategy not in STRATEGIES:
            raise ValueError(f"decode strategy {strategy!r}: use one of {', '.join(STRATEGIES)}")
        self.model, self.tokenizer, self.strategy = model, tokenizer, strategy
        self.vocab_size, self.max_positions, self.value_layers = _traits(model)

    def generate(self, tokens, num_samples=1, max_tokens=None, temperature=1.0, top_k=None, seed=42):
        """Iterator of (token per sample, mask per sample); mask 1 = sampled, 0 = forced by the tool.

        Ends after `max_tokens` (None: when prompt and continuation fill the model's sequence_len) or once every sample
        has met an end token; samples that ended earlier keep producing. Raises ValueError for an empty prompt, an
        id outside the vocabulary, a prompt without room behind it, and senseless numbers.
        """
        limit = self._check(tokens, max_tokens)
        if num_samples < 1:
            raise ValueError(f"num_samples {num_samples} must be at least 1")
        return self._stream([tokens], [limit] * num_samples, temperature, top_k, seed)

    def generate_batch(self, tokens, num_samples=1, **kwargs):
        """(sequences, masks): per sample the prompt and its continuation up to its end token, which is left out."""
        return self._collect([tokens] * num_samples, self.generate(tokens, num_samples, **kwargs))

    def generate_many(self, prompts, max_tokens=None, temperature=1.0, top_k=None, seed=42):
        """(sequences, masks) like generate_batch, of prompts of any lengths that continue together in one batch.

        `max_tokens` counts for each prompt. With temperature 0 every prompt continues as it would alone. Raises
        ValueError as `generate`, naming the prompt, and when there is no prompt.
        """
        if len(prompts) == 0:
            raise ValueError("generate_many needs at least one prompt")
        limits = []
        for i, tokens in enumerate(prompts):
            try:
                limits.append(self._check(tokens, max_tokens))
            except ValueError as error:
                raise ValueError(f"prompt {i} of {len(prompts)}: {error}") from None
        self._check_positions(max(map(len, prompts)), max(limits))
        return self._collect(prompts, self._stream(prompts, limits, temperature, top_k, seed), limits)

    def _check(self, tokens, max_tokens):
        """The number of tokens to generate, after every check of one prompt."""
        if len(tokens) == 0:
            raise ValueError("the prompt is empty: it needs at least one token, for instance <|bos|>")
        if not all(isinstance(token, int) for token in tokens):
            raise ValueError("the prompt must be a list of int token ids")
        outside = [token for token in tokens if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"token id {outside[0]} in the prompt is outside the vocabulary 0..{self.vocab_size - 1}")
        if max_tokens is not None:
            if not isinstance(max_tokens, int) or max_tokens < 0:
                raise ValueError(f"max_tokens {max_tokens} must be an int that is not negative")
            self._check_positions(len(tokens), max_tokens)
            return max_tokens
        context = self.model.config.sequence_len
        if len(tokens) >= context:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens and the model's sequence_len is {context}: shorten the prompt "
                "or give max_tokens"
            )
        return context - len(tokens)

    def _check_positions(self, prompt, limit):
        if prompt + limit - 1 > self.max_positions:  # the last token is not read
            raise ValueError(
                f"{prompt} tokens of prompt and {limit} more pass the {self.max_positions} positions of the model: "
                "shorten the prompt or give less max_tokens"
            )

    def _cache(self, batch_size, seq_len):
        config = self.model.config
        return KVCache(
            batch_size=batch_size,
            num_heads=config.n_kv_head,
            seq_len=seq_len,
            head_dim=config.n_embd // config.n_head,
            num_layers=config.n_layer,
            device=self.model.get_device(),
            dtype=COMPUTE_DTYPE,
            value_layers=self.value_layers,
            strategy=self.strategy,
        )

    def _prefill(self, prompts, rows, total):
        """(logits (rows, V), cache of `total` positions): one prompt repeated over all rows, or one prompt per row."""
        logits = []

        def read(tokens, positions):
            cache = self._cache(1, positions)
            ids = torch.tensor([tokens], device=self.model.get_device())
            logits.append(self.model.forward(ids, kv_cache=cache)[:, -1])
            return cache

        if rows == 1:
            cache = read(prompts[0], total)
        else:
            cache = self._cache(rows, total)
            if len(prompts) == 1:
                cache.prefill(read(prompts[0], len(prompts[0])))
            else:
                cache.prefill_rows(read(tokens, len(tokens)) for tokens in prompts)
        return torch.cat(logits).expand(rows, -1), cache

    @torch.inference_mode()
    def _stream(self, prompts, limits, temperature, top_k, seed):
        """`prompts`: one for all rows, or one per row; `limits`: tokens to generate in each row."""
        device = self.model.get_device()
        rng = torch.Generator(device=device).manual_seed(seed)
        markers = Markers.of(self.tokenizer)
        rows = [Row() for _ in limits]
        if max(limits) == 0:
            return
        logits, cache = self._prefill(prompts, len(rows), max(map(len, prompts)) + max(limits))
        for step in range(1, max(limits) + 1):
            sampled = sample_next_token(logits, rng, temperature, top_k)[:, 0].tolist()
            taken = [row.take(token, markers, self.tokenizer) for row, token in zip(rows, sampled, strict=True)]
            column, masks = (list(part) for part in zip(*taken, strict=True))
            yield column, masks
            if all(row.completed or step >= limit for row, limit in zip(rows, limits, strict=True)):
                return
            ids = torch.tensor(column, device=device).unsqueeze(1)
            logits = self.model.forward(ids, kv_cache=cache)[:, -1]

    def _collect(self, prompts, stream, limits=None):
        """(sequences, masks) of a stream, each row up to its end token or its limit."""
        terminal = Markers.of(self.tokenizer).terminal
        results = [list(tokens) for tokens in prompts]
        masks = [[0] * len(tokens) for tokens in prompts]
        open_rows = set(range(len(prompts)))
        for step, (column, column_masks) in enumerate(stream):
            for i in sorted(open_rows):
                if column[i] in terminal or (limits and step >= limits[i]):
                    open_rows.remove(i)
                else:
                    results[i].append(column[i])
                    masks[i].append(column_masks[i])
        return results, masks
