#!/usr/bin/env bash
# Prometheus and its checker into a folder, from Debian's package, which is not installed: fetch_prometheus.sh FOLDER
set -euo pipefail
command -v apt-get dpkg > /dev/null || {
  echo "prometheus or promtool is missing, and there is no apt-get to fetch them with: put them on the PATH (https://prometheus.io/download)" >&2
  exit 1
}
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
mkdir -p "$made/lists/partial" "$made/cache/archives/partial"
cd "$made"
# Lists of its own: those of a fresh machine are empty, and the system's take root to renew.
for step in update "download prometheus"; do
  # shellcheck disable=SC2086  # two words
  apt-get -qq -o APT::Sandbox::User= -o Dir::State::lists="$made/lists" -o Dir::Cache="$made/cache" $step
done
dpkg -x prometheus_*.deb unpacked
install unpacked/usr/bin/promtool unpacked/usr/bin/prometheus "$OLDPWD/$1/"
