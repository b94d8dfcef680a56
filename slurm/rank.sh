#!/usr/bin/env bash
# One rank:   bash slurm/rank.sh -m accel_train.train RECIPE ...
# Runs Python with these arguments, copies its output to RUN/logs/rank-N.log, and writes its exit code to a file if it
# is the first rank to fail. This is needed because the launcher turns every code into 1, and srun returns the highest
# code of all tasks, which is 137 for those that it killed.
set -uo pipefail
rank=${RANK:-${SLURM_PROCID:-0}}
mkdir -p "$RUN/logs"
echo "[$(date '+%F %T')] rank $rank on ${SLURMD_NODENAME:-$HOSTNAME}, job ${JOB:-0}" >>"$RUN/logs/rank-$rank.log"
# Every process of the job gets the signal to end; this shell and tee must stay until Python has saved.
exec {log}> >(trap '' INT TERM HUP && exec tee -a "$RUN/logs/rank-$rank.log")
tee=$!
trap : INT TERM HUP
code=0
python "$@" >&"$log" 2>&1 {log}>&- || code=$?
exec {log}>&-
if ((code != 0)); then (set -o noclobber && echo "$code" >"$ACCEL_TRAIN_START/exit-code") 2>/dev/null; fi
for _ in {1..50}; do # at most 5 s: a process that Python left behind may keep the pipe open
    kill -0 "$tee" 2>/dev/null || break
    sleep 0.1
done
exit "$code"
