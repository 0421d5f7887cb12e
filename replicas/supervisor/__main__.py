"""``python -m replicas.supervisor CONFIG``: the same as ``replicas run CONFIG``."""

import sys

from replicas.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
