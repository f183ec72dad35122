#!/usr/bin/env bash
# gpu_session.sh - one call on a machine with a GPU: take up what earlier calls left, run steps, pack what there is.
#
#   tools/gpu_session.sh RESULTS STEP...      from the repository's root; steps: see below, in the order to take them
#
# RESULTS is a folder that outlasts the call: gpu-results.tar.gz in it is unpacked first and written anew at the end,
# also where a step failed or the time ran out. From the environment:
#
#   PYTHON    the Python that has vLLM and torch     (python3)
#   MINUTES   for all steps of this call together    (9)
set -uo pipefail
[ $# -ge 2 ] || { sed -n '2,11p' "$0"; exit 2; }
RESULTS=$1; shift
PYTHON=${PYTHON:-python3}; MINUTES=${MINUTES:-9}; END=$(( $(date +%s) + MINUTES * 60 ))
ARCHIVE=$RESULTS/gpu-results.tar.gz
export PYTHONPATH="$PWD:$PWD/integrations${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

mkdir -p "$RESULTS" out/gpu
[ ! -e "$ARCHIVE" ] || tar -xzf "$ARCHIVE"
# Weights are made anew from their seed, and logs of engines that ended well say nothing.
pack() { tar -czf "$ARCHIVE.new" --exclude='*.safetensors' --exclude=unfinished out/gpu && mv "$ARCHIVE.new" "$ARCHIVE"; }
trap pack EXIT

worst=0
for step in "$@"; do
  left=$(( END - $(date +%s) ))
  [ "$left" -gt 30 ] || { echo "$step: no time left"; worst=3; continue; }
  case $step in
    check-first)    what="check --only plain --only prefix --only slow --only bf16" ;;
    check)          what="check" ;;
    swap-first)     what="swap --only b16-4096 --only b64-4096" ;;
    swap)           what="swap" ;;
    profile-first)  what="profile --only llama-8b-b16-pass0 --only llama-8b-b64-pass0" ;;
    profile)        what="profile" ;;
    overload-first) what="overload --out out/gpu/overload-first --arms vllm,always-swap,learned" ;;
    overload)       what="overload" ;;
    *) echo "no step $step"; exit 2 ;;
  esac
  minutes=$(( left / 60 )).$(( left % 60 * 10 / 60 ))
  echo "== $step: $what --minutes $minutes"
  # A piece that hangs is ended before the machine is taken away, so that what is done can be packed.
  timeout "$left" "$PYTHON" -m benchmarks.gpu.$what --minutes "$minutes"
  status=$?
  echo "== $step ended with $status"
  [ "$status" -eq 0 ] || worst=$status
done
exit "$worst"
