"""Draw the board: ``python -m tests.support.board.picture http://127.0.0.1:9090
docs/images/board.png [--run NAME] [--minutes N] [--to SECONDS]``."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.support import board
from tests.support.board.prometheus import Prometheus
from tests.support.board.queries import filled
from tests.support.root import ROOT

HERE = Path(__file__).parent
WORK = ROOT / ".venv" / "picture"
STEP_S, ROW_PX, WIDTH_PX = 5, 36, 1410
_TIMEOUT_S = 900.0
HTML = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="drawn.css">
<style>body { margin: 8px; background: #111217; color: #ccccdc; font-family: sans-serif } * { box-sizing: border-box }
button, [role=columnheader] { color: inherit; background: none; border: 0; font: inherit }</style>
<div id="root"></div><script src="data.js"></script><script src="drawn.js"></script>
"""


def answers(prometheus: Prometheus, panels: list[dict[str, Any]], run: str, began: float, to: float) -> dict[str, Any]:
    """What Prometheus says to each query, by number of the panel."""
    values = {"__rate_interval": "30s", "__range": "1h", "run": run, "group": ".*", "channel": ".*"}
    found: dict[str, Any] = {}
    for panel in panels:
        for target in panel.get("targets", ()):
            asked = {"query": filled(target["expr"], values)}
            if target["instant"]:
                data = prometheus.get("query", **asked, time=str(to))
            else:
                data = prometheus.get("query_range", **asked, start=str(began), end=str(to), step=str(STEP_S))
            found.setdefault(str(panel["id"]), []).append(data["result"])
    return found


def bundle() -> None:
    """``draw.jsx`` with all that it needs, for a browser."""
    WORK.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "draw.jsx"):
        shutil.copy(HERE / name, WORK)
    # No install scripts. Of esbuild's the binary is a package of its own.
    npm = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--legacy-peer-deps"]
    subprocess.run(npm, cwd=WORK, check=True, timeout=_TIMEOUT_S)
    command = ["node_modules/.bin/esbuild", "draw.jsx", "--bundle", "--outfile=drawn.js", "--jsx=automatic"]
    command += [f"--loader:.{kind}=dataurl" for kind in ("svg", "woff2", "ttf")]
    command += ['--define:process.env.NODE_ENV="production"', "--define:global=window", "--log-level=error"]
    # Their other form mixes up the defaults of its own requirements.
    command += [
        f"--alias:@grafana/{one}-cjs=./node_modules/@grafana/{one}/dist/cjs/index.cjs" for one in ("data", "ui")
    ]
    subprocess.run(command, cwd=WORK, check=True, timeout=_TIMEOUT_S)


def shoot(picture: Path, height: int) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--virtual-time-budget=60000", "--allow-file-access-from-files", f"--window-size={WIDTH_PX},{height}"]
    command += [f"--screenshot={picture}", (WORK / "drawn.html").as_uri()]
    subprocess.run(command, check=True, timeout=_TIMEOUT_S, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.board.picture")
    parser.add_argument("prometheus", help="its address, such as http://127.0.0.1:9090")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--run", default="grpo")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--to", type=float, default=0.0, help="in seconds since 1970; default: now")
    parser.add_argument("--rows", type=int, default=0, help="grid rows to show; default: all")
    given = parser.parse_args()
    shown = json.loads(board.text())
    to = given.to or time.time()
    began = to - 60 * given.minutes
    bundle()
    data: dict[str, Any] = {"from": int(began * 1000), "to": int(to * 1000)}
    data |= {"panels": answers(Prometheus(given.prometheus), shown["panels"], given.run, began, to)}
    boot = "window.grafanaBootData = { settings: {}, user: {} }"
    (WORK / "data.js").write_text(f"window.BOARD = {json.dumps(shown)}; window.DATA = {json.dumps(data)}; {boot};\n")
    (WORK / "drawn.html").write_text(HTML)
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in shown["panels"])
    shoot(given.picture.resolve(), (given.rows or bottom) * ROW_PX + 20)


if __name__ == "__main__":
    main()
