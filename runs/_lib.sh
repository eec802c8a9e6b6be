# shellcheck shell=bash
# The steps that the scripts in runs/ share. Source it first:  source "$(dirname "${BASH_SOURCE[0]}")/_lib.sh"
#   DRY_RUN=1            print every command and the training plans, run nothing else
#   NANOCHAT_BASE_DIR    where everything made goes (each script has its own default under out/)
#   NANOCHAT_PYTHON      a Python that has all packages already; then no .venv is made
set -euo pipefail
unset CDPATH # with it cd prints, or finds another folder

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$ROOT"
PYTHON_BIN=${NANOCHAT_PYTHON:-$ROOT/.venv/bin/python}
case $PYTHON_BIN in /*) ;; */*) PYTHON_BIN=$OLDPWD/$PYTHON_BIN ;; esac # that of the caller
DRY_RUN=${DRY_RUN:-0}
export PYTHONUNBUFFERED=1 # a log file shows each line when it is printed

# ---------------------------------------------------------------------------- what people see

STAGE_NUMBER=0
STAGE="start"
GOES_ON="continues from the last checkpoint" # what the same command does after a stop

stage() { # stage TITLE: a heading with the time since the start
    STAGE_NUMBER=$((STAGE_NUMBER + 1))
    STAGE=$1
    printf '\n== %d. %s  [%d:%02d]\n' "$STAGE_NUMBER" "$STAGE" $((SECONDS / 60)) $((SECONDS % 60))
}

show() { # show WORD...: a command as one could type it
    local word line='$'
    for word in "$@"; do
        if [ "$word" = "$PYTHON_BIN" ]; then word=python; fi
        line+=" $(printf '%q' "$word")"
    done
    printf '%s\n' "$line"
}

run() { # run WORD...: show the command, then run it unless this is a dry run
    show "$@"
    if [ "$DRY_RUN" != 1 ]; then "$@"; fi
}

py() { run "$PYTHON_BIN" "$@"; }

on_exit() {
    local code=$?
    [ $code -ne 0 ] || return 0
    if [ $code -eq 130 ] || [ $code -eq 143 ]; then
        printf '\nStopped during "%s". The same command %s.\n' "$STAGE" "$GOES_ON" >&2
    else
        printf '\n"%s" failed with exit code %d. After repair the same command continues there.\n' "$STAGE" $code >&2
    fi
}
trap on_exit EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

usage() { # usage FIRST LAST SCRIPT: these lines from the top of runs/SCRIPT, as help
    sed -n "$1,$2s/^# \{0,1\}//p" "$ROOT/runs/$3"
    trap - EXIT
    exit 2
}

die() { # die WORDS: what was asked for cannot be
    printf '%s\n' "$*" >&2
    trap - EXIT
    exit 2
}

for name in DRY_RUN SMOKE; do # "yes" must not start a run of days
    case ${!name:-0} in 0 | 1) ;; *) die "$name=${!name}: use 1 or 0" ;; esac
done

# ---------------------------------------------------------------------------- steps

use_base_dir() { # use_base_dir NAME: NANOCHAT_BASE_DIR, or out/NAME in the repository, which git ignores
    if [ -z "${NANOCHAT_BASE_DIR:-}" ]; then
        NANOCHAT_BASE_DIR=$ROOT/out/$1
        if [ "$DRY_RUN" != 1 ]; then mkdir -p "$ROOT/out" && echo '*' >"$ROOT/out/.gitignore"; fi
    fi
    case $NANOCHAT_BASE_DIR in /*) ;; *) NANOCHAT_BASE_DIR=$OLDPWD/$NANOCHAT_BASE_DIR ;; esac # that of the caller
    export NANOCHAT_BASE_DIR
    CHECKPOINTS=$NANOCHAT_BASE_DIR/base_checkpoints
    REPORT=$NANOCHAT_BASE_DIR/report
    echo "everything goes to $NANOCHAT_BASE_DIR"
}

need_setup() {
    if [ -n "${NANOCHAT_PYTHON:-}" ]; then echo "as it is: $NANOCHAT_PYTHON"; else run bash runs/setup.sh; fi
}

need_data() { # need_data FLAG...: parquet shards; the command leaves intact ones as they are
    py -m nanochat.dataset "$@"
}

need_tokenizer() { # need_tokenizer FLAG...: trained once, and again when the flags or the data change
    local stamp=$NANOCHAT_BASE_DIR/tokenizer/made_by.txt data=$NANOCHAT_BASE_DIR/base_data_climbmix/source.json
    local command=("$PYTHON_BIN" -m scripts.tok_train "$@")
    if [ -f "$stamp" ] && [ ! "$data" -nt "$stamp" ] && [ "$(cat "$stamp")" = "$(show "${command[@]}")" ]; then
        echo "already there: $NANOCHAT_BASE_DIR/tokenizer"
        return
    fi
    run "${command[@]}"
    if [ "$DRY_RUN" != 1 ]; then show "${command[@]}" >"$stamp"; fi
}

python_ready() { # whether the Python of the commands is there with its packages
    command -v "$PYTHON_BIN" >/dev/null && { [ -n "${NANOCHAT_PYTHON:-}" ] || [ -f .venv/setup.stamp ]; }
}

train_run() { # train_run TAG FLAG...: the plan in a dry run; else train, continue, or leave a finished run as it is
    local tag=$1
    shift
    py -m scripts.base_train --model-tag "$tag" --resume auto "$@"
    if [ "$DRY_RUN" != 1 ]; then
        [ -f "$CHECKPOINTS/$tag/DONE.json" ] || exit 143 # a signal to the trainer alone; it saved
        return
    fi
    if ! python_ready; then
        echo "(its plan is printed here once set-up has run)"
    else
        "$PYTHON_BIN" -m scripts.base_train --model-tag "$tag" "$@" --vocab-size "$VOCAB_SIZE" --dry-run
    fi
}

evaluate_run() { # evaluate_run TAG FLAG...
    local tag=$1
    shift
    py -m scripts.base_eval --model-tag "$tag" "$@"
}

sample_run() { # sample_run TAG FLAG...: text on the screen and in report/sample_TAG.txt
    local file=$REPORT/sample_$1.txt command=("$PYTHON_BIN" -m scripts.bov_sample --model-tag "$1" "${@:2}")
    show "${command[@]}"
    if [ "$DRY_RUN" = 1 ]; then return; fi
    mkdir -p "$REPORT"
    "${command[@]}" | tee "$file.part"
    mv "$file.part" "$file"
}

report_runs() { # report_runs TAG...: tables on the screen, report.md, report.html and pictures in report/
    local tag samples=() folders=()
    for tag in "$@"; do
        folders+=("$CHECKPOINTS/$tag")
        if [ "$DRY_RUN" = 1 ] || [ -s "$REPORT/sample_$tag.txt" ]; then samples+=(--sample "$tag=$REPORT/sample_$tag.txt"); fi
    done
    py -m scripts.bov_report "${folders[@]}" --out "$REPORT" ${samples[@]+"${samples[@]}"}
}
