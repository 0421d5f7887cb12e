"""A property test of the core, for as many histories as you like: ``python -m
tests.support.properties NAME COUNT [SEED]``.

Without a seed the histories are the same in every run of the same code. That needs a
process of its own, as hypothesis also tries constants that it finds in whatever modules
are loaded. A history that breaks an invariant is shown as it was found, with the line
that repeats it: to make it shorter would take minutes.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from replicas.linux.processes import die_with_parent
from tests.unit.core.operations.test_operation_properties import Peers, RaisingPeers
from tests.unit.core.test_channel_properties import Channel
from tests.unit.core.test_life_properties import Lives

__all__ = ["MACHINES", "limit_s"]

MACHINES: dict[str, type[RuleBasedStateMachine]] = {
    "channel": Channel,
    "lives": Lives,
    "peers": Peers,
    "raising_peers": RaisingPeers,
}


def limit_s(count: int) -> float:
    """How long so many histories may take: some twenty times as long as they do on a
    quiet machine."""
    return 60.0 + 2.0 * count


def main(name: str, count: str, number: str = "") -> None:
    die_with_parent(os.getppid(), signal.SIGKILL)
    faulthandler.dump_traceback_later(limit_s(int(count)), exit=True)
    machine = MACHINES[name]
    run_state_machine_as_test(
        seed(int(number))(machine) if number else machine,
        settings=settings(
            max_examples=int(count),
            stateful_step_count=50,
            deadline=None,
            derandomize=not number,
            database=None,
            phases=[Phase.generate],
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
