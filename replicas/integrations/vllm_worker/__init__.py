"""What runs in each worker of a vLLM server: the weight-transfer backend "replicas"."""
