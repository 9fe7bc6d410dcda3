"""Cross-origin requests (CORS): which pages of other origins a browser lets read the answers of the HTTP port."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aiohttp import web

from recinfer.excerpts import quoted

__all__ = ["Cors"]

_ANY = "*"
_EXPOSED = "Inference-Header-Content-Length, Retry-After, X-Request-Id"
_MAX_AGE_S = 600


class Cors:
    """The origins whose pages may send requests.

    Args:
        origins: as ``https://shop.example``, or ``*`` for every origin; none: no headers of CORS are sent.
    """

    def __init__(self, origins: Sequence[str] = ()) -> None:
        self._origins = frozenset(origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """The headers of an answer to a page of ``origin``; none where the origin is not allowed."""
        if not self._origins:
            return {}
        if _ANY in self._origins:
            return {"Access-Control-Allow-Origin": _ANY, "Access-Control-Expose-Headers": _EXPOSED}
        # Caches must not give the answer for one origin to another, also where this origin is not allowed.
        varies = {"Vary": "Origin"}
        if origin is None or origin.lower() not in self._origins:
            return varies
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED, **varies}

    def is_preflight(self, request: web.Request) -> bool:
        """Whether a browser asks with ``request`` if a page may send another request."""
        return (
            bool(self._origins) and request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        )

    def preflight(self, request: web.Request, methods: Iterable[str]) -> web.Response:
        """The answer to a preflight of a path that has ``methods``; a browser sends no token with a preflight."""
        origin = request.headers.get("Origin")
        if "Access-Control-Allow-Origin" not in self.headers(origin):
            text = f"origin: got {quoted(origin or '')}, which is none that this server allows (--cors-origin)"
            return web.json_response({"error": text}, status=403)
        allowed = {
            "Access-Control-Allow-Methods": ", ".join(sorted(methods)),
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }
        if wanted := request.headers.get("Access-Control-Request-Headers"):
            allowed["Access-Control-Allow-Headers"] = wanted  # the token decides about a request, not its headers
        return web.Response(status=204, headers=allowed)
