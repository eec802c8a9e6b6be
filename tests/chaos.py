"""What a run survives, measured: kills at every operation on its files, random kills, damaged files, failing servers.

python -m tests.chaos                 # everything, under 20 minutes on an idle core, to runs/results/reliability.json
python -m tests.chaos --quick         # a sample of everything in about 2 minutes, written only with --out
python -m tests.chaos --only kills    # one section
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("NANOCHAT_DTYPE", "float32")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch

import chaos_faults
import chaos_files
import chaos_kills
from chaos_run import undisturbed, warm
from nanochat import metrics
from nanochat.common import write_json
from tiny import make_corpus

OUT = Path(__file__).parents[1] / "runs" / "results" / "reliability.json"
SECTIONS = ("kills", "random", "files", "downloads", "disk", "permissions", "ranks")
# how much of everything: (in full, --quick)
SIZES = {
    "every n-th kill point": (1, 25), "random kills": (30, 4), "files": (500, 60), "download faults": (100, 30),
    "every n-th write on a full disk": (3, 40), "permissions": (99, 4), "rank faults": (99, 3),
}  # fmt: skip


def sections(folder, corpus, size) -> dict:
    """{name: function without arguments that gives the section's figures}."""
    expected = undisturbed(corpus, folder)
    found = {}

    def operations():
        if not found:
            found["all"] = chaos_kills.list_operations(corpus, folder)
        return found["all"]

    return {
        "kills": lambda: chaos_kills.kill_points(corpus, folder, expected, operations(), size["every n-th kill point"]),
        "random": lambda: chaos_kills.random_kills(corpus, folder, expected, size["random kills"]),
        "files": lambda: chaos_files.malformed(corpus, folder, size["files"]),
        "downloads": lambda: chaos_faults.downloads(folder, size["download faults"]),
        "disk": lambda: {
            "full": chaos_kills.disk_full(
                corpus, folder, expected, operations(), size["every n-th write on a full disk"]
            ),
            "limit": chaos_faults.file_limits(corpus, folder, expected),
        },
        "permissions": lambda: chaos_faults.permissions(
            corpus, folder, tuple(chaos_faults.PERMISSIONS)[: size["permissions"]]
        ),
        "ranks": lambda: chaos_faults.rank_failures(
            corpus, folder, tuple(chaos_faults.RANK_FAULTS)[: size["rank faults"]]
        ),
    }


def failures_in(value) -> int:
    """Over all sections."""
    if not isinstance(value, dict):
        return 0
    return len(value.get("failures", [])) + sum(map(failures_in, value.values()))


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="What a run survives")
    parser.add_argument("--quick", action="store_true", help="a sample of everything")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="this section; may be repeated")
    parser.add_argument("--out", type=Path, default=None, help=f"default: {OUT.name} in runs/results, not with --quick")
    args = parser.parse_args(argv)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    size = {name: sizes[args.quick] for name, sizes in SIZES.items()}
    started, result = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        make_corpus(corpus, manifest=True)
        warm()
        for name, section in sections(folder, corpus, size).items():
            if args.only and name not in args.only:
                continue
            before = time.monotonic()
            result[name] = section() | {"seconds": round(time.monotonic() - before, 1)}
            lines = {k: v for k, v in result[name].items() if isinstance(v, int | float)}
            print(f"{name}: {failures_in(result[name])} failures; {json.dumps(lines)}", flush=True)
    facts = {"commit": metrics.git_commit(), "versions": metrics.versions(), "quick": args.quick, "sizes": size}
    result = facts | {"seconds": round(time.monotonic() - started, 1), "failures": failures_in(result)} | result
    out = args.out or (None if args.quick or args.only else OUT)
    if out is not None:
        write_json(out, result)
    print(f"{result['failures']} failures in {result['seconds']:.0f} s" + (f"; {out}" if out else ""))
    sys.exit(int(result["failures"] > 0))


if __name__ == "__main__":
    main()
