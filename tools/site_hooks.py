"""Pages of the site that lie outside of docs/: CONTRIBUTING.md, SECURITY.md, CHANGELOG.md, with links that fit both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Any, config: Any) -> Any:
    """Take the pages in."""
    from mkdocs.structure.files import File

    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between the folders as links within the site; figures of docs/results lie where they did."""
    if page.file.src_uri in OUTSIDE.values():
        return re.sub(r"\]\(docs/", "](", markdown)
    for name, inside in OUTSIDE.items():
        markdown = markdown.replace(f"](../../{name}", f"](../{inside}").replace(f"](../{name}", f"]({inside}")
    return markdown
