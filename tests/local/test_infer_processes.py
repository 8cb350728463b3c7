"""Frames of ``%%infer`` in processes of their own: their memory, their end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.infer_data import write

PEAK = """
import sys
from pathlib import Path
import numpy as np, pandas as pd, pyarrow as pa, pyarrow.parquet as pq
from hydrogen_magic.inference import sources
from hydrogen_magic.node.prediction import options

def high_kb():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

def run(frame):
    source = sources.source(frame)
    result = source.result(options.InferOptions())
    first = 0
    for chunk in source.chunks(4096):
        out = pa.table({"score": pa.array(np.random.rand(chunk.num_rows)),
                        "label": pa.array(["some text"] * chunk.num_rows)})
        if not first:
            result.begin(out.schema)
        result.put(first, out, chunk)
        first += chunk.num_rows
    return result.finish()

rng = np.random.default_rng(0)
n_rows = 500_000
small = pd.DataFrame({"c0": rng.random(50_000)})
MAKE
run(WARM)
Path("/proc/self/clear_refs").write_text("5")
before = high_kb()
done = run(frame)
print(high_kb() - before)
"""


COPY_MIB = 96 if pd.__version__.startswith("2.") else 0


IN_MEMORY = "frame = pd.DataFrame({f'c{n}': rng.random(n_rows) for n in range(25)})"


ON_DISK = """
small.to_parquet(sys.argv[1] + "/small.parquet")
path = sys.argv[1] + "/rows.parquet"
tens = pa.table({f"c{n}": rng.integers(0, 10, 50_000) for n in range(25)})
with pq.ParquetWriter(path, tens.schema) as writer:
    for _ in range(30):
        writer.write_table(tens)
frame, small = path, sys.argv[1] + "/small.parquet"
"""


@pytest.mark.parametrize(
    ("make", "most_mib"),
    [(IN_MEMORY, 13 + 25 + COPY_MIB), (ON_DISK, 150)],
    ids=["pandas", "parquet"],
)
def test_memory_holds_the_result_and_little_more(tmp_path: Path, make: str, most_mib: int) -> None:
    """Of 100 MB in pandas: 4 MB of scores and 9 MB of texts. Of 300 MB in Parquet: a few row groups.

    Pandas 2 does not share columns between frames, so a result has its own of all of them.
    """
    code = PEAK.replace("MAKE", make).replace("WARM", "small")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=True,
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) / 1024 < most_mib


def test_a_kernel_that_ends_leaves_nothing(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.parquet", 0, 10)
    code = (
        "import sys, pyarrow as pa\n"
        "from pathlib import Path\n"
        "from hydrogen_magic.inference import sources\nfrom hydrogen_magic.node.prediction import options\n"
        f"rows = Path({str(rows)!r})\n"
        "result = sources.source(rows).result(options.InferOptions(only=True))\n"
        "result.begin(pa.schema([('n', pa.int8())]))\n"
        "result.put(0, *[pa.table({'n': pa.array([1], pa.int8())})] * 2)\n"
        "print(len(list(rows.parent.iterdir())))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.split() == ["2"], "the unfinished file was there"
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]
