"""What a report says in sentences: the differences, the paper's claims, and how far the numbers reach.

Names of runs and variants stand between backticks; the pages turn them into code.
"""

from nanochat.bov.presets import PRESETS
from nanochat.report_paper import AGREES, DISAGREES, same_point
from nanochat.report_series import final_coefficients
from nanochat.report_stats import mean_sd
from nanochat.report_variants import Comparison
from nanochat.report_words import count, interval, p_value, percent_more, plural

LEVEL = 0.05  # of p after Holm's correction
SMALL = 100e6  # parameters without tables, below which nothing is proved about the paper's models


def quoted(name: str) -> str:
    return "`" + name.replace("`", "'").replace("\n", " ") + "`"


# ---------------------------------------------------------------------------- differences


def findings(sections) -> list[str]:
    """Per budget, of the largest group: a sentence per comparison of BoV (of all, without BoV), the others in lists."""
    said = []
    for section in sections:
        found = [c for c in section.groups[0][1] if c.stat]
        leads = [c for c in found if c.variant.axes == PRESETS["paper/bov"]] or found
        said += [sentence(c) for c in leads]
        rest = [c for c in found if c not in leads]
        if rest:
            said.append(_lists(section, rest))
    return said or [
        "There is no pair of finished runs to compare: none shares seed, budget and held-out text with a baseline."
    ]


def sentence(c: Comparison) -> str:
    """One comparison with its budget, interval and p-value; the means are over the shared seeds."""
    ours, theirs = (mean_sd(v.bpb[seed] for seed in c.seeds)[0] for v in (c.variant, c.baseline))
    side = "below" if c.stat.mean < 0 else "above"
    said = f"{quoted(c.variant.label_at_budget)} stands at {ours:.4f} bpb, {abs(c.stat.mean):.4f} {side} "
    return f"{said}{quoted(c.baseline.label_at_budget)} ({theirs:.4f}), {_budget(c)}. {_certainty(c)}."


def _budget(c):
    plans = [v.first.plan for v in (c.variant, c.baseline)]
    if c.budget == "flops":
        tokens = percent_more(*(plan["total_tokens"] for plan in plans))
        return f"with the same training FLOPs and after {tokens} tokens"
    flops = [v.flops for v in (c.variant, c.baseline)]
    cost = f" and with {percent_more(*flops)} training FLOPs" if all(flops) else ""
    if c.budget == "params":
        totals = percent_more(*(plan["num_params"]["total"] for plan in plans))
        return f"with {totals} parameters, tables counted, after the same number of tokens{cost}"
    return f"after the same number of tokens{cost}"


def _certainty(c):
    if c.stat.low is None:
        return "One seed, so there is no interval"
    said = f"Over {plural(c.stat.n, 'seed')} the 95 % interval is {interval(c.stat)}"
    if c.stat.p is None:
        return f"{said}: every seed differs by the same"
    said += f", p {equals(c.stat.p)}"
    if c.holm != c.stat.p:
        said += f" ({p_value(c.holm)} after Holm's correction)"
    if not c.stat.sign:
        return f"{said}: these seeds do not tell the two apart"
    return said if c.holm < LEVEL else f"{said}: alone it leaves out 0, among so many comparisons it does not count"


def equals(p):
    return p_value(p) if p < 1e-4 else f"= {p_value(p)}"


def _lists(section, rest) -> str:
    sure = [c for c in rest if c.holm is not None and c.holm < LEVEL]
    parts = (
        (f"below the baseline beyond chance (Holm's p < {LEVEL})", [c for c in sure if c.stat.mean < 0]),
        ("above it beyond chance", [c for c in sure if c.stat.mean > 0]),
        ("not to be told from it by these seeds", [c for c in rest if c not in sure and c.stat.n > 1]),
        ("compared with one seed only", [c for c in rest if c not in sure and c.stat.n == 1]),
    )
    words = [
        f"{say}: " + ", ".join(f"{quoted(c.name)} ({c.stat.mean:+.4f})" for c in found)
        for say, found in parts if found
    ]  # fmt: skip
    return f"Of the other variants at {AT[section.budget]}, " + "; ".join(words) + "."


AT = {"flops": "equal FLOPs", "tokens": "equal tokens", "params": "equal parameters and tokens"}

# ---------------------------------------------------------------------------- the paper


def agreement(orderings) -> list[str]:
    """Per table of the paper, how many of its pairwise orderings hold here."""
    said = []
    for table in dict.fromkeys(o.table for o in orderings):
        verdicts = [o.verdict for o in orderings if o.table == table]
        agree, against = verdicts.count(AGREES), verdicts.count(DISAGREES)
        said.append(
            f"{table.replace('table', 'Table ')}, pairs that it orders and that are here: {len(verdicts)}. "
            f"Beyond the 95 % interval {agree} agree and {against} disagree; "
            f"{len(verdicts) - agree - against} cannot be told with these seeds."
        )
    return [*said, "Each interval is of one pair and not corrected for their number."]


CLAIMS = {
    "all_above": "in every layer above",
    "last_above": "in the last layer above",
    "last_about": "in the last layer about",
}


def coefficient_claims(variants, paper) -> list[str]:
    """What Figure 2 shows of the learned coefficients, and what the same variants learned here."""
    figure, said = paper.get("figure2", {}), []
    for claim in figure.get("rows", ()):
        name, preset = claim["coefficient"], claim["preset"]
        words = [f"{text} {claim[key]}" for key, text in CLAIMS.items() if key in claim]
        layers = figure["layers"]
        line = f"{figure['where']}, layers {layers[0]} to {layers[-1]}: {name} of {quoted(preset)} ends "
        line += ", ".join(words) + "."
        for variant in variants:
            own = {layer: p.mean for (layer, n), p in final_coefficients(variant).items() if n.startswith(name)}
            if own and same_point(variant, preset):
                found = f"{min(own.values()):.2f} to {max(own.values()):.2f}, {own[max(own)]:.2f} in the last layer"
                line += f" Here {quoted(variant.label)} learned {found}."
        said.append(line)
    return said


# ---------------------------------------------------------------------------- limits


def limits(variants, sections) -> list[str]:
    """How far the numbers reach: epochs, seeds, scale, precision."""
    said = [_epochs(variants)]
    pairs = [c.stat.n for section in sections for c in section.comparisons if c.stat]
    if not pairs or min(pairs) == 1:
        all_of_it = "There is one seed" if max(pairs, default=1) == 1 else "Some comparisons have one seed"
        said.append(
            f"{all_of_it}. Two seeds of the same model differ too, by an amount that one pair of runs cannot show, "
            "so a small difference may be chance."
        )
    elif min(pairs) < 5:
        said.append(
            f"With {min(pairs)} seeds the interval rests on the assumption that differences between seeds are "
            "normally distributed; so few cannot check it."
        )
    plans = [v.first.plan for v in variants]
    params = max((plan.get("num_params") or {}).get("without_tables") or 0 for plan in plans)
    tokens = max(plan.get("total_tokens") or 0 for plan in plans)
    if params < SMALL:
        said.append(
            f"The largest model has {count(params)} parameters without tables, the longest run {count(tokens)} tokens: "
            "the paper's models have 135M and 780M and saw 2B to 100B. "
            "At this scale nothing is proved about the paper's numbers, whether the two agree or not."
        )
    said += _precision(variants)
    said += [_twice(v) for v in variants if len({run.seed for run in v.runs}) < len(v.runs)]
    commits = {(run.header.get("commit") or "?").rstrip("+") for v in variants for run in v.runs}
    if len(commits) > 1:
        said.append(f"The runs were made by {len(commits)} commits of the code; the last table names them.")
    return said


def _precision(variants):
    dtypes = {str(run.header.get("dtype", "torch.bfloat16")).removeprefix("torch.") for v in variants for run in v.runs}
    if dtypes == {"bfloat16"}:
        return []
    some, others = "Some runs" if "bfloat16" in dtypes else "The runs", ", ".join(sorted(dtypes - {"bfloat16"}))
    return [
        f"{some} were computed in {others}, the paper's in bfloat16. There, at the paper's rates, a table's decay is "
        "rounded away; in float32 it shrinks rows that the batches lack."
    ]


def _twice(variant):
    names = ", ".join(quoted(run.name) for run in variant.runs)
    return f"{quoted(variant.label)} has several runs of one seed ({names}): the first finished one of each counts."


def _epochs(variants):
    known = [v.epochs for v in variants if v.epochs is not None]
    if not known:
        return "It is not recorded how often the training text was read."
    low, high = min(known), max(known)
    often = f"{high:.2f} times" if round(low, 2) == round(high, 2) else f"{low:.2f} to {high:.2f} times"
    if high <= 1.01:
        return (
            f"The training text was read {often}: nothing was seen twice. "
            "That case suits a Bank of Values; on text that repeats, its lead can shrink or vanish."
        )
    return f"The training text was read {often}: it repeats, and repetition can favour one model over the other."


def repetition_words(series) -> list[str]:
    """Per line of the repetition picture, from the fewest passes to the most."""
    said = []
    for name, found in series.items():
        if len(found) < 2:
            continue
        steps = ", ".join(f"{c.stat.mean:+.4f} at {c.variant.epochs:.2f} passes" for c in found)
        slope = found[-1].stat.mean - found[0].stat.mean
        said.append(
            f"{quoted(name)}: {steps}; from the fewest passes to the most the difference moves by {slope:+.4f}."
        )
    return said
