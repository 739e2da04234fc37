"""A gateway in front of one fake engine, and a client that talks to it in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from headrace.testing.fake_client import FakeClient
from headrace.testing.fake_gateway import FakeGateway


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    gateway = FakeGateway()
    yield gateway
    gateway.state.observers.close()


@pytest.fixture
def engine(gateway: FakeGateway) -> FakeClient:
    return gateway.engine


@pytest.fixture
def client(gateway: FakeGateway) -> Iterator[TestClient]:
    with TestClient(gateway.app) as client:
        yield client
    gateway.assert_idle()
