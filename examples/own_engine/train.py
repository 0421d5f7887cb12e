"""Publishes three versions and waits until both workers of the engine (engine.py) and
the server (my_engine.py) serve each."""

from __future__ import annotations

import time

import torch

import replicas

ENGINE_RANKS = 2
SERVERS = 1
START_S = 90.0


def main() -> None:
    with replicas.join("policy") as channel:
        until = time.monotonic() + START_S
        while (
            len(channel.members) < 1 + ENGINE_RANKS + SERVERS
        ):  # else the first versions are committed without the engine
            if time.monotonic() > until:
                raise TimeoutError(f"the engines have not joined within {START_S:g} s")
            time.sleep(0.05)
        for step in (1, 2, 3):
            weight = torch.arange(8.0).reshape(8, 1) * step
            version = channel.publish({"weight": weight}, meta={"step": step}).wait(90).version
            channel.loaded(version).wait(90)
            print(f"RESULT trainer: version {version} is served by all ranks of the engine", flush=True)


if __name__ == "__main__":
    main()
