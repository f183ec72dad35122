#!/usr/bin/env bash
# gpu_session.sh - one call on a machine with a GPU: take up what earlier calls left, run steps, pack what there is.
#
#   tools/gpu_session.sh RESULTS STEP...      from the repository's root; steps: see below, in the order to take them
#
# gpu-results.tar.gz in the folder RESULTS is unpacked first, and written anew after every step, once a minute and at
# the end, also where a step failed or the time ran out. From the environment:
#
#   PYTHON    the Python that has vLLM and torch     (python3)
#   MINUTES   for all steps of this call together    (9)
#   PACK_S    seconds between two packings           (60)
set -uo pipefail
[ $# -ge 2 ] || { sed -n '2,12p' "$0"; exit 2; }
RESULTS=$1; shift
PYTHON=${PYTHON:-python3}; MINUTES=${MINUTES:-9}; PACK_S=${PACK_S:-60}
[[ $MINUTES =~ ^[0-9]+(\.[0-9]+)?$ ]] || { echo "MINUTES=$MINUTES: should be a number, such as 9 or 8.5"; exit 2; }
END=$(( $(date +%s) + $(awk -v minutes="$MINUTES" 'BEGIN { printf "%d", 60 * minutes }') ))
ARCHIVE=$RESULTS/gpu-results.tar.gz
MARGIN_S=60   # of a step's time: a program is told so much less, for its start and its end
MIN_S=60    # a program that would be told less is not begun
PACKING_S=15  # what hangs is ended so long before the time is up, so that what is done can still be packed
export PYTHONPATH="$PWD:$PWD/integrations${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

mkdir -p "$RESULTS" out/gpu
[ ! -e "$ARCHIVE" ] || tar -xzf "$ARCHIVE" || { echo "$ARCHIVE is damaged: mend it or move it away"; exit 2; }
# Weights are made anew from their seed. Files that change or go while tar reads are for the next packing: status 1.
pack() {
  local new=$ARCHIVE.new.$BASHPID
  tar -czf "$new" --exclude='*.safetensors' --exclude=unfinished --exclude='.*.json' --ignore-failed-read out/gpu 2>/dev/null
  if [ $? -le 1 ]; then mv "$new" "$ARCHIVE"; else rm -f "$new"; fi
}
# Silent, and its nap ends with it: whoever waits for the end of this script's output must not wait for a sleep.
( trap 'kill "$nap" 2>/dev/null; exit' TERM
  while :; do sleep "$PACK_S" & nap=$!; wait "$nap"; pack; done ) >/dev/null 2>&1 &
packer=$!
trap 'kill "$packer" 2>/dev/null; wait "$packer" 2>/dev/null; pack' EXIT

worst=0
for step in "$@"; do
  left=$(( END - $(date +%s) )); own=$(( left - MARGIN_S ))
  case $step in
    check-first)    what="check --only v2-plain --only v2-slow --only v2-bf16 --only v1-plain" ;;
    check)          what="check" ;;
    swap-first)     what="swap --only b16-4096-pinned-scattered --only b64-4096-pinned-scattered" ;;
    swap)           what="swap" ;;
    profile-first)  what="profile --only llama-8b-b16-pass0 --only llama-8b-b64-pass0" ;;
    profile)        what="profile" ;;
    overload-first) what="overload --out out/gpu/overload-first --arms vllm,always-swap,learned" ;;
    overload)       what="overload" ;;
    *) echo "no step $step"; exit 2 ;;
  esac
  [ "$own" -ge "$MIN_S" ] || { echo "$step: no time left"; worst=3; continue; }
  minutes=$(( own / 60 )).$(( own % 60 * 10 / 60 ))
  echo "== $step: $what --minutes $minutes"
  timeout --kill-after=5 "$(( left - PACKING_S ))" "$PYTHON" -m benchmarks.gpu.$what --minutes "$minutes"
  status=$?
  echo "== $step ended with $status"
  [ "$status" -eq 0 ] || worst=$status
  pack
done
exit "$worst"
