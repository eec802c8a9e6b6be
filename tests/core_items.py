"""Items, tokenizer and models of our own for the tests of CORE, and what upstream's evaluator answers to them.

NANOCHAT_DTYPE=float32 NANOCHAT_UPSTREAM=DIR python tests/core_items.py   writes them to tests/data/core_upstream.json
"""

import json
import os
import random
import subprocess
from pathlib import Path

import tiktoken
import torch
import yaml

from models import build
from nanochat.tokenizer import BOS, SPECIAL_TOKENS, SPLIT_PATTERN, RustBPETokenizer
from scripts.core_bench import load_upstream

ANSWERS = Path(__file__).parent / "data" / "core_upstream.json"
MERGES = ["th", "he", "in", "er", "an", "re", " a", " t", " the", "ou", " b", "on", "en", " s", "is", " is", "ing"]
SHOTS = (0, 3)
SIZES = {"own_mc": ("multiple_choice", 8), "own_schema": ("schema", 9), "own_lm": ("language_modeling", 4)}
MODELS = {
    "upstream": {},
    "windowed": {"sequence_len": 64, "window_pattern": "SSL", "n_layer": 6},
    "bov": {"bov_layers": "last:1/2", "trunk": "plain", "ve_layers": "none", "sequence_len": 64},
}

# ---------------------------------------------------------------------------- tokenizer and models


def tokenizer():
    """Bytes and a few merges, written out: the same everywhere."""
    pieces = [bytes([i]) for i in range(256)] + [text.encode() for text in MERGES]
    ranks = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    specials = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
    enc = tiktoken.Encoding(name="own", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    return RustBPETokenizer(enc, BOS)


@torch.no_grad()
def model(name, **fields):
    """A model whose every weight comes from a formula, so that no random number generator matters."""
    shape = {"vocab_size": tokenizer().get_vocab_size(), "sequence_len": 256} | MODELS[name] | fields
    made = build(randomise=False, **shape)
    for number, (_, p) in enumerate(sorted(made.named_parameters())):
        noise = torch.sin(torch.arange(p.numel(), dtype=torch.float64) * 12.9898 + number) * 43758.5453
        noise = ((noise - noise.floor()) - 0.5).view(p.shape).to(p.dtype)
        p.copy_(noise * (0.6 if p.ndim > 1 else 0.2) + (0 if p.ndim > 1 else 1))
    return made.eval()


# ---------------------------------------------------------------------------- items

THINGS = ["stone", "the heron", "a kettle", "rain on the roof", "bread", "an engine", "thirteen boats", "Ångström"]
VERBS = ["sinks in", "is near", "is another word for", "was lent to", "rests on"]
ENDS = [
    "the river.",
    "a long night in the north",
    "bread and salt",
    "there",
    "nothing, as the others said;",
    "42 or so",
]


COUNT = 13


def items(kind, count=COUNT, seed=5):
    """`count` items of a task type, from a seed."""
    rng = random.Random(f"{kind} {seed}")
    made = []
    for _ in range(count):
        subject = f"{rng.choice(THINGS)} {rng.choice(VERBS)}"
        ends = rng.sample(ENDS, rng.choice((2, 3, 4)))
        gold = rng.randrange(len(ends))
        if kind == "multiple_choice":
            made.append({"query": f"Question: {subject} what?\nThink.", "choices": ends, "gold": gold})
        elif kind == "schema":
            options = [f"It was {end} when {subject}" for end in ends]
            made.append({"context_options": options, "continuation": rng.choice(ENDS), "gold": gold})
        else:
            made.append({"context": f" Tell: {subject} \n", "continuation": rng.choice(ENDS + ["e", "th"])})
    return made


def task(kind, shots, delimiter=None):
    usual = "\nAnswer: " if kind == "multiple_choice" else " "
    return {
        "task_type": kind,
        "num_fewshot": shots,
        "continuation_delimiter": usual if delimiter is None else delimiter,
    }


KINDS = ("multiple_choice", "schema", "language_modeling")


def write_bundle(folder, sizes, shots=2):
    """A bundle in upstream's layout with tasks {label: (type, number of items)}; returns its folder."""
    folder = Path(folder)
    (folder / "eval_data" / "own").mkdir(parents=True)
    entries, table = [], ["Eval Task,Random baseline"]
    for label, (kind, count) in sizes.items():
        lines = [json.dumps(item, ensure_ascii=False) for item in items(kind, count, seed=label)]
        (folder / "eval_data" / "own" / f"{label}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        entry = {"label": label, "dataset_uri": f"own/{label}.jsonl", "num_fewshot": [shots], "icl_task_type": kind}
        entries.append(entry | ({"continuation_delimiter": "\nAnswer: "} if kind == "multiple_choice" else {}))
        table.append(f"{label},{0.0 if kind == 'language_modeling' else 25.0}")
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    (folder / "eval_meta_data.csv").write_text("\n".join(table) + "\n")
    return folder


# ---------------------------------------------------------------------------- upstream's answers


class Watched:
    """Upstream's evaluate_example, and what it saw: the mean loss of each choice, or the tokens it predicted."""

    def __init__(self, module):
        self.module = module
        for name in ("batch_sequences_mc", "batch_sequences_schema", "batch_sequences_lm", "forward_model"):
            setattr(module, name, self._watch(name.split("_")[0], getattr(module, name)))

    def _watch(self, kind, function):
        def watched(*args):
            setattr(self, kind, function(*args))
            return getattr(self, kind)

        return watched

    def __call__(self, index, model, tokenizer, data, task):
        """{correct, and losses or predicted} of one item."""
        right = self.module.evaluate_example(index, model, tokenizer, data, torch.device("cpu"), task)
        (_, starts, ends), (losses, predictions) = self.batch, self.forward
        spans = [slice(start - 1, end - 1) for start, end in zip(starts, ends, strict=True)]
        if task["task_type"] == "language_modeling":
            return {"correct": bool(right), "predicted": predictions[0, spans[0]].tolist()}
        means = [round(losses[i, span].mean().item(), 6) for i, span in enumerate(spans)]
        return {"correct": bool(right), "losses": means}


def upstream_answers(checkout) -> dict:
    """{model: {"type, shots": one answer of Watched per item}} by upstream's code."""
    ask, tok = Watched(load_upstream(checkout)), tokenizer()
    return {
        name: {
            f"{kind}, {shots} shots": [ask(i, model(name), tok, items(kind), task(kind, shots)) for i in range(COUNT)]
            for kind in KINDS
            for shots in SHOTS
        }
        for name in MODELS
    }


if __name__ == "__main__":
    checkout = os.environ["NANOCHAT_UPSTREAM"]
    commit = subprocess.check_output(["git", "-C", checkout, "rev-parse", "HEAD"], text=True).strip()
    ANSWERS.parent.mkdir(exist_ok=True)
    made = {"upstream_commit": commit, "torch": torch.__version__, "answers": upstream_answers(checkout)}
    ANSWERS.write_text(json.dumps(made) + "\n")
