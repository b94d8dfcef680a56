# shellcheck shell=bash
# What the job scripts share: where the run lies, how its processes are started, and what happens when they end.
# Sourced by the batch script, and again by each task that it starts; by itself it only defines functions.
#
# Set by the site's file (slurm/site.sh, see slurm/sites/) or when submitting, all with a default:
#   ACCELERATE_CONFIG    accelerate's config file, which decides the precision and between DDP and FSDP
#   PROCESSES_PER_NODE   default: as many as the node gives GPUs to the job, or one
#   MASTER_PORT          default: follows from the job's number
#   MAX_REQUEUES         requeues in a row that may happen without any progress; default 3
set -euo pipefail

# Slurm runs a copy of the batch script, so this place is not found through $0: submit from the repository, or name it.
ACCEL_TRAIN_ROOT=${ACCEL_TRAIN_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}

say() { echo "[$(date +%T)] ${0##*/}: $*"; }
fail() { say "error: $*" >&2; exit 2; }

use_site() { # modules, virtual environment or container: the same in the batch script and in tasks of --export=NONE
    container=()
    site_environment() {
        if [[ -f $ACCEL_TRAIN_ROOT/.venv/bin/activate ]]; then source "$ACCEL_TRAIN_ROOT/.venv/bin/activate"; fi
    }
    local site=${ACCEL_TRAIN_SITE:-$ACCEL_TRAIN_ROOT/slurm/site.sh}
    # shellcheck disable=SC1090 # the site's own file may replace site_environment and container
    if [[ -f $site ]]; then source "$site"; fi
    set +u # modules and activate scripts use variables that are not set
    site_environment
    set -u
}

# begin_run RECIPE [--key value ...]: find or make the run's directory.
begin_run() {
    [[ ${1:--} != -* ]] || fail "usage: sbatch [options of sbatch] slurm/NAME.sbatch RECIPE [--key value ...]"
    local recipe=$1 previous='' word
    RUN=''
    arguments=("$@")
    for word in "$@"; do
        [[ $previous != --output-dir ]] || RUN=$word
        [[ $word != --output-dir=* ]] || RUN=${word#*=}
        previous=$word
    done
    if [[ -z $RUN ]]; then # a requeued job has the same number, and so finds the same directory
        recipe=${recipe##*/}
        RUN=runs/${recipe%.yaml}/job-$JOB
        arguments+=(--output-dir "$RUN")
    fi
    mkdir -p "$RUN"
    RUN=$(realpath "$RUN")
    # Only what is this job's: another one may own the run (owner.json), and the program, which finds that out, then ends
    # with 2. REQUEUE and the like it removes itself once the run is its own.
    rm -rf "$RUN/slurm/job-$JOB"
    mkdir -p "$RUN/slurm/job-$JOB/nodes"
    ACCELERATE_CONFIG=${ACCELERATE_CONFIG:-$ACCEL_TRAIN_ROOT/accelerate_configs/multi_node.yaml}
    [[ -f $ACCELERATE_CONFIG ]] || fail "no accelerate config $ACCELERATE_CONFIG: submit from the repository"
    MASTER_PORT=${MASTER_PORT:-$((20000 + ${JOB%%[!0-9]*} % 10000))}
    # When a collective hangs, each rank of NCCL writes its last ones here (PyTorch's flight recorder).
    export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} TORCH_FR_DUMP_ON_TIMEOUT=1
    export TORCH_FR_DUMP_TEMP_FILE=$RUN/slurm/nccl/rank_
    mkdir -p "$RUN/slurm/nccl"
    # How long a save may take after SIGTERM is for Slurm to say (KillWait, GraceTime), not for the launcher's 30 s.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-3600}
    export ACCEL_TRAIN_ROOT ACCELERATE_CONFIG MASTER_PORT RUN JOB
    say "job $JOB, start ${SLURM_RESTART_COUNT:-0}, on ${SLURM_JOB_NODELIST:-$HOSTNAME}: $RUN"
}

# start_tasks FUNCTION OPTION... -- ARGUMENT...: call a function of this file in each task of srun's; sets $code.
start_tasks() {
    local function=$1 options=(--kill-on-bad-exit=1 --export=ALL)
    shift
    while [[ $1 != -- ]]; do
        options+=("$1")
        shift
    done
    shift
    # srun takes the job's --cpus-per-task only if it is told to, else a task may be bound to one core
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi
    if ((${SLURM_NTASKS:-1} > 1)); then options+=(--label); fi
    # What Slurm ends (scancel, time limit, lost node, requeue from outside) is not requeued from here. But this shell
    # outlives its srun: one that was left behind would cancel the next start's step, which has the same number.
    terminated=0
    trap 'terminated=1' TERM
    code=0
    # shellcheck disable=SC2016 # expanded in the task, not here
    srun "${options[@]}" bash -c 'source "$ACCEL_TRAIN_ROOT/slurm/common.sh"; "$@"' "$0" "$function" "$@" || code=$?
    export code
}

enter_task() { # in each task, before its program takes its place
    # The warning before the time limit. The launcher would die of it and leave its ranks behind; so would a rank that
    # is still importing. What is ignored here they ignore too, until the ranks install handlers of their own.
    trap '' USR1
    # Not the TMPDIR of the host from which the job was submitted: data loaders and compilers want a local disk.
    export TMPDIR=${SLURM_TMPDIR:-${NODE_TMPDIR:-/tmp}}
    use_site
    touch "$RUN/slurm/job-$JOB/nodes/${SLURMD_NODENAME:-$HOSTNAME}"
}

# on_node PROGRAM... (options of python, such as -m accel_train.train RECIPE): one launcher for all processes of a node
on_node() {
    enter_task
    launch_node "$SLURM_NNODES" "$SLURM_NODEID" "$@"
}

# launch_node NODES NODE PROGRAM...: become the launcher of this node's processes, or its only process
launch_node() {
    local nodes=$1 node=$2 processes=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
    shift 2
    if ((nodes * processes == 1)); then # without a launcher, which does not hand on signals to a single process
        unset PBS_NODENUM PBS_TASKNUM # pbsdsh starts one process, not one for each line of the node file
        become_rank "$@"
    fi
    exec "${container[@]}" accelerate launch --config_file "$ACCELERATE_CONFIG" \
        --num_machines "$nodes" --num_processes $((nodes * processes)) --machine_rank "$node" \
        --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" \
        --no_python bash "$ACCEL_TRAIN_ROOT/slurm/rank.sh" "$@"
}

on_rank() { # PROGRAM...: one task a rank; the program finds its number in Slurm's variables
    enter_task
    become_rank "$@"
}

become_rank() { # what accelerate launch would tell a rank: the precision. The rest Slurm tells, or nobody need.
    ACCELERATE_MIXED_PRECISION=$(sed -n 's/^mixed_precision: *"\{0,1\}\([a-z0-9]*\).*/\1/p' "$ACCELERATE_CONFIG")
    export ACCELERATE_MIXED_PRECISION
    unset MASTER_ADDR
    exec "${container[@]}" bash "$ACCEL_TRAIN_ROOT/slurm/rank.sh" "$@"
}

# end_run CODE: requeue the job if its ranks have saved and asked for it; else end it with the code of its ranks
end_run() {
    if ((${terminated:-0})); then
        say "ended by Slurm; what the run has saved is in $RUN"
        exit 143
    fi
    local code=$1 update stops
    if ((code != 0)); then code=$(cat "$RUN/slurm/job-$JOB/exit-code" 2>/dev/null) || code=$1; fi # of the first rank that failed
    if [[ ! -f $RUN/REQUEUE ]] || ((code == 2)); then # 2: refused, or taken over; REQUEUE may be the owner's
        if ((code != 0)); then explain_failure "$code"; fi
        exit "$code"
    fi
    update=$(<"$RUN/REQUEUE")
    rm -f "$RUN/REQUEUE" # obeyed once
    echo "$update" >>"$RUN/slurm/requeues"
    warn_of_short_lead
    # how many of the latest stops, in a row, were at this update
    stops=$(tac "$RUN/slurm/requeues" | awk -v update="$update" '$1 != update { exit } { n++ } END { print n + 0 }')
    if ((stops > ${MAX_REQUEUES:-3})); then
        say "error: stopped $stops times in a row at update $update, without progress: not requeued." \
            "Give the job more time (sbatch --time), or see why an update takes so long." >&2
        exit 1
    fi
    say "interrupted and saved at update $update: requeueing"
    if ! requeue; then
        say "error: this job may not be requeued. Go on with: sbatch ${0##*/} ${arguments[*]}" >&2
        exit 1
    fi
    exit 0
}

requeue() { scontrol requeue "$JOB"; }

explain_failure() {
    local node absent=()
    for node in $(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null); do
        if [[ ! -e $RUN/slurm/job-$JOB/nodes/$node ]]; then absent+=("$node"); fi
    done
    if ((${#absent[@]} > 0)); then
        say "no task could write to $RUN on ${absent[*]}: are these nodes up, do they see that directory?" >&2
    fi
    say "failed with exit code $1; the first error above counts, each rank's own are in $RUN/logs." \
        "To go on with the run: scontrol requeue $JOB" >&2
}

warn_of_short_lead() { # was there time to save between the warning and the time limit?
    local lead save
    lead=$(sed -n 's/^#SBATCH.*--signal=[A-Z0-9:]*@\([0-9]*\).*/\1/p' "$0" 2>/dev/null || true)
    save=$(awk -F '"seconds": ' '/"kind": "checkpoint"/ && int($2) > most { most = int($2) } END { print most + 0 }' \
        "$RUN/metrics.jsonl" 2>/dev/null || true)
    if ((${save:-0} * 2 > ${lead:-120})); then
        say "warning: a save takes $save s, the warning comes ${lead:-120} s before the end: sbatch --signal=USR1@$((save * 4))" >&2
    fi
}

export JOB=${SLURM_JOB_ID:-${PBS_JOBID:-0}}
