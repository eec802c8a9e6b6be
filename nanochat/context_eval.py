"""What a model does with context at 0.25 to 4 times its training length T: does a context-free value cost anything?

Position buckets: bits per byte by position in rows of 4 T tokens. Probes, generated from a seed, `length` tokens each:
passkey    a number told once in filler text, asked for at the end, to be told from nine others
recall     ten words bound to ten others, each once, scattered in filler text; one is named again, its partner wanted
induction  random tokens said twice; the last of the second time are to be predicted, at a distance of half the length
Each is made with the windows the model was trained with and with its long layers unlimited.
"""

import random
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from nanochat.common import is_ddp_initialized, print0, progress
from nanochat.core_compare import DRAWS, SEED, interval, summarise
from nanochat.core_eval import on_all_ranks, rank_and_ranks
from nanochat.core_prompts import Question
from nanochat.core_score import answer

TIMES = (0.25, 0.5, 1, 2, 4)  # of the training length
BUCKETS_PER_T = 4
CHOICES = 10
COPIED = 32  # targets of an induction item at most
WINDOWS = ("trained", "unlimited")
ITEMS = 100  # of a probe at one length

FILLER = (
    "The road was dry and the wind came from the west.", "Nobody in the village had seen the river so low.",
    "They walked until noon and rested under the trees.", "The old clock in the hall had stopped again.",
    "A letter lay on the table, but it was not for them.", "Later in the day the clouds began to gather.",
    "She closed the window and lit the lamp.", "The boat was painted green and white.",
    "In the morning the market was full of people.", "He counted the steps on the way down.",
)  # fmt: skip


@contextmanager
def windows(model, kind):
    """The model's attention windows as `kind` says: trained, or unlimited in layers whose window is sequence_len."""
    before = model.window_sizes
    if kind == "unlimited":
        model.window_sizes = [(-1, 0) if left == model.config.sequence_len else (left, right) for left, right in before]
    try:
        yield
    finally:
        model.window_sizes = before


# ---------------------------------------------------------------------------- bits per byte by position


@torch.inference_mode()
def bpb_by_position(model, batches, token_bytes, length):
    """[{from, to, bpb, bytes}] of buckets of T / 4 positions up to `length`, over all ranks.

    batches of (inputs, targets), each (B, up to `length`), targets below 0 ignored; bpb is None where no byte fell.
    """
    device = torch.device("cpu") if model.get_device().type == "mps" else model.get_device()  # MPS has no fp64
    nats, counts = (torch.zeros(length, dtype=torch.float64, device=device) for _ in range(2))
    for inputs, targets in batches:
        loss = model(inputs, targets, loss_reduction="none").view(targets.shape)
        size = torch.where(targets >= 0, token_bytes[targets.clamp(min=0)], 0)
        nats[: targets.size(1)] += torch.where(size > 0, loss, 0).to(device, torch.float64).sum(0)
        counts[: targets.size(1)] += size.to(device, torch.float64).sum(0)
    if is_ddp_initialized():
        dist.all_reduce(nats)
        dist.all_reduce(counts)
    width = max(1, model.config.sequence_len // BUCKETS_PER_T)
    rows = []
    for start in range(0, length, width):
        part = slice(start, min(start + width, length))
        total = counts[part].sum().item()
        bpb = nats[part].sum().item() / (total * np.log(2)) if total else None
        rows.append({"from": start, "to": part.stop, "bpb": bpb, "bytes": int(total)})
    return rows


# ---------------------------------------------------------------------------- probes


class Probes:
    """Generator of items from one seed and tokenizer."""

    def __init__(self, tokenizer):
        self.bos = tokenizer.get_bos_token_id()
        self.encode = tokenizer.encode
        self.filler = [tokenizer.encode(" " + sentence) for sentence in FILLER]
        taken = {token for sentence in self.filler for token in sentence}
        ordinary = (i for i in range(tokenizer.get_vocab_size()) if i not in taken)
        specials = {tokenizer.encode_special(name) for name in tokenizer.get_special_tokens()}
        self.pool = [i for i in ordinary if i not in specials]
        if len(self.pool) < 2 * CHOICES:
            raise ValueError(f"--eval context: the tokenizer has {len(self.pool)} ordinary tokens, too few to generate")

    def _scatter(self, rng, pieces, room):
        """`pieces` (token lists) in filler text, `room` tokens in all, at places drawn anew."""
        free = room - sum(map(len, pieces))
        text = []
        while len(text) < free:
            text += rng.choice(self.filler)
        cuts = sorted(rng.randint(0, free) for _ in pieces)
        out = []
        for before, cut, piece in zip([0, *cuts], cuts, pieces, strict=False):
            out += text[before:cut] + piece
        return out + text[cuts[-1] : free]

    def passkey(self, rng, index, length):
        """None where `length` has no room for it."""
        keys = [f"{key}" for key in rng.sample(range(1000, 10000), CHOICES)]
        gold = rng.randrange(CHOICES)
        needle = self.encode(f" The pass key is {keys[gold]}.")
        asked = self.encode(" What is the pass key? The pass key is")
        answers = [self.encode(f" {key}") for key in keys]
        room = length - 1 - len(asked) - max(map(len, answers))
        if room < len(needle):
            return None
        prompt = [self.bos, *self._scatter(rng, [needle], room), *asked]
        return _choice(index, prompt, answers, gold)

    def recall(self, rng, index, length):
        """None where `length` has no room for it."""
        words = rng.sample(self.pool, 2 * CHOICES)
        pairs = [words[i : i + 2] for i in range(0, len(words), 2)]
        gold = rng.randrange(CHOICES)
        room = length - 3
        if room < len(words):
            return None
        prompt = [self.bos, *self._scatter(rng, pairs, room), pairs[gold][0]]
        return _choice(index, prompt, [[value] for _, value in pairs], gold)

    def induction(self, rng, index, length):
        """None where `length` is too short to say anything twice."""
        half = (length - 1) // 2
        if half < 2:
            return None
        said = [rng.choice(self.pool) for _ in range(half)]
        row = [self.bos, *said, *said]
        return Question(index, (row,), (len(row) - min(COPIED, half - 1),), None)

    def make(self, kind, length, n):
        """`n` questions of a probe, or [] where `length` is too short for it."""
        rng = random.Random(f"{SEED} {kind} {length}")
        made = [PROBES[kind](self, rng, index, length) for index in range(n)]
        return [] if None in made else made


def _choice(index, prompt, answers, gold):
    rows = tuple([*prompt, *tokens] for tokens in answers)
    return Question(index, rows, (len(prompt),) * len(answers), gold)


PROBES = {"passkey": Probes.passkey, "recall": Probes.recall, "induction": Probes.induction}


def run_probe(model, tokenizer, probes, kind, length, n) -> dict:
    """{length, n, accuracy, accuracy_interval, chance}; n is 0 where the length is too short for the probe.

    Accuracy of induction is the share of its tokens, its interval over items.
    """
    questions = probes.make(kind, length, n)
    rank, world_size = rank_and_ranks()

    def work():
        mine = questions[rank::world_size]
        return [
            (asked.index, _score(asked, found))
            for asked, found in zip(mine, answer(model, mine, tokenizer), strict=True)
        ]

    scores = [score for _, score in sorted(on_all_ranks(work))]
    chance = 1 / len(probes.pool) if kind == "induction" else 1 / CHOICES
    row = {"length": length, "n": len(scores), "chance": chance}
    if not scores:
        return row | {"accuracy": None, "accuracy_interval": None}
    if kind != "induction":
        found = summarise(f"{kind} {length}", [bool(score) for score in scores], 100 * chance)
        return row | {key: found[key] for key in ("accuracy", "accuracy_interval")}
    draws = np.random.default_rng([SEED, length]).choice(scores, (DRAWS // 10, len(scores))).mean(1)
    return row | {"accuracy": float(np.mean(scores)), "accuracy_interval": interval(draws)}


def _score(asked, found):
    if asked.gold is not None:
        return float(found.correct)
    (row,), (start,) = asked.rows, asked.starts
    return float(np.mean([a == b for a, b in zip(found.predicted, row[start:], strict=True)]))


# ---------------------------------------------------------------------------- all of it


def lengths_of(model) -> list[int]:
    """TIMES the training length, as far as the rotary table goes."""
    wanted = [int(times * model.config.sequence_len) for times in TIMES]
    return [length for length in wanted if 0 < length <= model.max_positions]


def evaluate_context(model, tokenizer, token_bytes, batches, n=ITEMS) -> dict:
    """Content of context.json, on every rank; each part is printed when it is done.

    batches(length): iterable of (inputs, targets) in rows up to `length`. Returns sequence_len, seed, items, and
    positions {window: rows of bpb_by_position}, probes {name: {window: rows of run_probe}}.
    """
    lengths, probes = lengths_of(model), Probes(tokenizer)
    result = {"sequence_len": model.config.sequence_len, "seed": SEED, "items": n, "positions": {}, "probes": {}}
    result["probes"] = {kind: {} for kind in PROBES}
    for kind in WINDOWS:
        with windows(model, kind):
            with progress(batches(lengths[-1]), desc=f"positions, {kind} windows", unit="batch") as rows:
                result["positions"][kind] = bpb_by_position(model, rows, token_bytes, lengths[-1])
            _show_positions(kind, result["positions"][kind], model.config.sequence_len)
            for probe in PROBES:
                with progress(lengths, desc=f"{probe}, {kind} windows", unit="length") as asked:
                    rows = [run_probe(model, tokenizer, probes, probe, length, n) for length in asked]
                result["probes"][probe][kind] = rows
                _show_probe(probe, kind, rows, model.config.sequence_len)
    return result


def _show_positions(kind, rows, T):
    cells = [f"{row['from'] / T:g}-{row['to'] / T:g} T: {row['bpb']:.4f}" for row in rows if row["bpb"] is not None]
    print0(f"bits per byte by position, {kind} windows: " + ", ".join(cells), flush=True)


def _show_probe(probe, kind, rows, T):
    cells = [f"{row['length'] / T:g} T: {row['accuracy']:.3f}" for row in rows if row["n"]]
    print0(f"{probe}, {kind} windows (chance {rows[0]['chance']:.3g}): " + ", ".join(cells), flush=True)
