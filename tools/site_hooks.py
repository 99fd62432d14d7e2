"""Pages of the site that lie outside of docs/: CONTRIBUTING.md, SECURITY.md, CHANGELOG.md, with links that fit both;
names that pages show in one piece."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LONGEST = 26  # letters of a name that is not broken: as many fit beside each other on a phone
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Any, config: Any) -> Any:
    """Take the pages in."""
    from mkdocs.structure.files import File

    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between the folders as links within the site; figures of docs/results lie where they did."""
    if page.file.src_uri.startswith("results/"):
        page.meta.setdefault("search", {"boost": 0.02})  # pages that explain come before all rows
    if page.file.src_uri in OUTSIDE.values():
        return re.sub(r"\]\(docs/", "](", markdown)
    for name, inside in OUTSIDE.items():
        markdown = markdown.replace(f"](../../{name}", f"](../{inside}").replace(f"](../{name}", f"]({inside}")
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Names in one piece (class ``whole``, docs/site.css); roles of docstrings, such as ``:class:``, are not shown."""
    html = re.sub(r":(?:class|meth|func|mod|attr|exc|data):(?=<code>)", "", html)
    return re.sub(rf"<code>([^\s<]{{1,{LONGEST}}})</code>", r'<code class="whole">\1</code>', html)
