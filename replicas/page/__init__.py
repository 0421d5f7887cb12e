"""The web page of a run: its files and its document, live or as a report.
Live: status and events -> :mod:`document <replicas.page.document>` and
:mod:`history <replicas.page.history>` -> merge patches of
:class:`~replicas.page.live.Live` -> server-sent events. Report: the event file ->
:class:`~replicas.page.past.Past` -> one HTML file that needs no network.

It serves no requests (``control/page_routes.py`` does), and gives no orders itself: the
page in the browser sends those to the control port.
"""
