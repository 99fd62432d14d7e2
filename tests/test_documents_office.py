"""Word's footnotes, Excel, PowerPoint and OpenDocument files, EPUB's document types, and what would grow without
end."""

from __future__ import annotations

import pytest
from test_documents import book, word, zipped

from saccade.documents import parts, text_of
from saccade.errors import RequestError

OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"


def related(*targets: tuple[str, str]) -> str:
    """A part's list of others, r1 to the first of them."""
    lines = (
        f'<Relationship Id="r{number}" Type="{OFFICE}/{kind}" Target="{target}"/>'
        for number, (kind, target) in enumerate(targets, 1)
    )
    return f'<Relationships xmlns="{PACKAGE}">{"".join(lines)}</Relationships>'


def sheet(rows: str, book: str = "", styles: str = "", strings: str = "<si><t>boat</t></si>") -> bytes:
    space = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    listed = related(("worksheet", "worksheets/a.xml"), ("sharedStrings", "/xl/shared.xml"), ("styles", "styles.xml"))
    return zipped(
        _rels___xrels=related(("officeDocument", "xl/workbook.xml")),
        xl__workbook_xxml=f'<workbook xmlns="{space}" xmlns:r="{OFFICE}">{book}'
        '<sheets><sheet name="Costs" sheetId="7" r:id="r1"/></sheets></workbook>',
        xl___rels__workbook_xxml_xrels=listed,
        xl__worksheets__a_xxml=f'<worksheet xmlns="{space}"><sheetData>{rows}</sheetData></worksheet>',
        xl__shared_xxml=f'<sst xmlns="{space}">{strings}</sst>',
        xl__styles_xxml=f'<styleSheet xmlns="{space}">{styles}</styleSheet>',
    )


STYLES = """<numFmts><numFmt numFmtId="164" formatCode="&quot;day &quot;0.0"/>
<numFmt numFmtId="165" formatCode="hh:mm"/>
</numFmts><cellXfs><xf numFmtId="0"/><xf numFmtId="14"/><xf numFmtId="164"/><xf numFmtId="165"/></cellXfs>"""
ROWS = """<row><c r="A1" t="s"><v>0</v></c><c r="B1"><v>12.5</v></c><c r="C1" s="1"><v>46354</v></c></row>
<row><c t="inlineStr"><is><r><t>in</t></r><r><t>line</t></r></is></c><c t="b"><v>1</v></c><c s="2"><v>3</v></c></row>
<row><c r="D3" t="str"><f>A1</f><v>far</v></c></row><row/>
<row><c r="A5" s="3"><v>0.5</v></c><c r="B5" s="1"><v>46354.25</v></c><c r="C5" t="s"><v>99</v></c></row>"""


def test_sheets_are_read_by_rows():
    shown = "Costs\n\nboat\t12.5\t2026-11-28\ninline\tTRUE\t3\n\t\t\tfar\n12:00:00\t2026-11-28 06:00:00\n"
    assert text_of(sheet(ROWS, styles=STYLES), "a.xlsx") == shown
    since_1904 = sheet('<row><c s="1"><v>44892</v></c></row>', '<workbookPr date1904="1"/>', STYLES)
    assert text_of(since_1904, "a.xlsx") == "Costs\n\n2026-11-28\n"


def test_a_row_far_to_the_right_is_no_row_of_tabs():
    text = text_of(sheet('<row><c r="A1"><v>1</v></c><c r="XFD1"><v>2</v></c></row>'), "a.xlsx")
    assert text == "Costs\n\n1" + "\t" * 32 + "2\n"


def test_a_string_that_stands_in_many_cells_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(parts, "MOST", 1 << 20)
    rows = "<row>" + '<c t="s"><v>0</v></c>' * 2000 + "</row>"
    with pytest.raises(RequestError, match="more than 1 MiB of text"):
        text_of(sheet(rows, strings=f"<si><t>{'a' * 1000}</t></si>"), "a.xlsx")


def test_office_in_binary_says_so():
    data = zipped(_rels___xrels=related(("officeDocument", "xl/workbook.bin")), xl__workbook_xbin=b"\x01")
    with pytest.raises(RequestError, match="an Excel file in Office's binary form; save it as XLSX"):
        text_of(data, "a.xlsb")


def slide(*paragraphs: str, kind: str = "body", more: str = "") -> str:
    inside = "".join(f"<a:p><a:r><a:t>{one}</a:t></a:r></a:p>" for one in paragraphs)
    return (
        '<p:sld xmlns:p="urn:p" xmlns:a="urn:a"><p:sp><p:nvSpPr><p:nvPr>'
        f'<p:ph type="{kind}"/></p:nvPr></p:nvSpPr><p:txBody>{inside}</p:txBody></p:sp>{more}</p:sld>'
    )


def test_slides_are_read_in_their_order_with_what_the_speaker_noted():
    number = (
        '<p:sp><p:nvSpPr><p:nvPr><p:ph type="sldNum"/></p:nvPr></p:nvSpPr><a:p><a:r><a:t>9</a:t></a:r></a:p></p:sp>'
    )
    cells = "<a:tbl><a:tr>" + "".join(
        f"<a:tc><a:txBody><a:p><a:r><a:t>{one}</a:t></a:r></a:p></a:txBody></a:tc>" for one in "xy"
    )
    data = zipped(
        _rels___xrels=related(("officeDocument", "/ppt/presentation.xml")),
        ppt__presentation_xxml=f'<p:presentation xmlns:p="urn:p" xmlns:r="{OFFICE}"><p:sldIdLst>'
        '<p:sldId id="256" r:id="r2"/><p:sldId id="257" r:id="r1"/></p:sldIdLst></p:presentation>',
        ppt___rels__presentation_xxml_xrels=related(("slide", "slides/a.xml"), ("slide", "slides/b.xml")),
        ppt__slides__a_xxml=slide("last", more=f"{cells}</a:tr></a:tbl>"),
        ppt__slides__b_xxml=slide("first", "and more"),
        ppt__slides___rels__b_xxml_xrels=related(("notesSlide", "../notesSlides/n.xml")),
        ppt__notesSlides__n_xxml=slide("say this", more=number),
    )
    assert text_of(data, "a.pptx") == "Slide 1\n\nfirst\nand more\n\nNotes: say this\n\nSlide 2\n\nlast\nx\ty\n"


def open_document(body: str, kind: str = "text", **more: str) -> bytes:
    names = ["office", "style", "text", "table", "draw", "presentation"]
    spaces = " ".join(f'xmlns:{one}="urn:oasis:names:tc:opendocument:xmlns:{one}:1.0"' for one in names)
    content = f"<office:document-content {spaces}><office:body>{body}</office:body></office:document-content>"
    return zipped(mimetype=f"application/vnd.oasis.opendocument.{kind}", content_xxml=content, **more)


def test_open_documents_are_read():
    note = (
        '<text:note text:id="n"><text:note-citation>1</text:note-citation><text:note-body><text:p>the\n note</text:p>'
        "</text:note-body></text:note>"
    )
    body = (
        "<office:text>\n<text:tracked-changes><text:p>gone</text:p></text:tracked-changes><text:h>Head</text:h>\n"
        f'<text:p>some <text:span>bold <text:date>today</text:date></text:span>\n words{note} end<text:s text:c="2"/>x'
        "<text:line-break/>y<text:tab/>z</text:p><table:table><table:table-row><table:table-cell><text:p>a</text:p>"
        "<text:p>b</text:p></table:table-cell><table:table-cell><text:p>c</text:p></table:table-cell></table:table-row>"
        "</table:table><text:p>last</text:p></office:text>"
    )
    shown = "Head\nsome bold today words[1] end  x\ny\tz\na\nb\tc\nlast\n\n[1] the note\n"
    assert text_of(open_document(body), "a.odt") == shown


def test_cells_of_open_documents_that_repeat():
    cell = '<table:table-cell office:value-type="string" table:number-columns-repeated="{}"><text:p>{}</text:p>'
    row = "<table:table-row>{}</table:table-row>"
    end = "</table:table-cell>"
    body = '<office:spreadsheet><table:table table:name="One">' + row.format(
        cell.format(2, "a") + end + cell.format(1, "b") + end + '<table:table-cell table:number-columns-repeated="9"/>'
    )
    body += '<table:table-row table:number-rows-repeated="1000000"><table:table-cell/></table:table-row>'
    assert text_of(open_document(f"{body}</table:table></office:spreadsheet>"), "a.ods") == "One\n\na\ta\tb\n"
    nested = "".join(cell.format(100, "x") for _ in range(12)) + end * 12
    text = text_of(open_document(f"<office:text>{nested}</office:text>"), "a.odt")
    assert 12 <= text.count("x") < 20_000


def test_a_locked_open_document_says_so():
    locked = "<m:manifest xmlns:m='urn:m'><m:file-entry><m:encryption-data/></m:file-entry></m:manifest>"
    with pytest.raises(RequestError, match="is locked by a password"):
        text_of(open_document("<office:text/>", **{"META-INF__manifest_xxml": locked}), "a.odt")


def test_footnotes_of_word_go_to_the_end():
    space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    reference = "<w:r><w:{0}noteReference w:id='{1}'/></w:r>"
    body = (
        f"<w:p><w:r><w:t>one</w:t></w:r>{reference.format('foot', 3)}<w:r><w:t> two</w:t></w:r>"
        f"{reference.format('end', 1)}{reference.format('foot', 3)}{reference.format('foot', 8)}</w:p>"
    )
    made = "<w:{0}notes xmlns:w='" + space + "'><w:{0}note w:type='separator' w:id='-1'/>{1}</w:{0}notes>"
    note = "<w:{0}note w:id='{1}'><w:p><w:r><w:t>{2}</w:t></w:r></w:p><w:p><w:r><w:t>more</w:t></w:r></w:p></w:{0}note>"
    whole = f"<w:document xmlns:w='{space}'><w:body>{body}</w:body></w:document>"
    data = zipped(
        word__document_xxml=whole,
        word___rels__document_xxml_xrels=related(("footnotes", "foot.xml"), ("endnotes", "end.xml")),
        word__foot_xxml=made.format("foot", note.format("foot", 3, "at the foot")),
        word__end_xxml=made.format("end", note.format("end", 1, "at the end")),
    )
    assert text_of(data, "a.docx") == "one[1] two[2][1][3]\n\n[1] at the foot more\n[2] at the end more\n"
    assert text_of(word(body), "a.docx") == "one[1] two[2][1][3]\n"  # its notes are gone


DOCTYPE = '<!DOCTYPE package PUBLIC "+//ISBN 0-9673008-1-9//DTD OEB 1.2 Package//EN" "http://o.org/oebpkg12.dtd" {}>'


@pytest.mark.parametrize("inside", ["", "[<!ELEMENT a (b)>]"])
def test_a_book_may_have_a_document_type(inside):
    from test_documents import PACKAGE as BOOK

    data = book(OPS__book_xopf=DOCTYPE.format(inside) + BOOK.replace("<manifest>", "&nbsp;<manifest>"))
    assert text_of(data, "a.epub") == "One\n\nCafé\n\nTwo\n"


@pytest.mark.parametrize("inside", ['<!ENTITY a "aa">', '<!ENTITY % a SYSTEM "file:///etc/passwd"> %a;'])
def test_a_book_may_not_declare_entities(inside):
    from test_documents import PACKAGE as BOOK

    with pytest.raises(RequestError, match=r"declares an entity \(a\)"):
        text_of(book(OPS__book_xopf=DOCTYPE.format(f"[{inside}]") + BOOK), "a.epub")


def test_footnotes_of_a_book_stay_where_they_are_and_their_marks_are_marks():
    page = (
        '<html><body><p>word<a epub:type="noteref" href="#n"><sup>1</sup></a>, word<a role="doc-noteref">[2]</a>.</p>'
        '<aside epub:type="footnote" id="n"><p>1. the note</p></aside></body></html>'
    )
    text = text_of(book(OPS__one_xxhtml=page), "a.epub")
    assert text == "word[1], word[2].\n\n1. the note\n\nTwo\n"


def test_a_chapter_that_a_book_names_again_and_again_is_read_once():
    from test_documents import PACKAGE as BOOK

    many = BOOK.replace('<itemref idref="a"/>', '<itemref idref="a"/>' * 50_000)
    assert text_of(book(OPS__book_xopf=many), "a.epub") == "One\n\nCafé\n\nTwo\n"
