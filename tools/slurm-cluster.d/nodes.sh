# The nodes. In namespaces a node is one process, `unshare`, and what it holds: with it everything on the node is gone.

node_up() { # NAME
  local name=$1 number=${1#"$prefix"} pid link hardware
  link=hps${slot}n$number
  if alive "slurmd-$name" >/dev/null; then
    if [ "$isolate" = none ] || ip link show "$link" >/dev/null 2>&1; then return 0; fi
  fi
  node_down "$name" # what a half-started or plainly killed one left
  mkdir -p "$folder/spool/$name" "$folder/tmp/$name"
  chmod 1777 "$folder/tmp/$name"
  if [ "$isolate" = none ]; then
    # the log's name is told again, since the process is known by it: see alive
    launch "slurmd-$name" slurmd -D -N "$name" -f "$SLURM_CONF" -L "$folder/log/slurmd-$name.log"
    return
  fi
  launch "slurmd-$name" unshare --uts --ipc --net --pid --mount --fork --kill-child --mount-proc \
    bash "$parts/node.sh" "slurmd-$name" "$folder" "$name" "$(address_of "$number")/24"
  pid=$(cat "$folder/run/slurmd-$name.pid")
  wait_for 20 own_network "$pid" || die "$name does not start"
  # the device is made inside the node's network; it vanishes with the node
  hardware=$(hardware_of "$(address_of "$number")")
  wait_for 10 ip link add "$link" type veth peer name eth0 address "$hardware" netns "$pid" || die "$name gets no network"
  ip link set "$link" master "$bridge" up
}
own_network() { local network; network=$(readlink "/proc/$1/ns/net") && [ "$network" != "$(readlink /proc/self/ns/net)" ]; }

node_down() { # NAME; as a power cut: its network first, so that not even a closed connection is heard of
  local pid
  if [ "$isolate" = namespaces ]; then ip link del "hps${slot}n${1#"$prefix"}" 2>/dev/null || true; fi
  if pid=$(alive "slurmd-$1"); then kill -KILL "$pid"; fi
  for pid in $(holders "$1") $(tasks "$1"); do kill -KILL "$pid" 2>/dev/null || true; done
  wait_for 10 node_gone "$1" || die "$1 does not die"
  rm -f "$folder/run/slurmd-$1.pid"
}
node_gone() { [ -z "$(alive "slurmd-$1")$(holders "$1")$(tasks "$1")" ]; }

nodes_up() {
  local name
  for name in $(node_names); do node_up "$name"; done
}

nodes_down() {
  local name pid
  for pid in "$folder"/run/slurmd-*.pid; do
    name=${pid##*/slurmd-} name=${name%.pid}
    [ ! -e "$pid" ] || [[ $name == *.own ]] || node_down "$name"
  done
}

usable_nodes() { sinfo -h -p main -o '%t %D' | awk '$1 ~ /^(idle|mix|alloc)$/ {n += $2} END {exit n != '"$nodes"'}'; }

ready_nodes() {
  wait_for 10 usable_nodes && return
  timeout 20 scontrol update nodename="$(node_names | tr ' ' ,)" state=resume 2>/dev/null || true
  wait_for 60 usable_nodes || { timeout 20 sinfo -R >&2 || true; die "not all nodes are ready"; }
}

smoke() {
  local seen
  no_jobs || { say "jobs are running: no test job beside them"; return 0; }
  seen=$(timeout 120 srun -N "$nodes" --ntasks-per-node=1 --gpus-per-node="$gpus" --mem=100 -t 2 -J smoke \
    sh -c 'echo "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"' 2>&1) || die "a job over all nodes fails: $seen"
  [ "$(wc -l <<<"$seen")" = "$nodes" ] || die "a job over $nodes nodes printed: $seen"
  [ "$accounting" = no ] || wait_for 30 accounted || die "sacct does not show the job"
}
accounted() { [[ $(timeout 20 sacct -n -X -o JobName,State --name smoke) == *COMPLETED* ]]; }
