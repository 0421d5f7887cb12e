#!/usr/bin/env bash
# obstore 0.12.1: an S3 store that is given one client option, such as a timeout, no longer reads AWS_ALLOW_HTTP from the
# environment. Expected: options that are not given come from the environment, as the endpoint and the credentials do.
#
# client_options= replaces all of the client's options as one value. So a program that works against a test server over
# http stops working when it sets a timeout, and the error names the URL, not the option that went missing.
# Seen, against a server on loopback: without options 200; with {"timeout": "5s"}: GenericError, in its text "builder error";
# with {"timeout": "5s", "allow_http": True}: 200.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check obstore==0.12.1
"$folder/env/bin/python" - <<'PY'
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from obstore.store import from_url


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": "2", "ETag": '"1"', "Last-Modified": "Tue, 01 Dec 2026 00:00:00 GMT"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


server = HTTPServer(("127.0.0.1", 0), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_REGION": "us-east-1",
    "AWS_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
    "AWS_ALLOW_HTTP": "true",
}


def outcome(**options: object) -> str:
    try:
        return bytes(from_url("s3://bucket", **options).get("object").bytes()).decode()
    except Exception as error:
        return f"{type(error).__name__}: {'builder error' if 'builder error' in str(error) else str(error)[:200]}"


found = [
    outcome(),
    outcome(client_options={"timeout": "5s"}, retry_config={"max_retries": 0}),
    outcome(client_options={"timeout": "5s", "allow_http": True}),
]
server.shutdown()
for text in found:
    print(text)
assert found[0] == found[2] == "ok", "the environment and the option allow http"
assert found[1] != "ok", "an option no longer replaces those of the environment"
PY
