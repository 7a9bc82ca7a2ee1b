#!/usr/bin/env bash
# Kernels side by side with PyTorch: the same cases, threads and element types, one after the other, as ratios.
#
#     cargo build --release -p ferrospeed-cli
#     PYTHON=/path/to/python benches/peers/run-kernels.sh [gemm|ops ...] [-- options of `ferrospeed bench`]
#
# FERROSPEED names the binary (default target/release/ferrospeed), PYTHON an interpreter with PyTorch, ROUNDS how often
# the two take turns (default 2; the best of all rounds counts), OUT where the measurements are kept.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
ferrospeed=${FERROSPEED:-$here/../../target/release/ferrospeed}
python=${PYTHON:-python3}
out=${OUT:-$(mktemp -d)}
benches=()
while [[ $# -gt 0 && $1 != -- ]]; do benches+=("$1"); shift; done
[[ ${1:-} == -- ]] && shift
[[ ${#benches[@]} -gt 0 ]] || benches=(gemm ops)
mkdir -p "$out"
"$python" -c 'import torch; print("PyTorch", torch.__version__)' || { echo "$python has no PyTorch: set PYTHON" >&2; exit 1; }
for bench in "${benches[@]}"; do
    : >"$out/$bench-ours.jsonl"
    : >"$out/$bench-peer.jsonl"
    for _ in $(seq "${ROUNDS:-2}"); do
        "$ferrospeed" bench "$bench" --json "$@" >>"$out/$bench-ours.jsonl"
        "$python" "$here/$bench.py" "$@" >>"$out/$bench-peer.jsonl"
    done
    "$python" "$here/kernels_common.py" "$out/$bench-ours.jsonl" "$out/$bench-peer.jsonl" "$bench"
done
