#!/usr/bin/env bash
# The paper's runs at depth 12 (135M parameters without tables), standard attention against a Bank of Values, on all
# visible GPUs. What it can be told is on top of runs/_paper.sh.
# shellcheck source=runs/_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/_lib.sh"

NAME=bov
DEPTH=12
FLOPS=1.5e18 # of BUDGET=flops
TOKENS=0 # of BUDGET=tokens: those of the FLOPs budget's baseline
DEVICE_BATCH=${DEVICE_BATCH:-32}
SAVE_EVERY=${SAVE_EVERY:-500}

# shellcheck source=runs/_paper.sh
source "$ROOT/runs/_paper.sh"
