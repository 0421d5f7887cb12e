"""The batch script of a run on Slurm, as text. Pure.

The script starts the supervisor on the first node, and by ``srun`` one agent on each
node; their parts are in :mod:`replicas.cli.slurm_job`. It lives as long as the
supervisor, so the job ends with the run, and Slurm ends the remaining processes.

Slurm announces the end of the job by SIGTERM: to the script alone ``grace`` before the
time limit (``--signal=B:TERM``) or, with ``send_user_signal``, before a preemption; to
every process of the job when it is requeued or cancelled at once. For the supervisor
all of these are a preemption: it drains and exits with 75, and its state stays. Then
the script puts the job back into the queue, unless Slurm has already ended it: a job
that was cancelled must not come back.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from replicas.config.job import SlurmConfig
from replicas.config.structs import Config
from replicas.control.exit_codes import PREEMPTED
from replicas.errors import UsageError

_MARGIN_S = 30.0
"""Time for the end of the agents, and for Slurm to send the signal."""
_EARLIER_S = 60.0
"""How much earlier than requested Slurm may send the signal."""

_BODY = """
# The job's output has lines of the programs: only the user may read it, like the logs.
for stream in /dev/stdout /dev/stderr; do
  [ -f "$stream" ] && chmod go= "$stream"
done

# Slurm's notice must kill neither this script nor the supervisor, even before that listens.
trap 'told=1; kill -USR1 "${{supervisor:-}}" 2> /dev/null' TERM
(trap '' USR1 && exec {command} --here supervisor) &
supervisor=$!

agents() {{
  srun {step} \\
    {command} --here agent && return 0
  # All agents have failed: the supervisor would wait forever for others, unless the run is over by now.
  sleep 10
  kill -USR1 "$supervisor" 2> /dev/null && return 3
  return 0
}}
agents &
agents=$!

told=1
while [ "$told" -eq 1 ]; do # the trap has ended the wait, maybe just before the supervisor's end, whose code bash keeps
  told=0
  wait "$supervisor"
  code=$?
done
if [ "$code" -eq {preempted} ]; then
  failed=0
  kill -0 "$agents" 2> /dev/null || {{
    wait "$agents"
    failed=$?
  }}
  if [ "$failed" -eq 3 ]; then
    echo "replicas: the agents have failed, so the job is not queued again" >&2
    code=1
  elif scontrol --oneliner show job "$SLURM_JOB_ID" | grep -q ' JobState=RUNNING '; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$code"
"""


def script(config: Config, order: SlurmConfig, command: Sequence[str]) -> str:
    """Return the text of the batch script that runs ``config`` on Slurm.

    It is not submitted.

    :param order: resources and limits to request from Slurm.
    :param command: runs the command ``replicas slurm CONFIG``, with absolute paths.
    :raises replicas.errors.UsageError: the job would drain as it starts, forever.
    """
    _refuse_too_short(config, order)
    head = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(config, order))]
    # A job that may lose nodes continues without them only if its step may, too.
    step = ["--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0", "--no-kill"]
    if order.cpus_per_node is not None:
        step.append(f"--cpus-per-task={order.cpus_per_node}")  # srun does not take it from the job
    body = _BODY.format(command=shlex.join(command), step=" ".join(step), preempted=PREEMPTED)
    return "\n".join(head) + "\n" + body


def _options(config: Config, order: SlurmConfig) -> Iterator[str]:
    """Yield the options of sbatch for the job, such as ``--nodes=2``.

    :param order: resources and limits to request from Slurm.
    """
    yield f"--job-name={config.run.name}"
    if order.partition is not None:
        yield f"--partition={order.partition}"
    yield f"--nodes={order.nodes}"
    yield "--ntasks-per-node=1"
    if order.gpus_per_node is not None:
        yield f"--gpus-per-node={order.gpus_per_node}"
    if order.cpus_per_node is None:
        yield "--exclusive"
        yield "--mem=0"
    else:
        yield f"--cpus-per-task={order.cpus_per_node}"
    if order.time_s is not None:
        yield f"--time={time_text(order.time_s)}"
    yield "--requeue"
    yield "--open-mode=append"
    yield f"--signal=B:TERM@{math.ceil(grace_s(config, order))}"
    yield from order.options


def grace_s(config: Config, order: SlurmConfig) -> float:
    """Return how many seconds before its end Slurm signals the job.

    It is the configured time, or by default the longest drain of a group and 30 s.
    """
    if order.grace_s is not None:
        return order.grace_s
    return max(group.drain_timeout_s + group.stop_timeout_s for group in config.groups.values()) + _MARGIN_S


def _refuse_too_short(config: Config, order: SlurmConfig) -> None:
    """Raise UsageError if the requested time for the job is too short.

    It is if the job would be told of its end, and drain, as it starts.
    """
    grace = grace_s(config, order)
    if order.time_s is not None and order.time_s <= grace + _EARLIER_S:
        raise UsageError(
            f"slurm.time ({order.time_s:g} s) is too short: the job is told {grace:g} s before its end (slurm.grace), "
            f"or up to {_EARLIER_S:g} s earlier, so it would drain as it starts",
            hint="raise slurm.time, or lower slurm.grace, which is by default "
            f"{_MARGIN_S:g} s more than the longest drain of a group takes",
        )


def time_text(seconds: float) -> str:
    """Return the duration in Slurm's form, in whole minutes: ``1-02:30:00``."""
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:00"
