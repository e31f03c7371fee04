"""The JSON Schema of a record, as a file that other tools can read.

Owns: `records/schema/capacity-evidence-record-v1.json`. `python -m gateway.evidence.schema [DIRECTORY]` writes it.
Promises: the file is made from the pydantic model alone, the same bytes every time.
Talks to: `record`.
"""

import json
import sys
from pathlib import Path

from gateway.evidence.record import Record

FILE_NAME = "capacity-evidence-record-v1.json"


def schema_text() -> str:
    """The schema as indented JSON text, ending in a line end."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Record.model_json_schema(by_alias=True)}
    return json.dumps(schema, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def write(directory: Path) -> Path:
    """Write the schema file into `directory`; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    path.write_text(schema_text(), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write(Path(sys.argv[1] if len(sys.argv) > 1 else "records/schema")))
