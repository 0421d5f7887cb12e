"""The control port: health, metrics and status pages, event and log streams, orders.

A request -> its access is checked (:mod:`replicas.control.access`) -> a page or stream
is read from the run, or an order is carried out by it. The same routes serve the TCP
port and the Unix socket; :mod:`replicas.control.client` sends requests to either. The
room decides nothing about replicas or versions.
"""
