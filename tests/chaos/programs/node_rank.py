"""``node_rank.py trainer|server``: such a program on a node, which first tells the
census (:mod:`tests.chaos.census`) that it lives."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys

PEER = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def main() -> None:
    PEER.connect(os.path.join(os.environ["CHAOS_OUT"], "census"))  # noqa: PTH118  # before slow imports
    told = {
        "name": f"{os.environ['REPLICAS_GROUP']}-{os.environ['REPLICA_ID']}",
        "generation": int(os.environ["REPLICAS_GENERATION"]),
        "node": os.environ["CHAOS_NODE"],
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    }
    PEER.send(json.dumps(told).encode())
    importlib.import_module(f"tests.chaos.programs.{sys.argv[1]}").main()


if __name__ == "__main__":
    main()
