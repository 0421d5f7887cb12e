"""The command ``slurm``: submit a run as a Slurm job, and run its parts within one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from msgspec import UNSET
from msgspec.structs import replace

from replicas.cli.base import command
from replicas.cli.find_run import RunAddress
from replicas.cli.slurm_script import script
from replicas.common.foreign import one_line
from replicas.config import tables as config_tables
from replicas.config.file import load
from replicas.config.job import SlurmConfig
from replicas.config.structs import Config
from replicas.config.values import Place
from replicas.control.exit_codes import FAILED
from replicas.errors import UsageError, WorldError
from replicas.linux.helpers import interpreter

_SUBMIT_TIMEOUT_S = 60.0
_QUEUE_TIMEOUT_S = 5.0


@command(failed=FAILED)
def slurm(
    *,
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's TOML file.")],
    submit: Annotated[bool, typer.Option("--submit", help="Submit the script, and print the job's number.")] = False,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="The job's partition.")] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="Number of nodes.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(metavar="N", help="Number of GPUs on each node.")] = None,
    cpus_per_node: Annotated[
        int | None, typer.Option(metavar="N", help="Number of CPUs on each node. Default: whole nodes.")
    ] = None,
    time: Annotated[str | None, typer.Option(metavar="DURATION", help='Longest time, such as "24h".')] = None,
    grace: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Time before its end at which the job drains.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="OPTION", help="A further option of sbatch.")] = None,
    here: Annotated[
        Literal["all", "supervisor", "agent"] | None,
        typer.Option(
            metavar="PART", help="Run this task of a Slurm job: all that is its own, or the supervisor, or an agent."
        ),
    ] = None,
) -> None:
    """Print a batch script that runs CONFIG on Slurm, or submit it.

    The options replace those of CONFIG's table slurm. Without a batch script:
    srun --nodes=2 --ntasks-per-node=1 replicas slurm CONFIG --here all
    """
    loaded = load(config)
    if here is not None:
        from replicas.cli.slurm_job import run_part  # heavy: imported within a job only

        raise typer.Exit(run_part(loaded, here))
    given = {
        "partition": partition,
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "cpus_per_node": cpus_per_node,
        "time": time,
        "grace": grace,
        "options": option,
    }
    order = _order(loaded, {key: value for key, value in given.items() if value is not None})
    text = script(loaded, order, [interpreter(), "-m", "replicas", "slurm", str(loaded.source)])  # in absolute paths
    if submit:
        print(_submitted(text))
    else:
        print(text, end="")


def queued(place: RunAddress) -> str | None:
    """Ask Slurm's queue (``squeue``) for the run's job; return its state as text.

    The text has the job's number, state and reason. Return None if this user has no job
    with the run's name, or Slurm does not answer within 5 s.
    """
    if place.config is None or shutil.which("squeue") is None:
        return None
    command = ["squeue", "--me", "--noheader", "--name", place.config.run.name, "--format", "%i %T %r"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUEUE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None  # a status needs no Slurm
    number, _, why = done.stdout.partition("\n")[0].partition(" ")
    return f"Slurm has its job {number}: {one_line(why)}" if number and not done.returncode else None


def _order(config: Config, given: dict[str, Any]) -> SlurmConfig:
    """Return the config's table ``slurm`` with values of the command line in it.

    Each replaces the config's own.

    :param given: the values by key, those that were given only.
    :raises UsageError: an option has an invalid value.
    """
    place = Place(Path())
    read = config_tables.read(place, given, SlurmConfig)
    if place.problems or read is UNSET:
        told = [(path[0].replace("options", "option"), text.partition(": ")[2]) for path, text in place.problems]
        raise UsageError("; ".join(f"--{name.replace('_', '-')}: {text}" for name, text in told))
    keys = config_tables.keys_of(SlurmConfig)
    return replace(config.slurm, **{keys[key].field: getattr(read, keys[key].field) for key in given})


def _submitted(text: str) -> str:
    """Submit the script to Slurm (``sbatch``); wait, and return the number of the job.

    :param text: the script.
    :raises UsageError: there is no sbatch.
    :raises WorldError: sbatch refused the script, or did not answer within 60 s: the
        job may be queued then.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=text,
            capture_output=True,
            errors="replace",
            timeout=_SUBMIT_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise UsageError("there is no sbatch here", hint="submit from a login node of the cluster") from error
    except subprocess.TimeoutExpired as error:
        raise WorldError(
            f"sbatch did not answer within {_SUBMIT_TIMEOUT_S:.0f} s",
            hint="ask `squeue --me` whether the job is queued",
        ) from error
    if done.returncode:
        raise WorldError(f"sbatch: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]
