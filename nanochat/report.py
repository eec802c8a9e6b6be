"""What finished and running trainings say about themselves: metrics.jsonl, DONE.json, core.json, context.json -> runs.

A run is one checkpoint folder. Nothing else is read, no checkpoint and no model. Units: tokens, FLOPs, seconds, bytes;
bpb is bits per byte of the held-out text, lower is better.
"""

import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from nanochat.metrics import read_metrics

COEFFICIENT = re.compile(r"(\d+)\.(\w+)")


@dataclass(frozen=True)
class Run:
    """One training: header, train and eval lines in the order of steps, end line, and the JSON files that are there."""

    folder: Path
    name: str
    header: dict
    train: list
    evals: list
    end: dict | None
    done: dict | None
    core: dict | None
    context: dict | None

    @property
    def preset(self) -> str:
        return self.header.get("preset") or "none"

    @property
    def seed(self):
        return self.header.get("seed")

    @property
    def config(self) -> dict:
        return self.header.get("config") or {}

    @property
    def data(self) -> dict:
        return self.header.get("data") or {}

    @property
    def finished(self) -> bool:
        return self.done is not None

    @property
    def plan(self) -> dict:
        return self.header.get("plan") or {}

    @property
    def last(self) -> dict:
        """The newest line that counts tokens; empty before the first step."""
        lines = [line for line in (self.train[-1:] + self.evals[-1:]) if line.get("tokens") is not None]
        return max(lines, key=lambda line: line["step"], default={})


# ---------------------------------------------------------------------------- reading


def load_run(folder) -> Run:
    """A checkpoint folder as a Run; ValueError when it has no metrics.jsonl that starts with a header."""
    folder = Path(folder)
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{folder}: no metrics.jsonl there; give the checkpoint folder of a training run")
    try:
        records = read_metrics(metrics)
    except UnicodeDecodeError as error:
        raise ValueError(f"{metrics}: damaged, not text at byte {error.start}; leave the run out") from error
    if not records or not all(isinstance(record, dict) for record in records) or records[0].get("kind") != "header":
        raise ValueError(f"{metrics}: the first line is no header; the run did not start, or this is another file")
    done = _optional_json(folder / "DONE.json")
    of_kind = {kind: [r for r in records if r.get("kind") == kind] for kind in ("train", "eval", "end")}
    return Run(
        folder=folder,
        name=folder.resolve().name,
        header=records[0],
        train=of_kind["train"],
        evals=of_kind["eval"],
        end=of_kind["end"][-1] if of_kind["end"] else None,
        done=done,
        core=_evaluation(folder / "core.json", done),
        context=_evaluation(folder / "context.json", done),
    )


def _evaluation(path, done):
    """The content of `path`; None, and a line that says so, where it is of other weights than the finished run's."""
    found = _optional_json(path)
    theirs, ours = ((facts or {}).get("checkpoint_sha256") for facts in (found, done))
    if theirs and ours and theirs != ours:
        print(f"{path}: of step {found.get('step')}, not of the finished run's weights; left out")
        return None
    return found


def _optional_json(path):
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); make it anew or take it away") from error


# ---------------------------------------------------------------------------- one run


def final_bpb(run: Run) -> float | None:
    """bpb of the finished run, else of its newest evaluation; None where nothing was evaluated."""
    if run.done and run.done.get("val_bpb") is not None:
        return run.done["val_bpb"]
    return next((e["val_bpb"] for e in reversed(run.evals) if e.get("val_bpb") is not None), None)


def epochs_seen(run: Run) -> float | None:
    """How often the run has read its training data: the plan's expectation, scaled to the tokens seen so far."""
    expected, total = run.plan.get("expected_epochs"), run.plan.get("total_tokens")
    if expected is None or not total:
        return None
    return expected * run.last.get("tokens", 0) / total


def curve(run: Run, x: str) -> dict[int, tuple[float, float]]:
    """step -> (x, bpb) of every evaluation after step 0 that has both; x one of "tokens", "flops", "seconds"."""
    scored = [e for e in run.evals if e["step"] > 0 and e.get(x) is not None and e.get("val_bpb") is not None]
    return {e["step"]: (e[x], e["val_bpb"]) for e in scored}


def coefficients(record: dict) -> dict[tuple[int, str], list[float]]:
    """(layer, name) -> values of an eval line's `coeffs`, sorted by layer; model-wide scalars are left out."""
    found = {}
    for key, values in (record.get("coeffs") or {}).items():
        if match := COEFFICIENT.fullmatch(key):
            found[int(match[1]), match[2]] = values if isinstance(values, list) else [values]
    return dict(sorted(found.items()))


def bank_coefficients(run: Run) -> dict[tuple[int, str], list[float]]:
    """The newest evaluation's coefficients of the bank layers."""
    return next((found for e in reversed(run.evals) if (found := coefficients(e))), {})


# ---------------------------------------------------------------------------- runs against each other


def same_validation(run: Run, other: Run) -> bool:
    """bpb of two runs can be compared only on the same part of the same held-out text.

    The shard's hash counts where the text's is unknown.
    """
    if run.header.get("eval_tokens") != other.header.get("eval_tokens"):
        return False
    field = "val_text_sha" if all(r.data.get("val_text_sha") for r in (run, other)) else "val_sha"
    return run.data.get(field) == other.data.get(field)


def difference(run: Run, baseline: Run | None) -> float | None:
    """final bpb of `run` minus that of `baseline`; None where there is nothing to compare or one is unfinished."""
    if baseline is None or baseline is run or not (run.finished and baseline.finished):
        return None
    ours, theirs = final_bpb(run), final_bpb(baseline)
    return None if ours is None or theirs is None or not same_validation(run, baseline) else ours - theirs


def difference_curve(run: Run, baseline: Run) -> list[tuple[float, float]]:
    """(tokens, bpb minus the baseline's bpb) where both were evaluated after the same number of tokens."""
    if not same_validation(run, baseline):
        return []
    theirs = dict(curve(baseline, "tokens").values())
    return [(tokens, bpb - theirs[tokens]) for tokens, bpb in curve(run, "tokens").values() if tokens in theirs]


def row(run: Run, baseline: Run | None = None) -> dict:
    """Everything a table shows of a run, against `baseline` where one is given; a value nobody recorded is None."""
    params = run.plan.get("num_params") or {}
    speeds = [line["tok_per_sec"] for line in run.train if line.get("tok_per_sec")]
    peaks = [e["peak_bytes"] for e in [*run.evals, run.end or {}] if e.get("peak_bytes")]
    return {
        "name": run.name,
        "preset": run.preset,
        "seed": run.seed,
        "finished": run.finished,
        "step": run.last.get("step", 0),
        "steps": run.plan.get("num_iterations"),
        "params": params.get("total"),
        "params_without_tables": params.get("without_tables"),
        "flops_per_token": run.plan.get("flops_per_token"),
        "tokens": run.last.get("tokens", 0),
        "flops": run.last.get("flops"),
        "seconds": run.last.get("seconds"),
        "epochs": epochs_seen(run),
        "val_bpb": final_bpb(run),
        "baseline": None if baseline is None or baseline is run else baseline.name,
        "difference": difference(run, baseline),
        "coefficients": bank_coefficients(run),
        "tok_per_sec": statistics.median(speeds) if speeds else None,
        "peak_bytes": max(peaks, default=None),
        "core": (run.core or {}).get("core_metric"),
    }
