"""Losses of questions under a model: what rows share is read once, logits are made only where something is scored.

Upstream reads every row whole and makes all logits. Here the tokens that all rows of a question share go through the
model once and their keys and values serve every row; questions of like length go together.
Shapes: B rows, T tokens, C n_embd, R scored positions, V vocabulary.
"""

import math
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F

from nanochat.common import COMPUTE_DTYPE
from nanochat.core_prompts import Question, find_common_length
from nanochat.engine import KVCache
from nanochat.head import head_logits

NORMS = ("token", "byte")
WINDOW = 64  # questions held at once, from which batches are made
TOKENS_PER_PASS = {"cuda": 8192}  # of one batch, padding included; one longer row may pass it
TOKENS_PER_PASS_ELSEWHERE = 1024
LIKE = 1.25  # the largest of a batch is at most so many times its smallest
ROWS_OF_LOGITS = 512  # held at once
WORTH_SHARING = 64  # tokens that a pass of its own for a shared beginning must save
PAD = 0  # any id of the vocabulary: nothing attends to what is padded


@dataclass(frozen=True)
class Answer:
    """What a model made of a question.

    losses: one per choice, the mean per scored token or the sum per byte of them, None where nothing is scored (norm
    byte: 0, as the paper's authors count it); of language modelling the one mean loss. predicted: the choice of least
    loss, or the most likely token at each scored position. correct: of that.
    """

    losses: tuple
    predicted: object
    correct: bool


def forward_model(model, input_ids, scored=None, kv_cache=None):
    """(losses, predictions) of ids (B, T), each (B, T): at [b, t] about the token at t + 1, NaN and -1 where not made.

    `scored` (B, T) bool marks the positions t to make them at; None = all but the last of each row. `kv_cache` holds
    what stands before the ids.
    """
    target = input_ids.roll(-1, dims=1)
    if scored is None:
        scored = torch.ones_like(input_ids, dtype=torch.bool)
        scored[:, -1] = False
    rows, target = model.trunk(input_ids, kv_cache)[scored], target[scored]
    losses = torch.full(input_ids.shape, torch.nan, device=input_ids.device)
    predictions = torch.full_like(input_ids, -1)
    parts = zip(rows.split(ROWS_OF_LOGITS), target.split(ROWS_OF_LOGITS), strict=True)
    if len(rows):
        losses[scored], predictions[scored] = (
            torch.cat(part) for part in zip(*(_at(model, x, y) for x, y in parts), strict=True)
        )
    return losses, predictions


def _at(model, x, target):
    """(losses, most likely tokens) of residuals x (R, C) and targets (R,)."""
    logits = head_logits(x[None], model.lm_head.weight, model.config.vocab_size)[0]
    return F.cross_entropy(logits, target, reduction="none"), logits.argmax(-1)


# ---------------------------------------------------------------------------- passes


def stack_sequences(tokens, pad_token_id):
    """Token lists as one tensor (B, longest), padded on the right."""
    ids = torch.full((len(tokens), max(map(len, tokens))), pad_token_id, dtype=torch.long)
    for out, row in zip(ids, tokens, strict=True):
        out[: len(row)] = torch.tensor(row, dtype=torch.long)
    return ids


def _grid(length) -> int:
    """Distance of the lengths that batches are given, a sixteenth of `length` at most, so that shapes come back.

    For each new shape oneDNN keeps what it made, up to 1,024 times.
    """
    return 1 << max(0, length.bit_length() - 5)


def _width(length, most) -> int:
    """`length` rounded up to the grid, `most` at most."""
    step = _grid(length)
    return min(most, -(-length // step) * step)


def _read(model, rows, first=0, cache=None):
    """[(losses, predictions)] of each (tokens, start) of `rows` at its targets from start on.

    `cache` holds the first `first` tokens of each row.
    """
    device = model.get_device()
    ids = stack_sequences([tokens[first:] for tokens, _ in rows], PAD)
    ids = F.pad(ids, (0, _width(ids.size(1), model.max_positions - first) - ids.size(1)), value=PAD)
    scored = torch.zeros_like(ids, dtype=torch.bool)
    spans = [slice(start - 1 - first, len(tokens) - 1 - first) for tokens, start in rows]
    for marks, span in zip(scored, spans, strict=True):
        marks[span] = True
    losses, predictions = (t.cpu() for t in forward_model(model, ids.to(device), scored.to(device), cache))
    return [(losses[i, span], predictions[i, span].tolist()) for i, span in enumerate(spans)]


def _cache(model, rows, positions):
    config = model.config
    return KVCache(
        rows, config.n_kv_head, positions, config.n_embd // config.n_head, config.n_layer, model.get_device(),
        COMPUTE_DTYPE,
    )  # fmt: skip


def _read_shared(model, group, first):
    """_read of all rows of the questions in `group`, the first `first` tokens of each question read once."""
    prefixes = stack_sequences([asked.rows[0][:first] for asked in group], PAD).to(model.get_device())
    once = _cache(model, len(group), first)
    model.trunk(prefixes, once)
    owner = [i for i, asked in enumerate(group) for _ in asked.rows]
    rows = [row for asked in group for row in zip(asked.rows, asked.starts, strict=True)]
    longest = max(len(tokens) for tokens, _ in rows)
    cache = _cache(model, len(rows), first + _width(longest - first, model.max_positions - first))
    for row, i in enumerate(owner):
        cache.k_cache[:, row, :first] = once.k_cache[:, i]
        cache.v_cache[:, row, :first] = once.v_cache[:, i]
    if once.prev_embedding is not None:
        cache.prev_embedding = once.prev_embedding[owner]
    cache.advance(first)
    return _read(model, rows, first, cache)


# ---------------------------------------------------------------------------- what goes together


def _shared(asked: Question) -> int:
    """Tokens that one pass can read for all rows: those they share, but the last, which predicts what is scored.

    Rounded down to the grid.
    """
    shared = min(find_common_length(asked.rows), *asked.starts) - 1
    return shared - shared % _grid(shared) if shared > 0 else shared


def _groups(sizes, budget):
    """Runs (lists of indices) of like sizes, each at most `budget` in all when padded to its largest, or one long."""
    run = []
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        if run and ((len(run) + 1) * sizes[i] > budget or sizes[i] > LIKE * sizes[run[0]]):
            yield run
            run = []
        run.append(i)
    if run:
        yield run


def _read_all(model, questions):
    """For each question its rows' (losses, predictions)."""
    budget = TOKENS_PER_PASS.get(model.get_device().type, TOKENS_PER_PASS_ELSEWHERE)
    sizes = {asked.index: _shared(asked) for asked in questions if len(asked.rows) > 1}
    saved = {asked.index: (len(asked.rows) - 1) * sizes.get(asked.index, 0) for asked in questions}
    sharing = [asked for asked in questions if saved[asked.index] >= WORTH_SHARING]
    found = {}
    for run in _groups([sizes[asked.index] for asked in sharing], budget):
        group = [sharing[i] for i in run]
        results = iter(_read_shared(model, group, sizes[group[0].index]))
        found.update((asked.index, [next(results) for _ in asked.rows]) for asked in group)
    single = [asked for asked in questions if asked.index not in found]
    rows = [row for asked in single for row in zip(asked.rows, asked.starts, strict=True)]
    results = [None] * len(rows)
    for run in _groups([len(tokens) for tokens, _ in rows], budget):
        for i, result in zip(run, _read(model, [rows[i] for i in run]), strict=True):
            results[i] = result
    results = iter(results)
    found.update((asked.index, [next(results) for _ in asked.rows]) for asked in single)
    return [found[asked.index] for asked in questions]


# ---------------------------------------------------------------------------- answers


def _least(losses) -> int:
    """The choice of least loss, the first of equals. Without a loss the first choice wins and others lose, as upstream.

    (There such a loss is NaN, and the minimum of a list that begins with NaN is NaN.)
    """
    if losses[0] is None:
        return 0
    return min((i for i, loss in enumerate(losses) if loss is not None), key=losses.__getitem__)


def _answer(asked: Question, results, norm, tokenizer) -> Answer:
    if asked.gold is None:
        (losses, predicted), (row,), (start,) = results[0], asked.rows, asked.starts
        loss = losses.mean().item() if predicted else None
        return Answer((loss,), predicted, bool(predicted) and predicted == list(row[start:]))
    if norm == "token":
        found = tuple(losses.mean().item() if len(losses) else None for losses, _ in results)
    else:
        sizes = [
            max(1, len(tokenizer.decode(list(row[start:])).encode("utf-8")))
            for row, start in zip(asked.rows, asked.starts, strict=True)
        ]
        found = tuple(losses.sum().item() / size for (losses, _), size in zip(results, sizes, strict=True))
    predicted = _least(found)
    return Answer(found, predicted, predicted == asked.gold)


@torch.inference_mode()
def answer(model, questions, tokenizer, norm="token"):
    """Iterator of the Answer to each of `questions`, an iterable of Question that is read WINDOW at a time.

    norm: what a choice's summed loss is divided by, its scored tokens (upstream) or their bytes (the paper's authors).
    The questions of a window must differ in their index. Raises ValueError where a loss is NaN.
    """
    if norm not in NORMS:
        raise ValueError(f"--core-norm {norm!r}: use {' or '.join(NORMS)}")
    questions = iter(questions)
    while window := list(islice(questions, WINDOW)):
        for asked, results in zip(window, _read_all(model, window), strict=True):
            found = _answer(asked, results, norm, tokenizer)
            if not all(loss is None or math.isfinite(loss) for loss in found.losses):  # or the first choice would win
                raise ValueError(f"item {asked.index}: the model's loss is NaN; its weights are damaged or diverged")
            yield found
