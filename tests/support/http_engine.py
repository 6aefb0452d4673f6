"""An engine behind HTTP: what a vLLM or SGLang server would be to the loop, without a model.

The server completes a prompt from the seeds alone: token k of a completion is
`FIRST_TOKEN + (seed sum + k) % 3`, its log-probability -0.5 · k - weights / 8, where `weights` is
the version that the server holds.
"""

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trainer.rl.engine import Completion, Request, Sampling, go_on

FIRST_TOKEN = ord("a")


class EngineServer(ThreadingHTTPServer):
    """Holds the version of its weights; `is_stuck` makes it ignore what is pushed."""

    def __init__(self, *, is_stuck: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.version = 0
        self.is_stuck = is_stuck
        self.num_prompts = 0

    def complete(self, body: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Return a group of completions for each request."""
        self.num_prompts += len(body["requests"])
        return [
            [_completion(seed, body["sampling"], self.version) for seed in request["seeds"]]
            for request in body["requests"]
        ]


class HttpEngine:
    """The client: an `Engine` whose weights and sampling are elsewhere."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._version = 0

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        before_batch: Callable[[], None] = go_on,
        is_given_up: Callable[[], bool] = bool,
    ) -> list[tuple[Completion, ...]]:
        before_batch()
        body = {"requests": [asdict(r) for r in requests], "sampling": asdict(sampling)}
        return [
            tuple(
                Completion(tuple(c["ids"]), tuple(c["log_probs"]), c["is_truncated"], c["version"])
                for c in group
            )
            for group in self._post("generate", body)
        ]

    def push_weights(self, version: int) -> None:
        self._version = version
        self._post("push_weights", {"version": version})

    def weights_version(self) -> int:
        return self._version

    def _post(self, action: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{self._url}/{action}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)


@contextmanager
def serve(*, is_stuck: bool = False) -> Iterator[tuple[EngineServer, HttpEngine]]:
    """Yield a server that runs in a thread, and a client of it."""
    with EngineServer(is_stuck=is_stuck) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server, HttpEngine(f"http://127.0.0.1:{server.server_address[1]}")
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: EngineServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer: Any = None
        if self.path == "/generate":
            answer = self.server.complete(body)
        elif not self.server.is_stuck:
            self.server.version = body["version"]
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _completion(seed: list[int], sampling: dict[str, Any], version: int) -> dict[str, Any]:
    """Return letters; a seed whose sum is a multiple of 4 never stops."""
    total, longest = sum(seed), sampling["max_new_tokens"]
    is_truncated = total % 4 == 0
    length = longest if is_truncated else 1 + total % (longest - 1)
    ids = [FIRST_TOKEN + (total + k) % 3 for k in range(length)]
    if not is_truncated:
        ids[-1] = sampling["stop_ids"][0]
    log_probs = [-0.5 * k - version / 8 for k in range(length)]
    return {
        "ids": ids,
        "log_probs": log_probs,
        "is_truncated": is_truncated,
        "version": version,
    }
