"""The two cards that the mailbox's tests run on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hybrid.mailbox_rig import Parts
from tests.kernels.cuda_host.emulator import HostGpu, HostLink, build_library

from moet.base.errors import MoetError
from moet.kernels.cuda.gpu import Gpu
from moet.kernels.cuda.link import Link


def real_card(cache: Path) -> Parts:
    try:
        gpu = Gpu(0, cache)
    except MoetError as error:
        pytest.skip(f"no GPU that moet can use: {error}")
    return gpu, Link(gpu)


@pytest.fixture(scope="module", params=["stand-in", "card"])
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    folder = tmp_path_factory.mktemp("mailbox")
    if request.param == "card":
        return real_card(folder)
    card = HostGpu(build_library(folder))
    return card, HostLink(card)
