"""Events of a run, and everything derived from them.

Flow: event (:mod:`.events`) -> :class:`~.event_log.EventLog` numbers and writes it ->
folds: counters (:mod:`.tally`), spans (:mod:`.spans`) -> metrics (:mod:`.metrics`),
OpenTelemetry (:mod:`.otel`), the page. :mod:`.verdict` and :mod:`.words` say in
sentences what a status or an event means. Nothing here decides or changes a run.
"""
