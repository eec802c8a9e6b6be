"""core_bench in miniature, with our own evaluator in upstream's place."""

import json

import pytest
import torch

import core_items
from scripts import core_bench

UPSTREAM = """
from nanochat import core_eval

def evaluate_example(idx, model, tokenizer, data, device, task_meta):
    right = core_eval.evaluate_example(idx, model, tokenizer, data, device, task_meta)
    return not right if idx == 0 and task_meta["task_type"] == "schema" else right
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose evaluator says the contrary of ours on the first item of a schema task."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    core_items.tokenizer().save(tmp_path / "tokenizer")
    (tmp_path / "up" / "nanochat").mkdir(parents=True)
    (tmp_path / "up" / "nanochat" / "core_eval.py").write_text(UPSTREAM)
    core_items.write_bundle(tmp_path / "bundle", {"a": ("multiple_choice", 5), "b": ("schema", 9)})
    return tmp_path


def test_answers_are_counted_and_times_taken_in_turn(checkout, capsys):
    threads = torch.get_num_threads()
    sizes = ["--depth", "2", "--sequence-len", "64", "--vocab-size", "300", "--max-per-task", "6", "--rounds", "2"]
    sizes += ["--threads", str(threads), "--memory-task", "b", "--out", str(checkout / "out.json")]
    core_bench.main(["--upstream", str(checkout / "up"), "--eval-bundle", str(checkout / "bundle"), *sizes])
    found = json.loads((checkout / "out.json").read_text())
    assert {label: (t["items"], t["equal_answers"]) for label, t in found["tasks"].items()} == {
        "a": (5, 5),
        "b": (6, 5),
    }
    assert found["items"] == 11 and found["equal_answers"] == 10
    for label, task in found["tasks"].items():
        assert [len(times) for times in task["seconds"].values()] == [2, 2], label
    expected = [sum(t["seconds"]["upstream"][i] for t in found["tasks"].values()) for i in range(2)]
    assert found["seconds"]["upstream"] == pytest.approx(expected)
    assert len(found["memory"]["resident_bytes"]) in (3, 4)
    assert "10 of 11 answers equal" in capsys.readouterr().out


def test_every_projection_of_the_model_is_drawn(checkout):
    args = core_bench.parse_args(["--upstream", "x", "--depth", "2", "--vocab-size", "300", "--preset", "paper/bov"])
    model = core_bench.build(args, core_items.tokenizer())
    assert all(p.any() for p in model.parameters())
    assert model.config.bov_layers == "last:1/3" and model.config.vocab_size == 300


def test_a_folder_that_is_no_checkout_is_named(tmp_path):
    with pytest.raises(ValueError, match="name a checkout of upstream"):
        core_bench.load_upstream(tmp_path)
