#!/bin/sh
# A Chromium for the tests of the page: installed where that is possible, else what is missing is said.
for name in "$CHROMIUM" chromium chromium-browser google-chrome; do
  [ -n "$name" ] && command -v "$name" > /dev/null && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  echo "Installing chromium"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core > /dev/null && exit 0
fi
echo "the tests of the page need a Chromium: install one (Debian, as root: apt-get install chromium), or name it by CHROMIUM=/path" >&2
exit 1
