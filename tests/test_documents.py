"""What documents are read, known by their first bytes, and how the rest of their reading is foretold."""

from __future__ import annotations

import contextlib
import io
import random
import subprocess
import sys
import zipfile

import pytest

from saccade.cli.rest import Read, RestTime, square_per_row
from saccade.documents import parts, text_of
from saccade.errors import RequestError


def zipped(**members: str | bytes) -> bytes:
    """An archive of files by name, with __ for / and _x for . in them."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name.replace("__", "/").replace("_x", "."), text)
    return data.getvalue()


def word(body: str) -> bytes:
    space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    return zipped(word__document_xxml=f'<w:document xmlns:w="{space}"><w:body>{body}</w:body></w:document>')


CONTAINER = '<container xmlns="urn:c"><rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></container>'
PACKAGE = """<package xmlns="urn:p"><manifest>
<item id="n" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>
<item id="b" href="text/two%20b.xhtml" media-type="application/xhtml+xml"/>
<item id="a" href="one.xhtml" media-type="application/xhtml+xml"/>
<item id="c" href="style.css" media-type="text/css"/>
</manifest>
<spine><itemref idref="n"/><itemref idref="a"/><itemref idref="b"/><itemref idref="gone"/></spine></package>"""


def book(**more: str | bytes) -> bytes:
    chapters = {
        "OPS__nav_xxhtml": "<html><body>Contents</body></html>",
        "OPS__one_xxhtml": "<?xml version='1.0'?><html><head><title>No</title></head><body><h1>One</h1><p>Caf&eacute;",
        "OPS__text__two b_xxhtml": "<html><body><p>Two</p></body></html>",
    }
    return zipped(**{"META-INF__container_xxml": CONTAINER, "OPS__book_xopf": PACKAGE, **chapters, **more})


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_unicode_text_is_read_however_it_is_written(encoding):
    text = "Ein Haus am Meer,\nfür zwei.\n" * 3
    assert text_of(text.replace("\n", "\r\n").encode(encoding), "a.txt") == text


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (zipped(notes_xtxt="hello"), "book.txt is a zip archive, and no document.* unzip book.txt"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1", "old Office file.*soffice"),
        (b"{\\rtf1 hello}", "RTF"),
        (b"\x1f\x8b\x08\x00", "gunzip book.txt"),
        ("für".encode("latin1"), "not UTF-8 text: byte 0xfc at offset 1; find out its encoding"),
    ],
    ids=["zip", "office", "rtf", "gzip", "latin1"],
)
def test_other_kinds_name_the_tool_that_makes_text_of_them(data, says):
    with pytest.raises(RequestError, match=says):
        text_of(data, "prompt file book.txt")


@pytest.mark.parametrize("name", ["book.epub", "book.PDF", "book.docx", "prompt file b.ods", "b.pptx"])
@pytest.mark.parametrize("data", [b"PK nonsense", b"<!doctype html><p>Log in", b"Not found", b"\x00\x01"])
def test_a_file_that_is_not_what_its_name_says_is_refused(name, data):
    """Half a download, or the page that a server sent in its place: neither is the book."""
    with pytest.raises(RequestError, match=r"is not an? .*: it begins with .*; fetch it again"):
        text_of(data, name)
    assert text_of(b"Not found", name.rpartition(".")[0] + ".txt") == "Not found"


PAGE = """<!DOCTYPE html>
<html><head><title>Not this</title><style>p { x }</style></head>
<body><nav><a href="/">Home</a></nav><script>if (a < b) { c() }</script>
<h1>The  harbour</h1><p>It opens
at <b>nine</b> &amp; closes at 5&nbsp;pm.<br>Für alle.</p>
<ul><li>boats<li><p>nets</p></ul><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>
<pre>if x:
    go()</pre></body></html>"""
SHOWN = """The harbour

It opens at nine & closes at 5\u00a0pm.
Für alle.

- boats
- nets

a\tb
1\t2

if x:
    go()
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin1", "cp1252"])
def test_a_page_is_what_a_reader_sees_of_it(encoding):
    page = PAGE if encoding != "latin1" else PAGE.replace("<head>", "<head><meta charset='iso-8859-1'>")
    assert text_of(page.encode(encoding), "a.html") == SHOWN


@pytest.mark.parametrize(
    "page", ["<html><body><script>x</script></body></html>", "<html><head>", "<!doctype html><html>"]
)
def test_a_page_without_text_is_refused(page):
    with pytest.raises(RequestError, match="is an HTML page without text"):
        text_of(page.encode(), "a.html")


def test_a_page_that_nothing_closes_is_read():
    assert text_of(b"<html><head><title>t<body><p>one<p>two <i>three", "a.html") == "one\n\ntwo three\n"


def test_a_word_file_is_read_as_it_stands():
    run = "<w:r><w:t xml:space='preserve'>{}</w:t></w:r>"
    cell = f"<w:tc><w:p>{run}</w:p></w:tc>"
    body = (
        f"<w:p><w:pPr><w:tabs><w:tab/></w:tabs></w:pPr>{run.format('One ')}{run.format('line')}</w:p><w:p/>"
        f"<w:p>{run.format('a')}<w:r><w:tab/><w:br/></w:r>{run.format('b')}<w:del>{run.format('gone')}</w:del></w:p>"
        f"<w:tbl><w:tr>{cell.format('x')}{cell.format('y')}</w:tr></w:tbl><w:p>{run.format('end &amp; all')}</w:p>"
    )
    assert text_of(word(body), "a.docx") == "One line\n\na\nb\nx\ty\nend & all\n"


def test_a_word_file_that_nests_deeply_is_read():
    deep = "<w:sdt>" * 5000 + "<w:p><w:r><w:t>far in</w:t></w:r></w:p>" + "</w:sdt>" * 5000
    assert text_of(word(deep), "a.docx") == "far in\n"


def test_a_book_is_read_in_its_order():
    assert text_of(book(), "a.epub") == "One\n\nCafé\n\nTwo\n"


LOCKED = '<encryption><CipherData><CipherReference URI="OPS/one.xhtml"/></CipherData></encryption>'
ENTITIES = '<!DOCTYPE w [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]><w>&b;</w>'


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (word("<w:p/>"), "a Word file without text"),
        (book(OPS__one_xxhtml="<html/>", **{"OPS__text__two b_xxhtml": ""}), "an EPUB book without text"),
        (word("<w:p>"), "damaged archive .ExpatError"),
        (zipped(word__document_xxml=ENTITIES), "declares an entity .a."),
        (zipped(word__document_xxml=b"<w>" + b" " * (65 << 20) + b"</w>"), "more than 64 MiB"),
        (book(**{"META-INF__encryption_xxml": LOCKED}), "locked against copying .1 of its 2"),
        (zipped(**{"META-INF__container_xxml": "<container/>"}), "damaged archive .ValueError: .* names no package"),
        (zipped(**{"META-INF__container_xxml": CONTAINER}), "damaged archive .KeyError"),
        (book()[:300], "damaged archive .BadZipFile"),
    ],
    ids=["empty", "blank", "broken", "entities", "bomb", "locked", "nameless", "missing", "cut"],
)
def test_archives_that_cannot_be_read_say_why(data, says):
    with pytest.raises(RequestError, match=f"^prompt file a.docx .*{says}"):
        text_of(data, "prompt file a.docx")


def test_more_elements_than_a_book_has_are_refused(monkeypatch):
    monkeypatch.setattr(parts, "ELEMENTS", 100)
    with pytest.raises(RequestError, match="more than 100 elements in one part"):
        text_of(word("<w:p/>" * 100), "a.docx")
    assert text_of(word("<w:p/>" * 90 + "<w:p><w:r><w:t>in</w:t></w:r></w:p>"), "a.docx") == "in\n"


def test_no_cut_or_changed_byte_of_an_archive_is_more_than_an_error():
    generator = random.Random(7)
    for whole in (book(), word("<w:p><w:r><w:t>hello</w:t></w:r></w:p>")):
        for _ in range(300):
            data = bytearray(whole)
            data[generator.randrange(4, len(data))] = generator.randrange(256)
            cut = data[: generator.choice((len(data), generator.randrange(4, len(data))))]
            with contextlib.suppress(RequestError):
                assert isinstance(text_of(bytes(cut), "a.docx"), str)


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
    assert text_of(b"\r\n" + data, "book.pdf") == "The harbour opens at nine.\n", (
        "some begin with a few bytes of others"
    )


def test_a_damaged_pdf_is_one_line_of_error():
    pytest.importorskip("pypdf")
    read = "from saccade.documents import text_of\ntry: text_of(b'%PDF-1.4 nonsense', 'b.pdf')"
    code = f"{read}\nexcept ValueError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


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


def _packed(xml: bytes, how: int = zipfile.ZIP_DEFLATED, name: str = "word/document.xml") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", how) as archive:
        archive.writestr(name, xml)
    return made.getvalue()


@pytest.mark.parametrize("how", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_bytes_that_were_changed_are_refused_in_a_line_or_read(how: int) -> None:
    good = _packed(b"<d><p><t>" + b"hello " * 500 + b"</t></p></d>", how)
    assert text_of(good, "x").startswith("hello")
    said = []
    for seed in range(300):
        draw, bad = random.Random(seed), bytearray(good)
        for _ in range(draw.randint(1, 4)):
            bad[draw.randrange(4, len(bad))] = draw.randrange(256)
        try:
            text_of(bytes(bad[: draw.randrange(5, len(bad)) if draw.random() < 0.3 else len(bad)]), "x")
        except RequestError as error:
            said.append(str(error))
    assert len(said) > 100
    assert not any("\n" in one for one in said)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_entities_are_refused_in_every_encoding(encoding: str) -> None:
    xml = f'<?xml version="1.0" encoding="{encoding}"?><!DOCTYPE d [<!ENTITY a "xxxx">]><d><p><t>&a;</t></p></d>'
    with pytest.raises(RequestError, match="declares an entity"):
        text_of(_packed(xml.encode(encoding)), "x")


def test_an_unknown_encoding_in_a_word_file_is_refused() -> None:
    with pytest.raises(RequestError, match="unknown encoding: foo"):
        text_of(_packed(b'<?xml version="1.0" encoding="foo"?><d/>'), "x")


@pytest.mark.parametrize("said", ["undefined", "utf-16", "unicode_escape", "utf-7", "hex", "punycode"])
def test_an_encoding_that_cannot_be_the_pages_is_not_believed(said: str) -> None:
    page = f'<html><meta charset="{said}"><body><p>caf\u00e9 \\n +AGE-</p></body></html>'
    assert text_of(page.encode(), "x") == "caf\u00e9 \\n +AGE-\n"


@pytest.mark.parametrize(
    "page",
    [
        "<!doctype html><title>t</title><p>caf\u00e9",
        "<body><p>caf\u00e9</p></body>",
        "<!-- saved from url=(0014)about:internet -->\n<html><body><p>caf\u00e9</p></body></html>",
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-16-be"])
def test_pages_are_known_without_all_their_tags_and_without_a_mark(page: str, encoding: str) -> None:
    assert text_of(page.encode(encoding), "x").endswith("caf\u00e9\n")
    assert "<" not in text_of(page.encode(encoding), "x")


def test_a_word_file_names_its_main_part() -> None:
    made = io.BytesIO(_packed(b"<d><p><t>hello</t></p></d>", name="word/document2.xml"))
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr("_rels/.rels", '<r><Relationship Type="x/officeDocument" Target="/word/document2.xml"/></r>')
    assert text_of(made.getvalue(), "x") == "hello\n"


def test_an_office_file_with_a_password_is_said_to_be_locked() -> None:
    with pytest.raises(RequestError, match="locked by a password"):
        text_of(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600) + "EncryptedPackage".encode("utf-16-le"), "x")


@pytest.mark.parametrize("times", [0.5, 1.5])
def test_the_rest_follows_a_machine_that_others_use(times):
    """From a quarter of the tokens on everything takes so much longer, or less: at two thirds the rest is foretold
    within a quarter."""
    rest, now = RestTime(1e-5), 0.0
    for start in range(0, 16384, 1024):
        for layer in range(24):
            read = Read(start, 1024, layer / 24, 16384)
            rest.see(read, now)
            if start == 10240 and layer == 12:
                left, then = rest.left(read, now), now
            now += (1 if start < 4096 else times) * (1024 + 1e-5 * ((start + 1024) ** 2 - start**2)) / 24
    assert left == pytest.approx(now - then, rel=0.25)


def test_the_rest_of_a_prompt_that_stands_still_is_told_by_what_it_has_taken():
    """A step that waits for a busy machine, as long as all before it: nothing has got on for half of the time."""
    rest = RestTime(1e-5)
    for now, share in ((0.0, 0.0), (1.0, 0.1), (1.5, 0.1), (2.5, 0.1), (40.0, 0.1)):
        read = Read(0, 5000, share, 5000)
        rest.see(read, now)
        left = rest.left(read, now)
        assert (left is None) == (now == 0.0)
        assert left is None or left == pytest.approx(9 * now)
