# shellcheck shell=bash
# The steps of _lib.sh once more, done by the scripts of an upstream checkout that has the patch series in it. Source it
# after _lib.sh, with NANOCHAT_UPSTREAM set. There is no resuming here, and the report is bits per byte alone.
#   TORCHDYNAMO_DISABLE=0    let upstream compile (it needs a C++ compiler and, on a CPU, minutes)

[[ $NANOCHAT_UPSTREAM = /* ]] || NANOCHAT_UPSTREAM=$OLDPWD/$NANOCHAT_UPSTREAM # _lib.sh has moved to the repository
[[ ${NANOCHAT_BASE_DIR:-/} = /* ]] || NANOCHAT_BASE_DIR=$ROOT/$NANOCHAT_BASE_DIR
if [ ! -f "$NANOCHAT_UPSTREAM/nanochat/bov/host.py" ]; then
    echo "NANOCHAT_UPSTREAM=$NANOCHAT_UPSTREAM has no Bank of Values in it: python -m patches.apply $NANOCHAT_UPSTREAM" >&2
    trap - EXIT
    exit 2
fi
UPSTREAM=$(cd "$NANOCHAT_UPSTREAM" && pwd -P)
# shellcheck disable=SC2034 # _lib.sh says it after a stop
GOES_ON="starts that stage again; what is finished stays"
export TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1}

theirs() { # theirs WORD...: Python with the checkout's own packages
    show "$PYTHON_BIN" "$@"
    if [ "$DRY_RUN" != 1 ]; then (cd "$UPSTREAM" && "$PYTHON_BIN" "$@"); fi
}

need_tokenizer() { # need_tokenizer FLAG...: trained once
    if [ -f "$NANOCHAT_BASE_DIR/tokenizer/tokenizer.pkl" ]; then
        echo "already there: $NANOCHAT_BASE_DIR/tokenizer"
    else
        theirs -m scripts.tok_train "$@"
    fi
}

train_run() { # train_run TAG FLAG...: from the first step, unless a finished run is there
    if compgen -G "$CHECKPOINTS/$1/model_*.pt" >/dev/null; then
        echo "already there: $CHECKPOINTS/$1"
    else
        theirs -m scripts.base_train --model-tag "$@"
    fi
}

evaluate_run() { # evaluate_run TAG FLAG...: on the screen and in report/TAG.txt
    local file=/dev/null
    if [ "$DRY_RUN" != 1 ]; then
        mkdir -p "$REPORT"
        file=$REPORT/$1.txt
    fi
    theirs -m scripts.base_eval --model-tag "$@" | tee "$file"
}

sample_run() { :; }

report_runs() { # report_runs TAG...: bits per byte of every run
    local tag
    if [ "$DRY_RUN" = 1 ]; then return; fi
    printf '%-20s %12s %12s\n' "" "train bpb" "val bpb"
    for tag in "$@"; do
        printf '%-20s %12s %12s\n' "$tag" \
            "$(sed -n 's/^train bpb: //p' "$REPORT/$tag.txt")" "$(sed -n 's/^val bpb: //p' "$REPORT/$tag.txt")"
    done | tee "$REPORT/bpb.txt"
}
