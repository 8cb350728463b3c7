"""What is changed in Horovod's source before it is built, and why. Each text must be there once.

The release is one file that does not change any more; its digest is part of this list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydrogen_magic.horovod.faults import BuildError

__all__ = ["Change", "VERSION", "WRITER", "SDIST_SHA256", "apply", "digest", "for_standard"]

VERSION = "0.28.1"
"""The last release, of June 2023."""
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


@dataclass(frozen=True)
class Change:
    """One text of one file replaced by another."""

    file: str
    """Path below the source's root."""
    old: str
    new: str
    reason: str


_WRITE_DOWN = r"""foreach(_OPERATION IN ITEMS GLOO MPI NCCL)
    if(HAVE_${_OPERATION})
        string(TOLOWER "${_OPERATION}" _OPERATION)
        string(APPEND _OPERATIONS " ${_OPERATION}")
    endif()
endforeach()
string(STRIP "${_OPERATIONS}" _OPERATIONS)
file(APPEND "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/metadata.json"
     "\"operations\": \"${_OPERATIONS}\",\n\"hydrogen_magic\": \"$ENV{HYDROGEN_MAGIC_BUILD}\"\n}")"""

_SPINS = (
    "the timeline's writer takes a whole core for as long as the process lives; and what it has not "
    "written yet when Horovod is shut down is lost, which would be more now"
)
_BY_EVENT = (
    "every event is written by itself, with a bracket that the next one is written over: two calls of the "
    "system for each, and the last one is kept back until the next one comes"
)
_NEXT_EVENT = r"""  } else {
    // last event closed the json ']' , need to seek to one position back and
    // write ',' to continue
    long pos = file_.tellp();
    file_.seekp(pos - 1);
    file_ << ",";
  }
"""
_NEXT_IN_BATCH = r"""  } else {
    if (is_closed_) {
      // the last batch closed the json with ']': write over that
      long pos = file_.tellp();
      file_.seekp(pos - 1);
    }
    file_ << ",";
  }
  is_closed_ = false;
"""
WRITER = (
    Change(
        "horovod/common/timeline.cc",
        "void TimelineWriter::WriterLoop() {\n  while (healthy()) {\n    while (healthy() && !record",
        """void TimelineWriter::WriterLoop() {
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    while (!record""",
        _SPINS,
    ),
    Change(
        "horovod/common/timeline.cc",
        """    // Allow scheduler to schedule other work for this core.
    std::this_thread::yield();
  }
""",
        "  } while (healthy());\n",
        _SPINS,
    ),
    Change(
        "horovod/common/timeline.h",
        "  bool is_new_file_ = false;\n",
        "  bool is_new_file_ = false;\n  bool is_closed_ = true; // the json in the file, with ']'\n",
        _BY_EVENT,
    ),
    Change(
        "horovod/common/timeline.cc",
        f"{_NEXT_EVENT}  auto& tensor_idx",
        f"{_NEXT_IN_BATCH}  auto& tensor_idx",
        _BY_EVENT,
    ),
    Change(
        "horovod/common/timeline.cc",
        f'{_NEXT_EVENT}  file_ << "{{";',
        f'{_NEXT_IN_BATCH}  file_ << "{{";',
        _BY_EVENT,
    ),
    Change(
        "horovod/common/timeline.cc",
        """    file_ << ", \\"args\\": {" << r.args << "}";
  }
  // We make sure that the events are written always produce valid json file
  file_ << "}]";
""",
        """    file_ << ", \\"args\\": {" << r.args << "}";
  }
  file_ << "}";
""",
        _BY_EVENT,
    ),
    Change(
        "horovod/common/timeline.cc",
        """  file_ << ", \\"s\\": \\"g\\"";
  // We make sure that the events are written always produce valid json file
  file_ << "}]";
""",
        """  file_ << ", \\"s\\": \\"g\\"}";
""",
        _BY_EVENT,
    ),
    Change(
        "horovod/common/timeline.cc",
        """      record_queue_.pop();
    }
""",
        """      record_queue_.pop();
    }
    if (!is_closed_) {
      // We make sure that a batch of events always leaves a valid json file
      file_ << "]";
      file_.flush();
      is_closed_ = true;
    }
""",
        _BY_EVENT,
    ),
)
"""How the timeline is written: what it costs while it is."""

_ALWAYS = (
    *WRITER,
    Change(
        "horovod/torch/mpi_ops_v2.cc",
        "std::this_thread::yield();",
        "std::this_thread::sleep_for(std::chrono::microseconds(50));",
        "a rank that waits for the others takes a core, and the GIL over and over, from whoever has work",
    ),
    Change(
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
        "process sets, that of all ranks included, listen where the host's name leads instead of at the "
        "interface that was given, and end the process where it leads nowhere",
    ),
    Change(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
        "Python has no distutils from 3.12 on, and `import horovod` imports this",
    ),
    Change(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
        "Python has no distutils from 3.12 on",
    ),
    Change(
        "third_party/gloo/CMakeLists.txt",
        "cmake_minimum_required(VERSION 2.8.12 FATAL_ERROR)",
        "cmake_minimum_required(VERSION 3.13 FATAL_ERROR)",
        "CMake 4 refuses what asks for less than 3.5; Horovod itself asks for 3.13",
    ),
    Change(
        "CMakeLists.txt",
        'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
        'string(REPLACE "-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
        "what debuggers need is a third of the compiler's time and memory, and nine tenths of the wheel",
    ),
    Change(
        "CMakeLists.txt",
        '-pthread -fPIC -Wall -ftree-vectorize")',
        '-pthread -fPIC -w -ftree-vectorize -include cstdint")',
        "from GCC 13 on other headers no longer bring <cstdint>, which Gloo takes for granted; and "
        "warnings about code that nobody mends would bury the errors",
    ),
    Change(
        "CMakeLists.txt",
        r'file(APPEND "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/metadata.json" "\"dummy\": \"none\"\n}")',
        _WRITE_DOWN,
        "what it was built with, to be read without loading it",
    ),
)


def for_standard(standard: int) -> tuple[Change, ...]:
    """Return the changes for a torch whose headers are C++ of this ``standard`` (14, 17, 20 …)."""
    reason = f"headers of this torch are C++{standard}"
    old, new = "set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {standard})"
    if old == new:
        return _ALWAYS
    files = ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
    return (*(Change(file, old, new, reason) for file in files), *_ALWAYS)


def apply(changes: Sequence[Change], root: Path) -> None:
    """Change the source below ``root``; BuildError where a text is not there exactly once."""
    for change in changes:
        path = root / change.file
        text = path.read_text() if path.is_file() else ""
        n_found = text.count(change.old)
        if n_found != 1:
            raise BuildError(
                f"{change.file} of Horovod's source has {change.old!r} {n_found} times instead of "
                f"once, so it cannot be changed as planned ({change.reason}). "
                f"This is not the release of Horovod {VERSION}."
            )
        path.write_text(text.replace(change.old, change.new))


def digest(changes: Sequence[Change]) -> str:
    """Return what differs when the source that is built does."""
    parts = [SDIST_SHA256, *(part for c in changes for part in (c.file, c.old, c.new))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
