"""Ping-pong by send and recv: each player adds one to the ball and sends it back.

python -m replicas.supervisor examples/ping_pong/run.toml
cat examples/ping_pong/.replicas/*/logs/player/*/gen-1/rank-0.log
"""

from __future__ import annotations

import os
import statistics
import time

import torch

import replicas

ROUNDS = 10


def main() -> None:
    me = int(os.environ["REPLICA_ID"])
    other = f"player/{1 - me}"
    ball = torch.zeros(3)
    seconds = []
    with replicas.join("table") as channel:
        for number in range(ROUNDS):
            started = time.monotonic()
            if me == 0:
                channel.send(ball + 1, dst=other).wait(90)
                channel.recv(ball, src=other).wait(90)  # into a tensor of ours
                torch.testing.assert_close(ball, torch.full((3,), 2.0 * (number + 1)))
            else:
                (ball,) = channel.recv(src=other).wait(90).tensors  # or take whatever is sent
                torch.testing.assert_close(ball, torch.full((3,), 2.0 * number + 1))
                channel.send(ball + 1, dst=other).wait(90)
            seconds.append(time.monotonic() - started)
    if me == 0:
        print(f"RESULT the ball is at {ball[0]:.0f} after {ROUNDS} rounds", end="")
        print(f" of {statistics.median(seconds) * 1000:.1f} ms (median), {max(seconds) * 1000:.0f} ms (worst)")


if __name__ == "__main__":
    main()
