"""Settings of the HTTP server, apart from it: other commands need not import a web server."""

from __future__ import annotations

import os
from dataclasses import dataclass

PORT = 8000  # where ``port=`` says none


@dataclass
class HttpConfig:
    """``http.*``: how ``python -m serve`` listens. The port is ``port=``."""

    host: str = "127.0.0.1"  # 0.0.0.0 listens on every interface: give an API key with it
    api_key: str | None = None  # what /v1 asks for; None: FOREDRAFT_API_KEY of the environment, else nothing
    model: str | None = None  # the name that requests give; None: that of the target
    slots: int = 8  # requests decoded together
    queue: int = 64  # requests that wait for a slot; more are told to come back (429)
    context: int = 4096  # tokens of a prompt and its answer, at most the target's own limit
    max_tokens: int = 2048  # of an answer that was asked for without a limit
    max_body_bytes: int = 2**20
    grace_seconds: int = 30  # for running requests, once the server is told to stop

    def __post_init__(self) -> None:
        least = {
            "slots": 1,
            "queue": 0,
            "context": 2,
            "max_tokens": 1,
            "max_body_bytes": 1,
            "grace_seconds": 0,
        }
        for key, low in least.items():
            if vars(self)[key] < low:
                raise ValueError(f"http.{key}={vars(self)[key]}: give {low} or more")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("http.api_key is empty: give a key, or null to ask for none")

    @property
    def key(self) -> str | None:
        """The API key to ask for, of the settings or of the environment."""
        return self.api_key or os.environ.get("FOREDRAFT_API_KEY") or None
