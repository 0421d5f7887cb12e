"""The routes of the page: its files, the document that it shows, and its changes.

These routes are public, so they show no text of a program
(:mod:`replicas.control.access`); orders, logs, stacks and whole reasons have their own
routes, which need the token.
"""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from replicas.control.access import Access, Lasting, public
from replicas.control.orders_api import NO_STORE, refusal
from replicas.page.assets import HEADERS, asset
from replicas.page.live import VIEWERS, Live, Watched

_AGAIN_S = "10"


def wants_page(request: Request) -> bool:
    """Return True for a browser, which accepts HTML by name; ``curl`` does not."""
    return "text/html" in request.headers.get("accept", "")


def file_response(request: Request, name: str) -> Response:
    """Return a response with one file of the page, compressed if the client accepts
    that; 304 if the client has it already, 404 if there is no such file.

    :param name: of the file, such as ``index.html``.
    """
    found = asset(name)
    if found is None:
        return PlainTextResponse("no such file\n", 404, headers=NO_STORE)
    headers = {**HEADERS, "Cache-Control": "no-cache", "ETag": found.tag, "Vary": "Accept, Accept-Encoding"}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    body = found.body
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"], body = "gzip", found.packed
    return Response(body, headers={**headers, "Content-Type": found.kind})


def page_routes(source: Watched, access: Access) -> list[Route]:
    """Return the routes of the page: files, document and stream of changes.

    :param source: the run that is shown.
    :param access: decides which viewers are trusted (have shown the token). When 32
        viewers are connected, a trusted newcomer disconnects one that is not trusted.
    """
    live = Live(source, shown=public)

    async def file(request: Request) -> Response:
        """Answer with one file of the page, or 404."""
        return file_response(request, request.path_params["name"])

    async def document(_: Request) -> Response:
        """Answer with the whole document that the page shows, as compressed JSON."""
        headers = {**NO_STORE, "Content-Encoding": "gzip", "Content-Type": "application/json"}
        return Response(await live.whole(), headers=headers)

    async def changes(request: Request) -> Response:
        """Answer with a stream of the document's changes, or 503 if all viewers' places
        are taken."""
        after = request.headers.get("last-event-id", request.query_params.get("after", ""))
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=NO_STORE)
        viewer = request.client.host if request.client is not None else "", not access(request.headers)
        if live.places.full(*viewer):
            return refusal(f"this page has {VIEWERS} viewers already", 503, **{"Retry-After": _AGAIN_S})
        held = partial(live.places.take, *viewer)
        return Lasting(live.changes(after), held, media_type="text/event-stream", headers=NO_STORE)

    return [
        Route("/page/document", document, methods=["GET"]),
        Route("/page/changes", changes, methods=["GET"]),
        Route("/page/{name}", file, methods=["GET"]),
    ]
