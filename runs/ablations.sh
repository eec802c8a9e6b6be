#!/usr/bin/env bash
# Ablations: variants on one budget, several seeds each, one report with intervals and the paper's ordering.
#   bash runs/ablations.sh                          Table 1 and Figure 5(b) at depth 12, 1.5e18 FLOPs each, on all GPUs
#   bash runs/ablations.sh paper/bov table3/v1      these presets and the baseline
#   DEPTH=24 FLOPS=3.91e19 bash runs/ablations.sh table3/{x0,v1,v1_all,ve_gated}      Table 3
#   SCALE=cpu bash runs/ablations.sh                what fits on 2 CPU cores: State of the Union speeches, equal tokens
# What else it can be told is on top of runs/_paper.sh. Finished runs, those in runs/results too, are not trained again.
# shellcheck source=runs/_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/_lib.sh"

DEPTH=${DEPTH:-12}
FLOPS=${FLOPS:-1.5e18}
TOKENS=${TOKENS:-0}
DEVICE_BATCH=${DEVICE_BATCH:-32}
SAVE_EVERY=${SAVE_EVERY:-500}
NAME=ablations

table1=(table1/{1..13})
fig5b=(paper/bov fig5b/{shared,no_coeff,every_layer,add_v})
# On a CPU: the components, then equal tokens from fewer documents read 1, 2 and 4 times, and what may help BoV there.
components=(baseline bov table3/{x0,v1_all,ve_gated} fig5b/{shared,no_coeff,every_layer})
repeated=({baseline,bov}:train-part=0.5 {baseline,bov}:train-part=0.25 {baseline,bov}:train-part=0.125
    fig5b/shared:train-part=0.125 "bov:train-part=0.125,table-lr-scale=0.125" "bov:train-part=0.125,table-weight-decay=0.03")
LR_SCALE=16 # for batches of 4,096 tokens; chosen on the baseline alone, runs/LOG.md

if [[ ${1:-} == -* ]]; then usage 2 7 ablations.sh; fi # variants are no flags
if [ "${SCALE:-gpu}" = cpu ]; then BUDGET=${BUDGET:-tokens}; fi # that of the records
if [ $# -gt 0 ]; then
    VARIANTS="baseline $*"
elif [ "${SCALE:-gpu}" = cpu ]; then
    VARIANTS=${VARIANTS:-${components[*]} ${repeated[*]}}
else
    VARIANTS=${VARIANTS:-${table1[*]} ${fig5b[*]}}
fi
set --

# shellcheck source=runs/_paper.sh
source "$ROOT/runs/_paper.sh"
