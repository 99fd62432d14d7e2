"""What kind of file a document is, known by its first bytes, and its text where that can be read."""

from __future__ import annotations

import re
from pathlib import Path

from saccade.documents.archives import archive_text
from saccade.documents.encodings import unicode_of
from saccade.documents.pages import html_text
from saccade.documents.parts import MarkupError
from saccade.errors import RequestError, shown

EXTRA = "pip install 'saccade-llm[documents]'"
_OTHERS = (  # first bytes, what it is, and what makes text of it
    (b"PK\x03\x04", "a zip archive, and no document", "unzip FILE, then give one of its files"),
    (b"\xd0\xcf\x11\xe0", "an old Office file", "soffice --headless --convert-to txt FILE"),
    (b"{\\rtf", "an RTF file", "pandoc FILE -t plain -o book.txt"),
    (b"\x1f\x8b", "compressed by gzip", "gunzip FILE"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "zstd -d FILE"),
    (b"\x89PNG", "a picture", "tesseract FILE book"),
    (b"\xff\xd8\xff", "a picture", "tesseract FILE book"),
)
_LOCKED = "EncryptedPackage".encode("utf-16-le")  # in the directory of an Office file with a password
_NAMED = {  # endings of names of which no text is meant to be read as it stands
    ".pdf": "a PDF",
    ".epub": "an EPUB book",
    **dict.fromkeys((".docx", ".xlsx", ".pptx"), "an Office file"),
    **dict.fromkeys((".odt", ".ods", ".odp"), "an OpenDocument file"),
}
_HTML = (b"<!doctype html", b"<html", b"<head", b"<body")


def text_of(data: bytes, name: str) -> str:
    """The text of a file's bytes: UTF-8, UTF-16 (with its mark, or letters of every other byte), or what is written in
    a PDF, an Office file (DOCX, XLSX, PPTX), an OpenDocument file (ODT, ODS, ODP), an EPUB book or an HTML page.
    RequestError, with the tool that makes text of it, for other kinds and for what is damaged, locked, without
    text, or not what its name says: half a download, or a page that a server sent in its place."""
    ending = Path(name).suffix.lower()
    if data.startswith(b"%PDF-") or (ending == ".pdf" and b"%PDF-" in data[:1024]):
        return _pdf(data, name)
    if ending in _NAMED and data and not data.startswith((b"PK\x03\x04", *(first for first, _, _ in _OTHERS))):
        raise RequestError(
            f"{name} is not {_NAMED[ending]}: it begins with {shown(data[:12])}; fetch it again, or give it a name "
            "that ends in .txt or .html if that is what it holds"
        )
    if _is_html(data):
        text = html_text(data)
        if not text:
            raise RequestError(
                f"{name} is an HTML page without text; save it from the browser as text, once it is shown"
            )
        return text
    if data.startswith(b"PK\x03\x04"):
        try:
            written = archive_text(data)
        except MarkupError as error:
            raise RequestError(f"{name} {error}; pandoc or LibreOffice may make text of it") from error
        if written is not None:
            return written
    if data.startswith(b"\xd0\xcf\x11\xe0") and _LOCKED in data:
        raise RequestError(f"{name} is an Office file locked by a password; save it without one, then give it again")
    for first, kind, tool in _OTHERS:
        if data.startswith(first):
            raise _unread(name, kind, tool)
    encoding = unicode_of(data) or "utf-8"
    try:
        return data.decode(encoding).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not {encoding.removesuffix('-sig').upper()} text: byte 0x{data[error.start]:02x} at offset "
            f"{error.start}; find out its encoding (file -i FILE guesses), then iconv -f ENCODING -t utf-8 FILE"
        ) from error


def _is_html(data: bytes) -> bool:
    start = data[:4096].decode(unicode_of(data) or "latin-1", "replace").lower().encode()
    start = re.sub(rb"^(\s*<!--.*?-->)+", b"", start, flags=re.DOTALL).lstrip()  # "saved from", of browsers
    return start.startswith(_HTML) or (start.startswith(b"<?xml") and b"<html" in start)


def _pdf(data: bytes, name: str) -> str:
    try:
        import pypdf
    except ImportError:
        raise RequestError(
            f"{name} is a PDF; to have it read: {EXTRA}, or make text of it: pdftotext FILE book.txt"
        ) from None
    import io
    import logging

    logging.getLogger("pypdf").addHandler(logging.NullHandler())  # it would write to stderr what the error says
    try:
        pages = [page.extract_text() for page in pypdf.PdfReader(io.BytesIO(data)).pages]
    except Exception as error:  # pypdf raises many kinds for what is damaged, and for passwords
        raise RequestError(
            f"{name} is a PDF that cannot be read ({type(error).__name__}: {shown(str(error))}); "
            "pdftotext FILE book.txt may do so"
        ) from error
    text = "\n\n".join(page.strip() for page in pages).strip()
    if not text:
        raise RequestError(
            f"{name} is a PDF of {len(pages)} pages without text, scanned perhaps; ocrmypdf FILE read.pdf puts "
            "text into it"
        )
    return text + "\n"


def _unread(name: str, kind: str, tool: str) -> RequestError:
    file = Path(name.removeprefix("prompt file ")).name or "FILE"
    return RequestError(f"{name} is {kind}, and text is read alone; make text of it: {tool.replace('FILE', file)}")
