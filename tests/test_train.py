"""The trainer on a tiny corpus: command line, plan, record, stopping."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core_items import write_bundle
from nanochat import metrics, train
from nanochat.bov import compiled
from nanochat.bov.compiled import Fused
from nanochat.checkpoint_manager import list_steps
from nanochat.plan import plan_run, plan_summary
from scripts import base_train
from tiny import TINY
from trainings import assert_same_weights, base, corpus, finished, flags, go, handlers, losses, weights  # noqa: F401

# ---------------------------------------------------------------------------- plan and command line


@pytest.mark.parametrize(
    ("depth", "preset", "target", "steps", "flops", "without_tables", "tables", "kv"),
    [
        (12, "paper/baseline", 1.5e18, 3766, 759_693_312, 135.3e6, 0, 36864),
        (12, "paper/bov", 1.5e18, 3838, 745_537_536, 132.9e6, 100_663_296, 30720),
        (24, "paper/baseline", 3.91e19, 7809, 4_775_215_104, 780.1e6, 0, 147456),
        (24, "paper/bov", 3.91e19, 7998, 4_661_968_896, 761.3e6, 402_653_184, 122880),
    ],
)
def test_dry_run_gives_the_numbers_of_the_paper(
    depth, preset, target, steps, flops, without_tables, tables, kv, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "none"))
    base_train.main([
        "--depth", str(depth), "--preset", preset, "--target-flops", str(target), "--vocab-size", "32768", "--dry-run"
    ])  # fmt: skip
    assert not (tmp_path / "none").exists()
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    batch, lr, decay = {
        12: (2**19, (0.02, 0.3, 0.008, 0.5, 0.15), 0.28),
        24: (2**20, (0.0283, 0.3, 0.008, 0.707, 0.15), 0.0597),
    }[depth]
    assert (plan["num_iterations"], plan["total_batch_size"], plan["total_tokens"]) == (steps, batch, steps * batch)
    assert (plan["flops_per_token"], plan["total_flops"]) == (flops, flops * steps * batch)
    assert (plan["model_config"]["n_embd"], plan["model_config"]["n_head"]) == (depth * 64, depth // 2)
    assert plan["num_params"]["without_tables"] == pytest.approx(without_tables, abs=0.05e6)
    names = ("matrix", "embedding", "unembedding", "scalar", "value_table")
    assert [plan["lr"][name] for name in names] == pytest.approx(lr, rel=1e-3)
    assert plan["weight_decay"] == pytest.approx(decay, rel=1e-3)
    assert plan["num_params"]["value_tables"] == tables
    assert plan["kv_bytes_per_token"] == kv * 2  # the tests compute in fp32; the paper in bf16
    assert plan["bov_layers"] == (list(range(depth * 2 // 3, depth)) if tables else [])
    counts = plan["num_params"]
    assert counts["total"] == sum(counts[k] for k in ("wte", "value_tables", "lm_head", "matrices", "scalars"))
    assert counts["without_tables"] == counts["total"] - tables


def test_lr_scale_is_a_factor_on_every_rate(capsys):
    plans = []
    for more in ([], ["--lr-scale", "3", "--table-lr-scale", "0.125", "--table-weight-decay", "0.4"]):
        base_train.main(["--depth", "6", "--preset", "paper/bov", "--vocab-size", "4096", "--dry-run", *more])
        plans.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    default, scaled = (plan["lr"] for plan in plans)
    wanted = {name: 3 * rate for name, rate in default.items()} | {"value_table": 3 * default["embedding"] / 8}
    assert scaled == pytest.approx(wanted) and plans[0]["weight_decay"] == plans[1]["weight_decay"]
    assert [plan["table_weight_decay"] for plan in plans] == [0.01, 0.4]


@pytest.mark.parametrize(
    ("preset", "more", "steps"),
    [
        ("table1/13", ["--target-flops", "1.5e18"], 3697), ("table1/3", ["--target-flops", "1.5e18"], 3969),
        ("table1/4", ["--target-flops", "1.5e18"], 3874), ("table1/9", ["--target-flops", "1.5e18"], 3766),
        ("fig5b/every_layer", ["--target-flops", "1.5e18"], 3989),
        ("paper/bov", ["--depth", "24", "--target-tokens", "100e9"], 95367),
    ],
)  # fmt: skip
def test_dry_run_gives_the_steps_of_other_variants(preset, more, steps, capsys):
    base_train.main(["--depth", "12", "--preset", preset, "--vocab-size", "32768", "--dry-run", *more])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_iterations"] == steps


@pytest.mark.parametrize(
    ("compiler", "more", "expected"),
    [
        (None, [], (False, "no C++ compiler")),
        ("g++", [], (True, "compiling")),
        ("g++", ["--no-compile"], (False, "--no-compile")),
        ("g++", ["--num-iterations", "20"], (False, "under 100 steps")),
    ],
    ids=["no compiler", "compiler", "--no-compile", "short run"],
)
def test_it_compiles_where_that_pays_and_says_why(compiler, more, expected, monkeypatch):
    monkeypatch.setattr(train, "cpp_compiler", lambda: compiler)
    args = flags("--num-iterations", "120", *more)
    compiled, reason = train.choose_compile(args, torch.device("cpu"), plan_run(args, 320, 1)[1])
    assert compiled == expected[0] and expected[1] in reason


def test_explicit_layers_and_widths_apply_to_the_models_own_depth_alone():
    more = [
        "--depth",
        "24",
        "--bov-layers",
        "22,23",
        "--mlp-hidden",
        "4224",
        "--kv-heads",
        "4",
        "--target-tokens",
        "1e9",
    ]
    args = base_train.parser().parse_args(more)
    config, plan = plan_run(args, 32768, 1)
    assert (config.bov_layers, config.mlp_hidden, config.n_kv_head) == ("22,23", 4224, 4)
    assert plan_summary(config, plan)["bov_layers"] == [22, 23]


def test_an_explicit_flag_overrides_the_preset():
    config, _ = plan_run(flags("--preset", "paper/bov", "--bov-coeff", "head", "--smear", "false"), 320, 1)
    assert (config.trunk, config.bov_layers, config.bov_coeff, config.smear) == ("plain", "last:1/3", "head", False)


UPSTREAM_FLAGS = """--run --device-type --fp8 --fp8-recipe --depth --aspect-ratio --head-dim --max-seq-len
--window-pattern --num-iterations --target-flops --target-param-data-ratio --device-batch-size --total-batch-size
--embedding-lr --unembedding-lr --weight-decay --matrix-lr --scalar-lr --warmup-steps --warmdown-ratio --final-lr-frac
--resume-from-step --eval-every --eval-tokens --core-metric-every --core-metric-max-per-task --sample-every --save-every
--model-tag""".split()


def test_upstreams_flags_are_a_subset_of_ours():
    assert set(UPSTREAM_FLAGS) <= set(base_train.parser()._option_string_actions)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--fp8"], "not in this host"),
        (["--depth", "0"], "--depth 0"),
        (["--total-batch-size", "300"], "use 256 or 384"),
        (["--num-iterations", "-1", "--target-param-data-ratio", "-1"], "no horizon"),
        (["--bov-layers", "7"], "layer 7 is not one of 0..2"),
        (["--preset", "paper/boov"], "paper/bov"),
        (["--bov-layers", "all", "--bov-source", "x0", "--bov-shared"], "bov_shared"),
        (["--vocab-size", "99"], "--vocab-size 99"),
        (["--kv-heads", "4"], "--kv-heads 4: must divide the 6 query heads; use one of 1, 2, 3, 6"),
        (["--aspect-ratio", "4", "--head-dim", "4"], "the smear reads 24 channels"),
        (["--window-pattern", "SLX"], "window_pattern"),
        (["--resume-from-step", "7"], "7"),
        (["--device-type", "tpu"], "tpu"),
        (["--device-batch-size", "0"], "--device-batch-size 0"),
        (["--keep-last", "0"], "--keep-last 0: at least 1"),
        (["--target-flops", "inf"], "--target-flops inf: give a finite number"),
        (["--matrix-lr", "nan"], "--matrix-lr nan"),
        (["--matrix-lr", "-0.02"], "--matrix-lr -0.02: at least 0"),
        (["--warmdown-ratio", "1.5"], "--warmdown-ratio 1.5: at most 1"),
        (["--final-lr-frac", "-1"], "--final-lr-frac -1.0: at least 0"),
        (["--total-batch-size", "-5"], "--total-batch-size -5: at least 1, or -1 for the scaling rule"),
        (["--num-iterations", "0"], "--num-iterations 0: at least 1, or -1 for another horizon"),
        (["--max-seq-len", "1"], "--max-seq-len 1: at least 2"),
        (["--resume-from-step", "-2"], "--resume-from-step -2: at least -1"),
        (["--eval-tokens", "0"], "--eval-tokens 0: at least 1, or -1 for one pass"),
        (["--train-part", "2"], "--train-part 2.0: above 0 and at most 1"),
        (["--seed", "-1"], "--seed -1: at least 0"),
        (["--model-tag", "../t"], "--model-tag ../t: the name of a folder, not a path"),
        (["--dry-run", "--vocab-size", "0"], "--vocab-size 0: at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_trained_ends_with_one_line_before_any_work(more, message, base):
    with pytest.raises(SystemExit) as end:
        base_train.main([*TINY, "--num-iterations", "8", *more])
    assert message in str(end.value) and "\n" not in str(end.value)
    assert not list(base.glob("base_checkpoints/*/*.pt"))


# ---------------------------------------------------------------------------- record


def test_the_record_of_a_run(finished):
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in lines]
    head, *rest = entries
    assert head["kind"] == "header" and head["preset"] == "paper/bov" and head["config"]["bov_layers"] == "last:1/3"
    assert {"commit", "versions", "device", "data", "tokenizer_sha256", "seed", "plan"} <= head.keys()
    assert len(head["data"]["val_sha"]) == 64
    assert [e["step"] for e in rest if e["kind"] == "train"] == list(range(1, 9))
    evals = [e for e in rest if e["kind"] == "eval"]
    assert [e["step"] for e in evals] == [0, 4, 8] and [*evals[0]["coeffs"]] == ["2.gamma_v"]
    assert all(
        e["tokens"] == 256 * e["step"] and e["flops"] == e["tokens"] * head["plan"]["flops_per_token"] for e in evals
    )
    assert rest[-1]["kind"] == "end" and rest[-1]["val_bpb"] == evals[-1]["val_bpb"] < evals[0]["val_bpb"]
    done = json.loads((finished / "DONE.json").read_text())
    assert done["step"] == 8 and done["val_bpb"] == evals[-1]["val_bpb"] and done["val_sha"] == head["data"]["val_sha"]
    meta = json.loads((finished / "meta_000008.json").read_text())
    assert meta["val_bpb"] == done["val_bpb"] and meta["model_config"]["bov_layers"] == "last:1/3"


def test_a_finished_run_is_not_trained_again_and_another_one_is_not_overwritten(finished, capsys):
    before = (finished / "metrics.jsonl").read_bytes()
    go("--preset", "paper/bov", "--num-iterations", "8", "--save-every", "4", "--resume", "auto", "--run", "dummy")
    assert "finished before" in capsys.readouterr().out
    assert (finished / "metrics.jsonl").read_bytes() == before
    go("--preset", "paper/bov", "--num-iterations", "8", "--resume", "auto", "--resume-from-step", "4")  # asked for
    assert "continuing t at step 4 of 8" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"plan\.num_iterations: 8 there, 9 here"):
        go("--preset", "paper/bov", "--num-iterations", "9", "--resume", "auto")


def test_a_finished_run_whose_checkpoint_was_cut_is_trained_to_its_end_again(finished, capsys):
    flow, final = ("--preset", "paper/bov", "--num-iterations", "8", "--resume", "auto"), weights(finished, 8)
    (finished / "model_000008.pt").write_bytes((finished / "model_000008.pt").read_bytes()[:1000])
    go(*flow)
    assert "finished before, but" in (said := capsys.readouterr().out) and "model_000008.pt has 1000 bytes" in said
    assert_same_weights(weights(finished, 8), final)
    for path in finished.glob("*.pt"):
        path.unlink()
    go(*flow)
    assert "finished before, validation" in capsys.readouterr().out  # a record may outlive its checkpoint


def test_a_run_on_a_part_of_the_data_is_another_run(finished):
    more = ["--preset", "paper/bov", "--num-iterations", "8", "--train-part", "0.25"]
    with pytest.raises(ValueError, match=r"data\.train_part: None there, 0\.25 here"):
        go(*more, "--resume", "auto")
    go(*more, "--model-tag", "part")
    folders = (finished.parent / "part", finished)
    done, whole = (json.loads((folder / "DONE.json").read_text()) for folder in folders)
    assert done["config_hash"] != whole["config_hash"] and done["val_sha"] == whole["val_sha"]
    heads = [metrics.read_metrics(folder / "metrics.jsonl")[0] for folder in folders]
    assert [head["data"]["train_part"] for head in heads] == [0.25, 1.0]
    small, all_of_it = (head["plan"]["packing"]["tokens_per_epoch"] for head in heads)
    assert 0.15 * all_of_it < small < 0.35 * all_of_it


def test_weights_are_saved_before_they_are_evaluated(base, monkeypatch):
    def fail(run):
        if run.step == 8:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(train, "evaluate", lambda run: fail(run) or 1.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        go("--num-iterations", "8")
    assert list_steps(base / "base_checkpoints" / "t") == [8]


@pytest.mark.parametrize(("rows", "advice"), [("4", "--device-batch-size 2 needs"), ("1", "more ranks need less each")])
def test_too_little_memory_names_the_next_smaller_batch(rows, advice, base, monkeypatch):
    def fail(run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 GiB.\nmore")

    monkeypatch.setattr(train, "train_step", fail)
    with pytest.raises(ValueError, match=rf"Tried to allocate 16 GiB\.; {advice}"):
        go("--num-iterations", "8", "--device-batch-size", rows)


def test_training_in_fp16_is_refused(base, monkeypatch):
    monkeypatch.setattr(train, "COMPUTE_DTYPE", torch.float16)
    with pytest.raises(ValueError, match="NANOCHAT_DTYPE=float16 cannot train.*bfloat16"):
        go("--num-iterations", "8")
    assert not (base / "base_checkpoints").exists()


def spoil_loss(run):
    run.model.lm_head.weight.data[:] = float("inf")


def spoil_gradient(run):
    weight = run.model.value_embeds["2"].weight
    weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([5]), float("-inf")))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_loss, r"rank 0: the loss \(nan\), the gradient of group lm_head \(lm_head.weight\).* more groups"),
        (spoil_gradient, r"rank 0: the gradient of group value_embeds \(value_embeds.2.weight\)\. "),
    ],
    ids=["loss", "gradient"],
)
def test_what_is_not_finite_is_named_and_the_last_checkpoint_stands(spoil, message, base, monkeypatch):
    step = train.train_step

    def spoiled(run):
        if run.step == 4:
            spoil(run)
        return step(run)

    monkeypatch.setattr(train, "train_step", spoiled)
    with pytest.raises(FloatingPointError, match=f"not finite at step 5: {message}.*The checkpoints in .* stand"):
        go("--num-iterations", "8", "--save-every", "4", "--preset", "paper/bov")
    folder = base / "base_checkpoints" / "t"
    assert list_steps(folder) == [4] and losses(folder, field="step") == [1, 2, 3, 4]


class StandIn:
    """wandb's two functions; breaks on the call it is told to."""

    def __init__(self, breaks):
        self.breaks, self.seen = breaks, {}

    def init(self, **settings):
        if self.breaks == "init":
            raise OSError("no network")
        return self

    def log(self, values):
        if self.breaks == "log":
            raise OSError("no network")
        self.seen |= values

    def finish(self):
        if self.breaks == "finish":
            raise OSError("no network")


@pytest.mark.parametrize("breaks", [None, "init", "log", "finish"])
def test_metrics_go_to_wandb_and_a_broken_wandb_stops_nothing(breaks, base, monkeypatch, capsys):
    stand_in = StandIn(breaks)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    folder = go("--num-iterations", "2", "--run", "name")
    assert len(losses(folder)) == 2 and (folder / "DONE.json").exists()
    if breaks:
        assert "no network" in capsys.readouterr().out
    else:
        assert stand_in.seen.keys() >= {"train/loss", "eval/val_bpb"}


def test_without_wandb_a_run_with_a_name_goes_on(base, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    folder = go("--num-iterations", "2", "--run", "name")
    assert len(losses(folder)) == 2 and "wandb could not start" in capsys.readouterr().out


def test_core_while_training_goes_into_the_record(base, capsys):
    write_bundle(base / "eval_bundle", {"own_mc": ("multiple_choice", 4), "own_lm": ("language_modeling", 4)}, shots=1)
    folder = go("--num-iterations", "4", "--core-metric-every", "2", "--core-metric-max-per-task", "3")
    found = [entry for entry in metrics.read_metrics(folder / "metrics.jsonl") if entry["kind"] == "core"]
    assert [entry["step"] for entry in found] == [2, 4]
    assert all(entry["results"].keys() == {"own_mc", "own_lm"} and entry["most"] == 3 for entry in found)
    assert f"step 4/4  CORE {found[-1]['core_metric']:.4f}" in capsys.readouterr().out
    assert losses(folder) == losses(go("--num-iterations", "4", "--model-tag", "plain").parent / "plain")


def test_core_that_cannot_be_computed_is_one_line_and_training_goes_on(base, capsys):
    bundle = write_bundle(base / "eval_bundle", {"own_mc": ("multiple_choice", 4)})
    (bundle / "eval_data" / "own" / "own_mc.jsonl").write_text("{")
    folder = go("--num-iterations", "1", "--core-metric-every", "1")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "CORE" in line]
    assert "not evaluated at step 1" in line and "own_mc.jsonl" in line
    assert (folder / "DONE.json").exists()


def test_core_without_one_task_says_which_and_why(base, capsys):
    bundle = write_bundle(base / "eval_bundle", {"own_mc": ("multiple_choice", 4), "own_lm": ("language_modeling", 4)})
    (bundle / "eval_data" / "own" / "own_mc.jsonl").write_text("{")
    go("--num-iterations", "1", "--core-metric-every", "1")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "CORE" in line]
    assert "CORE incomplete (own_mc: " in line and "own_mc.jsonl" in line


def test_ctrl_c_while_starting_is_one_line(base):
    command = [sys.executable, "-X", "importtime", "-m", "scripts.base_train", *TINY, "--num-iterations", "8"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    while "torch." not in process.stderr.readline():  # until torch is being imported
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 130 and "Traceback" not in errors


def test_weights_gone_bad_are_not_saved(base, monkeypatch):
    step = train.train_step

    def spoiled(run):
        loss = step(run)
        if run.step == 8:
            run.model.lm_head.weight.data[0, 0] = float("inf")
        return loss

    monkeypatch.setattr(train, "train_step", spoiled)
    with pytest.raises(FloatingPointError, match="lm_head.weight"):
        go("--num-iterations", "9", "--save-every", "4")
    assert list_steps(base / "base_checkpoints" / "t") == [4]


def test_a_fresh_run_does_not_begin_over_another_ones_checkpoints(finished):
    before = sorted(finished.iterdir())
    with pytest.raises(ValueError, match="--resume auto"):
        go("--preset", "paper/baseline", "--num-iterations", "4")
    assert sorted(finished.iterdir()) == before


def test_an_evaluation_is_noted_in_the_checkpoint_of_its_own_step(finished):
    evals = dict(zip(losses(finished, "eval", "step"), losses(finished, "eval", "val_bpb"), strict=True))
    for step in (4, 8):
        assert json.loads((finished / f"meta_{step:06d}.json").read_text())["val_bpb"] == evals[step]


def test_a_compiler_that_cannot_build_leaves_everything_eager(monkeypatch):
    monkeypatch.setattr(compiled, "cpp_compiler", lambda: "/bin/false")
    torch._dynamo.reset()
    with torch._inductor.config.patch({"force_disable_caches": True}):
        model, problem = train.compile_model(None, torch.device("cpu"))
    assert problem and all(part.run is part.function and not part.compiled for part in Fused.every)


def test_going_back_to_a_step_gives_up_the_later_ones(finished, capsys):
    expected = losses(finished)
    go("--preset", "paper/bov", "--num-iterations", "8", "--save-every", "4", "--resume-from-step", "4")
    assert "deleting the later steps 8" in capsys.readouterr().out
    assert losses(finished) == expected and list_steps(finished) == [4, 8]


def test_evaluation_off_gives_null_not_nan(base):
    folder = go("--num-iterations", "2", "--eval-every", "-1")
    assert json.loads((folder / "DONE.json").read_text())["val_bpb"] is None
