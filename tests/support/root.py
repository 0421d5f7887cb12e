"""The folder of this repository, for tests wherever they lie. Standard library only."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
