"""Documents as text: PDF, Word, EPUB, Excel, PowerPoint, OpenDocument and HTML files, known by their first bytes, and
text in UTF-8 or UTF-16. All but PDF is read by the standard library, in time that grows with the file."""

from saccade.documents.kinds import EXTRA, text_of

__all__ = ["EXTRA", "text_of"]
