"""A report as a list of blocks, made once; the templates turn the same blocks into report.md and report.html.

A block is a dict whose `kind` is heading, text, list, table, picture or sample.
"""

import base64
import re
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from nanochat import report_context as long
from nanochat import report_findings as say
from nanochat import report_items as core
from nanochat import report_tables as tables
from nanochat.common import atomic_write
from nanochat.report import Run, row
from nanochat.report_figures import (
    draw_course,
    draw_dots,
    draw_final_coefficients,
    draw_positions,
    draw_probes,
    draw_repetition,
)
from nanochat.report_paper import beside, groups_of, orderings
from nanochat.report_plots import STYLE, draw_bpb, plt, save, styles
from nanochat.report_variants import Section, Variant, baseline_runs, compare, find_baselines, group

BUDGETS = {
    "flops": (
        "At equal FLOPs",
        "Each variant was trained with as many FLOPs as its baseline, to within one step. "
        "One that costs less per token saw more tokens.",
    ),
    "tokens": (
        "At equal tokens",
        "Each variant saw as many tokens as its baseline, in batches of the same size. FLOPs per token and parameters "
        "differ; the table of sizes has both.",
    ),
    "params": (
        "At equal parameters",
        "The baseline's MLP is widened until it has as many parameters as the variant has with its tables; both saw "
        "the same tokens. The wider baseline spends more FLOPs per token.",
    ),
}
AXES = {"tokens": "training tokens", "flops": "training FLOPs", "seconds": "training time"}
COLUMN_WORDS = (
    "Columns: *values* is what attention sums, in which layers, with which coefficient; *params* counts everything, "
    "*without tables* leaves the value tables out; *FLOPs /token* is forward and backward; *epochs* is how often the "
    "training text was read; *tok/s* is the median over a run; *peak GiB* is the process's memory on a CPU, the "
    "allocator's on a GPU; *vs base* is the difference in bpb to the baseline of the same seed and budget; "
    "*coefficient by layer* is what the bank layers' values are multiplied by at the end."
)

CORE_WORDS = (
    "Each variant's run against the baseline's run of the same seed, over the items that both answered. Intervals "
    "(95 %, bootstrap) and p-values take the items as drawn and the two trainings as fixed; a task's p is the exact "
    "sign test on the items that one has right and the other wrong (wins and losses), Holm's correction covers the "
    "tasks of the pair; *up* and *down* count tasks, in brackets those beyond chance, whose corrected p is below 0.05. "
    "Where a model has all or none of a task's items right, the bootstrap cannot vary and its interval has no width."
)
POSITION_WORDS = (
    "Bits per byte by position in rows of up to 4 T tokens of {source}, T = {T} being the length of the rows in "
    "training: with the windows of the training, and with those of its long layers unlimited. Means over seeds; "
    "differences \u00b1 half the 95 % interval of the paired t-test, where there is more than one seed."
)
PROBE_WORDS = (
    "Probes made from a seed, {n} items each: *passkey*, a number told once in filler text, among ten; *recall*, the "
    "partner of a word, of ten pairs scattered in filler text; *induction*, random tokens said twice. Accuracy is the "
    "mean over seeds; in brackets from the lowest to the highest end of the seeds' 95 % intervals over items."
)


@dataclass(frozen=True)
class Facts:
    """What a report is about: its runs, their variants, the comparisons, the paper's numbers and the samples."""

    title: str
    runs: list[Run]
    variants: list[Variant]
    sections: list[Section]
    baselines: list[Variant]
    paper: dict
    samples: list[tuple[str, str]]


def gather(runs, paper, baseline=None, samples=(), title=None) -> Facts:
    """The facts of these runs; ValueError for a `baseline` that is no run's name."""
    variants = group(runs)
    title = title or ("Bank of Values against standard attention" if len(runs) > 1 else f"Run {quoted(runs[0].name)}")
    sections = compare(variants, baseline)
    return Facts(title, runs, variants, sections, find_baselines(variants, baseline), paper, list(samples))


quoted = say.quoted

# ---------------------------------------------------------------------------- blocks


def heading(text, level=2):
    return {"kind": "heading", "text": text, "level": level, "id": re.sub(r"\W+", "-", text.lower()).strip("-")}


def text(words):
    return {"kind": "text", "text": words}


def listed(items):
    return {"kind": "list", "items": items}


class Pictures:
    """Draws figures into a folder and answers with their blocks; no block for no figure."""

    def __init__(self, folder):
        self.folder, self.names = Path(folder), []

    def __call__(self, figure, name, words) -> list[dict]:
        if figure is None:
            return []
        save(figure, self.folder, name)
        self.names.append(name)
        return [{"kind": "picture", "file": name, "words": words}]


def blocks(facts: Facts, folder) -> tuple[list[dict], list[str]]:
    """(the report's blocks, the names of the pictures that were written into `folder`)."""
    pictures = Pictures(folder)
    style = styles([v.name for v in facts.variants], dict.fromkeys(v.name for v in facts.baselines))
    with plt.rc_context(STYLE):
        pairs, refused = core.find_pairs(facts.sections, facts.paper)
        short = [*say.findings(facts.sections), *map(core.sentence, pairs[: core.DETAILED])]
        found = [heading("In short"), listed(short), *_unfinished(facts.runs)]
        for section in facts.sections:
            found += _section(section, pictures, style)
        found += _alone(facts, pictures)
        found += _core(pairs, refused)
        found += _repetition(facts.sections, pictures, style)
        found += _context(facts, pictures, style)
        found += _coefficients(facts, pictures, style)
        found += _paper(facts)
    found += [heading("Sizes and costs"), tables.cost_table(facts.variants)]
    found += [heading("What the numbers cannot say"), listed(say.limits(facts.variants, facts.sections))]
    found += _samples(facts.samples) + _runs(facts)
    return found, pictures.names


def _unfinished(runs):
    names = [f"{quoted(r.name)} (step {r.last.get('step', 0)} of {r.plan.get('num_iterations', '?')})"
             for r in runs if not r.finished]  # fmt: skip
    return [text(f"Unfinished, so counted in no mean and no difference: {', '.join(names)}.")] if names else []


def _curves(names, comparisons, budget, at, pictures, style, whole=True):
    found = []
    devices = sorted({str(run.header.get("device")) for v in names for run in v.runs})
    for x, words in AXES.items() if whole else [("tokens", AXES["tokens"])]:
        if x == "seconds" and len(devices) > 1:
            found.append(text(f"Not drawn against {words}: the runs are of several devices, {'; '.join(devices)}."))
            continue
        alt = f"Validation bits per byte against {words}, {at}"
        found += pictures(draw_bpb(names, comparisons, x, style), f"{budget}_bpb_by_{x}.png", alt)
    return found


def _section(section: Section, pictures, style):
    title, words = BUDGETS[section.budget]
    at = f"at {say.AT[section.budget]}"
    if len(section.groups) > 1:
        words += " Each variant is measured against the baseline above it."
    dots = pictures(draw_dots(section, style), f"equal_{section.budget}_differences.png",
                    f"Difference to the baseline, its 95 % interval and, grey, each seed, {at}")  # fmt: skip
    curves = []
    for i, (base, found) in enumerate(section.groups):
        drawn = () if section.budget == "flops" else found  # there, equal tokens are another budget
        prefix, where = f"equal_{section.budget}" + f"_{i + 1}" * bool(i), ", ".join([at, *base.setting])
        names = {v: v.name for v in (base, *(c.variant for c in found))}
        curves += _curves(names, drawn, prefix, where, pictures, style, whole=i == 0)
    note = [text("Lines are means over seeds, bands reach from the lowest seed to the highest.")] if curves else []
    return [heading(title), text(words), tables.result_table(section), *dots, *note, *curves]


def _alone(facts, pictures):
    """Variants that nothing is measured against and that are measured against nothing."""
    met = {id(v) for s in facts.sections for c in s.comparisons for v in (c.variant, c.baseline)}
    alone = [v for v in facts.variants if id(v) not in met]
    if not alone:
        return []
    words = "Nothing here shares budget, batch, training text, held-out text and settings with these."
    title = "Without a comparison" if facts.sections else "Validation bits per byte"
    names = {v: v.label for v in alone}
    curves = _curves(names, (), "alone", "of runs without a comparison", pictures, styles(names.values()))
    return [heading(title), text(words), tables.lone_table(alone), *curves]


def _core(pairs, refused):
    """CORE of two checkpoints, item by item."""
    if not pairs and not refused:
        return []
    found = [heading("CORE, item by item")]
    if pairs:
        found += [text(CORE_WORDS), core.core_table(pairs)]
    for pair in pairs[: core.DETAILED]:
        found += [heading(pair.name, 3), listed(core.sides(pair)), core.task_table(pair)]
    if len(pairs) > core.DETAILED:
        found.append(text("The tasks of the other pairs are in a report of those runs alone."))
    return found + ([text("Not compared:"), listed(refused)] if refused else [])


def _context(facts, pictures, style):
    """What long contexts cost, variants side by side."""
    context = long.collect(facts.variants)
    if context is None:
        return []
    pairs = [(c.variant, c.baseline) for s in facts.sections for c in s.comparisons]
    baseline_of = {v: b for v, b in reversed(pairs) if v in context.results and b in context.results}
    words = "Bits per byte by position, and the difference to the baseline"
    found = [
        heading("Long contexts"),
        text(POSITION_WORDS.format(T=context.T, source=quoted(context.some["source"]))),
        long.position_table(context, baseline_of),
        *pictures(draw_positions(context, style, baseline_of), "context_positions.png", words),
        text(PROBE_WORDS.format(n=context.some["items"])),
        long.probe_table(context),
        *pictures(draw_probes(context, style), "context_probes.png", "Accuracy of the probes by length"),
    ]
    left = f"Other texts, lengths or items, so not beside these: {', '.join(context.left_out)}."
    return found + ([text(left)] if context.left_out else [])


def _repetition(sections, pictures, style):
    found = []
    for section in sections:
        series = repetition(section)
        if series:
            words = f"Difference to the baseline of as many passes over the text, at {say.AT[section.budget]}"
            found += [heading("Repetition"), text(words + ": what becomes of it when the same text is read again."),
                      listed(say.repetition_words(series)), tables.repetition_table(series),
                      *pictures(draw_repetition(series, style), "repetition.png", words)]  # fmt: skip
            return found
    return found


def repetition(section: Section) -> dict:
    """name -> its comparisons from the fewest passes to the most; empty where the baselines read equally often.

    Left out are the variants of the largest group that no other group has.
    """
    groups = [(base, [c for c in found if c.stat]) for base, found in section.groups if base.epochs]
    passes = [base.epochs for base, found in groups if found]
    if not passes or max(passes) <= 1.2 * min(passes):
        return {}
    ordered = sorted((c for _, found in groups for c in found), key=lambda c: c.baseline.epochs)
    names = sorted({c.variant.name for _, found in groups[1:] for c in found}, key=lambda n: (n != "paper/bov", n))
    return {name: [c for c in ordered if c.variant.name == name] for name in names}


def _coefficients(facts, pictures, style):
    block = tables.coefficient_table(facts.variants)
    if block is None:
        return []
    words = "Learned coefficients of the bank layers: mean over seeds, heads averaged, with the range of the seeds."
    drawn = max(groups_of(facts.variants, facts.sections), key=len)
    if len(drawn) < len(facts.variants):
        words += " The pictures show the largest group of variants that share a baseline."
    final = draw_final_coefficients(drawn, style)
    return [
        heading("Learned coefficients"), text(words), block,
        *pictures(final, "coefficients.png", "Learned coefficients by layer at the end of training"),
        *pictures(draw_course(drawn), "coefficients_course.png", "Learned coefficients over training"),
        listed(say.coefficient_claims(facts.variants, facts.paper)),
    ]  # fmt: skip


def _paper(facts):
    if not facts.paper:
        return [heading("Beside the paper"), text("The paper's numbers (`runs/paper.toml`) are not beside this code.")]
    rows = beside(groups_of(facts.variants, facts.sections), facts.paper)
    source = facts.paper["source"]
    found = [heading("Beside the paper"), text(f"The paper is arXiv {source['arxiv']}, version {source['version']}.")]
    if not rows:
        return [*found, text("No two presets here are rows of one of its tables, and none is its configuration.")]
    found.append(tables.paper_table(rows))
    reasons = dict.fromkeys(f"{r.where.partition(';')[0]}: {r.differs}" for r in rows if r.differs)
    if reasons:
        found.append(text("Not comparable, because the configuration is not the paper's:"))
        found.append(listed(list(reasons)))
    found.append(
        text("Places are counted among the variants found here, from the lowest bpb; equal numbers share one.")
    )
    unprinted = facts.paper["figure5b"]
    if any(v.preset in unprinted["presets"] for v in facts.variants):
        found.append(text(f"{unprinted['where']}, prints no values, so no ordering is taken from it."))
    pairs = orderings(rows)
    if pairs:
        found += [
            heading("Does the paper's ordering hold?", 3),
            listed(say.agreement(pairs)),
            tables.order_table(pairs),
        ]
    return found


def _samples(samples):
    if not samples:
        return []
    shown = [{"kind": "sample", "name": quoted(name), "text": words} for name, words in samples]
    return [heading("Samples"), text("One sample each, not chosen among several."), *shown]


def _runs(facts):
    baselines = baseline_runs(facts.sections)
    rows = [row(run, baselines.get(run.name)) for run in facts.runs]
    found = [heading("Every run"), tables.run_table(rows)]
    if any(not run.finished for run in facts.runs):
        found.append(text("* unfinished: the newest evaluation is shown."))
    return [*found, heading("How the runs were made"), tables.provenance_table(facts.runs), text(COLUMN_WORDS)]


# ---------------------------------------------------------------------------- pages


def _parts(words):
    """(text, is code) of a text in which code stands between backticks."""
    return [(part, bool(i % 2)) for i, part in enumerate(words.split("`"))]


def as_markdown(words) -> str:
    """A text with everything that markdown or its tables would take for markup made harmless."""
    plain = ((part.replace("|", "\\|"), code) for part, code in _parts(words))
    return "".join(f"`{p}`" if code else p.replace("&", "&amp;").replace("<", "&lt;") for p, code in plain)


def as_html(words) -> Markup:
    """A text as HTML: everything escaped, code and *emphasis* marked."""
    done = (Markup(f"<code>{escape(p)}</code>") if code else _emphasis(p) for p, code in _parts(words))
    return Markup("").join(done)


def unbroken(cell: str) -> str:
    """An interval ("-0.02 to +0.01", "0.1 \u00b1 0.2") keeps to one line; a narrow table breaks before its bracket."""
    return re.sub(r"(?<=\d) (to|\u00b1) (?=[-+\d])", "\u00a0\\1\u00a0", cell)


def _emphasis(words) -> Markup:
    return Markup(re.sub(r"\*([^*\s][^*]*)\*", r"<em>\1</em>", str(escape(words))))


def render(template: str, facts: Facts, found, folder) -> str:
    """A page of the blocks `found`; the HTML page holds the pictures of `folder` itself."""
    environment = Environment(
        loader=PackageLoader("nanochat", "templates"), undefined=StrictUndefined, keep_trailing_newline=True,
        autoescape=template.endswith(".html.j2"), trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"markdown": as_markdown, "html": as_html, "unbroken": unbroken}
    environment.globals["data_uri"] = lambda name: _data_uri(Path(folder, name))
    return environment.get_template(template).render(title=facts.title, blocks=found)


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


def write(facts: Facts, folder) -> list[str]:
    """report.md, report.html and their pictures into `folder`; returns the names of the pictures."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found, names = blocks(facts, folder)
    for name in ("report.md", "report.html"):
        with atomic_write(folder / name, "w") as f:
            f.write(render(f"{name}.j2", facts, found, folder))
    return names
