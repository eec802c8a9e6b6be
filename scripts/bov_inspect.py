"""Look into a trained bank: coefficients, value norms, nearest rows, how far rows moved, and what each head reads.

python -m scripts.bov_inspect d12_bov --words "war,peace,gold" --prompt "My fellow citizens,"
python -m scripts.bov_inspect --export out/d12_bov --prompt "My fellow citizens," --json inspect.json

Everything printed also goes to inspect.txt in the output folder, beside the pictures. Runs on the CPU.
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

from nanochat import inspect_bank as bank
from nanochat.bov import host
from nanochat.checkpoint_manager import build_model, resolve_checkpoint
from nanochat.common import COMPUTE_DTYPE, DTYPES, atomic_write, get_base_dir, progress, run_script, write_json
from nanochat.dataloader import deal
from nanochat.dataset import parquets_iter_batched
from nanochat.export import load_exported
from nanochat.gpt import config_to_dict
from nanochat.inspect_plots import draw_mixture, draw_movement

NORM_ROWS = 8  # rows of one context each, for the norms of values over text

# ---------------------------------------------------------------------------- what is inspected


def load(args):
    """(name, model, tokenizer, facts) of a checkpoint or an exported folder; facts: its metadata, or config.json."""
    if args.export is None:
        folder, step = resolve_checkpoint("base", args.checkpoint, args.step)
        model, tokenizer, meta = build_model(folder, step, "cpu", "eval")
        return Path(folder).name, model, tokenizer, meta
    if args.checkpoint is not None or args.step is not None:
        raise ValueError("--export names a folder of its own: leave out CHECKPOINT and --step")
    model, tokenizer, facts = load_exported(args.export, "cpu")
    return Path(args.export).resolve().name, model, tokenizer, facts


def read_text(path) -> tuple[str, str]:
    """(name, text) of the file --text; ValueError when it is no text, or none is in it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not text.strip():
        raise ValueError(f"--text {path} is empty")
    return Path(path).name, text


def counted(tokenizer, text, limit, part):
    """({text, tokens, cut}, counts (V,)) over `text`, a (name, text), else over the training split.

    ({missing: why}, None) where there is neither. At most `limit` tokens of the training split, -1 = all; of it the
    `part` that a run with --train-part reads.
    """
    if text is not None:
        counts, total, cut = bank.count_tokens([[text[1]]], tokenizer, -1)
        return {"text": text[0], "tokens": total, "cut": cut}, counts
    try:
        groups = len(deal("train", part=part).groups)
        documents = progress(
            islice(parquets_iter_batched("train"), groups), desc="counting tokens", unit="group", leave=False
        )
        counts, total, cut = bank.count_tokens(documents, tokenizer, limit)
    except ValueError as error:
        return {"missing": f"{error}; or give --text FILE"}, None
    name = "training text" if part == 1 else f"the part {part:g} of the training text that the run read"
    return {"text": name, "tokens": total, "cut": cut}, counts


def norm_rows(tokenizer, length, text):
    """(what, rows of at most `length` ids) for the norms over text: --text, else the validation split; or None."""
    if text is None:
        try:
            texts = (text for texts in parquets_iter_batched("val") for text in texts)
            name, texts = "validation text", list(islice(texts, 20 * NORM_ROWS))
        except ValueError:
            return None, []
    else:
        name, texts = text[0], [text[1]]
    ids = [i for row in tokenizer.encode(texts, prepend=tokenizer.get_bos_token_id(), num_threads=2) for i in row]
    return name, [ids[i : i + length] for i in range(0, min(len(ids), NORM_ROWS * length), length)]


def token_text(tokenizer, token) -> str:
    """A token as text; bytes that are no whole character as \\x.."""
    return tokenizer.decode_single_token_bytes(token).decode("utf-8", errors="backslashreplace")


def quoted(text) -> str:
    """A token's text in quotes on one line."""
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "'" + "".join(short.get(c, c if c.isprintable() else f"\\u{ord(c):04x}") for c in text) + "'"


def word_tokens(tokenizer, words) -> list[tuple[str, list[int]]]:
    """(word, ids) of each word of --words as it stands in running text, after a space; a special token by its name."""
    listed = [word.strip() for word in words.split(",")]
    if not all(listed):
        raise ValueError(f"--words {words!r}: an empty word; write words with commas between them")
    specials = tokenizer.get_special_tokens()
    unknown = [word for word in listed if word.startswith("<|") and word not in specials]
    if unknown:
        raise ValueError(f"--words: no special token {unknown[0]!r}; there are: {', '.join(sorted(specials))}")
    return [(w, [tokenizer.encode_special(w)] if w in specials else tokenizer.encode(f" {w}")) for w in listed]


# ---------------------------------------------------------------------------- findings, as JSON holds them


def find_layers(model, rows, folded) -> list[dict]:
    """Kind, coefficients and value norms of every layer; rows: of token ids, may be empty."""
    over_text = bank.value_norms(model, rows) if rows else [None] * model.config.n_layer
    found, coefficients = [], folded | host.coefficients(model)
    for i, block in enumerate(model.transformer.h):
        spec, of_rows = block.attn.bank.spec, bank.row_norms(model, i)
        own = {name.partition(".")[2]: v for name, v in coefficients.items() if name.split(".")[0] == str(i)}
        found.append({
            "layer": i, "source": spec.source, "combine": spec.combine, "coeff": spec.coeff, "table": spec.table,
            "coefficients": own, "folded": any(name.split(".")[0] == str(i) for name in folded),
            "row_norms": None if of_rows is None else bank.spread(of_rows),
            "text_norms": None if over_text[i] is None else bank.spread(over_text[i]),
        })  # fmt: skip
    return found


def find_words(tokenizer, tables, words, counts, k) -> list[dict]:
    """The nearest rows of every token of every word, per table."""
    if not tables:
        raise ValueError("--words: this model has no table of rows (bov_source is not table)")

    def named(token):
        count = None if counts is None else int(counts[token])
        return {"id": token, "text": token_text(tokenizer, token), "count": count}

    def near(table, token):
        return [named(other) | {"cosine": cosine} for other, cosine in bank.nearest(table.rows, token, k)]

    return [
        {
            "word": word,
            "tokens": [
                named(i) | {"nearest": [{"table": t.key, "layers": t.layers, "rows": near(t, i)} for t in tables]}
                for i in ids
            ],
        }
        for word, ids in word_tokens(tokenizer, words)
    ]


def find_movement(model, tokenizer, meta, counts):
    """({seed, agreement, tables: [{table, layers, rows, unmoved, bins}]}, movement (V,) per table).

    ({missing: why}, None) where the start of the run cannot be drawn again. `rows` and bins: mean and quartiles.
    """
    tables, seed = bank.tables(model), meta.get("user_config", {}).get("seed")
    specials = tokenizer.get_special_tokens() - {tokenizer.bos_token}
    if not tables or seed is None or not specials:
        why = "this model has no table" if not tables else "the seed of the initial weights is not recorded"
        return {"missing": why if not tables or seed is None else "no token is known that no text holds"}, None
    untouched = sorted(tokenizer.encode_special(name) for name in specials)
    dtype = DTYPES[meta.get("identity", {}).get("dtype", str(COMPUTE_DTYPE)).removeprefix("torch.")]
    try:
        starts, agreement = bank.starting_rows(model, seed, dtype, untouched)
    except ValueError as error:
        return {"missing": str(error)}, None
    moved = [bank.movement(table.rows, start) for table, start in zip(tables, starts, strict=True)]
    found = [
        {
            "table": table.key, "layers": table.layers, "rows": bank.spread(m), "unmoved": int((m == 0).sum()),
            "bins": None if counts is None else bank.by_frequency(m, counts),
        }
        for table, m in zip(tables, moved, strict=True)
    ]  # fmt: skip
    return {"seed": seed, "agreement": agreement, "tables": found}, moved


def find_mixtures(model, tokenizer, prompt):
    """({text, tokens, layers: [...]}, mixtures) of the prompt, which <|bos|> begins, at its last token."""
    if not prompt:
        raise ValueError("--prompt is empty: give a text")
    ids = tokenizer.encode(prompt, prepend=tokenizer.get_bos_token_id())
    mixtures = bank.mixtures(model, ids)
    layers = [
        {
            "layer": m.layer, "window": m.window, "coefficient": m.coefficient.tolist(),
            "weights": m.weights.tolist(), "shares": m.shares.tolist(),
            "difference": m.difference, "limit": m.limit, "exact": m.exact,
        }
        for m in mixtures
    ]  # fmt: skip
    distinct = [
        {"id": token, "text": token_text(tokenizer, token), "count": ids.count(token)} for token in mixtures[0].tokens
    ]
    return {"text": prompt, "tokens": ids, "distinct": distinct, "layers": layers}, mixtures


# ---------------------------------------------------------------------------- lines for the screen


def table_lines(heads, rows) -> list[str]:
    """Aligned columns, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    aligned = [[f"{c:{'>' if i else '<'}{w}}" for i, (c, w) in enumerate(zip(r, widths, strict=True))] for r in rows]
    first = [f"{c:{'>' if i else '<'}{w}}" for i, (c, w) in enumerate(zip(heads, widths, strict=True))]
    return ["  " + "  ".join(row).rstrip() for row in [first, ["-" * w for w in widths], *aligned]]


def numbers(found) -> list[str]:
    """Mean and quartiles as cells."""
    return ["-"] * 4 if found is None else [f"{found[name]:.3g}" for name in ("mean", *bank.QUARTILES)]


def kind_of(layer) -> str:
    """Words for where a layer's value comes from."""
    if layer["source"] == "residual" and layer["coeff"] == "fixed":
        return "x W_V"
    return f"{layer['source']}, {layer['combine']}, {layer['coeff']}"


def layer_lines(layers, text) -> list[str]:
    lines = ["Coefficients"]
    for layer in layers:
        for name, vector in layer["coefficients"].items():
            note = " (folded into the rows)" if layer["folded"] else ""
            lines.append(f"  layer {layer['layer']}  {name}  {', '.join(f'{v:.4g}' for v in vector)}{note}")
    lines += ["  none is learned"] if len(lines) == 1 else []
    over = "no text at hand; give --text FILE" if text is None else f"{text['tokens']:,} tokens of {text['text']}"
    lines += ["", f"Value norms: of all rows times the coefficient, and of values over text ({over})"]
    heads = ["layer", *(f"{w} {n}" for w in ("rows", "text") for n in ("mean", "25%", "50%", "75%"))]
    rows = [[f"{r['layer']} {kind_of(r)}", *numbers(r["row_norms"]), *numbers(r["text_norms"])] for r in layers]
    return lines + table_lines(heads, rows)


def count_range(b) -> str:
    if b["low"] == 0:
        return "never"
    return f"{b['low']:,}" if b["low"] == b["high"] else f"{b['low']:,}-{b['high']:,}"


def layers_of(table) -> str:
    """ "layer 4" or "layers 4, 5"."""
    return f"layer{'s' * (len(table['layers']) > 1)} {', '.join(map(str, table['layers']))}"


def movement_lines(found, counted) -> list[str]:
    lines = ["Movement of rows since the start, in lengths of the starting row"]
    if "missing" in found:
        return lines + [f"  not measured: {found['missing']}"]
    lines.append(
        f"  the start was drawn again under seed {found['seed']}; rows that no text touches agree with it "
        f"(cosine {found['agreement']:.4f})"
    )
    if "missing" in counted:
        lines.append(f"  frequencies are not counted: {counted['missing']}")
    else:
        cut = ", which goes on" if counted["cut"] else ""
        lines.append(f"  frequencies over {counted['tokens']:,} tokens of {counted['text']}{cut}")
    for table in found["tables"]:
        bins = [[count_range(b), f"{b['count']:,}", *numbers(b)] for b in table["bins"] or ()]
        lines += ["", f"  {table['table']}, {layers_of(table)}; {table['unmoved']:,} rows exactly where they began"]
        heads = ["times seen", "rows", "mean", "25%", "50%", "75%"]
        lines += table_lines(heads, [*bins, ["all", f"{table['rows']['count']:,}", *numbers(table["rows"])]])
    return lines


def word_lines(words) -> list[str]:
    lines = ["Nearest rows (cosine)"]
    for word in words:
        pieces = [quoted(token["text"]) for token in word["tokens"]]
        if len(pieces) > 1:
            lines.append(f"  {word['word']} is {len(pieces)} tokens: {', '.join(pieces)}; each has its own row")
        for token in word["tokens"]:
            seen = (
                ""
                if token["count"] is None
                else f", seen {token['count']:,} times"
                if token["count"]
                else ", never seen"
            )
            lines.append(f"  {quoted(token['text'])} (token {token['id']}{seen})")
            for table in token["nearest"]:
                near = "  ".join(f"{quoted(row['text'])} {row['cosine']:.2f}" for row in table["rows"])
                lines.append(f"    {layers_of(table)}: {near}")
    return lines


def prompt_lines(found, top) -> list[str]:
    """Per layer the largest weights of each head, with the share of the output, and the check."""
    last = quoted(next(token["text"] for token in found["distinct"] if token["id"] == found["tokens"][-1]))
    lines = [
        f"What each head reads at the last token, {last}: weight of a token's row, and its share of the output",
        f"  {len(found['tokens'])} tokens, {len(found['distinct'])} distinct",
    ]
    for layer in found["layers"]:
        coefficient = ", ".join(f"{v:.4g}" for v in dict.fromkeys(layer["coefficient"]))
        lines += ["", f"  layer {layer['layer']}, coefficient {coefficient}, sees {layer['window']} tokens back"]
        for n, (weights, shares) in enumerate(zip(layer["weights"], layer["shares"], strict=True)):
            best = sorted(range(len(weights)), key=lambda u: -weights[u])[:top]
            cells = [
                f"{quoted(found['distinct'][u]['text'])} {weights[u]:.3f} ({shares[u]:+.0%})"
                for u in best
                if weights[u]
            ]
            lines.append(f"    head {n}  {'  '.join(cells)}")
        verdict = "rounding" if layer["exact"] else "MORE THAN ROUNDING: this attribution is not exact"
        lines.append(
            f"    check: coefficient * sum of w E and the heads' outputs differ by {layer['difference']:.1e} at most: "
            f"{verdict} (up to {layer['limit']:.1e})"
        )
    return lines


# ---------------------------------------------------------------------------- the command


def draw(out, found, counts, moved, mixtures) -> list[str]:
    """Write the pictures there is material for; returns their names."""
    written = []
    if moved is not None and counts is not None:
        about = f"{found['counted']['tokens']:,} tokens of {found['counted']['text']}"
        tables = found["movement"]["tables"]
        panels = [(layers_of(t), m, counts, t["bins"]) for t, m in zip(tables, moved, strict=True)]
        draw_movement(out / "movement.png", panels, about)
        written.append("movement.png")
    for m in mixtures:
        names = [token["text"] for token in found["prompt"]["distinct"]]
        draw_mixture(
            out / f"mixture_layer{m.layer}.png", m, names, names[m.tokens.index(found["prompt"]["tokens"][-1])]
        )
        written.append(f"mixture_layer{m.layer}.png")
    return written


def inspect(args):
    """(folder, findings as JSON holds them, lines for the screen); writes the pictures into the folder."""
    name, model, tokenizer, facts = load(args)
    bank.check_has_banks(model, name)
    out = Path(args.out or Path(get_base_dir(), "inspect", name))
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")
    text = None if args.text is None else read_text(args.text)
    prompt, mixtures = (None, []) if args.prompt is None else find_mixtures(model, tokenizer, args.prompt)
    about, counts = counted(tokenizer, text, args.count_tokens, facts.get("user_config", {}).get("train_part", 1))
    words = [] if args.words is None else find_words(tokenizer, bank.tables(model), args.words, counts, args.top)
    norm_text, rows = norm_rows(tokenizer, model.config.sequence_len, text)
    movement, moved = find_movement(model, tokenizer, facts, counts)
    found = {
        "name": name, "step": facts.get("step"), "model_config": config_to_dict(model.config), "counted": about,
        "norm_text": None if norm_text is None else {"text": norm_text, "tokens": sum(map(len, rows))},
        "layers": find_layers(model, rows, facts.get("folded", {})), "movement": movement, "words": words,
        "prompt": prompt,
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    found["pictures"] = draw(out, found, counts, moved, mixtures)
    return out, found, lines_of(found, args.top)


def lines_of(found, top) -> list[str]:
    config = found["model_config"]
    shape = f"{config['n_layer']} layers, {config['n_head']} query and {config['n_kv_head']} key heads"
    lines = [f"{found['name']}, step {found['step']}: {shape}, width {config['n_embd']}", ""]
    lines += [*layer_lines(found["layers"], found["norm_text"]), ""]
    lines += [*movement_lines(found["movement"], found["counted"]), ""]
    lines += [*word_lines(found["words"]), ""] if found["words"] else []
    lines += [*prompt_lines(found["prompt"], top), ""] if found["prompt"] else []
    return lines


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.bov_inspect", description="Look into a trained bank")
    parser.add_argument(
        "checkpoint", nargs="?", default=None, metavar="CHECKPOINT",
        help="folder under base_checkpoints (default: the largest model)",
    )  # fmt: skip
    parser.add_argument("--step", type=int, default=None, help="step to load (default: the newest)")
    parser.add_argument("--export", default=None, metavar="DIR", help="a folder written by bov_export, instead")
    parser.add_argument(
        "--words",
        default=None,
        help='words whose nearest rows to show, as in "war,peace,gold"; each is read as after a space',
    )
    parser.add_argument("--prompt", default=None, metavar="TEXT", help="text at whose end to show what each head reads")
    parser.add_argument("--text", default=None, metavar="FILE", help="text to count tokens and take values over "
                        "(default: the base directory's training text, and its validation text)")  # fmt: skip
    parser.add_argument("--count-tokens", type=int, default=20_000_000, help="tokens of training text to count at "
                        "most, -1 = all of it (default 20M)")  # fmt: skip
    parser.add_argument("--top", type=int, default=6, help="rows and tokens to show of each (default 6)")
    parser.add_argument("--out", default=None, help="folder to write (default: inspect/NAME in NANOCHAT_BASE_DIR)")
    parser.add_argument("--json", default=None, metavar="FILE", help="write all of it as JSON too")
    args = parser.parse_args(argv)
    if args.top < 1:
        raise ValueError(f"--top {args.top}: at least 1")
    if args.count_tokens < 1 and args.count_tokens != -1:
        raise ValueError(f"--count-tokens {args.count_tokens}: at least 1, or -1 for all of the text")
    return args


def main(argv=None):
    args = parse_args(argv)
    sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 must not stop the report
    out, found, lines = inspect(args)
    shown = "\n".join(lines)
    with atomic_write(out / "inspect.txt", "w") as f:
        f.write(shown)
    if args.json is not None:
        write_json(args.json, found)
    print(shown)
    if args.json is not None:
        print(f"json:    {args.json}")
    print(f"report:  {out / 'inspect.txt'}")
    for name in found["pictures"]:
        print(f"picture: {out / name}")


if __name__ == "__main__":
    run_script("bov_inspect", main)
