#!/usr/bin/env bash
# obstore 0.12.1: a conditional put refuses the tag that head() of the same store returned. Expected: what head() says of an
# object ("e_tag" and "version") is what put(..., mode=) takes as an UpdateVersion, as both have these two keys.
#
# Stores without object versions say "version": None. put() reads its mode as a dict of strings, so None is a TypeError
# before anything is sent; the same dict without that key is accepted, and the condition works.
# Seen: head: {'e_tag': '"0"', 'version': None}; put: TypeError: 'None' is not an instance of 'str'; without the key: done,
# and with the old tag a second time: PreconditionError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check obstore==0.12.1
"$folder/env/bin/python" - <<'PY'
import obstore
from obstore.store import MemoryStore

store = MemoryStore()
obstore.put(store, "latest", b"one")
found = obstore.head(store, "latest")
tag = {"e_tag": found["e_tag"], "version": found["version"]}
print("head:", tag)
try:
    obstore.put(store, "latest", b"two", mode=tag)
    said = "accepted"
except TypeError as error:
    said = f"TypeError: {error}"
print("put:", said)
without = {name: value for name, value in tag.items() if value is not None}
obstore.put(store, "latest", b"two", mode=without)
try:
    obstore.put(store, "latest", b"three", mode=without)
    again = "accepted"
except obstore.exceptions.PreconditionError:
    again = "PreconditionError"
print("without the key: done; the old tag once more:", again)
assert tag["version"] is None and "NoneType" in said or "'None' is not an instance of 'str'" in said, "put takes None now"
assert again == "PreconditionError"
PY
