"""What documents are read, known by their first bytes, and how the rest of their reading is foretold."""

from __future__ import annotations

import io
import sys
import zipfile

import pytest

from saccade.cli.documents import text_of
from saccade.cli.rest import Read, RestTime, square_per_row
from saccade.errors import RequestError


def zipped() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("word/document.xml", "<w:document/>")
    return data.getvalue()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_unicode_text_is_read_however_it_is_written(encoding):
    text = "Ein Haus am Meer,\nfür zwei.\n" * 3
    assert text_of(text.replace("\n", "\r\n").encode(encoding), "a.txt") == text


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (zipped(), "book.txt is a zip archive, .* pandoc book.txt -t plain"),
        (b"\n<!DOCTYPE html>\n<html><body>hello</body></html>", "an HTML page.*pandoc"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1", "old Office file.*soffice"),
        (b"{\\rtf1 hello}", "RTF"),
        (b"\x1f\x8b\x08\x00", "gunzip book.txt"),
        ("für".encode("latin1"), "not UTF-8 text: byte 0xfc at offset 1; find out its encoding"),
    ],
    ids=["zip", "html", "office", "rtf", "gzip", "latin1"],
)
def test_other_kinds_name_the_tool_that_makes_text_of_them(data, says):
    with pytest.raises(RequestError, match=says):
        text_of(data, "prompt file book.txt")


def test_text_about_html_is_text():
    text = "<?xml is how a page may begin; this is none of them.\n"
    assert text_of(text.encode(), "a.txt") == text


def test_a_pdf_is_read_by_pypdf_or_the_way_to_it_is_said(monkeypatch):
    page = b"BT /F1 24 Tf 72 700 Td (The harbour opens at nine.) Tj ET"
    parts = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(page), page),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    data, places = b"%PDF-1.4\n", []
    for number, part in enumerate(parts, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, part)
    table = len(data)
    data += b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % place for place in places)
    data += b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % table
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pypdf", None)
        with pytest.raises(RequestError, match=r"pip install 'saccade-llm\[documents\]', or .* pdftotext"):
            text_of(data, "book.pdf")
    pytest.importorskip("pypdf")
    assert text_of(data, "book.pdf") == "The harbour opens at nine.\n"
    with pytest.raises(RequestError, match="a PDF that cannot be read"):
        text_of(data[:40], "book.pdf")


@pytest.mark.parametrize("square", [0.0, 1e-5, 1e-4])  # of a and b n^2: from none to three times a at 32K
@pytest.mark.parametrize("chunk", [1024, 4096])
def test_the_rest_is_foretold_within_three_tenths_from_a_tenth_on(square, chunk):
    """Attention that takes what the shape says, or 0.4 to 2.5 of it, each a second in steps of layers."""
    total, layers = 32768, 24
    for truth in (1.0,) if square == 0 else (0.4, 1.0, 2.5):
        rest, now, worst = RestTime(square), 0.0, 0.0
        whole = total + truth * square * total**2
        for start in range(0, total, chunk):
            cost = chunk + truth * square * ((start + chunk) ** 2 - start**2)
            for layer in range(layers):
                read = Read(start, chunk, layer / layers, total)
                rest.see(read, now)
                left = rest.left(read, now)
                if 0.1 * whole < now < 0.9 * whole:
                    assert left is not None
                    worst = max(worst, abs(left / (whole - now) - 1))
                now += cost / layers
        assert worst < (0.02 if truth == 1 else 0.3)


def test_a_models_shape_says_how_much_attention_grows():
    class Llama:  # of 8 billion parameters
        hidden_size, intermediate_size = 4096, 14336

    square = square_per_row(Llama(), heads=32, head_dim=128, kv_heads=8, layers=32)
    products = 2 * (7.5e9 - 0.5e9)  # FLOP a token, without embedding and head
    attention = 4 * 32 * 32 * 128  # FLOP a key: two products of every head of every layer
    assert square == pytest.approx(attention / 2 / products, rel=0.05)
