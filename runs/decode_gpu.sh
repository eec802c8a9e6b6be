#!/usr/bin/env bash
# Decoding with and without a V cache on one GPU, in at most 8 minutes: every way of one layer's attention at contexts
# up to 262,144 and batches 1 to 64 (first that all agree), whole steps, cache layout, bytes, growth.
#   bash runs/decode_gpu.sh             writes runs/results/decode_gpu.json and .png; what does not fit is left out
#   SMOKE=1 bash runs/decode_gpu.sh     the same code in miniature on a CPU, into out/smoke_decode
#   DRY_RUN=1 bash runs/decode_gpu.sh   the command alone
#   SEED=1, ROUNDS=10, NANOCHAT_PYTHON=/a/python  as one likes
# shellcheck source=runs/_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/_lib.sh"

if [ $# -gt 0 ]; then usage 2 7 decode_gpu.sh; fi # there are no arguments

LIMIT=480   # seconds for the whole command
BUDGET=400  # seconds after which no further case begins
ROUNDS=${ROUNDS:-20}
SECTIONS=attention,steps,layout,bytes,growth
flags=(--preset paper/bov --seed "${SEED:-42}" --budget "$BUDGET")

if [ "${SMOKE:-0}" = 1 ]; then
    use_base_dir smoke_decode
    OUT=$NANOCHAT_BASE_DIR/decode_gpu.json
    flags+=(--device-type cpu --depth 3 --width 64 --head-dim 16 --vocab-size 320 --contexts "40,300"
        --batch-sizes "1,2" --rounds 3 --no-compile)
else
    OUT=$ROOT/runs/results/decode_gpu.json
    flags+=(--device-type cuda --depth 12 --rounds "$ROUNDS")
fi

stage "set-up"
need_setup

stage "measuring"
run mkdir -p "$(dirname "$OUT")"
run timeout --signal=INT $LIMIT "$PYTHON_BIN" -m scripts.infer_bench --suite $SECTIONS "${flags[@]}" --out "$OUT"
