#!/usr/bin/env bash
# msgspec 0.22.0 encodes subclasses of list and dict, and of str where it is a key, but not of str, int, float or bytes.
# Expected: one rule for subclasses of built-in types, as in the standard library's json, which takes all of these but bytes.
#
# numpy's float64 and str_ are such subclasses: a loss that is a numpy float64 goes through json and raises TypeError here,
# but a dict whose keys are numpy strings goes through both. So an error text of a class of its own, or a number that a
# trainer hands on, needs an enc_hook, and a test with plain values does not show it.
# Seen: the lists below, the same for JSON and MessagePack.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check msgspec==0.22.0 numpy==2.4.0
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import json
from collections import OrderedDict

import msgspec
import numpy as np


class Text(str): ...


class Number(int): ...


class Items(list): ...


TAKEN = [Items([1]), OrderedDict(a=1), {Text("a"): 1}, {np.str_("a"): 1}]
REFUSED = [Text("a"), Number(1), np.float64(0.5), np.str_("a")]
for value in (*TAKEN, *REFUSED):
    json.dumps(value)  # takes all
    for codec in (msgspec.json, msgspec.msgpack):
        try:
            codec.encode(value)
            taken = True
        except TypeError as error:
            print(f"{codec.__name__}: {error}")
            taken = False
        assert taken == any(value is one for one in TAKEN), f"msgspec treats {value!r} in another way now"
PY
