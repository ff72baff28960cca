# The Debian packages.

# libpmix-dev: Slurm's pmix plugin opens libpmix.so, which the library's own package lacks
install_packages() {
  local wanted=(munge slurm-wlm libpmix-dev iproute2 procps util-linux) missing=() package policy=/usr/sbin/policy-rc.d own=no log failed=no
  [ "$accounting" = no ] || wanted+=(slurmdbd mariadb-server-core mariadb-client-core)
  command -v dpkg-query >/dev/null || refuse "needs Debian or Ubuntu: there is no dpkg-query here"
  for package in "${wanted[@]}"; do
    [[ $(dpkg-query -W -f='${Status}' "$package" 2>/dev/null) == *"ok installed" ]] || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing ${missing[*]}"
  log=$(mktemp)
  # the packages would start their own daemons
  if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    own=yes
  fi
  {
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
      -o DPkg::Lock::Timeout=300 "${missing[@]}"
  } >"$log" 2>&1 || failed=yes
  [ $own = no ] || rm -f $policy
  if [ $failed = yes ]; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    refuse "apt-get could not install ${missing[*]}"
  fi
  rm -f "$log"
}
