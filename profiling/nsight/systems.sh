#!/usr/bin/env bash
# Timeline of the four-layer step: systems.sh OUT [MODE] [options of profiling/nsight/step.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

out="${1:?usage: systems.sh OUT [eager|compiled|piecewise|full] [options]}"
mode="${2:-full}"
shift $(($# > 1 ? 2 : 1))
check_mode "$mode"
need nsys "Nsight Systems"

mkdir -p "$(dirname "$out")"
run nsys profile --force-overwrite=true --trace=cuda,nvtx --cuda-graph-trace=node \
    --capture-range=cudaProfilerApi --capture-range-end=stop --output="$out" \
    "$python" "$root/profiling/nsight/step.py" --mode "$mode" "$@"
run nsys stats --force-export=true --report nvtx_sum,nvtx_gpu_proj_sum,cuda_gpu_kern_sum "$out.nsys-rep"
