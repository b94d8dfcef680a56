#!/usr/bin/env bash
# A real Slurm cluster (munged, slurmctld, N slurmds) on this one machine, for tests and CI.
#
#   local_slurm.sh start DIR [NODES=2] [CPUS_PER_NODE=4] [FAKE_GPUS=0]
#   local_slurm.sh stop DIR
#
# Needs Debian/Ubuntu's slurmctld, slurmd, slurm-client and munge; no systemd, cgroups or
# namespaces, and not necessarily root. Everything lives in DIR, which must have a short name:
# Slurm keeps Unix sockets in it, and a socket's path may be at most 107 bytes long.
# $LOCAL_SLURM_CONF, if set, is appended to slurm.conf (say, "PartitionName=gpu Nodes=ALL").
set -euo pipefail

die() { echo "local_slurm: $*" >&2; exit 1; }

# True if the process exists and is not a zombie: the pid 1 of a container often reaps late.
running() {
    local state
    state=$(sed -n 's/^State:\s*\(.\).*/\1/p' "/proc/$1/status" 2>/dev/null) || return 1
    [[ -n $state && $state != Z ]]
}

free_ports() { # free_ports COUNT: the first of COUNT consecutive ports nobody listens on
    local base port
    for _ in {1..50}; do
        base=$((20000 + RANDOM % 10000)) # below the kernel's ephemeral ports
        for ((port = base; port < base + $1; port++)); do
            if (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then continue 2; fi
        done
        echo "$base" && return
    done
    die "no $1 consecutive free ports"
}

start() {
    local nodes=$1 cpus=$2 gpus=$3 port node gres='' listen=''
    [[ ! -e $dir/slurm.conf ]] || die "$dir already holds a cluster: stop it first"
    ((${#dir} <= 64)) || die "$dir is too long a path for Slurm's sockets"
    ((nodes >= 1 && nodes <= 200)) || die "NODES must lie in 1..200"
    trap stop EXIT # unless all goes well
    mkdir -p "$dir/state"
    port=$(free_ports $((nodes + 1)))

    # Slurm listens on every address (though only munge's key opens it), or on the one that the
    # host's name resolves to, which works where that is the one its connections come from.
    if [[ $(getent ahostsv4 "$(hostname)" | awk 'NR == 1 {print $1}') == 127.0.0.1 ]]; then
        listen="CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"
    fi

    # A fake GPU is a link to a character device; the number that ends its name is its index.
    # (gres/gpu refuses a bare count, and a plain file gives no CUDA_VISIBLE_DEVICES.)
    if ((gpus > 0)); then
        for ((i = 0; i < gpus; i++)); do ln -sf /dev/null "$dir/gpu$i"; done
        echo "Name=gpu File=$dir/gpu[0-$((gpus - 1))]" >"$dir/gres.conf"
        gres="Gres=gpu:$gpus"
    fi

    # Nodes are named by loopback address, so that the usual
    #   MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # resolves with no change to /etc/hosts.
    cat >"$dir/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
$listen
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
# A requeued job waits cred_expire + 1 s before it may start again (default 120, minimum 5).
AuthInfo=socket=$dir/munge.sock,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
# Instead of sacct, which would need a database: one line for each ended job.
JobCompType=jobcomp/filetxt
JobCompLoc=$dir/jobs.log
# No cgroups. linuxproc follows parent pids, so signals reach torchrun's workers, which leave
# the process group (proctrack/pgid would miss them).
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
# Believe the CPUs and memory written here rather than what the machine really has.
SlurmdParameters=config_overrides
# A node that an administrator has set down comes back when told to, not at its next sign of life.
ReturnToService=1
# Shorter than the defaults (300 s, 30 s, every 60 s and 30 s), so that tests wait less.
SlurmdTimeout=20
KillWait=15
# A message that times out (after 10 s) is sent again a minute later, perhaps to the step of the next start, which has
# the same number; elsewhere that start waits two minutes (cred_expire).
MessageTimeout=60
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
# Two clusters' jobs should not derive the same MASTER_PORT from their ids.
FirstJobId=$((RANDOM + 1))
# A job in "urgent" preempts (requeues) jobs in "main", which are warned and get GraceTime.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=127.0.0.[11-$((10 + nodes))] NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=$cpus RealMemory=1000000 $gres
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
${LOCAL_SLURM_CONF:-}
CONF

    (umask 077 && head -c 128 /dev/urandom >"$dir/munge.key")
    # --force: accept a DIR that others may not enter (pytest's tmp_path is such).
    munged --force --socket="$dir/munge.sock" --key-file="$dir/munge.key" \
        --pid-file="$dir/munged.pid" --log-file="$dir/munged.log" --seed-file="$dir/munged.seed"
    slurmctld
    for node in $(scontrol show hostnames "127.0.0.[11-$((10 + nodes))]"); do slurmd -N "$node"; done

    for _ in {1..300}; do
        if [[ $(sinfo -h -o %T 2>/dev/null | sort -u) == idle ]]; then
            trap - EXIT
            echo "export SLURM_CONF=$SLURM_CONF"
            return
        fi
        sleep 0.1
    done
    tail -n 20 "$dir"/*.log >&2
    die "the nodes did not become idle; logs above"
}

stop() {
    local pidfile pid proc deadline=$((SECONDS + 20)) # more than KillWait
    # Jobs first: they and their slurmstepds would outlive the daemons.
    if [[ -e $SLURM_CONF ]] && timeout 5 scontrol ping &>/dev/null; then
        squeue -h -o %A | xargs -r scancel --quiet || true
        while [[ -n $(squeue -h 2>/dev/null) ]] && ((SECONDS < deadline)); do sleep 0.1; done
    fi
    # Then what Slurm lost sight of: slurmstepds cut off from the daemons, and the workers of a
    # launcher that died, by now children of pid 1.
    for proc in /proc/[0-9]*; do
        if [[ $(readlink "$proc/exe") == */slurmstepd* && $(readlink "$proc/cwd") == "$dir" ]] ||
            { grep -sqzFx "SLURM_CONF=$SLURM_CONF" "$proc/environ" &&
                grep -sqz '^SLURMD_NODENAME=127\.0\.0\.' "$proc/environ"; }; then
            kill -KILL "${proc#/proc/}" 2>/dev/null || true
        fi
    done
    for pidfile in "$dir"/slurm*.pid "$dir"/munged.pid; do
        [[ -s $pidfile ]] || continue
        pid=$(<"$pidfile")
        kill "$pid" 2>/dev/null || continue
        for _ in {1..100}; do running "$pid" || break; sleep 0.1; done
        if running "$pid"; then kill -KILL "$pid"; fi
    done
    rm -rf "$dir"/{slurm,gres}.conf "$dir"/gpu[0-9]* "$dir/state" "$dir"/127.0.0.* "$dir"/*.pid # the logs stay
}

[[ $# -ge 2 ]] || die "usage: $0 start DIR [NODES] [CPUS_PER_NODE] [FAKE_GPUS] | stop DIR"
dir=$(realpath -m "$2")
export SLURM_CONF=$dir/slurm.conf
case $1 in
    start) start "${3:-2}" "${4:-4}" "${5:-0}" ;;
    stop) stop ;;
    *) die "unknown command $1" ;;
esac
