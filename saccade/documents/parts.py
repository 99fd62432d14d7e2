"""Members of zip archives that are documents, and the XML in them: how much of it is read, and what is refused."""

from __future__ import annotations

import posixpath
import zipfile
from html.entities import html5
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.parsers import expat

MOST = 64 << 20  # bytes that are unpacked of an archive: a long book has a few MiB of text
ELEMENTS = 2_000_000  # of one XML part: a thousand pages of Word have some hundred thousand


class MarkupError(Exception):
    """A document whose text cannot be had. The message says why, and goes on from the document's name."""


class Parts:
    """The members of an archive, counted off the bytes that may be unpacked."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive, self._left, self._text = archive, MOST, MOST
        self.names = frozenset(archive.namelist())

    def read(self, name: str) -> bytes:
        """Member ``name``, whatever its header says of its size. KeyError where there is none."""
        with self._archive.open(name) as member:
            data = member.read(self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise MarkupError(f"unpacks to more than {MOST >> 20} MiB of text, which no book has")
        return data

    def count(self, characters: int) -> None:
        """So many more of text that may stand for itself again and again."""
        self._text -= characters
        if self._text < 0:
            raise MarkupError(f"has more than {MOST >> 20} MiB of text, which no book has")

    def tree(self, name: str) -> ElementTree.Element:
        """Member ``name`` as XML."""
        return tree(self.read(name))

    def related(self, name: str) -> dict[str, tuple[str, str]]:
        """What part ``name`` of an Office file refers to, "" for the file itself: by id, the kind and the part."""
        folder, file = posixpath.split(name)
        listed = posixpath.join(folder, "_rels", f"{file}.rels")
        if listed not in self.names:
            return {}
        found: dict[str, tuple[str, str]] = {}
        for one in self.tree(listed).iterfind("{*}Relationship"):
            kind, target = one.get("Type", "").rpartition("/")[2], unquote(one.get("Target", ""))
            if one.get("TargetMode") != "External":
                where = target if target.startswith("/") else posixpath.join("/", folder, target)
                found[one.get("Id", "")] = kind, posixpath.normpath(where).lstrip("/")
        return found


def tree(data: bytes) -> ElementTree.Element:
    """XML as a tree. A document type is passed over; one that declares entities is refused, in any encoding, for these
    could grow without end; so are elements beyond ``ELEMENTS``, each of which takes ten times its bytes and more."""
    parser, made = expat.ParserCreate(None, "}"), ElementTree.TreeBuilder()
    parser.buffer_text, left = True, ELEMENTS

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise MarkupError(f"has more than {ELEMENTS:,} elements in one part, which no book has")
        made.start(_named(tag), {_named(name): value for name, value in attributes.items()})

    def declared(name: str, *_: object) -> None:
        raise MarkupError(f"declares an entity ({name[:40]}), which its format does not have")

    def skipped(name: str, is_parameter: bool) -> None:
        if not is_parameter:  # of a document type that lies elsewhere, which for pages is HTML's
            made.data(html5.get(f"{name};", ""))

    parser.StartElementHandler, parser.EndElementHandler = start, lambda tag: made.end(_named(tag))
    parser.CharacterDataHandler, parser.EntityDeclHandler = made.data, declared
    parser.SkippedEntityHandler = skipped
    parser.Parse(data, True)
    return made.close()


def _named(name: str) -> str:
    return f"{{{name}" if "}" in name else name


def local(tag: str) -> str:
    """The name of an element or an attribute without its namespace."""
    return tag.rpartition("}")[2]


def attribute(one: ElementTree.Element, name: str) -> str | None:
    """An attribute by its name without a namespace."""
    for key, value in one.attrib.items():
        if local(key) == name:
            return value
    return None
