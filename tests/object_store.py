"""An S3 server on this machine, in memory; never the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import datasets
import fsspec
import pytest

BUCKET = "s3://bucket"


@contextmanager
def object_store() -> Iterator[fsspec.AbstractFileSystem]:
    """Serve an empty bucket while a `with` block runs, for this process and for those that it starts."""
    pytest.importorskip("s3fs", reason="the test extra is not installed")
    server = pytest.importorskip("moto.server", reason="the test extra is not installed").ThreadedMotoServer(
        "127.0.0.1", 0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # datasets reads no URL offline
        patch.delenv("AWS_PROFILE", raising=False)
        file_system = fsspec.filesystem("s3", skip_instance_cache=True)
        file_system.mkdir(BUCKET)
        try:
            yield file_system
        finally:
            fsspec.filesystem("s3").clear_instance_cache()
            server.stop()
