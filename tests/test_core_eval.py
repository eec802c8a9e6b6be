"""CORE's items and answers: against upstream's, against a plain reference, and where items are odd.

With NANOCHAT_UPSTREAM (a checkout) upstream's code answers again; with NANOCHAT_EVAL_BUNDLE too, on a real bundle.
"""

import json
import os
import random
from itertools import count, islice

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import core_items
from models import build
from nanochat import core_eval, core_prompts, core_score
from nanochat.core_bundle import read_items, read_tasks
from nanochat.core_prompts import Question
from ranks import spawn
from scripts.core_bench import load_upstream

TOKENIZER = core_items.tokenizer()
UPSTREAM, BUNDLE = os.environ.get("NANOCHAT_UPSTREAM"), os.environ.get("NANOCHAT_EVAL_BUNDLE")
needs_upstream = pytest.mark.skipif(not UPSTREAM, reason="set NANOCHAT_UPSTREAM to a checkout of upstream nanochat")
needs_bundle = pytest.mark.skipif(not BUNDLE, reason="set NANOCHAT_EVAL_BUNDLE to an evaluation bundle")
KEPT = json.loads(core_items.ANSWERS.read_text())
CPU = torch.device("cpu")
TIE = 1e-4  # losses closer than this may change places


def ask(model, data, task, indices=None, **options):
    """{index: Result} of our evaluator."""
    indices = range(len(data)) if indices is None else indices
    return {r.index: r for r in core_eval.answer_items(model, TOKENIZER, data, task, indices, **options)}


# ---------------------------------------------------------------------------- upstream


def agrees(answer, theirs):
    """Same losses and the same verdict; where two losses nearly tie, the verdict is free."""
    if "predicted" in theirs:
        return answer.predicted == theirs["predicted"] and answer.correct == theirs["correct"]
    assert answer.losses == pytest.approx(theirs["losses"], abs=TIE)
    first, second = sorted(theirs["losses"])[:2]
    return second - first < TIE or answer.correct == theirs["correct"]


@pytest.mark.parametrize("name", core_items.MODELS)
@pytest.mark.parametrize("kind", core_items.KINDS)
@pytest.mark.parametrize("shots", core_items.SHOTS)
def test_answers_as_upstream_did(name, kind, shots):
    data, theirs = core_items.items(kind), KEPT["answers"][name][f"{kind}, {shots} shots"]
    ours = ask(core_items.model(name), data, core_items.task(kind, shots))
    assert all(agrees(ours[i].answer, theirs[i]) for i in range(len(data)))
    assert len({json.dumps(answer) for answer in theirs}) > 1


@needs_upstream
def test_the_kept_answers_are_what_upstream_gives():
    for name, by_task in core_items.upstream_answers(UPSTREAM).items():
        for key, answers in by_task.items():
            for kept, fresh in zip(KEPT["answers"][name][key], answers, strict=True):
                assert kept.get("predicted") == fresh.get("predicted")
                assert kept.get("losses", []) == pytest.approx(fresh.get("losses", []), abs=TIE)


@needs_upstream
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(core_items.KINDS), st.integers(0, 4), st.integers(2, 9), st.sampled_from([" ", "\n", "", ": "]))
def test_prompts_and_scored_tokens_are_upstreams(kind, shots, number, delimiter):
    theirs, data = load_upstream(UPSTREAM), core_items.items(kind, max(number, shots + 1), seed=number)
    short = {"multiple_choice": "mc", "schema": "schema", "language_modeling": "lm"}[kind]
    for index in range(len(data)):
        others = [i for i in range(len(data)) if i != index]
        drawn = [data[i] for i in random.Random(1234 + index).sample(others, shots)]
        assert core_prompts.draw_fewshot(data, index, shots) == drawn
        render, batch = (f"{part}_{short}" for part in ("render_prompts", "batch_sequences"))
        prompts = vars(theirs)[render](data[index], delimiter, drawn)
        assert vars(core_eval)[render](data[index], delimiter, drawn) == prompts
        try:
            expected = vars(theirs)[batch](TOKENIZER, prompts)
        except AssertionError:
            continue  # the prompt's tokens do not begin the whole's: defined here, an error there
        assert vars(core_eval)[batch](TOKENIZER, prompts) == expected


@needs_upstream
@needs_bundle
@pytest.mark.parametrize("name", ["upstream", "bov"])
def test_real_items_are_answered_as_by_upstream(name):
    watched = core_items.Watched(load_upstream(UPSTREAM))
    model = core_items.model(name, sequence_len=2048, n_layer=2)
    for task in read_tasks(BUNDLE):
        data = read_items(task)
        for index, result in ask(model, data, task.meta, range(2)).items():
            theirs = watched(index, model, TOKENIZER, data, task.meta)
            assert "indistinct" in result.flags or agrees(result.answer, theirs), task.label


def test_accuracy_and_single_examples_by_upstreams_names():
    data, task, model = core_items.items("schema"), core_items.task("schema", 2), core_items.model("bov")
    single = [core_eval.evaluate_example(i, model, TOKENIZER, data, CPU, task) for i in range(len(data))]
    assert core_eval.evaluate_task(model, TOKENIZER, data, CPU, task) == sum(single) / len(single)
    assert 0 < sum(single) < len(single)


# ---------------------------------------------------------------------------- a plain reference


def plainly(model, question):
    """Per row (losses, most likely tokens) of the scored targets, from all logits of a row alone."""
    found = []
    for row, start in zip(question.rows, question.starts, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([row]))[0, start - 1 : -1]
        target = torch.tensor(row[start:], dtype=torch.long)
        found.append((F.cross_entropy(logits, target, reduction="none"), logits.argmax(-1).tolist()))
    return found


SHAPES = {
    "full": {},
    "windows": {"sequence_len": 24, "window_pattern": "SSL", "n_layer": 5},
    "bov": {"bov_layers": "last:1/2", "trunk": "plain", "ve_layers": "none"},
    "first": {"bov_layers": "2,3", "bov_source": "first", "bov_combine": "add", "smear": False},
}


@st.composite
def questions(draw, vocab=50, longest=60):
    """Questions whose rows share beginnings of any length, with any scored ends."""
    asked = []
    token = st.integers(0, vocab - 1)
    for index in range(draw(st.integers(1, 5))):
        shared = draw(st.lists(token, min_size=1, max_size=longest))
        ends = draw(st.lists(st.lists(token, min_size=1, max_size=9), min_size=1, max_size=4))
        rows = tuple(shared + end for end in ends)
        starts = tuple(draw(st.integers(1, len(row))) for row in rows)
        asked.append(Question(index, rows, starts, None if len(rows) == 1 else 0))
    return asked


@pytest.mark.parametrize("shape", SHAPES)
def test_shared_beginnings_and_batches_change_nothing(shape, monkeypatch):
    model = build(seed=3, **SHAPES[shape]).eval()
    monkeypatch.setattr(core_score, "WORTH_SHARING", 1)

    @settings(max_examples=15, deadline=None)
    @given(questions(), st.sampled_from([16, 100, 4096]))
    def check(asked, budget):
        monkeypatch.setattr(core_score, "TOKENS_PER_PASS_ELSEWHERE", budget)
        for question, answer in zip(asked, core_score.answer(model, asked, TOKENIZER), strict=True):
            rows = plainly(model, question)
            means = [losses.mean().item() if len(losses) else None for losses, _ in rows]
            assert answer.losses == pytest.approx(means, abs=1e-4)
            if question.gold is None:
                assert answer.predicted == rows[0][1] or _near_tie(model, question)

    check()


def _near_tie(model, question):
    (row,), (start,) = question.rows, question.starts
    best = model(torch.tensor([row]))[0, start - 1 : -1].topk(2).values
    return (best[:, 0] - best[:, 1]).min().item() < TIE


def test_all_positions_as_upstreams_forward_model():
    model, ids = build().eval(), torch.randint(50, (3, 11))
    losses, predictions = core_eval.forward_model(model, ids)
    logits = model(ids)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(3, 10)
    assert torch.allclose(losses[:, :-1], expected, atol=1e-5) and losses[:, -1].isnan().all()
    assert torch.equal(predictions[:, :-1], logits.argmax(-1)[:, :-1])


def test_logits_only_where_something_is_scored(monkeypatch):
    made = []
    head = core_score.head_logits
    monkeypatch.setattr(core_score, "head_logits", lambda x, *rest: made.append(x.size(1)) or head(x, *rest))
    data, task = core_items.items("multiple_choice"), core_items.task("multiple_choice", 3)
    asked = [core_prompts.question(i, data, TOKENIZER, task, 10**6) for i in range(len(data))]
    ask(core_items.model("upstream"), data, task)
    assert sum(made) == sum(end - start for q in asked for start, end in zip(q.starts, q.ends, strict=True))


def test_lengths_of_passes_come_back(monkeypatch):
    """A CPU keeps memory for every shape it has met: 199 lengths become few, and none passes the rotary table."""
    model, widths = core_items.model("bov", sequence_len=20), set()  # 200 positions
    trunk = model.trunk
    monkeypatch.setattr(model, "trunk", lambda ids, cache=None: widths.add(ids.size(1)) or trunk(ids, cache))
    lone = [Question(i, ([1] * length,), (length - 1,), None) for i, length in enumerate(range(2, 201))]
    pairs = [Question(i, ([1] * n + [2], [1] * n + [3] * 3), (n, n), 0) for i, n in enumerate(range(70, 197))]
    assert len(list(core_score.answer(model, lone, TOKENIZER))) == 199
    assert len(list(core_score.answer(model, pairs, TOKENIZER))) == 127
    assert len(widths) < 90 and max(widths) == 200


def test_questions_are_made_a_window_at_a_time():
    """Memory does not grow with the number of items."""
    made = []

    def endless():
        for i in count():
            made.append(i)
            yield Question(i, ([1, 2, 3],), (2,), None)

    list(islice(core_score.answer(core_items.model("bov"), endless(), TOKENIZER), 3))
    assert len(made) == core_score.WINDOW


# ---------------------------------------------------------------------------- norm


@pytest.mark.parametrize("kind", ["multiple_choice", "schema"])
def test_norm_byte_divides_the_sum_by_the_bytes_of_the_scored_tokens(kind):
    model, data, task = core_items.model("windowed"), core_items.items(kind), core_items.task(kind, 2)
    for index, result in ask(model, data, task, norm="byte").items():
        asked = core_prompts.question(index, data, TOKENIZER, task, 10**6)
        for (losses, _), row, start, found in zip(
            plainly(model, asked), asked.rows, asked.starts, result.answer.losses, strict=True
        ):
            assert found == pytest.approx(losses.sum().item() / len(TOKENIZER.decode(row[start:]).encode()), abs=1e-4)
        assert result.answer.predicted == min(range(len(asked.rows)), key=result.answer.losses.__getitem__)


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="--core-norm 'word'"):
        ask(core_items.model("bov"), core_items.items("schema"), core_items.task("schema", 0), norm="word")


# ---------------------------------------------------------------------------- odd items


def only(item, kind, model=None, shots=0, others=(), **options):
    """The Result of `item`, first of its task."""
    task = core_items.task(kind, shots)
    return ask(model or core_items.model("bov"), [item, *others], task, [0], **options)[0]


def test_fewer_items_than_shots_uses_all_others_and_says_so():
    data = core_items.items("schema", 4)
    result = only(data[0], "schema", shots=10, others=data[1:])
    exact = only(data[0], "schema", shots=3, others=data[1:])
    assert result.flags == ("fewer_shots",) and exact.flags == () and result.answer == exact.answer


def test_a_single_item_with_shots_is_answered():
    assert only(core_items.items("schema", 1)[0], "schema", shots=5).flags == ("fewer_shots",)


@pytest.mark.parametrize("norm", core_score.NORMS)
@pytest.mark.parametrize(
    ("choices", "expected"),
    [(["the stone", "the stone and bread"], 0), (["the stone and bread", "the stone"], {"token": 0, "byte": 1})],
    ids=["prefix-first", "prefix-last"],
)
def test_a_choice_that_begins_another_is_judged_as_upstream_and_the_authors_judge_it(choices, expected, norm):
    item = {"query": "What?", "choices": choices, "gold": 1}
    answer = (result := only(item, "multiple_choice", norm=norm)).answer
    empty = choices.index("the stone")
    assert "indistinct" in result.flags and answer.losses[empty] == (None if norm == "token" else 0.0)
    assert answer.predicted == (expected if isinstance(expected, int) else expected[norm])
    assert answer.losses[1 - empty] > 0


def test_equal_choices_tie_for_the_first():
    item = {"query": "What?", "choices": ["the stone", "the stone"], "gold": 0}
    result = only(item, "multiple_choice")
    assert result.answer.predicted == 0 and result.answer.correct and "indistinct" in result.flags


def test_an_empty_choice_is_defined():
    result = only({"query": "What?", "choices": ["bread", ""], "gold": 0}, "multiple_choice")
    assert result.answer.losses[0] > 0


def test_equal_contexts_are_defined():
    result = only({"context_options": ["a stone"] * 2, "continuation": "sinks", "gold": 1}, "schema")
    assert result.answer.losses == (None, None) and result.answer.predicted == 0 and "indistinct" in result.flags


def test_an_empty_continuation_is_wrong_and_said_so():
    item, task = {"context": "The stone", "continuation": ""}, core_items.task("language_modeling", 0, delimiter="")
    result = ask(core_items.model("bov"), [item], task)[0]
    assert result.flags == ("empty",) and not result.answer.correct and result.answer.losses == (None,)


def test_a_context_whose_tokens_do_not_begin_the_whole_is_scored_from_where_they_part():
    # "t" + "he" is one token as "the", so the context's own last token is not there
    item, task = {"context": "is t", "continuation": "he"}, core_items.task("language_modeling", 0, delimiter="")
    without, whole = TOKENIZER(["is t", "is the"], prepend=TOKENIZER.get_bos_token_id())
    assert whole[: len(without)] != without
    asked = core_prompts.question(0, [item], TOKENIZER, task, 10**6)
    assert asked.flags == ("not_prefix",) and asked.starts == (2,) and asked.rows == (whole,)
    assert ask(core_items.model("bov"), [item], task)[0].answer.losses[0] > 0


@given(st.integers(2, 40), st.integers(1, 30), st.integers(1, 12))
def test_cropping_keeps_the_answer_as_far_as_it_fits(limit, context, answer):
    row = list(range(context + answer))
    cropped = core_prompts.crop(Question(0, (row,), (context,), None), limit)
    (kept,), (start,) = cropped.rows, cropped.starts
    assert kept == row[-limit:] and 1 <= start < len(kept)
    assert kept[start:] == row[context:][-(limit - 1) :]
    assert ("cropped" in cropped.flags) == (context + answer > limit)
    assert ("answer_cropped" in cropped.flags) == (answer > limit - 1)


def test_prompts_longer_than_the_context_are_cropped_and_counted():
    model = core_items.model("bov")  # 640 positions
    long = {"query": "a long road " * 100, "choices": ["bread", "salt"], "gold": 0}
    assert only(long, "multiple_choice").flags == ("cropped",)
    other = only({**long, "query": "never seen " + long["query"]}, "multiple_choice")
    assert other.answer == only(long, "multiple_choice").answer
    answer = {"query": "Q", "choices": ["bread " * 20, "salt " * 20], "gold": 0}
    assert only(answer, "multiple_choice", max_len=16).flags == ("cropped", "answer_cropped")
    assert core_eval.context_of(model) == 640 and core_eval.context_of(model, 16) == 16


@pytest.mark.parametrize("max_len", [0, 1, -5])
def test_a_context_without_room_is_refused(max_len):
    with pytest.raises(ValueError, match="--core-max-len"):
        only(core_items.items("schema", 1)[0], "schema", max_len=max_len)


ODD = st.text(alphabet="the stone\n 4é", max_size=8)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(ODD, ODD, ODD), min_size=1, max_size=4), st.integers(0, 3), st.sampled_from([5, 30, 640]))
def test_no_item_whatever_gives_a_number_that_is_none(texts, shots, limit):
    model = core_items.model("bov")
    made = {
        "multiple_choice": [{"query": a, "choices": [b, c], "gold": 1} for a, b, c in texts],
        "schema": [{"context_options": [a, b], "continuation": c, "gold": 0} for a, b, c in texts],
        "language_modeling": [{"context": a, "continuation": b + c} for a, b, c in texts],
    }
    for kind, data in made.items():
        for norm in core_score.NORMS:
            results = ask(model, data, core_items.task(kind, shots), norm=norm, max_len=limit)
            assert sorted(results) == list(range(len(data)))
            losses = [loss for r in results.values() for loss in r.answer.losses if loss is not None]
            assert all(0 <= loss < 1e4 for loss in losses)
            assert all(set(r.flags) <= set(core_prompts.FLAGS) for r in results.values())


@pytest.mark.parametrize(
    ("kind", "item", "message"),
    [
        ("multiple_choice", {"query": "a", "choices": ["b"]}, "item 2 has no 'gold'"),
        ("schema", {"context_options": ["a"], "continuation": "b", "gold": 1}, "gold 1, which names none"),
        ("schema", {"context_options": ["a"], "continuation": "b", "gold": 0.0}, "gold 0.0, which names none"),
        ("multiple_choice", {"query": "a", "choices": ["b"], "gold": "0"}, "gold '0', which names none"),
        ("multiple_choice", {"query": "a", "choices": ["b"], "gold": [0]}, "which names none"),
        ("language_modeling", ["context"], "item 2 has no 'context'"),
    ],
)
def test_items_without_what_their_type_needs_are_named(kind, item, message):
    with pytest.raises(ValueError, match=message):
        core_prompts.check_items([core_items.items(kind, 1)[0], item], kind, "some.jsonl")


# ---------------------------------------------------------------------------- ranks


def _answers_on(rank, folder, fails):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    data, task = core_items.items("schema", 9), core_items.task("schema", 1)
    if fails and rank == 1:
        data[5] = {"context_options": None}
    try:
        results = core_eval.answer_task(core_items.model("bov"), TOKENIZER, data, task)
        said = [[r.index, r.answer.losses, r.answer.predicted] for r in results]
    except core_eval.RankFailure as error:
        said = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def test_two_ranks_answer_what_one_does(tmp_path):
    spawn(_answers_on, (tmp_path, False))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    alone = ask(core_items.model("bov"), core_items.items("schema", 9), core_items.task("schema", 1))
    assert first == second and [index for index, *_ in first] == list(range(9))
    for index, losses, predicted in first:
        assert losses == pytest.approx(alone[index].answer.losses, abs=1e-5)
        assert predicted == alone[index].answer.predicted


def test_a_rank_that_fails_ends_all_with_its_message(tmp_path):
    spawn(_answers_on, (tmp_path, True))
    said = {json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)}
    assert len(said) == 1 and said.pop().startswith("rank 1 failed: ")
