"""The paper's runs as scripts: what a dry run says on every budget, which variants there are, failures by name."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from nanochat.plan import plan_run
from scripts import paper_plan
from scripts.base_train import parser

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = ("flops", "tokens", "params")
STEPS = {  # (depth, budget) -> baseline, BoV
    (12, "flops"): (3766, 3838),
    (12, "tokens"): (3766, 3766),
    (12, "params"): (3766, 3766),
    (24, "flops"): (7809, 7998),
    (24, "tokens"): (95367, 95367),
    (24, "params"): (7809, 7809),
}
# depth -> width, heads, batch; baseline and BoV: millions without tables, FLOPs a token, K+V bytes a token; table
SIZES = {
    12: (768, 6, 2**19, (135.3, 132.9), (759_693_312, 745_537_536), (36_864, 30_720), 100_663_296),
    24: (1536, 12, 2**20, (780.1, 761.3), (4_775_215_104, 4_661_968_896), (147_456, 122_880), 402_653_184),
}
NO_BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")


def script(depth, *words, name=None, **env):
    """runs/bov_d{depth}.sh, or the script `name` with `words`."""
    names = (
        "NANOCHAT_BASE_DIR",
        "NANOCHAT_DTYPE",
        "SMOKE",
        "SEEDS",
        "VARIANTS",
        "BUDGET",
        "WANDB_RUN",
        "NPROC",
        "SCALE",
    )
    clean = {k: v for k, v in os.environ.items() if k not in names and not k.startswith("PET_")}
    clean["CUDA_VISIBLE_DEVICES"] = ""  # the same on machines with and without GPUs
    command = ["bash", str(ROOT / "runs" / (name or f"bov_d{depth}.sh")), *words]
    return subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=120, check=False)


@cache
def dry_run(depth, budget):
    """stdout of a dry run on 8 H100 (whatever is here) with the tests' own Python."""
    done = script(depth, NANOCHAT_PYTHON=sys.executable, DRY_RUN="1", BUDGET=budget)
    assert done.returncode == 0, done.stderr
    return done.stdout


def gpu_path(folder):
    """PATH with an nvidia-smi that names an H200; CUDA_VISIBLE_DEVICES says how many there are."""
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA H200\n")
    tool.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def plans(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"model_config"')]


# ---------------------------------------------------------------------------- dry runs


@NO_BASH
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("depth", SIZES)
def test_dry_run_prints_the_papers_sizes(depth, budget):
    width, heads, batch, params, flops, kv, tables = SIZES[depth]
    found = plans(dry_run(depth, budget))
    assert [plan["num_iterations"] for plan in found] == list(STEPS[depth, budget])
    assert [plan["total_tokens"] for plan in found] == [steps * batch for steps in STEPS[depth, budget]]
    assert [plan["num_params"]["value_tables"] for plan in found] == [0, tables]
    assert [plan["kv_bytes_per_token"] for plan in found] == list(kv)
    for plan in found:
        assert (plan["model_config"]["n_embd"], plan["model_config"]["n_head"]) == (width, heads)
        assert plan["total_batch_size"] == batch
        assert plan["weight_decay"] == pytest.approx(0.28 if depth == 12 else 0.0597, rel=1e-3)
    own = found[1:] if budget == "params" else found  # there the baseline is wider
    assert [round(p["num_params"]["without_tables"] / 1e6, 1) for p in own] == list(params[-len(own) :])
    assert [p["flops_per_token"] for p in own] == list(flops[-len(own) :])


@NO_BASH
@pytest.mark.parametrize("depth", SIZES)
def test_params_budget_matches_total_parameters(depth):
    baseline, bov = plans(dry_run(depth, "params"))
    totals = [plan["num_params"]["total"] for plan in (baseline, bov)]
    assert abs(totals[0] / totals[1] - 1) <= 0.005
    assert baseline["model_config"]["mlp_hidden"] % 128 == 0
    assert baseline["lr"] == bov["lr"] and baseline["weight_decay"] == pytest.approx(bov["weight_decay"], rel=1e-9)


@NO_BASH
def test_dry_run_prints_every_command_memory_and_hours():
    text = dry_run(24, "flops")
    wanted = [f"d24_flops_{variant}_s{seed}" for seed in (0, 1, 2) for variant in ("baseline", "bov")]
    trained = re.findall(r"torchrun .*--nproc_per_node=8 .*scripts.base_train --model-tag (\S+)", text)
    assert trained == wanted
    assert re.findall(r"scripts.base_eval --model-tag (\S+)", text) == wanted
    for part in ("nanochat.dataset --source climbmix -n 10\n", "scripts.tok_train --vocab-size 32768", "bov_report"):
        assert part in text, part
    assert len(re.findall(r"^memory .* GiB a rank", text, re.M)) == 2
    assert len(re.findall(r"^time .* 8 x H100, 989 TFLOP/s each at an assumed MFU of 40%", text, re.M)) == 2
    assert all(plan["train_bytes_per_rank"] > 2**30 for plan in plans(text))
    (shards,) = re.findall(r"climbmix -n (\d+) &", text)
    assert max(plan["shards"] for plan in plans(text)) <= int(shards) <= 1.06 * max(p["shards"] for p in plans(text))


@NO_BASH
def test_models_differ_in_preset_and_horizon_only():
    lines = [line for line in dry_run(12, "tokens").splitlines() if "scripts.base_train" in line][:2]
    one, two = (line.split() for line in lines)
    assert [(a, b) for a, b in zip(one, two, strict=True) if a != b] == [
        ("d12_tokens_baseline_s0", "d12_tokens_bov_s0"),
        ("paper/baseline", "paper/bov"),
    ]


@NO_BASH
def test_dry_run_without_any_environment(tmp_path):
    base = tmp_path / "base"
    done = script(12, DRY_RUN="1", NANOCHAT_PYTHON="/nowhere/python", NANOCHAT_BASE_DIR=str(base), SEEDS="7")
    assert done.returncode == 0, done.stderr
    assert "once set-up has run" in done.stdout and "d12_flops_bov_s7" in done.stdout and not base.exists()


@NO_BASH
@pytest.mark.parametrize(
    "env, message",
    [
        ({"BUDGET": "steps"}, "BUDGET=steps: use flops, tokens or params"),
        ({"PET_NNODES": "2"}, "set PET_NODE_RANK too, 0 to 1"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "2"}, "PET_NODE_RANK=2: use 0 to 1"),
        ({"NPROC": "0"}, "use a number of ranks"),
        ({"PET_NPROC_PER_NODE": "gpu"}, "use a number of ranks"),
        ({"SEEDS": "0,1"}, "0,1 is not a whole number"),
        ({"SEEDS": "7 07"}, "07 is not a whole number"),
        ({"SEEDS": "9" * 20}, "9 is not a whole number of at most 9 digits"),
        ({"SEEDS": " "}, "SEEDS is empty"),
        ({"VARIANTS": "\n"}, "VARIANTS is empty"),
        ({"SCALE": "cpu"}, "only runs/ablations.sh"),
        ({"SCALE": "GPU"}, "SCALE=GPU: use gpu or cpu"),
        ({"DRY_RUN": "yes"}, "DRY_RUN=yes: use 1 or 0"),
        ({"SMOKE": "true"}, "SMOKE=true: use 1 or 0"),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_wrong_settings_are_named(env, message):
    done = script(12, **{"DRY_RUN": "1", "NANOCHAT_PYTHON": "/nowhere/python"} | env)
    assert done.returncode == 2 and message in done.stderr


@NO_BASH
def test_words_count_once_and_stand_on_any_line():
    done = script(
        12,
        DRY_RUN="1",
        NANOCHAT_PYTHON="/nowhere/python",
        SEEDS="3\n4 3",
        VARIANTS="baseline\nbov paper/baseline paper/bov\n",
    )
    tags = re.findall(r"scripts.base_train --model-tag (\S+)", done.stdout)
    assert tags == [f"d12_flops_{variant}_s{seed}" for seed in (3, 4) for variant in ("baseline", "bov")]


@NO_BASH
def test_variables_of_the_callers_shell_name_no_folder():
    done = script(12, DRY_RUN="1", NANOCHAT_PYTHON="/nowhere/python", NAME="myhost")
    assert done.stdout.startswith(f"everything goes to {ROOT}/out/bov_d12\n")


def test_unknown_variant_is_named():
    with pytest.raises(SystemExit, match="'paper/bof'"):
        paper_plan.main(["--flops", "1e18", "--variants", "baseline paper/bof", "--", "--vocab-size", "32768"])


@NO_BASH
def test_two_nodes_meet_by_torchruns_variables():
    common = dict(DRY_RUN="1", NANOCHAT_PYTHON="/nowhere/python", NPROC="4", PET_NNODES="2", SEEDS="0")
    first, second = (script(24, PET_NODE_RANK=rank, **common).stdout for rank in "01")
    for text in (first, second):
        assert (
            "WORLD_SIZE=8" in text
            and "torchrun --nproc_per_node=4 --shutdown-timeout=300 -m -- scripts.base_train" in text
        )
    assert "nanochat.dataset" in first and "bov_report" in first
    assert "nanochat.dataset" not in second and "bov_report" not in second and "waiting for node 0" in second


@NO_BASH
@pytest.mark.parametrize("visible, ranks", [("0,1,2,3,4,5,6,7", 8), ("0,1,2,3,4,5", 4), ("3", 1)])
def test_ranks_are_visible_gpus_that_divide_the_batch(tmp_path, visible, ranks):
    done = script(
        12, DRY_RUN="1", NANOCHAT_PYTHON="/nowhere/python", CUDA_VISIBLE_DEVICES=visible, PATH=gpu_path(tmp_path)
    )
    assert f"--nproc_per_node={ranks} " in done.stdout and "--gpu NVIDIA\\ H200" in done.stdout


@NO_BASH
def test_more_ranks_than_gpus_can_be_planned_and_not_run(tmp_path):
    env = dict(NANOCHAT_PYTHON="/nowhere/python", CUDA_VISIBLE_DEVICES="0,1", PATH=gpu_path(tmp_path), NPROC="8")
    done = script(12, **env)
    assert done.returncode == 2 and done.stderr == "NPROC (or PET_NPROC_PER_NODE) = 8: 2 GPU(s) are visible\n"
    assert "--nproc_per_node=8 " in script(12, DRY_RUN="1", **env).stdout


@pytest.mark.parametrize("depth, rows", [(12, 32), (24, 16)])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_the_total_batch_is_the_same_on_any_number_of_gpus(depth, rows, ranks):
    script_text = (ROOT / f"runs/bov_d{depth}.sh").read_text()
    assert f"DEVICE_BATCH:-{rows}" in script_text
    flags = ["--preset", "paper/bov", "--muon", "paper", "--depth", str(depth), "--target-flops", "1e19"]
    _, plan = plan_run(parser().parse_args([*flags, "--device-batch-size", str(rows)]), 32768, ranks)
    assert plan.total_batch_size == SIZES[depth][2] == rows * 2048 * ranks * plan.grad_accum_steps


@NO_BASH
def test_a_driver_that_fails_is_named(tmp_path):
    path = gpu_path(tmp_path)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no driver\nexit 9\n")
    done = script(12, NANOCHAT_PYTHON="/nowhere/python", CUDA_VISIBLE_DEVICES="0", PATH=path)
    assert done.returncode == 2 and done.stderr == "nvidia-smi does not work: no driver\n"


# ---------------------------------------------------------------------------- ablations


def ablations(*presets, **env):
    """[(tag, words of base_train)] of a dry run of runs/ablations.sh, and what it printed."""
    done = script(None, *presets, name="ablations.sh", NANOCHAT_PYTHON=sys.executable, DRY_RUN="1", **env)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "scripts.base_train --model-tag" in line]
    return [(words[words.index("--model-tag") + 1], words) for words in lines], done.stdout


@NO_BASH
def test_ablations_are_table_1_and_figure_5b():
    runs, text = ablations(SEEDS="0")
    presets = [words[words.index("--preset") + 1] for _, words in runs]
    fig5b = ["fig5b/shared", "fig5b/no_coeff", "fig5b/every_layer", "fig5b/add_v"]
    assert presets == [*(f"table1/{i}" for i in range(1, 14)), "paper/bov", *fig5b]
    assert all("--depth 12" in " ".join(words) and "1.5e+18" in words for _, words in runs)
    steps = dict(zip(presets, (plan["num_iterations"] for plan in plans(text)), strict=True))
    assert (steps["table1/1"], steps["table1/3"], steps["table1/13"], steps["paper/bov"]) == (3766, 3969, 3697, 3838)


@NO_BASH
def test_ablations_of_named_presets_bring_their_baseline():
    runs, _ = ablations("paper/bov", "bov:bov-coeff=head,bov-layers=last:1/2", SEEDS="0 5", DEPTH="24", FLOPS="3.91e19")
    tags = [tag.removeprefix("d24_flops_") for tag, _ in runs]
    variants = ["baseline", "bov", "bov_bov-coeff_head_bov-layers_last_1_2"]
    assert tags == [f"{variant}_s{seed}" for seed in (0, 5) for variant in variants]
    assert " ".join(runs[2][1]).count("--bov-coeff head --bov-layers last:1/2") == 1


@NO_BASH
def test_ablations_on_a_cpu_share_everything_but_the_variant():
    runs, text = ablations(SCALE="cpu", SEEDS="0 1 2")
    assert len(runs) == len({tag for tag, _ in runs}) == 3 * len(plans(text)) and len(plans(text)) >= 8
    assert len({plan["total_tokens"] for plan in plans(text)}) == 1
    own = ("--model-tag", "--seed", "--preset", "--train-part", "--table-lr-scale", "--table-weight-decay")

    def shared(words):
        return [w for before, w in zip(["", *words], words, strict=False) if w not in own and before not in own]

    assert all(shared(words) == shared(runs[0][1]) for _, words in runs)
    assert "nanochat.dataset --source sotu" in text and "scripts.base_eval" not in text


def test_a_value_may_be_a_list():
    flags = paper_plan.preset_flags("bov:bov-layers=8,9,bov-coeff=head")
    assert flags == ["--preset", "paper/bov", "--bov-layers", "8,9", "--bov-coeff", "head"]


def test_every_standard_attention_is_widened_to_match():
    common = ["--depth", "12", "--vocab-size", "32768"]
    variants = [
        "baseline",
        "table1/1",
        "baseline:weight-decay=0.1",
        "baseline:mlp-hidden=4096",
        "bov",
        "table3/ve_gated",
    ]
    found = paper_plan.budget_flags(variants, "params", 1.5e18, 0, common)
    plans = [paper_plan._planned([*common, *flags], 1) for flags in found.values()]
    assert [args.mlp_hidden for args, _, _ in plans] == [8448, 8448, 8448, 4096, None, None]
    assert [plan.weight_decay for _, _, plan in plans[:3]] == pytest.approx([0.28, 0.28, 0.1], rel=1e-9)
    assert len({(plan.total_tokens, plan.total_batch_size) for _, _, plan in plans}) == 1


@pytest.mark.parametrize("flags", ["seed=5", "model-tag=x", "bov-coeff=head,run=y"])
def test_what_each_run_has_of_its_own_is_no_variant(flags):
    with pytest.raises(ValueError, match="is set for each run"):
        paper_plan.preset_flags(f"bov:{flags}")


@pytest.mark.parametrize("variant", ["bov:", "bov:bov-coeff", "bov:=head", "bov:bov-coeff="])
def test_flags_of_a_variant_are_whole(variant):
    if variant == "bov:":
        assert paper_plan.preset_flags(variant) == ["--preset", "paper/bov"]
        return
    with pytest.raises(ValueError, match="FLAG=VALUE"):
        paper_plan.preset_flags(variant)


# ---------------------------------------------------------------------------- runs with a stand-in for Python


@pytest.fixture
def stand_in(tmp_path):
    """A Python that writes what it is asked into a log, plans two runs, trains the ones it is not told to fail."""
    log, python = tmp_path / "calls.txt", tmp_path / "python"
    python.write_text(
        f"""#!/bin/bash
echo "$*" >>"{log}"
case "$*" in *base_eval*)
    mkdir -p "$NANOCHAT_BASE_DIR/base_eval"
    touch "$NANOCHAT_BASE_DIR/base_eval/$(sed 's/.*--model-tag \\([^ ]*\\).*/\\1/' <<<"$*")_000024.json" ;;
esac
case "$*" in
*paper_plan*) printf 'shards\\t77\\nflags\\tbaseline\\t--preset a\\nflags\\tbov\\t--preset b\\n' ;;
*"${{FAIL:-nothing}}"*) echo "no such luck" >&2; exit 7 ;;
*base_train*)
    tag=$(sed 's/.*--model-tag \\([^ ]*\\).*/\\1/' <<<"$*")
    dir=$NANOCHAT_BASE_DIR/base_checkpoints/$tag
    mkdir -p "$dir"
    if [ -f "$dir/DONE.json" ]; then exit 0; fi
    for step in 08 24; do touch "$dir"/{{model_0000$step.pt,meta_0000$step.json,optim_0000${{step}}_rank0.pt}}; done
    case "$*" in *"${{STOP:-nothing}}"*) exit 0 ;; esac
    touch "$dir/DONE.json" ;;
*tok_train*) mkdir -p "$NANOCHAT_BASE_DIR/tokenizer" ;;
esac
"""
    )
    python.chmod(0o755)

    def call(**env):
        log.unlink(missing_ok=True)
        base = dict(SMOKE="1", NANOCHAT_PYTHON=str(python), NANOCHAT_BASE_DIR=str(tmp_path / "base"))
        done = script(24, **base | env)
        return done, log.read_text().splitlines()

    return call, tmp_path / "base"


@NO_BASH
def test_failed_variant_is_named_and_the_others_go_on(stand_in):
    call, _ = stand_in
    done, calls = call(FAIL="--model-tag d24_flops_baseline")
    assert done.returncode == 1
    assert "FAILED: training d24_flops_baseline_s0" in done.stderr and "bov_s0 FAILED" not in done.stderr
    assert any("d24_flops_bov_s0" in line and "base_train" in line for line in calls)
    assert "d24_flops_baseline_s0" not in next(line for line in calls if "bov_report" in line)


@NO_BASH
def test_a_run_stopped_before_its_end_is_named(stand_in):
    call, base = stand_in
    done, _ = call(STOP="--model-tag d24_flops_bov")
    assert done.returncode == 1 and "d24_flops_bov_s0: stopped before its end" in done.stderr
    assert "FAILED: training d24_flops_bov_s0" in done.stderr


@NO_BASH
def test_failed_evaluation_is_named(stand_in):
    done, calls = stand_in[0](FAIL="base_eval --model-tag d24_flops_bov")
    assert done.returncode == 1 and "FAILED: evaluation d24_flops_bov_s0" in done.stderr
    assert any("bov_report" in line for line in calls)


@NO_BASH
def test_evaluation_that_ended_midway_is_repeated(stand_in):
    call, base = stand_in
    call(FAIL="base_eval --model-tag d24_flops_bov")
    assert (base / "base_eval" / "d24_flops_bov_s0_000024.json").exists()  # the first of its results
    for tags in (["d24_flops_bov_s0"], []):
        done, calls = call()
        assert done.returncode == 0, done.stderr
        assert [line.split("--model-tag ")[1].split()[0] for line in calls if "base_eval" in line] == tags


@NO_BASH
def test_any_folder_will_do(stand_in, tmp_path):
    done, calls = stand_in[0](NANOCHAT_BASE_DIR=str(tmp_path / "a & b's [c]"))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "a & b's [c]" / "base_checkpoints" / "d24_flops_bov_s0"
    assert str(folder) in next(line for line in calls if "bov_report" in line)


@NO_BASH
@pytest.mark.parametrize("name", ["", "my run"])
def test_wandb_gets_a_run_per_training(stand_in, name):
    done, calls = stand_in[0](WANDB_RUN=name)
    assert done.returncode == 0, done.stderr
    runs = [re.search(r" --run (.*?) --seed", line)[1] for line in calls if "base_train" in line and "--run" in line]
    tags = ["d24_flops_baseline_s0", "d24_flops_bov_s0"]
    assert runs == ([f"{name}-{tag}" for tag in tags] if name else ["dummy", "dummy"])


@NO_BASH
def test_failed_data_ends_the_run(stand_in):
    done, calls = stand_in[0](FAIL="nanochat.dataset")
    assert done.returncode == 7 and not any("base_train" in line for line in calls)


@NO_BASH
def test_failed_download_behind_the_tokenizer_ends_the_run(stand_in, tmp_path):
    done, calls = stand_in[0](FAIL="-n 77", SMOKE="0", CUDA_VISIBLE_DEVICES="0", PATH=gpu_path(tmp_path))
    assert done.returncode == 1 and "no such luck" in done.stderr
    assert any("tok_train" in line for line in calls) and not any("base_train" in line for line in calls)


@NO_BASH
def test_a_training_keeps_its_two_newest_checkpoints(stand_in):
    done, calls = stand_in[0]()
    assert done.returncode == 0, done.stderr
    assert {"--keep-last 2" in line for line in calls if "base_train" in line and "--dry-run" not in line} == {True}


@NO_BASH
def test_result_without_its_checkpoint_is_not_evaluated(stand_in):
    call, base = stand_in
    call()
    folder = base / "base_checkpoints" / "d24_flops_bov_s0"
    for path in folder.glob("*.pt"):
        path.unlink()
    shutil.rmtree(base / "base_eval")  # as if nothing was evaluated
    done, calls = call()
    assert done.returncode == 0, done.stderr
    assert [line.split("--model-tag ")[1].split()[0] for line in calls if "base_eval" in line] == [
        "d24_flops_baseline_s0"
    ]
    assert "d24_flops_bov_s0" in next(line for line in calls if "bov_report" in line)


@NO_BASH
def test_recorded_runs_are_recalled_where_there_is_none(stand_in, tmp_path):
    call, base = stand_in
    for tag in ("d24_flops_baseline_s0", "d24_flops_bov_s0"):
        folder = tmp_path / "kept" / tag
        folder.mkdir(parents=True)
        for name in ("metrics.jsonl", "DONE.json"):
            (folder / name).write_text(f"{name} of {tag}")
    half = base / "base_checkpoints" / "d24_flops_bov_s0"
    half.mkdir(parents=True)
    (half / "model_000008.pt").touch()
    done, calls = call(RESULTS=str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    recalled = base / "base_checkpoints" / "d24_flops_baseline_s0"
    assert {path.name for path in recalled.iterdir()} == {"metrics.jsonl", "DONE.json"}
    assert (recalled / "DONE.json").read_text() == "DONE.json of d24_flops_baseline_s0"
    assert not (half / "metrics.jsonl").exists(), "a run at work goes on"
    assert [line for line in calls if "base_train" in line and "baseline" in line], "the trainer checks the settings"
    _, dry = ablations("fig5b/shared", SCALE="cpu", SEEDS="0", NANOCHAT_BASE_DIR=str(tmp_path / "none"))
    assert dry.count("(a record of it is in") == 2, "the repository has both, at equal tokens"
