#!/usr/bin/env bash
# The paper's runs at depth 24 (780M parameters without tables), standard attention against a Bank of Values, on all
# visible GPUs. What it can be told is on top of runs/_paper.sh.
# shellcheck source=runs/_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/_lib.sh"

NAME=bov
DEPTH=24
FLOPS=3.91e19 # of BUDGET=flops
TOKENS=1e11 # of BUDGET=tokens
DEVICE_BATCH=${DEVICE_BATCH:-16}
if [ "${BUDGET:-flops}" = tokens ]; then SAVE_EVERY=${SAVE_EVERY:-5000}; else SAVE_EVERY=${SAVE_EVERY:-1000}; fi

# shellcheck source=runs/_paper.sh
source "$ROOT/runs/_paper.sh"
