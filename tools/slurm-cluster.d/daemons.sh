# munged, MariaDB with slurmdbd, and slurmctld.

munged_up() {
  ! alive munged >/dev/null || return 0
  rm -f "$folder"/run/munge.socket*
  # root's own, in a separate folder; --force: the folder may lie in one that everybody writes to, as /tmp
  launch munged munged --foreground --force --num-threads=10 --key-file="$folder/etc/munge.key" --socket="$folder/run/munge.socket" \
    --pid-file="$folder/run/munged.own.pid" --log-file="$folder/log/munge.log" --seed-file="$folder/state/munge.seed"
  wait_daemon munged 20 munge -S "$folder/run/munge.socket" -n || die "munged does not answer"
}

sql() { mariadb --no-defaults -S "$folder/database/socket" -u root -e "$1"; }

accounting_up() {
  local password
  password=$(sed -n 's/^StoragePass=//p' "$folder/etc/slurmdbd.conf")
  if ! alive mariadbd >/dev/null; then
    (umask 077; mkdir -p "$folder/database")
    [ -d "$folder/database/data/mysql" ] ||
      mariadb-install-db --no-defaults --user=root --datadir="$folder/database/data" --auth-root-authentication-method=normal \
        --skip-test-db --innodb-log-file-size=8M >"$folder/log/mariadb-install.log" 2>&1 || die "mariadb-install-db failed"
    launch mariadbd mariadbd --no-defaults --user=root --datadir="$folder/database/data" --socket="$folder/database/socket" \
      --pid-file="$folder/run/mariadbd.own.pid" --bind-address=127.0.0.1 --port="$database_port" --skip-name-resolve --skip-log-bin \
      --innodb-buffer-pool-size=64M --innodb-log-file-size=8M --innodb-flush-log-at-trx-commit=2 --innodb-lock-wait-timeout=900
    wait_daemon mariadbd 90 sql "select 1" || die "mariadbd does not answer"
    sql "create database if not exists slurm; create or replace user slurm@'127.0.0.1' identified by '$password';
         grant all on slurm.* to slurm@'127.0.0.1'; alter user root@localhost identified via unix_socket" ||
      die "the database cannot be prepared"
  fi
  if ! alive slurmdbd >/dev/null; then
    launch slurmdbd slurmdbd -D
    wait_daemon slurmdbd 60 sacctmgr -n list cluster || die "slurmdbd does not answer"
  fi
}

controller_up() {
  if ! alive slurmctld >/dev/null; then
    kill_leftovers slurmctld # its helper process outlives a killed one
    launch slurmctld slurmctld -D -f "$SLURM_CONF"
  fi
  wait_daemon slurmctld 60 controller_answers || die "slurmctld does not answer"
}
controller_answers() { [[ $(timeout 10 scontrol ping) == *" is UP"* ]]; }

# kill_leftovers NAME: Slurm's processes of that name that hold files of this cluster
kill_leftovers() {
  local pid
  for pid in $(holders); do
    if [[ $(cat "/proc/$pid/comm" 2>/dev/null) == "$1"* ]]; then kill -KILL "$pid" 2>/dev/null || true; fi
  done
}

cancel_jobs() {
  alive slurmctld >/dev/null || return 0
  local jobs
  jobs=$(timeout 20 squeue -h -o %A 2>/dev/null || true)
  [ -n "$jobs" ] || return 0
  # shellcheck disable=SC2086
  timeout 20 scancel $jobs 2>/dev/null || true
  wait_for $((kill_wait + 2)) no_jobs || true
}
no_jobs() { local jobs; jobs=$(timeout 20 squeue -h -o %A) && [ -z "$jobs" ]; }

daemons_down() {
  local pid
  stop slurmctld 20
  stop slurmdbd 20
  stop mariadbd 30
  stop munged 10
  for pid in $(holders) $(tasks); do kill -KILL "$pid" 2>/dev/null || true; done
}
