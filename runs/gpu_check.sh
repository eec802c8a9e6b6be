#!/usr/bin/env bash
# What training must do on one GPU, checked and measured in at most 8 minutes and without a data set: all back ends
# agree, baseline and BoV at depth 12 (tokens/s, MFU, memory, optimizer, compiling), a resumed run goes on as it was.
#   bash runs/gpu_check.sh             writes runs/results/gpu_check.json; exit code 1 names what did not pass
#   SMOKE=1 bash runs/gpu_check.sh     the same code in miniature on a CPU, into out/smoke_check
#   DRY_RUN=1 bash runs/gpu_check.sh   the command alone
#   DEVICE_BATCH=32 (the largest that fits from there down), STEPS=30, SEED=1, LIMIT=1200 (seconds, on a slow GPU),
#   NANOCHAT_PYTHON=/a/python  as one likes
# shellcheck source=runs/_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/_lib.sh"

if [ $# -gt 0 ]; then usage 2 8 gpu_check.sh; fi # there are no arguments

GOES_ON="begins anew"
LIMIT=${LIMIT:-460}
train=(--seed "${SEED:-42}" --muon paper)

if [ "${SMOKE:-0}" = 1 ]; then
    use_base_dir smoke_check
    OUT=$NANOCHAT_BASE_DIR/gpu_check.json
    STEPS=${STEPS:-4}
    train+=(--device-type cpu --depth 3 --aspect-ratio 32 --head-dim 32 --max-seq-len 128 --vocab-size 512
        --device-batch-size 4 --no-compile)
    export OMP_NUM_THREADS=1
else
    use_base_dir gpu_check
    OUT=$ROOT/runs/results/gpu_check.json
    STEPS=${STEPS:-30}
    train+=(--device-type cuda --depth 12 --vocab-size 32768 --device-batch-size "${DEVICE_BATCH:-32}")
fi

stage "set-up"
need_setup

stage "checking and measuring"
run mkdir -p "$(dirname "$OUT")"
py -m scripts.gpu_check --limit "$LIMIT" --steps "$STEPS" --out "$OUT" -- "${train[@]}"
