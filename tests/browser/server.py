"""A Jupyter server for tests, with its own directories, settings and kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests import kernels

START_S = 180.0
"""A server of a machine under load that starts JupyterLab for the first time."""
_END_S = 10.0
_POLL_S = 0.05

_SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # Cells out of sight stay in the page, where tests look for them.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyter-widgets/jupyterlab-manager/plugin": {"saveState": True},
}

_EXTENSIONS = "jupyterlab nbclassic notebook notebook_shim jupyter_lsp jupyter_server_terminals"
"""Of the server: those with pages, and what they need."""
_PEERS = ("jupyter-distributed",)
"""Extensions that benchmarks install: they change the outputs of ``%%distributed`` cells."""
_UNUSED = (
    "completer console csvviewer debugger extensionmanager fileeditor help htmlviewer hub imageviewer "
    "inspector launcher logconsole lsp markdownviewer mermaid pdf pluginmanager running settingeditor "
    "terminal toc tooltip vega5 workspaces"
)
"""JupyterLab's extensions without which a notebook is edited, run and shown: a third of the work of loading a
page. ``make test-all`` keeps them.
"""


class Server:
    """JupyterLab, Notebook 7 and nbclassic, served by one process."""

    def __init__(self, folder: Path, *, has_pages: bool = True) -> None:
        """``has_pages``: False for one that has kernels alone, and starts in half of the time."""
        self.notebooks = folder / "notebooks"
        self.runs = folder / "home" / "runs"
        """Records of the gangs of this server's kernels."""
        self._log_path = folder / "server.log"
        self._runtime = folder / "runtime"
        self._environment = _environment(folder)
        _write_settings(folder / "lab" / "settings")
        _configure_pages(folder / "config" / "labconfig")
        self._kernels = folder / "data" / "kernels"
        for version in kernels.VERSIONS:
            _write_kernel(self._kernels / kernel_name(version), kernels.spec(version))
        self.notebooks.mkdir()
        self._process = self._start(has_pages)
        try:
            self.url, self._token = self._wait_until_up()
        except BaseException:
            self.stop()
            raise

    def _start(self, has_pages: bool) -> subprocess.Popen[bytes]:
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": "0",
            "ServerApp.open_browser": "False",
            "ServerApp.root_dir": str(self.notebooks),
            "ServerApp.allow_root": "True",
            "LabApp.expose_app_in_browser": "True",
            "JupyterNotebookApp.expose_app_in_browser": "True",
        }
        if not has_pages:
            options["ServerApp.jpserver_extensions"] = str(
                dict.fromkeys(_EXTENSIONS.split(), False)
            )
        arguments = [f"--{name}={value}" for name, value in options.items()]
        with self._log_path.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "jupyterlab" if has_pages else "jupyter_server", *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _wait_until_up(self) -> tuple[str, str]:
        """Return address and token, which the server writes down; then wait for its answer."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            for path in self._runtime.glob("jpserver-*.json"):
                found = _read_json(path)
                if found and _answers(found["url"]):
                    return found["url"], found["token"]
            time.sleep(_POLL_S)
        raise AssertionError(f"the server did not come up in {START_S} s:\n{self.log()}")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def address(self, path: str, **query: str) -> str:
        """Return a page's address; a browser that opens one with the token may open all others."""
        pairs = "&".join(f"{key}={value}" for key, value in {**query, "token": self._token}.items())
        return f"{self.url}{path}?{pairs}"

    def request(self, method: str, path: str, content: Any = None) -> Any:
        """Ask the server's API; return the answer's JSON, None when it has none."""
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self.url}api/{path}", data, method=method)
        request.add_header("Authorization", f"token {self._token}")
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def start_kernel(self, notebook: str) -> None:
        """Start the kernel that a notebook asks for; the page that opens it finds it there."""
        saved = json.loads((self.notebooks / notebook).read_text())
        kernel = {"name": saved["metadata"]["kernelspec"]["name"]}
        session = {"path": notebook, "name": notebook, "type": "notebook", "kernel": kernel}
        self.request("POST", "sessions", session)

    def is_idle(self, notebook: str) -> bool:
        """Return whether the server takes a notebook's kernel for idle."""
        return all(s["kernel"]["execution_state"] == "idle" for s in self._sessions(notebook))

    def move_kernel(self, notebook: str, to: str) -> None:
        """Have a notebook's kernel as another's, as when a reader renames the notebook."""
        for session in self._sessions(notebook):
            self.request("PATCH", f"sessions/{session['id']}", {"path": to, "name": to})

    def end_kernels(self, notebook: str | None = None) -> None:
        """End a notebook's kernel, or all there are, as a reader does who shuts them down."""
        for session in self._sessions(notebook):
            self.request("DELETE", f"sessions/{session['id']}")

    def _sessions(self, notebook: str | None) -> list[dict[str, Any]]:
        return [s for s in self.request("GET", "sessions") if notebook in (None, s["path"])]

    def new_kernel(self, version: str, env: dict[str, str]) -> str:
        """Start a kernel without a notebook, with these variables; return its id."""
        name = f"{kernel_name(version)}-{len(list(self._kernels.iterdir()))}"
        _write_kernel(self._kernels / name, {**kernels.spec(version), "env": env})
        kernel_id: str = self.request("POST", "kernels", {"name": name})["id"]
        return kernel_id

    def stop(self) -> None:
        """End the server and wait for its end."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment(folder: Path) -> dict[str, str]:
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "lab/settings",
        "JUPYTERLAB_WORKSPACES_DIR": "lab/workspaces",
        "IPYTHONDIR": "ipython",
        "HYDROGEN_MAGIC_HOME": "home",
    }
    for name in places.values():
        (folder / name).mkdir(parents=True, exist_ok=True)
    return {**os.environ, **{variable: str(folder / name) for variable, name in places.items()}}


def _write_settings(folder: Path) -> None:
    for plugin, settings in _SETTINGS.items():
        path = folder / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))


def _configure_pages(folder: Path) -> None:
    folder.mkdir()
    # Without it each page has the server start Node.js, to see whether JupyterLab is to be built again.
    unused = [] if os.environ.get("JUPYTERLAB_EXTENSIONS") == "all" else _UNUSED.split()
    disabled = (*_PEERS, *(f"@jupyterlab/{name}-extension" for name in unused))
    config = {"disabledExtensions": dict.fromkeys(disabled, True), "buildCheck": False}
    (folder / "page_config.json").write_text(json.dumps(config))


def kernel_name(version: str) -> str:
    """Return the kernelspec's name of an ipykernel version."""
    return f"ipykernel-{version}"


def _write_kernel(folder: Path, spec: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None  # still being written


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}api", timeout=5):
            return True
    except OSError:
        return False
