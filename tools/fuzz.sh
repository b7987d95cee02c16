#!/usr/bin/env bash
# Runs every fuzz target for SECONDS (the first argument), two at a time, from its seeds and what earlier runs found.
# Further arguments name targets; without any, all run. Fails if one finds something, and says where the input lies.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
seconds=$1
shift
export RUSTC_BOOTSTRAP=1
# Memory that is refused is an error, not the end. The sanitizer uses an eighth of what is allocated, even if nobody touches that.
export ASAN_OPTIONS="allocator_may_return_null=1:max_allocation_size_mb=4096${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
cargo fuzz build --fuzz-dir .
if [ $# -gt 0 ]; then targets=("$@"); else mapfile -t targets < <(cargo fuzz list --fuzz-dir .); fi
built="${CARGO_TARGET_DIR:-target}/x86_64-unknown-linux-gnu/release"
# Targets write their files into memory, if there is such a folder.
files=$(mktemp -d -p "$(test -w /dev/shm && echo /dev/shm || echo "${TMPDIR:-/tmp}")")
trap 'rm -rf "$files"' EXIT
run() {
  local target=$1
  mkdir -p "corpus/$target" "artifacts/$target"
  # An input of 64 KB must not take memory of another order, nor seconds. The dry run that plans an ONNX model reserves what a real
  # one would take, without touching it.
  local most=256 resident=1024
  case $target in onnx*) most=8192 resident=8192 ;; esac
  if TMPDIR="$files" "$built/$target" "corpus/$target" "seeds/$target" -max_total_time="$seconds" -max_len=65536 \
    -malloc_limit_mb="$most" -rss_limit_mb="$resident" -timeout=20 -artifact_prefix="artifacts/$target/" \
    -print_final_stats=1 >"artifacts/$target.log" 2>&1; then
    echo "$target: $(grep -E 'number_of_executed_units|new_units_added|peak_rss_mb' "artifacts/$target.log" |
      sed 's/stat:://' | tr -s ' \n' ' ')"
  else
    echo "$target: failed"
    # What it panicked with, and the input.
    grep -aE -A3 "panicked at|ERROR: |Test unit written|^Base64" "artifacts/$target.log" | head -n 40
    return 1
  fi
}
failed=0
for ((first = 0; first < ${#targets[@]}; first += 2)); do
  run "${targets[first]}" &
  one=$!
  if ((first + 1 < ${#targets[@]})); then run "${targets[first + 1]}" || failed=1; fi
  wait "$one" || failed=1
done
exit "$failed"
