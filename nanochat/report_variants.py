"""Runs that differ in the seed alone are one variant; a variant is measured against the baseline of its own budget.

All of it is decided from the headers, never from folder names. Budgets: equal FLOPs, equal tokens, and equal tokens
and parameters (a baseline whose MLP is widened); no difference is taken across them.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace

from nanochat.bov.host import AXES
from nanochat.bov.presets import PRESETS
from nanochat.core_compare import holm
from nanochat.report import Run, final_bpb, same_validation
from nanochat.report_stats import Paired, paired
from nanochat.report_words import count

BASELINE_PRESETS = ("paper/baseline", "table1/1")
CHANGED = " (changed)"  # what metrics.jsonl adds to a preset that flags moved the model off
PARAMS_TOLERANCE = 0.1  # of the total, beyond which parameters are not called equal

# What a header tells that does not decide a result, or follows from what does.
NO_SETTING = {"kind", "commit", "versions", "device", "ranks", "preset", "seed", "config", "plan", "data"}
DERIVED = {
    "model_config", "num_params", "num_matmul_params", "flops_per_token", "total_tokens", "total_flops", "bov_layers",
    "kv_bytes_per_token", "table_bytes", "expected_epochs", "packing", "shards", "disk_bytes", "train_bytes_per_rank",
}  # fmt: skip
# In these a variant may differ from its baseline, in RATES too where no baseline has the same; in all else they agree.
OWN = {"preset", "plan.num_iterations", *(f"config.{axis}" for axis in AXES)}
OWN |= {"plan.lr.value_table", "plan.table_weight_decay"}  # a baseline has no tables
RATES = {f"plan.lr.{name}" for name in ("matrix", "embedding", "unembedding", "scalar")}
RATES |= {"plan.weight_decay"}
HELD_OUT = {"data.val", "eval_tokens"}  # compared by same_validation
BUDGETS = ("flops", "tokens", "params")

# Settings in the words of a label; those of ALWAYS are named also where most runs have them.
RATE_WORDS = {
    "plan.lr": "lr", "plan.lr.matrix": "matrix lr", "plan.lr.embedding": "embedding lr",
    "plan.lr.unembedding": "unembedding lr", "plan.lr.scalar": "scalar lr", "plan.lr.value_table": "value-table lr",
}  # fmt: skip
WORDS = {
    "plan.total_batch_size": "batch", "plan.weight_decay": "weight decay", "plan.table_weight_decay": "table decay",
    "data.source": "text", "data.train": "training text", "data.val": "held-out text", "dtype": "",
    "eval_tokens": "scored tokens", "tokenizer_sha256": "tokenizer",
}  # fmt: skip
SOURCE_WORDS = {"table": "E_v[i]", "x0": "x0 W_V", "first": "V1", "residual": "V"}
COEFF_WORDS = {"scalar": "learned", "head": "learned per head", "gate": "gated", "fixed": "fixed"}
ALWAYS = {"plan.total_batch_size"}

# ---------------------------------------------------------------------------- variants


@dataclass(frozen=True, eq=False)
class Variant:
    """Runs of one identity, told from others of its preset by `name`, by `setting`, which its baseline shares, or both.

    `length` is the run's tokens in words where others of the preset have other ones, else "".
    """

    name: str
    setting: tuple[str, ...]
    length: str
    identity: dict
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """Its name in the whole report."""
        return ", ".join([self.name, *self.setting, *filter(None, [self.length])])

    @property
    def label_at_budget(self) -> str:
        """Its name at one budget, which fixes the length."""
        return ", ".join([self.name, *self.setting])

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def preset(self) -> str:
        return self.identity["preset"]

    @property
    def finished(self) -> dict:
        """seed -> the first finished run of that seed that has a bpb."""
        return {r.seed: r for r in reversed(self.runs) if r.finished and final_bpb(r) is not None}

    @property
    def bpb(self) -> dict:
        """seed -> final bpb of the finished run."""
        return {seed: final_bpb(run) for seed, run in self.finished.items()}

    @property
    def shown(self) -> tuple[Run, ...]:
        """The runs that curves are drawn from: the finished ones, else all."""
        return tuple(self.finished.values()) or self.runs

    @property
    def widened(self) -> bool:
        return bool(self.identity.get("config.mlp_hidden"))

    @property
    def axes(self) -> dict:
        """The value axes away from their defaults, as a preset writes them."""
        return {axis: self.identity[f"config.{axis}"] for axis in AXES if f"config.{axis}" in self.identity}

    @property
    def values(self) -> str:
        """What attention's values are made of, as the paper writes it: "E_v[i], last:1/3, learned"; "-" if unknown."""
        if not self.first.config:
            return "-"
        axes = {axis: default for axis, (default, _) in AXES.items()} | self.axes
        found = []
        if axes["bov_layers"] != "none":
            source = ("V + " if axes["bov_combine"] == "add" else "") + SOURCE_WORDS[axes["bov_source"]]
            table = ["one table for all"] if axes["bov_shared"] else []
            found.append(", ".join([source, axes["bov_layers"], COEFF_WORDS[axes["bov_coeff"]], *table]))
        if axes["ve_layers"] != "none":
            found.append(f"V + E_v[i], {axes['ve_layers']}, gated")
        return "; ".join(found) or "V"

    @property
    def epochs(self) -> float | None:
        """Expected passes of the whole run over its training text."""
        return self.first.plan.get("expected_epochs")

    @property
    def flops(self) -> float | None:
        """Training FLOPs of the whole run."""
        plan = self.first.plan
        if plan.get("total_flops") is None and plan.get("flops_per_token") and plan.get("total_tokens"):
            return plan["flops_per_token"] * plan["total_tokens"]
        return plan.get("total_flops")


def identity(run: Run) -> dict:
    """What decides a run's result, the seed left out, as flat names: "plan.lr.matrix" -> 0.002. Absent names = default.

    Rates count to six digits: a plan that was given its rate as text may differ in the last ones.
    """
    data, header = run.data, run.header
    facts = {name: value for name, value in header.items() if name not in NO_SETTING}
    facts["preset"] = run.preset.removesuffix(CHANGED)
    facts["config"] = run.config
    facts["plan"] = {name: value for name, value in run.plan.items() if name not in DERIVED}
    facts["data"] = {
        "source": data.get("source"),
        "train": data.get("train_text_sha") or data.get("train_sha"),
        "val": data.get("val_text_sha") or data.get("val_sha"),
        "train_part": data.get("train_part", 1.0),
    }
    return _flat(facts)


def _flat(facts: dict, prefix: str = "") -> dict:
    found = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[prefix + name] = float(f"{value:.6g}") if isinstance(value, float) else value
    return found


def group(runs) -> list[Variant]:
    """The variants in the order of their first runs, each with a label that no other has."""
    members = {}
    for run in runs:
        members.setdefault(json.dumps(identity(run), sort_keys=True), []).append(run)
    identities = {key: json.loads(key) for key in members}
    usual = _usual([identities[key] for key, found in members.items() for _ in found])
    variants, labels = [], Counter()
    for key, found in members.items():
        facts = identities[key]
        alike = [other for other in identities.values() if other["preset"] == facts["preset"]]
        own, setting = _differences(facts, alike, usual)
        variant = Variant(
            ", ".join([facts["preset"], *own]), tuple(setting), _length(facts, alike), facts, tuple(found)
        )
        labels[variant.label] += 1
        if labels[variant.label] > 1:  # in what no label names
            variant = replace(variant, name=f"{variant.name}, no. {labels[variant.label]}")
        variants.append(variant)
    return variants


def _length(facts, alike) -> str:
    """Tokens in words, where runs of one preset are not all of one length."""
    lengths = [other.get("plan.num_iterations", 0) * other.get("plan.total_batch_size", 1) for other in (facts, *alike)]
    if len(set(lengths)) == 1:
        return ""
    return f"{count(lengths[0])} tokens" if "plan.total_batch_size" in facts else f"{lengths[0]} steps"


def _usual(identities) -> dict:
    """name -> the value most runs have."""
    names = sorted({name for facts in identities for name in facts})
    counts = {name: Counter(json.dumps(facts.get(name)) for facts in identities) for name in names}
    return {name: json.loads(count.most_common(1)[0][0]) for name, count in counts.items()}


def _differences(facts, alike, usual) -> tuple[list[str], list[str]]:
    """(own, setting): in words, where a variant stands apart from the others of its preset."""
    names = sorted({n for other in alike for n in other if any(other.get(n) != o.get(n) for o in alike)})
    own, setting = [], []
    rates = {n: facts[n] / usual[n] for n in names if n.startswith("plan.lr.") and facts.get(n) and usual.get(n)}
    if len(rates) > 1 and len({f"{ratio:.3g}" for ratio in rates.values()}) == 1:  # all rates by one factor
        rates = {"plan.lr": next(iter(rates.values()))}
    for name, ratio in rates.items():
        if f"{ratio:.3g}" != "1":
            words = f"{RATE_WORDS.get(name, name)} x{ratio:.3g}"
            (own if name in OWN else setting).append(words)
    for name in names:
        value = facts.get(name)
        if name.startswith("plan.lr.") or name == "plan.num_iterations" or value is None:
            continue
        if name == "data.train" and "data.train_part" in names or value == usual.get(name) and name not in ALWAYS:
            continue
        (own if name in OWN else setting).append(_in_words(name, value))
    return own, setting


def _in_words(name, value) -> str:
    word = WORDS.get(name, name.rpartition(".")[2])
    if isinstance(value, bool):
        return word if value else f"no {word}"
    if isinstance(value, str):
        return f"{word} {value.removeprefix('torch.')[:12]}".strip()
    return f"{word} {value:.4g}" if isinstance(value, float) else f"{word} {value}"


# ---------------------------------------------------------------------------- budgets and baselines


@dataclass(frozen=True)
class Comparison:
    """A variant against its baseline at one budget; `stat` pairs the seeds that both have finished, None without."""

    budget: str
    variant: Variant
    baseline: Variant
    seeds: tuple
    stat: Paired | None
    holm: float | None = None

    @property
    def name(self) -> str:
        """The variant among those that share its baseline."""
        own = [words for words in self.variant.setting if words not in self.baseline.setting]
        return ", ".join([self.variant.name, *own])


@dataclass(frozen=True)
class Section:
    """All comparisons at one budget, baseline by baseline, the one with most comparisons first."""

    budget: str
    groups: tuple[tuple[Variant, tuple[Comparison, ...]], ...]

    @property
    def comparisons(self) -> list[Comparison]:
        return [comparison for _, found in self.groups for comparison in found]


def is_baseline(variant: Variant) -> bool:
    """A baseline's preset, with nothing but its MLP widened."""
    axes = {axis: value for axis, value in variant.axes.items() if axis != "mlp_hidden"}
    changed = any(run.preset.endswith(CHANGED) for run in variant.runs)
    return variant.preset in BASELINE_PRESETS and (not changed or axes == PRESETS[variant.preset])


def budgets(variant: Variant, baseline: Variant) -> set[str]:
    """At which of "flops", "tokens", "params" the two can be compared: none, one, or two where they coincide."""
    plans = [v.first.plan for v in (variant, baseline)]
    tokens = [plan.get("total_tokens") for plan in plans]
    equal_tokens = None not in tokens and tokens[0] == tokens[1]
    if baseline.widened:
        total = [(plan.get("num_params") or {}).get("total") for plan in plans]
        near = all(total) and abs(total[0] / total[1] - 1) <= PARAMS_TOLERANCE
        return {"params"} if equal_tokens and near and not variant.widened else set()
    found = {"tokens"} if equal_tokens else set()
    flops, steps = [v.flops for v in (variant, baseline)], [plan.get("num_iterations") for plan in plans]
    if all(flops) and all(steps) and abs(flops[0] - flops[1]) <= max(f / n for f, n in zip(flops, steps, strict=True)):
        found.add("flops")
    return found


def comparable(variant: Variant, baseline: Variant) -> bool:
    """Whether both saw the same text in the same batches and are scored on the same held-out text."""
    names = (variant.identity.keys() | baseline.identity.keys()) - OWN - RATES - HELD_OUT
    same = all(variant.identity.get(name) == baseline.identity.get(name) for name in names)
    return same and same_validation(variant.first, baseline.first)


def _closest(variant, baselines) -> Variant:
    """Of several the one with most rates equal; the first of those."""
    return max(baselines, key=lambda b: sum(variant.identity.get(n) == b.identity.get(n) for n in RATES))


def find_baselines(variants, name: str | None = None) -> list[Variant]:
    """What others are measured against: the variant of the run `name`, else by preset, else those without a bank.

    ValueError for an unknown name.
    """
    if name is None:
        by_preset = [v for v in variants if is_baseline(v)]
        return by_preset or [v for v in variants if not v.first.plan.get("bov_layers")]
    names = [run.name for v in variants for run in v.runs]
    if name not in names:
        raise ValueError(f"--baseline {name}: no such run; use one of {', '.join(names)}")
    return [v for v in variants if name in [run.name for run in v.runs]]


def compare(variants, name: str | None = None) -> list[Section]:
    """The sections "flops", "tokens", "params" that have comparisons; `name` as in find_baselines."""
    baselines = find_baselines(variants, name)
    pairs = {budget: [] for budget in BUDGETS}
    for variant in variants:
        others = [b for b in baselines if b is not variant and (variant not in baselines or variant.widened)]
        others = [b for b in others if (same_validation(variant.first, b.first) if name else comparable(variant, b))]
        for budget in BUDGETS:
            if found := [b for b in others if budget in budgets(variant, b)]:
                pairs[budget].append((variant, _closest(variant, found)))
    for base in baselines:
        _keep_one(pairs, base)
    return [_section(budget, found) for budget, found in pairs.items() if found]


def _keep_one(pairs, base):
    """Variants that cost a token as much as `base` meet it at two budgets at once: kept with those that meet at one."""
    flops, tokens = ({v for v, other in pairs[budget] if other is base} for budget in ("flops", "tokens"))
    both = flops & tokens
    if flops > both and tokens > both:
        return
    budget = "tokens" if flops > both else "flops"
    pairs[budget] = [(v, other) for v, other in pairs[budget] if other is not base or v not in both]


def pair_seeds(variant: Variant, other: Variant) -> tuple[tuple, Paired | None]:
    """(the seeds that both have finished, variant - other over them); None where there is no such seed."""
    ours, theirs = variant.bpb, other.bpb
    seeds = tuple(sorted(ours.keys() & theirs.keys(), key=str))
    return seeds, paired([ours[s] for s in seeds], [theirs[s] for s in seeds]) if seeds else None


def _section(budget, pairs) -> Section:
    made = [Comparison(budget, variant, base, *pair_seeds(variant, base)) for variant, base in pairs]
    corrected = holm([c.stat and c.stat.p for c in made])
    made = [replace(c, holm=p) for c, p in zip(made, corrected, strict=True)]
    groups = [(b, tuple(c for c in made if c.baseline is b)) for b in dict.fromkeys(base for _, base in pairs)]
    return Section(budget, tuple(sorted(groups, key=lambda g: (-len(g[1]), g[0].epochs or 0))))


def baseline_runs(sections) -> dict[str, Run]:
    """run name -> the run of the same seed it is measured against; the narrow baseline where there are two."""
    found = {}
    for comparison in (c for section in sections for c in section.comparisons):
        theirs = {run.seed: run for run in reversed(comparison.baseline.runs)} | comparison.baseline.finished
        for run in comparison.variant.runs:
            if run.seed in theirs:
                found.setdefault(run.name, theirs[run.seed])
    return found
