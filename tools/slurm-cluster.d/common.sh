# What every part uses: messages, processes, the folder and its settings.

say() { printf '[%5.1f s] %s\n' "$(awk -v now="${EPOCHREALTIME/,/.}" -v start="$began" 'BEGIN {print now - start}')" "$*"; }
began=${EPOCHREALTIME/,/.}

die() { # with the ends of the logs: in CI there is no machine to look at
  echo "slurm-cluster: $*" >&2
  local log
  for log in "$folder"/log/*.log "$folder"/log/*.out; do
    # daemons print what they log; .out has more only of one that failed before it could
    [ -s "$log" ] || continue
    if [[ $log == *.out && -s ${log%.out}.log ]]; then continue; fi
    printf '== the end of %s\n' "$log" >&2
    tail -n 10 "$log" >&2
  done
  exit 1
}
refuse() { echo "slurm-cluster: $*" >&2; exit 1; } # before anything was begun

administrator() { [ "$(id -u)" = 0 ] || refuse "needs root: sudo tools/slurm-cluster $verb"; }

# wait_for SECONDS COMMAND...: until it succeeds
wait_for() {
  local deadline=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $deadline ] || return 1
    sleep 0.1
  done
}

# words PID: its command line. Empty for a zombie, which `kill -0` takes for alive; where nobody reaps, it stays one.
words_of() { tr '\0' ' ' 2>/dev/null <"/proc/$1/cmdline"; }

# alive NAME: print the pid of the daemon or node NAME; fails when it is not alive or its pid is another's by now
alive() {
  local pid
  pid=$(cat "$folder/run/$1.pid" 2>/dev/null) && [[ $pid =~ ^[0-9]+$ ]] && [[ $(words_of "$pid") == *"$1"* ]] && echo "$pid"
}

# launch NAME COMMAND...: a daemon that outlives this script, with its pid in run/NAME.pid
launch() {
  local name=$1; shift
  setsid "$@" </dev/null >"$folder/log/$name.out" 2>&1 9>&- &
  echo $! >"$folder/run/$name.pid"
}

# wait_daemon NAME SECONDS COMMAND...: until it succeeds, or the daemon is dead
wait_daemon() {
  local name=$1; shift
  wait_for "$1" decided "$name" "${@:2}" && "${@:2}" >/dev/null 2>&1
}
decided() {
  local pid
  "${@:2}" && return
  pid=$(cat "$folder/run/$1.pid")
  [ ! -e "/proc/$pid" ] || grep -qs '^State:.Z' "/proc/$pid/status" # its command line is empty while it begins, too
}

# stop NAME SECONDS: TERM, then KILL
stop() {
  local pid
  if pid=$(alive "$1"); then
    kill "$pid" 2>/dev/null || true
    wait_for "$2" not_alive "$1" || kill -KILL "$pid" 2>/dev/null || true
    wait_for 5 not_alive "$1" || true
  fi
  rm -f "$folder/run/$1.pid"
}
not_alive() { ! alive "$1"; }

# holders [NODE]: pids of Slurm's own processes that hold files of this cluster open, or of this node
holders() {
  local pid
  for pid in $(ps -eo pid=,comm= | awk '$2 ~ /^(slurm|munged|mariadbd)/ {print $1}'); do
    [[ $(readlink "/proc/$pid/fd/"* 2>/dev/null) == *"$folder/${1:+log/slurmd-$1.log}"* ]] && echo "$pid"
  done
  return 0
}

# tasks [NODE]: pids of what jobs of this cluster run, or run on this node
tasks() {
  local file
  for file in $(grep -lzsx "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ || true); do
    grep -qzs '^SLURM_TASK_PID=' "$file" || continue
    [ -z "${1-}" ] || grep -qzsx "SLURMD_NODENAME=$1" "$file" || continue
    file=${file#/proc/}
    echo "${file%/environ}"
  done
  return 0
}

memory_used() { # MB of the daemons and nodes, not of jobs
  local pid
  for pid in $(holders); do grep -s VmRSS "/proc/$pid/status" || true; done | awk '{sum += $2} END {print int(sum / 1024)}'
}

node_names() { local i names=(); for ((i = 1; i <= nodes; i++)); do names+=("$prefix$i"); done; echo "${names[*]}"; }

lock_folder() {
  while true; do
    mkdir -p "$folder"
    exec 9>"$folder/lock"
    flock -w 300 9 || refuse "another slurm-cluster has been at work in $folder for 5 minutes"
    [ ! "$folder/lock" -ef /proc/$$/fd/9 ] || return 0
    # it was taken down meanwhile, and its lock with it
  done
}

claim_folder() {
  if [ -e "$folder" ]; then
    # root runs what lies here: in /tmp anybody could have made the folder first
    [ -d "$folder" ] && [ -O "$folder" ] || refuse "$folder exists and is not root's; choose another --folder"
    [ -e "$folder/lock" ] || [ -z "$(ls -A "$folder")" ] || refuse "$folder holds something else; choose another --folder"
  fi
  (umask 022; mkdir -p "$folder")
  lock_folder
  mkdir -p "$folder"/{etc,run,log,state,spool,tmp,gpus}
  chmod 755 "$folder" "$folder"/{etc,run,log,spool,tmp,gpus}
}

remove_folder() {
  [ -e "$folder/lock" ] || return 0
  rm -rf "${folder:?}"/{etc,run,log,state,spool,tmp,gpus,database,lock}
  rmdir "$folder" 2>/dev/null || say "$folder holds files that are not the cluster's; they stay"
}

settings_text() {
  local name
  for name in nodes gpus cpus memory prefix accounting grace kill_wait; do printf '%s=%q\n' "$name" "${!name}"; done
  printf 'extra=('; [ ${#extra[@]} = 0 ] || printf '%q ' "${extra[@]}"; printf ')\n'
}
save_settings() { { settings_text; printf 'isolate=%q\nslot=%q\n' "$isolate" "$slot"; } >"$folder/etc/settings"; }

load_settings() {
  [ -s "$folder/etc/settings" ] || return 1
  [ "$(stat -c %u "$folder/etc/settings")" = 0 ] || refuse "$folder/etc/settings is not root's"
  . "$folder/etc/settings"
  addresses
}

same_settings() {
  local asked=$isolate before
  before=$(settings_text)
  load_settings || refuse "a Slurm runs in $folder without its settings; take it down: tools/slurm-cluster down"
  [ "$before" = "$(settings_text)" ] && { [ "$asked" = auto ] || [ "$asked" = "$isolate" ]; } ||
    refuse "it is up with other settings; take it down first: tools/slurm-cluster down. Asked for: ${before//$'\n'/ } isolate=$asked. It has: $(tr '\n' ' ' <"$folder/etc/settings")"
}
