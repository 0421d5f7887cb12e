"""Write versions to an archive until killed: URL, file of the key."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from replicas.archive import ArchiveKey, Rules, Writer
from tests.support.archives import CHANNEL, version

if __name__ == "__main__":
    url, key = sys.argv[1:]
    writer = Writer(url, CHANNEL, run="grpo", key=ArchiveKey.of_file(Path(key)), rules=Rules(keep=4, grace_s=0.0))
    newest = writer.newest
    for number in range(newest + 1, newest + 500):
        writer.write(version(number, np.full(20_001, number, np.uint16)))
        print(number, flush=True)
