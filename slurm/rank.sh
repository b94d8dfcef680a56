#!/usr/bin/env bash
# One rank:   bash slurm/rank.sh -m accel_train.train RECIPE ...
# Python with these arguments, its output also in RUN/logs/rank-N.log, and its exit code noted if it is the first to
# fail. For the launcher makes 1 of every code, and srun takes the highest of all tasks: 137 of those that it killed.
set -uo pipefail
rank=${RANK:-${SLURM_PROCID:-0}}
mkdir -p "$RUN/logs"
echo "[$(date '+%F %T')] rank $rank on ${SLURMD_NODENAME:-$HOSTNAME}, job ${JOB:-0}" >>"$RUN/logs/rank-$rank.log"
# Every process of the job is told to end; these two have to stay until Python has saved.
exec {log}> >(trap '' INT TERM && exec tee -a "$RUN/logs/rank-$rank.log")
tee=$!
trap : INT TERM
code=0
python "$@" >&"$log" 2>&1 {log}>&- || code=$?
exec {log}>&-
if ((code != 0)); then (set -o noclobber && echo "$code" >"$ACCEL_TRAIN_START/exit-code") 2>/dev/null; fi
for _ in {1..50}; do # not longer, should something that Python left behind still hold the other end
    kill -0 "$tee" 2>/dev/null || break
    sleep 0.1
done
exit "$code"
