#!/usr/bin/env bash
# Build, test, check and measure on a machine that has an NVIDIA GPU, torch, nvcc and triton, and that
# may have no network. Run it from anywhere:
#
#   benchmarks/gpu_run.sh [--wheels DIR] [--minutes N] [--out DIR] [--stages "NAME ..."]
#                         [--commit TEXT] [--dry-run]
#
#   --wheels DIR   wheels to install beside what is there: what the build and the tests miss (ninja,
#                  setuptools, pybind11, rich, pytest, hypothesis), and peers to measure against
#                  (liger-kernel, cut-cross-entropy, quack-kernels and what they need)
#   --minutes N    all of it ends in this time (default 30); the most important comes first
#   --out DIR      results.json, summary.json and log.txt, whole after every stage
#                  (default bench-report/gpu)
#   --stages "..." these stages only; their names are in the table that is printed last
#   --commit TEXT  what the results call the source (default: what git says)
#   --dry-run      rehearse without a GPU: small shapes, on the CPU
#
# A stage that fails, or that takes too long, does not stop the next. Nothing is installed outside of
# build/gpu, and what is built there serves the next call, so that a short time can be spent on some
# of the stages at a time. `make results FROM=DIR/results.json` keeps the results. Exit code: how many
# stages failed.
set -uo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
wheels="" minutes=30 out="$here/bench-report/gpu" only="" dry=""
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=$(realpath -m "$2"); shift 2 ;;
    --minutes) minutes=$2; shift 2 ;;
    --out) out=$(realpath -m "$2"); shift 2 ;;
    --stages) only=" $2 "; shift 2 ;;
    --commit) export STORAGE_OPS_COMMIT=$2; shift 2 ;;
    --dry-run) dry=1; shift ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit 2 ;;
  esac
done
if ! [[ $minutes =~ ^[0-9]+$ ]] || [ "$minutes" -eq 0 ]; then
  echo "--minutes is $minutes; expected a whole number of at least 1"; exit 2
fi
if [ -n "$wheels" ] && [ ! -d "$wheels" ]; then
  echo "--wheels is $wheels; expected a folder"; exit 2
fi

cd "$here" || exit 2
work="$here/build/gpu" site="$here/build/gpu/site"
rm -rf "$work" && mkdir -p "$work/json" "$site" "$out" || exit 2
log="$out/log.txt" table="$work/stages.tsv"
: >"$log"; : >"$table"
end=$((SECONDS + 60 * minutes)) failed=0
trap 'kill $(jobs -p) 2>/dev/null; exit 130' INT TERM
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$PATH" PYTHONUNBUFFERED=1
export STORAGE_OPS_REQUIRE_CUDA=${dry:+0}
: "${STORAGE_OPS_REQUIRE_CUDA:=1}"
export MAX_JOBS="${MAX_JOBS:-$(nproc)}"
[ -n "$dry" ] && export CUDA_VISIBLE_DEVICES=""

note() { # name, outcome, seconds: keep it, and rewrite the results so far
  printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$table"
  printf '%-28s %-34s %5s s\n' "$1" "$2" "$3"
  "$python" - "$work" "$out" <<'PY'
import json, pathlib, sys
work, out = map(pathlib.Path, sys.argv[1:])
stages = [line.split("\t") for line in (work / "stages.tsv").read_text().splitlines()]
keys = ("stage", "outcome", "seconds")
summary = [dict(zip(keys, (name, text, int(s)))) for name, text, s in stages]
(out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
paths = sorted((work / "json").glob("*.json"), key=lambda p: p.stat().st_mtime)
found = [json.loads(p.read_text()) for p in paths]
(out / "results.json").write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
PY
}

stage() { # name, seconds it may take, command...
  local name=$1 limit=$2 left=$((end - SECONDS)) begin=$SECONDS code outcome
  shift 2
  if [ -n "$only" ] && [[ $only != *" $name "* ]]; then return; fi
  if [ $left -lt 10 ]; then note "$name" "not begun, no time left" 0; return; fi
  [ "$limit" -gt $left ] && limit=$left
  printf '\n===== %s: %s\n' "$name" "$*" >>"$log"
  # In the background, so that an interrupt reaches this script.
  timeout -k 5 "$limit" "$@" >>"$log" 2>&1 &
  wait $!
  code=$?
  case $code in
    0) outcome="ok" ;;
    75) outcome="skipped, a tool is missing"; [ -n "$dry" ] || failed=$((failed + 1)) ;;
    124 | 137) outcome="stopped after $limit s"; failed=$((failed + 1)) ;;
    *) outcome="FAILED, exit code $code"; failed=$((failed + 1))
       tail -n 3 "$log" | sed 's/^/    /' ;;
  esac
  note "$name" "$outcome" $((SECONDS - begin))
}

facts() {
  nvidia-smi || true
  nvcc --version || true
  "$python" - <<'PY'
import sys, torch
print(sys.version, torch.__version__, torch.version.cuda)
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    print(p.name, p.multi_processor_count, "multiprocessors", p.total_memory >> 20, "MiB")
PY
}

packages() { # one by one: a wheel for another Python must not keep the rest out
  local wheel missing=""
  if [ -n "$wheels" ]; then
    for wheel in "$wheels"/*.whl; do
      [ -f "$wheel" ] || continue
      "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" \
        "$wheel" || echo "not installed: $wheel"
    done
  fi
  for name in ninja pybind11 rich pytest hypothesis; do
    "$python" -c "import $name" || missing="$missing $name"
  done
  "$python" -c 'import setuptools as s; assert int(s.__version__.split(".")[0]) >= 77' ||
    missing="$missing setuptools>=77"
  if [ -n "$missing" ]; then
    echo "missing:$missing; put their wheels into a folder and give it as --wheels"
    return 1
  fi
}

build() {
  if [ -n "$dry" ]; then
    export TORCH_CUDA_ARCH_LIST=9.0
  else
    export FORCE_CUDA=1
    TORCH_CUDA_ARCH_LIST=$("$python" -c 'import torch
print("%d.%d" % torch.cuda.get_device_capability())') || return 1
    export TORCH_CUDA_ARCH_LIST
  fi
  mkdir -p storage_ops/lib
  "$python" setup.py -q egg_info build_ext --inplace || return 1
  cat build/native-*/libstorage_ops_cu*.o.log 2>/dev/null |
    grep -E "registers|spill" | sort | uniq -c
  "$python" -m storage_ops info
}

sanitize() { # tool: the kernels of this package, in the tests of the row kernel
  local filter=()
  if ! command -v compute-sanitizer; then
    echo "compute-sanitizer is not on the PATH"
    return 75
  fi
  # Faults of libraries are not ours to find, and these tools are slow.
  if [ "$1" != memcheck ] && compute-sanitizer --help | grep -q -- --kernel-name; then
    filter=(--kernel-name kns=cross_entropy_rows)
  fi
  # Without the cache every tensor is an allocation of its own, and its end is known.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 99 \
    --target-processes all "${filter[@]}" "$python" -m pytest -p no:cacheprovider -m cuda tests \
    -k "row_kernel and (plain or all) and not 50257"
}

export -f facts packages build sanitize
export here python wheels site dry

measure() { # name, seconds, benchmark, arguments...
  local name=$1 limit=$2 part=$3
  shift 3
  [ -f "benchmarks/$part.py" ] || return 0
  if [ -n "$dry" ]; then set -- "$@" --quick --repeats 1; else set -- --repeats 9 "$@"; fi
  stage "$name" "$limit" "$python" -m "benchmarks.$part" --json "$work/json/$name.json" \
    --device "$([ -n "$dry" ] && echo cpu || echo cuda)" "$@"
}
loss() { # shape, seconds, arguments...
  local shape=$1 limit=$2 name="loss-${1//[, ]/}"
  shift 2
  [ -n "$dry" ] && shape=quick
  measure "$name" "$limit" linear_cross_entropy --shapes "$shape" "$@"
}

share=$((60 * minutes))
stage facts 60 bash -c facts
stage packages 120 bash -c packages
stage build $((share / 4 < 300 ? 300 : share / 4)) bash -c build
stage tests $((share / 4)) "$python" -m pytest -p no:cacheprovider -m cuda --durations=5 \
  --continue-on-collection-errors tests
loss R1 240
measure row_kernel 60 row_kernel
for tool in memcheck racecheck initcheck; do
  stage "$tool" $((share / 12 < 60 ? 60 : share / 12)) bash -c "sanitize $tool"
done
loss R2 200
measure output_discard 150 output_discard
if [ -z "$dry" ]; then # one shape is rehearsal enough
  loss R7 150
  loss R6 150
fi
measure train_gpt 200 train_gpt
measure selective_checkpoint 150 selective_checkpoint
measure autochunk 200 autochunk
if [ -z "$dry" ]; then
  loss R8 120
  loss R5 200
  measure loss-R1-variants 200 linear_cross_entropy --shapes R1 --variants none "half ignored"
  loss R3 150
  loss R4 200
  loss "R9, 1024" 90
  loss "R9, 512" 90
  loss "R9, 128" 90
fi
measure storage 60 storage
measure demo 150 demo

echo
echo "results: $out/results.json, log: $log"
"$python" -m benchmarks._digest "$out/results.json" || true
echo
column -t -s "$(printf '\t')" "$table" 2>/dev/null || cat "$table"
exit "$failed"
