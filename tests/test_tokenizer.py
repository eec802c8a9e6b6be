"""Tokenizer: round trips, files that cannot run code, byte counts, chat rendering."""

import os
import pickle
import pickletools
import sys
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanochat.tokenizer import (
    SPECIAL_TOKENS,
    RustBPETokenizer,
    get_token_bytes,
    get_tokenizer,
    save_token_bytes,
    tokenizer_sha256,
)
from scripts import tok_eval, tok_train

CORPUS = ["the cat and the hat, 1234 times\n", "naïve 한국어 🙂 the theatre of the mind", "x = f(y)  # then\n\n"] * 6
VOCAB = 256 + len(SPECIAL_TOKENS) + 30
TOKENIZER = RustBPETokenizer.train_from_iterator(iter(CORPUS), VOCAB)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    TOKENIZER.save(tmp_path / "tokenizer")
    save_token_bytes(TOKENIZER, tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_round_trip_and_bytes_of_any_text(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert b"".join(map(TOKENIZER.decode_single_token_bytes, ids)) == text.encode()
    assert TOKENIZER.token_byte_counts()[ids].sum() == len(text.encode())


def test_merges_were_learnt_and_specials_close_the_vocabulary():
    assert TOKENIZER.get_vocab_size() == VOCAB
    assert len(TOKENIZER.encode("the")) == 1
    assert [TOKENIZER.encode_special(t) for t in SPECIAL_TOKENS] == list(range(VOCAB - len(SPECIAL_TOKENS), VOCAB))
    assert TOKENIZER.get_special_tokens() == set(SPECIAL_TOKENS)


def test_batch_equals_singles_and_specials_in_text_stay_text():
    texts = ["", "one", "<|bos|> two"]
    bos = TOKENIZER.get_bos_token_id()
    rows = TOKENIZER(texts, prepend=bos, append="<|user_end|>")
    assert rows == [TOKENIZER.encode(t, "<|bos|>", "<|user_end|>") for t in texts]
    assert all(row.count(bos) == 1 and row[0] == bos for row in rows)


def test_a_million_blanks_in_a_row_are_text_too():
    text = "a\n" + " " * 1_100_000 + "\tb"
    for row in (TOKENIZER.encode(text), TOKENIZER.encode(["the", text])[1]):
        assert TOKENIZER.decode(row) == text
    assert TOKENIZER.encode(["the", text])[0] == TOKENIZER.encode("the")


@pytest.mark.parametrize("bad", [3, None, ("a", "b")], ids=str)
def test_encode_refuses_other_types(bad):
    with pytest.raises(ValueError, match="string or a list"):
        TOKENIZER.encode(bad)


def test_too_small_vocabulary_names_the_flag():
    with pytest.raises(ValueError, match="--vocab-size 264"):
        RustBPETokenizer.train_from_iterator(iter(CORPUS), 264)


# ---------------------------------------------------------------------------- files


def same(a, b):
    text = "the naïve theatre 🙂 12345"
    return a.sha256() == b.sha256() and a.encode(text, "<|bos|>") == b.encode(text, "<|bos|>")


def test_saved_as_text_and_read_back(folder):
    assert sorted(p.name for p in folder.iterdir()) == ["token_bytes.pt", "tokenizer.json", "tokenizer.tiktoken"]
    assert same(get_tokenizer(), TOKENIZER)
    import tiktoken.load

    assert tiktoken.load.load_tiktoken_bpe(str(folder / "tokenizer.tiktoken")) == TOKENIZER.enc._mergeable_ranks


def test_upstream_pickle_both_ways(folder):
    TOKENIZER.save(folder, upstream_pickle=True)
    with open(folder / "tokenizer.pkl", "rb") as f:
        assert same(RustBPETokenizer(pickle.load(f), "<|bos|>"), TOKENIZER)
    sha = tokenizer_sha256()
    (folder / "tokenizer.json").unlink()
    assert same(get_tokenizer(), TOKENIZER) and tokenizer_sha256() == sha


def test_a_new_tokenizer_replaces_the_pickle_beside_it(folder):
    TOKENIZER.save(folder, upstream_pickle=True)
    other = RustBPETokenizer.train_from_iterator(iter(CORPUS), VOCAB - 5)
    other.save(folder)
    (folder / "tokenizer.json").unlink()
    assert same(get_tokenizer(), other) and not same(other, TOKENIZER)


class RunsCode:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def encoding_state(**changes):
    enc = TOKENIZER.enc
    state = {"name": "x", "pat_str": enc._pat_str, "mergeable_ranks": enc._mergeable_ranks}
    return {**state, "special_tokens": enc._special_tokens, **changes}


def encoding_pickle(state):
    """A pickle of tiktoken.core.Encoding with any state."""
    return b"\x80\x03ctiktoken.core\nEncoding\n)\x81" + pickle.dumps(state, 3)[2:-1] + b"b."


# what -> (how it is made, why it is refused)
HOSTILE = {
    "os.system": (lambda marker: pickle.dumps(RunsCode(os.system, f"touch {marker}")), "posix.system|nt.system"),
    "builtins": (lambda marker: pickle.dumps(RunsCode(exec, f"open({str(marker)!r}, 'w')")), "builtins.exec"),
    "inside state": (lambda marker: encoding_pickle(encoding_state(name=RunsCode(os.mkdir, str(marker)))), "mkdir"),
    "tiktoken function": (lambda marker: b"ctiktoken.registry\nget_encoding\n(S'gpt2'\ntR.", "get_encoding"),
    "dotted name": (lambda marker: b"\x80\x04\x8c\x0dtiktoken.core\x8c\x11Encoding.__init__\x93.", "__init__"),
    "class itself": (lambda marker: b"ctiktoken.core\nEncoding\n.", "TypeError"),
    "by registered name": (lambda marker: encoding_pickle("gpt2"), "TypeError"),
    "two tokens, one id": (lambda marker: encoding_pickle(encoding_state(special_tokens={"<|bos|>": 0})), "one id"),
    "a byte missing": (lambda marker: encoding_pickle(encoding_state(mergeable_ranks={b"a": 0})), "single bytes"),
    "no bos": (lambda marker: encoding_pickle(encoding_state(special_tokens={})), "no special token"),
    "bad pattern": (lambda marker: encoding_pickle(encoding_state(pat_str="(")), "none that this code knows"),
    "slow pattern": (lambda marker: encoding_pickle(encoding_state(pat_str=r"(?=(a|a)*b)x|[\s\S]")), "none that"),
    "truncated": (lambda marker: pickle.dumps(TOKENIZER.enc)[:-100], "truncated"),
    "empty": (lambda marker: b"", "EOFError"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_other_pickles_are_refused_by_file_name_and_run_nothing(kind, tmp_path):
    marker, path = tmp_path / "ran", tmp_path / "tokenizer.pkl"
    make, reason = HOSTILE[kind]
    path.write_bytes(make(marker))
    with pytest.raises(ValueError, match=rf"tokenizer.pkl.*({reason}).*tok_train"):
        RustBPETokenizer.from_directory(tmp_path)
    assert not marker.exists()


def test_hand_made_pickle_is_accepted_when_honest(tmp_path):
    data = encoding_pickle(encoding_state())
    assert [a for op, a, _ in pickletools.genops(data) if op.name == "GLOBAL"] == ["tiktoken.core Encoding"]
    (tmp_path / "tokenizer.pkl").write_bytes(data)
    assert same(RustBPETokenizer.from_directory(tmp_path), TOKENIZER)


def damage(name, old, new):
    def apply(folder):
        data = (folder / name).read_bytes()
        assert old in data
        (folder / name).write_bytes(data.replace(old, new))

    return apply


@pytest.mark.parametrize(
    "spoil",
    [
        damage("tokenizer.json", b"nanochat-tiktoken-1", b"nanochat-tiktoken-9"),
        damage("tokenizer.json", b'"pattern"', b'"patern"'),
        damage("tokenizer.json", b"{", b"["),
        damage("tokenizer.json", b'"bos_token": "<|bos|>"', b'"bos_token": "<|nos|>"'),
        damage("tokenizer.tiktoken", b" 17\n", b" 18\n"),
        lambda folder: (folder / "tokenizer.tiktoken").unlink(),
    ],
    ids=["format", "key", "syntax", "bos", "ranks changed", "ranks missing"],
)
def test_damaged_files_are_named(spoil, folder):
    spoil(folder)
    with pytest.raises(ValueError, match="tokenizer.json.*tok_train"):
        get_tokenizer()


def test_missing_tokenizer_says_what_to_run(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json: no tokenizer.*scripts.tok_train"):
        RustBPETokenizer.from_directory(tmp_path)


# ---------------------------------------------------------------------------- token_bytes.pt


def test_token_bytes_count_raw_bytes_and_no_specials(folder):
    counts = get_token_bytes()
    assert counts.dtype == torch.int32 and counts.shape == (VOCAB,)
    byte_ids = [TOKENIZER.enc.encode_single_token(bytes([b])) for b in range(256)]
    assert (counts[byte_ids] == 1).all()  # also bytes >= 0x80, which are no text on their own
    assert (counts[-len(SPECIAL_TOKENS) :] == 0).all()
    assert counts[TOKENIZER.encode("the")] == 3


def write(value):
    return lambda path: torch.save(value, path)


@pytest.mark.parametrize(
    "spoil",
    [
        write(torch.zeros(VOCAB - 1, dtype=torch.int32)),
        write(TOKENIZER.token_byte_counts() + 1),
        write({"a": 1}),
        write(RunsCode(os.getcwd)),
        lambda path: path.write_bytes(b"nothing"),
        lambda path: path.unlink(),
    ],
    ids=["size", "other tokenizer", "dict", "code", "garbage", "missing"],
)
def test_token_bytes_that_do_not_belong_are_named(spoil, folder):
    spoil(folder / "token_bytes.pt")
    with pytest.raises(ValueError, match="token_bytes.pt.*tok_train"):
        get_token_bytes()


# ---------------------------------------------------------------------------- conversations


def chat(*messages):
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


PARTS = [{"type": "text", "text": "sum"}, {"type": "python", "text": "1+1"}, {"type": "python_output", "text": "2"}]


def test_conversation_spells_out_and_learns_what_the_assistant_says():
    ids, mask = TOKENIZER.render_conversation(chat(("system", "be"), ("user", "hi"), ("assistant", PARTS)))
    text = TOKENIZER.decode(ids)
    assert text == (
        "<|bos|><|user_start|>be\n\nhi<|user_end|><|assistant_start|>sum"
        "<|python_start|>1+1<|python_end|><|output_start|>2<|output_end|><|assistant_end|>"
    )
    learnt = TOKENIZER.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert learnt == "sum<|python_start|>1+1<|python_end|><|assistant_end|>"
    assert TOKENIZER.render_conversation(chat(("user", "hi"), ("assistant", "yo")), max_tokens=3)[0] == [
        *TOKENIZER.encode("", "<|bos|>", "<|user_start|>"),
        TOKENIZER.encode("hi")[0],
    ]


def test_completion_drops_the_answer_and_leaves_the_input_alone():
    conversation = chat(("user", "hi"), ("assistant", "secret"))
    text = TOKENIZER.decode(TOKENIZER.render_for_completion(conversation))
    assert text == "<|bos|><|user_start|>hi<|user_end|><|assistant_start|>"
    assert conversation == chat(("user", "hi"), ("assistant", "secret"))


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [("assistant", "first")],
        [("user", "a"), ("user", "b")],
        [("system", "alone")],
        [("user", ["a list"])],
        [("user", "a"), ("assistant", 3)],
        [("user", "a"), ("assistant", [{"type": "image", "text": ""}])],
    ],
    ids=["none", "assistant first", "user twice", "system alone", "user list", "number", "part type"],
)
def test_malformed_conversations(messages):
    with pytest.raises(ValueError):
        TOKENIZER.render_conversation(chat(*messages))


def test_visualization_shows_every_token_and_its_mask():
    shown = TOKENIZER.visualize_tokenization(TOKENIZER.encode("ab"), [0, 1], with_token_id=True)
    assert "\033[91ma" in shown and "\033[92mb" in shown and f"({TOKENIZER.encode('b')[0]})" in shown


# ---------------------------------------------------------------------------- scripts


@pytest.fixture
def shards(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    (tmp_path / "base_data_climbmix").mkdir()
    for name, texts in (("shard_00000.parquet", CORPUS), ("shard_06542.parquet", ["the hat of the cat"])):
        pq.write_table(pa.table({"text": texts}), tmp_path / "base_data_climbmix" / name)
    return tmp_path / "tokenizer"


def test_tok_train_caps_documents_and_writes_all_files(shards, capsys):
    tok_train.main(["--vocab-size", "280", "--upstream-pickle"])
    names = ["token_bytes.pt", "tokenizer.json", "tokenizer.pkl", "tokenizer.tiktoken"]
    assert sorted(p.name for p in shards.iterdir()) == names
    assert len(get_token_bytes()) == get_tokenizer().get_vocab_size() == 280
    assert tokenizer_sha256() in capsys.readouterr().out
    assert list(tok_train.texts(max_chars=10, doc_cap=4)) == [text[:4] for text in CORPUS[:3]]


def test_tok_train_says_when_the_text_runs_out_of_pairs(shards, capsys):
    tok_train.main(["--vocab-size", "5000"])
    assert f"{get_tokenizer().get_vocab_size():,} tokens instead of 5,000" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--max-chars", "--doc-cap", "--vocab-size"])
def test_tok_train_names_the_flag(flag, shards):
    with pytest.raises(ValueError, match=f"{flag} 0"):
        tok_train.main([flag, "0"])


def test_tok_eval_compares_with_what_is_at_hand_and_skips_the_rest(shards, monkeypatch, capsys):
    tok_train.main(["--vocab-size", "280"])
    capsys.readouterr()
    bytes_only = RustBPETokenizer.train_from_iterator(iter(CORPUS), 256 + len(SPECIAL_TOKENS))
    monkeypatch.setattr(tok_eval, "from_tiktoken", lambda name: bytes_only if name == "gpt2" else None)
    tok_eval.main([])
    lines = capsys.readouterr().out.splitlines()
    assert any("GPT-4" in line and "skipped" in line for line in lines)
    (row,) = [line.split() for line in lines if line.startswith("climbmix-val")]
    ours = len(get_tokenizer().encode("the hat of the cat"))
    assert row[1:] == ["18", "1.00", f"{18 / ours:.2f}", f"{(18 - ours) / 18:+.1%}"]
    assert sum(line.split()[0] in tok_eval.SAMPLES for line in lines) == len(tok_eval.SAMPLES)


@pytest.mark.parametrize("play", [lambda name: threading.Event().wait(5), lambda name: 1 / 0], ids=["hangs", "fails"])
def test_tok_eval_does_not_wait_for_a_dead_network(play, monkeypatch):
    monkeypatch.setattr(tok_eval, "TIMEOUT", 0.05)
    monkeypatch.setattr(tok_eval.RustBPETokenizer, "from_pretrained", play)
    assert tok_eval.from_tiktoken("gpt2") is None


@pytest.mark.skipif("NANOCHAT_UPSTREAM" not in os.environ, reason="NANOCHAT_UPSTREAM names no upstream checkout")
def test_same_encoding_as_upstream(folder):
    import subprocess

    TOKENIZER.save(folder, upstream_pickle=True)
    code = (
        "from nanochat.tokenizer import get_tokenizer; t = get_tokenizer();"
        "print(t.encode('the naïve theatre 🙂 12345', '<|bos|>'))"
    )
    env = {**os.environ, "PYTHONPATH": os.environ["NANOCHAT_UPSTREAM"]}
    run = subprocess.run([sys.executable, "-c", code], env=env, cwd=folder, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == str(TOKENIZER.encode("the naïve theatre 🙂 12345", "<|bos|>"))
