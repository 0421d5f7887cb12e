"""``python -m replicas.integrations.lmdeploy``."""

import sys

from replicas.integrations.lmdeploy.serve import main

if __name__ == "__main__":
    sys.exit(main())
