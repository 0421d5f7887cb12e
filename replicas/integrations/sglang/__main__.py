"""``python -m replicas.integrations.sglang``."""

import sys

from replicas.integrations.sglang.serve import main

if __name__ == "__main__":
    sys.exit(main())
