#!/usr/bin/env bash
# Standard attention against a Bank of Values on real text, from an empty machine, on a CPU.
#   bash runs/bov_cpu.sh             the comparison; a rerun continues where the last one stopped
#   SMOKE=1 bash runs/bov_cpu.sh     every stage in miniature, in its own folder
#   DRY_RUN=1 bash runs/bov_cpu.sh   every command and both plans, nothing is run
#   SEED=1, DEVICE=cuda, NANOCHAT_BASE_DIR=/some/folder  as one likes
#   NANOCHAT_UPSTREAM=DIR bash runs/bov_cpu.sh   trained and evaluated by a patched upstream checkout's own scripts
# shellcheck source=runs/_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/_lib.sh"

if [ $# -gt 0 ]; then usage 2 7 bov_cpu.sh; fi # there are no arguments

SEED=${SEED:-42}
DEVICE=${DEVICE:-cpu}
PROMPT="My fellow citizens,"
SAMPLE_TOKENS=96

# The model and the run, in one place. One pass over the speeches is 2.13M tokens; the run stays within it.
VOCAB_SIZE=4096
DEPTH=6
ASPECT_RATIO=32 # width 192
HEAD_DIM=64
SEQ_LEN=256
DEVICE_BATCH=16
TOTAL_BATCH=4096
TARGET_TOKENS=2097152
EVAL_EVERY=128
EVAL_TOKENS=-1 # one pass over the held-out speeches
SAVE_EVERY=128
LR_SCALE=16 # of all rates: batches are 128 times smaller than those the rates are for; chosen on the baseline alone
CHECK_TOKENS=65536 # of each split, scored again from the saved checkpoint
NAME=bov_cpu

if [ "${SMOKE:-0}" = 1 ]; then
    VOCAB_SIZE=1024 DEPTH=3 ASPECT_RATIO=40 SEQ_LEN=128 DEVICE_BATCH=16 TOTAL_BATCH=2048
    TARGET_TOKENS=50000 EVAL_EVERY=12 EVAL_TOKENS=8192 SAVE_EVERY=10 CHECK_TOKENS=4096 SAMPLE_TOKENS=32
    LR_SCALE=1
    NAME=smoke
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # so small a model gains nothing from a second thread
fi

HOST_FLAGS=(--seed "$SEED" --target-tokens "$TARGET_TOKENS" "--eval-tokens=$EVAL_TOKENS" --save-every "$SAVE_EVERY"
    --muon paper --lr-scale "$LR_SCALE")
if [ -n "${NANOCHAT_UPSTREAM:-}" ]; then # flags that upstream does not have; its seed is always 42
    # shellcheck source=runs/_upstream.sh
    source runs/_upstream.sh
    SEED=42 NAME=${NAME}_upstream
    HOST_FLAGS=(--num-iterations $((TARGET_TOKENS / TOTAL_BATCH)) --eval-tokens "$CHECK_TOKENS")
fi

train() { # train TAG PRESET
    train_run "$1" --preset "$2" --device-type "$DEVICE" \
        --depth $DEPTH --aspect-ratio $ASPECT_RATIO --head-dim $HEAD_DIM --max-seq-len $SEQ_LEN \
        --device-batch-size $DEVICE_BATCH --total-batch-size $TOTAL_BATCH \
        --eval-every $EVAL_EVERY --core-metric-every=-1 --sample-every=-1 "${HOST_FLAGS[@]}"
}

use_base_dir $NAME
BASELINE=baseline_s$SEED BOV=bov_s$SEED

stage "set-up"
need_setup

stage "data: State of the Union speeches"
need_data --source sotu

stage "tokenizer of $VOCAB_SIZE tokens"
need_tokenizer --vocab-size $VOCAB_SIZE

stage "training: standard attention"
train "$BASELINE" paper/baseline

stage "training: Bank of Values in the last third of the layers"
train "$BOV" paper/bov

stage "evaluation of the saved checkpoints, and a sample of text from each"
for tag in "$BASELINE" "$BOV"; do
    evaluate_run "$tag" --eval bpb --split-tokens $CHECK_TOKENS --device-batch-size $DEVICE_BATCH --device-type "$DEVICE"
    sample_run "$tag" --prompt "$PROMPT" --max-tokens $SAMPLE_TOKENS --seed "$SEED" --device-type "$DEVICE"
done

stage "report"
report_runs "$BASELINE" "$BOV"
