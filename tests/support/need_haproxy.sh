#!/bin/sh
# A HAProxy for the tests: installed where that is possible, else what is missing is said.
exec 9> "${TMPDIR:-/tmp}/need-haproxy.lock" && flock 9  # tests side by side ask for it
command -v haproxy > /dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  echo "Installing haproxy"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    -o DPkg::Lock::Timeout=120 haproxy > /dev/null 9>&- && exit 0
fi
echo "these tests need HAProxy 2.6 or newer: install it (Debian, as root: apt-get install haproxy)" >&2
exit 1
