"""`longshore bench remote` with real servers and a directory: every case has a figure."""

from pathlib import Path

import pytest

from longshore.bench import remote
from longshore.errors import BenchError


@pytest.mark.parametrize("server", ["valkey", "redis", "dir", "s3", "mooncake"])
def test_the_cases_of_small_images(server: str, tmp_path: Path) -> None:
    wanted = [name for name in remote.names_for(server) if name.endswith("/256KiB")]
    cases = list(remote.run(server, tmp_path, repeats=1, only=wanted))
    assert {case.name for case in cases} == set(wanted)
    assert all(case.value > 0 and case.reference_value > 0 for case in cases)
    assert not list(tmp_path.iterdir())


def test_a_case_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no case"):
        list(remote.run("dir", tmp_path, only=["server-cpu/256KiB"]))
