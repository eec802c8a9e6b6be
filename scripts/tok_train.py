"""Train a tokenizer on the training shards: python -m scripts.tok_train [--vocab-size 32768] [--upstream-pickle]"""

import argparse
import sys
import time

from nanochat.common import get_base_dir, progress
from nanochat.dataset import parquets_iter_batched
from nanochat.tokenizer import RustBPETokenizer, save_token_bytes, tokenizer_directory


def texts(max_chars, doc_cap):
    """Training documents, each cut at `doc_cap` characters, until `max_chars` have been seen."""
    seen = 0
    with progress(total=max_chars, unit=" chars", unit_scale=True, desc="reading") as bar:
        for batch in parquets_iter_batched("train"):
            for document in batch:
                document = document[:doc_cap]
                yield document
                seen += len(document)
                bar.update(len(document))
                if seen > max_chars:
                    return
        bar.total = seen  # the data ended before max_chars
        bar.refresh()
    print(f"{seen:,} characters read, merging", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Train a BPE tokenizer")
    parser.add_argument("--max-chars", type=int, default=2_000_000_000, help="characters to train on at most")
    parser.add_argument("--doc-cap", type=int, default=10_000, help="characters per document at most")
    parser.add_argument("--vocab-size", type=int, default=32768, help="tokens, the 256 bytes and the specials included")
    parser.add_argument("--upstream-pickle", action="store_true", help="also write tokenizer.pkl for upstream's code")
    args = parser.parse_args(argv)
    for flag, value in (("--max-chars", args.max_chars), ("--doc-cap", args.doc_cap)):
        if value < 1:
            raise ValueError(f"{flag} {value}: at least 1")
    print(f"training a tokenizer of {args.vocab_size:,} on the shards in {get_base_dir()}", flush=True)
    began = time.time()
    tokenizer = RustBPETokenizer.train_from_iterator(texts(args.max_chars, args.doc_cap), args.vocab_size)
    print(f"trained in {time.time() - began:.1f} s")
    if tokenizer.get_vocab_size() < args.vocab_size:
        print(f"the text ran out of pairs: {tokenizer.get_vocab_size():,} tokens instead of {args.vocab_size:,}")
    sample = "We the people, in 1787: x² ≠ y, it's naïve 你好 🌍\n\n"
    assert tokenizer.decode(tokenizer.encode(sample)) == sample
    tokenizer.save(tokenizer_directory(), upstream_pickle=args.upstream_pickle)
    counts = tokenizer.token_byte_counts()
    print(f"bytes per token: mean {counts[counts > 0].float().mean():.2f}, longest {counts.max()}")
    print(f"wrote {tokenizer_directory()} and {save_token_bytes(tokenizer, tokenizer_directory())}")
    print(f"tokenizer sha256: {tokenizer.sha256()}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; nothing was written")
