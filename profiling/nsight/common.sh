# Sourced by the scripts beside it.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-python3}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export TORCH_SPARSE_MLA_NVTX=1

# Print a command; run it unless DRY_RUN=1.
run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    [ "${DRY_RUN:-0}" = 1 ] || "$@"
}

# Refuse a mode that is none, as the commands do.
check_mode() {
    case "$1" in
        eager | compiled | piecewise | full) ;;
        *)
            echo "${0##*/}: mode: got '$1'; allowed: eager, compiled, piecewise, full" >&2
            exit 2
            ;;
    esac
}

# Fail early, and say what to do, where a tool is not installed.
need() {
    if [ "${DRY_RUN:-0}" != 1 ] && ! command -v "$1" > /dev/null; then
        echo "${0##*/}: $1 is not on the PATH; install $2, or use 'python -m torch_sparse_mla profile'" >&2
        exit 2
    fi
}
