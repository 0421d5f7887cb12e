"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

from tests.support.browser.chromium import Chromium, Tab, find_chromium

__all__ = ["Chromium", "Tab", "find_chromium"]
