"""Certificates of ducks, and authorities that sign them."""

import pytest

from testing.ducks.certificates import LOOPBACK, Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def duck(authority):
    return authority.sign("duck", LOOPBACK)
