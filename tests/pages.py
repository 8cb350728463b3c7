"""A stand-in for a page that draws widgets: it reads comm messages and sends orders."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.jupyter import PATIENCE_S, Client, Kernel, Manager

FAKE_BUNDLE = "export default () => ({})"
"""Stands for the live view's JavaScript, which these tests do not run."""
_CONTROL = "jupyter.widget.control"
_numbers = itertools.count(1)


class Page(Client):
    """One open page of a notebook.

    ``with_subshell``: it sends comm messages to a subshell, as newer front ends do. Without ``wait`` it does
    not wait first until the kernel answers.
    """

    def __init__(self, manager: Manager, *, with_subshell: bool = False, wait: bool = True) -> None:
        super().__init__(manager, wait=wait)
        self.name = f"page-{next(_numbers)}"
        self.models: dict[str, dict[str, Any]] = {}
        """State of the gangs' models by their comm, newest last."""
        self.heard: list[dict[str, Any]] = []
        """Messages of models, in the order they came."""
        self.states: list[str] = []
        """Execution states of the kernel, in the order they came."""
        self._html: list[str] = []
        self.subshell = self._create_subshell() if with_subshell else None

    # ── what comes ──

    def _take(self, message: dict[str, Any]) -> None:
        super()._take(message)
        kind, content = message["msg_type"], message["content"]
        if kind == "status":
            self.states.append(content["execution_state"])
        data = content.get("data", {}) if isinstance(content, dict) else {}
        if kind in ("display_data", "update_display_data"):
            self._html.append(data.get("text/html", ""))
        elif kind == "comm_open" and "place" in data.get("state", {}):
            self.models[content["comm_id"]] = dict(data["state"])
        elif kind == "comm_msg" and content["comm_id"] in self.models:
            if data["method"] == "update":
                self.models[content["comm_id"]].update(data["state"])
            elif data["method"] == "custom":
                self.heard.append({**data["content"], "buffers": message["buffers"]})
        elif kind == "comm_msg" and data.get("method") == "update_states":
            for comm_id, model in data["states"].items():
                if "place" in model["state"]:
                    self.models[comm_id] = model["state"]

    def read_until(self, holds: Callable[[], Any]) -> Any:
        """Read until something holds; return what."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := holds()):
            assert time.monotonic() < deadline, [
                {k: v for k, v in message.items() if k != "buffers"} for message in self.heard[-5:]
            ]
            try:
                self._take(self._receive(self._client.get_iopub_msg, 0.1))
            except queue.Empty:
                pass
        return found

    @property
    def comm_id(self) -> str:
        """The newest gang's model."""
        return self.read_until(lambda: next(reversed(self.models), ""))

    def picture(self, comm_id: str | None = None) -> str:
        """Return the finished picture of a gang, newest by default; empty while there is none."""
        place = self.models[comm_id or self.comm_id]["place"]
        start = f'<div class="{place}"><div class="hydrogen-magic '
        return next((html for html in self._html if html.startswith(start)), "")

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.heard if message["kind"] == kind]

    def ack(self, order_id: str) -> dict[str, Any]:
        """Wait for the answer to an order."""
        return self.read_until(
            lambda: next(
                (m for m in self.of_kind("ack") if m["id"] == order_id and "pending" not in m), None
            )
        )

    def file(self, order_id: str) -> bytes:
        """Wait for a file."""

        def parts() -> list[dict[str, Any]]:
            found = [part for part in self.of_kind("file") if part["id"] == order_id]
            return found if found and len(found) == found[0]["parts"] else []

        return b"".join(bytes(part["buffers"][0]) for part in self.read_until(parts))

    # ── what goes ──

    def order(self, what: str, /, *, comm_id: str | None = None, **rest: Any) -> str:
        """Send an order; return its id."""
        order_id = f"{self.name}.{next(_numbers)}"
        self.send({"do": what, "id": order_id, "client": self.name, **rest}, comm_id)
        return order_id

    def send(self, content: Any, comm_id: str | None = None) -> None:
        data = {"method": "custom", "content": content}
        self.send_message("comm_msg", {"comm_id": comm_id or self.comm_id, "data": data})

    def send_message(self, kind: str, content: dict[str, Any], **more: Any) -> str:
        """Send a message on the shell channel; return its id."""
        self._asked_at = time.monotonic()
        message = self._client.session.msg(kind, content, **more)
        if self.subshell is not None and kind.startswith("comm_") and kind != "comm_info_request":
            message["header"]["subshell_id"] = self.subshell
        self._client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def answer_to(self, msg_id: str) -> dict[str, Any]:
        """Wait for the kernel's answer on the shell channel."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            left = max(0.01, deadline - time.monotonic())
            message = self._receive(self._client.get_shell_msg, left)
            if message["parent_header"].get("msg_id") == msg_id:
                return dict(message["content"])

    def come_back(self) -> None:
        """Do as a reloaded page does, until it has the models that exist."""
        self.answer_to(self.send_message("kernel_info_request", {}))
        comms = self.answer_to(
            self.send_message("comm_info_request", {"target_name": "jupyter.widget"})
        )
        assert comms["comms"]
        opened = {"comm_id": f"control-{self.name}", "target_name": _CONTROL, "data": {}}
        self.send_message("comm_open", opened, metadata={"version": "1.0.0"})
        asked = {"comm_id": opened["comm_id"], "data": {"method": "request_states"}}
        self.send_message("comm_msg", asked)
        self.read_until(lambda: self.models)

    def _create_subshell(self) -> str:
        message = self._client.session.msg("create_subshell_request", {})
        self._client.control_channel.send(message)
        while True:
            reply = self._client.control_channel.get_msg(timeout=PATIENCE_S)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return str(reply["content"]["subshell_id"])


class QuietPage(Page):
    """A page that takes comm messages only while no cell runs, and sends none before."""

    def __init__(self, manager: Manager) -> None:
        self._kept: list[dict[str, Any]] = []
        super().__init__(manager)

    def _take(self, message: dict[str, Any]) -> None:
        is_comm = message["msg_type"].startswith("comm_")
        if is_comm and not all(cell.ended for cell in self._cells.values()):
            self._kept.append(message)
            return
        super()._take(message)
        if not is_comm and all(cell.ended for cell in self._cells.values()):
            kept, self._kept = self._kept, []
            for each in kept:
                super()._take(each)


def show_widgets(kernel: Kernel, folder: Path) -> None:
    """Make a kernel use the stand-in for the live view's file."""
    bundle = folder / "gang.js"
    bundle.write_text(FAKE_BUNDLE)
    kernel.run(
        "import pathlib, hydrogen_magic.views.widget.display as display\n"
        f"display.BUNDLE = pathlib.Path({str(bundle)!r})"
    )
