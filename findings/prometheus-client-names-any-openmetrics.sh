#!/usr/bin/env bash
# prometheus-client 0.26.0: choose_encoder, which all of its servers use, labels the body with whatever OpenMetrics
# version from 1.0.0 on the client asks for, and sends OpenMetrics to a client that excludes it by q=0. Expected: RFC
# 9110 calls q=0 "not acceptable"; a server names the format that it sends.
# Seen: for "application/openmetrics-text; version=9.9.9" the body of 1.0.0, byte by byte, as version=9.9.9; for
# "application/openmetrics-text;q=0, text/plain" and for q=0.1 of OpenMetrics beside q=1 of text: OpenMetrics 1.0.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check prometheus-client==0.26.0
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PY'
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import choose_encoder

OPEN = "application/openmetrics-text"
registry = CollectorRegistry()
Counter("requests", "Requests.", registry=registry).inc()


def answer(accept: str) -> tuple[bytes, str]:
    encoder, content_type = choose_encoder(accept)
    print(f"{accept:75} -> {content_type}")
    return encoder(registry), content_type


body, content_type = answer(f"{OPEN}; version=1.0.0")
assert "version=1.0.0" in content_type
other, content_type = answer(f"{OPEN}; version=9.9.9")
assert other == body and "version=9.9.9" in content_type, "the version is not echoed now"
for accept in (f"{OPEN};q=0, text/plain", f"text/plain; version=0.0.4; q=1, {OPEN}; q=0.1"):
    other, content_type = answer(accept)
    assert other == body and content_type.startswith(OPEN), "q counts now"
assert answer("text/plain")[1].startswith("text/plain")
PY
