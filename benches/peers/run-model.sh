#!/usr/bin/env bash
# Whole steps and generation side by side with PyTorch and transformers, one after the other, as ratios.
#
#     cargo build --release -p ferrospeed-cli
#     PYTHON=/path/to/python benches/peers/run-model.sh [--only TEXT] [--threads 1,2] [--dtype f32,bf16] [--repeats N]
#
# FERROSPEED names the binary (default target/release/ferrospeed), PYTHON an interpreter with PyTorch and transformers,
# ROUNDS how often the two take turns (default 2; the best of all rounds counts), OUT where the measurements are kept.
# Options are passed to both sides; without --only the cases are those that both sides have.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
ferrospeed=${FERROSPEED:-$here/../../target/release/ferrospeed}
python=${PYTHON:-python3}
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"
"$python" -c 'import torch, transformers; print("PyTorch", torch.__version__, "transformers", transformers.__version__)' ||
    { echo "$python lacks PyTorch or transformers: set PYTHON" >&2; exit 1; }
echo "load $(cut -d' ' -f1-3 /proc/loadavg) on $(nproc) cores at the start"
: >"$out/ours.jsonl"
: >"$out/peer.jsonl"
parts=(train generate)
for argument in "$@"; do [[ $argument == --only* ]] && parts=(""); done
for _ in $(seq "${ROUNDS:-2}"); do
    for part in "${parts[@]}"; do
        "$ferrospeed" bench model --json ${part:+--only "$part"} "$@" >>"$out/ours.jsonl"
        "$python" "$here/model.py" ${part:+--only "$part"} "$@" >>"$out/peer.jsonl"
    done
done
"$python" "$here/model.py" --compare "$out/ours.jsonl" "$out/peer.jsonl"
echo "load $(cut -d' ' -f1-3 /proc/loadavg) at the end; measurements in $out"
