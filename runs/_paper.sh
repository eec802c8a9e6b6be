# shellcheck shell=bash
# The paper's runs at one depth. bov_d12.sh, bov_d24.sh and ablations.sh set the sizes and source this after _lib.sh.
#   bash runs/bov_d24.sh             data, tokenizer, trainings, evaluations, report; a rerun continues
#   DRY_RUN=1 bash runs/bov_d24.sh   every command, every plan, memory and hours; nothing is run, no GPU is needed
#   SMOKE=1 bash runs/bov_d24.sh     every stage in miniature on a CPU with 2 ranks, in its own folder
#   BUDGET=flops|tokens|params       equal FLOPs (default); equal tokens; equal tokens and parameters, tables included
#   SEEDS="0 1 2" VARIANTS="baseline bov fig5b/shared bov:bov-coeff=head"   what to train: presets, flags after a colon
#   WANDB_RUN=name, DEVICE_BATCH=16, SAVE_EVERY=500, NPROC=4, NANOCHAT_BASE_DIR=/some/folder   as one likes
# More nodes: torchrun's variables PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT on each of them, and one
# NANOCHAT_BASE_DIR that all share; node 0 fetches the data, evaluates and reports. Where they share this folder too, run
# setup.sh on one of them first.

if [ $# -gt 0 ]; then usage 3 11 _paper.sh; fi # there are no arguments

words_of() { # words_of TEXT: fills `words` with its words, each once; lines are as good as spaces
    local all word
    read -ra all <<<"${1//$'\n'/ }"
    words=()
    for word in ${all[@]+"${all[@]}"}; do
        case " ${words[*]-} " in *" $word "*) ;; *) words+=("$word") ;; esac
    done
}

# ---------------------------------------------------------------------------- sizes

BUDGET=${BUDGET:-flops}
case $BUDGET in flops | tokens | params) ;; *) die "BUDGET=$BUDGET: use flops, tokens or params" ;; esac
case ${SCALE:-gpu} in
    gpu) ;;
    cpu) [ "$NAME" = ablations ] || die "SCALE=cpu: only runs/ablations.sh has it; SMOKE=1 runs all stages in miniature" ;;
    *) die "SCALE=$SCALE: use gpu or cpu" ;;
esac
NAME+=_d$DEPTH
if [ "$BUDGET" = tokens ] && [ "$TOKENS" != 0 ]; then NAME+=_tokens; fi # other data, so another folder
words_of "${SEEDS:-0 1 2}"
SEEDS=(${words[@]+"${words[@]}"})
words_of "${VARIANTS:-baseline bov}"
if [ ${#words[@]} -gt 0 ]; then words_of "${words[*]/#paper\//}"; fi # paper/bov is bov: one training, one record
VARIANTS=(${words[@]+"${words[@]}"})
[ ${#SEEDS[@]} -gt 0 ] || die "SEEDS is empty: use whole numbers, as in \"0 1 2\""
[ ${#VARIANTS[@]} -gt 0 ] || die "VARIANTS is empty: use baseline, bov or names of presets"
for seed in "${SEEDS[@]}"; do # 07 would be 7 once more, and torch takes no number of 20 digits
    [[ $seed =~ ^(0|[1-9][0-9]{0,8})$ ]] || die "SEEDS: $seed is not a whole number of at most 9 digits, as in \"0 1 2\""
done
VOCAB_SIZE=32768
TOKENIZER_SHARDS=10 # hold the 2 billion characters that the tokenizer reads
EVAL_EVERY=250
EVAL_TOKENS=41943040 # 80 * 2^19
EVAL=core,bpb
TOLERANCE=0.005 # of the parameters that BUDGET=params matches
DEVICE=cuda
SOURCE=climbmix
PREFIX=d$DEPTH
shape=()

if [ "${SMOKE:-0}" = 1 ]; then
    SEEDS=("${SEEDS[0]}")
    NAME=smoke_$NAME VOCAB_SIZE=1024 EVAL_EVERY=12 EVAL_TOKENS=8192 EVAL=bpb DEVICE=cpu SOURCE=sotu NPROC=${NPROC:-2}
    DEPTH=3 FLOPS=2.4e11 DEVICE_BATCH=4 SAVE_EVERY=8 TOLERANCE=0.1
    if [ "$TOKENS" != 0 ]; then TOKENS=50000; fi
    shape=(--aspect-ratio 40 --head-dim 64 --max-seq-len 128 --total-batch-size 2048)
    export OMP_NUM_THREADS=1
elif [ "${SCALE:-gpu}" = cpu ]; then # a run takes some minutes on 2 cores
    NAME=cpu_ablation PREFIX=cpu VOCAB_SIZE=4096 EVAL_EVERY=64 EVAL_TOKENS=131072 EVAL="" DEVICE=cpu SOURCE=sotu NPROC=${NPROC:-1}
    DEPTH=6 TOKENS=1048576 FLOPS=2.41e13 DEVICE_BATCH=16 SAVE_EVERY=64 TOLERANCE=0.03
    shape=(--aspect-ratio 32 --head-dim 64 --max-seq-len 256 --total-batch-size 4096 --lr-scale "$LR_SCALE")
    export NANOCHAT_DTYPE=${NANOCHAT_DTYPE:-bfloat16} # the same runs on every CPU, if slower on old ones
else
    export NANOCHAT_DTYPE=${NANOCHAT_DTYPE:-bfloat16} # the paper's; also what a plan without a GPU counts in
fi

# ---------------------------------------------------------------------------- ranks

visible_gpus() {
    if ! command -v nvidia-smi >/dev/null; then
        echo 0
    elif [ -n "${CUDA_VISIBLE_DEVICES+x}" ]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    fi
}

GPU=H100 # of the hours to expect
if [ $DEVICE = cpu ]; then GPU=cpu; fi
NNODES=${PET_NNODES:-1} NODE=${PET_NODE_RANK:-0}
[[ $NNODES =~ ^[1-9][0-9]*$ ]] || die "PET_NNODES=$NNODES: use a fixed number of nodes"
if [ "$NNODES" -gt 1 ] && [ -z "${PET_NODE_RANK:-}" ]; then die "PET_NNODES=$NNODES: set PET_NODE_RANK too, 0 to $((NNODES - 1))"; fi
if ! [[ $NODE =~ ^[0-9]+$ ]] || [ "$NODE" -ge "$NNODES" ]; then die "PET_NODE_RANK=$NODE: use 0 to $((NNODES - 1))"; fi
NPROC=${NPROC:-${PET_NPROC_PER_NODE:-}}
[[ ${NPROC:-1} =~ ^[1-9][0-9]*$ ]] || die "NPROC (or PET_NPROC_PER_NODE) = $NPROC: use a number of ranks"
gpus=$(visible_gpus)
if [ $DEVICE = cuda ] && [ "$gpus" -gt 0 ]; then
    GPU=$(nvidia-smi --query-gpu=name --format=csv,noheader | sed -n 1p) || die "nvidia-smi does not work: $GPU"
    if [ -z "$NPROC" ]; then # the largest power of two: it divides the batch
        NPROC=1
        while [ $((NPROC * 2)) -le "$gpus" ]; do NPROC=$((NPROC * 2)); done
    elif [ "$NPROC" -gt "$gpus" ] && [ "$DRY_RUN" != 1 ]; then
        die "NPROC (or PET_NPROC_PER_NODE) = $NPROC: $gpus GPU(s) are visible"
    fi
elif [ "$DRY_RUN" = 1 ] || [ $DEVICE = cpu ]; then
    NPROC=${NPROC:-8}
else
    die "no GPU found (nvidia-smi): DRY_RUN=1 shows the plan, SMOKE=1 runs all stages in miniature on a CPU"
fi

EVERYWHERE=("--nproc_per_node=$NPROC" --shutdown-timeout=300) # seconds to save after a signal; the rest from PET_*
LOCAL=(--standalone --nnodes=1 "${EVERYWHERE[@]}")
if [ "$NNODES" -eq 1 ]; then EVERYWHERE=("${LOCAL[@]}"); fi

# Where util-linux is there, no process outlives the one that started it, however that one ends.
TIE=()
if setpriv --pdeathsig TERM true 2>/dev/null; then TIE=(setpriv --pdeathsig); fi

tied() { # tied WORD...: in the place of this shell, ended with it
    if [ ${#TIE[@]} -gt 0 ]; then "${TIE[@]}" TERM "$@"; else "$@"; fi
}

ranks() { # ranks RANKS -- MODULE FLAG...: RANKS are flags of torchrun, which takes what follows its own -- as it is
    local launch=()
    while [ "$1" != -- ]; do
        launch+=("$1")
        shift
    done
    shift
    show torchrun "${launch[@]}" -m -- "$@"
    if [ "$DRY_RUN" = 1 ]; then return; fi
    local torchrun=("$PYTHON_BIN" -m torch.distributed.run "${launch[@]}")
    if [ ${#TIE[@]} -gt 0 ]; then
        tied "${torchrun[@]}" --no-python -- "${TIE[@]}" KILL "$PYTHON_BIN" -m "$@"
    else
        "${torchrun[@]}" -m -- "$@"
    fi
}

# ---------------------------------------------------------------------------- steps

common=(--depth "$DEPTH" --vocab-size "$VOCAB_SIZE" --muon paper --device-batch-size "$DEVICE_BATCH" --save-every "$SAVE_EVERY"
    --keep-last 2 ${shape[@]+"${shape[@]}"})

one_at_a_time() { # a runner killed on the spot may leave something at work for a moment
    if [ "$DRY_RUN" = 1 ] || ! command -v flock >/dev/null; then return; fi
    mkdir -p "$NANOCHAT_BASE_DIR"
    exec 9>"$NANOCHAT_BASE_DIR/.runner_$NODE"
    flock -n 9 || { echo "waiting for another run in this folder" && flock 9; }
}

make_plan() { # prints the plan; sets SHARDS and flags_of[VARIANT index]
    local command=("$PYTHON_BIN" -m scripts.paper_plan --budget "$BUDGET" --flops "$FLOPS" --tokens "$TOKENS"
        --variants "${VARIANTS[*]}" --seeds ${#SEEDS[@]} --gpu "$GPU" --tolerance "$TOLERANCE" --source "$SOURCE"
        -- "${common[@]}")
    local text kind name flags
    SHARDS=SHARDS flags_of=()
    show env RANK=0 LOCAL_RANK=0 "WORLD_SIZE=$((NPROC * NNODES))" "${command[@]}"
    if [ "$DRY_RUN" = 1 ] && ! python_ready; then
        echo "(the plans are printed here once set-up has run)"
        for name in "${VARIANTS[@]}"; do flags_of+=("--preset $name HORIZON"); done
        return
    fi
    text=$(RANK=0 LOCAL_RANK=0 WORLD_SIZE=$((NPROC * NNODES)) "${command[@]}")
    while IFS=$'\t' read -r kind name flags; do
        case $kind in
            shards) SHARDS=$name ;;
            flags) flags_of+=("$flags") ;;
            *) printf '%s\n' "$kind" ;;
        esac
    done <<<"$text"
}

DATA_PID=""
stop_data() { if [ -n "$DATA_PID" ]; then kill "$DATA_PID" 2>/dev/null || true; fi; }
trap 'on_exit; stop_data' EXIT

fetch_behind() { # fetch_behind FLAG...: need_data in the background, its lines in data.log
    local command=("$PYTHON_BIN" -m nanochat.dataset "$@")
    printf '%s &\n' "$(show "${command[@]}")"
    if [ "$DRY_RUN" = 1 ]; then return; fi
    if [ ${#TIE[@]} -gt 0 ]; then command=("${TIE[@]}" TERM "${command[@]}"); fi
    "${command[@]}" >"$NANOCHAT_BASE_DIR/data.log" 2>&1 &
    DATA_PID=$!
}

fetched() { # waits for fetch_behind
    if [ -z "$DATA_PID" ]; then return; fi
    local pid=$DATA_PID
    echo "waiting for the data; progress is in $NANOCHAT_BASE_DIR/data.log"
    wait "$pid" || {
        tail -n 5 "$NANOCHAT_BASE_DIR/data.log" >&2
        return 1
    }
    DATA_PID=""
}

data_and_tokenizer() {
    if [ $DEVICE = cpu ]; then
        need_data --source sotu
        fetch_behind --source sotu
    else
        need_data --source climbmix -n $TOKENIZER_SHARDS
        fetch_behind --source climbmix -n "$SHARDS"
    fi
    need_tokenizer --vocab-size $VOCAB_SIZE
    fetched
    if [ "$DRY_RUN" != 1 ]; then echo "$SHARDS $VOCAB_SIZE" >"$NANOCHAT_BASE_DIR/ready.txt"; fi
}

wait_for_node_0() {
    echo "waiting for node 0 to have data and tokenizer in $NANOCHAT_BASE_DIR"
    if [ "$DRY_RUN" = 1 ]; then return; fi
    until [ "$(cat "$NANOCHAT_BASE_DIR/ready.txt" 2>/dev/null)" = "$SHARDS $VOCAB_SIZE" ]; do sleep 2; done
}

tag_of() { # tag_of VARIANT SEED
    printf '%s_%s_%s_s%s' "$PREFIX" "$BUDGET" "${1//[\/:=,]/_}" "$2"
}

recall() { # recall TAG: a run whose record is in runs/results counts as finished, if its settings are the same
    local kept=$RESULTS/$1 here=$CHECKPOINTS/$1
    if [ "$NODE" != 0 ] || [ -d "$here" ] || [ ! -f "$kept/DONE.json" ]; then return; fi
    if [ "$DRY_RUN" = 1 ]; then
        echo "(a record of it is in $RESULTS: not trained again where settings and data are the same)"
        return
    fi
    mkdir -p "$here.part" "$CHECKPOINTS"
    cp "$kept/metrics.jsonl" "$kept/DONE.json" "$here.part"
    mv "$here.part" "$here"
    echo "$1: recalled from $RESULTS"
}

train_variant() { # train_variant VARIANT SEED FLAGS
    local tag flags wandb=dummy
    tag=$(tag_of "$1" "$2")
    read -ra flags <<<"$3"
    recall "$tag"
    if [ -n "${WANDB_RUN:-}" ]; then wandb=$WANDB_RUN-$tag; fi
    ranks "${EVERYWHERE[@]}" -- scripts.base_train --model-tag "$tag" --resume auto --run "$wandb" --seed "$2" \
        "${common[@]}" "${flags[@]}" --device-type $DEVICE --eval-every $EVAL_EVERY --eval-tokens $EVAL_TOKENS \
        --core-metric-every=-1 --sample-every=-1 || return
    if [ "$DRY_RUN" = 1 ] || [ "$NODE" != 0 ]; then return; fi
    if [ ! -f "$CHECKPOINTS/$tag/DONE.json" ]; then # a signal to the trainer alone; it saved
        echo "$tag: stopped before its end" >&2
        return 1
    fi
}

evaluate_variant() { # evaluate_variant TAG: once; not where a result came without its checkpoint
    local model stamp last="" command
    for model in "$CHECKPOINTS/$1"/model_*.pt; do if [ -f "$model" ]; then last=${model##*model_}; fi; done
    if [ "$DRY_RUN" != 1 ]; then
        stamp=$NANOCHAT_BASE_DIR/base_eval/$1_${last%.pt}.done
        if [ -z "$last" ]; then
            echo "$1: no checkpoint here, not evaluated again"
            return
        elif [ "$stamp" -nt "$CHECKPOINTS/$1/DONE.json" ]; then
            echo "$1: evaluated before"
            return
        fi
    fi
    command=(scripts.base_eval --model-tag "$1" --eval "$EVAL" --core-tasks paper21 --split-tokens "$EVAL_TOKENS"
        --device-batch-size "$DEVICE_BATCH" --device-type "$DEVICE")
    if [ $DEVICE = cpu ]; then py -m "${command[@]}"; else ranks "${LOCAL[@]}" -- "${command[@]}"; fi || return
    if [ "$DRY_RUN" != 1 ]; then mkdir -p "$NANOCHAT_BASE_DIR/base_eval" && touch "$stamp"; fi # its results come one by one
}

# ---------------------------------------------------------------------------- the run

use_base_dir "$NAME"
REPORT=$REPORT/$BUDGET
RESULTS=${RESULTS:-runs/results/$NAME} # records of finished runs, to recall
one_at_a_time

stage "set-up"
need_setup

stage "plan: BUDGET=$BUDGET on $NNODES node(s) of $NPROC rank(s)"
make_plan

stage "data, $SHARDS shards, behind the tokenizer of $VOCAB_SIZE tokens"
if [ "$NODE" = 0 ]; then data_and_tokenizer; else wait_for_node_0; fi

done_tags=() failed=()
for seed in "${SEEDS[@]}"; do # seed by seed, so that the first comparison is there early
    for i in "${!VARIANTS[@]}"; do
        tag=$(tag_of "${VARIANTS[i]}" "$seed")
        stage "training: $tag"
        if train_variant "${VARIANTS[i]}" "$seed" "${flags_of[i]}"; then
            done_tags+=("$tag")
        else
            failed+=("training $tag")
            echo "training $tag FAILED; going on with the others" >&2
        fi
    done
done

if [ "$NODE" = 0 ]; then
    if [ -n "$EVAL" ]; then
        stage "evaluation"
        for tag in ${done_tags[@]+"${done_tags[@]}"}; do
            evaluate_variant "$tag" || failed+=("evaluation $tag")
        done
    fi

    stage "report"
    folders=()
    for tag in ${done_tags[@]+"${done_tags[@]}"}; do folders+=("$CHECKPOINTS/$tag"); done
    if [ ${#folders[@]} -gt 0 ]; then py -m scripts.bov_report "${folders[@]}" --out "$REPORT"; fi
fi

if [ ${#failed[@]} -gt 0 ]; then
    printf '\nFAILED: %s\n' "${failed[@]}" >&2
    trap stop_data EXIT
    exit 1
fi
