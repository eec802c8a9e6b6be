"""CORE's questions: from the items of a task to token sequences and the positions that are scored.

Prompts, few-shot draw and scored positions are upstream nanochat's and so DCLM's (arXiv 2406.11794). A task is a dict:
task_type (multiple_choice, schema or language_modeling), num_fewshot, continuation_delimiter.
"""

import random
from dataclasses import dataclass

# task type -> fields of its items
FIELDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}
FEWSHOT_SEED = 1234  # + the item's index

# What may befall an item; with any of these but `indistinct` a score is not the standard one.
FLAGS = {
    "cropped": "the prompt was longer than the context and lost its beginning",
    "answer_cropped": "the answer alone was longer than the context",
    "indistinct": "a choice has no token that another lacks, so nothing of it is scored",
    "empty": "the continuation has no token; counted as wrong",
    "not_prefix": "the tokens of the prompt do not begin the tokens of prompt and answer; scored from where they part",
    "fewer_shots": "the task has fewer other items than shots; all of them were used",
}


# ---------------------------------------------------------------------------- prompts


def _with_examples(solved, prompt):
    return "".join(f"{text}\n\n" for text in solved) + prompt


def render_prompts_mc(item, continuation_delimiter, fewshot_examples=None):
    """One prompt per choice: the query under its examples, each followed by an answer."""
    delimiter = continuation_delimiter
    solved = [f"{e['query']}{delimiter}{e['choices'][e['gold']]}" for e in fewshot_examples or ()]
    return [_with_examples(solved, f"{item['query']}{delimiter}{choice}") for choice in item["choices"]]


def render_prompts_schema(item, continuation_delimiter, fewshot_examples=None):
    """One prompt per context, all with the same continuation."""
    delimiter = continuation_delimiter
    solved = [f"{e['context_options'][e['gold']]}{delimiter}{e['continuation']}" for e in fewshot_examples or ()]
    return [
        _with_examples(solved, f"{context}{delimiter}{item['continuation']}") for context in item["context_options"]
    ]


def render_prompts_lm(item, continuation_delimiter, fewshot_examples=None):
    """[prompt without its continuation, the same with it]; the first without white space at its ends."""
    delimiter = continuation_delimiter
    solved = [f"{str(e['context']).strip()}{delimiter}{e['continuation']}" for e in fewshot_examples or ()]
    prompt = _with_examples(solved, f"{str(item['context']).strip()}{delimiter}")
    return [prompt.strip(), f"{prompt}{item['continuation']}"]


def draw_fewshot(data, index, num_fewshot):
    """The examples of item `index`: other items of `data` in the order drawn, all of them when there are fewer."""
    others = range(len(data) - 1)
    drawn = random.Random(FEWSHOT_SEED + index).sample(others, min(num_fewshot, len(others)))
    return [data[i + (i >= index)] for i in drawn]


# ---------------------------------------------------------------------------- tokens


def find_common_length(token_sequences, direction="left"):
    """Tokens that all sequences share at their beginning (direction left) or end (right)."""
    if direction not in ("left", "right"):
        raise ValueError(f"direction {direction!r}: use left or right")
    step = 1 if direction == "left" else -1
    sequences = [sequence[::step] for sequence in token_sequences]
    first, last = min(sequences), max(sequences)  # what these two share, all between them share
    pairs = enumerate(zip(first, last, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(last)))


def _encode(tokenizer, prompts):
    return tokenizer(prompts, prepend=tokenizer.get_bos_token_id())


def batch_sequences_mc(tokenizer, prompts):
    """(sequences, starts, ends): scored is each sequence from where the choices part to its end."""
    tokens = _encode(tokenizer, prompts)
    return tokens, [find_common_length(tokens)] * len(tokens), [len(row) for row in tokens]


def batch_sequences_schema(tokenizer, prompts):
    """(sequences, starts, ends): scored is the end that all sequences share."""
    tokens = _encode(tokenizer, prompts)
    shared = find_common_length(tokens, direction="right")
    return tokens, [len(row) - shared for row in tokens], [len(row) for row in tokens]


def batch_sequences_lm(tokenizer, prompts):
    """([sequence], [start], [end]) of the prompt with its continuation, scored from where the two prompts part."""
    tokens = _encode(tokenizer, prompts)
    return [tokens[1]], [find_common_length(tokens)], [len(tokens[1])]


# ---------------------------------------------------------------------------- questions


@dataclass(frozen=True)
class Question:
    """One item as a model reads it. Of each row (token ids) the targets start..end-1 are scored.

    start >= 1 wherever anything is scored; start = end where nothing is. `gold` is the right row, None for language
    modelling. `flags`: keys of FLAGS.
    """

    index: int
    rows: tuple
    starts: tuple
    gold: int | None
    flags: tuple = ()

    @property
    def ends(self):
        return tuple(len(row) for row in self.rows)


def question(index, data, tokenizer, task, max_len) -> Question:
    """Item `index` of `data` under `task`, at most `max_len` tokens a row, cropped from the left."""
    kind, shots, delimiter = (task[key] for key in ("task_type", "num_fewshot", "continuation_delimiter"))
    item, flags = data[index], []
    examples = draw_fewshot(data, index, shots)
    if len(examples) < shots:
        flags.append("fewer_shots")
    prompts = RENDER[kind](item, delimiter, examples)
    rows, starts, ends = BATCH[kind](tokenizer, prompts)
    if kind == "language_modeling":
        if starts[0] < len(_encode(tokenizer, prompts[0])):
            flags.append("not_prefix")
        if starts[0] == ends[0]:
            flags.append("empty")
    elif any(start in (0, end) for start, end in zip(starts, ends, strict=True)):
        starts = [start or end for start, end in zip(starts, ends, strict=True)]
        flags.append("indistinct")
    gold = None if kind == "language_modeling" else item["gold"]
    return crop(Question(index, tuple(rows), tuple(starts), gold, tuple(flags)), max_len)


RENDER = {"multiple_choice": render_prompts_mc, "schema": render_prompts_schema, "language_modeling": render_prompts_lm}
BATCH = {
    "multiple_choice": batch_sequences_mc,
    "schema": batch_sequences_schema,
    "language_modeling": batch_sequences_lm,
}


def crop(asked: Question, max_len) -> Question:
    """The last `max_len` tokens of each row; an answer that does not fit loses its own beginning too."""
    rows, starts, flags = [], [], list(asked.flags)
    for row, start, end in zip(asked.rows, asked.starts, asked.ends, strict=True):
        gone = max(0, len(row) - max_len)
        if gone and "cropped" not in flags:
            flags.append("cropped")
        if gone and gone >= start and start < end and "answer_cropped" not in flags:
            flags.append("answer_cropped")
        rows.append(row[gone:])
        starts.append(min(max(start - gone, 1), end - gone))
    return Question(asked.index, tuple(rows), tuple(starts), asked.gold, tuple(flags))


def check_items(data, task_type, where):
    """ValueError naming the first item of `data` that lacks what its task type asks, in file `where`."""
    for number, item in enumerate(data, 1):
        missing = [field for field in FIELDS[task_type] if not isinstance(item, dict) or field not in item]
        if missing:
            raise ValueError(f"{where}: item {number} has no {missing[0]!r}, which {task_type} needs")
        if task_type != "language_modeling":
            choices, gold = item["choices" if task_type == "multiple_choice" else "context_options"], item["gold"]
            if not isinstance(choices, list) or not isinstance(gold, int) or gold not in range(len(choices)):
                raise ValueError(f"{where}: item {number} has gold {item['gold']!r}, which names none of its choices")
