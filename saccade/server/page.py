"""The page at ``/``, put together from ``web/``. It holds no data and needs no key; what it asks for does."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from starlette.responses import Response

_LIBRARY = "markdown-it.min.js"  # of npm, its licences beside it
_SCRIPTS = (  # in this order
    *("common.js", "stream.js", "heat.js", "maps.js", "now.js", "markdown.js"),
    *("chats.js", "chat.js", "compare.js"),
)


@cache
def _page() -> tuple[bytes, str]:
    """The page, and the policy that lets it run its own script and style, talk to this server, and nothing else."""
    folder = Path(__file__).parent / "web"

    def read(*names: str) -> str:
        return "".join((folder / name).read_text(encoding="utf-8") for name in names)

    text = read("page.html")
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'", "frame-ancestors 'none'"]
    # A page's script may hold no comment of HTML, behind which "script" would begin another one.
    scripts = read(_LIBRARY).replace("<!--", "\\x3C!--") + read(*_SCRIPTS)
    for tag, inside in (("script", scripts), ("style", read("style.css"))):
        text = text.replace(f"<{tag}></{tag}>", f"<{tag}>{inside}</{tag}>")
        hashed = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        rules.append(f"{tag}-src 'sha256-{hashed}'")
    return text.encode(), "; ".join([*rules, "form-action 'self'"])


def page() -> Response:
    body, rules = _page()
    return Response(
        body,
        media_type="text/html; charset=utf-8",
        headers={"content-security-policy": rules, "referrer-policy": "no-referrer"},
    )
