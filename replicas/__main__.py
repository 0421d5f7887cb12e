"""``python -m replicas``: the command ``replicas``, where it is not on the path."""

import sys

from replicas.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
