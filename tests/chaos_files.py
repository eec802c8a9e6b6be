"""Files that are cut, flipped, foreign, of a newer version or hostile: every format that training and loading read.

Each is read in a forked child, as the product reads it. Good ends: it is refused with one line that names the file, or
what is read is what an undamaged file gives. Bad ends: a traceback, a hang, code that ran, or other content taken.
"""

import io
import json
import os
import pickle
import random
import resource
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from chaos_run import RUN, checkpoints, forked, weights_digest
from nanochat import checkpoint_manager, dataset, export, tokenizer
from nanochat.common import seal
from scripts import base_train

SECONDS = 60  # after which a reader counts as hung
MEMORY = 16 * 2**30  # bytes of address space of a reader

# ---------------------------------------------------------------------------- readers: what they give must not change


def read_data():
    return [dataset.data_identity(), list(dataset.parquets_iter_batched("train")),
            list(dataset.parquets_iter_batched("val"))]  # fmt: skip


def read_tokenizer():
    found = tokenizer.get_tokenizer()
    return [found.sha256(), found.encode("Document 7 counts 18 apples", prepend="<|bos|>"), found.decode([300])]


def read_token_bytes():
    return tokenizer.get_token_bytes().tolist()


def read_model():
    model, _, meta = checkpoint_manager.load_model("base", "cpu", "eval", model_tag="t", step=4)
    return [model(torch.arange(20).view(1, 20)).sum().item(), meta["step"]]


def read_export():
    model, _, found = export.load_exported(Path(os.environ["NANOCHAT_BASE_DIR"], "export"), "cpu")
    return [model(torch.arange(20).view(1, 20)).sum().item(), found["padded_vocab_size"]]


def resume():
    """Goes on from step 4 to the end."""
    base_train.main([*RUN, "--resume-from-step", "4"])
    return final()


def resume_beside_the_record():
    """The weights alone: a damaged line of the record is left out and said."""
    return resume()[:1]


def resume_newest():
    base_train.main([*RUN, "--resume", "auto"])
    return final()


def final():
    folder = checkpoints(os.environ["NANOCHAT_BASE_DIR"])
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    trained = [entry["loss"] for entry in map(json.loads, text.splitlines()) if entry["kind"] == "train"]
    return [weights_digest(folder, 6), trained]


# ---------------------------------------------------------------------------- damages


def saved(value) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


class RunsCode:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, call, *args):
        self.call = call, args

    def __reduce__(self):
        return self.call


def common(data: bytes, generator) -> dict:
    """Damages that suit every file."""
    at, size = generator.randrange(len(data)), len(data)
    flipped = bytearray(data)
    flipped[at] ^= 1 << generator.randrange(8)
    zeroed = bytearray(data)
    zeroed[at : at + 512] = bytes(len(zeroed[at : at + 512]))
    swapped = data[size // 2 :] + data[: size // 2]
    return {
        "empty": b"", "one byte": data[:1], "cut": data[:at], "last byte missing": data[:-1],
        "first byte missing": data[1:], "a bit flipped": bytes(flipped), "512 bytes zeroed": bytes(zeroed),
        "all zeros": bytes(size), "noise": generator.randbytes(size), "halves swapped": swapped,
        "a web page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "twice": data + data, "noise after it": data + generator.randbytes(99),
        "noise before it": generator.randbytes(99) + data, "missing": None,
    }  # fmt: skip


def of_json(data: bytes, generator) -> dict:
    """Damages of a JSON object."""
    value = json.loads(data)
    key = generator.choice(sorted(value))
    other = {"a number": 3, "a word": "word", "null": None, "a list": [1], "NaN": float("nan"), "huge": 10**400,
             "an object": {"a": 1}}  # fmt: skip
    damages = {f"a field is {name}": json.dumps({**value, key: new}).encode() for name, new in other.items()}
    return damages | {
        "a field missing": json.dumps({k: v for k, v in value.items() if k != key}).encode(),
        "no object": b"[]", "a number": b"7", "not UTF-8": data.replace(b'"', b'"\xff', 1), "deep": b"[" * 100_000,
        "open": data.rstrip()[:-1], "a word": b"null", "UTF-16": data.decode().encode("utf-16"),
        "newer": json.dumps({**value, "format": 99, "version": 99}).encode(),
    }  # fmt: skip


def of_lines(data: bytes, generator) -> dict:
    """Damages of JSON lines."""
    lines = data.splitlines()
    at = generator.randrange(len(lines))
    replaced = {"a line is a list": b"[1]", "a line is a number": b"7", "a line has no fields": b"{}",
                "a line is not UTF-8": b'{"kind": "\xff"}',
                "a line is cut": lines[at][: len(lines[at]) // 2]}  # fmt: skip
    return {name: b"\n".join([*lines[:at], new, *lines[at + 1 :]]) + b"\n" for name, new in replaced.items()} | {
        "the last line is cut": data[:-20],
        "NULs at the end": data + bytes(4096),
        "no lines": b"\n\n",
    }


def of_tensors(data: bytes, generator, marker) -> dict:
    """Damages of what torch.save wrote."""
    call = RunsCode(os.mkdir, str(marker))
    return {
        "hostile": saved(call), "hostile inside": saved({"w": torch.ones(2), "x": call}),
        "hostile legacy": pickle.dumps(call), "hostile builtin": saved(RunsCode(exec, f"open({str(marker)!r}, 'w')")),
        "hostile key": saved({"lm_head.weight": RunsCode(eval, f"__import__('os').mkdir({str(marker)!r})")}),
        "a list": saved([1, 2]), "a word": saved("word"), "an empty object": saved({}),
        "other tensors": saved({"w": torch.ones(2)}), "numbers": saved({"param_groups": 3, "state": 4}),
    }  # fmt: skip


def of_weights(data: bytes, generator) -> dict:
    """Weights of another model, as a manifest-less checkpoint would hold them."""
    state = torch.load(io.BytesIO(data), weights_only=True)
    key = generator.choice(sorted(state))
    return {
        "a tensor missing": saved({k: v for k, v in state.items() if k != key}),
        "a tensor too many": saved(state | {"transformer.h.9.attn.c_q.weight": torch.ones(2, 2)}),
        "another shape": saved(state | {key: torch.ones(3, 5)}),
        "text for a tensor": saved(state | {key: "text"}),
    }  # fmt: skip


def of_parquet(data: bytes, generator) -> dict:
    def table(**columns):
        out = io.BytesIO()
        pq.write_table(pa.table(columns), out)
        return out.getvalue()

    text = ["one", "two"]
    return {
        "another column": table(body=text), "numbers": table(text=[1, 2]), "bytes": table(text=[b"\xff", b"\xfe"]),
        "lists": table(text=[text, text]), "no rows": table(text=pa.array([], pa.string())),
        "nulls": table(text=pa.array([None, None], pa.string())), "empty documents": table(text=["", ""]),
        "encrypted": data[:-4] + b"PARE", "CSV": b"text\none\ntwo\n", "other text": table(text=text * 50),
    }  # fmt: skip


def of_ranks(data: bytes, generator) -> dict:
    lines = data.splitlines()
    return {
        "a line missing": b"\n".join(lines[:-1]) + b"\n", "no base64": b"\n".join([b"@@@ 0", *lines[1:]]),
        "a rank is a word": b"\n".join([*lines[:-1], b"YWI= word"]), "a line of one word": data + b"YWI=\n",
    }  # fmt: skip


def of_encoding(data: bytes, generator, marker) -> dict:
    """Damages of a pickled tokenizer."""
    call = RunsCode(os.mkdir, str(marker))
    return {
        "hostile": pickle.dumps(call), "hostile builtin": pickle.dumps(RunsCode(exec, f"open({str(marker)!r}, 'w')")),
        "hostile inside": pickle.dumps({"name": call}), "a word": pickle.dumps("gpt2"), "a list": pickle.dumps([1, 2]),
        "a function of tiktoken": b"ctiktoken.registry\nget_encoding\n(S'gpt2'\ntR.",
        "a dotted name": b"\x80\x04\x8c\x0dtiktoken.core\x8c\x11Encoding.__init__\x93.",
    }  # fmt: skip


def of_tokenizer(data: bytes, generator) -> dict:
    value = json.loads(data)
    specials = value["special_tokens"]
    new = {
        "newer version": {"format": "nanochat-tiktoken-2"}, "a pattern that is none": {"pattern": "("},
        "a pattern without end": {"pattern": "(a|a)*$"}, "a pattern for nothing": {"pattern": ""},
        "a pattern that is slow on some texts": {"pattern": r"(?=(a|a)*b)x|[\s\S]"},
        "a path for the ranks": {"ranks_file": "../../etc/passwd"}, "negative ids": {"special_tokens": {"<|bos|>": -1}},
        "an id that is taken": {"special_tokens": {**specials, "<|bos|>": 0}},
        "another vocabulary": {"special_tokens": {**specials, "<|more|>": 4000}},
    }  # fmt: skip
    sealed = {"sealed, " + name: seal({**value, **new[name]}) for name in new if name != "another vocabulary"}
    return {name: json.dumps(fields).encode() for name, fields in sealed.items()} | {
        name: json.dumps({**value, **fields}).encode() for name, fields in new.items()
    }


# ---------------------------------------------------------------------------- formats

STEP = "base_checkpoints/t/{}_000004{}"
# format -> (file under the base directory, its reader, further damages)
FORMATS = {
    "training shard": ("base_data_climbmix/shard_00000.parquet", read_data, [of_parquet]),
    "validation shard": ("base_data_climbmix/shard_06542.parquet", read_data, [of_parquet]),
    "source.json": ("base_data_climbmix/source.json", read_data, [of_json]),
    "tokenizer.json": ("tokenizer/tokenizer.json", read_tokenizer, [of_json, of_tokenizer]),
    "tokenizer.tiktoken": ("tokenizer/tokenizer.tiktoken", read_tokenizer, [of_ranks]),
    "tokenizer.pkl": ("tokenizer/tokenizer.pkl", read_tokenizer, [of_encoding]),
    "token_bytes.pt": ("tokenizer/token_bytes.pt", read_token_bytes, [of_tensors]),
    "model": (STEP.format("model", ".pt"), read_model, [of_tensors, of_weights]),
    "model without manifest": (STEP.format("model", ".pt"), read_model, [of_tensors, of_weights]),
    "metadata": (STEP.format("meta", ".json"), read_model, [of_json]),
    "metadata, resuming": (STEP.format("meta", ".json"), resume, [of_json]),
    "optimizer": (STEP.format("optim", "_rank0.pt"), resume, [of_tensors]),
    "optimizer without manifest": (STEP.format("optim", "_rank0.pt"), resume, [of_tensors]),
    "metrics.jsonl": ("base_checkpoints/t/metrics.jsonl", resume_beside_the_record, [of_lines]),
    "DONE.json": ("base_checkpoints/t/DONE.json", resume_newest, [of_json]),
    "export config": ("export/config.json", read_export, [of_json]),
    "export weights": ("export/model.safetensors", read_export, [of_tensors]),
}
# Where content is not hashed: files of older versions and of upstream; without source.json a folder of shards counts as
# upstream's.
WITHOUT_CHECK = {"model without manifest", "optimizer without manifest", "tokenizer.pkl"}


def prepare(corpus, folder) -> Path:
    """A base directory that holds every format: data, tokenizer, a finished run, an export."""
    base = Path(folder, "whole")
    shutil.copytree(corpus, base)

    def make():
        os.environ["NANOCHAT_BASE_DIR"] = str(base)
        base_train.main(RUN)
        model, words, _ = checkpoint_manager.load_model("base", "cpu", "eval", model_tag="t", step=6)
        export.export_model(model, words, base / "export", fold_gamma=False, dtype=torch.float32)
        words.save(str(base / "tokenizer"), upstream_pickle=True)

    end = forked(make, timeout=300)
    if end.code != 0:
        raise ValueError(f"the files could not be made:\n{end.output}")
    return base


def place(base, folder, form):
    """A copy of `base` in which `form` is what is read; returns it and the path of the file."""
    copy = Path(folder, "case")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(base, copy)
    if form == "tokenizer.pkl":
        (copy / "tokenizer" / "tokenizer.json").unlink()
    if form.endswith("without manifest"):
        path = copy / STEP.format("meta", ".json")
        meta = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in meta.items() if k not in ("files", "format", "seal")}))
    return copy, copy / FORMATS[form][0]


def read_in_child(reader, base, out):
    """The child's end; what it read goes to `out` as text."""

    def function():
        os.environ["NANOCHAT_BASE_DIR"] = str(base)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        torch.set_num_threads(1)
        try:
            out.write_text(repr(reader()))
        except (ValueError, OSError, FloatingPointError) as error:
            raise SystemExit(f"refused: {error}") from error

    out.unlink(missing_ok=True)
    return forked(function, timeout=SECONDS)


def damages_of(form, data, generator, marker) -> dict:
    found = common(data, generator)
    for make in FORMATS[form][2]:
        more = (marker,) if make in (of_tensors, of_encoding) else ()
        found |= make(data, generator, *more)
    return found


def read_whole(base, folder, form) -> str:
    """What the undamaged file gives; ValueError when it cannot be read."""
    copy, out = place(base, folder, form)[0], Path(folder, "read.txt")
    end = read_in_child(FORMATS[form][1], copy, out)
    if end.code != 0:
        raise ValueError(f"{form} cannot be read undamaged:\n{end.output}")
    return out.read_text()


def read_damaged(base, folder, form, name, generator, expected):
    """(one of GOOD or BAD, how the child ended) for one damage."""
    copy, path = place(base, folder, form)
    out, marker = Path(folder, "read.txt"), Path(folder, "ran")
    content = damages_of(form, path.read_bytes(), generator, marker)[name]
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    end = read_in_child(FORMATS[form][1], copy, out)
    return judge(end, path, out, expected, marker, form), end


def all_kinds(base, folder, generator) -> list:
    """Every (format, damage)."""
    found = []
    for form in FORMATS:
        data = place(base, folder, form)[1].read_bytes()
        found += [(form, name) for name in damages_of(form, data, generator, Path(folder, "ran"))]
    return found


def malformed(corpus, folder, files=500, seed=0) -> dict:
    """Read `files` damaged files, of all kinds in turn."""
    base, generator = prepare(corpus, folder), random.Random(seed)
    kinds = all_kinds(base, folder, generator)
    generator.shuffle(kinds)
    cases = [kinds[i % len(kinds)] for i in range(files)]
    expected = {form: read_whole(base, folder, form) for form in sorted({form for form, _ in cases})}
    ends, failures = defaultdict(Counter), []
    for form, name in cases:
        how, end = read_damaged(base, folder, form, name, generator, expected[form])
        ends[form][how] += 1
        if how in BAD:
            failures.append({"format": form, "damage": name, "how": how, "output": end.output[-600:]})
    return {
        "files": files, "kinds": len(set(cases)), "kinds_there_are": len(kinds),
        **{how: sum(counter[how] for counter in ends.values()) for how in (*GOOD, *BAD)},
        "ends": {form: dict(counter) for form, counter in ends.items()},
        "listed": {form: sorted({name for f, name in cases if f == form}) for form in FORMATS},
        "failures": failures,
    }  # fmt: skip


GOOD = ("refused by name", "same content", "other content, which that format does not check")
BAD = ("hang", "traceback", "code ran", "no file named", "other content taken")


def judge(end, path, out, expected, marker, form) -> str:
    if marker.exists():
        shutil.rmtree(marker, ignore_errors=True)
        marker.unlink(missing_ok=True)
        return "code ran"
    if end.code is None:
        return "hang"
    if end.code == 0 and out.exists():
        if out.read_text() == expected:
            return "same content"
        unmarked = form == "source.json" and not path.exists()
        return GOOD[2] if form in WITHOUT_CHECK or unmarked else "other content taken"
    if end.traceback or end.code != 1:
        return "traceback"
    return "refused by name" if path.name in end.output or path.parent.name in end.output else "no file named"
