"""Publish, receive and hold versions, on the member's side.

Source: `Publisher` fills a slot -> Packed -> commit. Target: offer -> `Transfers` pulls
or maps -> commit -> `Receiver` hands out an `Update` -> load -> Loaded. The coordinator
numbers, routes and commits versions; nothing here does.
"""
