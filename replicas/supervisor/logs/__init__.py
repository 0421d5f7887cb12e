"""Log pumps: from the pipes of ranks to log files."""
