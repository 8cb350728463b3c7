"""What is imported, seen in a fresh interpreter: a rank and a kernel pay only for what they use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NOTHING = "set()"


def loaded(code: str, names: str) -> str:
    """Run ``code``; return those of the modules ``names`` that it has imported, as a set is printed."""
    program = f"import sys\n{code}\nprint(set({names.split()!r}) & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FRAMEWORKS = "torch numpy horovod tensorflow jax pyspark tqdm pyarrow polars"
OF_NOTEBOOKS = "IPython ipykernel zmq pandas psutil rich traitlets"


def test_a_rank_imports_no_framework_and_nothing_of_a_notebook() -> None:
    """Nor do closures and shards."""
    code = (
        "import hydrogen_magic as hm, hydrogen_magic.node.worker.main\n"
        "assert hm.rank() == 0 and hm.world_size() == 1\n"
        "from hydrogen_magic.node.worker import namespace\n"
        "from hydrogen_magic.serialization import pickler, result_stream\n"
        "section = result_stream.Packer(pickler.Pickler).pack('', [1, {'a': b'x' * 10000}])\n"
        "result_stream.unpack([section])\n"
        "assert hm.shard([1, 2, 3]) == [1, 2, 3] and hm.shard({'x': range(3)})"
    )
    assert loaded(code, f"{FRAMEWORKS} {OF_NOTEBOOKS}") == NOTHING


@pytest.mark.parametrize(
    "has_loader",
    [False, pytest.param(True, marks=pytest.mark.exhaustive)],  # it imports torch
)
def test_a_stream_imports_torch_for_a_dataloader_only(has_loader: bool, tmp_path: Path) -> None:
    code = (
        "import pyarrow as pa, pyarrow.parquet\n"
        f"file = {str(tmp_path / 'rows.parquet')!r}\n"
        "pa.parquet.write_table(pa.table({'x': range(4)}), file)\n"
        "import hydrogen_magic as hm\n"
        "rows = hm.shard(file, batch_size=2).to_numpy()\n"
        "assert [batch['x'].tolist() for batch in rows] == [[0, 1], [2, 3]]\n"
        "assert 'torch' not in sys.modules\n"
    )
    if has_loader:
        code += (
            "from torch.utils.data import DataLoader\n"
            "read = DataLoader(rows.to_torch(), batch_size=None, num_workers=1)\n"
            "assert [batch['x'].tolist() for batch in read] == [[0, 1], [2, 3]]"
        )
    assert loaded(code, "tensorflow jax") == NOTHING


@pytest.mark.spark
def test_spark_is_known_without_being_imported() -> None:
    code = (
        "import pandas as pd\n"
        "from hydrogen_magic.inference import sources\n"
        "assert sources.kind_of(pd.DataFrame()) == 'pandas' and sources.kind_of(3) is None\n"
        "loaded = {'pyspark', 'polars', 'pyarrow.dataset'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "from pyspark.sql.classic.dataframe import DataFrame\n"
        "from pyspark.sql.connect.dataframe import DataFrame as Remote\n"
        "for kind in (DataFrame, Remote):\n"
        "    assert sources.kind_of(object.__new__(kind)) == 'spark', kind"
    )
    assert loaded(code, "torch") == NOTHING
