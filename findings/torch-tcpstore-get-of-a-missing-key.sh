#!/usr/bin/env bash
# torch 2.13.0: TCPStore.get(key) can return b"" for a key that was never set, or not to this value, where it should
# wait and raise DistStoreError at its timeout.
#
# A waiting get returns whatever ends its wait. (1) Its key is set to b"value" and deleted before it is read: b"", in
# place of b"value" or a timeout. (2) After a queue_pop("queue") that had to wait, the same client waits for "absent"
# and another pushes to "queue": b"" at once, as the client still counts as waiting for the queue. Without the wait in
# queue_pop, the get times out. So an empty value means nothing; check() tells.
# Seen: set and deleted: b''; after a pop that waited: b''; after one that did not: DistStoreError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
"$folder/env/bin/python" -W ignore - 2> "$folder/stderr" <<'PY'
import threading
from datetime import timedelta

from torch.distributed import DistStoreError, TCPStore

SOON = 0.5  # a wait that has begun by then; the client cannot say that it waits
server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client() -> TCPStore:
    return TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))


def soon(act) -> threading.Timer:
    timer = threading.Timer(SOON, act)
    timer.start()
    return timer


def set_and_delete() -> None:
    other.set("brief", "value")
    other.delete_key("brief")


other = client()
timer = soon(set_and_delete)
found = client().get("brief")
timer.join()
print("set and deleted:", found)
assert found == b"", "a deleted key is noticed now"

for waits in (True, False):
    ours = client()
    if waits:
        timer = soon(lambda: other.queue_push("queue", "first"))
    else:
        other.queue_push("queue", "first")
        other.num_keys()  # a push is not answered: this is, after it
    assert ours.queue_pop("queue") == b"first"
    if waits:
        timer.join()
    timer = soon(lambda: other.queue_push("queue", "second"))
    try:
        result = ours.get("absent")
    except DistStoreError:
        result = DistStoreError
    timer.join()
    print("a pop that waited:" if waits else "a pop that did not wait:", result)
    assert not ours.check(["absent"])
    assert result == (b"" if waits else DistStoreError), "get after queue_pop behaves otherwise now"
    assert other.queue_pop("queue") == b"second"
PY
