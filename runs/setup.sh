#!/usr/bin/env bash
# Makes .venv in the repository with everything that pyproject.toml pins. A second call takes under a second.
#   bash runs/setup.sh
#   PYTHON=/path/to/python3.12 bash runs/setup.sh   another base Python (3.10 to 3.14)
#   INSTALLER=pip bash runs/setup.sh                pip although uv is there (pip | uv)
set -euo pipefail
unset CDPATH # with it cd prints, or finds another folder
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { printf 'setup: %s\n' "$*" >&2; exit 1; }
say() { printf 'setup: %s\n' "$*"; }

# The Pythons that torch 2.13 has wheels for.
good_python() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null; }

find_python() { # prints the first good Python, nothing when there is none
    local name
    if [ -n "${PYTHON:-}" ]; then
        good_python "$PYTHON" || die "PYTHON=$PYTHON is not a Python from 3.10 to 3.14 that runs; name another one"
        command -v "$PYTHON"
        return
    fi
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        if good_python "$name"; then command -v "$name"; return; fi
    done
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# What the environment was made from. The folder counts: a moved clone must not import the old one.
fingerprint() { { cat pyproject.toml; pwd -P; } | cksum; }

stamp=.venv/setup.stamp
wanted=$(fingerprint)
if [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null; then
    exit 0
fi

installer=${INSTALLER:-$(command -v uv >/dev/null && echo uv || echo pip)}
case $installer in uv | pip) ;; *) die "INSTALLER=$installer: use uv or pip" ;; esac
python=$(find_python)
links=${PIP_FIND_LINKS:-}
if [ -z "$links" ] && [ -n "$python" ]; then links=$("$python" -m pip config get global.find-links 2>/dev/null || true); fi

# CPU wheels of torch come from the machine's own wheel folder (pip's find-links), else from uv's PyTorch index.
cpu_linux=false
if [ "$(uname -s)" = Linux ] && ! has_gpu; then cpu_linux=true; fi
backend=()
if $cpu_linux && [ "$installer" = uv ] && [ -z "$links" ] && [ -z "${UV_FIND_LINKS:-}" ]; then backend=(--torch-backend=cpu); fi

if ! $cpu_linux; then
    size="about 3 GB on Linux with a GPU, 0.4 GB on a Mac"
elif [ "$installer" = pip ] && [ -z "$links" ]; then
    size="about 3 GB: pip takes torch's default wheel with the CUDA libraries although no GPU was found; with uv it is 0.6 GB"
else
    size="about 0.6 GB with torch's CPU wheel, 3 GB where only its default wheel can be had"
fi
say "installing torch, pyarrow, datasets, wandb and what else pyproject.toml pins into .venv with $installer"
say "download on a first call: $size"

make_venv_with_uv() {
    command -v uv >/dev/null || die "INSTALLER=uv, but there is no uv; install it or leave INSTALLER away"
    if [ -z "$python" ]; then say "no Python 3.10 to 3.14 found: uv fetches one"; fi
    uv venv --quiet --allow-existing --python "${python:->=3.10,<3.15}" .venv
}

make_venv_with_pip() {
    [ -n "$python" ] || die "no Python 3.10 to 3.14 found; install one, or name it: PYTHON=/path/to/python3 bash runs/setup.sh"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python has no venv module; on Debian and Ubuntu: apt-get install python3-venv (or install uv)"
    "$python" -m venv .venv
}

install_with_uv() {
    if [ -n "$links" ] && [ -z "${UV_FIND_LINKS:-}" ]; then
        UV_FIND_LINKS=$(tr -s ' \n' ',' <<<"$links" | sed 's/,$//') # uv does not read pip's settings
        export UV_FIND_LINKS
    fi
    local options=(--python .venv/bin/python)
    [ -t 1 ] || options+=(--quiet)
    if uv pip install "${options[@]}" ${backend[@]+"${backend[@]}"} -e '.[dev]'; then return; fi
    [ ${#backend[@]} -gt 0 ] || return 1
    say "no CPU wheel that way; trying again with torch's default wheel (about 3 GB)"
    uv pip install "${options[@]}" -e '.[dev]'
}

install_with_pip() {
    local quiet=()
    [ -t 1 ] || quiet=(--quiet)
    .venv/bin/python -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check -e '.[dev]'
}

# A .venv whose Python is gone or unfit cannot be repaired.
if [ -e .venv ] && ! good_python .venv/bin/python; then rm -rf .venv; fi
rm -f "$stamp"
case $installer in
    uv)
        make_venv_with_uv || die "uv could not make .venv (see above); INSTALLER=pip uses Python's own venv"
        install_with_uv || die "uv could not install (see above); INSTALLER=pip uses pip and its settings"
        ;;
    pip)
        make_venv_with_pip || die "$python could not make .venv (see above)"
        install_with_pip || die "pip could not install (see above); run the same command again"
        ;;
esac
echo "$wanted" >"$stamp"
say "done: $(.venv/bin/python -c 'import sys, torch; print(f"Python {sys.version.split()[0]}, torch {torch.__version__}")')"
