"""The weight-transfer backend "replicas", in each worker of a vLLM server: receive ->
try -> load or patch -> prove -> report. The server's HTTP side is in the room above."""
