"""``python -m replicas``: the command ``replicas``, also without it on the path."""

import sys

from replicas.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
