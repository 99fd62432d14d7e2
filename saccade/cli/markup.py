"""The text of documents that are markup: HTML pages, Word files (DOCX) and EPUB books, by the standard library."""

from __future__ import annotations

import codecs
import io
import lzma
import posixpath
import re
import struct
import zipfile
import zlib
from html.parser import HTMLParser
from urllib.parse import unquote
from xml.etree import ElementTree

MOST = 64 << 20  # bytes that are unpacked of an archive: a long book has a few MiB of text
ELEMENTS = 2_000_000  # of one XML part: a thousand pages of Word have some hundred thousand
_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_CHARSET = re.compile(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*["']?([-\w.:]+)""", re.IGNORECASE)
_HIDDEN = frozenset(("script", "style", "template", "noscript", "svg", "math", "nav", "head", "iframe", "object"))
_APART = frozenset(
    ("p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "dl", "table", "blockquote", "pre", "figure", "section", "hr")
)
_LINES = _APART.union(
    (
        "div",
        "br",
        "li",
        "dt",
        "dd",
        "tr",
        "article",
        "header",
        "footer",
        "main",
        "aside",
        "title",
        "address",
        "figcaption",
    )
)
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"


def unicode_of(data: bytes) -> str | None:
    """UTF-8 or UTF-16 by its mark, or UTF-16 without one: in most scripts of Europe every other byte is 0."""
    if marked := next((one for mark, one in _MARKS.items() if data.startswith(mark)), None):
        return marked
    even, odd = data[:2000:2], data[1:2000:2]
    if len(odd) < 2:
        return None
    if odd.count(0) > 0.7 * len(odd) and not even.count(0):
        return "utf-16-le"
    return "utf-16-be" if even.count(0) > 0.7 * len(even) and not odd.count(0) else None


class MarkupError(Exception):
    """A document whose text cannot be had. The message says why, and goes on from the document's name."""


def html_text(data: bytes) -> str:
    """The text of an HTML page: what a reader sees of it, paragraphs apart by empty lines, without scripts, styles and
    navigation. Its encoding is by its mark, its own declaration, or UTF-8, else Windows-1252, as browsers have it."""
    page = _Page()
    page.feed(_decoded(data))
    page.close()
    return page.text()


def archive_text(data: bytes) -> str | None:
    """The text of a zip archive that is a Word file or an EPUB book; None if it is neither. MarkupError where it is one
    and damaged, locked, larger than ``MOST`` or ``ELEMENTS``, or without text."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = set(archive.namelist())
            left = [MOST]
            main = _main(archive, left) if "_rels/.rels" in names else "word/document.xml"
            if main in names and main.startswith("word/"):
                kind, text = "a Word file", _word(_read(archive, main, left))
            elif "META-INF/container.xml" in names:
                kind, text = "an EPUB book", _book(archive, left)
            else:
                return None
    except (NotImplementedError, RuntimeError) as error:  # a way of packing that is unknown; zipfile's for passwords
        raise MarkupError(f"cannot be unpacked ({error})") from error
    except _DAMAGED as error:
        raise MarkupError(f"is a damaged archive ({type(error).__name__}: {error})") from error
    if not text.strip():
        raise MarkupError(f"is {kind} without text, of pictures perhaps")
    return text


# What unpackers raise behind a good directory is their own: zlib's, lzma's, and OSError of bz2. LookupError is that of
# a member or an attribute that is missing, and of an encoding that XML names.
_DAMAGED = (
    zipfile.BadZipFile,
    ElementTree.ParseError,
    LookupError,
    EOFError,
    ValueError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    struct.error,
)


class _Page(HTMLParser):
    """Collects the words of a page, and where lines end."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._hidden: list[str] = []  # open elements that are not shown, outermost first
        self._kept = 0  # <pre> that are open
        self._due = 0  # line ends before what comes next
        self._fresh = False  # whether a mark of a list stands before it, so that its own line has begun

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _HIDDEN:
            self._hidden.append(tag)
        elif tag == "body":  # also ends a head that nothing closed
            self._hidden.clear()
        self._kept += tag == "pre"
        self._break(tag)
        if self._hidden:
            return
        if tag == "li":
            self._add("- ")
            self._fresh = True
        elif tag in ("td", "th"):
            self._add("" if self._due else "\t")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in _HIDDEN and tag in self._hidden:
            del self._hidden[self._hidden.index(tag) :]
        self._kept = max(0, self._kept - (tag == "pre"))
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if self._kept:
            self._add(data)
            return
        text = re.sub(r"[ \t\r\n\f]+", " ", data)
        if self._due or self._fresh:
            text = text.lstrip(" ")
        if text:
            self._add(text)

    def _add(self, text: str) -> None:
        self._parts += ["\n" * self._due, text]
        self._due, self._fresh = 0, False

    def _break(self, tag: str) -> None:
        if tag in _LINES and not self._hidden and not self._fresh:
            self._due = min(2, self._due + 1) if tag == "br" else max(self._due, 2 if tag in _APART else 1)

    def text(self) -> str:
        text = re.sub(r" *\t *", "\t", "".join(self._parts))
        text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()
        return text + "\n" if text else ""


def _decoded(data: bytes) -> str:
    if (encoding := unicode_of(data)) is not None:
        return data.decode(encoding, "replace")
    said = _CHARSET.search(data[:4096])
    for encoding in (*([said[1].decode("ascii")] if said else ()), "utf-8"):
        try:
            # The declaration was read as ASCII, so an encoding that would not read it so is not the page's.
            if b"<\\n +AGE-".decode(encoding) == "<\\n +AGE-":
                return data.decode(encoding)
        except (LookupError, UnicodeError):
            continue
    return data.decode("cp1252", "replace")


def _read(archive: zipfile.ZipFile, name: str, left: list[int]) -> bytes:
    """Member ``name``, counted off the bytes that may still be unpacked, whatever its header says."""
    with archive.open(name) as member:
        data = member.read(left[0] + 1)
    left[0] -= len(data)
    if left[0] < 0:
        raise MarkupError(f"unpacks to more than {MOST >> 20} MiB of text, which no book has")
    return data


class _Builder(ElementTree.TreeBuilder):
    """Refuses document types as the parser meets them, in any encoding: these formats need none, and entities could
    grow without end. So it does elements beyond ``ELEMENTS``, each of which takes ten times its bytes and more."""

    def __init__(self) -> None:
        super().__init__()
        self._left = ELEMENTS

    def start(self, tag: str, attrs: dict[str, str]) -> ElementTree.Element:
        self._left -= 1
        if self._left < 0:
            raise MarkupError(f"has more than {ELEMENTS:,} elements in one part, which no book has")
        return super().start(tag, attrs)

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise MarkupError("declares entities or a document type, which its format does not have")


def _tree(data: bytes) -> ElementTree.Element:
    return ElementTree.fromstring(data, ElementTree.XMLParser(target=_Builder()))


def _main(archive: zipfile.ZipFile, left: list[int]) -> str:
    """The part that an Office file names as its document; "" for none."""
    for one in _tree(_read(archive, "_rels/.rels", left)).iterfind("{*}Relationship"):
        if one.get("Type", "").endswith("/officeDocument"):
            return posixpath.normpath(one.get("Target", "")).lstrip("/")
    return ""


def _word(data: bytes) -> str:
    """Paragraphs of a Word file's body by lines, cells of a table apart by tabs. What was deleted is left out."""
    body = _tree(data)
    out: list[str] = []
    stack = [(body, False)]
    while stack:  # a loop, since files nest as deeply as they like
        one, done = stack.pop()
        tag = one.tag.removeprefix(_WORD).rpartition("}")[2]
        if done:
            out.append("\t" if tag == "tc" else "\n")
        elif tag in ("t", "tab", "br", "cr", "noBreakHyphen"):
            out.append(one.text or "" if tag == "t" else {"tab": "\t", "noBreakHyphen": "-"}.get(tag, "\n"))
        elif tag not in ("del", "moveFrom", "instrText", "Fallback", "pPr", "tabs"):
            if tag in ("p", "tr", "tc"):
                stack.append((one, True))
            stack += [(child, False) for child in reversed(one)]
    text = re.sub(r"\n+\t", "\t", "".join(out))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip() + "\n"


def _book(archive: zipfile.ZipFile, left: list[int]) -> str:
    """Chapters of an EPUB book in reading order."""
    root = _tree(_read(archive, "META-INF/container.xml", left)).find(".//{*}rootfile")
    if root is None:
        raise ValueError("META-INF/container.xml names no package")
    package = root.attrib["full-path"]
    opened = _tree(_read(archive, package, left))
    folder = posixpath.dirname(package)
    items = {one.attrib["id"]: one.attrib for one in opened.iterfind(".//{*}manifest/{*}item") if "id" in one.attrib}
    chapters = []
    for one in opened.iterfind(".//{*}spine/{*}itemref"):
        item = items.get(one.attrib.get("idref", ""), {})
        if "nav" in item.get("properties", "").split() or "html" not in item.get("media-type", ""):
            continue
        chapters.append(posixpath.normpath(posixpath.join(folder, unquote(item["href"]))))
    if locked := _locked(archive, left) & set(chapters):
        raise MarkupError(f"is locked against copying ({len(locked)} of its {len(chapters)} chapters are encrypted)")
    texts = (html_text(_read(archive, chapter, left)).strip() for chapter in chapters)
    return "\n\n".join(text for text in texts if text) + "\n"


def _locked(archive: zipfile.ZipFile, left: list[int]) -> set[str]:
    if "META-INF/encryption.xml" not in archive.namelist():
        return set()
    found = _tree(_read(archive, "META-INF/encryption.xml", left)).iterfind(".//{*}CipherReference")
    return {unquote(one.attrib.get("URI", "")) for one in found}
