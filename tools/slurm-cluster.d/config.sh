# Slurm's files.

write_config() {
  local i
  # a GPU must be a character device; a link to one does. Count= alone counts none.
  for ((i = 0; i < gpus; i++)); do ln -sfn /dev/null "$folder/gpus/gpu$i"; done
  echo "Name=gpu File=$folder/gpus/gpu$( ((gpus == 1)) && echo 0 || echo "[0-$((gpus - 1))]")" >"$folder/etc/gres.conf"
  # slurmd loads a cgroup plugin even if nothing uses it; this one never fails where cgroups are missing
  echo "CgroupPlugin=cgroup/v1" >"$folder/etc/cgroup.conf"
  [ -s "$folder/etc/munge.key" ] || (umask 077; head -c 128 /dev/urandom >"$folder/etc/munge.key")
  slurm_conf >"$folder/etc/slurm.conf"
  [ "$accounting" = no ] || slurmdbd_conf
}

slurm_conf() {
  cat <<CONF
ClusterName=hpclm$slot
SlurmctldHost=localhost($controller)
SlurmctldPort=$controller_port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is also how many seconds a requeued job waits
AuthInfo=socket=$folder/run/munge.socket,cred_expire=5
SlurmctldPidFile=$folder/run/slurmctld.own.pid
SlurmctldLogFile=$folder/log/slurmctld.log
StateSaveLocation=$folder/state
SlurmdPidFile=$folder/run/slurmd-%n.own.pid
SlurmdLogFile=$folder/log/slurmd-%n.log
SlurmdSpoolDir=$folder/spool/%n
# one a node: the pmix plugins of two nodes make folders of the same name
TmpFS=$folder/tmp/%n
# take the CPUs and the memory that are claimed below for true
SlurmdParameters=config_overrides
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
MpiDefault=none
JobRequeue=1
ReturnToService=2
KillWait=$kill_wait
SlurmdTimeout=20
BatchStartTimeout=30
UnkillableStepTimeout=30
InactiveLimit=30
MinJobAge=3600
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PriorityType=priority/basic
JobAcctGatherType=jobacct_gather/none
CONF
  if [ "$accounting" = yes ]; then
    cat <<CONF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$accounting_port
AccountingStoragePass=$folder/run/munge.socket
AccountingStorageTRES=gres/gpu
CONF
  else
    echo "AccountingStorageType=accounting_storage/none"
  fi
  [ ${#extra[@]} = 0 ] || printf '%s\n' "${extra[@]}"
  local i host=localhost port=$node_port
  for ((i = 1; i <= nodes; i++)); do
    if [ "$isolate" = namespaces ]; then host=$prefix$i; else port=$((node_port + i)); fi
    echo "NodeName=$prefix$i NodeHostname=$host NodeAddr=$(address_of "$i") Port=$port CPUs=$cpus RealMemory=$memory Gres=gpu:$gpus"
  done
  cat <<CONF
PartitionName=main     Nodes=ALL Default=YES State=UP DefMemPerCPU=1000 PriorityTier=10  PreemptMode=OFF
PartitionName=high     Nodes=ALL             State=UP DefMemPerCPU=1000 PriorityTier=100 PreemptMode=OFF
PartitionName=low      Nodes=ALL             State=UP DefMemPerCPU=1000 PriorityTier=1   PreemptMode=REQUEUE
PartitionName=lowgrace Nodes=ALL             State=UP DefMemPerCPU=1000 PriorityTier=1   PreemptMode=REQUEUE GraceTime=$grace
CONF
}

slurmdbd_conf() {
  local password
  password=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
  (umask 077; cat >"$folder/etc/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$accounting_port
SlurmUser=root
PidFile=$folder/run/slurmdbd.own.pid
LogFile=$folder/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$database_port
StorageUser=slurm
StoragePass=$password
StorageLoc=slurm
CONF
  )
}
