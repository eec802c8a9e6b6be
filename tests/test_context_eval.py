"""Long contexts: buckets against a plain loop, probes that a perfect reader solves, windows put back."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import core_items
from models import build
from nanochat import context_eval
from nanochat.context_eval import CHOICES, Probes, bpb_by_position, run_probe, windows
from nanochat.core_score import Answer
from nanochat.text_rows import document_batches, document_rows

TOKENIZER = core_items.tokenizer()
PROBES = Probes(TOKENIZER)
FITS = {"passkey": 60, "recall": 24, "induction": 6}


def tiny(**fields):
    return build(vocab_size=TOKENIZER.get_vocab_size(), **fields).eval()


@pytest.mark.parametrize("kind", context_eval.WINDOWS)
def test_buckets_are_bits_per_byte_of_their_positions(kind):
    model, size = tiny(), TOKENIZER.token_byte_counts()
    ids = torch.randint(256, (3, 41))
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[1, 30:] = -1
    with windows(model, kind):
        rows = bpb_by_position(model, [(inputs[:2], targets[:2]), (inputs[2:, :20], targets[2:, :20])], size, 64)
        logits = model(inputs)
    targets[2, 20:] = -1
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none").view(3, 40)
    assert [(row["from"], row["to"]) for row in rows] == [(i, i + 4) for i in range(0, 64, 4)]
    for row in rows:
        part = slice(row["from"], row["to"])
        count = size[targets[:, part].clamp(min=0)][targets[:, part] >= 0].sum().item()
        assert row["bytes"] == count
        if count:
            assert row["bpb"] == pytest.approx(losses[:, part].sum().item() / math.log(2) / count, rel=1e-4)
        else:
            assert row["bpb"] is None


def test_unlimited_windows_are_those_of_the_long_layers_and_end():
    model = tiny(sequence_len=512, window_pattern="SSL")
    before = list(model.window_sizes)
    with pytest.raises(KeyError), windows(model, "unlimited"):
        assert [left for left, _ in model.window_sizes] == [left if left < 512 else -1 for left, _ in before]
        assert -1 in [left for left, _ in model.window_sizes] and 128 in [left for left, _ in model.window_sizes]
        raise KeyError
    assert model.window_sizes == before


def test_unlimited_windows_let_the_first_token_reach_the_last():
    model, ids = tiny(n_layer=1, smear=False, ve_layers="none", sequence_len=8), torch.randint(256, (1, 30))
    other = ids.clone()
    other[0, 0] = (other[0, 0] + 1) % 256
    with torch.no_grad():
        assert torch.equal(model(ids)[0, -1], model(other)[0, -1])
        with windows(model, "unlimited"):
            assert not torch.equal(model(ids)[0, -1], model(other)[0, -1])


# ---------------------------------------------------------------------------- probes


def text(tokens):
    return TOKENIZER.decode(list(tokens))


@pytest.mark.parametrize("kind", context_eval.PROBES)
@settings(max_examples=20, deadline=None)
@given(extra=st.integers(0, 200))
def test_probes_have_their_length_and_one_right_answer(kind, extra):
    length = FITS[kind] + extra
    for asked in PROBES.make(kind, length, 3):
        longest = max(asked.rows, key=len)
        assert length - 1 <= len(longest) <= length and longest[0] == TOKENIZER.get_bos_token_id()
        prompt = longest[: asked.starts[0]]
        if kind == "induction":
            half = (len(longest) - 1) // 2
            assert longest[1 : 1 + half] == longest[1 + half :] and asked.starts[0] > 1 + half
            continue
        ends = [tuple(row[start:]) for row, start in zip(asked.rows, asked.starts, strict=True)]
        assert len(set(ends)) == CHOICES and all(row[: len(prompt)] == prompt for row in asked.rows)
        if kind == "passkey":
            told = text(prompt).split("The pass key is ")[1][:4]
            assert text(ends[asked.gold]).strip() == told and text(prompt).count("The pass key is ") == 1
        else:
            named = prompt[-1]
            at = [i for i, token in enumerate(prompt[:-1]) if token == named]
            assert len(at) == 1 and (prompt[at[0] + 1],) == ends[asked.gold]
            assert all(prompt.count(token) == 1 for (token,) in ends)


@pytest.mark.parametrize("kind", ["passkey", "recall"])
def test_places_texts_and_answers_of_items_vary(kind):
    asked = PROBES.make(kind, 150, 40)
    prompts = [row[: question.starts[0]] for question in asked for row in question.rows[:1]]
    assert len({question.gold for question in asked}) > CHOICES // 2
    if kind == "passkey":
        places = [text(prompt).index("The pass key is") / len(text(prompt)) for prompt in prompts]
    else:
        places = [prompt.index(prompt[-1]) / len(prompt) for prompt in prompts]
    assert min(places) < 0.25 and max(places) > 0.6
    assert len({sentence for sentence in context_eval.FILLER for prompt in prompts if sentence in text(prompt)}) > 5


def test_both_windows_are_measured_and_differ_only_beyond_the_trained_ones(capsys):
    model = tiny(n_layer=1, smear=False, ve_layers="none", sequence_len=16)
    ids = torch.randint(256, (2, 65))
    found = context_eval.evaluate_context(
        model, TOKENIZER, TOKENIZER.token_byte_counts(), lambda length: [(ids[:, :length], ids[:, 1 : length + 1])], 2
    )
    trained, unlimited = ([row["bpb"] for row in found["positions"][kind]] for kind in context_eval.WINDOWS)
    assert trained[:4] == unlimited[:4] and all(a != b for a, b in zip(trained[5:], unlimited[5:], strict=True))
    assert model.window_sizes[0][0] == 16 and len(trained) == 16


def test_items_are_the_same_every_time_and_differ_among_each_other():
    for kind in context_eval.PROBES:
        made = PROBES.make(kind, 80, 5)
        assert made == Probes(TOKENIZER).make(kind, 80, 5) and len({asked.rows[0].__repr__() for asked in made}) == 5


@pytest.mark.parametrize("kind", context_eval.PROBES)
def test_a_length_without_room_is_left_out(kind):
    short = FITS[kind] // 4
    row = run_probe(tiny(), TOKENIZER, PROBES, kind, short, 3)
    assert row["n"] == 0 and row["accuracy"] is None and PROBES.make(kind, short, 3) == []


def reader(right):
    """An evaluator that answers the share `right` of the items."""

    def answers(model, asked, tokenizer):
        for number, question in enumerate(asked):
            knows = number < right * len(asked)
            if question.gold is None:
                said = list(question.rows[0][question.starts[0] :])
                yield Answer((0.1,), said if knows else [-1] * len(said), knows)
            else:
                yield Answer((0.1,) * CHOICES, question.gold, knows)

    return answers


@pytest.mark.parametrize("kind", context_eval.PROBES)
def test_accuracy_is_the_share_of_right_answers_beside_chance(kind, monkeypatch):
    monkeypatch.setattr(context_eval, "answer", reader(0.75))
    row = run_probe(tiny(), TOKENIZER, PROBES, kind, 80, 20)
    low, high = row["accuracy_interval"]
    assert row["accuracy"] == 0.75 and 0.5 < low < 0.75 < high < 1
    assert row["chance"] == (1 / len(PROBES.pool) if kind == "induction" else 0.1)


def test_an_untrained_model_guesses():
    model = tiny(n_layer=2)
    row = run_probe(model, TOKENIZER, PROBES, "recall", 40, 60)
    assert row["accuracy_interval"][0] <= 0.1 <= row["accuracy_interval"][1] + 0.05


def test_a_tokenizer_with_too_few_tokens_is_refused():
    class Few:
        get_bos_token_id = staticmethod(lambda: 0)
        encode = staticmethod(lambda text: [1, 2])
        get_vocab_size = staticmethod(lambda: 12)
        get_special_tokens = staticmethod(set)

    with pytest.raises(ValueError, match="10 ordinary tokens"):
        Probes(Few)


# ---------------------------------------------------------------------------- rows of whole documents


@given(st.lists(st.text(max_size=40), max_size=5), st.integers(1, 20))
def test_rows_of_documents_predict_every_token_once(texts, T):
    rows = list(document_rows(texts, TOKENIZER, T))
    assert all(1 <= len(inputs) == len(targets) <= T for inputs, targets in rows)
    predicted = [token for _, targets in rows for token in targets]
    assert predicted == [token for text in texts for token in TOKENIZER.encode(text)]
    assert all(inputs[1:] == targets[:-1] for inputs, targets in rows)


def test_batches_of_documents_are_padded_with_ignored_targets_and_end():
    texts = ["".join(random.Random(i).choices("abc ", k=10 * i)) for i in range(1, 8)]
    batches = list(document_batches(texts, TOKENIZER, 3, 16, "cpu"))
    count = sum((targets >= 0).sum().item() for _, targets in batches)
    assert count == sum(len(TOKENIZER.encode(text)) for text in texts)
    assert all(x.shape == y.shape and x.size(0) <= 3 and (x >= 0).all() for x, y in batches)
    some = list(document_batches(texts, TOKENIZER, 3, 16, "cpu", max_tokens=40))
    assert 40 <= sum((targets >= 0).sum().item() for _, targets in some) < 40 + 16
