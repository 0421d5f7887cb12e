#!/usr/bin/env bash
# Slurm's controller, node daemon and commands, and shellcheck, into a folder, from Debian's packages, which are not installed:
# no root is needed, and no service starts: fetch_slurm.sh FOLDER
set -euo pipefail
command -v apt-get dpkg > /dev/null || {
  echo "Slurm is missing, and there is no apt-get to fetch it with: install slurmctld, slurmd and slurm-client" >&2
  exit 1
}
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
mkdir -p "$made/lists/partial" "$made/cache/archives/partial" "$made/unpacked"
# Lists of its own: those of a fresh machine are empty, and the system's take root to renew.
for step in update "install --yes --no-install-recommends --download-only slurmctld slurmd slurm-client shellcheck"; do
  # shellcheck disable=SC2086  # several words
  apt-get -qq -o APT::Sandbox::User= -o Debug::NoLocking=1 -o Dir::State::lists="$made/lists" -o Dir::Cache="$made/cache" $step
done
for package in "$made"/cache/archives/*.deb; do
  dpkg -x "$package" "$made/unpacked"
done
rm -rf "$1"
mv "$made/unpacked" "$1"
