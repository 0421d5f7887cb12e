"""Small programs for replicas, as source text."""

from __future__ import annotations

import sys

__all__ = ["DAEMONIZES", "IGNORES", "SLEEPS", "group"]

SLEEPS = "import time; print('up', flush=True); time.sleep(600)"

IGNORES = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"

DAEMONIZES = """
import os, subprocess, sys, time
sleep = [sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)']
a = subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    b = subprocess.Popen(sleep, start_new_session=True)
    print(a.pid, b.pid, flush=True)
    os._exit(0)
os.wait()
time.sleep(600)
"""
"""Starts a child in a session of its own and a double-forked daemon, both deaf to SIGTERM; prints their pids; sleeps."""


def group(name: str, code: str, more: str = "") -> str:
    """TOML of a group that executes Python source."""
    return f'[groups.{name}]\nlauncher = "exec"\ncommand = ["{sys.executable}", "-c", """{code}"""]\n{more}\n'
