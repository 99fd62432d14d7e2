"""Zip archives that are documents: which kind they are, and their text."""

from __future__ import annotations

import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable
from xml.parsers import expat

from saccade.documents.books import book_text
from saccade.documents.opendocument import opendocument_text
from saccade.documents.parts import MarkupError, Parts
from saccade.documents.sheets import sheets_text
from saccade.documents.slides import slides_text
from saccade.documents.word import word_text

# What unpackers raise behind a good directory is their own: zlib's, lzma's, and OSError of bz2. LookupError is that of
# a member or an attribute that is missing, and of an encoding that XML names.
_DAMAGED = (
    zipfile.BadZipFile,
    expat.ExpatError,
    AssertionError,
    LookupError,
    EOFError,
    ValueError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    struct.error,
)
_OFFICE: dict[str, tuple[str, Callable[[Parts, str], str]]] = {  # by the folder of an Office file's main part
    "word": ("a Word file", word_text),
    "xl": ("an Excel file", sheets_text),
    "ppt": ("a PowerPoint file", slides_text),
}
_USUAL = ("word/document.xml", "xl/workbook.xml", "ppt/presentation.xml")


def archive_text(data: bytes) -> str | None:
    """The text of a zip archive that is a Word, Excel, PowerPoint or OpenDocument file or an EPUB book; None if it is
    none. MarkupError where it is one and damaged, locked, larger than ``parts.MOST`` or ``parts.ELEMENTS``, or without
    text."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            parts = Parts(archive)
            found = _read(parts)
    except (NotImplementedError, RuntimeError) as error:  # a way of packing that is unknown; zipfile's for passwords
        raise MarkupError(f"cannot be unpacked ({error})") from error
    except _DAMAGED as error:
        raise MarkupError(f"is a damaged archive ({type(error).__name__}: {error})") from error
    if found is None:
        return None
    kind, text = found
    if not text.strip():
        raise MarkupError(f"is {kind} without text, of pictures perhaps")
    return text


def _read(parts: Parts) -> tuple[str, str] | None:
    """What kind it is, and its text."""
    mains = [part for kind, part in parts.related("").values() if kind == "officeDocument"]
    for main in (*mains, *_USUAL):
        kind, read = _OFFICE.get(main.partition("/")[0], ("", None))
        if main in parts.names and read is not None:
            if not main.endswith(".xml"):  # xl/workbook.bin
                raise MarkupError(f"is {kind} in Office's binary form; save it as XLSX, then give it again")
            return kind, read(parts, main)
    if "META-INF/container.xml" in parts.names:
        return "an EPUB book", book_text(parts)
    if "mimetype" in parts.names and "content.xml" in parts.names:
        said = parts.read("mimetype").strip()
        if said.startswith(b"application/vnd.oasis.opendocument."):
            return "an OpenDocument file", opendocument_text(parts)
    return None
