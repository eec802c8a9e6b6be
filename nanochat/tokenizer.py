"""Byte-level BPE: rustbpe trains, tiktoken encodes; the same words, specials and chat format as upstream nanochat.

On disk, in base_dir/tokenizer/: `tokenizer.json` (pattern, special tokens, hash of the ranks, all of it sealed),
`tokenizer.tiktoken` (one "base64 rank" line per token) and `token_bytes.pt`. None of them can run code when read.
Upstream's `tokenizer.pkl` is read where there is no JSON, through an unpickler that knows tiktoken's Encoding alone.
"""

import base64
import copy
import hashlib
import json
import os
import pickle
import re

import rustbpe
import tiktoken
import torch

from nanochat.common import atomic_write, file_sha256, first_line, get_base_dir, seal, seal_holds, write_json

SPECIAL_TOKENS = [
    "<|bos|>",  # begins every document
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",  # the assistant calls Python ...
    "<|python_end|>",
    "<|output_start|>",  # ... and Python answers
    "<|output_end|>",
]
BOS = SPECIAL_TOKENS[0]

# GPT-4's pattern, except that digits come in groups of at most two.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}|"
    r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
# What a tokenizer that is read may split by, the second with GPT-4's digits: a pattern of somebody else's can be made
# so that some texts take for ever.
PATTERNS = (SPLIT_PATTERN, SPLIT_PATTERN.replace("{1,2}", "{1,3}"))
# tiktoken panics on somewhat more than a million blanks in a row: a text that comes near is encoded in pieces.
MOST_BLANKS = 500_000  # characters
BLANKS = re.compile(rf"\s{{{MOST_BLANKS}}}")

JSON_NAME, RANKS_NAME, PICKLE_NAME, BYTES_NAME = (
    "tokenizer.json", "tokenizer.tiktoken", "tokenizer.pkl", "token_bytes.pt",
)  # fmt: skip
FORMAT = "nanochat-tiktoken-1"
PROBE = "It's 12,345\r\n\n  naïve 漢字 🙂 x_y (a) aaaaaaaa\t"
REMEDY = "run python -m scripts.tok_train to make a new tokenizer"

# ---------------------------------------------------------------------------- the tokenizer


class RustBPETokenizer:
    """A tiktoken Encoding with a beginning-of-sequence token.

    `enc`: tiktoken.Encoding; `bos_token`: the special token that begins every document.
    """

    def __init__(self, enc, bos_token):
        self.enc = enc
        self.bos_token = bos_token
        self.bos_token_id = self.encode_special(bos_token)

    @classmethod
    def train_from_iterator(cls, text_iterator, vocab_size):
        """Train on an iterator of strings. `vocab_size` counts the 256 bytes and the specials too; a corpus that runs
        out of pairs gives fewer tokens (see get_vocab_size). Raises ValueError below 256 + specials."""
        num_ranks = vocab_size - len(SPECIAL_TOKENS)
        if num_ranks < 256:
            raise ValueError(f"--vocab-size {vocab_size}: at least {256 + len(SPECIAL_TOKENS)} (bytes and specials)")
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(text_iterator, num_ranks, pattern=SPLIT_PATTERN)
        ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
        specials = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        return cls(_encoding("rustbpe", trainer.get_pattern(), ranks, specials, "training"), BOS)

    @classmethod
    def from_directory(cls, tokenizer_dir):
        """Read tokenizer.json, else upstream's tokenizer.pkl. ValueError names a bad or missing file."""
        path = os.path.join(tokenizer_dir, JSON_NAME)
        if os.path.exists(path):
            return cls(*_read_json(path))
        pickle_path = os.path.join(tokenizer_dir, PICKLE_NAME)
        if os.path.exists(pickle_path):
            return cls(_read_pickle(pickle_path), BOS)
        raise ValueError(f"{path}: no tokenizer there; {REMEDY}")

    @classmethod
    def from_pretrained(cls, tiktoken_name):
        """One of tiktoken's own encodings (gpt2, cl100k_base, ...); fetched by tiktoken unless it is in its cache."""
        return cls(tiktoken.get_encoding(tiktoken_name), "<|endoftext|>")

    def save(self, tokenizer_dir, upstream_pickle=False):
        """Write tokenizer.tiktoken and tokenizer.json, and tokenizer.pkl for upstream's code when asked.

        A tokenizer.pkl that lies there already is replaced too: two files that disagree help nobody.
        """
        lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in self._sorted_ranks()]
        ranks_path = os.path.join(tokenizer_dir, RANKS_NAME)
        with atomic_write(ranks_path) as f:
            f.writelines(lines)
        meta = {
            "format": FORMAT,
            "name": self.enc.name,
            "pattern": self.enc._pat_str,
            "bos_token": self.bos_token,
            "special_tokens": self.enc._special_tokens,
            "ranks_file": RANKS_NAME,
            "ranks_sha256": file_sha256(ranks_path),
        }
        write_json(os.path.join(tokenizer_dir, JSON_NAME), seal(meta))
        pickle_path = os.path.join(tokenizer_dir, PICKLE_NAME)
        if upstream_pickle or os.path.exists(pickle_path):
            with atomic_write(pickle_path) as f:
                pickle.dump(self.enc, f)

    def _sorted_ranks(self):
        return sorted(self.enc._mergeable_ranks.items(), key=lambda item: item[1])

    def sha256(self) -> str:
        """Identity of what the tokenizer does (pattern, ranks, specials), whatever file it came from."""
        digest = hashlib.sha256(json.dumps([self.enc._pat_str, sorted(self.enc._special_tokens.items())]).encode())
        for token, rank in self._sorted_ranks():
            digest.update(b"%d:%d:" % (rank, len(token)) + token)
        return digest.hexdigest()

    # ------------------------------------------------------------------------ tokens

    def get_vocab_size(self):
        return self.enc.n_vocab

    def get_special_tokens(self):
        return self.enc.special_tokens_set

    def get_bos_token_id(self):
        return self.bos_token_id

    def id_to_token(self, id):
        return self.enc.decode([id])

    def encode_special(self, text):
        """The id of one token given by its exact text; KeyError when there is none."""
        return self.enc.encode_single_token(text)

    def encode(self, text, prepend=None, append=None, num_threads=8):
        """Token ids of a string, or a list of such lists for a list of strings (`num_threads` at work).

        `prepend`, `append`: a token id or the text of a special token. Specials written out in `text` stay plain text.
        """
        if not isinstance(text, str | list):
            raise ValueError(f"encode takes a string or a list of strings, not {type(text).__name__}")
        texts = [text] if isinstance(text, str) else text
        if any(len(t) > MOST_BLANKS and BLANKS.search(t) for t in texts):
            rows = [self._encode_in_pieces(t) for t in texts]
        elif isinstance(text, str):
            rows = [self.enc.encode_ordinary(text)]
        else:
            rows = self.enc.encode_ordinary_batch(text, num_threads=num_threads)
        head, tail = self._as_ids(prepend), self._as_ids(append)
        if head or tail:
            rows = [head + row + tail for row in rows]
        return rows[0] if isinstance(text, str) else rows

    __call__ = encode

    def _encode_in_pieces(self, text):
        pieces = (text[i : i + MOST_BLANKS] for i in range(0, len(text), MOST_BLANKS))
        return [token for piece in pieces for token in self.enc.encode_ordinary(piece)]

    def _as_ids(self, token):
        if token is None:
            return []
        return [token if isinstance(token, int) else self.encode_special(token)]

    def decode(self, ids):
        return self.enc.decode(ids)

    def decode_single_token_bytes(self, token_id):
        return self.enc.decode_single_token_bytes(token_id)

    def token_byte_counts(self):
        """(vocab,) int32: raw bytes of each token; 0 for specials and for ids that stand for nothing."""
        counts = torch.zeros(self.get_vocab_size(), dtype=torch.int32)
        for token, rank in self._sorted_ranks():
            counts[rank] = len(token)
        return counts

    # ------------------------------------------------------------------------ conversations

    def render_conversation(self, conversation, max_tokens=2048):
        """(ids, mask) of a chat, cut at `max_tokens`; mask is 1 where the assistant is to learn.

        `conversation["messages"]`: dicts with role and content, user and assistant in turn; a leading system message
        joins the first user message. Assistant content is a string or a list of parts {type, text} with type text,
        python (learnt) or python_output (not learnt). Raises ValueError on anything else.
        """
        ids, mask = [self.get_bos_token_id()], [0]

        def add(text, learn, kind=None):
            inner = self.encode(text, f"<|{kind}_start|>", f"<|{kind}_end|>") if kind else self.encode(text)
            ids.extend(inner)
            mask.extend([learn] * len(inner))

        for role, content in _turns(conversation):
            if role == "user":
                add(content, 0, "user")
                continue
            ids.append(self.encode_special("<|assistant_start|>"))
            mask.append(0)
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                kind, learn = _PARTS[part["type"]]
                add(part["text"], learn, kind)
            ids.append(self.encode_special("<|assistant_end|>"))
            mask.append(1)
        return ids[:max_tokens], mask[:max_tokens]

    def render_for_completion(self, conversation):
        """Ids of a chat without its last (assistant) message, ending where the assistant would begin to speak."""
        messages = conversation["messages"]
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"the last message must be the assistant's, not the {messages[-1]['role']}'s")
        ids, _ = self.render_conversation({**conversation, "messages": messages[:-1]})
        return ids + [self.encode_special("<|assistant_start|>")]

    def visualize_tokenization(self, ids, mask, with_token_id=False):
        """One line of coloured tokens: green where mask is 1, red elsewhere; grey ids when asked."""
        green, red, grey, plain = "\033[92m", "\033[91m", "\033[90m", "\033[0m"
        pieces = []
        for token_id, learn in zip(ids, mask, strict=True):
            pieces.append(f"{green if learn else red}{self.decode([token_id])}{plain}")
            if with_token_id:
                pieces.append(f"{grey}({token_id}){plain}")
        return "|".join(pieces)


# part type -> (special tokens around it, is it learnt?)
_PARTS = {"text": (None, 1), "python": ("python", 1), "python_output": ("output", 0)}


def _turns(conversation):
    """(role, content) pairs in checked order, the system message merged into the first user message."""
    messages = conversation["messages"]
    if not messages:
        raise ValueError("a conversation needs at least one message")
    if messages[0]["role"] == "system":
        if len(messages) < 2 or messages[1]["role"] != "user":
            raise ValueError("a system message must be followed by a user message")
        messages = copy.deepcopy(messages[1:])
        messages[0]["content"] = conversation["messages"][0]["content"] + "\n\n" + messages[0]["content"]
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        expected = "assistant" if i % 2 else "user"
        if role != expected:
            raise ValueError(f"message {i} is from {role!r}, expected {expected!r}")
        if not isinstance(content, str):
            if role == "user" or not isinstance(content, list):
                raise ValueError(f"message {i}: content of type {type(content).__name__} from {role}")
            unknown = [part["type"] for part in content if part["type"] not in _PARTS]
            if unknown:
                raise ValueError(f"message {i}: unknown part type {unknown[0]!r}; use one of {', '.join(_PARTS)}")
        yield role, content


# ---------------------------------------------------------------------------- files


def _encoding(name, pattern, ranks, specials, source):
    """A tiktoken.Encoding from checked parts; ValueError names `source`. tiktoken itself panics on some of these."""

    def check(good, text):
        if not good:
            raise ValueError(f"{source}: {text}; {REMEDY}")

    check(isinstance(name, str) and isinstance(pattern, str), "name and pattern must be strings")
    check(pattern in PATTERNS, "its pattern is none that this code knows; PATTERNS in nanochat/tokenizer.py lists them")
    check(isinstance(ranks, dict) and all(type(t) is bytes for t in ranks), "ranks must map bytes to numbers")
    check(isinstance(specials, dict) and all(type(t) is str for t in specials), "specials must map text to numbers")
    ids = [*ranks.values(), *specials.values()]
    check(all(type(i) is int and 0 <= i < 2**31 for i in ids), "a rank is not a number between 0 and 2^31")
    check(len(set(ids)) == len(ids), "two tokens share one id")
    check(all(bytes([b]) in ranks for b in range(256)), "some of the 256 single bytes have no token")
    try:
        enc = tiktoken.Encoding(name=name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
        intact = enc.decode(enc.encode_ordinary(PROBE)) == PROBE
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tiktoken's panics are no Exceptions
        raise ValueError(f"{source}: {first_line(error)}; {REMEDY}") from error
    check(intact, "the pattern loses text")
    return enc


def _unreadable(path, what, error) -> ValueError:
    return ValueError(f"{path}: {what} ({type(error).__name__}: {first_line(error)}); {REMEDY}")


def _read_json(path):
    """(Encoding, bos token) from tokenizer.json and the ranks file it names."""
    try:
        with open(path, encoding="utf-8") as f:
            meta = json.load(f)
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']!r}, expected {FORMAT!r}")
        if not seal_holds(meta):
            raise ValueError("it is not what was written")
        ranks_path = os.path.join(os.path.dirname(path), os.path.basename(meta["ranks_file"]))
        if file_sha256(ranks_path) != meta["ranks_sha256"]:
            raise ValueError(f"{ranks_path} is not the file it was written with")
        with open(ranks_path, "rb") as f:
            ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in f)}
        parts = meta["name"], meta["pattern"], ranks, meta["special_tokens"]
        bos_token = meta["bos_token"]
        if bos_token not in meta["special_tokens"]:
            raise ValueError(f"no special token {bos_token!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(path, "cannot be read", error) from error
    return _encoding(*parts, path), bos_token


class _PickledEncoding:
    """Stands in for tiktoken.Encoding while unpickling: keeps the state, does nothing with it."""

    state = None

    def __setstate__(self, state):
        self.state = state


class _EncodingUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) == ("tiktoken.core", "Encoding"):
            return _PickledEncoding
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no tokenizer needs")


def _read_pickle(path):
    """The Encoding of upstream's tokenizer.pkl. ValueError on any other pickle; nothing in it is executed."""
    try:
        with open(path, "rb") as f:
            state = _EncodingUnpickler(f).load().state
        parts = state["name"], state["pat_str"], state["mergeable_ranks"], state["special_tokens"]
    except Exception as error:  # a hostile pickle may fail in any way
        raise _unreadable(path, "not a tiktoken encoding", error) from error
    enc = _encoding(*parts, path)
    if BOS not in enc.special_tokens_set:
        raise ValueError(f"{path}: no special token {BOS!r}; {REMEDY}")
    return enc


# ---------------------------------------------------------------------------- the tokenizer of the base directory


def tokenizer_directory() -> str:
    return os.path.join(get_base_dir(), "tokenizer")


def get_tokenizer():
    return RustBPETokenizer.from_directory(tokenizer_directory())


def tokenizer_sha256(tokenizer_dir=None) -> str:
    """RustBPETokenizer.sha256 of a folder's tokenizer (default: the base directory's)."""
    return RustBPETokenizer.from_directory(tokenizer_dir or tokenizer_directory()).sha256()


def save_token_bytes(tokenizer, tokenizer_dir):
    """Write token_bytes.pt for bits per byte; returns its path."""
    path = os.path.join(tokenizer_dir, BYTES_NAME)
    with atomic_write(path) as f:
        torch.save(tokenizer.token_byte_counts(), f)
    return path


def get_token_bytes(device="cpu"):
    """(vocab,) int32 from token_bytes.pt, see token_byte_counts.

    Raises ValueError naming the file when it is missing, unreadable, or another tokenizer's.
    """
    path = os.path.join(tokenizer_directory(), BYTES_NAME)
    try:
        with open(path, "rb") as f:
            counts = torch.load(f, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise many kinds
        raise _unreadable(path, "cannot be read", error) from error
    expected = get_tokenizer().token_byte_counts()
    if not isinstance(counts, torch.Tensor) or counts.shape != expected.shape:
        found = tuple(counts.shape) if isinstance(counts, torch.Tensor) else type(counts).__name__
        raise ValueError(f"{path}: holds {found}, the tokenizer beside it has {len(expected)} tokens; {REMEDY}")
    if not torch.equal(counts.to(torch.int32), expected):
        raise ValueError(f"{path}: counts bytes otherwise than the tokenizer beside it has them; {REMEDY}")
    return counts.to(device)
