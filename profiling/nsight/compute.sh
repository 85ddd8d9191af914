#!/usr/bin/env bash
# Counters of the kernels in one NVTX range: compute.sh OUT RANGE [MODE] [options of profiling/nsight/step.py]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage="usage: compute.sh OUT RANGE [eager|compiled|piecewise|full] [options]"
out="${1:?$usage}"
range="${2:?$usage}"
mode="${3:-eager}"
shift $(($# > 2 ? 3 : 2))
check_mode "$mode"
need ncu "Nsight Compute"

# Push and pop ranges end in a slash there, and a slash within a name is escaped.
include="torch_sparse_mla@${range//\//\\/}/"
mkdir -p "$(dirname "$out")"
# The clocks are left as they are: other people's work may run on the machine.
run ncu --force-overwrite --clock-control none --set full --profile-from-start off \
    --nvtx --nvtx-include "$include" --graph-profiling node --export "$out" \
    "$python" "$root/profiling/nsight/step.py" --mode "$mode" --steps 1 "$@"
run ncu --import "$out.ncu-rep" --page details
