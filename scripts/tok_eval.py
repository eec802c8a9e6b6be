"""How well the tokenizer compresses, on texts of several kinds and beside GPT-2's and GPT-4's where they are at hand.

python -m scripts.tok_eval
"""

import argparse
import sys
import threading

from nanochat.dataset import parquets_iter_batched, read_manifest
from nanochat.tokenizer import RustBPETokenizer, get_tokenizer

TIMEOUT = 20.0  # seconds for tiktoken to fetch an encoding
REFERENCES = {"GPT-2": "gpt2", "GPT-4": "cl100k_base"}

SAMPLES = {
    "news": """
HARBOUR CITY, March 3 - The port authority said on Tuesday that the northern quay will stay closed for six more weeks,
after divers found that 14 of its 212 piles had rotted through. "We could patch them and hope," engineer Ruth Amsel told
reporters, "but hope is not a load rating." Ferry traffic, about 9,400 passengers a day, moves to the fish market pier;
the council put the cost at $3.7 million and expects the state to pay roughly 40% of it.
""",
    "korean": """
오늘 아침 항구에는 짙은 안개가 끼어 배가 두 시간 늦게 떠났습니다. 선장은 서두르지 않았습니다.
"바다는 기다려 주지만, 바위는 비켜 주지 않는다"고 그는 웃으며 말했습니다. 승객 37명은 따뜻한 차를 마시며
창밖을 바라보았고, 아이들은 갈매기의 수를 세었습니다.
""",
    "code": '''
def shortest(graph, start, goal):
    """Dijkstra's algorithm on {node: {neighbour: weight}}; returns (cost, path)."""
    heap, done = [(0.0, start, [start])], set()
    while heap:
        cost, node, path = heapq.heappop(heap)
        if node == goal:
            return cost, path
        if node in done:
            continue
        done.add(node)
        for other, weight in graph[node].items():
            if other not in done:
                heapq.heappush(heap, (cost + weight, other, path + [other]))
    raise KeyError(f"no way from {start!r} to {goal!r}")
''',
    "maths": r"""
\begin{proof}
Let $f\colon [0,1]\to\mathbb{R}$ be continuous and put $F(x)=\int_0^x f(t)\,dt$. For $h\neq 0$ we have
\[ \left|\frac{F(x+h)-F(x)}{h}-f(x)\right| \le \frac{1}{|h|}\left|\int_x^{x+h} |f(t)-f(x)|\,dt\right|
   \le \sup_{|t-x|\le |h|} |f(t)-f(x)|, \]
and the right side tends to $0$ as $h\to 0$. Hence $F'(x)=f(x)$, and $\sum_{k=1}^{n} k^2 = \tfrac{n(n+1)(2n+1)}{6}$.
\end{proof}
""",
    "science": """
Lichens are not single organisms but partnerships: a fungus builds the body, while algae or cyanobacteria inside it turn
light into sugar. Because they take up water and nutrients straight from rain and air, many species die where sulphur
dioxide exceeds some 30 micrograms per cubic metre, which makes them cheap instruments for mapping pollution. Growth is
slow, often 0.5-2 mm a year, so the diameter of a thallus on bare rock can date the retreat of a glacier.
""",
}


def from_tiktoken(name):
    """The encoding, or None when tiktoken neither has it nor can fetch it within TIMEOUT."""
    found = []

    def load():
        try:
            found.append(RustBPETokenizer.from_pretrained(name))
        except Exception as error:  # the network fails in many ways
            found.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return found[0] if found and isinstance(found[0], RustBPETokenizer) else None


def count(tokenizer, text):
    """(tokens, bytes per token); asserts that the text survives the round trip."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text, "the tokenizer does not return the text it was given"
    return len(ids), len(text.encode("utf-8")) / len(ids)


def table(columns, texts):
    """Lines of bytes per token by text and tokenizer, and our saving in tokens against each reference."""
    references = [name for name in columns if name != "ours"]
    yield (
        f"{'text':<16}{'bytes':>9}"
        + "".join(f"{name:>9}" for name in columns)
        + "".join(f"{'vs ' + name:>11}" for name in references)
    )
    for kind, text in texts.items():
        counts = {name: count(tokenizer, text) for name, tokenizer in columns.items()}
        ours = counts["ours"][0]
        saved = [f"{(counts[name][0] - ours) / counts[name][0]:>+11.1%}" for name in references]
        cells = [f"{ratio:>9.2f}" for _, ratio in counts.values()]
        yield f"{kind:<16}{len(text.encode('utf-8')):>9,}" + "".join(cells + saved)


def main(argv=None):
    argparse.ArgumentParser(prog="python -m scripts.tok_eval", description=__doc__.split("\n")[0]).parse_args(argv)
    ours = get_tokenizer()
    texts = {kind: text.strip() for kind, text in SAMPLES.items()}
    source = read_manifest().get("source", "climbmix").partition(":")[0]
    for split in ("train", "val"):
        batch = next(parquets_iter_batched(split), None)
        if batch:
            texts[f"{source}-{split}"] = "\n".join(batch)
    columns = {}
    for label, name in REFERENCES.items():
        tokenizer = from_tiktoken(name)
        if tokenizer is None:
            print(f"{label} ({name}): skipped, tiktoken has no copy and could not fetch one")
        else:
            columns[label] = tokenizer
    columns["ours"] = ours
    print("vocabulary: " + ", ".join(f"{label} {t.get_vocab_size():,}" for label, t in columns.items()))
    print("bytes per token (higher is better), and tokens saved against the others")
    print("\n".join(table(columns, texts)))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\ntok_eval: stopped")
