"""Whole documents as rows of tokens, every token of which is predicted once: for measuring, not for training.

Shapes: B rows per batch, T inputs per row.
"""

from nanochat.common import get_dist_info
from nanochat.core_score import stack_sequences
from nanochat.sources import hub_texts, text_files

READERS = {"text": text_files, "hf": hub_texts}
IGNORED = -1  # target of padding


def read_source(source):
    """Iterator of the documents of `text:GLOB` or `hf:NAME[:SPLIT[:COLUMN]]`, in no order that matters.

    Raises ValueError for another form, or where there is no such text.
    """
    kind, _, argument = source.partition(":")
    if kind not in READERS or not argument:
        raise ValueError(f"--source {source}: use text:GLOB or hf:NAME[:SPLIT[:COLUMN]]")
    return iter(READERS[kind](argument))


def document_rows(texts, tokenizer, T):
    """Iterator of (inputs, targets), lists of equal length up to T: each document begins with BOS and is cut every T.

    A row that goes on with a document sees nothing of the document before it.
    """
    for text in texts:
        tokens = tokenizer.encode(text, prepend=tokenizer.get_bos_token_id())
        for start in range(0, len(tokens) - 1, T):
            row = tokens[start : start + T + 1]
            yield row[:-1], row[1:]


def document_batches(texts, tokenizer, B, T, device, max_tokens=-1):
    """Iterator of this rank's (inputs, targets), each (B or fewer, T or fewer) int64: rows r, r + W, ... of W ranks.

    Ends after about `max_tokens` targets over all ranks (-1: when the documents do). Padding has target -1.
    """
    _, rank, _, world_size = get_dist_info()
    batch, seen = [], 0
    for number, (inputs, targets) in enumerate(document_rows(texts, tokenizer, T)):
        if 0 <= max_tokens <= seen:
            break
        seen += len(targets)
        if number % world_size == rank:
            batch.append((inputs, targets))
        if len(batch) == B:
            yield _stack(batch, device)
            batch = []
    if batch:
        yield _stack(batch, device)


def _stack(batch, device):
    inputs, targets = zip(*batch, strict=True)
    return stack_sequences(inputs, 0).to(device), stack_sequences(targets, IGNORED).to(device)
