"""Ids, slots and pools of decode.History against the tokens that were appended."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import build
from nanochat.bov import placement
from nanochat.bov.decode import History
from nanochat.bov.presets import preset


class Away(placement.OnHost):
    """A table that is not on the device, and notes the ids it was asked for."""

    def __init__(self, vocab, width=4):
        self.embedding, self.fetched = torch.nn.Embedding(vocab, width), []
        super().__init__(self.embedding, "cpu")

    def fetch(self, ids):
        self.fetched += ids.tolist()
        return super().fetch(ids)


class Here(placement.OnDevice):
    """The same on the device."""

    def __init__(self, vocab, width=4):
        super().__init__(torch.nn.Embedding(vocab, width))
        self.fetched = []

    def fetch(self, ids):
        self.fetched += ids.tolist()
        return super().fetch(ids)


def check_bookkeeping(history, table, rows):
    """`rows`: the tokens of every row. Slots, map and pool say the same about them."""
    distinct = set(itertools.chain(*rows))
    pool = history.pool(table, 2)[0].transpose(0, 1)
    for b, tokens in enumerate(rows):
        slots = history.slots[b, : len(tokens)]
        expected = table.embedding.weight[torch.tensor(tokens)].view(len(tokens), 2, -1)
        assert torch.equal(pool[slots], expected)
        assert history.ids[b, : len(tokens)].tolist() == list(tokens)
        source, at = history.rows(table, 2)
        assert torch.equal(source[at[b, : len(tokens)].long()], expected)
    assert history.distinct == len(distinct) == len(pool)
    assert set(history.pool_ids[: len(distinct)].tolist()) == distinct
    assert (history.token_slot >= 0).sum() == len(distinct)
    assert sorted(table.fetched) == sorted(distinct), "each row is fetched once"


@settings(deadline=None, max_examples=60)
@given(
    vocab=st.integers(1, 40),
    batch=st.integers(1, 3),
    appends=st.lists(st.integers(1, 8), min_size=1, max_size=8),
    look=st.lists(st.booleans(), min_size=8, max_size=8),
    kind=st.sampled_from([Away, Here]),
    seed=st.integers(0, 99),
)
@torch.no_grad()
def test_slots_follow_appended_tokens(vocab, batch, appends, look, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    history, table = History(batch, sum(appends), "cpu"), kind(vocab)
    rows = [[] for _ in range(batch)]
    for T, looks in zip(appends, look, strict=False):
        ids = torch.randint(0, vocab, (batch, T), generator=generator)
        history.append(ids)
        for row, tokens in zip(rows, ids.tolist(), strict=True):
            row += tokens
        if looks:
            check_bookkeeping(history, table, rows)
    check_bookkeeping(history, table, rows)


@pytest.mark.parametrize("kind", [Away, Here])
@torch.no_grad()
def test_slots_past_half_the_vocabulary_and_with_every_token_seen(kind):
    history, table, tokens = History(1, 30, "cpu"), kind(20), [*range(11), 3, *range(11, 20), 3, 0]
    for i, token in enumerate(tokens):
        history.append(torch.tensor([[token]]))
        if i in (9, 10, 11) or i > 18:
            check_bookkeeping(history, table, [tokens[: i + 1]])
    assert history.distinct == table.vocab


@torch.no_grad()
def test_reset_and_prefill_begin_anew():
    one, table = History(1, 10, "cpu"), Away(100)
    one.append(torch.tensor([[5, 7, 5]]))
    check_bookkeeping(one, table, [[5, 7, 5]])
    three = History(3, 10, "cpu")
    three.prefill(one)
    three.append(torch.tensor([[1], [7], [99]]))
    table.fetched.clear()
    check_bookkeeping(three, table, [[5, 7, 5, 1], [5, 7, 5, 7], [5, 7, 5, 99]])
    one.append(torch.tensor([[7]]))
    table.fetched[:] = [5, 7]
    check_bookkeeping(one, table, [[5, 7, 5, 7]])
    assert one.lengths.tolist() == [4] and three.lengths.tolist() == [4, 4, 4]
    one.reset()
    one.append(torch.tensor([[8]]))
    assert one.lengths.tolist() == [1]
    table.fetched.clear()
    check_bookkeeping(one, table, [[8]])


@torch.no_grad()
def test_pools_grow_in_few_steps_and_keep_their_rows():
    history, table = History(1, 1000, "cpu"), Away(4000)
    sizes = set()
    for token in range(1000):
        history.append(torch.tensor([[token]]))
        pool = history.pool(table, 2)
        sizes.add(pool.untyped_storage().nbytes())
        assert torch.equal(pool[0].transpose(0, 1).flatten(1), table.embedding.weight[: token + 1])
    assert len(sizes) <= 12 and table.fetched == list(range(1000))
    assert max(sizes) <= 1.6 * 1000 * table.width * 4


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    appends=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_the_order_of_slots_does_not_depend_on_when_they_are_asked_for(lengths, appends, seed):
    generator = torch.Generator().manual_seed(seed)
    late, early = (History(len(lengths), 30, "cpu") for _ in range(2))
    start = torch.randint(0, 9, (len(lengths), 6), generator=generator)
    for history in (late, early):
        for row, length in enumerate(lengths):
            one = History(1, 6, "cpu")
            one.append(start[row : row + 1, :length])
            history.prefill_row(row, one)
        history.settle(lengths)
    for T in appends:
        ids = torch.randint(0, 9, (len(lengths), T), generator=generator)
        early.assign_slots(9)
        for history in (late, early):
            history.append(ids)
    late.assign_slots(9)
    assert early.assign_slots(9) == late.distinct and torch.equal(early.token_slot, late.token_slot)
    rows = (late.ids[row, :length].tolist() for row, length in enumerate(late.lengths.tolist()))
    assert set(late.pool_ids[: late.distinct].tolist()) == set(itertools.chain(*rows))
    for row, length in enumerate(late.lengths.tolist()):
        assert torch.equal(early.slots[row, :length], late.slots[row, :length])


def test_a_shared_table_has_one_pool_and_a_window_cuts_what_is_read():
    model = build(**preset("fig5b/shared"), sequence_len=64, n_layer=6)
    banks = [block.attn.bank for block in model.transformer.h[4:]]
    assert banks[0].rows is banks[1].rows and banks[0].rows.weight is banks[0].table.weight
    history = History(2, 100, "cpu")
    history.append(torch.zeros(2, 90, dtype=torch.long))
    assert [history.first_seen(1, window) for window in (-1, 0, 10, 200)] == [0, 89, 79, 0]
