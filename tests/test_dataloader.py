"""Loader: packing against a naive reference, rows free of ranks, exact resume, errors instead of hangs."""

import json
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanochat import dataloader
from nanochat.dataloader import (
    Stream,
    deal,
    merge_states,
    one_pass_loader,
    packing_report,
    tokenizing_distributed_data_loader_bos_bestfit,
    tokenizing_distributed_data_loader_with_state_bos_bestfit,
)
from nanochat.dataset import MAX_SHARD, index_to_filename
from nanochat.tokenizer import RustBPETokenizer

BOS = 0
SECONDS = 60  # until a test that hangs fails


class Numbers:
    """A tokenizer whose documents spell out their tokens: "7 8 9" -> [0, 7, 8, 9]."""

    def __init__(self, name="numbers"):
        self.name = name

    def get_bos_token_id(self):
        return BOS

    def encode(self, texts, prepend, num_threads):
        return [[prepend, *map(int, text.split())] for text in texts]

    def sha256(self):
        return self.name


def documents(lengths, first=1):
    """Texts of `lengths` tokens each (with BOS), no number twice."""
    texts = []
    for length in lengths:
        texts.append(" ".join(map(str, range(first, first + length - 1))))
        first += length - 1
    return texts


def write(folder, texts, per_group, name="shard_00000.parquet"):
    folder.mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), folder / name, row_group_size=per_group)


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Two training shards of 5 and 3 row groups (deal: 8 streams) and a validation shard."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    folder = tmp_path / "base_data_climbmix"
    lengths = np.random.default_rng(0).integers(3, 24, 170).tolist()
    texts = documents(lengths)
    write(folder, texts[:110], 22)
    write(folder, texts[110:], 20, "shard_00001.parquet")
    write(folder, documents(lengths[:40], 10_000), 10, index_to_filename(MAX_SHARD))
    return folder


def as_rank(monkeypatch, rank, world_size):
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size)):
        monkeypatch.setenv(name, str(value))


def in_time(function):
    """function(), or a failure after SECONDS."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert result, "hangs or failed"
    return result[0]


def take(steps, B=2, T=15, split="train", state=None, tokenizer=None, **options):
    """([row tokens (B, T + 1)] of `steps` batches, last state) of the rank that the environment names."""
    loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(
        tokenizer or Numbers(), B, T, split, device="cpu", resume_state_dict=state, **options
    )
    batches = []
    for _ in range(steps):
        inputs, targets, state = next(loader)
        assert inputs.shape == targets.shape == (B, T) and inputs.dtype == targets.dtype == torch.long
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        batches.append(torch.cat([inputs, targets[:, -1:]], 1).numpy())
    loader.close()
    return batches, state


def take_ranks(monkeypatch, world_size, steps, rows_per_step=8, state=None):
    """Global rows in order, (steps * rows_per_step, T + 1), as `world_size` ranks see them; and the merged state."""
    start, parts, states = (state or {"row": 0})["row"], [], []
    for rank in range(world_size):
        as_rank(monkeypatch, rank, world_size)
        batches, last = take(steps, B=rows_per_step // world_size, state=state)
        parts.append(np.concatenate(batches))
        states.append(json.loads(json.dumps(last)))
    order = [(start + i) % world_size for i in range(world_size)]
    rows = np.stack([parts[rank] for rank in order], 1).reshape(steps * rows_per_step, -1)
    return rows, merge_states(states)


# ---------------------------------------------------------------------------- packing


def naive_rows(documents, capacity, size):
    """Best fit by the book, from lists: the largest that fits (first come first), else the shortest, cropped."""
    waiting, rest, rows, row = [], list(documents), [], []
    while True:
        while rest and len(waiting) < size:
            waiting.append(rest.pop(0))
        if not waiting:
            return rows
        room = capacity - len(row)
        fits = [d for d in waiting if len(d) <= room]
        chosen = max(fits, key=len) if fits else min(waiting, key=len)
        waiting.remove(chosen)
        row = row + chosen[:room]
        if len(row) == capacity:
            rows, row = [*rows, row], []


cases = st.tuples(st.lists(st.integers(2, 30), min_size=1, max_size=60), st.integers(1, 20), st.integers(1, 9))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases, st.integers(0, 40))
def test_one_stream_packs_as_the_book_says(tmp_path, monkeypatch, case, buffer_size):
    lengths, T, per_group = case
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    texts = documents(lengths)
    write(tmp_path / "base_data_climbmix", texts, per_group)
    write(tmp_path / "base_data_climbmix", texts, per_group, index_to_filename(MAX_SHARD))
    plan = deal("train", buffer_size, streams=1)
    stream = Stream(0, plan, Numbers(), T, epochs=1, chunk=7)
    rows, row = [], np.empty(T + 1, dtype=np.int64)
    while stream.row(row):
        rows.append(row.tolist())
    tokens = Numbers().encode(texts, BOS, 1)
    assert rows == naive_rows(tokens, T + 1, plan.buffer)
    assert stream.tokens_read == sum(lengths) and stream.tokens_kept == len(rows) * (T + 1)


def pieces(rows):
    """The documents in rows, cut at every BOS, with a mark on the last of each row."""
    for row in rows:
        assert row[0] == BOS
        starts = [*np.flatnonzero(row == BOS), len(row)]
        for i, (a, b) in enumerate(zip(starts, starts[1:], strict=False)):
            yield tuple(row[a:b].tolist()), i == len(starts) - 2


def test_rows_hold_whole_documents_but_for_the_last_and_nothing_else(base):
    batches, _ = take(30)
    whole = {tuple(d[:2]): tuple(d) for d in Numbers().encode(
        [t for name in ("shard_00000.parquet", "shard_00001.parquet")
         for t in pq.read_table(base / name)["text"].to_pylist()], BOS, 1)}  # fmt: skip
    cropped = 0
    for piece, last in pieces(np.concatenate(batches)):
        if len(piece) > 1:
            document = whole[piece[:2]]
            assert piece == document[: len(piece)]
            assert last or piece == document
            cropped += piece != document
    assert cropped > 0


def test_an_epoch_uses_every_document_once_before_the_next_begins(base):
    """Starts of documents per stream: each epoch's own share, none twice, none of another epoch in between."""
    plan = deal("train", streams=2)
    for index in range(2):
        stream = Stream(index, plan, Numbers(), 15)
        seen, row = [], np.empty(16, dtype=np.int64)
        for _ in range(200):
            stream.row(row)
            seen += [piece[1] for piece, _ in pieces(row[None]) if len(piece) > 1]
        share = len({*seen})
        assert len(seen) > 3 * share  # several epochs
        for epoch in range(2):
            assert len({*seen[epoch * share : (epoch + 1) * share]}) == share


def test_streams_follow_from_the_data(base):
    assert deal("train").streams == 8 and deal("val").streams == 4
    write(base, documents([5] * 40), 1)  # 40 + 3 groups, 100 documents
    assert deal("train").streams == 8  # 8 documents for each
    write(base, documents([5] * 2000), 1)
    assert deal("train").streams == dataloader.MAX_STREAMS
    assert deal("train", buffer_size=640).buffer == 8  # 2060 documents, a quarter of a stream's share at most
    assert deal("train", buffer_size=320).buffer == 5


# ---------------------------------------------------------------------------- ranks and resume


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_rows_do_not_depend_on_the_number_of_ranks(world_size, base, monkeypatch):
    alone, state = take_ranks(monkeypatch, 1, 12)
    shared, shared_state = take_ranks(monkeypatch, world_size, 12)
    assert np.array_equal(alone, shared)
    assert shared_state["streams"] == state["streams"] and shared_state["row"] == state["row"] == 96
    assert not np.array_equal(shared[0::world_size], shared[1::world_size])


@pytest.mark.parametrize("before, after", [(1, 1), (1, 4), (4, 1), (2, 8), (8, 2)])
@pytest.mark.parametrize("steps", [1, 7, 31])
def test_resume_is_exact_on_any_number_of_ranks(before, after, steps, base, monkeypatch):
    _, state = take_ranks(monkeypatch, before, steps)
    resumed, end = take_ranks(monkeypatch, after, 9, state=state)
    straight, straight_end = take_ranks(monkeypatch, 1, steps + 9)
    assert np.array_equal(resumed, straight[steps * 8 :])
    assert end["streams"] == straight_end["streams"]


def test_resume_at_a_row_that_the_ranks_do_not_divide(base, monkeypatch):
    as_rank(monkeypatch, 0, 1)
    _, state = take(3, B=1)
    resumed, _ = take_ranks(monkeypatch, 4, 5, state=json.loads(json.dumps(state)))
    as_rank(monkeypatch, 0, 1)
    assert np.array_equal(resumed, np.concatenate(take(43, B=1)[0])[3:])


def test_speed_settings_do_not_change_rows(base):
    first, _ = take(20, tokenizer_batch_size=1, tokenizer_threads=1)
    second, _ = take(20, tokenizer_batch_size=64)
    assert np.array_equal(first, second)


def test_data_end_and_begin_again(base):
    batches, state = in_time(lambda: take(150, B=4))
    assert state["epoch"] >= 3 and state["row"] == 600
    assert {"pq_idx", "rg_idx", "epoch"} <= state.keys()
    assert state["pq_idx"] in (0, 1) and 0 <= state["rg_idx"] < 5
    starts = [piece[1] for piece, _ in pieces(np.concatenate(batches)) if len(piece) > 1]
    uses = np.unique(starts, return_counts=True)[1]
    assert uses.max() <= 2 * uses.min()  # streams keep pace, though their shares differ


def test_loader_without_state_gives_the_same_batches(base):
    loader = tokenizing_distributed_data_loader_bos_bestfit(Numbers(), 2, 15, "train", device="cpu")
    inputs, targets = next(loader)
    (first,), _ = take(1)
    assert np.array_equal(inputs.numpy(), first[:, :-1]) and np.array_equal(targets.numpy(), first[:, 1:])


def test_the_thread_ends_with_its_loader(base):
    loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(Numbers(), 2, 15, "train", device="cpu")
    next(loader)
    threads = [t for t in threading.enumerate() if t.name == "dataloader"]
    loader.close()
    assert threads and not any(t.is_alive() for t in threads)


def test_no_thread_is_left_where_a_loader_is_dropped(base):
    pairs = tokenizing_distributed_data_loader_bos_bestfit(Numbers(), 2, 15, "train", device="cpu")
    next(pairs)
    assert any(t.name == "dataloader" for t in threading.enumerate())
    del pairs
    assert not any(t.name == "dataloader" for t in threading.enumerate())


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda base: {"T": 14}, "T was 15, is 14"),
        (lambda base: {"tokenizer": Numbers("other")}, "tokenizer_sha256 was numbers, is other"),
        (lambda base: {"split": "val"}, "split was train, is val"),
        (lambda base: {"buffer_size": 32}, "buffer was 5, is 4"),
        (lambda base: write(base, documents([9] * 110), 22) or {}, "data_sha256 was"),
        (lambda base: write(base, documents([9] * 50), 9, "shard_00009.parquet") or {}, "data_sha256 was"),
    ],
    ids=["T", "tokenizer", "split", "buffer", "other text", "another shard"],
)
def test_a_state_of_other_data_is_refused(change, message, base):
    _, state = take(2)
    with pytest.raises(ValueError, match=f"data state of another run: {message}"):
        take(1, **{"state": state, **change(base)})


def test_incomplete_states_are_refused(base, monkeypatch):
    with pytest.raises(ValueError, match="data state without row"):
        take(1, state={"pq_idx": 0, "rg_idx": 3, "epoch": 1})
    states = []
    for rank, steps in ((0, 2), (1, 3)):
        as_rank(monkeypatch, rank, 2)
        states.append(take(steps)[1])
    with pytest.raises(ValueError, match="states differ in row"):
        merge_states(states)
    as_rank(monkeypatch, 0, 1)
    with pytest.raises(ValueError, match="without stream 1: merge_states"):
        take(1, state=states[0])


def test_merged_state_tells_the_latest_epoch(base, monkeypatch):
    states = []
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        states.append(take(2)[1])
    late = {**states[1], "epoch": 5}
    assert merge_states([states[0], late])["epoch"] == merge_states([late, states[0]])["epoch"] == 5


def test_rows_of_a_real_tokenizer_read_as_the_text(base):
    texts = ["the cat sat on the mat. ", "한국어 text 🙂, naïve", "x" * 300] * 40
    write(base, texts, 30)
    (base / "shard_00001.parquet").unlink()
    tokenizer = RustBPETokenizer.train_from_iterator(iter(texts), 300)
    for row in np.concatenate(take(8, T=31, tokenizer=tokenizer)[0]):
        assert row[0] == tokenizer.get_bos_token_id()
        whole = tokenizer.decode(row.tolist()).split("<|bos|>")[1:-1]
        assert set(whole) <= set(texts)


@pytest.mark.parametrize("world_size", [3, 16])
def test_ranks_that_cannot_share_the_rows(world_size, base, monkeypatch):
    as_rank(monkeypatch, 0, world_size)
    message = f"{world_size} ranks cannot share the 8 row groups of split train .*shard_00000.*use 1, 2, 4, 8 ranks"
    with pytest.raises(ValueError, match=message):
        take(1)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda base: (base / index_to_filename(MAX_SHARD)).unlink(), "06542.parquet: the validation shard is missing"),
        (lambda base: (base / "shard_00001.parquet").write_bytes(b"PAR1"), "00001.parquet: not a whole parquet file"),
        (lambda base: pq.write_table(pa.table({"body": ["x"]}), base / "shard_00001.parquet"), "no column 'text'"),
        (lambda base: write(base, [], 1) or write(base, [], 1, "shard_00001.parquet"), "no documents in split train"),
    ],
    ids=["no validation shard", "half a file", "wrong column", "empty"],
)
def test_bad_data_are_refused_on_the_call(spoil, message, base):
    spoil(base)
    with pytest.raises(ValueError, match=message):
        tokenizing_distributed_data_loader_with_state_bos_bestfit(Numbers(), 2, 15, "train", device="cpu")


def failing(**options):
    try:
        take(40, **options)
    except ValueError as error:
        return str(error)


def test_less_than_one_row_is_an_error_not_a_hang(base):
    assert "not one full row of 5001 tokens" in in_time(lambda: failing(T=5000))
    write(base, [""] * 500, 10)
    (base / "shard_00001.parquet").unlink()
    assert "not one full row" in in_time(failing)
    with pytest.raises(ValueError, match="06542.parquet: .*val has not one full row of 5001 tokens"):
        one_pass_loader(Numbers(), 2, 5000, "val", "cpu")


def test_damage_found_while_reading_comes_out_of_the_loader(base):
    path = base / "shard_00001.parquet"
    data = bytearray(path.read_bytes())
    data[4:400] = bytes(396)
    path.write_bytes(data)
    message = in_time(failing)
    assert "shard_00001.parquet: row group" in message and "damaged" in message


@pytest.mark.parametrize("sizes", [(0, 15), (2, 0)], ids=["B", "T"])
def test_sizes_are_positive(sizes, base):
    with pytest.raises(ValueError, match="--device-batch-size"):
        tokenizing_distributed_data_loader_bos_bestfit(Numbers(), *sizes, "train", device="cpu")


# ---------------------------------------------------------------------------- one pass


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_pass_gives_every_row_once_and_pads_with_ignored_targets(world_size, base, monkeypatch):
    texts = pq.read_table(base / index_to_filename(MAX_SHARD))["text"].to_pylist()
    expected = naive_rows(Numbers().encode(texts, BOS, 1), 16, deal("val", streams=1).buffer)
    parts, lengths = [], []
    for rank in range(world_size):
        as_rank(monkeypatch, rank, world_size)
        loader = one_pass_loader(Numbers(), 4, 15, "val", "cpu")
        batches = list(loader)
        assert len(batches) == len(loader) and loader.num_rows == len(expected)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, loader, strict=True))
        rows = torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y in batches])
        padding = torch.cat([y for _, y in batches]).eq(-1).all(1)
        assert rows[padding][:, :-1].eq(BOS).all() and not rows[~padding].eq(-1).any()
        parts.append(rows[~padding].tolist())
        lengths.append(len(loader))
    assert len(set(lengths)) == 1 and sum(map(len, parts)) == len(expected)
    assert [parts[i % world_size][i // world_size] for i in range(len(expected))] == expected
    assert loader.discard == pytest.approx(1 - len(expected) * 16 / sum(len(t.split()) + 1 for t in texts))


def test_packing_report_counts_an_epoch(base):
    report = packing_report(Numbers(), 15)
    texts = [t for i in range(2) for t in pq.read_table(base / index_to_filename(i))["text"].to_pylist()]
    total = sum(len(t.split()) + 1 for t in texts)
    assert report["documents"] == 170 and report["exact"]
    assert report["tokens_per_document"] == pytest.approx(total / 170)
    assert report["discard"] == pytest.approx(1 - report["rows_per_epoch"] * 16 / total)
    assert report["tokens_per_epoch"] == report["rows_per_epoch"] * 15
    sampled = packing_report(Numbers(), 15, max_rows=40)
    assert not sampled["exact"] and sampled["rows_per_epoch"] == pytest.approx(report["rows_per_epoch"], rel=0.1)


@pytest.mark.parametrize("part, groups", [(0.01, 1), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_a_part_of_the_data_is_read_again_and_again(part, groups, base):
    texts = [t for i in range(2) for t in pq.read_table(base / index_to_filename(i))["text"].to_pylist()]
    kept = texts[: groups * 22] if groups < 8 else texts
    allowed = {int(number) for text in kept for number in text.split()} | {BOS}
    rows = np.concatenate(take(60, B=1, part=part)[0])
    assert set(np.unique(rows)) <= allowed
    report = packing_report(Numbers(), 15, part=part)
    assert report["documents"] == len(kept)
    assert deal("train", part=part).groups == deal("train").groups[:groups]


@pytest.mark.parametrize("part", [0.0, -0.5, 1.01])
def test_part_is_a_part(part, base):
    with pytest.raises(ValueError, match="--train-part"):
        deal("train", part=part)


def test_fresh_rows_end_where_the_first_document_repeats(base):
    fresh = packing_report(Numbers(), 15)["fresh_rows"]
    rows = np.concatenate(take(fresh + 16, B=1)[0])

    def starts(rows):
        return [piece[1] for piece, _ in pieces(rows) if len(piece) > 1]

    assert len(set(starts(rows[:fresh]))) == len(starts(rows[:fresh]))
    assert len(set(starts(rows))) < len(starts(rows))
