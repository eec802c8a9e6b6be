"""One task of CORE on all ranks: upstream's evaluate_task and evaluate_example, and the rooms behind them.

core_prompts  items -> token sequences and scored positions
core_score    losses of those positions, fast
core_bundle   the evaluation bundle: where it comes from, its tasks and baselines
core_suite    all tasks: scores, intervals, files that a rerun continues
core_compare  two models item by item
"""

from dataclasses import dataclass

import torch.distributed as dist

from nanochat.common import is_ddp_initialized
from nanochat.core_prompts import (  # noqa: F401
    FIELDS,
    Question,
    batch_sequences_lm,
    batch_sequences_mc,
    batch_sequences_schema,
    find_common_length,
    question,
    render_prompts_lm,
    render_prompts_mc,
    render_prompts_schema,
)
from nanochat.core_score import Answer, answer, forward_model, stack_sequences  # noqa: F401


class RankFailure(RuntimeError):
    """Some rank could not do its share; every rank raises it with that rank's message."""


@dataclass(frozen=True)
class Result:
    """What came out for one item: its index in the task, its flags (core_prompts.FLAGS) and the model's answer."""

    index: int
    gold: int | None
    flags: tuple
    answer: Answer


def check_max_len(max_len):
    """ValueError for a --core-max-len without room; None = not limited."""
    if max_len is not None and max_len < 2:
        raise ValueError(f"--core-max-len {max_len}: at least 2 tokens, one to read and one to score")


def context_of(model, max_len=None) -> int:
    """Tokens of a prompt at most: the rotary table's positions, or `max_len` (--core-max-len) where that is less."""
    check_max_len(max_len)
    return min(model.max_positions, max_len or model.max_positions)


def answer_items(model, tokenizer, data, task, indices, norm="token", max_len=None):
    """Iterator of the Result of items `indices` of `data`; see core_prompts for `task` and core_score for `norm`."""
    if task["task_type"] not in FIELDS:
        raise ValueError(f"task type {task['task_type']!r}: use one of {', '.join(FIELDS)}")
    limit, asked_now = context_of(model, max_len), []

    def questions():
        for index in indices:
            asked_now.append(question(index, data, tokenizer, task, limit))
            yield asked_now[-1]

    for found in answer(model, questions(), tokenizer, norm):
        asked = asked_now.pop(0)
        yield Result(asked.index, asked.gold, asked.flags, found)


def rank_and_ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if is_ddp_initialized() else (0, 1)


def on_all_ranks(work) -> list:
    """The lists that work() gives on each rank, joined on every rank. RankFailure on all when one rank fails."""
    if not is_ddp_initialized():
        return work()
    try:
        own, problem = work(), None
    except Exception as error:
        own, problem = [], f"{type(error).__name__}: {error}"
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, (own, problem))
    for rank, (_, said) in enumerate(shares):
        if said is not None:
            raise RankFailure(f"rank {rank} failed: {said}")
    return [result for share, _ in shares for result in share]


def answer_task(model, tokenizer, data, task, norm="token", max_len=None, watch=iter) -> list:
    """Results of all items of `data` in order, on every rank; each rank answers its share.

    `watch` wraps the iterator of this rank's results (a progress bar). Raises RankFailure.
    """
    rank, world_size = rank_and_ranks()
    mine = range(rank, len(data), world_size)
    work = watch(answer_items(model, tokenizer, data, task, mine, norm, max_len))
    return sorted(on_all_ranks(lambda: list(work)), key=lambda result: result.index)


# ---------------------------------------------------------------------------- upstream's interface


def evaluate_example(idx, model, tokenizer, data, device, task_meta) -> bool:
    """Whether the model answers item `idx` of `data` correctly. `device` is the model's."""
    (result,) = answer_items(model, tokenizer, data, task_meta, [idx])
    return result.answer.correct


def evaluate_task(model, tokenizer, data, device, task_meta) -> float:
    """Accuracy over all items of `data`, shared by the ranks; `device` is the model's. task_meta: see core_prompts."""
    return accuracy(answer_task(model, tokenizer, data, task_meta))


def accuracy(results) -> float:
    return sum(result.answer.correct for result in results) / len(results)
