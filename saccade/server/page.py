"""The page at ``/``. It holds no data and needs no key; what it asks for does."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response


@cache
def _page() -> tuple[bytes, str]:
    """The page, and the policy that lets it run its own script and style, talk to this server, and nothing else."""
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'", "frame-ancestors 'none'"]
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
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
