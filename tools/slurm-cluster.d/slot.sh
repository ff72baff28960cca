# What two clusters on one machine must not share: ports, the network, names. A slot numbers them; a link in /run holds it.

choose_isolation() {
  [ "$isolate" != none ] || return 0
  if namespaces_work; then isolate=namespaces
  elif [ "$isolate" = namespaces ]; then refuse "this machine does not allow namespaces and network devices (a container wants --privileged); --isolate none does without"
  else isolate=none; say "no namespaces here: nodes share this machine's host name, address and process table"; fi
}

namespaces_work() {
  local probe=hpsp$$ # network devices' names have at most 15 characters
  unshare --uts --ipc --net --pid --mount --fork --mount-proc mount -t tmpfs tmpfs /dev/shm 2>/dev/null || return 1
  ip link add "${probe}b" type bridge 2>/dev/null || return 1
  ip link del "${probe}b"
  ip link add "${probe}a" type veth peer name "${probe}z" 2>/dev/null || return 1
  ip link del "${probe}a"
}

claims() { # this folder's slots
  local link
  for link in /run/hpclm-slurm-*; do [ "$(readlink "$link")" != "$folder" ] || echo "${link##*-}"; done
}

claim_slot() {
  local mine
  mine=$(claims | head -n 1)
  for slot in $mine {0..31}; do
    if [ "$slot" = "$mine" ] || ln -sT "$folder" "/run/hpclm-slurm-$slot" 2>/dev/null; then
      addresses
      if [ "$slot" = "$mine" ] || free_slot; then return 0; fi
      rm -f "/run/hpclm-slurm-$slot"
    fi
  done
  refuse "no free ports and addresses for one more cluster; see ls -l /run/hpclm-slurm-*"
}

free_slot() {
  local port
  for port in $controller_port $accounting_port $database_port $node_port; do
    [ -z "$(ss -Hltn "sport = :$port")" ] || return 1
  done
  [[ $(ip -o -4 addr) != *" $subnet."* ]] && ! ip link show "$bridge" >/dev/null 2>&1
}

addresses() {
  local base=$((18100 + 100 * slot)) # below the range that the kernel hands out to clients
  controller_port=$base accounting_port=$((base + 1)) database_port=$((base + 2)) node_port=$((base + 10))
  bridge=hpslurm$slot
  # 198.18.0.0/15 is set aside for tests of networks: no real network is hidden by it
  subnet=198.18.$slot
  if [ "$isolate" = namespaces ]; then controller=$subnet.1; else controller=127.0.0.1; fi
}

address_of() { # NUMBER of the node
  if [ "$isolate" = namespaces ]; then echo "$subnet.$((10 + $1))"; else echo "127.$((18 + slot)).0.$((10 + $1))"; fi
}

# A machine keeps its hardware address, also after a power cut: else the others look for the last one for seconds.
hardware_of() { # ADDRESS
  printf '02:00:%02x:%02x:%02x:%02x' ${1//./ }
}

network_up() {
  [ "$isolate" = namespaces ] || return 0
  ip link show "$bridge" >/dev/null 2>&1 || ip link add "$bridge" address "$(hardware_of "$controller")" type bridge || die "cannot make the bridge $bridge"
  [[ $(ip -o -4 addr show dev "$bridge") == *" $controller/24 "* ]] || ip addr add "$controller/24" dev "$bridge"
  ip link set "$bridge" up
}

network_down() {
  local claim link
  for claim in $(claims); do
    for link in $(ip -o link show | grep -oE "\bhps${claim}n[0-9]+\b" | sort -u); do ip link del "$link" 2>/dev/null || true; done
    ip link del "hpslurm$claim" 2>/dev/null || true
    rm -f "/run/hpclm-slurm-$claim"
  done
}

# Names: in namespaces each node sees its own /etc/hosts; otherwise this machine's gets lines, marked as ours.
hosts_up() {
  local i name lines=""
  for ((i = 1; i <= nodes; i++)); do lines+="$(address_of "$i") $prefix$i"$'\n'; done
  if [ "$isolate" = namespaces ]; then
    printf '127.0.0.1 localhost\n::1 localhost\n%s %s\n%s' "$controller" "$(hostname)" "$lines" >"$folder/etc/hosts"
  else
    for name in $(node_names); do
      if grep -v "# hpclm-slurm $folder\$" /etc/hosts | grep -qE "[[:space:]]$name([[:space:]]|\$)"; then
        refuse "/etc/hosts has another '$name' already; choose other names with --prefix"
      fi
    done
    rewrite_hosts "$(printf %s "$lines" | sed "s|\$| # hpclm-slurm $folder|")"
  fi
  # clients without SLURM_CONF (submitit takes it away from what it runs) find the cluster, unless the machine has one
  mkdir -p /etc/slurm
  [ -e /etc/slurm/slurm.conf ] || [ -L /etc/slurm/slurm.conf ] || ln -s "$SLURM_CONF" /etc/slurm/slurm.conf
}

hosts_down() {
  if grep -qs "# hpclm-slurm $folder\$" /etc/hosts; then rewrite_hosts ""; fi
  [ "$(readlink /etc/slurm/slurm.conf)" != "$SLURM_CONF" ] || rm -f /etc/slurm/slurm.conf
}

rewrite_hosts() { # LINES instead of ours; in place, since in a container the file is a mount
  local text
  text=$(grep -v "# hpclm-slurm $folder\$" /etc/hosts || true; [ -z "$1" ] || printf '%s\n' "$1")
  [ "$text" = "$(cat /etc/hosts)" ] || printf '%s\n' "$text" >/etc/hosts
}
