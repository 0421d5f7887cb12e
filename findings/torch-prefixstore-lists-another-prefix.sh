#!/usr/bin/env bash
# torch 2.13.0: PrefixStore("a/b", store).list_keys() also lists the keys of PrefixStore("a/bc", store), cut at the
# wrong place, and what it lists cannot be read through it. Expected: the keys that were set through this prefix.
#
# A key is stored as "PREFIX/KEY", but the listing is asked for "PREFIX" without the slash, and one character more is
# cut off. Clean-up by a prefix (rank 1 and rank 10, say) meets the keys of the other.
# Seen: PrefixStore("rank1").list_keys() = ['/right', 'own'] with "rank10/right" and "rank1/own" in the store.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PY'
from torch.distributed import HashStore, PrefixStore, TCPStore

STORES = {
    "TCPStore": TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    "HashStore": HashStore(),
}
for kind, store in STORES.items():
    one, ten = PrefixStore("rank1", store), PrefixStore("rank10", store)
    one.set("own", "1")
    ten.set("right", "10")
    listed = sorted(one.list_keys())
    print(kind, "has", sorted(store.list_keys()), "and rank1 lists", listed)
    assert listed == ["/right", "own"], "the prefix is matched otherwise now"
    assert not one.check(["/right"])
PY
