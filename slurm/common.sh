# shellcheck shell=bash
# What the job scripts share: where the run lies, how its processes are started, and what happens when they end.
# Sourced by the batch script, and again by each task that it starts; by itself it only defines functions.
# The script that sources it has set `script`, its name in the repository.
#
# Set by the site's file (slurm/site.sh, see slurm/sites/) or when submitting, all with a default:
#   ACCELERATE_CONFIG    accelerate's config file: the precision, DDP or FSDP, torch.compile
#   PROCESSES_PER_NODE   default: see count_processes below
#   MASTER_ADDR          default: the job's first node
#   MASTER_PORT          default: follows from the job's number and how often it was started
#   MAX_REQUEUES         requeues in a row that may happen without any progress; default 3
set -euo pipefail

JOB=${SLURM_JOB_ID:-${PBS_JOBID:-0}}
START=${ACCEL_TRAIN_START:-} # in a task; elsewhere begin_run sets it
script=${script:-$0}
given='' # what the user has set, as a command line begins
for name in ACCEL_TRAIN_ROOT ACCEL_TRAIN_SITE ACCELERATE_CONFIG PROCESSES_PER_NODE MAX_REQUEUES; do
    if [[ -n ${!name:-} ]]; then given+="$name=$(printf %q "${!name}") "; fi
done
# Slurm and PBS run a copy of the batch script, so this place is not found through $0: submit from here, or name it.
ACCEL_TRAIN_ROOT=${ACCEL_TRAIN_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}

say() { echo "[$(date +%T)] ${script##*/}: $*"; }
fail() { say "error: $*" >&2; exit 2; }

use_site() { # modules, virtual environment or container: the same in the batch script and in tasks of --export=NONE
    container=()
    site_environment() {
        if [[ -f $ACCEL_TRAIN_ROOT/.venv/bin/activate ]]; then source "$ACCEL_TRAIN_ROOT/.venv/bin/activate"; fi
    }
    site_file=${ACCEL_TRAIN_SITE:-$ACCEL_TRAIN_ROOT/slurm/site.sh}
    # The site's code, its modules and activate scripts are written for an ordinary shell: they read variables that are
    # not set, and `module` returns 1 for harmless reasons. What ends the shell all the same says so.
    trap 'say "error: $site_file, or what it calls, ended the shell on ${HOSTNAME:-this host} (exit code $?)" >&2' EXIT
    set +euo pipefail
    # shellcheck disable=SC1090 # the site's own file may replace site_environment and container
    if [[ -f $site_file ]]; then
        find_module
        source "$site_file"
    fi
    site_environment
    set -euo pipefail
    trap - EXIT
    if ((${#container[@]} == 0)) && ! command -v accelerate >/dev/null; then
        fail "no program accelerate on ${HOSTNAME:-this host}: site_environment in $site_file should activate the" \
            "environment in which accel_train is installed (default: $ACCEL_TRAIN_ROOT/.venv)"
    fi
}

find_module() { # bash has no `module` for users of csh or zsh, who do not read its start-up files
    local file
    for file in /etc/profile.d/{modules,lmod,z00_lmod,z00-lmod}.sh {"${MODULESHOME:-}","${LMOD_PKG:-}"}/init/bash; do
        if command -v module >/dev/null; then return; fi
        # shellcheck disable=SC1090
        if [[ -f $file ]]; then source "$file"; fi
    done
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
    again=("${arguments[@]}")
    mkdir -p "$RUN"
    RUN=$(realpath "$RUN")
    # What this start's tasks tell this script. It is this start's own: another job may own the run (owner.json), and the
    # program, which finds that out, then ends with 2. REQUEUE and the like it removes itself once the run is its own.
    #   begun      when; an older REQUEUE is not this start's
    #   exit-code  of the first rank that failed        exit-NODE  of each node (PBS)
    #   warned     when Slurm warned of the job's end   nodes/     a file for each node that was reached
    START=$RUN/slurm/start-$JOB.${SLURM_RESTART_COUNT:-0}
    rm -rf "$START"
    mkdir -p "$START/nodes" "$RUN/slurm/nccl"
    touch "$START/begun"
    ACCELERATE_CONFIG=${ACCELERATE_CONFIG:-$ACCEL_TRAIN_ROOT/accelerate_configs/multi_node.yaml}
    [[ -f $ACCELERATE_CONFIG ]] || fail "no accelerate config $ACCELERATE_CONFIG: submit from the repository"
    MASTER_PORT=${MASTER_PORT:-$(find_port)}
    # When a collective hangs, each rank of NCCL writes its last ones here (PyTorch's flight recorder).
    export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} TORCH_FR_DUMP_ON_TIMEOUT=1
    export TORCH_FR_DUMP_TEMP_FILE=$RUN/slurm/nccl/rank_
    # How long a save may take after SIGTERM is for Slurm to say (KillWait, GraceTime), not for the launcher's 30 s.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-3600}
    export ACCEL_TRAIN_ROOT ACCELERATE_CONFIG ACCEL_TRAIN_START=$START RUN JOB
    say "job $JOB, start ${SLURM_RESTART_COUNT:-0}, on ${SLURM_JOB_NODELIST:-$HOSTNAME}: $RUN"
}

# A port for the ranks to meet at: another for each job, and for each start of a job, should its port have been taken.
# Rank 0 listens there, on this host, the job's first; a port on which somebody else does is passed over.
find_port() {
    local number=$((${JOB%%[!0-9]*} + 1009 * ${SLURM_RESTART_COUNT:-0})) port tries
    for ((tries = 0; tries < 50; tries++)); do
        port=$((20000 + (number + tries) % 10000))
        if ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then break; fi
    done
    echo "$port"
}

# How many processes a node gets: PROCESSES_PER_NODE; or the GPUs that the batch system gave to the job there; or, where
# it does not count GPUs, those that PyTorch sees; or one.
count_processes() {
    PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
    if [[ -z $PROCESSES_PER_NODE && $(scontrol show node "${SLURMD_NODENAME:-}" 2>/dev/null) =~ Gres=[^[:space:]]*gpu ]]; then
        PROCESSES_PER_NODE=1 # Slurm counts GPUs here, and the job asked for none: those that are visible are others'
    elif [[ -z $PROCESSES_PER_NODE ]]; then
        PROCESSES_PER_NODE=$("${container[@]}" python -c 'import torch; print(torch.accelerator.device_count())') ||
            fail "PyTorch cannot count the GPUs of $HOSTNAME (see above): set PROCESSES_PER_NODE"
    fi
    if ((PROCESSES_PER_NODE == 0)); then PROCESSES_PER_NODE=1; fi
}

# start_launchers NODES PROGRAM...: a launcher on each of the job's first NODES nodes; sets $code
start_launchers() {
    local nodes=$1 address=${MASTER_ADDR:-}
    shift
    count_processes
    if [[ -z $address ]]; then
        address=127.0.0.1
        if ((nodes > 1)); then address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1); fi
    fi
    MASTER_ADDR=$address start_tasks on_node --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 -- "$@"
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
    # These are for the tasks alone: a job that is submitted from here would inherit what this shell exports.
    local for_tasks=(MASTER_PORT="$MASTER_PORT")
    if [[ -n ${MASTER_ADDR:-} ]]; then for_tasks+=(MASTER_ADDR="$MASTER_ADDR"); fi
    if [[ -n ${PROCESSES_PER_NODE:-} ]]; then for_tasks+=(PROCESSES_PER_NODE="$PROCESSES_PER_NODE"); fi
    # shellcheck disable=SC2016 # expanded in the task, not here
    env "${for_tasks[@]}" srun "${options[@]}" bash -c \
        'source "$ACCEL_TRAIN_ROOT/slurm/common.sh"; stand_by "$@"; exit "$code"' "$script" "$function" "$@" || code=$?
}

# stand_by FUNCTION ARGUMENT...: call it in a child, and wait; sets $code. In each task, for the warning before the time
# limit comes to all its processes. Launchers, `module` and Python would die of it until the ranks have installed
# handlers of their own, so that they all ignore it; and the ranks that it came too early for read here that it came.
stand_by() {
    local child again signalled=0
    trap '' USR1
    "$@" &
    child=$!
    trap 'signalled=1; date +%s >"$START/warned"' USR1
    trap 'signalled=1' TERM
    code=0
    wait "$child" || code=$?
    while ((signalled)); do # the signal, not the child, has ended `wait`
        signalled=0 again=0
        wait "$child" 2>/dev/null || again=$?
        ((again == 127)) || code=$again # 127: that code was known before
    done
}

enter_task() { # in each task, before its program takes its place
    # A local disk for data loaders and compilers. The TMPDIR of the host from which the job was submitted is none here.
    local own=${TMPDIR:-}
    if [[ ! -d $own || ! -w $own ]] || ! df --local "$own" >/dev/null 2>&1; then own=/tmp; fi
    export TMPDIR=${SLURM_TMPDIR:-${NODE_TMPDIR:-$own}}
    # A site's file may derive MASTER_ADDR from the name of the host: the one that counts is the batch script's.
    local address=${MASTER_ADDR:-} port=$MASTER_PORT
    use_site
    if [[ -n $address ]]; then export MASTER_ADDR=$address; else unset MASTER_ADDR; fi
    export MASTER_PORT=$port
    touch "$START/nodes/${node_name:-${SLURMD_NODENAME:-$HOSTNAME}}"
}

# on_node PROGRAM... (options of python, such as -m accel_train.train RECIPE): one launcher for all processes of a node
on_node() {
    enter_task
    launch_node "$SLURM_NNODES" "$SLURM_NODEID" "$@"
}

# launch_node NODES NODE PROGRAM...: become the launcher of this node's processes, or its only process
launch_node() {
    local nodes=$1 node=$2 processes=$PROCESSES_PER_NODE
    shift 2
    if ((nodes * processes == 1)); then # without a launcher, which does not hand on signals to a single process
        unset PBS_NODENUM PBS_TASKNUM # pbsdsh starts one process, not one for each line of the node file
        unset MASTER_ADDR MASTER_PORT # it meets nobody
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

become_rank() { # PROGRAM...: a rank without a launcher reads accelerate's config file by itself
    export ACCEL_TRAIN_LAUNCHER_CONFIG=$ACCELERATE_CONFIG
    exec "${container[@]}" bash "$ACCEL_TRAIN_ROOT/slurm/rank.sh" "$@"
}

# end_run CODE: requeue the job if its ranks have saved and asked for it; else end it with the code of its ranks
end_run() {
    local code=$1 update stops
    if ((${terminated:-0})); then
        say "ended by the batch system; what the run has saved is in $RUN"
        exit 143
    fi
    if ! asks_for_requeue; then
        if ((code != 0)); then
            code=$(cat "$START/exit-code" 2>/dev/null) || code=$1 # of the first rank that failed
            explain_failure "$code"
        else
            rm -rf "$START"
        fi
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
            "Give the job more time ($more_time), or see why an update takes so long." >&2
        exit 1
    fi
    say "interrupted and saved at update $update: requeueing"
    if ! requeue; then
        say "error: this job may not be requeued. Go on with: $(command_again)" >&2
        exit 1
    fi
    rm -rf "$START"
    exit 0
}

# Whether it was this start that laid REQUEUE: not an earlier one, nor, if this one was refused (2), the run's owner.
asks_for_requeue() {
    [[ -f $RUN/REQUEUE && ! $RUN/REQUEUE -ot $START/begun ]] && [[ $(cat "$START/exit-code" 2>/dev/null) != 2 ]]
}

explain_failure() {
    local node absent=()
    for node in $(all_nodes); do
        if [[ ! -e $START/nodes/$node ]]; then absent+=("$node"); fi
    done
    if ((${#absent[@]} > 0)); then
        say "no task could write to $RUN on ${absent[*]}: are these nodes up, do they see that directory?" >&2
    fi
    say "failed with exit code $1; the first error above counts, each rank's own are in $RUN/logs." \
        "To go on with the run: $(command_again)" >&2
}

warn_of_short_lead() { # was there time to save between the warning and the end that it warned of?
    local lead save
    lead=$(seconds_of_warning) || return 0
    save=$(awk -F '"seconds": ' '/"kind": "checkpoint"/ && int($2) > most { most = int($2) } END { print most + 0 }' \
        "$RUN/metrics.jsonl" 2>/dev/null || true)
    if ((${save:-0} * 2 > lead)); then
        say "warning: a save takes $save s, the warning came $lead s before the end:" \
            "$(longer_warning $((save * 4)))" >&2
    fi
}

# The rest is Slurm's way; pbs/train.pbs has its own.

more_time='sbatch --time'

requeue() { scontrol requeue "$JOB"; }

all_nodes() { scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null || true; }

# Slurm does not tell what --signal was, but when the job is to end. False if no warning came.
seconds_of_warning() {
    local end
    [[ -s $START/warned ]] && end=$(date -d "$(job_field EndTime)" +%s 2>/dev/null) && echo $((end - $(<"$START/warned")))
}

longer_warning() { echo "sbatch --signal=USR1@$1"; }

job_field() { # NAME: what Slurm has noted of this job; nothing for what it has not
    local found=${shown:-$(scontrol show job --oneliner "$JOB" 2>/dev/null || true)}
    sed -n "s/.* $1=\([^ ]*\).*/\1/p" <<<"$found" | grep -vx '(null)' || true
}

# job_options NODES: sets $options to what sbatch was told of this job, since a job that it submits inherits none of it.
# Of some options Slurm sets a variable, others `scontrol` tells; --signal neither does (but SBATCH_SIGNAL is inherited).
job_options() {
    local name value
    shown=$(scontrol show job --oneliner "$JOB" 2>/dev/null || true)
    options=(--nodes="$1")
    while read -r name value; do
        if [[ -n $value ]]; then options+=("--$name=$value"); fi
    done < <(
        echo "job-name ${SLURM_JOB_NAME:-}"
        echo "partition ${SLURM_JOB_PARTITION:-}"
        echo "time $(job_field TimeLimit | grep '[0-9]')" # not UNLIMITED
        echo "account $(job_field Account)"
        echo "qos $(job_field QOS)"
        echo "constraint $(job_field Features)"
        echo "reservation $(job_field Reservation)"
        echo "licenses $(job_field Licenses)"
        echo "exclude $(job_field ExcNodeList)"
        echo "mem ${SLURM_MEM_PER_NODE:-}"
        echo "mem-per-cpu ${SLURM_MEM_PER_CPU:-}"
        echo "mem-per-gpu ${SLURM_MEM_PER_GPU:-}"
        echo "ntasks-per-node ${SLURM_NTASKS_PER_NODE:-}"
        echo "cpus-per-task ${SLURM_CPUS_PER_TASK:-}"
        echo "gres $(job_field TresPerNode | sed 's/gres[:/]//g')" # of --gpus-per-node, too
        echo "gpus-per-task ${SLURM_GPUS_PER_TASK:-}"
        echo "gpus-per-socket ${SLURM_GPUS_PER_SOCKET:-}"
    )
    if [[ $(job_field OverSubscribe) == NO ]]; then options+=(--exclusive); fi
    if [[ -n ${SLURM_GPUS:-} ]]; then # --gpus, of all nodes together: 4, or a100:4
        value=${SLURM_GPUS##*:}
        options+=(--gpus="${SLURM_GPUS%"$value"}$((value * $1 / SLURM_NNODES))")
    fi
}

# What a person types to go on with this run in a new job: Slurm requeues an ended job for some minutes only.
command_again() {
    job_options "${SLURM_NNODES:-1}"
    printf 'cd %q && %ssbatch' "$PWD" "$given"
    printf ' %q' "${options[@]}" "$ACCEL_TRAIN_ROOT/$script" "${again[@]}"
}
