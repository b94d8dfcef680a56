# shellcheck shell=bash
# Functions that all job scripts use: find the run's directory, start its processes, and handle their end.
# The batch script sources this file, and so does each task that it starts. Sourcing it only defines functions.
# The script that sources it must first set `script`, its own path in the folder that has slurm/
# (a checkout, or what accel-train init wrote).
#
# The site's file (slurm/site.sh, see slurm/sites/) or the user may set these variables; all have a default:
#   ACCELERATE_CONFIG    accelerate's config file: the precision, DDP or FSDP, torch.compile; see begin_run
#   PROCESSES_PER_NODE   default: see count_processes below
#   MASTER_ADDR          default: the job's first node
#   MASTER_PORT          default: computed from the job's number and how often it was started
#   MAX_REQUEUES         how many requeues in a row are allowed without any progress; default 3
#   DOCTOR               print (default): the start of the training checks the nodes, and only prints;
#                        strict: if a check fails, the job ends; off: without it
set -euo pipefail

JOB=${SLURM_JOB_ID:-${PBS_JOBID:-0}}
# Of an array, the number of one element is also the number of all: scontrol would requeue them together.
if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then JOB=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-0}; fi
START=${ACCEL_TRAIN_START:-} # set in a task; in the batch script begin_run sets it
script=${script:-$0}
given='' # the variables that the user has set, as the beginning of a command line
for name in ACCEL_TRAIN_ROOT ACCEL_TRAIN_SITE ACCELERATE_CONFIG PROCESSES_PER_NODE MAX_REQUEUES DOCTOR; do
    if [[ -n ${!name:-} ]]; then given+="$name=$(printf %q "${!name}") "; fi
done
# Slurm and PBS run a copy of the batch script, so $0 does not show where the repository is. Submit from the repository,
# or set this variable.
ACCEL_TRAIN_ROOT=${ACCEL_TRAIN_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}

say() { echo "[$(date +%T)] ${script##*/}: $*"; }
fail() { say "error: $*" >&2; exit 2; }

# In bash's arithmetic a word is the name of a variable: `set -u` would end the job there, perhaps after the training.
# 08 would be a mistake, and 010 would be 8.
for name in PROCESSES_PER_NODE MAX_REQUEUES MASTER_PORT LEAD_SECONDS; do
    [[ ${!name:-0} =~ ^[0-9]{1,9}$ ]] || fail "$name is ${!name}; expected a number"
    if [[ -n ${!name:-} ]]; then printf -v "$name" %d $((10#${!name})); fi
done

use_site() { # load modules, virtual environment or container; also in tasks, which --export=NONE starts without them
    container=()
    site_environment() {
        if [[ -f $ACCEL_TRAIN_ROOT/.venv/bin/activate ]]; then source "$ACCEL_TRAIN_ROOT/.venv/bin/activate"; fi
    }
    site_file=${ACCEL_TRAIN_SITE:-$ACCEL_TRAIN_ROOT/slurm/site.sh}
    # The site's file, its modules and activate scripts are written for an ordinary shell: they read unset variables,
    # and `module` returns 1 for harmless reasons. If one of them ends the shell anyway, the trap prints a message.
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

find_module() { # for users of csh and zsh: bash, whose start-up files they do not read, has no `module`
    local file
    for file in /etc/profile.d/{modules,lmod,z00_lmod,z00-lmod}.sh {"${MODULESHOME:-}","${LMOD_PKG:-}"}/init/bash; do
        if command -v module >/dev/null; then return; fi
        # shellcheck disable=SC1090
        if [[ -f $file ]]; then source "$file"; fi
    done
}

# begin_run RECIPE [--key value ...]: find or create the run's directory. With a list of `accel-train submit` (*.jsonl)
# instead of a recipe, this job is one of its lines.
begin_run() {
    [[ ${1:--} != -* ]] || fail "usage: sbatch [options of sbatch] slurm/NAME.sbatch RECIPE [--key value ...]"
    if [[ $1 == *.jsonl ]]; then
        find_element "$1" "${SLURM_ARRAY_TASK_ID:-${PBS_ARRAY_INDEX:-0}}"
        set -- "$element/recipe.yaml" --output-dir "$element"
    fi
    export DOCTOR=${DOCTOR:-print} # for the training's start: see docs/doctor.md
    local recipe=$1 previous='' word
    RUN='' gpus=''
    arguments=("$@")
    for word in "$@"; do
        [[ $previous != --output-dir ]] || RUN=$word
        [[ $word != --output-dir=* ]] || RUN=${word#*=}
        previous=$word
    done
    if [[ -z $RUN ]]; then # a requeued job keeps its number, so it finds the same directory
        recipe=${recipe##*/}
        RUN=runs/${recipe%.yaml}/job-$JOB
        arguments+=(--output-dir "$RUN")
    fi
    again=("${arguments[@]}")
    mkdir -p -- "$RUN"
    RUN=$(realpath -- "$RUN")
    # Files through which this start's tasks report to this script. Each start has its own folder, because another job
    # may own the run (owner.json); the program then ends with 2. Once it owns the run, it removes an old REQUEUE
    # itself.
    #   begun      its time is that of this start; an older REQUEUE belongs to an earlier start
    #   exit-code  of the first rank that failed        exit-NODE  of each node (PBS)
    #   warned     when Slurm warned of the job's end   nodes/     one file for each node that was reached
    START=$RUN/slurm/start-$JOB.${SLURM_RESTART_COUNT:-0}
    rm -rf "$START"
    mkdir -p "$START/nodes" "$RUN/slurm/nccl" "$RUN/logs"
    # The run may be somebody else's: no link may lead what is written there to another file of the user's.
    find "$RUN/slurm/" "$RUN/logs/" -mindepth 1 -maxdepth 1 -type l -delete
    touch "$START/begun"
    echo "$JOB" >"$RUN/slurm/job" # whose state `accel-train runs` shows
    trap 'signalled=1; pass_on_warning' USR1
    if [[ -z ${ACCELERATE_CONFIG:-} ]]; then
        count_gpus
        ACCELERATE_CONFIG=$ACCEL_TRAIN_ROOT/accelerate_configs/multi_node.yaml
        if ((gpus == 0)); then
            ACCELERATE_CONFIG=$ACCEL_TRAIN_ROOT/accelerate_configs/multi_cpu.yaml # bf16 is slow on most CPUs
            say "no GPUs in this job: it computes on CPUs, in float32 (accelerate_configs/multi_cpu.yaml)"
        fi
    fi
    [[ -f $ACCELERATE_CONFIG ]] || fail "no accelerate config $ACCELERATE_CONFIG"
    MASTER_PORT=${MASTER_PORT:-$(find_port)}
    # When an NCCL collective hangs, each rank writes its last collectives here (PyTorch's flight recorder).
    export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} TORCH_FR_DUMP_ON_TIMEOUT=1
    export TORCH_FR_DUMP_TEMP_FILE=$RUN/slurm/nccl/rank_
    # Slurm limits how long a save may take after SIGTERM (KillWait, GraceTime). The launcher's own limit is 30 s.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-3600}
    export ACCEL_TRAIN_ROOT ACCELERATE_CONFIG ACCEL_TRAIN_START=$START RUN JOB
    say "job $JOB, start ${SLURM_RESTART_COUNT:-0}, on ${SLURM_JOB_NODELIST:-$HOSTNAME}: $RUN"
}

# find_element LIST INDEX: sets $element to the run's directory that a line of LIST (FOLDER/jobs/NAME.jsonl) names. The
# names have no characters that a shell or JSON would quote; the options, which may, are in that directory's recipe.yaml.
find_element() {
    local name
    name=$(sed -n "$(($2 + 1))s/^{\"name\": \"\([^\"]*\)\".*/\1/p" "$1")
    [[ -n $name ]] || fail "$1 has no element in line $(($2 + 1)): submit it again with accel-train submit"
    element=$(dirname -- "$(dirname -- "$1")")/$name
}

# A port for the ranks to connect to. Each job has its own, and each start of a job too, in case the last one was in
# use. Rank 0 listens there, on this host, which is the job's first. Ports on which another program listens are skipped.
find_port() {
    local number=$((${JOB%%[!0-9]*} + ${PBS_ARRAY_INDEX:-0})) port tries
    number=$((${SLURM_JOB_ID:-$number} + 1009 * ${SLURM_RESTART_COUNT:-0}))
    for ((tries = 0; tries < 50; tries++)); do
        port=$((20000 + (number + tries) % 10000))
        if ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then break; fi
    done
    echo "$port"
}

# Sets $gpus: how many GPUs the batch system gave to the job on this node; if it does not count GPUs, how many PyTorch
# sees.
count_gpus() {
    gpus=${gpus:-${SLURM_GPUS_ON_NODE:-}}
    if [[ -n $gpus ]]; then return; fi
    if [[ $(scontrol show node "${SLURMD_NODENAME:-}" 2>/dev/null) =~ Gres=[^[:space:]]*gpu ]]; then
        gpus=0 # Slurm counts GPUs here and the job asked for none: visible GPUs belong to other jobs
        return
    fi
    gpus=$("${container[@]}" python -c 'import torch; print(torch.accelerator.device_count())') ||
        fail "PyTorch cannot count the GPUs of $HOSTNAME (see above): set PROCESSES_PER_NODE and ACCELERATE_CONFIG"
}

# count_processes NODES: sets the number of processes per node: PROCESSES_PER_NODE; else the GPUs there; else one.
count_processes() {
    if [[ -z ${PROCESSES_PER_NODE:-} ]]; then
        count_gpus
        if (($1 > 1)); then check_gpus_of_nodes; fi
        PROCESSES_PER_NODE=$gpus
    fi
    if ((PROCESSES_PER_NODE == 0)); then PROCESSES_PER_NODE=1; fi
}

check_gpus_of_nodes() { # two nodes of --gpus=3 have different numbers, those of --gpus=4 may have
    local details nodes kinds kind number uneven='' list=''
    details=$(scontrol show job --details --oneliner "$JOB" 2>/dev/null || true)
    while read -r nodes kinds; do # such as: n[1-2] gpu:a100:4(IDX:0-3)
        number=0
        for kind in ${kinds//,/ }; do
            if [[ $kind == gpu:*[0-9] ]]; then number=$((number + ${kind##*:})); fi
        done
        list+="${list:+, }$number on $nodes"
        if ((number != gpus)); then uneven=1; fi
    done < <(grep -o ' Nodes=[^ ]* CPU_IDs=[^ ]* Mem=[^ ]* GRES=[^ ]*' <<<"$details" |
        sed 's/ Nodes=\([^ ]*\).* GRES=/\1 /; s/([^)]*)//g')
    if [[ -n $uneven ]]; then
        fail "the nodes have different numbers of GPUs ($list), but each gets the same number of processes:" \
            "ask with --gpus-per-node instead of --gpus, or set PROCESSES_PER_NODE"
    fi
}

# start_launchers NODES PROGRAM...: start a launcher on each of the job's first NODES nodes; sets $code
start_launchers() {
    local nodes=$1 address=${MASTER_ADDR:-}
    shift
    count_processes "$nodes"
    if [[ -z $address ]]; then
        address=127.0.0.1
        if ((nodes > 1)); then address=$(scontrol show hostnames "$SLURM_JOB_NODELIST"); fi
        address=${address%%$'\n'*} # `| head -n 1` could end scontrol, and with it the job, by SIGPIPE
    fi
    MASTER_ADDR=$address start_tasks on_node --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 -- "$@"
}

# start_tasks FUNCTION OPTION... -- ARGUMENT...: call a function of this file in each task of srun; sets $code.
start_tasks() {
    local function=$1 options=(--kill-on-bad-exit=1 --export=ALL)
    shift
    while [[ $1 != -- ]]; do
        options+=("$1")
        shift
    done
    shift
    # srun uses the job's --cpus-per-task only if it is given again; without it a task may be bound to one core
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi
    if ((${SLURM_NTASKS:-${SLURM_NNODES:-1}} > 1)); then options+=(--label); fi
    # If Slurm ends the job (scancel, time limit, lost node, requeue by someone else), this script does not requeue it.
    # But this shell must outlive its srun: an srun that is left behind would cancel the next start's step of the same
    # number. It waits for it in `wait`, where a trap runs at once.
    terminated=0 signalled=0
    trap 'terminated=1 signalled=1' TERM
    # Only the tasks get these: a job that this script submits would inherit whatever this shell exports.
    local for_tasks=(MASTER_PORT="$MASTER_PORT")
    if [[ -n ${MASTER_ADDR:-} ]]; then for_tasks+=(MASTER_ADDR="$MASTER_ADDR"); fi
    if [[ -n ${PROCESSES_PER_NODE:-} ]]; then for_tasks+=(PROCESSES_PER_NODE="$PROCESSES_PER_NODE"); fi
    # shellcheck disable=SC2016 # expanded in the task, not here
    env "${for_tasks[@]}" srun "${options[@]}" bash -c \
        'source "$ACCEL_TRAIN_ROOT/slurm/common.sh"; stand_by "$@"; exit "$code"' "$script" "$function" "$@" &
    wait_for $!
}

# stand_by FUNCTION ARGUMENT...: run a function in a child process and wait for it; sets $code. Each task uses it,
# because all its processes get the warning before the time limit. It would kill launchers, `module`, and Python until
# the ranks have installed their handlers. So they all ignore it, and a rank that was not ready yet finds the file
# `warned` later.
stand_by() {
    local child
    signalled=0
    trap '' USR1
    "$@" &
    child=$!
    trap 'signalled=1; date +%s >"$START/warned"' USR1
    trap 'signalled=1' TERM
    wait_for "$child"
}

# wait_for CHILD: wait for its end, whatever signals come meanwhile (their traps set signalled=1); sets $code
wait_for() {
    local again
    code=0
    wait "$1" || code=$?
    while ((signalled)); do # the signal ended `wait`; the child may still be running
        signalled=0 again=0
        wait "$1" 2>/dev/null || again=$?
        ((again == 127)) || code=$again # 127: the child had already ended, and its code is known
    done
}

enter_task() { # in each task, before the program replaces the shell
    # Data loaders and compilers need a local disk. The TMPDIR of the host that submitted the job may not exist here.
    local own=${TMPDIR:-}
    if [[ ! -d $own || ! -w $own ]] || ! df --local "$own" >/dev/null 2>&1; then own=/tmp; fi
    export TMPDIR=${SLURM_TMPDIR:-${NODE_TMPDIR:-$own}}
    # A site's file may set MASTER_ADDR to this host's name. The batch script's value is the right one.
    local address=${MASTER_ADDR:-} port=$MASTER_PORT
    use_site
    if [[ -n $address ]]; then export MASTER_ADDR=$address; else unset MASTER_ADDR; fi
    export MASTER_PORT=$port
    touch "$START/nodes/${node_name:-${SLURMD_NODENAME:-$HOSTNAME}}"
}

# on_node PROGRAM...: one launcher for all processes of a node
# (PROGRAM: options of python, such as -m accel_train.train RECIPE)
on_node() {
    enter_task
    launch_node "$SLURM_NNODES" "$SLURM_NODEID" "$@"
}

# launch_node NODES NODE PROGRAM...: replace this shell by the launcher of this node's processes, or by its only process
launch_node() {
    local nodes=$1 node=$2 processes=$PROCESSES_PER_NODE
    shift 2
    if ((nodes * processes == 1)); then # no launcher: it would not pass on signals to a single process
        unset MASTER_ADDR MASTER_PORT # there is no other process to connect to
        become_rank "$@"
    fi
    # Before the training the hosts meet: a launcher would wait for a missing one for ten minutes, and not name it.
    if [[ $nodes != 1 && $* == "-m accel_train.train "* ]]; then "${container[@]}" python -m accel_train meet "${@:3}" --num-machines "$nodes" --machine-rank "$node" --main-process-ip "$MASTER_ADDR" --main-process-port "$MASTER_PORT"; fi
    exec "${container[@]}" accelerate launch --config_file "$ACCELERATE_CONFIG" \
        --num_machines "$nodes" --num_processes $((nodes * processes)) --machine_rank "$node" \
        --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" \
        --no_python bash "$ACCEL_TRAIN_ROOT/slurm/rank.sh" "$@"
}

on_rank() { # PROGRAM...: one task per rank; the program reads its rank from Slurm's variables
    enter_task
    become_rank "$@"
}

become_rank() { # PROGRAM...: replace this shell by a rank; without a launcher it reads accelerate's config file itself
    export ACCEL_TRAIN_LAUNCHER_CONFIG=$ACCELERATE_CONFIG
    exec "${container[@]}" bash "$ACCEL_TRAIN_ROOT/slurm/rank.sh" "$@"
}

# end_run CODE: requeue the job if its ranks have saved and asked for it; otherwise end with the exit code of its ranks
end_run() {
    local code=$1 update stops
    if ((${terminated:-0})); then
        say "the batch system ended this job; everything that the run saved is in $RUN"
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
    rm -f "$RUN/REQUEUE" # it asks for one requeue only
    echo "$update" >>"$RUN/slurm/requeues"
    warn_of_short_lead
    # how many of the latest stops in a row were at this update
    stops=$(tac "$RUN/slurm/requeues" | awk -v update="$update" '$1 != update { exit } { n++ } END { print n + 0 }')
    if ((stops > ${MAX_REQUEUES:-3})); then
        say "error: stopped $stops times in a row at update $update, without progress: not requeued." \
            "Give the job more time ($more_time), or find out why an update takes so long." >&2
        exit 1
    fi
    say "interrupted and saved at update $update: requeueing"
    if ! requeue; then
        say "error: this job may not be requeued. Continue with: $(command_again)" >&2
        exit 1
    fi
    rm -rf "$START"
    exit 0
}

# True if this start wrote REQUEUE: not an earlier start and, if this one was refused (2), not the run's owner.
asks_for_requeue() {
    [[ -f $RUN/REQUEUE && ! $RUN/REQUEUE -ot $START/begun ]] && [[ $(cat "$START/exit-code" 2>/dev/null) != 2 ]]
}

explain_failure() {
    local node absent=()
    for node in $(all_nodes); do
        if [[ ! -e $START/nodes/$node ]]; then absent+=("$node"); fi
    done
    if ((${#absent[@]} > 0)); then
        say "no task could write to $RUN on ${absent[*]}: are these nodes up, and can they see that directory?" >&2
    fi
    say "failed with exit code $1. Look for the first error above; each rank's output is in $RUN/logs. $(what_next "$1")" >&2
}

what_next() { # CODE: after a refusal (2) an option may be wrong, so the same command would be refused again
    if (($1 != 2)); then
        echo "To continue the run: $(command_again)"
    elif [[ -f $RUN/config.yaml ]]; then # once accepted
        echo "Correct what it says. To continue the run with the settings that it had before: $(command_again config.yaml)"
    else
        echo "Correct what it says and submit the job again: no run has begun that could be continued."
    fi
}

warn_of_short_lead() { # warn if the time between Slurm's warning and the job's end was short for a save
    local lead save
    lead=$(seconds_of_warning) || return 0
    save=$(awk -F '"seconds": ' '/"kind": "checkpoint"/ && int($2) > most { most = int($2) } END { print most + 0 }' \
        "$RUN/metrics.jsonl" 2>/dev/null || true)
    if ((${save:-0} * 2 > lead)); then
        say "warning: a save takes $save s, the warning came $lead s before the end:" \
            "$(longer_warning $((save * 4)))" >&2
    fi
}

# The functions below are for Slurm; pbs/train.pbs defines its own.

more_time='sbatch --time'

requeue() { scontrol requeue "$JOB"; }

# With sbatch --signal=B:USR1@120 only this shell gets the warning. So it sends it to all processes of the job's steps;
# ranks that are not ready yet find the file `warned`.
pass_on_warning() {
    if [[ -d $START ]]; then date +%s >"$START/warned"; fi
    scancel --signal=USR1 "$JOB" || true
}

all_nodes() { scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null || true; }

# Slurm does not report the value of --signal, but it does report when the job will end. False if no warning came.
seconds_of_warning() {
    local end
    [[ -s $START/warned ]] && end=$(date -d "$(job_field EndTime)" +%s 2>/dev/null) && echo $((end - $(<"$START/warned")))
}

longer_warning() { echo "sbatch --signal=USR1@$1"; }

job_field() { # NAME: a field of this job in Slurm's records; nothing if it is not set
    local found=${shown:-$(scontrol show job --oneliner "$JOB" 2>/dev/null || true)}
    sed -n "s/.* $1=\([^ ]*\).*/\1/p" <<<"$found" | grep -vx '(null)' || true
}

# job_options NODES: sets $options to the sbatch options of this job, because a job that it submits does not inherit
# them. Slurm sets a variable for some options, and `scontrol` shows others. Neither shows --signal (SBATCH_SIGNAL is
# inherited).
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
        echo "gres $(job_field TresPerNode | sed 's/gres[:/]//g')" # also for --gpus-per-node
        echo "gpus-per-task ${SLURM_GPUS_PER_TASK:-}"
        echo "gpus-per-socket ${SLURM_GPUS_PER_SOCKET:-}"
    )
    if [[ $(job_field OverSubscribe) == NO ]]; then options+=(--exclusive); fi
    if [[ ${SLURM_GPUS:-} =~ [0-9]$ ]]; then # --gpus counts all nodes together: 4, or a100:4
        value=${SLURM_GPUS##*:}
        options+=(--gpus="${SLURM_GPUS%"$value"}$((value * $1 / ${SLURM_NNODES:-1}))")
    fi
}

# command_again [config.yaml]: the command that continues this run in a new job, with the options of this job or with the
# run's own config.yaml instead. Slurm can requeue an ended job only for some minutes.
command_again() {
    if (($#)); then again=("$RUN/$1" --output-dir "$RUN"); fi
    job_options "${SLURM_NNODES:-1}"
    printf 'cd %q && %ssbatch' "$PWD" "$given"
    printf ' %q' "${options[@]}" "$ACCEL_TRAIN_ROOT/$script" "${again[@]}"
}
