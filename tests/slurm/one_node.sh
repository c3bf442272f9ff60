#!/bin/bash
# A Slurm of one node on this machine, for tests: munged, slurmctld and slurmd with all their files in one folder.
#
#   tests/slurm/one_node.sh start FOLDER    # then: export SLURM_CONF=FOLDER/slurm.conf
#   tests/slurm/one_node.sh stop FOLDER
#
# Needs root and Debian's slurm-wlm and munge. Jobs of the partition "low" are pre-empted by those of "high": they get
# SIGTERM, have 30 s, and are queued again.
set -eu

action=$1 folder=$(realpath -m "$2")

stop() {
    export SLURM_CONF=$folder/slurm.conf
    scancel --full --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 200); do # jobs end before the daemons that hold them
        if [ -z "$(squeue --noheader 2>/dev/null)" ]; then
            break
        fi
        sleep 0.2
    done
    for daemon in slurmd slurmctld munged; do
        if [ -s "$folder/$daemon.pid" ]; then
            kill "$(cat "$folder/$daemon.pid")" 2>/dev/null || true
        fi
    done
}

if [ "$action" = stop ]; then
    stop
    exit 0
fi

mkdir -p "$folder/state" "$folder/spool"
chmod 755 "$folder"
head -c 128 /dev/urandom > "$folder/munge.key"
chmod 400 "$folder/munge.key"
port=${SLURM_TEST_PORT:-$((20000 + RANDOM % 20000))}
cat > "$folder/slurm.conf" << END
ClusterName=one
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=15  # a job that is queued again waits so long
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PreemptExemptTime=00:00:00
JobRequeue=1
MinJobAge=600
KillWait=30
InactiveLimit=0
SlurmctldTimeout=300
SlurmdTimeout=300
NodeName=$(hostname) NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
END
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
slurmctld -f "$folder/slurm.conf" -c
slurmd -f "$folder/slurm.conf" -c
export SLURM_CONF=$folder/slurm.conf
for _ in $(seq 100); do
    if sinfo -h -o %t 2>/dev/null | grep -q idle; then
        exit 0
    fi
    sleep 0.2
done
tail -n 20 "$folder"/*.log >&2
stop
exit 1
