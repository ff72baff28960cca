# node.sh LABEL FOLDER NAME ADDRESS GATEWAY - the first process of a node, inside its namespaces: make them a machine, run slurmd.
set -euo pipefail
folder=$2 name=$3 address=$4 gateway=$5
hostname "$name"
export HOSTNAME=$name
mount -t tmpfs tmpfs /dev/shm
mount --bind "$folder/etc/hosts" /etc/hosts
mount --bind "$folder/etc" /etc/slurm # for commands in jobs that have lost SLURM_CONF
ip link set lo up
until ip link set eth0 up 2>/dev/null; do sleep 0.02; done # it is pushed in from outside
ip addr add "$address" dev eth0
ip route add default via "$gateway"
cd /
slurmd -D -N "$name" -f "$SLURM_CONF" &
# As process 1 it also reaps what others leave. `wait` returns early on signals.
while kill -0 $! 2>/dev/null; do wait $! || true; done
