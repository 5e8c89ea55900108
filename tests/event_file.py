"""Event files as the recorder writes them, of events that a test has made."""

import json
from collections.abc import Iterable
from pathlib import Path

from longshore.cache.events import Event


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Append `events` to the file of JSON lines."""
    with path.open("a") as file:
        file.writelines(json.dumps(event.as_json()) + "\n" for event in events)
