# node.sh LABEL FOLDER NAME ADDRESS - the first process of a node, inside its namespaces: make them a machine, run slurmd.
set -euo pipefail
folder=$2 name=$3 address=$4
hostname "$name"
export HOSTNAME=$name
mount -t tmpfs tmpfs /dev/shm
mount --bind "$folder/etc/hosts" /etc/hosts
mount --bind "$folder/etc" /etc/slurm # for commands in jobs that have lost SLURM_CONF
# /sys shows the network devices of the namespace that mounted it; the control groups below it are separate mounts
fresh=$folder/spool/$name/sys
mkdir -p "$fresh"
if mount -t sysfs sysfs "$fresh" 2>/dev/null; then
  mount --rbind /sys/fs/cgroup "$fresh/fs/cgroup" 2>/dev/null || true
  mount --rbind "$fresh" /sys
fi
ip link set lo up
until ip link set eth0 up 2>/dev/null; do sleep 0.02; done # it is pushed in from outside
# No route leads out: a name that only DNS knows is then not found at once, instead of after a time-out.
ip addr add "$address" dev eth0
cd /
slurmd -D -N "$name" -f "$SLURM_CONF" &
# As process 1 it also reaps what others leave. `wait` returns early on signals.
while kill -0 $! 2>/dev/null; do wait $! || true; done
