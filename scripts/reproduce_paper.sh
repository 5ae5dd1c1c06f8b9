#!/usr/bin/env bash
# Trains the four networks of the CowClip paper on Criteo's Kaggle file, at eight batch sizes, with and without CowClip,
# and puts the results beside the published ones.
#
#   bash scripts/reproduce_paper.sh train.txt [OUTPUT]
#
# OUTPUT (runs/paper) gets table.md and plot.png, drawn again after every run, the largest batches first. Stop it whenever
# you like: the same command continues. Finished and failed runs are not repeated; to repeat one, delete its line in
# OUTPUT/*/*/sweep.jsonl. It works on a CPU too, but the whole file takes weeks there. For a trial, give an OUTPUT of its
# own, which keeps its file, epochs and min_count, and set some of
#   REPRODUCE_MODELS="deepfm dcn"      networks; dcnmix is the one that the published code calls DCNv2
#   REPRODUCE_BATCHES="64K 128K"       batch sizes, in the order of the runs
#   REPRODUCE_EPOCHS=1                 passes over the training samples
#   REPRODUCE_SEEDS=3                  runs of each combination
#   REPRODUCE_BASELINE=linear,sqrt     scaling rules of the runs without the clip
#   REPRODUCE_MIN_COUNT=10             rarer ids share a row
set -euo pipefail

if [ $# -lt 1 ] || [ $# -gt 2 ] || [ ! -f "$1" ]; then
    echo "usage: bash scripts/reproduce_paper.sh TRAIN_TXT [OUTPUT]; got ${*:-nothing}" >&2
    echo "TRAIN_TXT must be a file: Criteo's train.txt from Kaggle, plain or gz, xz, zst" >&2
    exit 2
fi
train=$(realpath -- "$1") output=$(realpath -m -- "${2:-$(dirname "$0")/../runs/paper}")
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3

export REPRODUCE_MODELS=${REPRODUCE_MODELS:-deepfm wdl dcn dcnmix}
export REPRODUCE_BATCHES=${REPRODUCE_BATCHES:-128K 64K 32K 16K 8K 4K 2K 1K}
export REPRODUCE_EPOCHS=${REPRODUCE_EPOCHS:-10}
export REPRODUCE_SEEDS=${REPRODUCE_SEEDS:-1}
export REPRODUCE_BASELINE=${REPRODUCE_BASELINE:-linear}
export REPRODUCE_MIN_COUNT=${REPRODUCE_MIN_COUNT:-1}
config=trainer/configs/criteo.toml
# The published baseline: LargeBatchCTR's defaults, `train.py --dataset criteo_kaggle --model DeepFM`.
baseline_settings=(--set optimizer.dense_lr=1e-4 --set optimizer.warmup_epochs=0 --set optimizer.embedding_init_std=1e-4)

# Draws table and plot, says how far the runs are, and prints those that are left.
report() {
    "$python" scripts/paper/report.py "$output" --models "$REPRODUCE_MODELS" --batches "$REPRODUCE_BATCHES" \
        --seeds "$REPRODUCE_SEEDS" --baseline "$REPRODUCE_BASELINE"
}

# Runs cowrec in the background, where it ignores Ctrl-C: bash waits, and so serves a signal at once.
child=
cowrec() {
    "$python" -m cowrec.trainer "$@" </dev/null &
    child=$!
    wait "$child"
    child=
}

# Ends cowrec with the script, which exits with the code of the signal.
stop() {
    trap '' INT TERM
    if [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
    fi
    echo "stopped; the same command continues" >&2
    exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM

"$python" scripts/paper/settings.py "$train" "$output"
if [ ! -f "$output/data/schema.json" ]; then
    echo "preparing $train in $output/data"
    cowrec prepare criteo --config "$config" --input "$train" --output "$output/data" \
        --set "prepare.min_count=$REPRODUCE_MIN_COUNT"
fi
left=$(report)
while read -r model batch clip rule; do
    [ -n "$model" ] || continue
    method=cowclip settings=()
    [ "$clip" = on ] || method=baseline settings=("${baseline_settings[@]}")
    cowrec sweep "$config" --data "$output/data" --output "$output/$method/$model" --batch-sizes "$batch" \
        --clip "$clip" --rules "$rule" --seeds "$REPRODUCE_SEEDS" --set "model.name=$model" \
        --set "train.epochs=$REPRODUCE_EPOCHS" "${settings[@]}" >/dev/null
    report >/dev/null
done <<<"$left"
cat "$output/table.md"
