"""Patches to Horovod's source before the build, with reasons. Each text must occur exactly once.

The release is one file that does not change; its digest is part of this list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydrogen_magic.frameworks.horovod.build.errors import BuildError

VERSION = "0.28.1"
"""The last release, of June 2023."""
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


@dataclass(frozen=True)
class SourcePatch:
    """A replacement of one text in one file."""

    file: str
    """Path relative to the source's root."""
    old: str
    new: str
    reason: str
    until: str = ""
    """If more than ``old`` is replaced: the end of the replaced text, at its first occurrence after
    ``old``."""


_WRITE_DOWN = r"""foreach(_OPERATION IN ITEMS GLOO MPI NCCL)
    if(HAVE_${_OPERATION})
        string(TOLOWER "${_OPERATION}" _OPERATION)
        string(APPEND _OPERATIONS " ${_OPERATION}")
    endif()
endforeach()
string(STRIP "${_OPERATIONS}" _OPERATIONS)
file(APPEND "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/metadata.json"
     "\"operations\": \"${_OPERATIONS}\",\n\"hydrogen_magic\": \"$ENV{HYDROGEN_MAGIC_BUILD}\"\n}")"""

_WRITES = (
    "the timeline's writer occupies a core for the lifetime of the process and makes two system "
    "calls for each event; recording an event, while all ranks wait, copies its names twice, "
    "into 160 MB of memory that no cache holds; and events not written when Horovod is shut down "
    "are lost"
)
WRITER = (
    SourcePatch(
        "horovod/common/timeline.h",
        "  void DoWriteEvent(",
        """  bool MayAppend(std::unique_lock<std::recursive_mutex>& guard);
  void AppendMetadata(int pid, const std::string& named);
  void WriteOut();
  void WriterLoop();
""",
        _WRITES,
        until="  void WriteAtFileStart();\n",
    ),
    SourcePatch(
        "horovod/common/timeline.h",
        "  // Timeline record queue.\n",
        """  std::string text_;      // to be written next, by any thread
  std::string unwritten_; // the writer's own, while it does that
""",
        _WRITES,
        until="record_queue_;\n",
    ),
    SourcePatch(
        "horovod/common/timeline.cc",
        "    if (!record_queue_.empty()) {\n      LOG",
        "    if (!text_.empty()) {\n      LOG",
        _WRITES,
    ),
    SourcePatch(
        "horovod/common/timeline.cc",
        "void TimelineWriter::EnqueueWriteEvent(",
        Path(__file__).with_name("timeline_writer.cc").read_text("utf-8"),
        _WRITES,
        until="    std::this_thread::yield();\n  }\n}\n",
    ),
    SourcePatch(
        "horovod/common/timeline.cc",
        "  active_.exchange(0);\n  healthy_.exchange(0);\n  try {",
        """  {
    std::lock_guard<std::recursive_mutex> guard(writer_mutex_);
    active_.exchange(0);
    healthy_.exchange(0);
  }
  try {""",
        "a timeline started while Horovod is shut down blocks its writer, and so the shutdown",
    ),
    SourcePatch(
        "horovod/common/timeline.cc",
        "  std::stringstream args;\n",
        """  std::string args;
  if (output_tensor != nullptr) {
    args = "\\"dtype\\": \\"" + DataType_Name(output_tensor->dtype()) + "\\", \\"shape\\": \\"[";
    const auto shape = output_tensor->shape();
    for (int i = 0; i < shape.dims(); ++i) {
      args += (i == 0 ? "" : ", ") + std::to_string(shape.dim_size(i));
    }
    args += "]\\"";
  }
  WriteEvent(tensor_name, 'E', "", args);
""",
        "two streams are created for each reduced tensor, while all ranks wait",
        until="args.str());\n",
    ),
)
"""Patches of the timeline's writer, which reduce its cost."""

_ALWAYS = (
    *WRITER,
    SourcePatch(
        "horovod/torch/mpi_ops_v2.cc",
        "std::this_thread::yield();",
        "std::this_thread::sleep_for(std::chrono::microseconds(50));",
        "a rank that waits for the others occupies a core and takes the GIL repeatedly from "
        "working threads",
    ),
    SourcePatch(
        "horovod/common/gloo/gloo_context.cc",
        "device_attr.iface = gloo_iface_;\n"
        "  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n"
        "\n"
        "  global_ctx",
        "device_attr.iface = global_context.gloo_iface_;\n"
        "  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n"
        "\n"
        "  global_ctx",
        "process sets, including that of all ranks, listen at the address of the host's name "
        "instead of the given interface, and abort the process if the name cannot be resolved",
    ),
    SourcePatch(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
        "Python has no distutils from 3.12 on, and `import horovod` imports this",
    ),
    SourcePatch(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
        "Python has no distutils from 3.12 on",
    ),
    SourcePatch(
        "third_party/gloo/CMakeLists.txt",
        "cmake_minimum_required(VERSION 2.8.12 FATAL_ERROR)",
        "cmake_minimum_required(VERSION 3.13 FATAL_ERROR)",
        "CMake 4 rejects projects that require a version below 3.5; Horovod itself requires 3.13",
    ),
    SourcePatch(
        "CMakeLists.txt",
        'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
        'string(REPLACE "-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
        "debug information takes a third of the compiler's time and memory, and nine tenths of "
        "the wheel",
    ),
    SourcePatch(
        "CMakeLists.txt",
        '-pthread -fPIC -Wall -ftree-vectorize")',
        '-pthread -fPIC -w -ftree-vectorize -Wno-template-body -include cstdint -include string")',
        "since GCC 13 other headers no longer include <cstdint>, which Gloo relies on, and since "
        "GCC 16 <string>; from GCC 15 on FlatBuffers has an error in a template that is not used; "
        "and warnings about unmaintained code would hide the errors",
    ),
    SourcePatch(
        "CMakeLists.txt",
        r'file(APPEND "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/metadata.json" "\"dummy\": \"none\"\n}")',
        _WRITE_DOWN,
        "record the build options, to be read without loading the library",
    ),
)


def for_standard(standard: int) -> tuple[SourcePatch, ...]:
    """Return the patches for a torch whose headers need this C++ ``standard`` (14, 17, 20 …)."""
    reason = f"headers of this torch need C++{standard}"
    old, new = "set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {standard})"
    if old == new:
        return _ALWAYS
    files = ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
    return (*(SourcePatch(file, old, new, reason) for file in files), *_ALWAYS)


def apply(changes: Sequence[SourcePatch], root: Path) -> None:
    """Patch the source below ``root``; BuildError if a text does not occur exactly once."""
    for change in changes:
        path = root / change.file
        text = path.read_text() if path.is_file() else ""
        n_found = text.count(change.old)
        before, _, after = text.partition(change.old)
        if change.until:
            n_found *= change.until in after
            after = after.partition(change.until)[2]
        if n_found != 1:
            what = f"{change.old!r} … {change.until!r}" if change.until else repr(change.old)
            raise BuildError(
                f"{change.file} in Horovod's source contains {what} {n_found} times instead of "
                f"once, so it cannot be patched ({change.reason}). The source is not that of "
                f"Horovod {VERSION}."
            )
        path.write_text(f"{before}{change.new}{after}")


def digest(changes: Sequence[SourcePatch]) -> str:
    """Return a digest that depends on the source to be built."""
    parts = [SDIST_SHA256, *(part for c in changes for part in (c.file, c.old, c.new, c.until))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
