"""A picture of the Grafana board, drawn with Grafana's own components: ``python -m
tests.support.board.picture PROMETHEUS PICTURE``.

There is no Grafana among the packages of pip, npm and Debian; but npm has the
components that draw its panels. ``draw.jsx`` puts them where the board has its panels,
with what a real Prometheus answers to their queries. What only Grafana's server or its
application has is not in the picture: variables, marks, the state timeline (drawn here
by hand). It needs npm and Chromium, and 450 MB below ``.venv/picture``.
"""
