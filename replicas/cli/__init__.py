"""The command line ``replicas``: parse arguments, send requests, print answers.

Flow: :mod:`.main` -> a command -> :class:`~.find_run.RunAddress` (which run) ->
:class:`~.client.Client` (HTTP, over its Unix socket or TCP) -> :mod:`.render`. Only
``run``, ``agent``, ``slurm`` and ``ray`` start processes of a run, and only the
commands that read or write versions import torch.
"""
